"""Predicts with the exported model of a run, in an environment with onnxruntime and tokenizers alone."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_ort_tasks.commands.program import command_line
from lit_ort_tasks.csv_fields import allow_long_fields
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.prediction.classification import Text, classified
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL
from lit_ort_tasks.prediction.generation import Sampling, continued
from lit_ort_tasks.prediction.masked import unmasked
from lit_ort_tasks.prediction.model import Model
from lit_ort_tasks.prediction.perplexity import perplexity

HELP = """Predicts with the exported model of a run.

    {predict} run=RUN_FOLDER text="The list"             continues a text, token by token
    {predict} run=RUN_FOLDER text="A" text="B" tokens=80 temperature=0 top_k=null seed=3
    {predict} run=RUN_FOLDER text="return the value"     classifies it, with a classifier's run
    {predict} run=RUN_FOLDER text="A" pair="B"           classifies a pair of texts, with such a classifier's run
    {predict} run=RUN_FOLDER csv=FILE column=text        a line of JSON for each row, of pairs with pair_column=NAME
    {predict} run=RUN_FOLDER text="return [MASK] value"  fills the mask, with a run of BERT's pretraining
    {predict} run=RUN_FOLDER perplexity=FILE             of a file's text, with a language model's run

RUN_FOLDER is the folder of a run with export=onnx, such as `{train} export=onnx`, with model.onnx and tokenizer.json.
The transformer language model reads and writes words in lower case, with spaces around punctuation."""

_NUMBERS = {"tokens": int, "temperature": float, "top_k": int, "seed": int, "threads": int}
_COLUMNS = ("column", "pair_column")
_NAMES = ("run", "text", "pair", "csv", *_COLUMNS, "perplexity", *_NUMBERS)


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """The arguments of a command line: values by name, and texts and second texts in order."""

    values: dict[str, str]
    texts: tuple[str, ...]
    pairs: tuple[str, ...]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> CommandLine:
        values: dict[str, str] = {}
        texts: dict[str, list[str]] = {"text": [], "pair": []}
        for argument in arguments:
            name, equals, value = argument.partition("=")
            require(
                bool(equals) and name in _NAMES,
                f"{argument!r}: is no NAME=VALUE with a name of {', '.join(_NAMES)}. --help shows them.",
            )
            if name in texts:
                texts[name].append(value)
            else:
                values[name] = value
        return cls(values, tuple(texts["text"]), tuple(texts["pair"]))

    def contents(self) -> list[Text]:
        """The texts, with the second ones where there are any.

        Raises:
            InputError: there is not one for each text.
        """
        if not self.pairs:
            return list(self.texts)
        require(
            len(self.pairs) == len(self.texts),
            f"pair: {len(self.pairs)} given, for {len(self.texts)} of text. Give one for each text.",
        )
        return list(zip(self.texts, self.pairs, strict=True))

    def path(self, name: str) -> Path:
        return Path(os.path.expanduser(self.values[name]))

    def number(self, name: str, default: Any) -> float | None:
        value = self.values.get(name)
        if value is None:
            return default
        if value == "null":
            return None
        try:
            return _NUMBERS[name](value)
        except ValueError as error:
            kind = "whole number" if _NUMBERS[name] is int else "number"
            raise InputError(f"{name}={value}: is no {kind}. Give one, or leave it out.") from error

    def sampling(self) -> Sampling:
        values = {field.name: self.number(field.name, field.default) for field in dataclasses.fields(Sampling)}
        for name in ("tokens", "temperature", "seed"):
            require(values[name] is not None, f"{name}=null: has to be a number. Give one, or leave it out.")
        return Sampling(**values)  # pyright: ignore[reportArgumentType] - each number has the type of its field


def _input_of(line: CommandLine) -> str:
    """Return the name of the input: text, csv or perplexity.

    Raises:
        InputError: a value is missing, or has no effect.
    """
    require("run" in line.values, "run: is missing. Give the folder of a run that was exported: run=RUN_FOLDER.")
    inputs = [name for name in ("csv", "perplexity") if name in line.values] + (["text"] if line.texts else [])
    require(
        len(inputs) == 1,
        f"{' and '.join(inputs) or 'nothing'} given: one of text, csv and perplexity is needed. Choose one.",
    )
    require(
        "pair_column" not in line.values or inputs == ["csv"],
        "pair_column: is a column of a csv, and none is given. Give the second text as pair, or a csv.",
    )
    return inputs[0]


def predict(arguments: Sequence[str]) -> None:
    line = CommandLine.parse(arguments)
    source, contents = _input_of(line), line.contents()
    threads = line.number("threads", None)
    model = Model(line.path("run"), None if threads is None else int(threads))
    if source == "perplexity":
        result = perplexity(model, _read(line.path("perplexity")))
        print(f"perplexity {result.value:.2f}, loss {result.loss:.4f}, {result.tokens} tokens")
    elif source == "csv":
        for text, (label, probability) in _with_labels(model, _rows(line)):
            row = {"text": text[0], "pair": text[1]} if isinstance(text, tuple) else {"text": text}
            print(_line_of({**row, "label": label, "probability": round(probability, 4)}))
    elif model.facts.kind == CLASSIFIER or line.pairs:
        for text, (label, probability) in _with_labels(model, contents):
            print(f"{label} ({probability:.1%}): {' | '.join(text) if isinstance(text, tuple) else text}")
    elif model.facts.kind == MASKED_MODEL:
        for text, masks in zip(line.texts, unmasked(model, line.texts), strict=True):
            print(text)
            for number, tokens in enumerate(masks, start=1):
                print(f"  [MASK] {number}: " + ", ".join(f"{token} ({share:.1%})" for token, share in tokens))
    else:
        _continue(model, line)


def _line_of(row: dict[str, Any]) -> str:
    """A row as JSON on one line, also for readers that know other line ends than Unix."""
    text = json.dumps(row, ensure_ascii=False)
    for separator in "\x85\u2028\u2029":
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text


def _with_labels(model: Model, texts: Sequence[Text]) -> zip[tuple[Text, tuple[str, float]]]:
    return zip(texts, classified(model, texts), strict=True)


def _continue(model: Model, line: CommandLine) -> None:
    """Prints a single text as its tokens are drawn, several texts when all are complete."""
    sampling = line.sampling()
    length, continuations = 0, [""]
    is_single = len(line.texts) == 1
    if is_single:
        print(f"{line.texts[0]}{model.facts.separator}", end="", flush=True)
    for continuations in continued(model, line.texts, sampling):
        if is_single:
            # A token can end within a character, whose bytes are decoded to this one until it is complete.
            complete = continuations[0].rstrip("\ufffd")
            print(complete[length:], end="", flush=True)
            length = max(length, len(complete))
    if is_single:
        print()
        return
    for text, continuation in zip(line.texts, continuations, strict=True):
        print(f"{text}{model.facts.separator}{continuation}")


def _read(path: Path) -> str:
    try:
        # Programs that write tables begin with a byte order mark.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read: {error}. Give a text file in UTF-8.") from error


def _rows(line: CommandLine) -> list[Text]:
    path = line.path("csv")
    text = _read(path)
    allow_long_fields(text)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows, columns = list(reader), reader.fieldnames or ()
    except csv.Error as error:
        raise InputError(f"{path}: can't be read as CSV: {error}. Correct the file.") from error
    names = {"column": "text", **{option: line.values[option] for option in _COLUMNS if option in line.values}}
    for option, name in names.items():
        require(name in columns, f"{option}={name}: {path} has {', '.join(columns) or 'no columns'}. Give one of them.")
    texts, *pairs = ([row[name] or "" for row in rows] for name in names.values())
    return list(zip(texts, *pairs, strict=True)) if pairs else list(texts)


def main() -> None:
    """Runs the command line of this process."""
    try:
        if sys.argv[1:] in ([], ["--help"], ["-h"]):
            print(HELP.format(predict=command_line("predict"), train=command_line("train")))
        else:
            predict(sys.argv[1:])
        sys.stdout.flush()
    except InputError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        # The reader, such as `head`, has ended. At exit, Python would flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
