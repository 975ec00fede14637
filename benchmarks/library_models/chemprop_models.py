"""Models of chemprop: properties of molecules by messages along their bonds."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
from chemprop import data, models, nn
from lightning import pytorch as pl
from rdkit import Chem
from rdkit.Chem import Descriptors
from torch import nn as torch_nn

from benchmarks.library_models.library import Fit, Models

_ENDS = ("C", "CC", "CO", "CN", "C(C)C", "c1ccccc1", "c1ccncc1", "C1CCCCC1", "C(=O)O", "C#N", "C(F)(F)F", "C1CCNCC1")
_MIDDLES = ("", "C", "CCC", "CO", "CC(=O)N", "CNC", "c1ccc(", "CS(=O)(=O)N")
_MOLECULES = 20 * 50


@functools.cache
def _molecules() -> list[str]:
    texts = (a + b + c + (")cc1" if b.endswith("(") else "") for a, b, c in itertools.product(_ENDS, _MIDDLES, _ENDS))
    valid = [text for text in texts if Chem.MolFromSmiles(text) is not None]
    random.Random(0).shuffle(valid)
    return (valid * 3)[: _MOLECULES + 100]


def _train(fit: Fit, messages: Any, aggregation: Any, classes: bool = False) -> torch_nn.Module:
    pl.seed_everything(0, verbose=False)
    smiles = _molecules()
    targets = np.array([[Descriptors.MolLogP(Chem.MolFromSmiles(text))] for text in smiles])
    if classes:
        targets = (targets > np.median(targets)).astype(float)
    points = [data.MoleculeDatapoint.from_smi(*pair) for pair in zip(smiles, targets, strict=True)]
    training, validation = data.MoleculeDataset(points[:_MOLECULES]), data.MoleculeDataset(points[_MOLECULES:])
    network = messages()
    if classes:
        head = nn.BinaryClassificationFFN(input_dim=network.output_dim)
    else:
        scaler = training.normalize_targets()
        validation.normalize_targets(scaler)
        unscale = nn.UnscaleTransform.from_standard_scaler(scaler)
        head = nn.RegressionFFN(input_dim=network.output_dim, output_transform=unscale)
    module = models.MPNN(network, aggregation(), head, batch_norm=True)
    pl.Trainer(**fit.quiet_options, max_epochs=fit.epochs).fit(
        module,
        data.build_dataloader(training, batch_size=50, num_workers=0, seed=0),
        data.build_dataloader(validation, batch_size=50, num_workers=0, shuffle=False),
    )
    return module


MODELS: Models = {
    "bonds, mean": functools.partial(_train, messages=nn.BondMessagePassing, aggregation=nn.MeanAggregation),
    "atoms, sum": functools.partial(_train, messages=nn.AtomMessagePassing, aggregation=nn.SumAggregation),
    "bonds, classes": functools.partial(
        _train, messages=nn.BondMessagePassing, aggregation=nn.NormAggregation, classes=True
    ),
}
