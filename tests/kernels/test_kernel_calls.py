"""Calls of kernels: equal results for any number of threads, random numbers, scatters, errors, shared code."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from lit_ort.kernels.kernel_arguments import Cut
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.region import Apply, Region
from lit_ort.regions.region_builder import RegionBuilder
from lit_ort.regions.region_run import Place, RegionRun
from tests.kernels.test_generated_regions import threads
from tests.regions.guarded import guarded

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import KernelCache


def dropout(rows: int) -> Region:
    """Dropout over rows and columns: the rows are an axis, or the inner axes are both."""
    builder = RegionBuilder(rows, 2 - rows)
    x = builder.load(0, "float32", "1" if rows else "s1")
    seed = builder.load(1, "int64", "0" * (2 - rows))
    uniform = builder.apply("random", seed, builder.scalar(0, "int64"), builder.index(0), builder.index(1))
    builder.store(
        0, "float32", "1" if rows else "s1", builder.apply("where", builder.apply("ge", uniform, 0.3), x, 0.0)
    )
    return builder.region()


def dropped(kernels: KernelCache, x: torch.Tensor, seed: int, stream: int, rows: int = 1) -> torch.Tensor:
    result = torch.empty_like(x)
    place = Place(0, tuple(x.stride()))
    run = RegionRun(tuple(x.shape), (place, Place(0, (0, 0))), (place,), (), (stream,))
    kernels.kernel(dropout(rows)).bind(run)(x, torch.tensor([seed]), result)
    return result


@pytest.mark.parametrize("shape", [(3, 64), (5, 200), (1, 1), (130, 17), (2, 1000)])
def test_a_mask_is_the_same_in_all_spaces_and_that_of_the_reference(
    shape: tuple[int, int], kernels: KernelCache
) -> None:
    x = torch.ones(shape)
    result = dropped(kernels, x, 7, 2)
    wanted = torch.empty(shape)
    place = Place(0, tuple(x.stride()))
    run = RegionRun(shape, (place, Place(0, (0, 0))), (place,), (), (2,))
    interpret(dropout(1), run, [x, torch.tensor([7])], [wanted])
    assert torch.equal(result, wanted)
    assert torch.equal(dropped(kernels, x, 7, 2, rows=0), wanted)


def test_random_numbers_are_uniform_and_streams_and_seeds_differ(kernels: KernelCache) -> None:
    x = torch.ones(400, 1000)
    results = [dropped(kernels, x, seed, stream) for seed, stream in ((1, 0), (1, 1), (2, 0), (1 << 40, 0))]
    for result in results:
        assert abs(result.mean() - 0.7) < 0.004
    for first, second in zip(results, results[1:], strict=False):
        # Independent masks agree with probability 0.7² + 0.3².
        assert abs((first == second).float().mean() - 0.58) < 0.005
    assert torch.equal(results[0], dropped(kernels, x, 1, 0))


def test_sums_over_rows_do_not_depend_on_the_number_of_threads(kernels: KernelCache) -> None:
    builder = RegionBuilder(1, 1)
    x = builder.load(0, "float32", "1")
    builder.column(0, "float32", "1", "sum", x)
    builder.column(1, "float32", "0", "sum", builder.reduce("sum", builder.apply("mul", x, x)))
    builder.store(2, "float32", "1", builder.apply("exp", x))
    region = builder.region()
    x = torch.randn(1000, 300)
    place = Place(0, (300, 1))
    run = RegionRun((1000, 300), (place,), (place,), (Place(0, (0, 1)), Place(0, (0, 0))))
    assert Cut(region).blocks(run.sizes).count > 4
    bound = kernels.kernel(region).bind(run)
    results = []
    for count in (1, 2, 3, 2):
        outputs = [torch.empty(300), torch.empty(1), torch.empty(1000, 300)]
        with threads(count):
            bound(x, *outputs)
        results.append(outputs)
    for outputs in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outputs, results[0], strict=True))
    torch.testing.assert_close(results[0][0], x.double().sum(0).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(results[0][1], (x.double() ** 2).sum().float()[None], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("sizes", [(4, 33), (1, 16), (3, 2, 17), (2000, 300)])
def test_rows_are_added_to_nothing_or_to_a_table(sizes: tuple[int, ...], starts: bool, kernels: KernelCache) -> None:
    count, inner = sizes[0], sizes[1:]
    builder = RegionBuilder(1, len(inner))
    full, zero = ("s" * (len(inner) - 1) + "1"), "0" * len(inner)
    value, word = builder.load(0, "float32", full), builder.load(1, "int64", zero)
    builder.scatter(0, "float32", full, value, word, 2 if starts else None)
    region, width = builder.region(), math.prod(inner)
    strides = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
    places = Place(0, (width, *strides)), Place(0, (1, *(0 for _ in inner)))
    run = RegionRun(sizes, places, (Place(0, (0, *strides), ((width, 7),)),))
    grad, words, table = torch.randn(count * width), torch.randint(0, 7, (count,)), torch.randn(7 * width)
    given = [grad, words, table][: 2 + starts]
    wanted, by_interpreter = (table if starts else torch.zeros(7 * width)).view(7, width), torch.full((7 * width,), 3.0)
    wanted = wanted.index_add(0, words, grad.view(count, width)).flatten()
    interpret(region, run, given, [by_interpreter])
    torch.testing.assert_close(by_interpreter, wanted, rtol=1e-5, atol=1e-4)
    for at_end in (True, False):
        inputs, memory = guarded(given, at_end=at_end)
        (result,), more = guarded([torch.full((7 * width,), math.nan)], at_end=at_end)
        with threads(2):
            kernels.kernel(Region.from_json(region.to_json())).bind(run)(*inputs, result)
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-4)
        del inputs, result, memory, more


def test_a_scatter_needs_an_index_of_a_row() -> None:
    builder = RegionBuilder(1, 1)
    builder.scatter(0, "float32", "1", builder.load(0, "float32", "1"), builder.load(1, "int64", "1"), None)
    with pytest.raises(ValueError, match="adds to what no node of a row selects"):
        builder.region()


@pytest.mark.parametrize("wrong", [-1, 7, 1 << 40])
@pytest.mark.parametrize("level", ["row", "full"])
def test_an_index_outside_of_its_size_is_an_error(wrong: int, level: str, kernels: KernelCache) -> None:
    builder = RegionBuilder(1, 1)
    index = builder.load(1, "int64", "0" if level == "row" else "1")
    builder.store(0, "float32", "1", builder.load(0, "float32", "1", [index]))
    region = builder.region()
    indices = torch.zeros(20, 20, dtype=torch.int64)
    strides = (20, 0) if level == "row" else (20, 1)
    place = Place(0, strides)
    run = RegionRun((20, 20), (place, Place(0, (0, 1), ((20, 7),))), (Place(0, (20, 1)),))
    bound, table, result = kernels.kernel(region).bind(run), torch.randn(7, 20), torch.empty(20, 20)
    bound(table, indices, result)
    assert torch.equal(result, table[:1].expand(20, 20))
    indices[17, 0 if level == "row" else 18] = wrong
    with pytest.raises(IndexError, match="outside of the size"):
        bound(table, indices, result)
    indices[17] = 0
    bound(table, indices, result)


@pytest.mark.parametrize("wrong", [-0.5, math.nan])
def test_a_value_that_is_not_accepted_is_an_error(wrong: float, kernels: KernelCache) -> None:
    builder = RegionBuilder(0, 1)
    x = builder.load(0, "float32", "1")
    builder.store(0, "float32", "1", builder.add(Apply("require", (builder.apply("ge", x, 0.0), x), "float32")))
    place = Place(0, (1,))
    x, result = torch.rand(37), torch.empty(37)
    bound = kernels.kernel(builder.region()).bind(RegionRun((37,), (place,), (place,)))
    for _ in range(2):
        bound(x, result)
        assert torch.equal(result, x)
        with pytest.raises(ValueError, match="doesn't accept a value"):
            bound(torch.cat([x[:-1], torch.tensor([wrong])]), result)


def test_equal_regions_share_code(kernels: KernelCache) -> None:
    first, second = kernels.kernel(dropout(1)), kernels.kernel(Region.from_json(dropout(1).to_json()))
    assert first is second


def test_arguments_that_contradict_the_region_are_refused(kernels: KernelCache) -> None:
    builder = RegionBuilder(0, 1)
    builder.store(0, "float32", "1", builder.load(0, "float32", "1"))
    kernel = kernels.kernel(builder.region())
    place = Place(0, (1,))
    with pytest.raises(ValueError, match="stride 2 of"):
        kernel.bind(RegionRun((4,), (Place(0, (2,)),), (place,)))
    with pytest.raises(ValueError, match="The sizes"):
        kernel.bind(RegionRun((4, 4), (place,), (place,)))
    with pytest.raises(ValueError, match="0 places are given for 1 accesses"):
        kernel.bind(RegionRun((4,), (place,), ()))
    with pytest.raises(ValueError, match="1 scalars are given"):
        kernel.bind(RegionRun((4,), (place,), (place,), scalars=(1.0,)))


def test_one_code_serves_all_sizes(kernels: KernelCache) -> None:
    before = None
    for rows, columns in ((1, 1), (3, 17), (40, 64), (2, 1000)):
        dropped(kernels, torch.ones(rows, columns), 1, 1)
        before = before or len(kernels)
    assert len(kernels) == before
