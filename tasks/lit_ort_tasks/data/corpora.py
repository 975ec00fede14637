"""Where text comes from: the running Python's own documentation, and WikiText-2.

Each reader returns a `Corpus`: the text of the three splits, and the name under which an error mentions each of them.
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

    source: the file or the place it was read from; error messages begin with it.
    documents: texts that don't go on in one another, in order.
    """

    source: str
    documents: tuple[str, ...]

    @property
    def text(self) -> str:
        """The documents below each other."""
        return "\n".join(self.documents)


@dataclass(frozen=True)
class Corpus:
    """The three splits of a body of text."""

    train: Split
    valid: Split
    test: Split


# Of every 20 documents, the places of those that are held out for the splits that have no text of their own.
HELD_OUT_EVERY = 20
HELD_OUT_PLACES: Mapping[str, int] = MappingProxyType({"valid": 9, "test": 19})


def hold_out(documents: Sequence[str], names: Iterable[str] = ("valid", "test")) -> dict[str, tuple[str, ...]]:
    """Every 20th document for each of these splits, by its name, and all others as "train"."""
    places = {name: HELD_OUT_PLACES[name] for name in names}
    kept = tuple(text for place, text in enumerate(documents) if place % HELD_OUT_EVERY not in places.values())
    return {"train": kept} | {name: tuple(documents[place::HELD_OUT_EVERY]) for name, place in places.items()}


# --- Python's documentation -------------------------------------------------------------------------------------------

# Folders whose docstrings are not documentation of the standard library.
NOT_DOCUMENTATION = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def python_docs(directory: str | os.PathLike[str] | None = None) -> Corpus:
    """Reads the documentation that every Python carries, split by document 90/5/5 in a fixed order.

    A document is one topic of `pydoc_data.topics` (what `help("for")` shows) or all docstrings of one source file of
    the standard library. The text depends on the Python version.

    directory: a folder of Python sources to read in place of the running interpreter's standard library; then no topics
        are read.

    Raises InputError if the folder is missing or holds fewer than 20 documents (each split needs at least one).
    """
    root = Path(sysconfig.get_paths()["stdlib"] if directory is None else directory)
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
    """Syntax trees have no cycles, and the collector's passes over so many objects take twice as long as the parser."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _topics() -> list[str]:
    """The language reference's topics, in the order of their names; none where a distribution leaves them out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def _docstring_documents(root: Path) -> Iterator[str]:
    """The docstrings of each Python file below `root`, file by file in the order of their paths."""
    for path in sorted(root.rglob("*.py")):
        if NOT_DOCUMENTATION.isdisjoint(path.relative_to(root).parts):
            document = "\n".join(docstrings(path.read_bytes()))
            if document:
                yield document


# The fields of a syntax tree's node that hold statements.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


def docstrings(source: bytes) -> Iterator[str]:
    """The docstrings of a source file's module, classes and functions in the order of the file.

    Nothing from a file that does not parse: lib2to3 carries Python 2 sources on purpose.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                yield docstring
        # Only statements can hold definitions: expressions, most of the tree, are not visited.
        inner = [statement for field in _BLOCKS for statement in getattr(node, field, [])]
        pending.extend(reversed(inner))


# --- WikiText-2 -------------------------------------------------------------------------------------------------------

_HUB_DATASET = ("Salesforce/wikitext", "wikitext-2-v1")


def wikitext2(directory: str | os.PathLike[str] | None = None) -> Corpus:
    """Reads WikiText-2 (Merity et al., 2016, https://arxiv.org/abs/1609.07843).

    directory: holds `wiki.train.tokens`, `wiki.valid.tokens` and `wiki.test.tokens`, or `train.txt`, `valid.txt` and
        `test.txt`. None fetches the same text with the `datasets` library.

    Raises InputError if the folder or one of its files is missing, empty or not UTF-8, or if there is no folder and
    the text cannot be fetched.
    """
    if directory is None:
        return _fetch_wikitext2()
    root = Path(directory)
    require(root.is_dir(), f"{root}: no such folder. Set data.dir to the folder that holds the WikiText-2 files.")
    train, valid, test = (_read_split(root, name) for name in SPLITS)
    return Corpus(train, valid, test)


def _read_split(root: Path, name: str) -> Split:
    candidates = (root / f"wiki.{name}.tokens", root / f"{name}.txt")
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise InputError(
            f"{candidates[0]}: no such file, and no {candidates[1].name} beside it. data=wikitext2 needs one of the "
            f"two in data.dir; the folder holds {_listing(root)}."
        )
    return Split(str(path), wikitext_articles(read_text(path)))


# A line that is the title of an article, as " = Valkyria Chronicles III = ", and not of a section of it.
_TITLE = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)


def wikitext_articles(text: str) -> tuple[str, ...]:
    """The articles of a WikiText file, each from its title on."""
    starts = [match.start() for match in _TITLE.finditer(text)]
    if not starts:
        return (text,)
    bounds = [0 if not text[: starts[0]].strip() else starts[0], *starts[1:], len(text)]
    head = (text[: bounds[0]],) if bounds[0] else ()
    return (*head, *(text[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)))


# --- Files ------------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file.

    Raises InputError if it is missing, empty or not UTF-8.
    """
    require(path.is_file(), f"{path}: no such file. Give the path of a text file in UTF-8.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start} is 0x{error.object[error.start]:02x}, which is not UTF-8 ({error.reason}). "
            "Convert the file to UTF-8."
        ) from error
    require(bool(text.strip()), f"{path}: no text in {path.stat().st_size} bytes. Put the text of the split there.")
    return text


def text_file(path: str | os.PathLike[str]) -> Split:
    """A file of plain text: documents are separated by blank lines, or begin with titles as WikiText's do.

    Raises InputError if it is missing, empty or not UTF-8.
    """
    text = read_text(Path(path))
    if _TITLE.search(text):
        return Split(str(path), wikitext_articles(text))
    return Split(str(path), tuple(block for block in re.split(r"\n[ \t]*\n", text) if block.strip()))


def with_held_out(train: Split, valid: str | os.PathLike[str] | None, test: str | os.PathLike[str] | None) -> Corpus:
    """A text and two files; every 20th document of the text stands in for each of the files that is not given.

    Raises InputError if a file is missing, empty or not UTF-8.
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
