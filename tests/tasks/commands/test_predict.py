"""predict.py from the command line, in a process without torch and the packages for training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL
from tokenizers import Tokenizer

from tests.tasks.exported import PAIRS

pytestmark = pytest.mark.xdist_group("prediction")
ROOT = Path(__file__).parents[3]
# Removes the packages that an environment of `pip install onnxruntime tokenizers` lacks.
WITHOUT = """
import runpy, sys
for name in ("torch", "lightning", "transformers", "onnx", "lit_ort"):
    sys.modules[name] = None
sys.argv[0] = "predict.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def predict(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_text_is_continued(trained: tuple[Path, object, object]) -> None:
    ended = predict(f"run={trained[0]}", "text=the list", "tokens=4", "temperature=0")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("the list ")
    assert len(ended.stdout.split()) == 6
    both = predict(f"run={trained[0]}", "text=the list", "text=it has", "tokens=4", "temperature=0")
    assert both.stdout.splitlines()[0] == ended.stdout.strip()
    assert both.stdout.splitlines()[1].startswith("it has ")


def test_perplexity_of_a_file(trained: tuple[Path, object, object], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the list isn't empty ; it has items .")
    ended = predict(f"run={trained[0]}", f"perplexity={tmp_path / 'text.txt'}")
    assert ended.stdout.startswith("perplexity ")
    assert ended.stdout.strip().endswith("9 tokens")


def test_texts_and_columns_have_classes(berts: dict[str, Path], tmp_path: Path) -> None:
    run = f"run={berts[CLASSIFIER]}"
    ended = predict(run, "text=the list is empty", "text=sorted")
    assert [line.split(" ")[0] in ("short", "long") for line in ended.stdout.splitlines()] == [True, True]
    (tmp_path / "rows.csv").write_text('\ufeffid,words\n1,"the list\u2028"\n2,sorted\n')
    ended = predict(run, f"csv={tmp_path / 'rows.csv'}", "column=words")
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["the list\u2028", "sorted"]
    assert all(row["label"] in ("short", "long") and 0.5 <= row["probability"] <= 1 for row in rows)
    assert "column=text: " in predict(run, f"csv={tmp_path / 'rows.csv'}").stderr


def test_pairs_have_classes(berts: dict[str, Path], tmp_path: Path) -> None:
    run = f"run={berts[PAIRS]}"
    ended = predict(run, "text=the list", "pair=is empty", "text=sorted", "pair=not")
    assert [line.split(": ")[1] for line in ended.stdout.splitlines()] == ["the list | is empty", "sorted | not"]
    (tmp_path / "rows.csv").write_text("text,other\nthe list,is empty\n" + "a" * 200_000 + ",not\n")
    rows = predict(run, f"csv={tmp_path / 'rows.csv'}", "pair_column=other").stdout.splitlines()
    assert [json.loads(row)["pair"] for row in rows] == ["is empty", "not"]
    assert "the model is a classifier of pairs" in predict(run, "text=the list").stderr
    assert "pair='not': the model is a masked" in predict(f"run={berts[MASKED_MODEL]}", "text=a", "pair=not").stderr


def test_masks_are_filled(berts: dict[str, Path]) -> None:
    ended = predict(f"run={berts[MASKED_MODEL]}", "text=the [MASK] is [MASK]")
    assert ended.returncode == 0, ended.stderr
    first, *masks = ended.stdout.splitlines()
    assert first == "the [MASK] is [MASK]"
    assert len(masks) == 2
    assert all(mask.count("%") == 5 for mask in masks)
    assert "has no [MASK] to fill" in predict(f"run={berts[MASKED_MODEL]}", "text=the list").stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Predicts with the exported model of a run"),
        (["text=a"], "run: is missing"),
        (["run=none", "text=a"], "none/model.onnx: there is no such file"),
        (["run=none"], "nothing given: one of text, csv and perplexity is needed"),
        (["run=none", "words=a"], "'words=a': is no NAME=VALUE with a name of run, text"),
        (["run=none", "text=a", "text=b", "pair=c"], "pair: 1 given, for 2 of text"),
        (["run=none", "text=a", "pair_column=b"], "pair_column: is a column of a csv"),
        (["run=none", "text=a", "threads=two"], "threads=two: is no whole number"),
    ],
)
def test_the_command_line(arguments: list[str], message: str) -> None:
    ended = predict(*arguments)
    assert message in ended.stdout + ended.stderr
    assert ended.returncode == (0 if not arguments else 1)
    assert "Traceback" not in ended.stderr


def test_a_changed_vocabulary(berts: dict[str, Path], tmp_path: Path) -> None:
    folder = berts[CLASSIFIER]
    for name in ("model.onnx", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ended = predict(f"run={tmp_path}", "text=another")
    assert "Traceback" not in ended.stderr
    assert "tokenizer.json: its vocabulary is 12 sha256:" in ended.stderr
