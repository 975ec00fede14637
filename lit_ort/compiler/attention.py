"""Attention as one node of the forward model, until a pass decides how it is computed."""

from __future__ import annotations

import math

import torch
import torch.onnx.ops

DOMAIN, OPERATOR = "lit_ort", "Attention"
SCALE, CAUSAL, DROPOUT = "scale", "causal", "dropout"


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(query key^T scale + mask), dropout, times value, as a node `lit_ort::Attention`.

    Args:
        query, key, value: float[..., length, width].
        attn_mask: bool (True takes part) or float (added to the scores), broadcastable to the scores.

    Source: Vaswani et al. 2017; semantics of torch.nn.functional.scaled_dot_product_attention.
    """
    if enable_gqa:
        repeats = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(repeats, -3)
        value = value.repeat_interleave(repeats, -3)
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OPERATOR}",
        given,
        {
            SCALE: float(1 / math.sqrt(query.size(-1)) if scale is None else scale),
            CAUSAL: int(is_causal),
            DROPOUT: float(dropout_p),
        },
        dtype=query.dtype,
        shape=(*leading, query.shape[-2], value.shape[-1]),
        version=1,
    )
