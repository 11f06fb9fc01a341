"""One step's batch in host numbers, taken once from SGLang's ForwardBatch and shared by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Batch:
    """What a forward pass over a batch needs to know.

    extends: (query start, query end, sequence length, row of the request pool) of each request with new tokens.
    decode_lengths: sequence length of each request that decodes one token; decode_rows: their rows, [B].
    tokens: new tokens of all requests; what lies behind them in the tensors is padding.
    """

    extends: tuple[tuple[int, int, int, torch.Tensor], ...]
    decode_lengths: list[int]
    decode_rows: torch.Tensor | None
    tokens: int


def read_batch(forward_batch: Any) -> Batch:
    """The batch of `forward_batch`, a ForwardBatch of SGLang."""
    rows = forward_batch.req_pool_indices
    extends: list[tuple[int, int, int, torch.Tensor]] = []
    lengths: list[int] = []
    if forward_batch.forward_mode.is_decode_or_idle():
        lengths = host_numbers(forward_batch.seq_lens_cpu, forward_batch.seq_lens)[: forward_batch.batch_size]
        tokens = len(lengths)
    else:
        new = host_numbers(forward_batch.extend_seq_lens_cpu, forward_batch.extend_seq_lens)
        before = host_numbers(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_prefix_lens)
        tokens = 0
        for row, (count, prefix) in enumerate(zip(new, before, strict=True)):
            if count:
                extends.append((tokens, tokens + count, prefix + count, rows[row]))
            tokens += count
    return Batch(tuple(extends), lengths, rows[: len(lengths)] if lengths else None, tokens)


def host_numbers(held: Any, device: torch.Tensor) -> list[int]:
    """The numbers that SGLang keeps on the host where it does, else those of the device."""
    if held is None:
        return device.tolist()
    return held.tolist() if isinstance(held, torch.Tensor) else list(held)
