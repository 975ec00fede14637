"""Measures fits of Lightning libraries' models in eager PyTorch and with strategy "ort", and compares what they train.

    python benchmarks/libraries.py results.jsonl                            # all libraries, 3 epochs of 20 steps: hours
    python benchmarks/libraries.py results.jsonl --libraries darts --epochs 50 --ways eager auto
    python benchmarks/libraries.py results.jsonl --report                   # the table of the measurements so far

Each library has an environment of its own, which is made at its first use. Each fit runs in its own process, with
dropout off; the processes take turns, and the least time of each way counts. `auto` and `always` are values of the
strategy's `compile`. `moved` is eager from weights that differ by a rounding: how far a training drifts by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EAGER, AUTO, ALWAYS, MOVED = WAYS = ("eager", "auto", "always", "moved")
ENVIRONMENTS = Path(tempfile.gettempdir()) / "lit_ort-libraries"
# What the environments share with the project's own; the libraries choose their other packages.
_SHARED = ("torch==", "lightning==", "onnx==", "onnxruntime", "onnxscript==")
_MOVED_BY = 1e-7
_LIMIT_SECONDS = 900
# A loss differs if it is this much further from eager's than that of the moved weights.
_LOSS_TOLERANCE, _NOISE_FACTOR = 1e-3, 10


@dataclasses.dataclass(frozen=True)
class Library:
    """A library.

    Args:
        requirement: what pip installs.
        models: the module of `benchmarks.library_models` that trains its models.
        lightning: the package whose Trainer it uses.
    """

    requirement: str
    models: str
    lightning: str = "lightning.pytorch"


LIBRARIES: Mapping[str, Library] = {
    "darts": Library("darts[torch]", "darts_models", "pytorch_lightning"),
    "neuralforecast": Library("neuralforecast", "neuralforecast_models", "pytorch_lightning"),
    "gluonts": Library("gluonts[torch]", "gluonts_models"),
    "pytorch-forecasting": Library("pytorch-forecasting", "forecasting_models"),
    "pytorch-tabular": Library("pytorch-tabular requests", "tabular_models", "pytorch_lightning"),
    "scvi-tools": Library("scvi-tools", "scvi_models"),
    "chemprop": Library("chemprop", "chemprop_models"),
    "timm": Library("timm", "timm_models"),
    "torchgeo": Library("torchgeo", "torchgeo_models"),
    "rl4co": Library("rl4co", "rl4co_models"),
}


def main() -> None:
    arguments = parse()
    if arguments.alone:
        alone(*arguments.alone)
        return
    if not arguments.report:
        for name in arguments.libraries:
            measure(name, arguments)
    print(table(read(arguments.results)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file with a line of JSON for each model")
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES), metavar="LIBRARY")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only these")
    parser.add_argument("--epochs", type=int, default=3, help="of a fit, of 20 steps each")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="what is measured")
    parser.add_argument("--rounds", type=int, default=2, help="fits of each way; the weights are those of the first")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="the folder of the environments")
    parser.add_argument("--report", action="store_true", help="measure nothing, only print the table")
    parser.add_argument("--alone", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, arguments: argparse.Namespace) -> None:
    """Measures each model of a library that has no line yet, and adds its line."""
    python = environment(LIBRARIES[name], arguments.environments / name)
    script = [str(python), "-W", "ignore", __file__]
    listed = subprocess.run([*script, "-", "--alone", name, "", "", "", ""], capture_output=True, text=True, check=True)
    measured = {(line["library"], line["model"], line["epochs"]) for line in read(arguments.results)}
    for model in json.loads(listed.stdout.splitlines()[-1]):
        is_wanted = arguments.models is None or model in arguments.models
        if is_wanted and (name, model, arguments.epochs) not in measured:
            line = {"library": name, "model": model, "epochs": arguments.epochs}
            line |= measured_model([*script, "-", "--alone", name, model], arguments)
            print(json.dumps(line), flush=True)
            with arguments.results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def environment(library: Library, folder: Path) -> Path:
    """The Python of an environment with a library and this checkout."""
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(line for line in lines if line.startswith(_SHARED)))
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(constraints), "-e", str(ROOT)]
        subprocess.run([*install, *library.requirement.split()], check=True)
        ready.touch()
    return python


def measured_model(command: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The fits of one model in all ways, in turns."""
    fits: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(arguments.rounds):
            order = [*arguments.ways[k % len(fits) :], *arguments.ways[: k % len(fits)]]
            # The moved weights are for a comparison of values.
            for way in (way for way in order if way != MOVED or k == 0):
                file = Path(folder) / f"{way}-{k}"
                full = [*command, way, str(arguments.epochs), str(file)]
                try:
                    done = subprocess.run(full, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
                except subprocess.TimeoutExpired:
                    return {"error": f"{way}: longer than {_LIMIT_SECONDS} s"}
                if done.returncode or not file.exists():
                    return {"error": f"{way}: {' '.join(done.stderr.strip().splitlines()[-1:])}"}
                fits[way].append(json.loads(file.read_text()))
        line = {way: _times(fits[way]) for way in fits if way != MOVED}
        return line | _differences(fits, Path(folder))


def _times(fits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    best = {name: round(min(fit[name] for fit in fits), 3) for name in ("step_ms", "mean_ms", "fit_s")}
    return best | {"explanation": fits[0]["explanation"]}


def _differences(fits: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> dict[str, Any]:
    """How far losses and weights are from eager's, and those of the moved weights."""
    import torch

    if EAGER not in fits:
        return {}
    weights = {way: torch.load(folder / f"{way}-0.pt") for way in fits}
    losses = {way: fits[way][0]["losses"][:10] for way in fits}
    others = [way for way in fits if way != EAGER]
    line: dict[str, Any] = {
        "losses": {way: _relative(losses[EAGER], losses[way]) for way in others},
        "weights": {way: _furthest(weights[EAGER], weights[way]) for way in others},
    }
    limit = _LOSS_TOLERANCE + _NOISE_FACTOR * line["losses"].get(MOVED, 0.0)
    line["differs"] = [way for way in others if way != MOVED and not line["losses"][way] <= limit]
    return line


def _relative(expected: Iterable[float], actual: Iterable[float]) -> float:
    return max(abs(a - b) / max(1e-3, abs(a)) for a, b in zip(expected, actual, strict=True))


def _furthest(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> float:
    return max(float((expected[k] - actual[k]).norm() / expected[k].norm().clamp(min=1e-6)) for k in expected)


def alone(name: str, model: str, way: str, epochs: str, file: str) -> None:
    """Fits one model in this process; without a model, prints the names of the library's models."""
    import torch

    # A strategy's name has to be known to both packages.
    explain = importlib.import_module("lit_ort").explain
    from benchmarks.library_models.library import Fit, Models

    library = LIBRARIES[name]
    models: Models = importlib.import_module(f"benchmarks.library_models.{library.models}").MODELS
    if not model:
        print(json.dumps(list(models)))
        return
    os.environ["LIT_ORT_COMPILE"] = way if way in (AUTO, ALWAYS) else AUTO
    watch = _watch(library.lightning, way)
    begin = time.perf_counter()
    module = models[model](Fit("ort" if way in (AUTO, ALWAYS) else "auto", [watch], int(epochs)))
    seconds = time.perf_counter() - begin
    # The first third is for compilations and caches.
    late = watch.seconds[len(watch.seconds) // 3 :]
    result = {
        "step_ms": statistics.median(late) * 1e3,
        "mean_ms": statistics.mean(watch.seconds[1:]) * 1e3,
        "fit_s": seconds,
        "losses": watch.losses,
        "explanation": str(explain()) if way in (AUTO, ALWAYS) else None,
    }
    state = {key: value for key, value in module.state_dict().items() if torch.is_tensor(value)}
    torch.save({key: value for key, value in state.items() if value.is_floating_point()}, f"{file}.pt")
    Path(file).write_text(json.dumps(result))


def _watch(lightning: str, way: str) -> Any:
    """A callback that records the seconds and the loss of each step, and moves the weights if that is the way."""
    import torch

    class Watch(importlib.import_module(lightning).Callback):
        def __init__(self) -> None:
            self.begin, self.seconds, self.losses = 0.0, [], []

        def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
            # neuralforecast fits a copy of a model and its callbacks.
            return self

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            generator = torch.Generator().manual_seed(0)
            if way == MOVED:
                with torch.no_grad():
                    for parameter in module.parameters():
                        draws = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                        parameter.mul_((1 + _MOVED_BY * draws).to(parameter.dtype))

        def on_train_batch_start(self, *_: Any) -> None:
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin)
            self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))
            # The order of the next epoch's samples does not depend on what the step drew.
            torch.default_generator.manual_seed(len(self.losses))

    return Watch()


def read(results: Path) -> list[dict[str, Any]]:
    """The lines of the measurements so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Times to eager, and whether what was trained is eager's."""
    rows = [
        "| library | model | steps | eager, ms a step | auto: step, fit | always: step | right |",
        "|---|" + "---|" * 6,
    ]
    for line in lines:
        start = f"| {line['library']} | {line['model']} | {20 * line['epochs']} "
        if "error" in line:
            rows.append(f"{start}| | | | {line['error']} |")
            continue
        eager = line[EAGER]
        ratios = {way: {k: line[way][k] / eager[k] for k in ("step_ms", "fit_s")} for way in WAYS if way in line}
        auto = f"{ratios[AUTO]['step_ms']:.2f}, {ratios[AUTO]['fit_s']:.2f}" if AUTO in ratios else ""
        always = f"{ratios[ALWAYS]['step_ms']:.2f}" if ALWAYS in ratios else ""
        right = "no: " + ", ".join(line["differs"]) if line["differs"] else "yes"
        rows.append(f"{start}| {eager['step_ms']:.1f} | {auto} | {always} | {right} |")
    return "\n".join([*rows, "", *_means(lines)])


def _means(lines: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for way in (AUTO, ALWAYS):
        for key in ("step_ms", "fit_s"):
            ratios = [line[way][key] / line[EAGER][key] for line in lines if way in line]
            if ratios:
                mean, worst = statistics.geometric_mean(ratios), max(ratios)
                what = f"{way}, {key.split('_')[0]}, {len(ratios)} models"
                yield f"{what}: geometric mean {mean:.2f} of eager, worst {worst:.2f}"


if __name__ == "__main__":
    main()
