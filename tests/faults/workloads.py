"""Small runs of every task, the strategies that they use, and their text."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path

_BLOCK = ("data.block=32", "data.batch_size=8", "data.eval_batch_size=8", "task.sample_tokens=0")
_MODEL = ("model.layers=1", "model.heads=2", "model.width=16", "data.vocabulary_size=300")


@dataclass(frozen=True)
class Workload:
    """A task with the options for a small run.

    Args:
        options: options of train.py, with `{data}` for the folder of the text.
        checkpoint_steps: the number of steps between checkpoints.
    """

    options: tuple[str, ...]
    checkpoint_steps: int = 3


@dataclass(frozen=True)
class Strategy:
    """A strategy and its options.

    Args:
        options: options of train.py.
        tasks: names of tasks in `WORKLOADS`.
        processes: the number of processes.
    """

    options: tuple[str, ...]
    tasks: tuple[str, ...]
    processes: int = 1


WORKLOADS = {
    "transformer_lm": Workload(
        (
            *("task=transformer_lm", "data=wikitext2", "data.dir={data}", "data.batch_size=4"),
            *("data.eval_batch_size=2", "data.bptt=6", "task.width=8", "task.feed_forward=8", "task.layers=1"),
            "trainer.max_epochs=3",
        )
    ),
    "gpt2": Workload(
        (
            *("task=gpt2", "data.train_file={data}/documents.txt"),
            *("data.cache_dir={data}/tokens", *_BLOCK, *_MODEL, "trainer.max_epochs=2"),
        )
    ),
    "bert_finetune": Workload(
        (
            *("task=bert_finetune", "data=table", "data.train_file={data}/train.csv", "data.batch_size=4"),
            *("data.max_length=12", *_MODEL, "trainer.max_epochs=3"),
        )
    ),
    "bert_pretrain": Workload(
        (
            *("task=bert_pretrain", "data.train_file={data}/documents.txt", "data.cache_dir={data}/tokens"),
            *("data.max_length=32", "data.max_predictions=5", "data.batch_size=4", "data.eval_batch_size=4", *_MODEL),
            *("trainer.max_steps=24", "trainer.val_check_interval=6"),
        ),
        checkpoint_steps=6,
    ),
    "pipeline_lm": Workload(
        (
            *("task=pipeline_lm", "data=wikitext2", "data.dir={data}", "data.batch_size=4"),
            *("data.eval_batch_size=4", "data.bptt=6", "task.width=8", "task.feed_forward=8", "task.layers=2"),
            *("task.heads=2", "trainer.max_epochs=2", "strategy.micro_batches=2"),
        )
    ),
}
_SINGLE = ("transformer_lm", "gpt2", "bert_finetune", "bert_pretrain")
# What is decided by time differs from run to run.
_ALWAYS = "strategy.compile=always"
# Only lit_ort's strategies save the state of dropout's random numbers in checkpoints, so eager runs without dropout.
STRATEGIES = {
    "ort": Strategy(("strategy=ort", _ALWAYS, "strategy.cache_dir={data}/graphs"), _SINGLE),
    "eager": Strategy(("strategy=eager", "task.dropout=0.0"), ("transformer_lm",)),
    "ort_ddp": Strategy(("strategy=ort_ddp", _ALWAYS, "trainer.devices=2"), ("transformer_lm", "bert_finetune"), 2),
    "ort_zero1": Strategy(("strategy=ort_zero1", _ALWAYS, "trainer.devices=2"), ("gpt2",), 2),
    "ort_tensor": Strategy(("strategy=ort_tensor", "trainer.devices=2"), ("gpt2",), 2),
    "ort_pipeline": Strategy(("strategy=ort_pipeline", "trainer.devices=2"), ("pipeline_lm",), 2),
}
PAIRS = tuple((name, task) for name, strategy in STRATEGIES.items() for task in strategy.tasks)


def options_of(strategy: str, task: str, data: Path) -> list[str]:
    """The options of train.py for a strategy and a task."""
    workload = WORKLOADS[task]
    steps = f"callbacks.last.every_n_train_steps={workload.checkpoint_steps}"
    return [option.format(data=data) for option in (*workload.options, *STRATEGIES[strategy].options, steps)]


def write_data(folder: Path) -> None:
    """Writes text for every task, a few dozen batches."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bcdf" for b in "aeio" for c in "lmnr"]

    def sentence(length: int) -> str:
        return " ".join(draw.choice(words) for _ in range(length))

    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text(sentence(240))
    with (folder / "train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows((sentence(draw.randint(2, 10)), draw.choice(["good", "bad"])) for _ in range(48))
    documents = ["\n".join(sentence(draw.randint(3, 8)) for _ in range(draw.randint(3, 8))) for _ in range(60)]
    (folder / "documents.txt").write_text("\n\n".join(documents))
