"""Models of scvi-tools: counts of genes in single cells."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import scvi
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.distributions import Normal

from benchmarks.library_models.library import Fit, Models

_CELLS_OF_A_BATCH = 1280
_ONE = torch.Size()


def _fixed(self: Normal, sample_shape: Any = _ONE) -> torch.Tensor:
    """Numbers of a normal distribution's spread: a strategy draws other ones than eager."""
    shape = (*sample_shape, *self.loc.shape)
    numbers = (torch.arange(math.prod(shape)).to(self.loc.dtype) * 7.31).sin().reshape(shape)
    return self.loc + self.scale * numbers * 1.4


def _cells() -> Any:
    np.random.seed(0)
    # Two batches of cells, and a tenth for validation: 20 batches of 128.
    return scvi.data.synthetic_iid(batch_size=round(_CELLS_OF_A_BATCH / 0.9), n_genes=500, n_proteins=20)


def _train(fit: Fit, name: str, labels: bool = False, **options: Any) -> nn.Module:
    Normal.rsample = _fixed
    seed_everything(0, verbose=False)
    scvi.settings.seed = 0
    cells, kind = _cells(), getattr(scvi.model, name)
    kind.setup_anndata(cells, **({"labels_key": "labels"} if labels else {"batch_key": "batch"}))
    model = kind(cells, dropout_rate=0.0, **options)
    model.train(max_epochs=fit.epochs, batch_size=128, check_val_every_n_epoch=5, **fit.options)
    return model.module


def _of(name: str, **options: Any) -> Any:
    return functools.partial(_train, name=name, **options)


MODELS: Models = {
    "SCVI": _of("SCVI"),
    "SCVI, two layers": _of("SCVI", n_layers=2, n_hidden=256, n_latent=30, gene_likelihood="nb"),
    "LinearSCVI": _of("LinearSCVI"),
    "PEAKVI": _of("PEAKVI"),
    "CondSCVI": _of("CondSCVI", labels=True),
}
