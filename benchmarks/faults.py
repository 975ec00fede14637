"""Faults in runs of train.py: signals, failing disks, damaged files, clocks; then the run goes on, and must be whole.

    python -m benchmarks.faults                                             # hundreds, over every task and strategy
    python -m benchmarks.faults --runs 2 --ways ort --tasks gpt2 --seed 7   # some of them

Prints a line of JSON for each way to run a task, and a table. Exits with 1 if anything went wrong: a curve or a weight
that differs from a run without faults, a step lost that a checkpoint had, a process that hangs or is left over, a
traceback in place of an error.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
from pathlib import Path

# One thread each: so small a model gains nothing from two, and two processes have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from lit_ort.benchmark.machine import machine
from tests.faults.campaign import Campaign, Findings
from tests.faults.workloads import PAIRS, WAYS, WORKLOADS, write_data


def main() -> None:
    arguments = parse()
    pairs = [(way, task) for way, task in PAIRS if way in arguments.ways and task in arguments.tasks]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_data(data)
        found: dict[str, Findings] = {}
        for way, task in pairs:
            campaign = Campaign(way, task, data, Path(folder) / way / task, arguments.faults)
            for seed in range(arguments.seed, arguments.seed + arguments.runs):
                campaign.run(seed)
            found[f"{way}, {task}"] = campaign.findings
            print(json.dumps({"way": way, "task": task, **vars(campaign.findings)}), flush=True)
    print(table(found))
    sys.exit(any(findings.problems for findings in found.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--tasks", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="TASK")
    parser.add_argument("--runs", type=int, default=8, help="of each way and task")
    parser.add_argument("--faults", type=int, default=4, help="the most of a run")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def table(found: dict[str, Findings]) -> str:
    rows = ["| way, task | processes | faults | steps taken again | problems |", "|---|---|---|---|---|"]
    for name, each in found.items():
        rows.append(f"| {name} | {each.processes} | {each.faults.total()} | {each.lost_steps} | {len(each.problems)} |")
    kinds = sum((each.faults for each in found.values()), collections.Counter())
    total = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    return "\n".join([*rows, "", f"{kinds.total()} faults: {total}.", f"{machine()}."])


if __name__ == "__main__":
    main()
