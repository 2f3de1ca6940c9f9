"""Blocks that work on rows, state and memory: features, buffers, writes in place, views."""

from __future__ import annotations

from fuzz.blocks import catalogue

FEATURES = {
    "linear": "@self.linear# = nn.Linear(8, 8)\nh = h + self.linear#(h)",
    "mlp": """
@self.up#, self.down# = nn.Linear(8, 16), nn.Linear(16, 8)
h = h + self.down#(F.<<gelu||silu||relu>>(self.up#(h)))""",
    "glu": "@self.glu# = nn.Linear(8, 16, bias=False)\nh = h + F.glu(self.glu#(h))",
    "gate_and_up": """
@self.gate#, self.up# = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
h = h + F.silu(self.gate#(h)) * self.up#(h)""",
    "layer_norm": "@self.norm# = nn.LayerNorm(8)\nh = self.norm#(h)",
    "rms_norm": "@self.norm# = nn.RMSNorm(8)\nh = self.norm#(h)",
    "norm_by_hand": "h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)",
    "batch_norm": """
@self.norm# = nn.BatchNorm1d(8)
h = self.norm#(h.reshape(-1, 8)).reshape(h.shape)""",
    "softmax": "h = h.softmax(-1) * 4",
    "cumsum": "h = h.cumsum(-1) * 0.3",
    "sort": "h = h.sort(dim=-1, stable=True).values",
    "topk": "best, index = h.topk(<<1||3>>, -1)\nh = h + best.sum(-1, keepdim=True) + index[..., :1]",
    "argmax_embedding": """
@self.table# = nn.Embedding(8, 8)
h = h + self.table#(h.argmax(-1))""",
    "gather": "h = h + h.gather(-1, h.argsort(dim=-1, stable=True).flip(-1))",
    "embedding": "@self.words# = nn.Embedding(12, 8)\nh = h + self.words#(ids)",
    "table_by_index": "@self.places# = nn.Parameter(torch.randn(12, 8))\nh = h + self.places#[ids]",
    "one_hot": "@self.hot# = nn.Linear(12, 8)\nh = h + self.hot#(F.one_hot(ids, 12).to(h.dtype))",
    "second_input": "h = h * 0.5 + y<<||.cos()||[..., :1]>>",
    "where_flags": "h = torch.where(flags[..., None], h, <<-h||0.0||h.sin()>>)",
    "experts": """
@self.router#, self.experts# = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8) / 3)
weight, choice = self.router#(h).softmax(-1).topk(2, -1)
h = h + ((h[..., None, None, :] @ self.experts#[choice])[..., 0, :] * weight[..., None]).sum(-2)""",
    "experts_by_nonzero": """
@self.router#, self.experts# = nn.Linear(8, 2), nn.Parameter(torch.randn(2, 8, 8) / 3)
flat, choice = h.reshape(-1, 8), self.router#(h).reshape(-1, 2).argmax(-1)
out = torch.zeros_like(flat)
for e in range(2):
    rows = (choice == e).nonzero().flatten()
    out = out.index_add(0, rows, flat[rows] @ self.experts#[e])
h = h + out.reshape(h.shape)""",
    "bfloat16": "h = h.to(torch.bfloat16).to(h.dtype)",
    "rounding": "h = (h * 4).round() / 4",
    "quantised_rows": """
scale = h.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 7
h = (h / scale).round().to(torch.int8).to(h.dtype) * scale""",
    "integers": "h = h + (h * 2).long().clamp(-3, 3).remainder(<<2||3>>)",
    "complex_features": "h = torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (4, 2)).contiguous()) * (1 + 1j)).flatten(-2) * 0.5",
    "fft_features": "h = torch.fft.fft(h, dim=-1).real * 0.5",
    "cross_entropy_rows": "keep# = F.cross_entropy(h.reshape(-1, 8), ids.reshape(-1) % 8, reduction='none')",
    "training_flag": "h = h * (2 if self.training else 3)",
}

STATE = {
    "count_calls": """
@self.register_buffer("count#", torch.zeros(()))
self.count# += 1
h = h + 0.1 * self.count#""",
    "moving_average": """
@self.register_buffer("mean#", torch.zeros(8))
self.mean#.mul_(0.9).add_(0.1 * h.reshape(-1, 8).mean(0))
h = h - self.mean#""",
    "cache": """
@self.register_buffer("cache#", torch.zeros(64, 8))
self.cache#[:T] = h.reshape(-1, T, 8)[0]
h = h + self.cache#.mean(0)""",
    "cache_by_index": """
@self.register_buffer("cache#", torch.zeros(12, 8))
self.cache#.index_copy_(0, ids.reshape(-1)[:1], h.reshape(-1, 8)[:1])
h = h + self.cache#[ids]""",
    "returned_buffer": """
@self.register_buffer("table#", torch.linspace(0, 1, 8))
keep# = self.table#
h = h + self.table#""",
    "returned_weight": """
@self.scale# = nn.Parameter(torch.ones(8))
keep# = self.scale#[<<:4||::2||:>>]
h = h * self.scale#""",
    "write_input": "x<<.mul_(2)||.add_(h)||[..., 0] = 1||[..., -1, :] += 1||.clamp_(-1, 1)>>\nh = h + x",
    "write_second_input": "y.<<add_(1)||mul_(h.sigmoid())||zero_()>>\nh = h + y",
    "write_ids": "ids.<<add_(1).remainder_(12)||fill_(3)>>\nh = h + ids[..., None]",
}

VIEWS = {
    "write_in_place": "h = h.clone()\nh[..., <<0||1:3||::2>>] = <<0.0||h[..., :1].mean()||1>>",
    "write_last_row": "h = h + 0\nh[..., -1, :] <<+=||*=>> 2",
    "write_masked": "h = h + 0\nh<<[h > 1] = 1.0||.masked_fill_(flags[..., None], 0.5)||[flags] = 2.0>>",
    "write_through_view": "h = h * 1\nview = h[..., <<:4||2:6||::3>>]\nview.<<mul_(3)||relu_()||add_(1)>>",
    "write_rows_by_index": "h = h + 0\nh.reshape(-1, 8).index_fill_(0, torch.tensor([0], device=h.device), 2.0)",
    "out_argument": "out = torch.empty_like(h)\ntorch.<<sin||exp||tanh>>(h.clamp(-2, 2), out=out)\nh = out",
    "alias_kept": "keep# = h\nh = h.<<view(h.shape)||transpose(-1, -2).transpose(-1, -2)||unsqueeze(0).squeeze(0)>>",
    "view_kept": "h = h * 1\nkeep# = h[..., <<:4||-1, :||::2, :||0>>]",
    "input_view_kept": "keep# = x[..., <<:4||-1, :||::2, :||0>>]",
    "transposed_kept": "h = h + 1\nkeep# = h.transpose(-1, -2)",
    "expanded_kept": "keep# = h[..., None, :].expand(*h.shape[:-1], 3, 8)",
    "transpose_twice": "h = (h.transpose(-1, -2).contiguous() * 2).transpose(-1, -2)",
    "flatten": "h = (h.reshape(-1) * 2).reshape(h.shape)",
    "flatten_scaled_by_place": "h = h + torch.arange(h.numel(), device=h.device).reshape(h.shape) * 0.01",
    "reshape_tokens_last": "h = h + h.reshape(8, -1).reshape(h.shape)",
    "strided_rows": "h = h + h.contiguous().as_strided((T, 4), (8, 2))[..., :1]",
    "strided_features": "h = h + h.contiguous().as_strided((T, 8), (1, T)).reshape(T, 8) * 0.5",
    "strided_view_of_view": "h = h + (h * 1)[..., 1:].as_strided((T, 7), (8, 1), 1)[..., :1]",
    "expand": "h = h + h[..., :1].expand(h.shape) * h[..., :1, :].expand(h.shape)",
    "repeat": "h = h + h.repeat_interleave(2, -2)[..., <<::2||1::2||:T>>, :]",
    "doubled": "h = torch.cat([h, h * 2], -2)[..., <<:T||T:||::2>>, :]",
    "stacked": "h = torch.stack([h, h.flip(-1)], -2).mean(-2)",
    "as_integers": "h = h + (h.float().view(torch.int32) & 1)",
    "pad": "h = F.pad(h, (0, 0, <<1, 0||0, 1||2, 1>>))[..., <<:T||-T:>>, :]",
    "unfold": "h = h + F.pad(h, (0, 0, 2, 0)).unfold(-2, 3, 1).mean(-1)",
    "split_features": "one, two = h.chunk(2, -1)\nh = torch.cat([two, one], -1)",
    "shift": "h = h + torch.cat([torch.zeros_like(h[..., :1, :]), h[..., :-1, :]], -2)",
    "shift_left": "h = h + torch.cat([h[..., 1:, :], torch.zeros_like(h[..., :1, :])], -2)",
    "unbind": "h = torch.stack(h.unbind(-1)[::-1], -1)",
    "movedim": "h = h.movedim(-2, 0).contiguous().movedim(0, -2) + 1",
    "outer": "h = h + (h[..., :, None, :] - h[..., None, :, :]).tril().sum(-2) * 0.1",
}
FEATURES, STATE, VIEWS = catalogue(FEATURES), catalogue(STATE), catalogue(VIEWS)
