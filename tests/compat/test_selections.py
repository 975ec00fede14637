"""Steps that select by values of their inputs: one graph, with indices computed before it, and eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor
from torch.utils._pytree import tree_leaves

from lit_ort._compat.selections import _Once
from tests.compare import backend, mostly
from tests.compat.canary import canary

Select = Callable[[Tensor, Tensor, Tensor], Any]

# Functions of values[4, 5], a mask[4, 5], and counts[4].
SELECTIONS: dict[str, Select] = {
    "mask": lambda x, mask, counts: x[mask],
    "mask_of_rows": lambda x, mask, counts: x[mask[:, 0]],
    "mask_of_columns": lambda x, mask, counts: x[:, mask[0]],
    "mask_behind_an_ellipsis": lambda x, mask, counts: x[None, ..., mask[0]],
    "mask_and_number": lambda x, mask, counts: x[mask[:, 0], 1],
    "two_masks": lambda x, mask, counts: x[None][:, mask][..., None] * x[mask[:, 0] | True].sum(),
    "masks_of_both": lambda x, mask, counts: x[mask[:, 0]][:, mask[0]],
    "mask_of_lengths": lambda x, mask, counts: x[torch.arange(x.shape[1]) < counts[:, None]],
    "masked_select": lambda x, mask, counts: x.masked_select(mask),
    "masked_select_that_expands": lambda x, mask, counts: torch.masked_select(x, mask[:, :1]),
    "nonzero": lambda x, mask, counts: x[mask.nonzero()[:, 0]],
    "nonzero_as_tuple": lambda x, mask, counts: x[torch.nonzero(mask, as_tuple=True)],
    "where": lambda x, mask, counts: x[torch.where(mask)],
    "argwhere": lambda x, mask, counts: x.sum() * torch.argwhere(mask),
    "repeat_interleave": lambda x, mask, counts: x.repeat_interleave(counts, 0),
    "repeat_interleave_of_all": lambda x, mask, counts: torch.repeat_interleave(x, counts.repeat(5)),
    "repeat_interleave_of_counts": lambda x, mask, counts: x[torch.repeat_interleave(counts)],
    "repeat_interleave_by_constants": lambda x, mask, counts: x.repeat_interleave(tensor([2, 0, 1, 1, 2]), dim=-1),
    "unique": lambda x, mask, counts: x[counts.unique()],
    "unique_of_all": lambda x, mask, counts: [x[:3][part] for part in counts.unique(return_inverse=True)],
    "unique_consecutive": lambda x, mask, counts: x[torch.unique_consecutive(counts, return_counts=True)[0]],
    "bincount": lambda x, mask, counts: x.sum() * torch.bincount(counts),
}


class Module(nn.Module):
    def __init__(self, select: Select) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.select = nn.Linear(5, 5), nn.Linear(5, 5), select

    def before(self, x: Tensor, mask: Tensor, counts: Tensor) -> list[Tensor]:
        return [x, *(value * self.first.weight.sum() for value in self._selected(x, mask, counts))]

    def inside(self, x: Tensor, mask: Tensor, counts: Tensor) -> list[Tensor]:
        return [self.second.bias * value.tanh().sum() for value in self._selected(self.first(x), mask, counts)]

    def after(self, x: Tensor, mask: Tensor, counts: Tensor) -> list[Tensor]:
        return self._selected(self.second(self.first(x).relu()), mask, counts)

    def _selected(self, *arguments: Tensor) -> list[Tensor]:
        return tree_leaves(self.select(*arguments))


def losses(results: list[Tensor]) -> Tensor:
    return sum((result.square().sum() for result in results), torch.zeros(()))


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """The counts of selected elements change, and are 1 and 0."""
    torch.manual_seed(1)
    masks = [torch.rand(4, 5) > 0.5, torch.rand(4, 5) > 0.2, torch.zeros(4, 5, dtype=torch.bool)]
    masks += [masks[2].index_put((tensor(0), tensor(1)), tensor(True)), masks[0]]
    counts = [[1, 2, 0, 2], [2, 2, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [2, 2, 2, 2]]
    return [(torch.randn(4, 5), mask, tensor(count)) for mask, count in zip(masks, counts, strict=True)]


def compare(module: Module, place: str, is_fused: bool) -> Any:
    """Compares a step with eager on all batches; returns the engine."""
    torch.compiler.reset()
    engine = backend(fallback="error")
    step = getattr(module, place)

    def fused(*batch: Tensor) -> Tensor:
        return losses(step(*batch))

    compiled = torch.compile(fused if is_fused else step, backend=engine)
    weights = tuple(module.parameters())
    for batch in batches():
        actual: Any = compiled(*batch)
        expected: Any = fused(*batch) if is_fused else step(*batch)
        torch.testing.assert_close(actual, expected)
        grads = []
        for results in (actual, expected):
            loss = results if is_fused else losses(results)
            grads.append(torch.autograd.grad(loss, weights, allow_unused=True))
        torch.testing.assert_close(*grads)
    return engine


# Each operator, with and without a gradient, and each place of a mask.
REPRESENTATIVES = ("mask", "mask_of_columns", "two_masks", "mask_of_lengths", "masked_select", "nonzero_as_tuple")
REPRESENTATIVES += ("argwhere", "repeat_interleave", "unique_of_all", "unique_consecutive", "bincount")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        *mostly(pytest.mark.sweep, REPRESENTATIVES, 2),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in sorted(SELECTIONS.keys() - set(REPRESENTATIVES))),
    ],
)
def test_one_graph(name: str) -> None:
    with canary("_wrap_fx_proxy of torch._dynamo", "selections", "selections by values of inputs end the graph"):
        engine = compare(Module(SELECTIONS[name]), "inside", is_fused=True)
        assert not engine.compile_log.breaks
        # Torch traces the counts 0 and 1 separately.
        assert engine.count <= 3


@pytest.mark.sweep
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("place", ["before", "inside", "after"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_sweep(name: str, place: str, is_fused: bool) -> None:
    engine = compare(Module(SELECTIONS[name]), place, is_fused)
    assert not engine.compile_log.breaks
    assert engine.count <= 5


MASK = tensor([True, False, True, False])


def of_weight(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return x[weight > 0]


def of_draw(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return x[torch.rand(4) > 2]


def of_changed_input(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    mask.logical_not_()
    return x[mask]


def of_input_changed_behind_its_version(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    mask.data.logical_not_()
    return x[mask]


def of_changed_value(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    negated = mask | mask
    negated.logical_not_()
    return x[negated]


def of_changed_elements(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    copy = mask.clone()
    copy[0] = False
    return x[copy]


@pytest.mark.parametrize(
    "function",
    [
        of_weight,
        of_draw,
        of_changed_input,
        of_input_changed_behind_its_version,
        of_changed_value,
        of_changed_elements,
    ],
)
@pytest.mark.parametrize("in_inference", [False, True])
def test_what_is_no_function_of_inputs_ends_the_graph(function: Callable[..., Tensor], in_inference: bool) -> None:
    torch.compiler.reset()
    engine = backend(fallback="warn")
    compiled = torch.compile(function, backend=engine)
    weight = torch.linspace(-1, 1, 4, requires_grad=True)
    with torch.inference_mode(in_inference):
        x = torch.randn(4, 2)
        torch.testing.assert_close(compiled(x, MASK.clone(), weight), function(x, MASK.clone(), weight))
    assert engine.compile_log.breaks


def written(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    indices, rows = (mask[:, None] & mask).nonzero(), x[mask]
    indices.add_(1)
    rows.zero_()
    return indices, mask.nonzero(), rows, x[mask], x + 1


def test_results_can_be_written() -> None:
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(written, backend=engine)
    for _ in range(2):
        x = torch.randn(4, 2)
        actual, expected = compiled(x, MASK), written(x, MASK)
        torch.testing.assert_close(actual, expected)
        for one, other in zip(actual, expected, strict=True):
            assert one.stride(0) == other.stride(0)
            one.zero_()
    assert engine.count == 1


BESIDE_SIZES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a mask and a slice": lambda x, mask, y: x[mask, : y.size(0)],
    "a slice and a mask": lambda x, mask, y: x[: y.size(0)][:, mask[:2]],
    "counts by name": lambda x, mask, y: x[torch.repeat_interleave(repeats=mask.long())],
}


@pytest.mark.parametrize("name", BESIDE_SIZES)
def test_selections_beside_sizes(name: str) -> None:
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(lambda x, mask, y: BESIDE_SIZES[name](x, mask, y) * 2, backend=engine)
    for rows in (1, 2, 3):
        x, y = torch.randn(4, 2), torch.ones(rows)
        assert torch.equal(compiled(x, MASK[:4], y), BESIDE_SIZES[name](x, MASK[:4], y) * 2)
    assert not engine.compile_log.breaks


def test_selected_into_a_given_tensor() -> None:
    def step(x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
        torch.masked_select(x, mask, out=out)
        return out * 2

    torch.compiler.reset()
    compiled, x = torch.compile(step, backend=backend()), torch.randn(4)
    for mask in (MASK[:4], MASK[:4].flip(0)):
        given = torch.zeros(int(mask.sum()))
        assert torch.equal(compiled(x, mask, given), x[mask] * 2)
        assert torch.equal(given, x[mask])


@pytest.mark.parametrize("dim", [0, 1, None])
def test_repeated_by_a_size(dim: int | None) -> None:
    """In a graph for any size, the size is a node as tensors are."""
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(lambda x, y: x.repeat_interleave(y.size(0), dim) * 2, backend=engine)
    for rows in (2, 3, 4):
        x, y = torch.randn(3, 2), torch.ones(rows)
        assert torch.equal(compiled(x, y), x.repeat_interleave(rows, dim) * 2)
    assert not engine.compile_log.eager_functions


def test_a_recompile_names_the_selection() -> None:
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(lambda x, mask: x[mask] * 2, backend=engine)
    for mask in (MASK, MASK & False):
        compiled(torch.randn(4), mask)
    (recompile,) = engine.compile_log.recompiles
    assert "(selection by x, mask).size()[0]" in recompile.reason


@pytest.mark.parametrize("in_inference", [False, True])
def test_one_mask_with_other_values(in_inference: bool) -> None:
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(lambda x, mask: x[mask] * x[mask], backend=engine)
    with torch.inference_mode(in_inference):
        x, mask = torch.randn(8), torch.arange(8) < 2
        for k in (2, 5, 2, 7):
            mask.copy_(torch.arange(8) >= k - 2)
            torch.testing.assert_close(compiled(x, mask), x[mask] * x[mask])
    assert engine.count == 1


def test_what_a_guard_computed_is_taken_once() -> None:
    calls: list[Tensor] = []

    def compute(x: Tensor, size: int) -> Tensor:
        calls.append(x)
        return x * size

    once, x = _Once(compute), torch.ones(2)
    guarded = once.guarded(x, 3)
    assert once.taken(x, 3) is guarded
    assert once.taken(x, 3) is not guarded
    for change in (lambda: (x.add_(1), 3), lambda: (x.clone(), 3), lambda: (x, 4)):
        once.guarded(x, 3)
        other, size = change()
        count = len(calls)
        torch.testing.assert_close(once.taken(other, size), other * size)
        assert len(calls) == count + 1


@pytest.mark.parametrize("count", [3, 5])
def test_errors_are_eagers(count: int) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, mask: x[mask] * 2, backend=backend(fallback="warn"))
    x = torch.randn(4)
    compiled(x, MASK)
    with pytest.raises(IndexError, match="The shape of the mask"):
        compiled(x, torch.ones(count, dtype=torch.bool))


def test_sizes_that_are_equal_by_chance() -> None:
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(lambda x, y, a, b: x[a].sum() * y[b].sum(), backend=engine)
    x = torch.randn(4, requires_grad=True)
    for a, b in ((2, 2), (3, 2), (4, 3)):
        masks = torch.arange(4) < a, torch.arange(4) < b
        torch.testing.assert_close(compiled(x, x, *masks), x[masks[0]].sum() * x[masks[1]].sum())
    assert engine.count == 1


@pytest.mark.parametrize("dimension", [0, 1])
def test_sizes_of_values_that_depend_on_weights(dimension: int) -> None:
    """A size of such a value is that of an input."""
    torch.compiler.reset()
    embedding = nn.Embedding(6, 3)

    def step(tokens: Tensor, lengths: Tensor) -> Tensor:
        x = embedding(tokens if dimension else tokens.t())
        if not dimension:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        mask = torch.arange(x.shape[dimension]) < lengths[:, None]
        return (x if dimension else x.transpose(0, 1))[mask].sum()

    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for length in (5, 7, 4, 9):
        tokens, lengths = torch.randint(6, (3, length)), tensor([length, 2, 3])
        actual, expected = (call(tokens, lengths) for call in (compiled, step))
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(loss, embedding.weight) for loss in (actual, expected)]
        torch.testing.assert_close(*grads)
    assert not engine.compile_log.breaks
    assert engine.count == 2
