"""ORTOptions: the values of each option, and which options the compiled graph depends on."""

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
from lit_ort.options import Recompute
from lit_ort.runtime.engines.choice import engine_of

# Another value of every option, and whether the compiled graph depends on it.
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
def test_the_key_has_the_options_that_the_graph_depends_on(name: str, tmp_path: Path) -> None:
    value, is_in_key = OTHERS[name]
    plain = ORTOptions(cache_dir=str(tmp_path))
    changed = dataclasses.replace(plain, **{name: value})
    assert getattr(changed, name) != getattr(plain, name)
    assert (changed.key != plain.key) is is_in_key
    names = [GraphCache(options, engine_of("auto")).path("digest").name for options in (plain, changed)]
    assert (names[0] != names[1]) is is_in_key


@pytest.mark.parametrize("value", [None, "layers", 0.0, 0.5, 1.0])
def test_recompute_accepts(value: Recompute | None) -> None:
    assert ORTOptions(recompute=value).recompute == value


@pytest.mark.parametrize("value", ["all", 0, 1, True, -0.1, 1.5, float("nan"), float("inf")])
def test_recompute_rejects(value: Any) -> None:
    with pytest.raises(OptionsError, match=r"recompute=.* must be None, .* or a float from 0 to 1\. Pass "):
        ORTOptions(recompute=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify_tolerance": "1e-4"}, "verify_tolerance='1e-4' is not a number"),
        ({"verify_tolerance": 0}, "verify_tolerance=0 must be above 0"),
        ({"disable_passes": None}, "disable_passes=None is not a sequence of names"),
        ({"dump_dir": 3}, "dump_dir=3 is not a path"),
    ],
)
def test_other_values_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        ORTOptions.from_mapping(options)


@pytest.mark.parametrize("name", ["cache_dir", "dump_dir"])
def test_folders_stay_where_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    paths = [getattr(ORTOptions.from_mapping({name: value}), name) for value in ("~/a", "a")]
    assert paths == [str(tmp_path / "a")] * 2


class Activations(nn.Module):
    """A chain of activations, which the backward can recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x)).exp().tanh()
        return x.pow(2).mean()


def test_a_share_of_activation_memory_needs_less_memory_for_the_same_gradients() -> None:
    torch.manual_seed(0)
    module, x = Activations(), torch.randn(256, 64)
    gradients, peaks = [], []
    for recompute in (None, 0.5):
        backend = ORTBackend(ORTOptions(fallback="error", recompute=recompute))
        torch.compile(module, backend=backend)(x).backward()
        (report,) = backend.compile_log.graphs
        peaks.append(report.peak_bytes)
        gradients.append([parameter.grad for parameter in module.parameters()])
        module.zero_grad()
        torch.compiler.reset()
    torch.testing.assert_close(gradients[1], gradients[0])
    assert peaks[1] < 0.6 * peaks[0]
