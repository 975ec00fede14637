"""Verification against eager during training: it passes, detects errors, and doesn't change the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ort.backend import verify
from lit_ort.errors import VerificationError
from tests.backend.classifier import Classifier, classes
from tests.backend.wrong import scale_outputs
from tests.compare import backend


def test_verification_passes_with_dropout() -> None:
    engine = backend(verify_first_step=True)
    loss = torch.compile(Classifier.loss, backend=engine)
    loss(Classifier(dropout=0.3), *classes(7)).backward()
    assert engine.compile_log.graphs[0].kind == "fused"


def test_verification_names_the_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_outputs(monkeypatch, (5, 8), 1.5)
    loss = torch.compile(Classifier.loss, backend=backend(verify_first_step=True))
    with pytest.raises(VerificationError, match=r"gradient of head\.weight 5\.0e-01"):
        loss(Classifier(), *classes(7))


def test_every_nth_run_is_verified_and_reported() -> None:
    engine = backend(verify_every_n_steps=3)
    module = Classifier(dropout=0.3)
    loss = torch.compile(Classifier.loss, backend=engine)
    for _ in range(7):
        loss(module, *classes(7)).backward()
    (report,) = engine.compile_log.graphs
    assert report.verified == 3
    assert all(float(line.rpartition(" ")[2]) < 1e-5 for line in report.worst)
    assert "verified 3 times; errors at most " in str(report)


def test_a_later_wrong_run_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backend(verify_every_n_steps=2)
    module = Classifier()
    loss = torch.compile(Classifier.loss, backend=engine)
    loss(module, *classes(7))
    loss(module, *classes(7))
    monkeypatch.setattr(verify, "run_in_eager", lambda graph, inputs, precision: [inputs[0].new_zeros(())])
    with pytest.raises(VerificationError, match="disagrees"):
        loss(module, *classes(7))


def test_verification_does_not_change_random_numbers() -> None:
    def masks(**options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        loss = torch.compile(Classifier.loss, backend=backend(**options))
        module = Classifier(dropout=0.5)
        return [loss(module, *classes(7)).detach() for _ in range(4)]

    assert torch.equal(torch.stack(masks()), torch.stack(masks(verify_every_n_steps=1)))
