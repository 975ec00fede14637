"""Readers of texts with labels: the docstrings of the standard library and GLUE; `tables` reads files.

Each reader returns a `LabelledCorpus`: texts, or pairs of texts, with the index of their label in `labels`.
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

    Args:
        source: the file or the dataset; error messages begin with it.
        texts: to be classified.
        pairs: the second texts, where pairs of texts are classified.
        labels: the index of each text's label in the labels of the corpus.
    """

    source: str
    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: tuple[int, ...]


@dataclass(frozen=True)
class LabelledCorpus:
    """The three splits, and the names of the labels."""

    train: LabelledSplit
    valid: LabelledSplit
    test: LabelledSplit
    labels: tuple[str, ...]


def part(split: LabelledSplit, note: str, rows: Iterable[int]) -> LabelledSplit:
    """Return the rows of a split with these indices as another split."""
    indices = tuple(rows)
    return LabelledSplit(
        source=f"{split.source} ({note})",
        texts=tuple(split.texts[row] for row in indices),
        pairs=None if split.pairs is None else tuple(split.pairs[row] for row in indices),
        labels=tuple(split.labels[row] for row in indices),
    )


# --- Python's docstrings ----------------------------------------------------------------------------------------------

# Each class and its top-level modules and packages, with at least 225 docstrings in Python 3.10 to 3.12. tkinter and
# idlelib have more, but some distributions package them separately.
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
    """Read the docstrings of the standard library, labelled with the part that they are from (`DOCSTRING_CLASSES`).

    Each of the 11 classes has the same number of docstrings, in Python 3.10 to 3.12 200 (2200 in all). Where there are
    more, they are evenly spaced in the order of the files. Docstrings of fewer than 20 characters, repeated ones and
    those of two classes are left out. Of each class, 80 % are for training and 10 % each for validation and test. The
    split is by docstring, because logging and archives have too few source files.

    Args:
        directory: the folder of a standard library; None for that of the running Python. Each class has as many
            docstrings as the smallest one, up to 200.

    Raises:
        InputError: the folder is missing, or a class has fewer than 10 docstrings (each split needs one).
    """
    root = Path(get_paths()["stdlib"] if directory is None else os.path.expanduser(directory))
    require(
        root.is_dir(),
        f"{root}: no such folder. data=docstrings reads a standard library from data.dir; leave data.dir out to read "
        "the running Python's.",
    )
    with collector_off():
        by_class = {name: _class_docstrings(root, parts) for name, parts in DOCSTRING_CLASSES.items()}
    owners = Counter(key for texts in by_class.values() for key in texts)
    classes = [[text for key, text in texts.items() if owners[key] == 1] for texts in by_class.values()]
    for name, texts in zip(by_class, classes, strict=True):
        require(
            len(texts) >= 10,
            f"{root}: {len(texts)} docstrings of the class {name} ({', '.join(DOCSTRING_CLASSES[name])}), and a class "
            "needs at least 10. Leave data.dir out to read the standard library, or read a file with data=table.",
        )
    size = min(DOCSTRINGS_PER_CLASS, *(len(texts) for texts in classes))
    # The classes alternate, so that consecutive rows have equally many of each.
    rows = [(texts[index * len(texts) // size], label) for index in range(size) for label, texts in enumerate(classes)]
    whole = LabelledSplit(str(root), tuple(text for text, _ in rows), None, tuple(label for _, label in rows))

    def split(name: str, ends: tuple[int, ...]) -> LabelledSplit:
        indices = (row for row in range(len(rows)) if row // len(classes) % 10 in ends)
        return part(whole, f"docstrings for {name}", indices)

    return LabelledCorpus(
        train=split("training", (0, 1, 2, 3, 5, 6, 7, 8)),
        valid=split("validation", (4,)),
        test=split("the test", (9,)),
        labels=tuple(DOCSTRING_CLASSES),
    )


def _class_docstrings(root: Path, parts: Sequence[str]) -> dict[str, str]:
    """Return the different docstrings of modules and packages in the order of the paths, by their normalized text."""
    files = [path for part in parts for path in (root / f"{part}.py", *sorted((root / part).rglob("*.py")))]
    texts: dict[str, str] = {}
    for path in files:
        if path.is_file() and NOT_DOCUMENTATION.isdisjoint(path.relative_to(root).parts):
            for text in map(cleandoc, docstrings(path.read_bytes())):
                # BERT's tokenizer ignores white space and case, so texts that differ only in them are equal.
                key = " ".join(text.lower().split())
                if len(key) >= SHORTEST_DOCSTRING:
                    texts.setdefault(key, text)
    return texts


# --- GLUE -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Args:
        columns: of the text, and of the second text.
        labels: their names, by number.
        valid: the split for validation; None holds rows of the training split out.
        test: the split for the test.
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
    """Checks the name of a task.

    Raises:
        InputError: GLUE has no classification task of that name.
    """
    require(
        name != "stsb",
        "data.name='stsb': its labels are degrees of similarity, not classes. Give another task: "
        f"{', '.join(GLUE_TASKS)}.",
    )
    require(name in GLUE_TASKS, f"data.name={name!r}: no task of GLUE. Give one of {', '.join(GLUE_TASKS)}.")


def glue(name: str) -> LabelledCorpus:
    """Fetch a classification task of GLUE (Wang et al. 2018, https://arxiv.org/abs/1804.07461).

    The labels of GLUE's test splits are not public. So the test uses the validation split, and validation every 20th
    row of the training split, without which the model is trained. MNLI has two validation splits: the matched one is
    for validation, the mismatched one for the test.

    Raises:
        InputError: there is no such task, or it can't be fetched with the `datasets` library.
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


def others(rows: range, step: int, positions: Sequence[int]) -> Iterator[int]:
    """Return the rows that are not at these positions of every `step` rows."""
    return (row for row in rows if row % step not in positions)


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
    """Return the splits by their names on the hub, each with its columns by name."""
    remedy = (
        "Use your own file with data=table and data.train_file=PATH, or let the `datasets` library fetch GLUE: pip "
        "install datasets, with a connection to huggingface.co."
    )
    try:
        return load_dataset(HUB_DATASET, name)
    except ImportError as error:
        raise InputError(f"data.name={name}: the `datasets` library is not installed. {remedy}") from error
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"data.name={name}: it cannot be fetched: {reason}. {remedy}") from error
