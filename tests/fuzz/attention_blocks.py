"""Blocks with attention: cut at a splitting op, and uncut."""

from __future__ import annotations

from fuzz.blocks import catalogue

_QKV = """
@self.qkv# = nn.Linear(8, 24)
q, k, v = heads(self.qkv#(h), 3)
"""
_PLACES = "i = torch.arange(T, device=h.device)\n"
_ATTEND = "F.scaled_dot_product_attention"

CUT = {
    "sdpa_causal": f"{_QKV}h = h + join({_ATTEND}(q, k, v, is_causal=True))",
    "sdpa_4d": f"{_QKV}h = h + join({_ATTEND}(q[None], k[None], v[None], is_causal=True)[0])",
    "sdpa_full": f"{_QKV}h = h + join({_ATTEND}(q, k, v))",
    "sdpa_band": f"""{_QKV}{_PLACES}
band = (i[:, None] - i).abs() < <<2||3||5>>
h = h + join({_ATTEND}(q, k, v, attn_mask=band))""",
    "sdpa_bias": f"""{_QKV}{_PLACES}
bias = (-0.5 * (i[:, None] - i).abs()).to(h.dtype).masked_fill(i[:, None] < i, float("-inf"))
h = h + join({_ATTEND}(q, k, v, attn_mask=bias))""",
    "sdpa_flags": f"""{_QKV}
seen = flags[..., None, None, :] | torch.eye(T, dtype=torch.bool, device=h.device)
h = h + join({_ATTEND}(q, k, v, attn_mask=seen))""",
    "sdpa_documents": f"""{_QKV}{_PLACES}
same = (ids[..., None, :, None] == ids[..., None, None, :]) & (i[:, None] >= i)
h = h + join({_ATTEND}(q, k, v, attn_mask=same))""",
    "sdpa_mask_of_values": f"""{_QKV}
seen = (h[..., 0] >= h[..., 0].mean(-1, keepdim=True))[..., None, None, :]
h = h + join({_ATTEND}(q, k, v, attn_mask=seen | torch.eye(T, dtype=torch.bool, device=h.device)))""",
    "sdpa_one_kv_head": f"""{_QKV}
h = h + join({_ATTEND}(q, k[..., :1, :, :], v[..., :1, :, :], is_causal=True, enable_gqa=True))""",
    "sdpa_backwards": f"{_QKV}h = h + join({_ATTEND}(q, k.flip(-2), v.flip(-2), is_causal=True))",
    "sdpa_memory": f"""{_QKV}
@self.memory# = nn.Parameter(torch.randn(2, 2, 4))
memory = self.memory#.expand(*k.shape[:-2], 2, 4)
h = h + join({_ATTEND}(q, torch.cat([memory, k], -2), torch.cat([memory, v], -2)))""",
    "sdpa_cross": f"""
@self.q#, self.kv# = nn.Linear(8, 8), nn.Linear(8, 16)
(q,), (k, v) = heads(self.q#(h), 1), heads(self.kv#(y), 2)
h = h + join({_ATTEND}(q, k, v, is_causal=<<True||False>>))""",
    "sdpa_rotary": f"""{_QKV}{_PLACES}
angle = i[:, None] / torch.tensor([1.0, 10.0], device=h.device)
turn = torch.cat([angle, angle], -1).to(h.dtype)
q = q * turn.cos() + torch.cat([-q[..., 2:], q[..., :2]], -1) * turn.sin()
k = k * turn.cos() + torch.cat([-k[..., 2:], k[..., :2]], -1) * turn.sin()
h = h + join({_ATTEND}(q, k, v, is_causal=True))""",
    "sdpa_complex_rotary": f"""{_QKV}{_PLACES}
turn = torch.polar(torch.ones(T, 2, dtype=h.dtype, device=h.device), i[:, None].to(h.dtype) * 0.3 + h.new_zeros(2))
q = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (2, 2)).contiguous()) * turn).flatten(-2)
h = h + join({_ATTEND}(q, k, v, is_causal=True))""",
    "sdpa_twice": f"""{_QKV}
first = {_ATTEND}(q, k, v, is_causal=True)
h = h + join({_ATTEND}(first, k, v, is_causal=True))""",
    "sdpa_kept": f"{_QKV}keep# = {_ATTEND}(q, k, v, is_causal=True)\nh = h + join(keep#)",
    "mix": "h = h + like_rows([ops.mix(z) for z in rows_of(h * 0.5)], h)",
    "mix_directly": "h = like_rows([ops.mix(z) for z in rows_of(h)], h)",
    "mix_out": """
out = torch.empty_like(h)
for z, o in zip(rows_of(h * 0.5), rows_of(out)):
    ops.mix_out(z, o)
h = h + out""",
    "mix_pair": """
pairs = [ops.mix_pair(z) for z in rows_of(h.sin())]
keep# = pairs[0][<<0||1>>]
h = h + like_rows([one + other for one, other in pairs], h)""",
    "mix_strided": "h = h + like_rows([ops.mix_strided(z) for z in rows_of(h.tanh())], h)",
    "mix_padded": "h = like_rows([ops.mix_padded(z) for z in rows_of(h * 0.5)], h)",
    "mix_transposed": "h = h + like_rows([ops.mix(z.t().contiguous().t()) for z in rows_of(h * 0.5)], h)",
    "mix_list": "h = h + like_rows([ops.mix_list([z, z * 2]) for z in rows_of(h.cos())], h)",
    "halve": """
h = h * <<1.5||2>>
for z in rows_of(h):
    ops.halve(z)""",
    "halve_view": """
h = h + 1
for z in rows_of(h):
    ops.halve(z[:, <<:4||4:||::2>>])""",
    "choose": """
@self.table# = nn.Embedding(8, 8)
picks = torch.empty(h.shape[:-1], dtype=torch.int64, device=h.device)
for z, o in zip(rows_of(h * 2), [picks] if picks.ndim == 1 else list(picks.unbind(0))):
    ops.choose(z, o)
h = h + self.table#(picks)""",
    "append": """
@self.register_buffer("sum#", torch.zeros(8))
for z in rows_of(h.tanh()):
    ops.append(z, self.sum#)
h = h + 0.1 * self.sum#""",
}

UNCUT = {
    "attention_by_hand": f"""{_QKV}
scores = q @ k.transpose(-1, -2) / 2
scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1), float("-inf"))
h = h + join(scores.softmax(-1) @ v)""",
    "full_attention_by_hand": f"{_QKV}h = h + join((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v)",
    "capped_attention_with_sinks": f"""{_QKV}{_PLACES}
@self.sink# = nn.Parameter(torch.randn(2, 1, 1))
scores = (q @ k.transpose(-1, -2) / 8).tanh() * 4
scores = torch.where(i[:, None] >= i, scores, -1e4)
scores = torch.cat([scores, self.sink#.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
h = h + join(scores @ v)""",
    "einsum_attention": f"""{_QKV}
weights = torch.einsum("...qd,...kd->...qk", q, k).tril().exp().tril()
h = h + join(torch.einsum("...qk,...kd->...qd", weights / weights.sum(-1, keepdim=True), v))""",
    "linear_attention": f"{_QKV}h = h + join(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))",
    "causal_linear_attention": f"""{_QKV}
state = (k[..., :, None] * v[..., None, :]).cumsum(-3)
h = (h + join((q[..., None, :] @ state)[..., 0, :])).tanh()""",
    "sparse_attention": f"""{_QKV}
scores = q @ k.transpose(-1, -2)
scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1), -1e9)
index = scores.topk(<<1||2||min(3, T)>>, -1).indices
chosen = torch.full_like(scores, float("-inf")).scatter(-1, index, 0.0)
h = h + join((scores + chosen).softmax(-1) @ v)""",
    "indexed_attention": f"""{_QKV}
index = (q[..., :1, :, :] @ k[..., :1, :, :].transpose(-1, -2)).tril().topk(min(4, T), -1).indices
picked = rows_at(v, index.expand(*v.shape[:-1], -1).flatten(-2)).unflatten(-2, (T, -1))
h = h + join(picked.mean(-2))""",
    "sparse_sdpa": f"""{_QKV}
index = (q[..., :1, :, :] @ k[..., :1, :, :].transpose(-1, -2)).tril().topk(min(2, T), -1).indices
seen = torch.zeros(index.shape[:-1] + (T,), dtype=torch.bool, device=h.device).scatter(-1, index, True)
h = h + join({_ATTEND}(q, k, v, attn_mask=seen))""",
    "causal_convolution": """
@self.conv# = nn.Conv1d(8, 8, 3, groups=<<1||8>>)
h = h + self.conv#(F.pad(h.transpose(-1, -2), (2, 0))).transpose(-1, -2)""",
    "convolution": """
@self.conv# = nn.Conv1d(8, 8, 3, padding=<<1||2>>)
h = h + self.conv#(h.transpose(-1, -2)).transpose(-1, -2)[..., :T, :]""",
    "mixer": "h = h + (h @ h.transpose(-1, -2) / 8).tanh() @ h * 0.1",
    "recurrence": """
decay = (i := torch.arange(T, device=h.device))[:, None] - i
h = torch.where(decay >= 0, 0.5 ** decay.clamp(0).to(h.dtype), 0.0) @ h""",
}
CUT, UNCUT = catalogue(CUT), catalogue(UNCUT)
