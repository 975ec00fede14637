"""Kernels against eager, by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_ort.compiler.kernels import KERNELS
from lit_ort.compiler.kernels.attention import CHUNK_ELEMENTS, _blocks, attention, attention_gradient
from lit_ort.compiler.kernels.dropout import draw_mask, dropout
from lit_ort.compiler.kernels.embedding import embedding_gradient, embedding_gradient_onto
from lit_ort.compiler.kernels.linear_cross_entropy import _chunks, linear_cross_entropy, settings
from lit_ort.compiler.kernels.masks import scale_of
from lit_ort.runtime.buffers import BufferPool
from tests.compare import relative_error

ALL = (True, True, True)
IGNORED = -100


class Case:
    """An output layer whose rows make three chunks, the last one short."""

    def __init__(self, ignored: float = 0.3, scale: float = 1.0) -> None:
        self.hidden = torch.randn(300, 40) * scale
        self.weight, self.bias = torch.randn(90, 40), torch.randn(90)
        self.class_weight = torch.rand(90) + 0.5
        self.labels = torch.where(torch.rand(300) < ignored, IGNORED, torch.randint(90, (300,)))

    def kernel(self, *, mean: bool = True, wanted=ALL, bias: bool = True, weighted: bool = False):  # type: ignore[no-untyped-def]
        return linear_cross_entropy(
            BufferPool(),
            *(self.hidden, self.weight, self.labels, torch.tensor(settings(IGNORED, mean, wanted))),
            bias=self.bias if bias else None,
            class_weight=self.class_weight if weighted else None,
        )

    def eager(self, *, mean: bool = True, bias: bool = True, weighted: bool = False, dtype=torch.float64):  # type: ignore[no-untyped-def]
        leaves = [t.detach().to(dtype).requires_grad_() for t in (self.hidden, self.weight, self.bias)]
        scores = F.linear(leaves[0], leaves[1], leaves[2] if bias else None)
        weight = self.class_weight.to(dtype) if weighted else None
        loss = F.cross_entropy(scores, self.labels, weight, reduction="mean" if mean else "sum", ignore_index=IGNORED)
        return loss.detach(), *torch.autograd.grad(loss, leaves[: 2 + bias])


@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_linear_cross_entropy_is_as_eager(
    mean: bool, bias: bool, weighted: bool, ignored: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_ort.compiler.kernels.linear_cross_entropy.CHUNK_BYTES", 110 * 90 * 4)
    case = Case(ignored)
    expected = case.eager(mean=mean, bias=bias, weighted=weighted)
    actual = case.kernel(mean=mean, bias=bias, weighted=weighted, wanted=(True, True, bias))
    for found, reference in zip(actual, expected, strict=False):
        assert relative_error(found.double(), reference) < 1e-6


def test_a_loss_beyond_the_range_of_its_probability_is_exact() -> None:
    case = Case(scale=30.0)
    loss, *_ = case.kernel()
    assert loss > 200
    assert relative_error(loss.double(), case.eager()[0]) < 1e-6


@pytest.mark.parametrize("position", [0, 1, 2])
def test_what_is_not_wanted_is_left_out(position: int) -> None:
    case = Case()
    expected = case.kernel()
    actual = case.kernel(wanted=tuple(k == position for k in range(3)))
    assert torch.equal(actual[0], expected[0])
    assert [gradient.numel() for k, gradient in enumerate(actual[1:]) if k != position] == [0, 0]
    assert torch.equal(actual[1 + position], expected[1 + position])


@pytest.mark.parametrize("mean", [False, True])
def test_without_a_label_that_counts(mean: bool) -> None:
    case = Case(ignored=1.0)
    actual = case.kernel(mean=mean)
    for found, reference in zip(actual, case.eager(mean=mean, dtype=torch.float32), strict=True):
        torch.testing.assert_close(found, reference, equal_nan=True)
    assert bool(actual[0].isnan()) == mean


def test_nan_in_the_activations_reaches_the_loss() -> None:
    case = Case(ignored=0.0)
    case.hidden[7] = float("nan")
    assert case.kernel()[0].isnan()


@pytest.mark.parametrize("label", [90, -1])
def test_a_label_out_of_range_is_named(label: int) -> None:
    case = Case()
    case.labels[17] = label
    with pytest.raises(IndexError, match=f"label {label} is out of range: the loss has 90 classes"):
        case.kernel()


@pytest.mark.parametrize("shape", [(50,), (5, 10)])
def test_embedding_gradient_is_as_eager(shape: tuple[int, ...]) -> None:
    table = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    indices, gradient = torch.randint(20, shape), torch.randn(*shape, 6)
    (expected,) = torch.autograd.grad(table[indices], table, gradient.double())
    indices = torch.where(torch.rand(shape) < 0.3, indices - 20, indices)
    actual: Tensor = embedding_gradient(BufferPool(), torch.tensor([20, 6]), indices, gradient)
    assert relative_error(actual.double(), expected) < 1e-6


def test_embedding_gradient_onto_adds_in_place() -> None:
    held, indices, gradient = torch.randn(20, 6), torch.randint(-20, 20, (5, 3)), torch.randn(5, 3, 6)
    expected = held + embedding_gradient(BufferPool(), torch.tensor([20, 6]), indices, gradient)
    actual = embedding_gradient_onto(BufferPool(), held, indices, gradient)
    assert actual.data_ptr() == held.data_ptr()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_a_mask_drops_its_share_independently(share: float) -> None:
    elements = 400_000
    mask = torch.empty(elements, dtype=torch.uint8)
    draw_mask(mask, share, seed=1)
    spread = (share * (1 - share) / elements) ** 0.5
    assert abs(float(mask.float().mean()) - (1 - share)) <= 5 * spread + 1e-5
    # Four elements share one draw: neighbours at every distance must not know of each other.
    centred = mask.float() - mask.float().mean()
    for distance in (1, 2, 3, 4, 8):
        covariance = float((centred[distance:] * centred[:-distance]).mean())
        assert abs(covariance) <= 5 * share * (1 - share) / elements**0.5 + 1e-6


def test_dropout_keeps_the_mean() -> None:
    data = torch.ones(1000, 501)
    result, mask = dropout(BufferPool(), data, torch.tensor(0.1))
    assert abs(float(result.mean()) - 1) < 3e-3
    assert torch.equal(result, mask * scale_of(0.1))


def test_masks_follow_their_seeds() -> None:
    masks = [torch.empty(999, dtype=torch.uint8) for _ in range(3)]
    for mask, seed in zip(masks, (5, 5, 6), strict=True):
        draw_mask(mask, 0.3, seed)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


class AttentionCase:
    """Attention over 3 x 5 heads of 6 x 7 places."""

    def __init__(self, mask: Tensor | None = None, causal: bool = False, ratio: float = 0.0) -> None:
        self.given = [torch.randn(3, 5, length, 4) for length in (6, 7, 7)]
        self.gradient = torch.randn(3, 5, 6, 4)
        self.mask, self.causal, self.ratio = mask, causal, torch.tensor(ratio)

    def kernel(self) -> list[Tensor]:
        pool, settings = BufferPool(), torch.tensor([0.5, float(self.causal)])
        mask = () if self.mask is None else (self.mask,)
        query, key, value = self.given
        given = (query, key, value, self.ratio, settings, *mask)
        result, seed = attention(pool, *given)
        return [result, *attention_gradient(pool, self.gradient, *given, seed)]

    def eager(self) -> list[Tensor]:
        leaves = [t.double().requires_grad_() for t in self.given]
        mask = self.mask.double() if self.mask is not None and self.mask.is_floating_point() else self.mask
        result = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=self.causal, scale=0.5)
        return [result.detach(), *torch.autograd.grad(result, leaves, self.gradient.double())]


def hides(*shape: int) -> Tensor:
    mask = torch.rand(*shape) > 0.5
    mask[..., 0] = True
    return mask


NOTHING_SEEN = hides(3, 1, 6, 7)
NOTHING_SEEN[1, 0, 2] = False
ATTENTION_CASES = {
    "plain": AttentionCase(),
    "causal": AttentionCase(causal=True),
    "rows": AttentionCase(hides(3, 1, 6, 7)),
    "heads": AttentionCase(hides(1, 5, 6, 7)),
    "keys": AttentionCase(hides(3, 1, 1, 7)),
    "shared": AttentionCase(hides(6, 7)),
    "added": AttentionCase(torch.randn(3, 5, 6, 7)),
    "nothing seen": AttentionCase(NOTHING_SEEN),
}


@pytest.mark.parametrize("block", [2, 128])
@pytest.mark.parametrize("heads", [1, 2, 100])
@pytest.mark.parametrize("name", list(ATTENTION_CASES))
def test_attention_is_as_eager(name: str, heads: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.compiler.kernels.attention.CHUNK_ELEMENTS", heads * 6 * 7)
    monkeypatch.setattr("lit_ort.compiler.kernels.attention.BLOCK", block)
    case = ATTENTION_CASES[name]
    for actual, expected in zip(case.kernel(), case.eager(), strict=True):
        assert relative_error(actual.double(), expected) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_attention_drops_the_same_weights_in_both_directions(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is linear in the values, so its product with a gradient equals that of values and their gradient."""
    monkeypatch.setattr("lit_ort.compiler.kernels.attention.BLOCK", 2)
    case = AttentionCase(causal=causal, ratio=0.4)
    result, _, _, of_value = case.kernel()
    assert not torch.allclose(result, AttentionCase.kernel(_without_dropout(case))[0], atol=1e-2)
    torch.testing.assert_close((result * case.gradient).sum(), (of_value * case.given[2]).sum())


def test_gradients_of_attention_with_dropout_are_those_of_its_result() -> None:
    case = AttentionCase(ratio=0.4)
    directions = [torch.randn_like(t) for t in case.given]
    torch.manual_seed(7)
    _, *gradients = case.kernel()
    moved = []
    for step in (-1e-2, 1e-2):
        shifted = AttentionCase(ratio=0.4)
        shifted.given = [t + step * d for t, d in zip(case.given, directions, strict=True)]
        torch.manual_seed(7)
        moved.append(float((shifted.kernel()[0] * case.gradient).sum()))
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    assert abs((moved[1] - moved[0]) / 2e-2 - slope) < 1e-2 * abs(slope) + 1e-2


def test_attention_leaves_out_keys_that_no_query_of_a_block_sees() -> None:
    causal, length = torch.ones(512, 512, dtype=torch.bool).tril_(), 512
    blocks = _blocks(causal, length)
    assert [block.keys for block in blocks] == [512, 384, 256, 128]
    assert sorted(block.queries.start for block in blocks) == [0, 128, 256, 384]
    padded = torch.ones(1, 512, dtype=torch.bool)
    padded[:, 100:] = False
    assert [(block.size, block.keys) for block in _blocks(padded, length)] == [(512, 100)]
    assert [(block.size, block.keys) for block in _blocks(torch.zeros(1, 512, dtype=torch.bool), length)] == [(512, 1)]


def test_attention_keeps_the_mean_under_dropout() -> None:
    ones = torch.ones(2, 4, 50, 60)
    result, _ = attention(BufferPool(), ones, ones, ones, torch.tensor(0.2), torch.tensor([1.0, 0.0]))
    assert abs(float(result.mean()) - 1) < 0.02
    assert float(result.std()) > 0.01
    assert CHUNK_ELEMENTS > 50 * 60


def _without_dropout(case: AttentionCase) -> AttentionCase:
    plain = AttentionCase(causal=case.causal)
    plain.given, plain.gradient = case.given, case.gradient
    return plain


def closeness(actual: Tensor, rival: Tensor, exact: Tensor) -> float:
    """Error beside that of eager autocast."""
    return relative_error(actual.double(), exact) / relative_error(rival.double(), exact)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_linear_cross_entropy_in_bf16_is_as_close_as_autocast(scale: float, weighted: bool) -> None:
    case = Case(scale=scale)
    exact = case.eager(weighted=weighted)
    leaves = [t.clone().requires_grad_() for t in (case.hidden, case.weight, case.bias)]
    with torch.autocast("cpu", torch.bfloat16):
        scores = F.linear(*leaves)
        loss = F.cross_entropy(scores, case.labels, case.class_weight if weighted else None, ignore_index=IGNORED)
    rivals = (loss.detach(), *torch.autograd.grad(loss, leaves))
    given = (case.hidden, case.weight, case.labels, torch.tensor(settings(IGNORED, True, ALL)), case.bias)
    class_weight = case.class_weight if weighted else None
    actual = linear_cross_entropy(BufferPool(), *given, class_weight, torch.bfloat16)
    assert relative_error(actual[0].double(), exact[0]) < 1e-3
    for found, rival, reference in zip(actual[1:], rivals[1:], exact[1:], strict=True):
        assert found.dtype == torch.float32
        assert closeness(found, rival, reference) < 1.5


def test_a_sure_prediction_keeps_its_loss_and_gradient_in_bf16() -> None:
    """The label's probability is 1 in bfloat16; what it lacks is the loss."""
    hidden, weight = torch.eye(4), torch.eye(4) * 9
    labels = torch.arange(4)
    given = (hidden, weight, labels, torch.tensor(settings(IGNORED, True, (True, True, False))), None, None)
    actual = linear_cross_entropy(BufferPool(), *given, torch.bfloat16)
    expected = linear_cross_entropy(BufferPool(), *given)
    assert expected[0] < 1e-3
    for found, reference in zip(actual[:3], expected[:3], strict=True):
        assert relative_error(found, reference) < 1e-2


@pytest.mark.parametrize("name", list(ATTENTION_CASES))
@pytest.mark.parametrize("results", [torch.float32, torch.bfloat16])
def test_attention_in_bf16_is_as_close_as_rounding(name: str, results: torch.dtype) -> None:
    case = ATTENTION_CASES[name]
    types = {"products": torch.bfloat16, "results": results}
    pool, constants = BufferPool(), torch.tensor([0.5, float(case.causal)])
    query, key, value = case.given
    given = (query, key, value, case.ratio, constants, *(() if case.mask is None else (case.mask,)))
    result, seed = attention(pool, *given, **types)
    gradients = attention_gradient(pool, case.gradient, *given, seed, **types)
    for actual, expected in zip((result, *gradients), case.eager(), strict=True):
        assert actual.dtype == results
        assert relative_error(actual.double(), expected) < 1.5e-2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("end", ["", "_rounded"])
def test_products_in_bf16(bias: bool, end: str) -> None:
    kernel = KERNELS[f"bf16_gemm_nt{'_bias' if bias else ''}{end}"]
    a, b, c = torch.randn(50, 40), torch.randn(30, 40), torch.randn(30)
    actual = kernel.run(BufferPool(), a, b.bfloat16(), *([c] if bias else []))
    assert isinstance(actual, Tensor)
    assert actual.dtype == (torch.bfloat16 if end else torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        rival = F.linear(a, b, c if bias else None)
    assert closeness(actual, rival, F.linear(a.double(), b.double(), c.double() if bias else None)) < 1.1


@pytest.mark.parametrize(
    ("rows", "chunks"), [(0, []), (1, [1]), (100, [100]), (101, [51, 50]), (301, [76, 76, 76, 73])]
)
def test_chunks_are_few_and_even(rows: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.compiler.kernels.linear_cross_entropy.CHUNK_BYTES", 100 * 90 * 4)
    pieces = _chunks(rows, 90, 4)
    assert [piece.stop - piece.start for piece in pieces] == chunks
