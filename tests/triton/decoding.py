"""`decode` of the batches of `problems`, whose sequences have one query each."""

from __future__ import annotations

from typing import Any

import torch
from zyfa_kernels.triton.decode import decode

from tests.triton.problems import SCALE, Batch, batch, block_table, paged


def last_tokens(lengths: list[int], *args: Any, **options: Any) -> Batch:
    """A batch of sequences of `lengths` keys, of which the last is the query's."""
    return batch([(1, length) for length in lengths], *args, **options)


def run_decode(
    b: Batch,
    block: int = 16,
    window: int | None = None,
    layout: str = "split",
    device: str = "cpu",
    lengths: list[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out fp16 and lse on the CPU. lengths: keys of each sequence instead of all that it has."""
    table = block_table(b.keys, block)
    k, v = paged(b.k, b.v, block, table, layout)
    if layout == "kv":
        storage = k._base.to(device)
        k, v = (storage.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (k, v))
    if b.config.qk_format == "int8":
        k = k.view(torch.int8)
    lengths = b.keys if lengths is None else lengths
    arguments = dict(
        seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        max_seqlen_k=max(lengths),
        softmax_scale=SCALE,
        window=window,
        p=b.config.probabilities,
        qk_format=b.config.qk_format,
        offset=b.config.offset,
        delta=b.config.delta,
        out_dtype=torch.float16,
    )
    tensors = (
        torch.cat([x.data for x in b.q]), torch.cat([x.scale for x in b.q]), k, v,
        b.k[0].scale.reshape(-1), b.v[0].scale.reshape(-1),
    )  # fmt: skip
    out, lse = decode(*(x.to(device) for x in tensors), **{**arguments, **options})
    return out.cpu(), lse.cpu()
