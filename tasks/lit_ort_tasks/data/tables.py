"""Texts with labels from files: CSV, TSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lit_ort_tasks.csv_fields import allow_long_fields
from lit_ort_tasks.data.corpora import read_text
from lit_ort_tasks.data.labelled_corpora import LabelledCorpus, LabelledSplit, others, part
from lit_ort_tasks.errors import InputError, require

PathLike = str | os.PathLike[str]
_DELIMITERS = MappingProxyType({".csv": ",", ".tsv": "\t"})


@dataclass(frozen=True)
class TableColumns:
    """The names of the columns to read; `pair` is None where single texts are classified."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"


@dataclass(frozen=True)
class _Row:
    line: int
    text: str
    pair: str | None
    label: str


def table(
    train_file: PathLike | None,
    valid_file: PathLike | None = None,
    test_file: PathLike | None = None,
    columns: TableColumns = TableColumns(),
) -> LabelledCorpus:
    """Read texts with labels from UTF-8 files, whose extension selects the format.

    .csv: fields separated by commas, quoted with ", with the names of the columns in the first row.
    .tsv: the same with tabs. A quotation mark is an ordinary character.
    .jsonl: one JSON object a line. Labels are strings or whole numbers.

    The labels are those of the training file in alphabetical order, or by value if all are whole numbers. For each of
    the other two files that is None, every 10th row of the training file is held out.

    Raises:
        InputError: a line can't be read as described, or a label of another file is missing in the training file. The
            message has file and line.
    """
    if train_file is None:
        raise InputError("data.train_file=null: no file to train on. Give the path of a .csv, .tsv or .jsonl file.")
    source = Path(os.path.expanduser(train_file))
    rows = _read_rows(source, columns)
    labels = _ordered({row.label for row in rows})
    require(
        len(labels) >= 2,
        f"{train_file}: {len(labels)} label ({', '.join(labels)}), and a classifier needs at least 2. Add rows with "
        "another label.",
    )
    whole = _table_split(source, rows, labels)
    # The splits without a file, with the index of their rows among each 10.
    held_out = {name: index for name, index, path in (("valid", 8, valid_file), ("test", 9, test_file)) if path is None}
    require(
        not held_out or len(rows) >= 10,
        f"{train_file}: {len(rows)} rows, and every 10th is held out where there is no data.valid_file or "
        "data.test_file. Give at least 10 rows, or those files.",
    )

    def split(name: str, path: PathLike | None) -> LabelledSplit:
        if path is None:
            return part(whole, f"held out: {name}", range(held_out[name], len(rows), 10))
        other = Path(os.path.expanduser(path))
        return _table_split(other, _read_rows(other, columns), labels)

    remaining = others(range(len(rows)), 10, tuple(held_out.values()))
    train = part(whole, "without held-out rows", remaining) if held_out else whole
    return LabelledCorpus(train, split("valid", valid_file), split("test", test_file), labels)


def _ordered(labels: Iterable[str]) -> tuple[str, ...]:
    if all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def _table_split(path: Path, rows: Sequence[_Row], labels: Sequence[str]) -> LabelledSplit:
    indices = {label: index for index, label in enumerate(labels)}
    for row in rows:
        require(
            row.label in indices,
            f"{path}, line {row.line}: label {row.label!r} out of range: data.train_file has {', '.join(labels)}. "
            "Correct the row, or add rows with this label to data.train_file.",
        )
    pairs = tuple(row.pair for row in rows if row.pair is not None)
    return LabelledSplit(
        str(path), tuple(row.text for row in rows), pairs or None, tuple(indices[row.label] for row in rows)
    )


def _read_rows(path: Path, columns: TableColumns) -> list[_Row]:
    suffix = path.suffix.lower()
    require(
        suffix in (*_DELIMITERS, ".jsonl"),
        f"{path}: unknown extension {path.suffix!r}. Give a file whose name ends in .csv, .tsv or .jsonl.",
    )
    text = read_text(path)
    records = _json_records(path, text) if suffix == ".jsonl" else _delimited_records(path, text, _DELIMITERS[suffix])
    rows = [
        _Row(
            line,
            _text(path, line, record, "text_column", columns.text),
            None if columns.pair is None else _text(path, line, record, "pair_column", columns.pair),
            _label(path, line, record, columns.label),
        )
        for line, record in records
    ]
    require(bool(rows), f"{path}: no row below the names of the columns. Add rows of texts and labels.")
    return rows


def _delimited_records(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each row by the names in the first one, with the line at which it begins."""
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    allow_long_fields(text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    names: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            if names is None:
                names = fields
            elif fields:  # not an empty line
                require(
                    len(fields) == len(names),
                    f"{path}, line {line}: {len(fields)} fields, and the first row names {len(names)} columns "
                    f"({', '.join(names)}). Give each row the same number; in a .csv, quote a field with a comma.",
                )
                yield line, dict(zip(names, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}, line {line}: cannot be read: {error}. Put a field with a comma, a quotation mark or a line end "
            'in quotation marks, and write a quotation mark in it as "".'
        ) from error


def _json_records(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}, line {line}: {content[:40]!r} is not JSON: {error}. Write one object a line, as "
                '{"text": "...", "label": "..."}.'
            ) from error
        require(
            isinstance(record, dict),
            f"{path}, line {line}: {content[:40]!r} is not a JSON object. Write one object a line, as "
            '{"text": "...", "label": "..."}.',
        )
        yield line, record


def _field(path: Path, line: int, record: Mapping[str, Any], option: str, column: str) -> Any:
    require(
        column in record,
        f"{path}, line {line}: no column {column!r} (data.{option}); there are {', '.join(map(repr, record))}. Set "
        f"data.{option} to one of them, or add it.",
    )
    return record[column]


def _text(path: Path, line: int, record: Mapping[str, Any], option: str, column: str) -> str:
    value = _field(path, line, record, option, column)
    require(
        isinstance(value, str) and bool(value.strip()),
        f"{path}, line {line}: {column!r} is {value!r}, and a text must be a string that is not empty. Correct or "
        "remove the row.",
    )
    require(
        not any("\ud800" <= letter <= "\udfff" for letter in value),
        f"{path}, line {line}: {column!r} is {value[:40]!r}, and half a surrogate pair is no character. Correct or "
        "remove the row.",
    )
    return value


def _label(path: Path, line: int, record: Mapping[str, Any], column: str) -> str:
    value = _field(path, line, record, "label_column", column)
    require(
        isinstance(value, (str, int)) and not isinstance(value, bool) and bool(str(value).strip()),
        f"{path}, line {line}: {column!r} is {value!r}, and a label must be a whole number or a string that is not "
        "empty. Correct or remove the row.",
    )
    return str(value).strip()
