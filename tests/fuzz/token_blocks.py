"""Blocks that read along tokens, or compute with their number: where padded rows could reach live ones."""

from __future__ import annotations

from fuzz.blocks import catalogue

TOKENS = {
    "mean": "h = h - h.mean(-2, keepdim=True)",
    "mean_kept": "keep# = h.mean(-2)",
    "sum_of_all": "h = h * 0.9 + h.sum().tanh()",
    "maximum": "h = h - h.amax(-2, keepdim=True)",
    "minimum_index": "h = h + h.argmin(-2, keepdim=True)",
    "maximum_row": "h = h + h.gather(-2, h.argmax(-2, keepdim=True))",
    "aminmax": "low, high = torch.aminmax(h, dim=-2, keepdim=True)\nh = (h - low) / (high - low + 1)",
    "variance": "h = h / (1 + h.var(-2, keepdim=True, unbiased=<<True||False>>))",
    "std_mean": "std, mean = torch.std_mean(h, -2, keepdim=True, unbiased=False)\nh = (h - mean) / (std + 1)",
    "median": "h = h - h.<<median(-2, keepdim=True).values||nanmedian(-2, keepdim=True).values||median()>>",
    "mode": "h = h + h.round().mode(-2, keepdim=True).values",
    "kth_value": "h = h - h.kthvalue(1, -2, keepdim=True).values",
    "quantile": "h = h - h.quantile(0.5, -2, keepdim=True)",
    "norm": "h = h / (1 + h.norm(dim=-2, keepdim=True<<||, p=1||, p=float('inf')>>))",
    "product": "h = h + h.tanh().prod(-2, keepdim=True)",
    "logsumexp": "h = h - h.logsumexp(-2, keepdim=True)",
    "zero_rows": "h = h * (1 + (<<h||x>> == 0).all(-1).sum())",
    "zeros": "h = h + (<<h||x>> == 0).sum() + torch.count_nonzero(h, -1)[..., None] * 0.1",
    "all": "h = h + <<h||x||ids>>.all()",
    "any": "h = h + (h > <<1||2>>).any(-2, keepdim=True)",
    "all_flags": "h = torch.where(flags.<<all||any>>(), h, -h)",
    "equal_rows": "h = h + (h == h[..., :1, :]).all(-2).sum()",
    "isnan": "h = torch.where(h.isnan().any(), 0.0, h)",
    "largest_id": "h = h + ids.<<max()||min()||amax(-1, keepdim=True)[..., None]||sum()>> * 0.1",
    "softmax": "h = h + h.softmax(-2) * 3",
    "log_softmax": "h = h.log_softmax(-2) * 0.1",
    "cumsum": "h = h.cumsum(-2) * 0.2",
    "cumprod": "h = h.tanh().cumprod(-2)",
    "cummax": "h = h.<<cummax||cummin>>(-2).values",
    "logcumsumexp": "h = h.clamp(-3, 3).logcumsumexp(-2)",
    "reverse_cumsum": "h = h.flip(-2).cumsum(-2).flip(-2) * 0.2",
    "flip": "h = h + 0.5 * h.flip(<<-2||(-2, -1)>>)",
    "roll": "h = h + 0.5 * h.roll(<<1||-1>>, <<-2||(-2)>>)",
    "roll_flat": "h = h + 0.5 * h.roll(<<1||8||-3>>)",
    "sort": "h = h.sort(dim=-2, stable=True<<||, descending=True>>).values",
    "argsort_gather": "h = h.gather(-2, h.argsort(dim=-2, stable=True))",
    "sort_and_back": """
order = h[..., 0].argsort(dim=-1, stable=True)
moved = rows_at(h, order) * 2
h = torch.empty_like(h).scatter(-2, order[..., None].expand(h.shape), moved)""",
    "topk": "h = h + h.topk(<<1||1||2>>, -2).values.sum(-2, keepdim=True)",
    "topk_largest_not": "h = h - h.topk(1, -2, largest=False).values",
    "last_row": "h = h + h[..., -1:, :]",
    "last_row_kept": "keep# = h[..., -1, :]",
    "first_row": "h = h - h[..., :1, :]",
    "middle_row": "h = h + h[..., T // 2 : T // 2 + 1, :]",
    "halves": "h = h + h[..., : (T + 1) // 2, :].mean(-2, keepdim=True)",
    "every_other": "keep# = h[..., ::2, :]",
    "negative_step": "h = h + h[..., torch.arange(T - 1, -1, -1, device=h.device), :]",
    "fft": "h = torch.fft.<<fft(h, dim=-2).real||ifft(h, dim=-2).real||fft(h, dim=-2).abs()>> * 0.3",
    "rfft_and_back": "h = h + torch.fft.irfft(torch.fft.rfft(h, dim=-2), n=T, dim=-2)",
    "ihfft_kept": "keep# = torch.fft.ihfft(h, dim=-2).real",
    "quantised_tensor": """
scale = h.abs().<<amax()||amax(-2, keepdim=True)>> / 7 + 1e-3
h = (h / scale).<<long()||round()||to(torch.int8)>>.to(h.dtype) * scale""",
    "index_from_mean": """
@self.table# = nn.Parameter(torch.randn(6, 8))
h = h + self.table#[((h - h.mean(-2, keepdim=True)) * 2).long().clamp(0, 5)[..., 0]]""",
    "index_from_count": """
@self.table# = nn.Embedding(4, 8)
h = h + self.table#((h > 0).sum().remainder(4))""",
    "embedding_of_rank": """
@self.ranks# = nn.Embedding(64, 8)
h = h + self.ranks#((h[..., 0, None] > h[..., None, :, 0]).sum(-1))""",
    "histogram": "h = h + torch.histc(h.detach().float(), 4, -2, 2).to(h.dtype).repeat(2) * 0.1",
    "bincount": "h = h + torch.bincount(ids.reshape(-1), minlength=12)[:8] * 0.1",
    "unique": "h = h + torch.unique(<<ids||h.round()>>).numel() * 0.1",
    "bucketize": "h = h + torch.bucketize(h, h[..., 0].flatten().sort().values) * 0.1",
    "searchsorted": "h = h + torch.searchsorted(h.transpose(-1, -2).sort(-1).values.contiguous(), h.transpose(-1, -2).contiguous()).transpose(-1, -2) * 0.1",
    "boolean_rows": "h = h + h[flags].sum(0)",
    "boolean_values": "h = h + h[h > 0.5].sum() * 0.1",
    "masked_mean": "h = h - (h * flags[..., None]).sum(-2, keepdim=True) / flags.sum(-1)[..., None, None].clamp_min(1)",
    "nonzero": "h = h + (h[..., 0] > 0).nonzero().shape[0]",
    "scatter_by_id": """
sums = h.new_zeros(*h.shape[:-2], 12, 8).scatter_add(-2, ids[..., None].expand(h.shape), h)
h = h + rows_at(sums, ids) * 0.2""",
    "index_add": "h = h + h.new_zeros(12, 8).index_add(0, ids.reshape(-1), h.reshape(-1, 8)).mean(0)",
    "index_put": "h = h.index_put((ids[:1].clamp(max=0),), h[:1] * 2)",
    "row_by_id": "h = h + rows_at(h, ids % T)",
    "row_by_clamped_id": "h = h + rows_at(h, ids.clamp(max=T - 1))",
    "gram": "h = h + (h.transpose(-1, -2) @ h).tanh().mean(-1)[..., None, :]",
    "distances": "h = h + torch.cdist(h, h).mean(-1, keepdim=True) * 0.3",
    "diff": "h = h + torch.diff(h, dim=-2, prepend=<<h[..., :1, :]||h[..., -1:, :]>>)",
    "standardised": "h = (h - h.mean(-2, keepdim=True)) / (h.var(-2, keepdim=True, unbiased=False) + 1e-2).sqrt()",
    "instance_norm": "h = F.instance_norm(h.transpose(-1, -2).reshape(-1, 8, T), eps=0.1).transpose(-1, -2).reshape(h.shape)",
    "pooled": "h = h + F.adaptive_avg_pool1d(h.transpose(-1, -2), 1).transpose(-1, -2)",
    "pool_of_three": "h = h + F.max_pool1d(h.transpose(-1, -2), 3, 1, 1).transpose(-1, -2)",
    "interpolated": "keep# = F.interpolate(h.transpose(-1, -2).reshape(-1, 8, T), 4, mode='linear')",
    "covariance": "keep# = torch.cov(h.reshape(-1, 8).t())",
    "loss": "keep# = F.mse_loss(h, h.roll(1, -1))",
    "trapezoid": "h = h + torch.trapezoid(h, dim=-2)[..., None, :]",
    "cond": "h = torch.cond(h.sum() > 0, lambda z: z * 2, lambda z: z - 1, (h,))",
}

SIZES = {
    "divide": "h = h / T",
    "root": "h = h * (1 / T**0.5)",
    "times_tokens": "h = h + 0.1 * T",
    "log_of_size": "h = h * math.log(T + 1)",
    "full_of_size": "h = h + torch.full((T, 1), float(T), device=h.device)",
    "places": "h = h + torch.arange(T, device=h.device)[:, None] * 0.1",
    "places_from_the_end": "h = h + torch.arange(T - 1, -1, -1, device=h.device)[:, None] * 0.1",
    "linspace": "h = h + torch.linspace(0, 1, T, device=h.device)[:, None]",
    "last_place": "h = torch.where(torch.arange(T, device=h.device)[:, None] == T - 1, -h, h)",
    "place_table": "@self.places# = nn.Embedding(64, 8)\nh = h + self.places#(torch.arange(T, device=h.device))",
    "branch": "h = h * 2 if T > <<2||6||8>> else h - 1",
    "branch_on_parity": "if T % 2 == <<0||1>>:\n    h = h.flip(-1)",
    "branch_on_one": "if T == 1:\n    h = h * 3",
    "branch_with_attention": """
if T > <<3||8>>:
    h = like_rows([ops.mix(z) for z in rows_of(h * 0.5)], h)""",
    "size_kept": "keep# = T",
    "size_tensor": "h = h + torch.tensor(T, device=h.device) * 0.1",
    "size_of_view": "h = h / h.transpose(-1, -2).flatten(-2).shape[-1]",
    "numel": "h = h * (8.0 / h.numel())",
    "eye": "h = h + torch.eye(T, 8, device=h.device)",
    "size_sum": "h = h + torch.ones(T, device=h.device).sum()",
    "reshape_by_two": "if T % 2 == 0:\n    h = h + h.unflatten(-2, (T // 2, 2)).mean(-2).repeat_interleave(2, -2)",
    "truncate": "h = F.pad(h[..., : min(T, 4), :], (0, 0, 0, T - min(T, 4)))",
}
TOKENS, SIZES = catalogue(TOKENS), catalogue(SIZES)
