"""Predictions of exported models of the tasks, compared with PyTorch."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from lit_ort_tasks.data.text import encode, tokenize
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.prediction.classification import classified, encoded
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL, Facts
from lit_ort_tasks.prediction.generation import Sampling, continued
from lit_ort_tasks.prediction.masked import unmasked
from lit_ort_tasks.prediction.model import Model
from lit_ort_tasks.prediction.perplexity import perplexity
from lit_ort_tasks.transformer_lm import TransformerModel
from torch.nn import functional

from tests.tasks.exported import LENGTH, PAIRS, TEXT

pytestmark = pytest.mark.xdist_group("prediction")


def test_the_files_of_the_folder(trained: tuple[Path, TransformerModel, list[str]]) -> None:
    folder, _, _ = trained
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.onnx", "tokenizer.json"]
    readme = (folder / "README.md").read_text()
    assert "input_ids: int64[batch, length], at most 8 tokens" in readme


def test_ids_are_torchtexts(trained: tuple[Path, TransformerModel, list[str]]) -> None:
    folder, _, vocabulary = trained
    text = f"{TEXT} Unknown's words\n\nand\tspaces"
    assert Model(folder).encode([text]) == [encode(tokenize(text), vocabulary).tolist()]


def test_the_most_probable_words_are_those_of_eager(trained: tuple[Path, TransformerModel, list[str]]) -> None:
    folder, module, vocabulary = trained
    texts = ["the list", "it has three items . is it sorted ? yes no"]
    (*_, continuations) = continued(Model(folder), texts, Sampling(tokens=6, temperature=0))
    for text, continuation in zip(texts, continuations, strict=True):
        ids = encode(tokenize(text), vocabulary).tolist()
        for _ in range(6):
            with torch.no_grad():
                logits = module(torch.tensor(ids[-LENGTH:]).unsqueeze(1))
            ids.append(int(logits[-1, 0].argmax()))
        assert continuation.split() == [vocabulary[k] for k in ids[-6:]]


def test_draws_repeat_with_the_seed(trained: tuple[Path, TransformerModel, list[str]]) -> None:
    model = Model(trained[0])
    draws = [[*continued(model, ["the"], Sampling(tokens=9, seed=seed))][-1] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    most_probable = [*continued(model, ["the"], Sampling(tokens=9, temperature=0))][-1]
    assert [*continued(model, ["the"], Sampling(tokens=9, temperature=5, top_k=1))][-1] == most_probable
    assert [*continued(model, ["the"], Sampling(tokens=9, temperature=1e-310))][-1] == most_probable


def test_pairs_are_classified_as_in_eager(berts: dict[str, Path]) -> None:
    model = Model(berts[PAIRS])
    inputs = encoded(model, [("the list", "is empty"), ("the", "sorted")])
    assert inputs["input_ids"].tolist() == [[2, 5, 6, 3, 7, 8, 3], [2, 5, 3, 9, 3, 0, 0]]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0]]
    assert len(list(classified(model, [("the list", "is empty"), ("the", "sorted")]))) == 2
    with pytest.raises(InputError, match="text='the': the model is a classifier of pairs of texts"):
        next(classified(model, ["the"]))
    with pytest.raises(InputError, match="pair='list': the model is a classifier of single texts"):
        next(classified(Model(berts[CLASSIFIER]), [("the", "list")]))


def test_a_description_of_an_older_version_is_of_single_texts() -> None:
    older = json.loads(Facts(CLASSIFIER, 16, ("a", "b")).as_text())
    del older["pairs"]
    assert Facts.from_text(json.dumps(older)) == Facts(CLASSIFIER, 16, ("a", "b"), pairs=False)


def test_a_mask_beyond_the_longest_sequence_is_refused(berts: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"has a \[MASK\] beyond the longest sequence of the model, 16 tokens"):
        next(unmasked(Model(berts[MASKED_MODEL]), ["the [MASK] " + "list " * 20 + "[MASK]"]))


def test_perplexity_is_that_of_eager(trained: tuple[Path, TransformerModel, list[str]]) -> None:
    folder, module, vocabulary = trained
    ids = encode(tokenize(TEXT), vocabulary)
    total = 0.0
    for start in range(0, len(ids) - 1, LENGTH):
        block = ids[start : start + LENGTH + 1]
        with torch.no_grad():
            total += float(functional.cross_entropy(module(block[:-1].unsqueeze(1))[:, 0], block[1:], reduction="sum"))
    result = perplexity(Model(folder), TEXT)
    assert result.tokens == len(ids) - 1
    assert result.value == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-5)


def test_errors_of_predictions(trained: tuple[Path, TransformerModel, list[str]], tmp_path: Path) -> None:
    model = Model(trained[0])
    with pytest.raises(InputError, match="is a language model, which has no classes"):
        next(classified(model, ["a"]))
    with pytest.raises(InputError, match="text='': has no token"):
        next(continued(model, [""], Sampling()))
    with pytest.raises(InputError, match="has 1 tokens, and at least 2"):
        perplexity(model, "the")
    with pytest.raises(InputError, match="temperature=-1: must be a number of at least 0"):
        Sampling(temperature=-1)
    with pytest.raises(InputError, match="seed=-1: must be at least 0"):
        Sampling(seed=-1)
    with pytest.raises(InputError, match=re.escape("model.onnx: there is no such file")):
        Model(tmp_path)
    (tmp_path / "model.onnx").write_text("text")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="is no ONNX model"):
        Model(tmp_path)
