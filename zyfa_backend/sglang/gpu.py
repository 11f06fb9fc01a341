"""Attention over SGLang's token pool by the Triton kernels: all requests of a batch at once, no wait for the GPU.

Pages of the pool are blocks of the kernels' where they are large enough. The prefill kernels read K and V from blocks
of 16 tokens at least, so with smaller pages (SGLang's default is 1) each layer first packs the codes of the batch's
sequences side by side: that copies a byte a value once, and K and V are then read in order by every tile of queries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from zyfa_backend import dispatch
from zyfa_backend.device_saturation import DeviceSaturation
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.serving import DTYPES
from zyfa_backend.sglang.batch import host_numbers
from zyfa_backend.sglang.path import Codes, Path

if TYPE_CHECKING:
    from zyfa_backend.sglang.backend import Served, ZyfaAttnBackend

BLOCKS = (128, 64, 32, 16)
TILE = 128  # keys between renewals of the running maximum: where a sequence may be cut without a change of its bits


@dataclass
class Packed:
    """Sequences of a step packed side by side: their slots, where each begins, the most keys of one."""

    slots: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_k: int
    first: list[int]


@dataclass
class Step:
    """One batch in the terms of the kernels, shared by all layers.

    tokens: new tokens of all requests. rows: of the request pool, [B]. seqlens_k: int32 [B], keys with the new ones.
    before, new: on the host, tokens of each request that are cached and that are new; None for a decode, until needed.
    window_slots: slots of the new tokens in the window layers' pool. tables: block tables by "in that pool".
    """

    tokens: int
    rows: torch.Tensor
    seqlens_k: torch.Tensor
    max_seqlen_k: int
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 1
    before: list[int] | None = None
    new: list[int] | None = None
    window_slots: torch.Tensor | None = None
    captured: bool = False
    tables: dict[bool, torch.Tensor] = field(default_factory=dict)
    packed: dict[tuple[int | None, bool], Packed] = field(default_factory=dict)


class TritonPath(Path):
    """Every GPU's; on tensors of a CPU under Triton's interpreter. Scales are per head, calibrated as on a CPU: that
    waits for the GPU until they are final, which takes 128 tokens, and never while a graph is captured.
    """

    needs_cpu_seq_lens = False
    stores_at_once = True

    def __init__(self, backend: ZyfaAttnBackend) -> None:
        super().__init__(backend)
        if backend.dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported(f"dtype {DTYPES[backend.dtype]} on a GPU (supported: bf16, fp16)")
        self.device = torch.device(backend.device)
        self.page = int(getattr(self.pool, "page_size", 1))
        self.block = next((size for size in BLOCKS if self.page % size == 0), 1)
        self.context = self.slots_of_tokens.shape[1]
        self._served = backend.all_served
        self._graph: Step | None = None
        self._saturation: dict[str, DeviceSaturation] = {}

    def kernels(self, qk_dim: int, v_dim: int, dtype: str) -> dict[str, str]:
        shape = dispatch.Shape(qk_dim, v_dim, "causal", self.config, dtype)
        prefill = dispatch.select(shape, "cuda")
        return {"causal": prefill, "decode": f"triton/{dispatch.kernel_name(replace(shape, phase='decode'))}"}

    def write_name(self, dim: int) -> str:
        return f"triton/rotate-quantize-hd{dim}"

    def encode(self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> Codes:
        k, v = self._heads(layer, served, forward_batch, k, v)
        k_codes, v_codes = (torch.empty(x.shape, dtype=torch.uint8, device=x.device) for x in (k, v))
        self._write(served, k, v, (k_codes, v_codes), torch.arange(k.shape[0], device=k.device))
        return k_codes, v_codes

    def store(
        self,
        layer: Any,
        served: Served,
        forward_batch: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        step: Step | None = None,
    ) -> None:
        """As `Path.store`, in one launch."""
        k, v = self._heads(layer, served, forward_batch, k, v)
        slots = forward_batch.out_cache_loc[: k.shape[0]]
        if served.in_window_pool:
            known = None if step is None else step.window_slots
            slots = self._window_slots(slots) if known is None else known[: slots.shape[0]]
        if step is None or not step.captured:  # of a replay `plan_graph`'s caller notes it
            self.note_written(served, slots, slots)
        self._write(served, k, v, self.buffers(layer), slots)
        dispatch.counters.add(served.write_kernel, k.shape[0])

    def _heads(self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> Codes:
        k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        self.observe(layer, served, forward_batch, k, v)
        return k, v

    def _write(self, served: Served, k: torch.Tensor, v: torch.Tensor, to: Codes, slots: torch.Tensor) -> None:
        """Rotate K, quantise both and write them to caches of one token a block."""
        from zyfa_kernels.triton.rotate_quantize import rotate_quantize_write

        rotate_quantize_write(
            k, v, to[0].unsqueeze(1), to[1].unsqueeze(1), slots, served.scales.k, served.scales.v,
            rotation=self.config.rotation, qk_format=self.config.qk_format, saturated=self._saturated(served).counts,
        )  # fmt: skip

    def _saturated(self, served: Served) -> DeviceSaturation:
        found = self._saturation.get(served.name)
        if found is None:
            found = self._saturation[served.name] = DeviceSaturation(served.name, self.device)
        return found

    def plan(self, forward_batch: Any) -> Step:
        """The step of a batch that runs outside of graphs."""
        batch = forward_batch
        rows, lengths = batch.req_pool_indices[: batch.batch_size], batch.seq_lens[: batch.batch_size].int()
        if batch.forward_mode.is_decode_or_idle():
            longest = self.context
            if batch.seq_lens_cpu is not None:
                longest = max(batch.seq_lens_cpu[: batch.batch_size].tolist(), default=0)
            step = Step(batch.batch_size, rows, lengths, longest)
        else:
            new = host_numbers(batch.extend_seq_lens_cpu, batch.extend_seq_lens)
            before = host_numbers(batch.extend_prefix_lens_cpu, batch.extend_prefix_lens)
            longest = max((a + b for a, b in zip(before, new, strict=True)), default=0)
            starts = self._on_device(_offsets(new))
            step = Step(sum(new), rows, lengths, longest, starts, max(new, default=0), before, new)
        if self._mapping() is not None and batch.out_cache_loc is not None:
            step.window_slots = self._window_slots(batch.out_cache_loc)
        for served in self._served():
            # Before the layers, so that they only launch.
            if step.new is None or self.block > 1:
                self._table(step, served)
            else:
                self._packed(step, served)
        return step

    def extend(self, layer: Any, served: Served, step: Step, query: torch.Tensor, own: Codes | None) -> torch.Tensor:
        from zyfa_kernels.triton.prefill import prefill

        assert step.cu_seqlens_q is not None
        if self.device.type == "cuda":
            # Here and not where the pool is written, which a captured graph may do without the host.
            saturation = self._saturated(served)
            saturation.begin()  # after the first prefill, which is the server's own warm-up
            saturation.look()
        tokens = step.tokens
        out = torch.empty(*query.shape[:2], layer.v_head_dim, dtype=query.dtype, device=query.device)
        out[tokens:].zero_()
        codes, q_scale = self._query(query[:tokens])
        where: dict[str, Any]
        if own is None and self.block > 1:
            k, v = (self._paged(x, self.block) for x in self.buffers(layer))
            where = {"seqlens_k": step.seqlens_k, "block_table": self._table(step, served)}
            longest = step.max_seqlen_k
        else:
            packed = self._packed(step, served)
            k, v = self._gather(layer, step, packed, own)
            where, longest = {"cu_seqlens_k": packed.cu_seqlens_k}, packed.max_seqlen_k
        prefill(
            codes, q_scale, k, v, served.scales.k, served.scales.v,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=longest,
            causal=True,
            out=out[:tokens],
            **where,
            **self._numerics(layer, served),
        )  # fmt: skip
        return out

    def decode(self, layer: Any, served: Served, step: Step, query: torch.Tensor, own: Codes | None) -> torch.Tensor:
        from zyfa_kernels.triton.decode import decode

        if own is not None:
            return self.extend(layer, served, self._as_extend(step), query, own)
        count = step.tokens
        out = torch.empty(*query.shape[:2], layer.v_head_dim, dtype=query.dtype, device=query.device)
        out[count:].zero_()
        codes, q_scale = self._query(query[:count])
        k, v = (self._paged(x, self.block) for x in self.buffers(layer))
        decode(
            codes, q_scale, k, v, served.scales.k, served.scales.v,
            seqlens_k=step.seqlens_k,
            block_table=self._table(step, served),
            max_seqlen_k=step.max_seqlen_k,
            out=out[:count],
            **self._numerics(layer, served),
        )  # fmt: skip
        return out

    def init_graphs(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers whose addresses captured decodes hold: of all requests, of the longest context."""
        self._graph = step = Step(
            tokens=max_bs,
            rows=torch.zeros(max_bs, dtype=torch.int64, device=self.device),
            seqlens_k=torch.ones(max_bs, dtype=torch.int32, device=self.device),
            max_seqlen_k=self.context,
            captured=True,
        )
        width = -(-self.context // self.block)
        for in_window_pool in (False, True) if self._mapping() is not None else (False,):
            step.tables[in_window_pool] = torch.zeros(max_bs, width, dtype=torch.int32, device=self.device)
        if self._mapping() is not None:
            step.window_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)

    def plan_graph(self, forward_batch: Any, in_capture: bool) -> Step:
        """Bring the buffers up to date for a decode that is captured or replayed; its step. Raises Unsupported."""
        mode, held = forward_batch.forward_mode, self._graph
        if not mode.is_decode_or_idle():
            raise Unsupported(
                f"ZYFA's prefill plans on the host, so that no graph may hold it whole ({mode.name}); leave "
                f"--cuda-graph-backend-prefill at breakable, or disabled"
            )
        if held is None:
            raise RuntimeError("init_cuda_graph_state was not called before a graph was captured")
        count = forward_batch.batch_size
        held.seqlens_k[:count].copy_(forward_batch.seq_lens[:count])
        step = replace(
            held,
            tokens=count,
            rows=forward_batch.req_pool_indices[:count],
            seqlens_k=held.seqlens_k[:count],
            tables={pool: table[:count] for pool, table in held.tables.items()},
        )
        for in_window_pool, table in step.tables.items():
            self._fill(step, in_window_pool, table)
        slots = forward_batch.out_cache_loc
        if held.window_slots is not None and slots is not None:
            step.window_slots = held.window_slots[: slots.shape[0]]
            held.window_slots.zero_()
            if not in_capture:
                step.window_slots.copy_(self._window_slots(slots))
        return step

    def _as_extend(self, step: Step) -> Step:
        """A decode as prefill of one token each, for tokens that the pool does not hold."""
        if step.captured:
            raise Unsupported("a decode that does not save its K and V can't be captured in a graph by ZYFA")
        lengths = step.seqlens_k.tolist()
        new = [1] * len(lengths)
        starts = self._on_device(_offsets(new))
        return replace(step, cu_seqlens_q=starts, before=[n - 1 for n in lengths], new=new, packed={})

    def _numerics(self, layer: Any, served: Served) -> dict[str, Any]:
        """What prefill and decode of a layer are told alike."""
        return {
            "softmax_scale": layer.scaling,
            "window": served.window,
            "p": self.config.probabilities,
            "qk_format": self.config.qk_format,
            "offset": self.config.offset,
            "delta": self.config.delta,
        }

    def _query(self, query: torch.Tensor) -> Codes:
        from zyfa_kernels.triton.rotate_quantize import rotate_quantize_q

        return rotate_quantize_q(query, rotation=self.config.rotation, qk_format=self.config.qk_format)

    def _table(self, step: Step, served: Served) -> torch.Tensor:
        """The block table of a step for the pool of a layer, made once."""
        table = step.tables.get(served.in_window_pool)
        if table is None:
            table = step.tables[served.in_window_pool] = self._fill(step, served.in_window_pool, None)
        return table

    def _fill(self, step: Step, in_window_pool: bool, out: torch.Tensor | None) -> torch.Tensor:
        from zyfa_kernels.triton.block_table import block_table

        width = -(-max(step.max_seqlen_k, 1) // self.block)
        mapping = self._mapping() if in_window_pool else None
        return block_table(
            self.slots_of_tokens, step.rows, step.seqlens_k, self.block, width, mapping=mapping, out=out
        )

    def _packed(self, step: Step, served: Served) -> Packed:
        """The sequences of a step as a layer packs them, made once for each window and pool."""
        from zyfa_kernels.triton.block_table import packed_slots

        key = (served.window, served.in_window_pool)
        found = step.packed.get(key)
        if found is None:
            assert step.before is not None and step.new is not None
            reach = max(step.before, default=0) if served.window is None else served.window
            first = [max(0, prefix - reach) // TILE * TILE for prefix in step.before]
            lengths = [a + b - c for a, b, c in zip(step.before, step.new, first, strict=True)]
            starts = _offsets(lengths)
            numbers = self._on_device([*first, *starts])
            cu_seqlens_k, longest = numbers[len(first) :], max(lengths, default=0)
            mapping = self._mapping() if served.in_window_pool else None
            slots = packed_slots(
                self.slots_of_tokens, step.rows, numbers, cu_seqlens_k, starts[-1], longest, mapping=mapping
            )
            found = step.packed[key] = Packed(slots, cu_seqlens_k, longest, first)
        return found

    def _gather(self, layer: Any, step: Step, packed: Packed, own: Codes | None) -> Codes:
        """K and V codes of a step packed, [Tk, Hkv, D]; own: those of the new tokens that the pool does not hold."""
        # In words of 8 bytes, an element of torch's a thread.
        words = (x.view(torch.int64).index_select(0, packed.slots) for x in self.buffers(layer))
        k, v = (x.view(torch.uint8) for x in words)
        if own is not None:
            # A sequence's new tokens are its last.
            assert step.cu_seqlens_q is not None
            shift = packed.cu_seqlens_k[1:] - step.cu_seqlens_q[1:]
            counts = step.cu_seqlens_q.diff()
            place = torch.arange(step.tokens, device=self.device)
            place += shift.repeat_interleave(counts, output_size=step.tokens)
            for held, new in zip((k, v), own, strict=True):
                held.index_copy_(0, place, new)
        return k, v

    def _paged(self, buffer: torch.Tensor, block: int) -> torch.Tensor:
        """A pool [slots, Hkv, D] as [blocks, block, Hkv, D]."""
        blocks = buffer.shape[0] // block
        return buffer[: blocks * block].unflatten(0, (blocks, block))

    def _mapping(self) -> torch.Tensor | None:
        """int64, slot of the window layers' pool for a slot of the full one; None where there is one pool."""
        return getattr(self.pool, "full_to_swa_index_mapping", None)

    def _window_slots(self, slots: torch.Tensor) -> torch.Tensor:
        return self.pool.translate_loc_from_full_to_swa(slots)

    def _on_device(self, numbers: Iterable[int]) -> torch.Tensor:
        """int32, copied behind what the GPU does."""
        held = torch.tensor(list(numbers), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return held.to(self.device, non_blocking=True)


def _offsets(lengths: list[int]) -> list[int]:
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out
