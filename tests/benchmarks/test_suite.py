"""`benchmarks/suite.py`: its models, its tables, and that it continues where it was stopped."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks import suite, suite_report
from benchmarks.models import GROUPS, MODELS
from benchmarks.models.case import SIZES


def line(model: str, eager: float, inductor: float, ort: float, **fields: Any) -> dict[str, Any]:
    times = {"eager": eager, "inductor": inductor, "ort": ort}
    figures = {
        name: {
            "step_ms": [ms, ms * 3, ms],
            "first_step_s": 10.0 if name == "inductor" else 2.0,
            "cached_first_step_s": 1.0,
            "peak_mb": 100.0 if name == "eager" else 50.0,
            "gradient_error": 1e-6,
            "ran": "time of runs: 97% ONNX Runtime, 3% torch operators" if name == "ort" else "",
            "fallbacks": [],
        }
        for name, ms in times.items()
    }
    setup = {"machine": "a machine", "versions": {"torch": "2.13.0"}, "date": "2026-11-23"}
    return {"model": model, "size": "small", "precision": "32-true", "figures": figures, **setup, **fields}


def test_the_groups_have_35_or_more_models() -> None:
    assert len(MODELS) == sum(map(len, GROUPS.values())) >= 35
    assert len(GROUPS) == 6


@pytest.mark.parametrize("name", ["BERT", "Llama", "Whisper", "ResNet", "graph network"])
def test_sizes_differ(name: str) -> None:
    counts = []
    for size in SIZES:
        module, batch = MODELS[name].make(size)
        assert batch
        counts.append(sum(parameter.numel() for parameter in module.parameters()))
        assert isinstance(module, nn.Module)
    assert counts[0] <= counts[1]


def test_the_table_lists_the_slowest_models_first() -> None:
    text = suite_report.table([line("BERT", 100, 80, 40), line("Llama", 100, 80, 90), line("ResNet", 100, 120, 110)])
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:4]] == ["| ResNet", "| Llama", "| BERT"]
    assert "| BERT | 100.0 | 80.0 | 40.0 | 0.40 | 0.50 | 10.0, 2.0, 1.0 | 100, 50, 50 | 97 % | 1e-06 | 0 |" in rows


def test_models_with_errors_are_listed() -> None:
    failed = {"model": "Swin", "size": "small", "precision": "32-true", "error": "no compiler"}
    assert "Swin: no compiler" in suite_report.table([failed, line("BERT", 2, 2, 1)])


def test_the_summary_names_the_slowest_models() -> None:
    lines = [line("BERT", 100, 80, 40), line("Llama", 100, 80, 90), line("ResNet", 100, 120, 110)]
    text = suite_report.summary([*lines, line("task GPT-2", 100, 80, 50)])
    assert "| small, 32-true | all of these, 3 | 0.73 | 2 of 3 | 0.80 | 2 of 3 | 0.50 | 0.20 |" in text
    assert "| small, 32-true | this project's tasks, 1 | 0.50 | 1 of 1 | 0.62 | 1 of 1 | 0.50 | 0.20 |" in text
    assert text.endswith(
        "Slowest compared with eager, small, 32-true: ResNet 1.10, Llama 0.90, task GPT-2 0.50, BERT 0.40; compared "
        "with inductor: Llama 1.12, ResNet 0.92, task GPT-2 0.62, BERT 0.50."
    )


def test_a_baseline_can_be_left_out(tmp_path: Path) -> None:
    lines = [line("BERT", 100, 80, 40), line("Llama", 100, 80, 90)]
    for one in lines:
        del one["figures"]["inductor"]
    assert "| BERT | 100.0 |  | 40.0 | 0.40 |  | , 2.0, 1.0 | 100, , 50 | 97 % | 1e-06 | 0 |" in suite_report.table(
        lines
    )
    text = suite_report.summary(lines)
    assert "| small, 32-true | all of these, 2 | 0.60 | 2 of 2 |  |  | 0.50 |  |" in text
    assert text.endswith("Slowest compared with eager, small, 32-true: Llama 0.90, BERT 0.40.")
    suite_report.picture(lines, tmp_path / "suite.png")
    assert (tmp_path / "suite.png").exists()


def test_what_is_compared_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["suite.py", "results.jsonl", "--baselines", "inductor", "ort"])
    with pytest.raises(SystemExit):
        suite.parse()
    assert "argument --baselines: eager and ort are compared, so both are needed" in capsys.readouterr().err


@pytest.mark.sweep
def test_each_baseline_is_measured_in_a_process() -> None:
    line = suite.measure_model("MLP", "small", "32-true", rounds=2)
    assert "error" not in line
    assert [len(figures["step_ms"]) for figures in line["figures"].values()] == [2, 2, 2]
    assert line["figures"]["ort"]["gradient_error"] < 1e-5
    assert all(figures["peak_mb"] > 0 for figures in line["figures"].values())


def test_the_first_step_of_a_turn_is_not_counted() -> None:
    steps = iter([0.2, 0.02, 0.01, 0.03])
    assert suite.turn(lambda: next(steps)) == 0.02
    assert next(steps, None) is None
    assert suite.turn(lambda: 0.3) == 0.3


def test_the_error_of_a_failed_process_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; raise ValueError(f'no {sys.argv[-1]} of {sys.argv[-4]}')")
    monkeypatch.setattr(suite, "__file__", str(program))
    assert suite.measure_model("MLP", "small", "32-true", rounds=1)["error"] == "eager: ValueError: no eager of MLP"


@pytest.mark.sweep
def test_an_error_of_an_option_is_recorded() -> None:
    line = suite.measure_model("MLP", "small", "no precision", rounds=1)
    assert line["error"].startswith("eager: lit_ort.errors.OptionsError: precision='no precision'")


def test_the_geometric_mean() -> None:
    assert suite_report.mean([0.5, 2.0]) == pytest.approx(1.0)


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "suite.png"
    suite_report.picture([line("BERT", 100, 80, 40), line("ResNet", 100, 120, 110)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_continues_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(line("BERT", 2, 2, 1)) + "\n")
    names: list[str] = []

    def measure_model(name: str, size: str, precision: str, rounds: int, baselines: Any) -> dict[str, Any]:
        names.append(name)
        return line(name, 3, 2, 1)

    monkeypatch.setattr(suite, "measure_model", measure_model)
    arguments = {
        "models": ["BERT", "Llama"],
        "sizes": ["small"],
        "precisions": ["32-true"],
        "rounds": 1,
        "baselines": None,
    }
    suite.measure(argparse.Namespace(results=results, **arguments))
    assert names == ["Llama"]
    assert [result["model"] for result in suite.read(results)] == ["BERT", "Llama"]
