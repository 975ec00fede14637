"""Functions that replace operators compute the same results."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_ort._compat.torch_ops import memory_argument, out_overload
from lit_ort.runtime.calls import CALLS, CALLS_INTO_MEMORY
from lit_ort.runtime.nodes import overload_of

_MATRIX, _STACK = torch.rand(3, 4), torch.rand(2, 3, 3)
_ARGUMENTS = {
    "aten.reshape.default": (_MATRIX, [2, 6]),
    "aten.t.default": (_MATRIX,),
    "aten.transpose.int": (_STACK, 0, 2),
    "aten.permute.default": (_STACK, [2, 0, 1]),
    "aten.unsqueeze.default": (_MATRIX, 1),
    "aten.select.int": (_MATRIX, 1, 2),
    "aten.expand.default": (_MATRIX, [2, 3, 4]),
    "aten.cat.default": ([_MATRIX, _MATRIX], 1),
    "aten.where.self": (_MATRIX > 0.5, _MATRIX, -_MATRIX),
    "aten.index_select.default": (_MATRIX, 0, torch.tensor([2, 0])),
    **{f"aten.{name}.Tensor": (_MATRIX, _MATRIX) for name in ("add", "sub", "mul", "div")},
}


class _OperatorLog(TorchDispatchMode):
    """Records the operators that run inside the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.targets.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("target", CALLS)
def test_the_same_operator_runs(target: str) -> None:
    arguments = _ARGUMENTS.get(target, (_MATRIX,))
    with _OperatorLog() as log:
        result = CALLS[target](*arguments)
    with _OperatorLog() as expected_log:
        expected = overload_of(target)(*arguments)
    assert log.targets == expected_log.targets
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("target", CALLS_INTO_MEMORY)
def test_results_are_written_to_preallocated_memory(target: str) -> None:
    out = out_overload(overload_of(target))
    assert out is not None
    arguments = _ARGUMENTS.get(target, (_MATRIX,))
    expected = overload_of(target)(*arguments)
    memory = torch.empty_like(expected)
    assert CALLS_INTO_MEMORY[target](*arguments, **{memory_argument(out): memory}) is memory
    torch.testing.assert_close(memory, expected, rtol=0, atol=0)


def test_numbers_use_the_overload_for_tensors() -> None:
    with _OperatorLog() as log:
        CALLS["aten.add.Tensor"](_MATRIX, 2, alpha=3)
        CALLS["aten.div.Tensor"](_MATRIX, 0.5)
    assert log.targets == ["aten.add.Tensor", "aten.div.Tensor"]
