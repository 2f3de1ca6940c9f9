"""Blocks that compute with integers: what is concluded of their padding decides more than that of floats.

Sliced, repeated, looked up, narrow ones: each was wrong once (tests/test_integer_tails.py).
"""

from __future__ import annotations

from fuzz.blocks import catalogue

INTEGERS = {
    "sums_of_slices": """
part = <<ids[..., :-1]||ids[..., 1:]||ids[..., :-2]||ids[..., ::2]||ids.flip(-1)[..., :-1]||ids[..., 1:] - ids[..., :-1]>>
h = h + part.<<sum(-1, keepdim=True)[..., None]||sum()||count_nonzero()>> * 0.1""",
    "flags_of_slices": """
found = <<ids[..., :-1] > 3||ids[..., 1:] == ids[..., :-1]||~flags[..., :-1]||flags[..., 1:] & flags[..., :-1]>>
h = torch.where(found.<<any()||all()>>, h, -h)""",
    "numbers_out_of_range": """
found = <<ids.byte() <= -1||ids.char() >= 200||ids.int() < 3_000_000_000||ids.byte() > 300||ids.short() >= -40000>>
h = h + (found * ids[..., :1]).<<sum()||sum(-1, keepdim=True)[..., None]>> * 0.1""",
    "narrow": """
narrow = (ids.<<byte()||char()||short()>><< * 30|| // 300||.clamp(min=-1)||.clamp(max=9)||.clamp(min=2)>>)
h = h + (narrow<<|| + 1|| < 0|| > 100>>).sum(<<||-1, keepdim=True>>).reshape(-1)[:1] * 0.01""",
    "sums_of_narrow": "h = h + ((ids >= 0) * 100).cumsum(-1, dtype=torch.<<uint8||short>>)[..., None] * 0.01",
    "triangle": "h = h + ids[..., None, :].expand(*ids.shape, T)<<.tril()||.triu()||.triu(1)||>>.sum(-1)[..., None] * 0.1",
    "repeated": "h = h + ids<<.repeat_interleave(2, -1)||.repeat(*(1 for _ in ids.shape[1:]), T)||[..., :1].expand(ids.shape)>>.sum() * 0.01",
    "windows_kept": "keep# = F.pad(<<ids||ids > 3||ids.byte()>>, (<<2, 0||1, 1>>)).unfold(-1, 3, 1)",
    "windows_read": "h = h + F.pad(ids, (2, 0)).unfold(-1, 3, 1).<<sum(-1)||amax(-1)>>[..., None] * 0.1",
    "running_count": "h = h + (<<flags||ids > 3||ids != 0>>).cumsum(-1<<||, dtype=torch.int32>>)[..., None] * 0.1",
    "place_of_flags": """
@self.places# = nn.Embedding(64, 8)
h = h + self.places#((flags.int().cumsum(-1) - 1).clamp(min=0))""",
    "last_flag": "h = h + rows_at(h, (flags.int().sum(-1, keepdim=True) - 1).clamp(min=0))",
    "looked_up": """
@self.register_buffer("kinds#", torch.arange(12) % 5 - 1)
h = h + (self.kinds#[ids] <<> 0||< 0||== -1||* ids>>).<<sum()||any()||sum(-1, keepdim=True)[..., None]>> * 0.1""",
    "looked_up_and_written": """
@self.register_buffer("kinds#", torch.zeros(12, dtype=torch.int32))
self.kinds#[0] += 1
h = h + self.kinds#[ids].sum() * 0.1""",
    "table_through_table": """
@self.register_buffer("order#", torch.arange(11, -1, -1))
@self.table# = nn.Embedding(12, 8)
h = h + self.table#(self.order#[ids])""",
    "shift_right": """
@self.table# = nn.Embedding(13, 8)
h = h + self.table#(F.pad(ids[..., :-1], (1, 0), value=12))""",
    "changes": """
new = torch.diff(ids, dim=-1, prepend=ids[..., :1]) != 0
h = h + new.<<sum()||cumsum(-1)[..., None]||any()>> * 0.1""",
    "same_id": "h = h + ((ids[..., None] == ids[..., None, :]) & flags[..., None, :]).sum(-1)[..., None] * 0.1",
    "kept": "keep# = <<ids[..., :-1]||ids[..., ::2]||ids.repeat_interleave(2, -1)||ids.char() * 30||(ids > 3).cumsum(-1)||ids.argsort(-1, stable=True)||torch.stack([ids, ids + 1], -1)>>",
    "bits": "h = h + (<<ids & 3||torch.bitwise_or(ids, 4)||ids ^ 1||~ids||ids.bitwise_left_shift(60)>>).<<sum()||amax(-1, keepdim=True)[..., None]>> % 7 * 0.1",
    "chosen": "h = h + torch.where(<<flags||ids > 5>>, ids, <<0||-1||7>>).<<sum()||cumsum(-1)[..., None]||amin(-1, keepdim=True)[..., None]>> * 0.1",
}
INTEGERS = catalogue(INTEGERS)
