"""Which values are placed in the memory of a run, and for how long."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx import helper

from lit_ort.lower import model, node_order
from lit_ort.lower.node_order import runs_in_order
from lit_ort.lower.placed_values import placed_values
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.runtime.engines.engine_interface import DOMAIN, IN_PLACE_OPERATOR

LARGE = (torch.float32, (1024, 1024))
SMALL = (torch.float32, (4, 4))


def node(operator: str, inputs: str, outputs: str, domain: str = "") -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), outputs.split(), domain=domain)


def test_a_value_is_in_use_until_the_last_node_that_reads_it_or_a_view_of_it() -> None:
    nodes = [
        node("MatMul", "x x", "a"),
        node("Reshape", "a sizes", "view"),
        node("MatMul", "x x", "b"),
        node("MatMul", "view b", "c"),
        node("MatMul", "c c", "d"),
    ]
    placed = placed_values(nodes, dict.fromkeys("abcd", LARGE), {"d"}, {"d"}, {})
    assert [(value.name, value.first, value.last) for value in placed] == [
        ("a", 0, 3),
        ("b", 2, 3),
        ("c", 3, 4),
        ("d", 4, len(nodes)),
    ]


def test_what_is_written_into_a_value_has_its_place() -> None:
    nodes = [
        node("MatMul", "x x", "a"),
        node("MatMul", "x x", "b"),
        node(IN_PLACE_OPERATOR, "a b", "sum other", DOMAIN),
        node("MatMul", "b b", "c"),
    ]
    types = {name: LARGE for name in ("a", "b", "c", "sum", "other")}
    placed = placed_values(nodes, types, {"sum", "c"}, {"sum", "c"}, {})
    assert [value.name for value in placed] == ["a", "sum", "b", "other", "c"]
    assert placed[1].owner == 0
    assert placed[0].last == placed[1].last == len(nodes)
    assert [value.owner for value in placed[2:]] == [None] * 3


@pytest.mark.parametrize("written", ["x", "small"])
def test_what_is_written_into_another_memory_is_not_placed(written: str) -> None:
    nodes = [
        node("MatMul", "x x", "small"),
        node(IN_PLACE_OPERATOR, written, "sum", DOMAIN),
        node("MatMul", "sum sum", "c"),
        node("MatMul", "c c", "d"),
    ]
    types = {"small": SMALL, "sum": LARGE, "c": LARGE, "d": LARGE}
    assert [value.name for value in placed_values(nodes, types, {"d"}, {"d"}, {})] == ["c", "d"]


def test_results_that_may_be_kept_and_small_values_are_not_placed() -> None:
    nodes = [node("MatMul", "x x", "logits"), node("MatMul", "x x", "small"), node("MatMul", "x logits", "gradient")]
    types = {"logits": LARGE, "small": SMALL, "gradient": LARGE}
    placed = placed_values(nodes, types, {"logits", "small", "gradient"}, {"small", "gradient"}, {})
    assert [value.name for value in placed] == ["gradient"]


def test_few_bytes_are_not_placed() -> None:
    types = {"a": (torch.float32, (256, 256))}
    assert not placed_values([node("MatMul", "x x", "a")], types, {"a"}, {"a"}, {})


def test_this_build_runs_nodes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    native = engine_of("auto").native
    assert native is not None
    assert runs_in_order(native)
    monkeypatch.setattr(model, "_leaves", lambda model: [])
    # Not the cached answer.
    assert not node_order.runs_in_order.__wrapped__(native)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_order_is_tried_with_every_default_dtype(dtype: torch.dtype) -> None:
    """`Trainer(precision="64-true")` compiles with a default dtype of float64."""
    native = engine_of("auto").native
    assert native is not None
    torch.set_default_dtype(dtype)
    try:
        assert node_order.runs_in_order.__wrapped__(native)
    finally:
        torch.set_default_dtype(torch.float32)
