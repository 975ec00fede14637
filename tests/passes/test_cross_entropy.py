from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lit_ort.compiler.passes.cross_entropy import CrossEntropy
from tests.passes.models import model, operators, run


def text(reduction: str = "mean", ignored: int = -100, weighted: bool = False, scores: str = "float[6, 4]") -> str:
    weight = ", float[4] w" if weighted else ""
    arguments = "x, y, w" if weighted else "x, y"
    attributes = f'reduction = "{reduction}", ignore_index = {ignored}'
    labels = "int64[6, 3]" if scores.count(",") == 2 else "int64[6]"
    return (
        f"g ({scores} x, {labels} y{weight}) => (loss) {{ loss = SoftmaxCrossEntropyLoss<{attributes}>({arguments}) }}"
    )


def inputs(weighted: bool) -> dict[str, torch.Tensor]:
    given = {"x": torch.randn(6, 4) * 5, "y": torch.tensor([0, 1, 2, 3, 1, 1])}
    return {**given, "w": torch.tensor([0.2, 1.5, 1.0, 3.0])} if weighted else given


def test_fires() -> None:
    made = model(text())
    assert CrossEntropy().apply(made).fired == 1
    assert "LogSoftmax" in operators(made)
    assert "SoftmaxCrossEntropyLoss" not in operators(made)


@pytest.mark.parametrize(("scores", "reason"), [("float[6, 4, 3]", "[batch, classes]"), ("double[6, 4]", "DOUBLE")])
def test_must_not_fire(scores: str, reason: str) -> None:
    made = model(text(scores=scores))
    report = CrossEntropy().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert operators(made) == {"SoftmaxCrossEntropyLoss"}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_same_numbers(reduction: str, ignored: int, weighted: bool) -> None:
    given = inputs(weighted)
    plain = model(text(reduction, ignored, weighted))
    (expected,) = run(plain, given)
    CrossEntropy().apply(plain)
    (actual,) = run(plain, given)
    torch.testing.assert_close(actual, expected)
    eager = F.cross_entropy(given["x"], given["y"], given.get("w"), reduction=reduction, ignore_index=ignored)
    torch.testing.assert_close(actual, eager)


def test_every_label_ignored_is_nan_as_in_eager() -> None:
    made = model(text(ignored=1))
    CrossEntropy().apply(made)
    (loss,) = run(made, {"x": torch.randn(6, 4), "y": torch.ones(6, dtype=torch.int64)})
    assert loss.isnan()


def test_infinite_scores_of_ignored_rows_do_not_matter() -> None:
    made = model(text(ignored=1))
    CrossEntropy().apply(made)
    x = torch.randn(6, 4)
    x[1, 0] = -torch.inf
    y = torch.tensor([0, 1, 2, 3, 0, 2])
    (loss,) = run(made, {"x": x, "y": y})
    torch.testing.assert_close(loss, F.cross_entropy(x, y, ignore_index=1))
