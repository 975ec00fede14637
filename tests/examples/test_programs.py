"""The example programs, each in a separate process: a few steps with both strategies, and the full run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "cli.yaml"
STRATEGIES = (pytest.param("eager", marks=pytest.mark.sweep), "ort")
SECONDS = 240


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run a program of `examples/` and return its output and log.

    Args:
        folder: the working directory; what the program writes stays there.
        program: path below `examples/`.
        arguments: of the command line.
    """
    ended = run_script(ROOT / "examples" / program, arguments, folder, SECONDS)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert "LitOrtWarning" not in output
    return output


def number(pattern: str, output: str) -> float:
    """Return the last number that a pattern's group matches."""
    matches = re.findall(pattern, output)
    assert matches, f"{pattern!r} is not in:\n{output}"
    return float(matches[-1])


def graph_kinds(output: str) -> set[str]:
    """Return the kinds of graphs in the last report of `explain`, which shows no fallback."""
    lines = re.findall(r"^lit_ort: \d+ graphs? \(.*", output, re.MULTILINE)
    assert lines, output
    assert "no fallback" in lines[-1], output
    return set(re.findall(r"\d+ (fused|split|forward)", lines[-1]))


def assert_ran(output: str, strategy: str, kinds: set[str]) -> None:
    if strategy == "eager":
        assert "graph" not in output
    else:
        assert graph_kinds(output) == kinds


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
class TestAFewSteps:
    def test_plain_torch(self, strategy: str, tmp_path: Path) -> None:
        output = run(tmp_path, "plain_torch.py", "--strategy", strategy, "--steps", "5")
        assert_ran(output, strategy, {"fused"})

    def test_fabric(self, strategy: str, tmp_path: Path) -> None:
        output = run(tmp_path, "fabric.py", "--strategy", strategy, "--steps", "5")
        assert_ran(output, strategy, {"fused"})

    def test_fabric_in_bf16(self, strategy: str, tmp_path: Path) -> None:
        output = run(tmp_path, "fabric.py", "--strategy", strategy, "--steps", "5", "--precision", "bf16-mixed")
        assert_ran(output, strategy, {"fused"})

    @pytest.mark.sweep
    def test_fabric_in_two_processes(self, strategy: str, tmp_path: Path) -> None:
        output = run(tmp_path, "fabric.py", "--strategy", strategy, "--steps", "5", "--devices", "2")
        assert_ran(output, strategy, {"fused"})

    def test_gan(self, strategy: str, tmp_path: Path) -> None:
        output = run(tmp_path, "gan.py", "--strategy", strategy, "--steps", "5")
        assert "trained: " in output
        if strategy == "ort":
            assert graph_kinds(output) == {"fused"}

    @pytest.mark.sweep
    def test_lora(self, strategy: str, tmp_path: Path) -> None:
        pytest.importorskip("peft")
        output = run(tmp_path, "lora.py", "--strategy", strategy, "--pretraining-steps", "3", "--steps", "3")
        assert "trained parameters: 69,632 of 791,680" in output
        assert "frozen parameters that changed: 0" in output
        assert "tensors in the checkpoint: 56, of which not adapters: 0" in output
        assert_ran(output, strategy, {"fused", "forward"})

    def test_cli(self, strategy: str, tmp_path: Path) -> None:
        arguments = ["--config", str(CONFIG), "--data.count", "256", "--trainer.max_epochs", "1"]
        if strategy == "eager":
            arguments += ["--trainer.strategy", "auto"]
        output = run(tmp_path, "cli.py", "fit", *arguments)
        assert_ran(output, strategy, {"fused", "forward"})


def test_a_step_by_hand(tmp_path: Path) -> None:
    output = run(tmp_path, "a_step_by_hand.py")
    loss, in_eager = re.findall(r"(?:loss|eager) (\S+\d)", output)
    assert float(loss) == pytest.approx(float(in_eager), rel=1e-5)
    errors = [float(error) for error in re.findall(r"of a gradient: (\S+)", output)]
    assert len(errors) == 3
    assert max(errors) < 1e-5
    assert "region_default = region" in output


@pytest.mark.slow
class TestTheFullRun:
    @pytest.mark.sweep
    def test_image_classifier(self, tmp_path: Path) -> None:
        output = run(tmp_path, "image_classifier.py")
        assert number(r"validation accuracy (\S+)", output) > 0.9
        assert graph_kinds(output) == {"fused", "forward"}

    @pytest.mark.sweep
    def test_gan(self, tmp_path: Path) -> None:
        output = run(tmp_path, "gan.py")
        assert "untrained: 0 of 8 modes" in output
        assert number(r"\btrained: (\d) of 8 modes", output) >= 6
        assert graph_kinds(output) == {"fused"}

    @pytest.mark.sweep
    def test_lora(self, tmp_path: Path) -> None:
        pytest.importorskip("peft")
        output = run(tmp_path, "lora.py")
        base = number(r"test loss (\S+) of the base", output)
        assert number(r"of the base, (\S+) with the adapters", output) < base - 0.2

    @pytest.mark.sweep
    def test_cli(self, tmp_path: Path) -> None:
        output = run(tmp_path, "cli.py", "fit", "--config", str(CONFIG))
        assert number(r"validation loss (\S+) nats", output) < 30

    @pytest.mark.sweep
    def test_fabric(self, tmp_path: Path) -> None:
        output = run(tmp_path, "fabric.py")
        assert number(r"digits at the right position (\S+)", output) > 0.9

    @pytest.mark.sweep
    def test_plain_torch(self, tmp_path: Path) -> None:
        output = run(tmp_path, "plain_torch.py")
        naive = number(r"the last value as the forecast: ([\d.]+)", output)
        assert number(r"mean squared error (\S+)", output) < naive / 4

    @pytest.mark.sweep
    def test_sweep(self, tmp_path: Path) -> None:
        output = run(tmp_path, "sweep/sweep.py", "-m", "model.width=32,64", "strategy=eager,ort")
        scores = re.findall(r"^width (\d+), (\w+): accuracy (\S+)", output, re.MULTILINE)
        assert [score[:2] for score in scores] == [
            (width, strategy) for width in ("32", "64") for strategy in ("SingleDeviceStrategy", "ORTStrategy")
        ]
        assert min(float(score[2]) for score in scores) > 0.9
        assert graph_kinds(output) == {"fused", "forward"}
