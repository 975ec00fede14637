"""Functions of torch's Python interface that compute what an operator does, for less of a call.

An operator called as `torch.ops.aten.t.default` goes through its schema, which takes 1.6 to 5 µs; `torch.Tensor.t` and
its like take about one less (two cores of an AMD EPYC), of which a step has hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

_METHODS = {
    "reshape.default": "reshape",
    "t.default": "t",
    "transpose.int": "transpose",
    "permute.default": "permute",
    "unsqueeze.default": "unsqueeze",
    "select.int": "select",
    "expand.default": "expand",
}
# Elementwise functions and their like, in their overloads for tensors; those with out= have it here too.
_FUNCTIONS = (
    *("abs", "cos", "erf", "exp", "log", "neg", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "tanh", "cat"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "where.self", "index_select"),
)

CALLS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{f"aten.{target}": getattr(torch.Tensor, name) for target, name in _METHODS.items()},
        **{
            f"aten.{name if '.' in name else f'{name}.default'}": getattr(torch, name.partition(".")[0])
            for name in _FUNCTIONS
        },
    }
)
