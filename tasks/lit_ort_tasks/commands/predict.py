"""Predicts with the exported model of a run, in an environment with onnxruntime and tokenizers alone.

    python predict.py run=RUN_FOLDER text="The list"             continues a text, token by token
    python predict.py run=RUN_FOLDER text="A" text="B" tokens=80 temperature=0 top_k=null seed=3
    python predict.py run=RUN_FOLDER text="return the value"     classifies it, with a classifier's run
    python predict.py run=RUN_FOLDER csv=FILE column=text        a line of JSON for each row
    python predict.py run=RUN_FOLDER text="return [MASK] value"  fills the mask, with a run of BERT's pretraining
    python predict.py run=RUN_FOLDER perplexity=FILE             of a file's text, with a language model's run

RUN_FOLDER is one in which `python train.py export=onnx` left model.onnx and tokenizer.json. Decoded words of the
transformer language model are lower case with punctuation apart, as it reads them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.prediction.classification import classified
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL
from lit_ort_tasks.prediction.generation import Sampling, continued
from lit_ort_tasks.prediction.masked import unmasked
from lit_ort_tasks.prediction.model import Model
from lit_ort_tasks.prediction.perplexity import perplexity

_NUMBERS = {"tokens": int, "temperature": float, "top_k": int, "seed": int, "threads": int}
_NAMES = ("run", "text", "csv", "column", "perplexity", *_NUMBERS)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The command line: values by name, texts in order."""

    values: dict[str, str]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Asked:
        values: dict[str, str] = {}
        texts: list[str] = []
        for argument in arguments:
            name, equals, value = argument.partition("=")
            require(
                bool(equals) and name in _NAMES,
                f"{argument!r}: is no NAME=VALUE with a name of {', '.join(_NAMES)}. --help says more.",
            )
            if name == "text":
                texts.append(value)
            else:
                values[name] = value
        return cls(values, tuple(texts))

    def number(self, name: str, default: Any) -> float | None:
        given = self.values.get(name)
        if given is None:
            return default
        if given == "null":
            return None
        try:
            return _NUMBERS[name](given)
        except ValueError as error:
            kind = "whole number" if _NUMBERS[name] is int else "number"
            raise InputError(f"{name}={given}: is no {kind}. Give one, or leave it out.") from error

    def sampling(self) -> Sampling:
        given = {field.name: self.number(field.name, field.default) for field in dataclasses.fields(Sampling)}
        for name in ("tokens", "temperature", "seed"):
            require(given[name] is not None, f"{name}=null: has to be a number. Give one, or leave it out.")
        return Sampling(**given)  # pyright: ignore[reportArgumentType] - numbers by the fields' own kinds


def predict(arguments: Sequence[str]) -> None:
    asked = Asked.of(arguments)
    require("run" in asked.values, "run: is missing. Give the folder of a run that was exported: run=RUN_FOLDER.")
    ways = [name for name in ("csv", "perplexity") if name in asked.values] + (["text"] if asked.texts else [])
    require(
        len(ways) == 1,
        f"{' and '.join(ways) or 'nothing'} given: one of text, csv and perplexity is needed. Choose one.",
    )
    threads = asked.number("threads", None)
    model = Model(Path(asked.values["run"]), None if threads is None else int(threads))
    if ways == ["perplexity"]:
        found = perplexity(model, _read(Path(asked.values["perplexity"])))
        print(f"perplexity {found.value:.2f}, loss {found.loss:.4f}, {found.tokens} tokens")
    elif ways == ["csv"]:
        for text, (label, share) in _with_labels(model, _column(asked)):
            print(json.dumps({"text": text, "label": label, "probability": round(share, 4)}, ensure_ascii=False))
    elif model.facts.kind == CLASSIFIER:
        for text, (label, share) in _with_labels(model, asked.texts):
            print(f"{label} ({share:.1%}): {text}")
    elif model.facts.kind == MASKED_MODEL:
        for text, places in zip(asked.texts, unmasked(model, asked.texts), strict=True):
            print(text)
            for k, best in enumerate(places, start=1):
                print(f"  [MASK] {k}: " + ", ".join(f"{token} ({share:.1%})" for token, share in best))
    else:
        _continue(model, asked)


def _with_labels(model: Model, texts: Sequence[str]) -> zip[tuple[str, tuple[str, float]]]:
    return zip(texts, classified(model, texts), strict=True)


def _continue(model: Model, asked: Asked) -> None:
    """One text appears as it is drawn; several when all are done."""
    sampling = asked.sampling()
    shown, found = 0, [""]
    alone = len(asked.texts) == 1
    if alone:
        print(f"{asked.texts[0]}{model.facts.separator}", end="", flush=True)
    for found in continued(model, asked.texts, sampling):
        if alone:
            # A token may end within a letter, which stands for nothing yet.
            ready = found[0].rstrip("\ufffd")
            print(ready[shown:], end="", flush=True)
            shown = max(shown, len(ready))
    if alone:
        print()
        return
    for text, more in zip(asked.texts, found, strict=True):
        print(f"{text}{model.facts.separator}{more}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read: {error}. Give a text file in UTF-8.") from error


def _column(asked: Asked) -> list[str]:
    path, name = Path(asked.values["csv"]), asked.values.get("column", "text")
    rows = csv.DictReader(_read(path).splitlines(keepends=True))
    columns = rows.fieldnames or []
    require(name in columns, f"column={name}: {path} has {', '.join(columns) or 'no columns'}. Give one of them.")
    return [row[name] or "" for row in rows]


def main() -> None:
    """Runs the command line of this process."""
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        print(__doc__)
        return
    try:
        predict(sys.argv[1:])
        sys.stdout.flush()
    except InputError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        # The reader, such as `head`, has what it wants. Python would flush to it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
