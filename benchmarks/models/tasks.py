"""The models of this project's tasks with the published widths and vocabularies; small ones have fewer layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.models.case import SMALL, Model, ModuleAndBatch, identity
from benchmarks.workloads import CLIP, Workload, bert, gpt2, transformer_lm


class Step(nn.Module):
    """A workload's module that returns its loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.module, self._loss = workload.build(), workload.loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.module, batch)


def module_and_batch(workload: Workload) -> ModuleAndBatch:
    return Step(workload), {"batch": workload.batch()}


MODELS: dict[str, Model] = {
    "task transformer LM": Model(
        lambda size: module_and_batch(transformer_lm(layers=2 if size == SMALL else 6)), identity, CLIP
    ),
    "task GPT-2": Model(lambda size: module_and_batch(gpt2(layers=4 if size == SMALL else 12)), identity, CLIP),
    "task BERT": Model(lambda size: module_and_batch(bert(layers=4 if size == SMALL else 12)), identity, CLIP),
}
