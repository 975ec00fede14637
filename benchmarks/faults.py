"""Tests runs of train.py with faults: signals, failing disks, damaged files and clock jumps.

    python -m benchmarks.faults                                     # hundreds, with all tasks and strategies
    python -m benchmarks.faults --runs 2 --strategies ort --tasks gpt2 --seed 7

Each run is resumed after its faults until it is complete. Prints a line of JSON for each strategy and task, and a
table. Exits with 1 if anything went wrong: a loss or a weight differs from a run without faults, a step in a checkpoint
was lost, a process hangs or remains, or a traceback is printed instead of an error message.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
from pathlib import Path

# One thread for each process: small models don't get faster with two, and two processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from lit_ort.benchmark.machine import machine
from tests.faults.campaign import Campaign, Findings
from tests.faults.workloads import PAIRS, STRATEGIES, WORKLOADS, write_data


def main() -> None:
    arguments = parse()
    pairs = [(name, task) for name, task in PAIRS if name in arguments.strategies and task in arguments.tasks]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_data(data)
        by_pair: dict[str, Findings] = {}
        for strategy, task in pairs:
            campaign = Campaign(strategy, task, data, Path(folder) / strategy / task, arguments.faults)
            for seed in range(arguments.seed, arguments.seed + arguments.runs):
                campaign.run(seed)
            by_pair[f"{strategy}, {task}"] = campaign.findings
            print(json.dumps({"strategy": strategy, "task": task, **vars(campaign.findings)}), flush=True)
    print(table(by_pair))
    sys.exit(any(findings.problems for findings in by_pair.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies, tasks = list(STRATEGIES), list(WORKLOADS)
    parser.add_argument(
        "--strategies", nargs="+", choices=strategies, default=strategies, metavar="NAME", help=", ".join(strategies)
    )
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, metavar="TASK", help=", ".join(tasks))
    parser.add_argument("--runs", type=int, default=8, help="runs of each strategy and task")
    parser.add_argument("--faults", type=int, default=4, help="the maximum number of faults in a run")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first run")
    return parser.parse_args()


def table(by_pair: dict[str, Findings]) -> str:
    rows = ["| strategy, task | processes | faults | repeated steps | problems |", "|---|---|---|---|---|"]
    for name, findings in by_pair.items():
        cells = (findings.processes, findings.faults.total(), findings.lost_steps, len(findings.problems))
        rows.append(f"| {name} | {' | '.join(map(str, cells))} |")
    kinds = sum((findings.faults for findings in by_pair.values()), collections.Counter())
    total = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    return "\n".join([*rows, "", f"{kinds.total()} faults: {total}.", f"{machine()}."])


if __name__ == "__main__":
    main()
