"""Attention compared with torch's, with every kind of mask and with dropout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lit_ort.ops import OPERATORS
from lit_ort.ops.attention_scores import CHUNK_ELEMENTS, blocks_of_seen, groups_of, mask_of, piece_elements
from lit_ort.regions.counter_random import DROPOUT_OFF
from tests.compare import mostly
from tests.ops.helpers import MeasuringAllocator, RecordingAllocator, closeness, relative_error, seed_of

attention, attention_backward = torch.ops.lit_ort.attention, torch.ops.lit_ort.attention_backward
SCALE = 0.5


@dataclasses.dataclass
class Case:
    """Attention of 3 x 5 heads with 6 queries and 7 keys."""

    mask: Tensor | None = None
    causal: bool = False
    p: float = 0.0
    seed: int = 3
    keys: int = 7
    value_width: int = 4
    permuted: bool = False

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        sizes = ((6, 4), (self.keys, 4), (self.keys, self.value_width))
        generator = torch.Generator().manual_seed(0)
        if self.permuted:
            return [torch.randn(3, n, 5, w, generator=generator).transpose(1, 2).to(dtype) for n, w in sizes]
        return [torch.randn(3, 5, n, w, generator=generator).to(dtype) for n, w in sizes]

    def grad(self) -> Tensor:
        return torch.randn(3, 5, 6, self.value_width, generator=torch.Generator().manual_seed(1))

    def constants(self) -> tuple[Any, ...]:
        return (self.mask, seed_of(self.seed), self.p, self.causal, SCALE, 2)

    def results(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in self.inputs(dtype)]
        result = attention(*leaves, *self.constants())
        return [result.detach(), *torch.autograd.grad(result, leaves, self.grad().to(dtype))]

    def torch_results(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in self.inputs()]
        mask = self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        result = functional.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=self.causal, scale=SCALE)
        return [result.detach(), *torch.autograd.grad(result, leaves, self.grad().to(dtype))]


def random_mask(*shape: int) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[..., 0] = True
    return mask


def mask_with_hidden_query() -> Tensor:
    mask = random_mask(3, 1, 6, 7)
    mask[1, 0, 2] = False
    return mask


CASES = {
    "plain": Case(),
    "permuted": Case(permuted=True),
    "values of another width": Case(value_width=3),
    "causal": Case(causal=True),
    "causal, fewer keys": Case(causal=True, keys=4),
    "rows": Case(random_mask(3, 1, 6, 7)),
    "permuted rows": Case(random_mask(3, 1, 6, 7), permuted=True),
    "heads": Case(random_mask(1, 5, 6, 7)),
    "keys": Case(random_mask(3, 1, 1, 7)),
    "shared": Case(random_mask(6, 7)),
    "expanded": Case(random_mask(3, 1, 1, 7).expand(3, 5, 6, 7)),
    "added": Case(torch.randn(3, 5, 6, 7, generator=torch.Generator().manual_seed(3))),
    "added by query": Case(torch.randn(6, 1, generator=torch.Generator().manual_seed(4))),
    "query without keys": Case(mask_with_hidden_query()),
    "query without keys, added": Case(torch.zeros(3, 1, 6, 7).masked_fill(~mask_with_hidden_query(), float("-inf"))),
}


@pytest.fixture(params=[(1, 2), (2, 128), (100, 2), (1000, 128)], ids=str)
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the number of heads and of queries in a piece."""
    heads, block = request.param
    monkeypatch.setattr("lit_ort.ops.attention_scores.CHUNK_ELEMENTS", heads * 6 * 7)
    monkeypatch.setattr("lit_ort.ops.attention_scores.BLOCK", block)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", list(CASES))
def test_matches_torch(name: str) -> None:
    for actual, expected in zip(CASES[name].results(), CASES[name].torch_results(), strict=True):
        assert relative_error(actual.double(), expected) < 1e-6


@pytest.mark.parametrize("name", list(CASES))
def test_bf16_is_as_close_as_torch(name: str) -> None:
    case = CASES[name]
    for actual, baseline, exact in zip(
        case.results(torch.bfloat16), case.torch_results(torch.bfloat16), case.torch_results(), strict=True
    ):
        assert actual.dtype == torch.bfloat16
        assert closeness(actual, baseline, exact) < 1.5


@pytest.mark.usefixtures("pieces")
def test_a_mask_and_causal_together() -> None:
    mask = random_mask(3, 1, 6, 7)
    both = Case(mask, causal=True).results()
    for actual, expected in zip(
        both, Case(mask & torch.ones(6, 7, dtype=torch.bool).tril()).torch_results(), strict=True
    ):
        assert relative_error(actual.double(), expected) < 1e-6


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_weights_are_dropped_in_both_directions(causal: bool) -> None:
    """The result is linear in v, so the inner product of result and gradient equals that of v and its gradient."""
    case = Case(causal=causal, p=0.4)
    result, _, _, of_value = case.results()
    assert not torch.allclose(result, Case(causal=causal).results()[0], atol=1e-2)
    torch.testing.assert_close((result * case.grad()).sum(), (of_value * case.inputs()[2]).sum())


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("p", mostly(pytest.mark.sweep, [0.4, 0.0], 2))
@pytest.mark.parametrize("kind", ["plain", "mask", "causal"])
def test_gradcheck(kind: str, p: float) -> None:
    mask = random_mask(2, 1, 3, 4) if kind == "mask" else None
    inputs = [torch.randn(2, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4)]
    constants = (mask, seed_of(5), p, kind == "causal", 0.7, 0)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, *constants), inputs)


def test_masks_depend_on_seed_and_stream_and_off_disables_dropout() -> None:
    inputs = Case().inputs()

    def result(seed: int, stream: int) -> Tensor:
        return attention(*inputs, None, seed_of(seed), 0.4, False, SCALE, stream)

    torch.testing.assert_close(result(DROPOUT_OFF, 0), attention(*inputs, None, seed_of(1), 0.0, False, SCALE, 0))
    assert torch.equal(result(1, 0), result(1, 0))
    assert not torch.equal(result(1, 0), result(1, 1))
    assert not torch.equal(result(1, 0), result(2, 0))


def test_dropout_preserves_the_mean() -> None:
    ones = torch.ones(2, 4, 50, 60)
    result = attention(ones, ones, ones, None, seed_of(3), 0.2, False, 1.0, 0)
    assert abs(float(result.mean()) - 1) < 0.02
    assert float(result.std()) > 0.01


def test_probability_one_drops_everything() -> None:
    result, *gradients = Case(p=1.0).results()
    assert not any(tensor.any() for tensor in (result, *gradients))


def test_blocks_omit_hidden_keys() -> None:
    causal, length = torch.ones(512, 512, dtype=torch.bool).tril_(), 512
    blocks = blocks_of_seen(causal, length)
    assert [block.keys for block in blocks] == [512, 384, 256, 128]
    assert sorted(block.queries.start for block in blocks) == [0, 128, 256, 384]
    padded = torch.ones(1, 512, dtype=torch.bool)
    padded[:, 100:] = False
    assert [(block.size, block.keys) for block in blocks_of_seen(padded, length)] == [(512, 100)]
    assert [block.keys for block in blocks_of_seen(torch.zeros(1, 512, dtype=torch.bool), length)] == [1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(4, 4, 128, 128), (2, 3, 1024, 1024), (1, 2, 300, 9000), (40, 1, 7, 5)])
def test_pieces_cover_all_queries_within_the_promised_size(shape: tuple[int, int, int, int], causal: bool) -> None:
    batch, heads, length, keys = shape
    mask = mask_of(None, causal, length, keys, torch.float32)
    counts = torch.zeros(batch, heads, length, dtype=torch.int64)
    for group in groups_of(*shape, mask):
        for block in group.blocks:
            part = counts[group.rows, group.heads, block.queries]
            part += 1
            assert part.numel() * block.keys <= piece_elements(*shape)
    assert bool((counts == 1).all())
    assert piece_elements(*shape) <= max(CHUNK_ELEMENTS, 128 * keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", mostly(pytest.mark.sweep, ["plain", "permuted", "causal", "rows", "added", "values of another width"], 5)
)
@pytest.mark.parametrize("p", mostly(pytest.mark.sweep, [0.4, 0.0], 2))
@pytest.mark.sampled(2)
def test_opcheck(name: str, p: float, dtype: torch.dtype) -> None:
    case = dataclasses.replace(CASES[name], p=p)
    leaves = [t.requires_grad_() for t in case.inputs(dtype)]
    torch.library.opcheck(attention.default, (*leaves, *case.constants()))
    arguments = (case.grad().to(dtype), *case.inputs(dtype), *case.constants())
    torch.library.opcheck(attention_backward.default, arguments)


@pytest.mark.parametrize("name", ["plain", "causal", "rows"])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_results_lie_in_the_given_memory(name: str, p: float) -> None:
    case, allocator = dataclasses.replace(CASES[name], p=p), RecordingAllocator()
    result = OPERATORS[attention.default].kernel(allocator, *case.inputs(), *case.constants())
    gradients = OPERATORS[attention_backward.default].kernel(allocator, case.grad(), *case.inputs(), *case.constants())
    for actual, expected in zip((result, *gradients), case.results(), strict=True):
        assert allocator.contains(actual)
        torch.testing.assert_close(actual, expected)


def test_heads_are_joined_without_a_copy() -> None:
    result, *gradients = Case(permuted=True).results()
    for tensor in (result, *gradients):
        assert tensor.transpose(1, 2).is_contiguous()


def test_p_must_be_a_probability() -> None:
    with pytest.raises(ValueError, match="dropout probability is 1.5"):
        attention(*Case().inputs(), None, seed_of(1), 1.5, False, SCALE, 0)


@pytest.mark.parametrize(("rows", "queries", "keys"), [(2, 0, 7), (0, 6, 7), (2, 6, 0)])
def test_without_rows_queries_or_keys(rows: int, queries: int, keys: int) -> None:
    q, k, v = (torch.randn(rows, 2, n, 4) for n in (queries, keys, keys))
    result = attention(q, k, v, None, seed_of(1), 0.0, False, SCALE, 0)
    gradients = attention_backward(result, q, k, v, None, seed_of(1), 0.1, False, SCALE, 0)
    assert result.shape == q.shape
    assert not result.any()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dropout", "causal", "mask"])
@pytest.mark.parametrize("shape", [(4, 4, 128, 64), (2, 4, 600, 32)])
def test_needs_no_more_than_the_declared_workspace(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    mask = torch.rand(shape[0], 1, 1, shape[2]) > 0.1 if kind == "mask" else None
    constants = (mask, seed_of(1), 0.1, kind == "causal", SCALE, 0)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    for target, arguments, results in ((attention, (q, k, v), 1), (attention_backward, (q, q, k, v), 3)):
        operator, allocator = OPERATORS[target.default], MeasuringAllocator()
        outputs = operator.kernel(allocator, *arguments, *constants)
        assert operator.workspace_bytes is not None
        workspace = operator.workspace_bytes(*arguments, *constants)
        assert allocator.peak - results * q.numel() * dtype.itemsize <= workspace
        assert workspace < 20 * 2**20
        del outputs
