"""The models of this project's own tasks: the published widths and vocabularies, with fewer layers when small."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.models.case import SMALL, Made, Model, itself
from benchmarks.workloads import CLIP, Workload, bert, gpt2, transformer_lm


class Step(nn.Module):
    """A workload's module that returns its loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.module, self._loss = workload.build(), workload.loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.module, batch)


def made(workload: Workload) -> Made:
    return Step(workload), {"batch": workload.batch()}


MODELS: dict[str, Model] = {
    "task transformer LM": Model(lambda size: made(transformer_lm(layers=2 if size == SMALL else 6)), itself, CLIP),
    "task GPT-2": Model(lambda size: made(gpt2(layers=4 if size == SMALL else 12)), itself, CLIP),
    "task BERT": Model(lambda size: made(bert(layers=4 if size == SMALL else 12)), itself, CLIP),
}
