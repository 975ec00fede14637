"""ORTOptions: which values each takes, and which of them decide what a graph is compiled to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_ort import ORTOptions
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.cache.store import GraphCache
from lit_ort.errors import OptionsError
from lit_ort.runtime.engines.choice import engine_of

# Another value of every option, and whether a graph compiled with it is another one.
OTHERS: dict[str, tuple[Any, bool]] = {
    "precision": ("bf16-mixed", True),
    "fallback": ("error", False),
    "verify_first_step": (True, False),
    "verify_every_n_steps": (7, False),
    "verify_tolerance": (1e-2, False),
    "recompute": (0.5, True),
    "optimizer_in_graph": (True, True),
    "dynamic": ("never", True),
    "disable_passes": (("merge_equal",), True),
    "dump_dir": ("graphs", False),
    "cache_dir": ("elsewhere", False),
    "threads": (3, False),
    "allow_spinning": (True, False),
    "engine": ("stock", False),
    "keep_memory": (False, False),
}


def test_every_option_is_tested() -> None:
    assert OTHERS.keys() == {field.name for field in dataclasses.fields(ORTOptions)}


@pytest.mark.parametrize("name", OTHERS)
def test_only_what_decides_about_the_graph_is_in_the_key(name: str, tmp_path: Path) -> None:
    other, decides = OTHERS[name]
    plain = ORTOptions(cache_dir=str(tmp_path))
    changed = dataclasses.replace(plain, **{name: other})
    assert getattr(changed, name) != getattr(plain, name)
    assert (changed.key != plain.key) is decides
    names = [GraphCache(options, engine_of("auto"))._path("digest").name for options in (plain, changed)]
    assert (names[0] != names[1]) is decides


@pytest.mark.parametrize("value", [None, "layers", 0.0, 0.5, 1.0])
def test_recompute_takes(value: str | float | None) -> None:
    assert ORTOptions(recompute=value).recompute == value


@pytest.mark.parametrize("value", ["all", 0, 1, True, -0.1, 1.5, float("nan"), float("inf")])
def test_recompute_refuses(value: Any) -> None:
    with pytest.raises(OptionsError, match=r"recompute=.* is neither None nor .* a float from 0 to 1\. Pass "):
        ORTOptions(recompute=value)


class Saves(nn.Module):
    """A chain of activations, which the backward could compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x)).exp().tanh()
        return x.pow(2).mean()


def test_a_share_of_activation_memory_gives_the_same_gradients_for_less_memory() -> None:
    torch.manual_seed(0)
    module, x = Saves(), torch.randn(256, 64)
    gradients, peaks = [], []
    for recompute in (None, 0.5):
        backend = ORTBackend(ORTOptions(fallback="error", recompute=recompute))
        torch.compile(module, backend=backend)(x).backward()
        (report,) = backend.compile_log.graphs
        peaks.append(report.peak_bytes)
        gradients.append([parameter.grad for parameter in module.parameters()])
        module.zero_grad()
        torch._dynamo.reset()
    torch.testing.assert_close(gradients[1], gradients[0])
    assert peaks[1] < 0.6 * peaks[0]
