"""Finds kernels that compute other values for strided arguments than for contiguous ones.

    python -m tests.operators.kernels               # of torch's databases of operators and modules

Torch's functions copy the arguments of such kernels before, but passes remove copies. They belong into the tables of
`lit_ort/_compat/torch_ops.py`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.operators.layouts import channels_last, permuted, sliced
from tests.operators.op_db import operators

CALLS, SAMPLES = 6, 16
# Results that only another kernel reads, in the layout in which this one writes them.
INTERNAL = frozenset({"aten._linalg_slogdet.default", "aten._linalg_det.default"})


class Kernels(TorchDispatchMode):
    """Repeats each call with strided arguments, and collects the operators whose results differ."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not (func._schema.is_mutable or is_random or func.is_view or self._counts[str(func)] >= CALLS):
            self._counts[str(func)] += 1
            self._compare(func, args, kwargs, result)
        return result

    def _compare(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        positions = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel()]
        expected, again = _tensors(result), _tensors(func(*args, **kwargs))
        is_left_out = any(text in str(func) for text in ("as_strided", "empty")) or str(func) in INTERNAL
        if is_left_out or not _are_close(again, expected):
            return
        for layout in (channels_last, permuted, sliced):
            for strided in (positions, *([k] for k in positions)):
                arguments = [_in_layout(leaf, layout) if k in strided else leaf for k, leaf in enumerate(leaves)]
                other_args, other_kwargs = tree_unflatten(arguments, spec)
                try:
                    actual = _tensors(func(*other_args, **other_kwargs))
                # Many kernels check their arguments.
                except RuntimeError:
                    continue
                if not _are_close(actual, expected):
                    self.found.add(str(func))


def _in_layout(value: Tensor, layout: Callable[[Tensor], Tensor]) -> Tensor:
    return layout(value) if value.dim() > 1 or layout is sliced else value


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _are_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether results are close; those whose shape depends on the layout, such as workspaces, aren't compared."""
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if a.shape == b.shape and a.numel()]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in pairs)


def _calls(text: str) -> Iterator[Callable[[], Any]]:
    for info in module_db:
        for sample in islice(_samples(info, text), SAMPLES):
            made, call = sample.constructor_input, sample.forward_input
            module = info.module_cls(*made.args, **made.kwargs)
            yield lambda m=module, c=call: m(*c.args, **c.kwargs)
    for op in operators(text):
        for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd), CALLS):
            yield lambda op=op, s=sample: op.get_op()(s.input, *s.args, **s.kwargs)


def _parametrized(text: str) -> Iterator[Callable[[], Any]]:
    """Calls of parametrizations, which torch's databases don't have."""
    for module in (nn.Linear(5, 7), nn.Conv1d(5, 7, 3), nn.Conv2d(5, 7, 3)):
        x = torch.randn(2, 5, *(6 for _ in module.weight.shape[2:]))
        if text in "weight_norm":
            yield functools.partial(weight_norm(module), x)


def _samples(info: Any, text: str) -> Sequence[Any]:
    is_wanted = text in info.name and "Lazy" not in info.name
    return info.module_inputs_func(info, "cpu", torch.float32, True, True) if is_wanted else ()


def find(text: str = "") -> set[str]:
    """The operators that depend on strides, among those that the subjects whose name contains a text call."""
    kernels = Kernels()
    for call in (*_calls(text), *_parametrized(text)):
        with warnings.catch_warnings(), kernels:
            warnings.simplefilter("ignore")
            try:
                roots = [result for result in _tensors(call()) if result.requires_grad and not result.is_complex()]
                torch.autograd.backward([(root.square() + root).sum() for root in roots])
            # Some samples have no gradient, or none in eager.
            except (RuntimeError, NotImplementedError):
                continue
    return kernels.found


if __name__ == "__main__":
    print("\n".join(sorted(find(*sys.argv[1:]))))
