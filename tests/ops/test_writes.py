"""In-place forms of operators, compared with torch's functional ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_ort.ops import OPERATORS
from lit_ort.ops.writes import IN_PLACE, WRITTEN
from tests.ops.helpers import RecordingAllocator

ROWS, COLUMNS = torch.tensor([0, 2]), torch.tensor([[0, 1], [2, 0]])
MASK = torch.tensor([[True, False, True]] * 4)
# The arguments of each operator after the value itself, float[4, 3].
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "aten.select_scatter.default": (torch.randn(4), 1, -1),
    "aten.slice_scatter.default": (torch.randn(2, 3), 0, 0, 4, 2),
    "aten.diagonal_scatter.default": (torch.randn(3),),
    "aten.index_put.default": ([None, ROWS], torch.randn(4, 2), True),
    "aten.index_add.default": (0, ROWS, torch.randn(2, 3)),
    "aten.index_copy.default": (0, ROWS, torch.randn(2, 3)),
    "aten.index_reduce.default": (0, ROWS, torch.randn(2, 3), "amax"),
    "aten.index_fill.int_Scalar": (0, ROWS, 2.0),
    "aten.index_fill.int_Tensor": (0, ROWS, torch.tensor(2.0)),
    "aten.put.default": (ROWS, torch.randn(2)),
    "aten.masked_scatter.default": (MASK, torch.randn(12)),
    "aten.scatter.src": (1, COLUMNS, torch.randn(2, 2)),
    "aten.scatter.value": (1, COLUMNS, 2.0),
    "aten.scatter_add.default": (1, COLUMNS, torch.randn(2, 2)),
    "aten.scatter_reduce.two": (1, COLUMNS, torch.randn(2, 2), "amax"),
    "aten.copy.default": (torch.randn(3),),
    "aten.fill.Scalar": (2.0,),
    "aten.fill.Tensor": (torch.tensor(2.0),),
    "aten.masked_fill.Scalar": (MASK, 2.0),
    "aten.masked_fill.Tensor": (MASK, torch.tensor(2.0)),
    "lit_ort.add_slices.default": ([torch.randn(4, 2)], [4, 3], [1], [1], [3], [1]),
}
NAMED: dict[str, dict[str, Any]] = {
    "aten.scatter.reduce": {"reduce": "add"},
    "aten.scatter.value_reduce": {"reduce": "multiply"},
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning", "ignore:The reduce argument:UserWarning")
@pytest.mark.parametrize("target", IN_PLACE, ids=str)
def test_writes_what_the_functional_operator_returns(target: Any) -> None:
    name = str(target)
    like = {"aten.scatter.reduce": "aten.scatter.src", "aten.scatter.value_reduce": "aten.scatter.value"}.get(
        name, name
    )
    arguments, named = ARGUMENTS.get(like, (torch.randn(4, 3),)), NAMED.get(name, {})
    value = torch.randn(4, 3)
    expected, copied = target(value.clone(), *arguments, **named), IN_PLACE[target](value, *arguments, **named)
    assert torch.equal(copied, expected)
    operator = OPERATORS[IN_PLACE[target]]
    result = operator.kernel(RecordingAllocator(), value, *arguments, **named)
    assert result.data_ptr() == value.data_ptr()
    assert operator.writes_into == 0
    assert torch.equal(result, expected)


def test_a_value_after_a_write_into_a_part_of_it() -> None:
    value = torch.randn(4, 3)
    assert OPERATORS[WRITTEN].kernel(RecordingAllocator(), value, value[0].zero_()) is value
    torch.library.opcheck(WRITTEN, (torch.randn(4, 3), torch.randn(3)))


@pytest.mark.slow
@pytest.mark.parametrize("target", IN_PLACE, ids=str)
def test_opcheck(target: Any) -> None:
    arguments = ARGUMENTS.get(str(target), (torch.randn(4, 3),))
    if str(target) not in NAMED and "reduce" not in str(target):
        torch.library.opcheck(
            IN_PLACE[target], (torch.randn(4, 3), *arguments), test_utils=("test_schema", "test_faketensor")
        )
