"""Where texts with labels come from: the standard library's docstrings and GLUE; `tables` reads files.

Each reader returns a `LabelledCorpus`: texts, or pairs of texts, with the place of their label among `labels`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from sysconfig import get_paths
from types import MappingProxyType
from typing import Any

from lit_ort_tasks.data.corpora import NOT_DOCUMENTATION, collector_off, docstrings
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.huggingface import load_dataset


@dataclass(frozen=True)
class LabelledSplit:
    """The texts of one split.

    source: the file or the place it was read from; error messages begin with it.
    texts: what is to be classified.
    pairs: the second text of each, where the question is about two.
    labels: of each text, its label's place among the corpus's.
    """

    source: str
    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: tuple[int, ...]


@dataclass(frozen=True)
class LabelledCorpus:
    """The three splits, and the names of the labels in the order of their places."""

    train: LabelledSplit
    valid: LabelledSplit
    test: LabelledSplit
    labels: tuple[str, ...]


def part(split: LabelledSplit, note: str, rows: Iterable[int]) -> LabelledSplit:
    """The rows of a split with these numbers, as a split of their own."""
    kept = tuple(rows)
    return LabelledSplit(
        source=f"{split.source} ({note})",
        texts=tuple(split.texts[row] for row in kept),
        pairs=None if split.pairs is None else tuple(split.pairs[row] for row in kept),
        labels=tuple(split.labels[row] for row in kept),
    )


# --- Python's docstrings ----------------------------------------------------------------------------------------------

# Each class and the top-level modules and packages it is made of, with at least 225 docstrings in Python 3.10 to 3.12.
# tkinter and idlelib have more, and are missing where a distribution packs them apart.
DOCSTRING_CLASSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "archives": ("bz2", "gzip", "lzma", "shutil", "tarfile", "zipfile"),
        "asyncio": ("asyncio",),
        "concurrency": ("concurrent", "multiprocessing", "queue", "sched", "subprocess", "threading"),
        "importlib": ("importlib", "pkgutil", "runpy", "zipimport"),
        "introspection": ("ast", "dis", "inspect", "pyclbr", "pydoc", "traceback", "typing"),
        "logging": ("logging",),
        "mail": ("email", "imaplib", "mailbox", "poplib", "smtplib"),
        "markup": ("html", "xml"),
        "numbers": ("_pydecimal", "fractions", "numbers", "random", "statistics"),
        "testing": ("doctest", "unittest"),
        "web": ("http", "socketserver", "urllib", "webbrowser", "wsgiref", "xmlrpc"),
    }
)
DOCSTRINGS_PER_CLASS = 200
SHORTEST_DOCSTRING = 20


def docstring_classes(directory: str | os.PathLike[str] | None = None) -> LabelledCorpus:
    """Which part of the standard library a docstring is from: the 11 parts of `DOCSTRING_CLASSES`.

    Each class gives the same number of docstrings, 200 of each (2200 in all) from Python 3.10 to 3.12: where it has
    more, ones evenly spaced in the order of its files. Left out are docstrings of fewer than 20 characters, repeated
    ones, and ones that occur in two classes. Of each class 80 % are for training, 10 % each for validation and test,
    by docstring: logging and archives have too few source files to be split by file.

    directory: a standard library's folder in place of the running interpreter's; then a class gives as many as the
        smallest has, up to 200.

    Raises InputError if the folder is missing, or a class has fewer than 10 docstrings (each split needs one).
    """
    root = Path(get_paths()["stdlib"] if directory is None else directory)
    require(
        root.is_dir(),
        f"{root}: no such folder. data=docstrings reads a standard library from data.dir; leave data.dir out to read "
        "the running Python's.",
    )
    with collector_off():
        found = {name: _class_docstrings(root, parts) for name, parts in DOCSTRING_CLASSES.items()}
    owners = Counter(key for texts in found.values() for key in texts)
    classes = [[text for key, text in texts.items() if owners[key] == 1] for texts in found.values()]
    for name, texts in zip(found, classes, strict=True):
        require(
            len(texts) >= 10,
            f"{root}: {len(texts)} docstrings of the class {name} ({', '.join(DOCSTRING_CLASSES[name])}), and a class "
            "needs at least 10. Leave data.dir out to read the standard library, or read a file with data=table.",
        )
    size = min(DOCSTRINGS_PER_CLASS, *(len(texts) for texts in classes))
    # The classes take turns, so every stretch of rows has as many of each.
    rows = [(texts[place * len(texts) // size], label) for place in range(size) for label, texts in enumerate(classes)]
    whole = LabelledSplit(str(root), tuple(text for text, _ in rows), None, tuple(label for _, label in rows))

    def split(name: str, ends: tuple[int, ...]) -> LabelledSplit:
        kept = (row for row in range(len(rows)) if row // len(classes) % 10 in ends)
        return part(whole, f"docstrings for {name}", kept)

    return LabelledCorpus(
        train=split("training", (0, 1, 2, 3, 5, 6, 7, 8)),
        valid=split("validation", (4,)),
        test=split("the test", (9,)),
        labels=tuple(DOCSTRING_CLASSES),
    )


def _class_docstrings(root: Path, parts: Sequence[str]) -> dict[str, str]:
    """The docstrings of the modules and packages in the order of their paths, each once, by what makes them equal."""
    files = [path for part in parts for path in (root / f"{part}.py", *sorted((root / part).rglob("*.py")))]
    found: dict[str, str] = {}
    for path in files:
        if path.is_file() and NOT_DOCUMENTATION.isdisjoint(path.relative_to(root).parts):
            for text in map(cleandoc, docstrings(path.read_bytes())):
                # Space and case are no difference to BERT's tokenizer, so texts that differ in them alone are equal.
                key = " ".join(text.lower().split())
                if len(key) >= SHORTEST_DOCSTRING:
                    found.setdefault(key, text)
    return found


# --- GLUE -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlueTask:
    """The columns of a task's text (and second text), its labels by number, the splits to validate and test with.

    valid: None holds rows of the training split out.
    """

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    valid: str | None = None
    test: str = "validation"


# Source: https://huggingface.co/datasets/nyu-mll/glue
GLUE_TASKS: Mapping[str, GlueTask] = MappingProxyType(
    {
        "cola": GlueTask(("sentence",), ("unacceptable", "acceptable")),
        "mnli": GlueTask(
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            valid="validation_matched",
            test="validation_mismatched",
        ),
        "mrpc": GlueTask(("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
        "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment")),
        "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate")),
        "rte": GlueTask(("sentence1", "sentence2"), ("entailment", "not_entailment")),
        "sst2": GlueTask(("sentence",), ("negative", "positive")),
        "wnli": GlueTask(("sentence1", "sentence2"), ("not_entailment", "entailment")),
    }
)
HUB_DATASET = "nyu-mll/glue"


def require_glue_task(name: str) -> None:
    """Refuses what is no classification task of GLUE.

    Raises InputError.
    """
    require(
        name != "stsb",
        "data.name='stsb': its labels are degrees of similarity, not classes. Give another task: "
        f"{', '.join(GLUE_TASKS)}.",
    )
    require(name in GLUE_TASKS, f"data.name={name!r}: no task of GLUE. Give one of {', '.join(GLUE_TASKS)}.")


def glue(name: str) -> LabelledCorpus:
    """A classification task of GLUE (Wang et al. 2018, https://arxiv.org/abs/1804.07461), by the `datasets` library.

    The labels of GLUE's own test splits are not public, so the test is on the validation split, and validation on
    every 20th row of the training split, which training then lacks. MNLI has two validation splits: the matched one is
    for validation, the mismatched one for the test.

    Raises InputError if there is no such task, or it cannot be fetched.
    """
    require_glue_task(name)
    task = GLUE_TASKS[name]
    splits = _fetch_glue(name)
    train, test = (_glue_split(splits, name, hub_name) for hub_name in ("train", task.test))
    if task.valid is not None:
        return LabelledCorpus(train, _glue_split(splits, name, task.valid), test, task.labels)
    rows = range(len(train.labels))
    held_out = part(train, "held out: every 20th row", rows[19::20])
    return LabelledCorpus(part(train, "without every 20th row", others(rows, 20, (19,))), held_out, test, task.labels)


def others(rows: range, step: int, places: Sequence[int]) -> Iterator[int]:
    """The rows but those that are held out."""
    return (row for row in rows if row % step not in places)


def _glue_split(splits: Any, name: str, hub_name: str) -> LabelledSplit:
    task = GLUE_TASKS[name]
    source = f"{HUB_DATASET}/{name} ({hub_name})"
    texts, *pairs = (tuple(splits[hub_name][column][:]) for column in task.columns)
    labels = tuple(splits[hub_name]["label"][:])
    wrong = next((label for label in labels if label not in range(len(task.labels))), None)
    require(
        wrong is None,
        f"{source}: label {wrong} out of range: {name} has {len(task.labels)} labels, from 0 on. The copy of the "
        "dataset is damaged: fetch it again.",
    )
    return LabelledSplit(source, texts, pairs[0] if pairs else None, labels)


def _fetch_glue(name: str) -> Any:
    """The splits by their names on the hub, each with its columns by name."""
    remedy = (
        "Give a file of your own with data=table and data.train_file=PATH, or let the `datasets` library fetch GLUE: "
        "pip install datasets, with a connection to huggingface.co."
    )
    try:
        return load_dataset(HUB_DATASET, name)
    except ImportError as error:
        raise InputError(f"data.name={name}: the `datasets` library is not installed. {remedy}") from error
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"data.name={name}: it cannot be fetched: {reason}. {remedy}") from error
