"""Training steps of many architectures in eager, inductor and ONNX Runtime.

    python benchmarks/suite.py results.jsonl                     # all, small: an hour; goes on where it was stopped
    python benchmarks/suite.py results.jsonl --quick             # a model of each kind, in ten minutes
    python benchmarks/suite.py results.jsonl --models Llama ViT --sizes small medium --precisions 32-true bf16-mixed
    python benchmarks/suite.py results.jsonl --report            # the table and the picture of what is there

Each model is measured in a process of its own, and adds a line of JSON. A step is forward, loss, backward, clipping
where usual, and fused AdamW, dropout as configured; medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import GROUPS, MODELS
from benchmarks.models.case import SIZES, SMALL
from benchmarks.suite_report import picture, table

FLOAT32, BF16 = "32-true", "bf16-mixed"
QUICK = ("BERT", "Llama", "T5", "ViT", "ResNet", "MLP", "graph network")
SECONDS = 1800


def main() -> None:
    arguments = parse()
    if arguments.alone:
        print(json.dumps(alone(*arguments.alone, rounds=arguments.rounds)))
        return
    if not arguments.report:
        measure(arguments)
    results = read(arguments.results)
    print(table(results))
    image = arguments.results.with_suffix(".png")
    picture(results, image)
    print(f"\n{image}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each model")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--sizes", nargs="+", default=[SMALL], choices=SIZES)
    parser.add_argument("--precisions", nargs="+", default=[FLOAT32], choices=(FLOAT32, BF16))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> None:
    """Adds a line for each model that has none yet."""
    done = {(line["model"], line["size"], line["precision"]) for line in read(arguments.results)}
    for name in chosen(arguments):
        for size in arguments.sizes:
            for precision in arguments.precisions:
                if (name, size, precision) not in done:
                    line = in_own_process(name, size, precision, arguments.rounds)
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(progress(line), file=sys.stderr, flush=True)


def chosen(arguments: argparse.Namespace) -> list[str]:
    if arguments.models:
        return arguments.models
    if arguments.quick:
        return list(QUICK)
    return [name for group in arguments.groups or GROUPS for name in GROUPS[group]]


def in_own_process(name: str, size: str, precision: str, rounds: int) -> dict[str, Any]:
    """A model's line; one with an `error` where it could not be measured."""
    command = [sys.executable, "-W", "ignore", __file__, "-", "--rounds", str(rounds), "--alone", name, size, precision]
    line: dict[str, Any] = {"model": name, "size": size, "precision": precision, "date": time.strftime("%Y-%m-%d")}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {**line, "error": f"took longer than {SECONDS} s"}
    if run.returncode != 0:
        return {**line, "error": run.stderr.strip().splitlines()[-1][:300]}
    return {**line, **json.loads(run.stdout.splitlines()[-1])}


def alone(name: str, size: str, precision: str, rounds: int) -> dict[str, Any]:
    """Measures a model in this process."""
    import torch
    import transformers

    from lit_ort import ORTOptions, benchmark

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = MODELS[name]
    module, batch = model.make(size)
    module.train()
    options = ORTOptions(precision=precision)
    return benchmark(module, batch, rounds=rounds, options=options, clip=model.clip, loss=model.loss).as_dict()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def progress(line: dict[str, Any]) -> str:
    name = f"{line['model']}, {line['size']}, {line['precision']}"
    if "error" in line:
        return f"{name}: {line['error']}"
    medians = {kind: sorted(own["step_ms"])[len(own["step_ms"]) // 2] for kind, own in line["figures"].items()}
    return f"{name}: " + ", ".join(f"{kind} {median:.0f} ms" for kind, median in medians.items())


if __name__ == "__main__":
    main()
