"""Where the tokens of a batch lie: block tables, or packed lists of slots, from an engine's table of token slots.

One launch for a batch, which reads and writes as much as the sequences are long, however wide the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


def block_table(
    slots: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    width: int,
    *,
    mapping: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The blocks of sequences: int32 [B, width]; entries behind a sequence's end keep what `out` held.

    slots: int32 [requests, context], the slot of each token of each request; the tokens of a block lie side by side.
    rows: int32 or int64 [B], the request of each sequence; lengths: int32 [B], in tokens. mapping: int64, slot of
    another pool for a slot, 0 or less where it has none, which becomes 0. out: int32 [B, at least width] to write.
    """
    if out is None:
        # Of what nobody reads, too, the kernels may form addresses.
        out = torch.zeros(rows.shape[0], width, dtype=torch.int32, device=slots.device)
    grid = (rows.shape[0], triton.cdiv(width, TILE))
    if rows.shape[0] and width:
        _list_kernel[grid](
            slots, rows, mapping, None, lengths, out, slots.stride(0), out.stride(0), width, block_size,
            mapping is not None, False, TILE,
        )  # fmt: skip
    return out


def packed_slots(
    slots: torch.Tensor,
    rows: torch.Tensor,
    first: torch.Tensor,
    cu_lengths: torch.Tensor,
    total: int,
    longest: int,
    *,
    mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots of sequences one behind the other: int32 [total].

    first: int32 [B], the token that each sequence's list begins with; cu_lengths: int32 [B + 1], where it lies in the
    result; longest: of the lists. slots, rows, mapping: as in `block_table`.
    """
    out = torch.empty(total, dtype=torch.int32, device=slots.device)
    if total:
        _list_kernel[(rows.shape[0], triton.cdiv(longest, TILE))](
            slots, rows, mapping, first, cu_lengths, out, slots.stride(0), 0, longest, 1, mapping is not None, True,
            TILE,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["slots_stride", "out_stride", "width"])
def _list_kernel(
    slots,
    rows,
    mapping,
    first,
    lengths,
    out,
    slots_stride,
    out_stride,
    width,
    BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid [sequences, tiles of entries]. lengths: cumulative where PACKED."""
    sequence = tl.program_id(0)
    if PACKED:
        begin = tl.load(lengths + sequence)
        length = tl.load(lengths + sequence + 1) - begin
        slots += tl.load(first + sequence)
        out += begin
    else:
        length = tl.load(lengths + sequence)
        out += sequence.to(tl.int64) * out_stride
    if tl.program_id(1) * TILE * BLOCK < length:
        slots += tl.load(rows + sequence).to(tl.int64) * slots_stride
        entry = tl.program_id(1) * TILE + tl.arange(0, TILE)
        live = (entry * BLOCK < length) & (entry < width)
        slot = tl.load(slots + entry * BLOCK, mask=live, other=0)
        if MAPPED:
            slot = tl.maximum(tl.load(mapping + slot, mask=live, other=0), 0).to(tl.int32)
        tl.store(out + entry, slot // BLOCK, mask=live)
