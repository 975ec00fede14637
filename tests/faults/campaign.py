"""Runs train.py with faults at random points, resumes each run until it is complete, and compares it with one without.

Expensive modules are imported once: a run is a fork of this process, which has one thread and computes nothing itself.
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
from tests.faults.workloads import STRATEGIES, WORKLOADS, options_of

_IMPORTED_BY_RUNS = (
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
# The limit of the first run, which fills the caches.
_FIRST_LIMIT_S = 300.0
# The time for other processes to end by themselves after the first one has ended.
_GRACE_S = 30.0


@dataclass
class Findings:
    """The counts of a campaign, and its problems.

    Attributes:
        processes: the number of processes of train.py that were started.
        faults: the number of faults by kind.
        lost_steps: the number of steps that had to be repeated after resuming from a checkpoint.
        problems: descriptions of wrong behavior.
    """

    processes: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    lost_steps: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """The result of a process.

    Args:
        code: its exit code, negative for a signal, or None if it hung.
        output: its stdout and stderr.
    """

    code: int | None
    output: str


@dataclass(frozen=True)
class Reference:
    """A run without faults.

    Args:
        losses: the losses of its steps, by number.
        weights: the weights in its last checkpoint.
        checkpoint_bytes: the size of this checkpoint.
        seconds: the time of the run.
    """

    losses: dict[int, str]
    weights: dict[str, torch.Tensor]
    checkpoint_bytes: int
    seconds: float


class Campaign:
    """Runs a task with a strategy and faults.

    Args:
        strategy, task: names in `tests.faults.workloads`.
        data: a folder that `write_data` wrote.
        folder: a new folder for the runs.
        faults: the maximum number of faults in a run.
    """

    def __init__(self, strategy: str, task: str, data: Path, folder: Path, faults: int = 4) -> None:
        self._faults = faults
        self._processes = STRATEGIES[strategy].processes
        self._checkpoint_steps = WORKLOADS[task].checkpoint_steps
        self._options = [*options_of(strategy, task, data), "hydra/job_logging=none", "hydra/hydra_logging=none"]
        self._name, self._folder, self._data = f"{strategy}, {task}", folder, data
        self.findings = Findings()
        folder.mkdir(parents=True)
        for module in _IMPORTED_BY_RUNS:
            importlib.import_module(module)
        runpy.run_path(str(TRAIN))
        self._known_reference: Reference | None = None
        self._known_reference = self._complete_run()

    @property
    def _reference(self) -> Reference:
        assert self._known_reference is not None
        return self._known_reference

    def run(self, seed: int) -> None:
        """Runs the task until it is complete, with faults that depend on the seed."""
        draw = random.Random(f"{self._name} {seed}")
        run = self._folder / str(seed)
        trace = self._folder / f"{seed}.jsonl"
        source: Path | None = None
        output = ""
        for fault in [*(drawn_fault(draw) for _ in range(self._faults)), None]:
            before = len(read_trace(trace))
            result = self._train(run, trace, source, fault)
            self._check_end(seed, fault, result)
            output = result.output
            if result.code == 0:
                self._check_complete(seed, run, trace)
                return
            self._age_unfinished(run)
            self._damage(run, fault)
            source = self._next_source(run, seed)
            self._count_lost(read_trace(trace)[before:], source, seed, fault)
        self.findings.problems.append(f"{self._name}, seed {seed}: fails without a fault\n{output[-3000:]}")

    def _complete_run(self) -> Reference:
        start, run, trace = 0.0, self._folder, self._folder
        # The first run fills the caches.
        for attempt in ("first", "whole"):
            run, trace = self._folder / attempt, self._folder / f"{attempt}.jsonl"
            start = time.monotonic()
            result = self._train(run, trace, None, None)
            if result.code != 0:
                raise RuntimeError(f"{self._name} fails without a fault: {result.code}\n{result.output}")
        losses = {step.step: step.loss for step in read_trace(trace)}
        size = (run / LAST).stat().st_size
        return Reference(losses, _weights(run / LAST), size, time.monotonic() - start)

    def _train(self, run: Path, trace: Path, source: Path | None, fault: Fault | None) -> Result:
        """Starts train.py, causes the fault, and waits for the end of the process."""
        arguments = [*self._options, f"hydra.run.dir={run}"]
        arguments += ["+callbacks.trace._target_=tests.faults.trace.StepTrace", f"+callbacks.trace.path={trace}"]
        if source is not None:
            arguments.append(f"ckpt_path={source}")
        self.findings.processes += 1
        if fault is not None:
            self.findings.faults[fault.kind] += 1
        log = run.with_suffix(".log")
        reference = self._known_reference
        process = _fork(arguments, log, fault, 0 if reference is None else reference.checkpoint_bytes)
        if reference is not None and fault is not None:
            self._disturb(process, fault, fault.when * reference.seconds)
        code = _wait(process, _FIRST_LIMIT_S if reference is None else 20 * reference.seconds + 60)
        if remaining := _remaining_members(process):
            self.findings.problems.append(f"{self._name}: processes {remaining} remain after {fault}")
            for other in remaining:
                os.kill(other, signal.SIGKILL)
        return Result(code, log.read_text(errors="replace"))

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

    def _check_end(self, seed: int, fault: Fault | None, result: Result) -> None:
        """Checks that a run ended successfully, with the exit code of the signal, or with an error message."""
        expected: Sequence[int | None] = (0,)
        signum = signal_of(fault)
        if fault is not None and signum is not None:
            # Before and after fit, a signal has its default action. A process that loses another one exits with 1.
            expected = (0, -signum, 128 + signum, *([1] if fault.kind == "kill one process" else []))
            if self._processes > 1:
                # If another process ends before fit, Lightning kills the first one.
                expected = (*expected, -signal.SIGKILL)
        elif fault is not None and (fault.kind in kinds.DISKS or fault.kind == "file size limit"):
            expected = (0, 1)
        case = f"{self._name}, seed {seed}, {fault}"
        if result.code is None:
            self.findings.problems.append(f"{case}: hung\n{result.output[-3000:]}")
        elif result.code not in expected:
            self.findings.problems.append(f"{case}: ended with {result.code}\n{result.output[-3000:]}")
        elif result.code == 1 and signum is None and "error: " not in result.output:
            self.findings.problems.append(f"{case}: a traceback instead of an error message\n{result.output[-3000:]}")

    def _age_unfinished(self, run: Path) -> None:
        """Makes unfinished files two minutes old: they are removed only when no process can be writing them anymore."""
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
        """The checkpoint to resume from: the last one, otherwise the best one, or None."""
        for path in (run / LAST, run / BEST):
            if _is_valid(path):
                return path
            if path.exists():
                self._require_rejection(run, path, seed)
                _remove(path)
        return None

    def _require_rejection(self, run: Path, path: Path, seed: int) -> None:
        """Checks that train.py doesn't resume from a damaged checkpoint."""
        trace = self._folder / "rejected.jsonl"
        result = self._train(run, trace, path, None)
        if result.code != 1 or not _names(result.output, path) or read_trace(trace):
            self.findings.problems.append(
                f"{self._name}, seed {seed}: damaged {path} not rejected\n{result.output[-3000:]}"
            )

    def _count_lost(self, steps: Sequence[Step], source: Path | None, seed: int, fault: Fault | None) -> None:
        """Counts steps that are in no checkpoint: a stopped run loses none, a killed one those after its checkpoint."""
        saved = _checkpoint(source)["global_step"] if source is not None else 0
        lost = sum(step.step > saved for step in steps)
        self.findings.lost_steps += lost
        if fault is None or fault.kind not in ("kill", "terminate", "interrupt", "slow disk"):
            return
        if lost > (self._checkpoint_steps if fault.kind == "kill" else 0):
            self.findings.problems.append(f"{self._name}, seed {seed}, {fault}: {lost} steps lost, {saved} saved")

    def _check_complete(self, seed: int, run: Path, trace: Path) -> None:
        case = f"{self._name}, seed {seed}"
        steps = read_trace(trace)
        wrong = [step for step in steps if self._reference.losses.get(step.step) != step.loss]
        if wrong or {step.step for step in steps} != set(self._reference.losses):
            self.findings.problems.append(f"{case}: losses differ from a run without faults, first {wrong[:3]}")
        # A run that was resumed from a best checkpoint of its last step writes no last checkpoint.
        weights = _weights(run / LAST if (run / LAST).exists() else run / BEST)
        if not all(torch.equal(weights[name], value) for name, value in self._reference.weights.items()):
            self.findings.problems.append(f"{case}: weights differ from a run without faults")
        results = json.loads((run / "results.json").read_text())
        if not results["metrics"]:
            self.findings.problems.append(f"{case}: no results")
        if unfinished := _unfinished(run, self._data):
            self.findings.problems.append(f"{case}: unfinished files {unfinished} remain")


def _fork(arguments: Sequence[str], log: Path, fault: Fault | None, checkpoint_bytes: int) -> int:
    """Starts train.py in a process with a new session; its output is written to a file."""
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
        # A regular exit would unwind the campaign's stack.
        os._exit(code)


def _code_of_main() -> int:
    """Runs train.py and returns the exit code that Python would have."""
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: B036 - as Python does at the end of a program
        traceback.print_exc()
        return 1
    return 0


def _wait_until(process: int, moment: float) -> None:
    """Waits until a moment, or until the process has ended."""
    while time.monotonic() < moment and _is_running(process):
        time.sleep(_POLL_S)


def _is_running(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _wait(process: int, limit_s: float) -> int | None:
    """Waits for a process; returns its exit code, or None if it hung and was killed."""
    _wait_until(process, time.monotonic() + limit_s)
    hung = _is_running(process)
    if hung:
        for member in _members(process):
            _send(member, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return None if hung else os.waitstatus_to_exitcode(status)


def _members(session: int) -> list[int]:
    """The processes of a session that have not ended (proc(5), stat)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, process_session, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(process_session) == session and state not in "ZX":
            members.append(int(stat.parent.name))
    return sorted(members)


def _remaining_members(session: int) -> list[int]:
    """The processes of a session that remain some time after its first process has ended."""
    deadline = time.monotonic() + _GRACE_S
    while (remaining := _members(session)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return remaining


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


def _names(output: str, path: Path) -> bool:
    """Whether the output has an error message that names the file."""
    return any(line.startswith("error: ") and str(path) in line for line in output.splitlines())


def _is_valid(path: Path) -> bool:
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
