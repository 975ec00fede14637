"""Regions as data: text, hash, checks, and the builder."""

from __future__ import annotations

import pytest
import torch

from lit_ort.regions.counter_random import philox, uniform
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.pointwise_table import BY_OVERLOAD, OPERATORS
from lit_ort.regions.region import Access, Apply, Index, Literal, Load, Reduce, Region, Store, check
from lit_ort.regions.region_builder import RegionBuilder
from lit_ort.regions.region_run import Place, RegionRun


def softmax() -> Region:
    builder = RegionBuilder(1, 1)
    x = builder.load(0, "float32", "1")
    e = builder.apply("exp", builder.apply("sub", x, builder.reduce("max", x)))
    builder.store(0, "float32", "1", builder.apply("div", e, builder.reduce("sum", e)))
    return builder.region()


def test_a_region_is_readable() -> None:
    assert str(softmax()).splitlines() == [
        "region over r0 | c0",
        "  %0: float32 = load in0[1] float32",
        "  %1: float32 = max over the row of %0  # a row",
        "  %2: float32 = sub %0 %1",
        "  %3: float32 = exp %2",
        "  %4: float32 = sum over the row of %3  # a row",
        "  %5: float32 = div %3 %4",
        "  store out0[1] float32 <- %5",
    ]


def test_a_region_is_read_from_its_text_with_all_literals() -> None:
    builder = RegionBuilder(0, 1)
    node = builder.load(0, "float32", "1")
    for value in (float("inf"), float("nan"), -0.0, 0.1):
        node = builder.apply("add", node, value)
    builder.store(0, "float32", "1", node)
    region = builder.region()
    again = Region.from_json(region.to_json())
    assert again.to_json() == region.to_json()
    assert again.key == region.key
    assert softmax().key == softmax().key != region.key


@pytest.mark.parametrize("text", ["{}", "[]", '{"rows": 1}'])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of a region"):
        Region.from_json(text)


def test_a_region_that_is_not_consistent_is_refused() -> None:
    load = Load(Access(0, "float32", "1"))
    with pytest.raises(ValueError, match="refers to a node that isn't before it"):
        check(Region(1, 1, (Apply("neg", (0,), "float32"),)))
    with pytest.raises(ValueError, match="reduces a row-level value"):
        check(Region(1, 1, (Literal(1.0, "float32"), Reduce("sum", 0, "float32"))))
    with pytest.raises(ValueError, match="isn't a stride for each"):
        check(Region(1, 2, (load,)))
    with pytest.raises(ValueError, match="writes a full value to a place for each row"):
        check(Region(1, 1, (load,), (Store(Access(0, "float32", "0"), 0),)))
    with pytest.raises(ValueError, match="axis that the region doesn't have"):
        check(Region(1, 1, (Index(2),)))


def test_equal_nodes_are_one_and_different_zeros_two() -> None:
    builder = RegionBuilder(0, 1)
    x = builder.load(0, "float32", "1")
    assert builder.apply("add", x, 0.0) == builder.apply("add", x, 0.0) != builder.apply("add", x, -0.0)


def test_dtypes_are_promoted_as_in_torch() -> None:
    builder = RegionBuilder(0, 1)
    i, f, b = (builder.load(at, dtype, "1") for at, dtype in enumerate(("int32", "bfloat16", "bool")))
    for args, dtype in (((i, f), "float32"), ((i, i), "int32"), ((i, 2.5), "float32"), ((b, i), "int32")):
        assert builder.nodes[builder.apply("add", *args)].dtype == dtype
    assert builder.nodes[builder.apply("div", i, i)].dtype == "float32"
    assert builder.nodes[builder.apply("lt", i, f)].dtype == "bool"
    assert builder.nodes[builder.reduce("sum", b)].dtype == "int64"


def test_what_nothing_needs_is_left_out() -> None:
    builder = RegionBuilder(0, 1)
    x = builder.load(0, "float32", "1")
    builder.apply("exp", x)
    builder.store(0, "float32", "1", builder.apply("neg", x))
    assert [type(node).__name__ for node in builder.region().nodes] == ["Load", "Apply"]


def test_the_interpreter_runs_a_softmax() -> None:
    x, y = torch.randn(5, 7), torch.empty(5, 7)
    place = Place(0, (7, 1))
    interpret(softmax(), RegionRun((5, 7), (place,), (place,)), [x], [y])
    torch.testing.assert_close(y, x.softmax(1))


def test_each_overload_exists_and_has_one_operator() -> None:
    for overload in BY_OVERLOAD:
        name, _, kind = overload.partition(".")
        assert hasattr(getattr(torch.ops.aten, name), kind), overload
    assert sum(len(operator.overloads) for operator in OPERATORS.values()) == len(BY_OVERLOAD)


def test_philox_has_its_published_words() -> None:
    """Known answers of the Random123 library's test vectors for philox4x32, 10 rounds."""
    full = torch.tensor(0xFFFFFFFF)
    zero = torch.tensor(0)
    assert [word.item() for word in philox((zero, zero), (zero,) * 4)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    assert [word.item() for word in philox((full, full), (full,) * 4)] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_neighbours_share_counters_but_no_number() -> None:
    columns = torch.arange(4096)
    numbers = uniform(torch.tensor(3), torch.tensor(0), torch.tensor(0), columns)
    assert numbers.unique().numel() > 4090
    assert ((numbers >= 0) & (numbers < 1)).all()
