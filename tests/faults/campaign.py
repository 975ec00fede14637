"""Runs of train.py with faults at random points, each gone on with until it is whole, beside a run without any.

Everything heavy is imported once: a run is a fork of this process, which has one thread and computes nothing itself.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_ort.checkpoint_io import verify
from lit_ort.errors import CheckpointError
from tests.faults import kinds
from tests.faults.kinds import Fault, drawn_fault, signal_of
from tests.faults.trace import Step, read_trace
from tests.faults.workloads import WAYS, WORKLOADS, options_of

_LOADED_AT_A_RUN = (
    *("lit_ort.backend.build", "lit_ort.strategies.single", "torch._dynamo.convert_frame", "torch.utils.tensorboard"),
    *(
        "lit_ort_tasks.bert_finetune",
        "lit_ort_tasks.bert_pretrain",
        "lit_ort_tasks.gpt2",
        "lit_ort_tasks.pipeline_lm",
        "lit_ort_tasks.transformer_lm",
    ),
    *(
        "lit_ort_tasks.data.labelled_text",
        "lit_ort_tasks.data.pretraining_text",
        "lit_ort_tasks.data.text",
        "lit_ort_tasks.data.text_blocks",
    ),
)
TRAIN = Path(__file__).parents[2] / "train.py"
LAST, BEST = Path("checkpoints") / "last.ckpt", Path("checkpoints") / "best.ckpt"
_POLL_S = 0.01
# For a run that fills the caches.
_FIRST_LIMIT_S = 300.0
# For processes that end by themselves, once they notice that the first one has.
_GRACE_S = 30.0


@dataclass
class Findings:
    """What happened, and what went wrong.

    Attributes:
        processes: runs of train.py that were started.
        faults: by kind.
        lost_steps: steps that had to be taken again, all of them since the checkpoint that was gone on from.
        problems: what should not have happened, in words.
    """

    processes: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    lost_steps: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """A process that is over: its exit code, negative for a signal, or None where it hung; and what it said."""

    code: int | None
    said: str


@dataclass(frozen=True)
class Reference:
    """A run without a fault: the losses of its steps by number, its last checkpoint and how long it took."""

    losses: dict[int, str]
    weights: dict[str, torch.Tensor]
    checkpoint_bytes: int
    seconds: float


class Campaign:
    """A way to run a task, under faults.

    Args:
        way, task: of `tests.faults.workloads`.
        data: a folder that `write_data` wrote.
        folder: for runs; an empty one.
        in_a_row: faults after which a run is left to end.
    """

    def __init__(self, way: str, task: str, data: Path, folder: Path, in_a_row: int = 4) -> None:
        self._in_a_row = in_a_row
        self._processes = WAYS[way].processes
        self._checkpoint_steps = WORKLOADS[task].checkpoint_steps
        self._options = [*options_of(way, task, data), "hydra/job_logging=none", "hydra/hydra_logging=none"]
        self._name, self._folder, self._data = f"{way}, {task}", folder, data
        self.findings = Findings()
        folder.mkdir(parents=True)
        for module in _LOADED_AT_A_RUN:
            importlib.import_module(module)
        runpy.run_path(str(TRAIN))
        self._known: Reference | None = None
        self._known = self._whole_run()

    @property
    def _reference(self) -> Reference:
        assert self._known is not None
        return self._known

    def run(self, seed: int) -> None:
        """One run to its end, with the faults that follow from a seed on its way."""
        draw = random.Random(f"{self._name} {seed}")
        run = self._folder / str(seed)
        trace = self._folder / f"{seed}.jsonl"
        source: Path | None = None
        said = ""
        for fault in [*(drawn_fault(draw) for _ in range(self._in_a_row)), None]:
            before = len(read_trace(trace))
            ended = self._train(run, trace, source, fault)
            self._check_end(seed, fault, ended)
            said = ended.said
            if ended.code == 0:
                self._check_whole(seed, run, trace)
                return
            self._age_unfinished(run)
            self._damage(run, fault)
            source = self._next_source(run, seed)
            self._count_lost(read_trace(trace)[before:], source, seed, fault)
        self.findings.problems.append(f"{self._name}, seed {seed}: fails without a fault\n{said[-3000:]}")

    def _whole_run(self) -> Reference:
        start, run, trace = 0.0, self._folder, self._folder
        # The first one fills the caches.
        for attempt in ("first", "whole"):
            run, trace = self._folder / attempt, self._folder / f"{attempt}.jsonl"
            start = time.monotonic()
            ended = self._train(run, trace, None, None)
            if ended.code != 0:
                raise RuntimeError(f"{self._name} fails without a fault: {ended.code}\n{ended.said}")
        losses = {step.step: step.loss for step in read_trace(trace)}
        size = (run / LAST).stat().st_size
        return Reference(losses, _weights(run / LAST), size, time.monotonic() - start)

    def _train(self, run: Path, trace: Path, source: Path | None, fault: Fault | None) -> Ended:
        """Starts train.py, does to it what the fault says, and waits for its end."""
        arguments = [*self._options, f"hydra.run.dir={run}"]
        arguments += ["+callbacks.trace._target_=tests.faults.trace.StepTrace", f"+callbacks.trace.path={trace}"]
        if source is not None:
            arguments.append(f"ckpt_path={source}")
        self.findings.processes += 1
        if fault is not None:
            self.findings.faults[fault.kind] += 1
        log = run.with_suffix(".log")
        known = self._known
        process = _fork(arguments, log, fault, 0 if known is None else known.checkpoint_bytes)
        if known is not None and fault is not None:
            self._disturb(process, fault, fault.when * known.seconds)
        code = _wait(process, _FIRST_LIMIT_S if known is None else 20 * known.seconds + 60)
        if left := _others_of(process):
            self.findings.problems.append(f"{self._name}: processes {left} were left over after {fault}")
            for other in left:
                os.kill(other, signal.SIGKILL)
        return Ended(code, log.read_text(errors="replace"))

    def _disturb(self, process: int, fault: Fault, after_s: float) -> None:
        signum = signal_of(fault)
        if signum is None and fault.kind != "suspend":
            return
        _wait_until(process, time.monotonic() + after_s)
        draw = random.Random(fault.seed)
        members = _members(process)
        if not members:
            return
        if fault.kind == "suspend":
            member = draw.choice(members)
            _send(member, signal.SIGSTOP)
            _wait_until(process, time.monotonic() + draw.uniform(0.1, 1.0))
            _send(member, signal.SIGCONT)
        elif signum is not None:
            for member in _receivers(fault, process, members, draw):
                _send(member, signum)

    def _check_end(self, seed: int, fault: Fault | None, ended: Ended) -> None:
        """A run ends whole, as the signal says, or with one line that says why."""
        expected: Sequence[int | None] = (0,)
        signum = signal_of(fault)
        if fault is not None and signum is not None:
            # Before and after fit a signal does what it does to any process. One that loses another says so.
            expected = (0, -signum, 128 + signum, *([1] if fault.kind == "kill one process" else []))
            if self._processes > 1:
                # Where another process ends before fit, Lightning kills the first one.
                expected = (*expected, -signal.SIGKILL)
        elif fault is not None and (fault.kind in kinds.DISKS or fault.kind == "file size limit"):
            expected = (0, 1)
        place = f"{self._name}, seed {seed}, {fault}"
        if ended.code is None:
            self.findings.problems.append(f"{place}: hung\n{ended.said[-3000:]}")
        elif ended.code not in expected:
            self.findings.problems.append(f"{place}: ended with {ended.code}\n{ended.said[-3000:]}")
        elif ended.code == 1 and signum is None and "error: " not in ended.said:
            self.findings.problems.append(f"{place}: a traceback in place of an error\n{ended.said[-3000:]}")

    def _age_unfinished(self, run: Path) -> None:
        """What a process left half written is removed once nobody can be writing it: a minute goes by."""
        for path in _unfinished(self._data, run):
            os.utime(path, (time.time() - 120, time.time() - 120))

    def _damage(self, run: Path, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.kind in kinds.DAMAGES and (run / LAST).is_file():
            kinds.damage(run / LAST, fault)
        elif fault.kind == "damaged graph cache":
            for entry in sorted((self._data / "graphs").glob("*.ortgraph")):
                entry.write_bytes(kinds.with_flipped_bit(entry.read_bytes(), random.Random(fault.seed)))

    def _next_source(self, run: Path, seed: int) -> Path | None:
        """The checkpoint that an operator would take: the last one, else the best one, else none."""
        for path in (run / LAST, run / BEST):
            if _is_whole(path):
                return path
            if path.exists():
                self._require_refusal(run, path, seed)
                _remove(path)
        return None

    def _require_refusal(self, run: Path, path: Path, seed: int) -> None:
        """A damaged checkpoint is not trained from."""
        ended = self._train(run, self._folder / "refused.jsonl", path, None)
        if ended.code != 1 or not _names(ended.said, path) or read_trace(self._folder / "refused.jsonl"):
            self.findings.problems.append(
                f"{self._name}, seed {seed}: damaged {path} not refused\n{ended.said[-3000:]}"
            )

    def _count_lost(self, taken: Sequence[Step], source: Path | None, seed: int, fault: Fault | None) -> None:
        """Steps that no checkpoint has: none of a run that was told to stop, and no more than lie between two."""
        kept = _checkpoint(source)["global_step"] if source is not None else 0
        lost = sum(step.step > kept for step in taken)
        self.findings.lost_steps += lost
        if fault is None or fault.kind not in ("kill", "terminate", "interrupt", "slow disk"):
            return
        if lost > (self._checkpoint_steps if fault.kind == "kill" else 0):
            self.findings.problems.append(f"{self._name}, seed {seed}, {fault}: {lost} steps lost, {kept} kept")

    def _check_whole(self, seed: int, run: Path, trace: Path) -> None:
        place = f"{self._name}, seed {seed}"
        steps = read_trace(trace)
        wrong = [step for step in steps if self._reference.losses.get(step.step) != step.loss]
        if wrong or {step.step for step in steps} != set(self._reference.losses):
            self.findings.problems.append(f"{place}: other losses than without faults, first {wrong[:3]}")
        # A run that goes on from the best checkpoint, and that was its last step, has nothing to write.
        found = _weights(run / LAST if (run / LAST).exists() else run / BEST)
        if not all(torch.equal(found[name], value) for name, value in self._reference.weights.items()):
            self.findings.problems.append(f"{place}: other weights than without faults")
        results = json.loads((run / "results.json").read_text())
        if not results["metrics"]:
            self.findings.problems.append(f"{place}: no results")
        if left := _unfinished(run, self._data):
            self.findings.problems.append(f"{place}: {left} left over")


def _fork(arguments: Sequence[str], log: Path, fault: Fault | None, checkpoint_bytes: int) -> int:
    """train.py in a process of its own session; its output goes to a file."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        kinds.install(fault, checkpoint_bytes)
        sys.argv = [str(TRAIN), *arguments]
        code = _code_of_main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Python's own end would unwind the campaign.
        os._exit(code)


def _code_of_main() -> int:
    """What Python would exit with."""
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: B036 - as Python does at the end of a program
        traceback.print_exc()
        return 1
    return 0


def _wait_until(process: int, moment: float) -> None:
    """Until then, or until the process is over."""
    while time.monotonic() < moment and _is_running(process):
        time.sleep(_POLL_S)


def _is_running(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _wait(process: int, limit_s: float) -> int | None:
    """The exit code of a process, or None for one that had to be killed because it hung."""
    _wait_until(process, time.monotonic() + limit_s)
    hung = _is_running(process)
    if hung:
        for member in _members(process):
            _send(member, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return None if hung else os.waitstatus_to_exitcode(status)


def _members(session: int) -> list[int]:
    """The processes of a session that have not ended (proc(5), stat)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == session and state not in "ZX":
            found.append(int(stat.parent.name))
    return sorted(found)


def _others_of(session: int) -> list[int]:
    """Those that are still there a moment after its first process has ended."""
    deadline = time.monotonic() + _GRACE_S
    while (left := _members(session)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _send(process: int, signum: signal.Signals) -> None:
    try:
        os.kill(process, signum)
    except ProcessLookupError:
        return


def _receivers(fault: Fault, process: int, members: Sequence[int], draw: random.Random) -> Sequence[int]:
    if fault.kind == "kill one process":
        return [draw.choice(members)]
    return [process] if fault.kind in kinds.TO_THE_FIRST else members


def _unfinished(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob(".*.tmp")]


def _checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    return _checkpoint(path)["state_dict"]


def _names(said: str, path: Path) -> bool:
    """Whether the one error is about that file."""
    return any(line.startswith("error: ") and str(path) in line for line in said.splitlines())


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()
