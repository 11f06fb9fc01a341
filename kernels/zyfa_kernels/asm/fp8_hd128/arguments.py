"""The argument block of the fp8 head-dim-128 kernels. Strides are in bytes; rows are tokens."""

from __future__ import annotations

from ..kernel import Arguments

ARGUMENTS = Arguments(
    (
        ("q", "pointer", "e4m3 [Tq, Hq, 128]"),
        ("k", "pointer", "e4m3 [Tk, Hkv, 128]"),
        ("v", "pointer", "e4m3 [Tk, Hkv, 128]"),
        ("out", "pointer", "bf16 [Tq, Hq, 128]"),
        ("lse", "pointer", "fp32 [Hq, Tq], natural log; 0 for none"),
        ("q_scale", "pointer", "fp32 [Tq, Hq]"),
        ("k_scale", "pointer", "fp32 [Hkv] or one value"),
        ("v_scale", "pointer", "fp32 [Hkv] or one value"),
        ("cu_seqlens_q", "pointer", "int32 [batch + 1]"),
        ("cu_seqlens_k", "pointer", "int32 [batch + 1]"),
        ("block_table", "pointer", "int32 [batch, pages]; without pages any address that holds 0"),
        ("q_row", "u32", "stride of a query token"),
        ("q_head", "u32", "stride of a query head"),
        ("k_row", "u32", "stride of a key token"),
        ("k_head", "u32", "stride of a key head"),
        ("v_row", "u32", "stride of a value token"),
        ("v_head", "u32", "stride of a value head"),
        ("out_row", "u32", "stride of an output token"),
        ("out_head", "u32", "stride of an output head"),
        ("q_scale_row", "u32", "stride of q_scale over tokens"),
        ("q_scale_head", "u32", "stride of q_scale over heads"),
        ("lse_head", "u32", "stride of lse over heads"),
        ("kv_scale_head", "u32", "stride of k_scale and v_scale over heads: 4, or 0 for one value"),
        ("block_table_row", "u32", "stride of the block table over sequences, 0 without pages"),
        ("page_shift", "u32", "log2 of the tokens of a page, 31 without pages"),
        ("k_page", "u32", "stride of a page of K"),
        ("v_page", "u32", "stride of a page of V"),
        ("packed", "u32", "1: keys are packed, cu_seqlens_k gives their start; 0: paged"),
        ("window", "i32", "a query at p sees no key before p - window; 2^30 for none"),
        ("group_magic", "u32", "ceil(65536 / (Hq / Hkv)): head * magic >> 16 is the KV head"),
        ("q_tiles", "u32", "query tiles of the longest sequence: the grid's z"),
        ("xcd_mask", "u32", "head = (x & mask) * xcd_heads + (x >> shift): keeps a KV head's query heads on one die"),
        ("xcd_heads", "u32", ""),
        ("xcd_shift", "u32", ""),
        ("scale_log2", "f32", "softmax_scale * log2(e)"),
        ("code_bias", "f32", "lean P: 8 B + 56 + delta; exact P: 0"),
    )
)
