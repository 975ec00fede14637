"""Readers of text: the documentation of the running Python, WikiText-2, and files.

Each reader returns a `Corpus`: the text of the three splits, each with the name that error messages have for it.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.huggingface import load_dataset

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Split:
    """The text of one split.

    Args:
        source: the file or the dataset; error messages begin with it.
        documents: separate texts, in order.
    """

    source: str
    documents: tuple[str, ...]

    @property
    def text(self) -> str:
        """The documents, one below the other."""
        return "\n".join(self.documents)


@dataclass(frozen=True)
class Corpus:
    """The three splits of a body of text."""

    train: Split
    valid: Split
    test: Split


# Of every 20 documents, the positions of those that are held out for splits without text.
HELD_OUT_EVERY = 20
HELD_OUT_POSITIONS: Mapping[str, int] = MappingProxyType({"valid": 9, "test": 19})


def hold_out(documents: Sequence[str], names: Iterable[str] = ("valid", "test")) -> dict[str, tuple[str, ...]]:
    """Return every 20th document for each of these splits, by its name, and the others as "train"."""
    positions = {name: HELD_OUT_POSITIONS[name] for name in names}
    train = tuple(text for k, text in enumerate(documents) if k % HELD_OUT_EVERY not in positions.values())
    return {"train": train} | {name: tuple(documents[first::HELD_OUT_EVERY]) for name, first in positions.items()}


# --- Python's documentation -------------------------------------------------------------------------------------------

# Folders whose docstrings are not documentation of the standard library.
NOT_DOCUMENTATION = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def python_docs(directory: str | os.PathLike[str] | None = None) -> Corpus:
    """Read the documentation that is part of Python, split by document 90/5/5 in a fixed order.

    A document is one topic of `pydoc_data.topics`, such as the text of `help("for")`, or all docstrings of one source
    file of the standard library. The text depends on the Python version.

    Args:
        directory: a folder of Python sources; None reads the standard library of the running Python and the topics.

    Raises:
        InputError: the folder is missing or has fewer than 20 documents (each split needs at least one).
    """
    root = Path(sysconfig.get_paths()["stdlib"] if directory is None else os.path.expanduser(directory))
    require(
        root.is_dir(),
        f"{root}: no such folder. data=python_docs reads Python sources from data.dir; leave data.dir out to read the "
        "running Python's standard library.",
    )
    with collector_off():
        documents = list(_docstring_documents(root))
    if directory is None:
        documents = [*_topics(), *documents]
    require(
        len(documents) >= HELD_OUT_EVERY,
        f"{root}: {len(documents)} Python files with docstrings, and a split by document needs at least 20. Leave "
        "data.dir out to read the standard library, or read WikiText-2 files with data=wikitext2.",
    )
    parts = hold_out(documents)
    return Corpus(
        train=Split(f"{root} (documents for training)", parts["train"]),
        valid=Split(f"{root} (documents for validation)", parts["valid"]),
        test=Split(f"{root} (documents for the test)", parts["test"]),
    )


@contextmanager
def collector_off() -> Iterator[None]:
    """Disables the garbage collector. Syntax trees have no cycles, and its passes take twice as long as the parser."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _topics() -> list[str]:
    """Return the topics of the language reference, in the order of their names. Some distributions lack them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def _docstring_documents(root: Path) -> Iterator[str]:
    """Yield the docstrings of each Python file below `root`, in the order of the paths."""
    for path in sorted(root.rglob("*.py")):
        if NOT_DOCUMENTATION.isdisjoint(path.relative_to(root).parts) and path.is_file():
            document = "\n".join(docstrings(path.read_bytes()))
            if document:
                yield document


# The fields of a node of the syntax tree that contain statements.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


def docstrings(source: bytes) -> Iterator[str]:
    """Yield the docstrings of a source file's module, classes and functions, in the order of the file.

    A file that can't be parsed has none: lib2to3 has sources of Python 2.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                yield docstring
        # Only statements can contain definitions. Expressions, most of the tree, are not visited.
        inner = [statement for field in _BLOCKS for statement in getattr(node, field, [])]
        pending.extend(reversed(inner))


# --- WikiText-2 -------------------------------------------------------------------------------------------------------

_HUB_DATASET = ("Salesforce/wikitext", "wikitext-2-v1")


def wikitext2(directory: str | os.PathLike[str] | None = None) -> Corpus:
    """Read WikiText-2 (Merity et al., 2016, https://arxiv.org/abs/1609.07843).

    Args:
        directory: with `wiki.train.tokens`, `wiki.valid.tokens` and `wiki.test.tokens`, or `train.txt`, `valid.txt` and
            `test.txt`. None fetches the same text with the `datasets` library.

    Raises:
        InputError: the folder or one of its files is missing, empty or not UTF-8, or the text can't be fetched.
    """
    if directory is None:
        return _fetch_wikitext2()
    root = Path(os.path.expanduser(directory))
    require(root.is_dir(), f"{root}: no such folder. Set data.dir to the folder with the WikiText-2 files.")
    train, valid, test = (_read_split(root, name) for name in SPLITS)
    return Corpus(train, valid, test)


def _read_split(root: Path, name: str) -> Split:
    candidates = (root / f"wiki.{name}.tokens", root / f"{name}.txt")
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise InputError(
            f"{candidates[0]}: no such file, and no {candidates[1].name} next to it. data=wikitext2 needs one of the "
            f"two in data.dir; the folder contains {_listing(root)}."
        )
    return Split(str(path), wikitext_articles(read_text(path)))


# The title of an article, such as " = Valkyria Chronicles III = ", but not of a section.
_TITLE = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)


def wikitext_articles(text: str) -> tuple[str, ...]:
    """Return the articles of a WikiText file, each from its title."""
    starts = [match.start() for match in _TITLE.finditer(text)]
    if not starts:
        return (text,)
    bounds = [0 if not text[: starts[0]].strip() else starts[0], *starts[1:], len(text)]
    head = (text[: bounds[0]],) if bounds[0] else ()
    return (*head, *(text[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)))


# --- Files ------------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Return the text of a file, without the byte order mark with which some programs begin it.

    Raises:
        InputError: it is missing, can't be read, or is empty or not UTF-8.
    """
    require(path.is_file(), f"{path}: no such file. Give the path of a text file in UTF-8.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give a file that can be read.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start} is 0x{error.object[error.start]:02x}, which is not UTF-8 ({error.reason}). "
            "Convert the file to UTF-8."
        ) from error
    require(bool(text.strip()), f"{path}: no text in {path.stat().st_size} bytes. Put the text of the split there.")
    return text


def text_file(path: str | os.PathLike[str]) -> Split:
    """Read a file of plain text. Documents are separated by blank lines, or begin with a title as in WikiText.

    Raises:
        InputError: it is missing, empty or not UTF-8.
    """
    text = read_text(Path(os.path.expanduser(path)))
    if _TITLE.search(text):
        return Split(str(path), wikitext_articles(text))
    return Split(str(path), tuple(block for block in re.split(r"\n[ \t]*\n", text) if block.strip()))


def with_held_out(train: Split, valid: str | os.PathLike[str] | None, test: str | os.PathLike[str] | None) -> Corpus:
    """Return a corpus of a training text and two files. Every 20th document of the text replaces a file that is None.

    Raises:
        InputError: a file is missing, empty or not UTF-8.
    """
    files = {"valid": valid, "test": test}
    parts = hold_out(train.documents, [name for name, file in files.items() if file is None])
    others = {
        name: Split(f"{train.source} (held out: {name})", parts[name]) if file is None else text_file(file)
        for name, file in files.items()
    }
    return Corpus(Split(train.source, parts["train"]), **others)


def _listing(root: Path) -> str:
    names = sorted(entry.name for entry in root.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "nothing"


def _fetch_wikitext2() -> Corpus:
    remedy = (
        "Set data.dir to a folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (or train.txt, "
        "valid.txt and test.txt), or let the `datasets` library fetch it: pip install datasets, with a connection to "
        "huggingface.co."
    )
    try:
        splits = load_dataset(*_HUB_DATASET)
    except ImportError as error:
        raise InputError(f"data.dir=null, and the `datasets` library is not installed. {remedy}") from error
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"data.dir=null, and WikiText-2 cannot be fetched: {reason}. {remedy}") from error
    hub_names = {"train": "train", "valid": "validation", "test": "test"}
    train, valid, test = (
        Split(f"{'/'.join(_HUB_DATASET)} ({name})", wikitext_articles("".join(splits[hub_names[name]]["text"])))
        for name in SPLITS
    )
    return Corpus(train, valid, test)
