"""Blocks for causal language models: every token is a target once, and the errors of invalid files."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lit_ort_tasks.data.batches import IGNORED
from lit_ort_tasks.data.corpora import python_docs, text_file, wikitext2
from lit_ort_tasks.data.labelled_corpora import docstring_classes
from lit_ort_tasks.data.pretraining_shards import PretrainingShards
from lit_ort_tasks.data.tables import table
from lit_ort_tasks.data.text import WikiText2
from lit_ort_tasks.data.text_blocks import Blocks, TextBlocks, corpus_of_files, count_targets
from lit_ort_tasks.data.tokenization import tokenizer_key
from lit_ort_tasks.errors import InputError

from tests.tasks.test_text import write_wikitext


def write_documents(path: Path, count: int = 40) -> Path:
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
    documents = [" ".join(f"{words[(k + j) % 10]}{k}" for j in range(12)) for k in range(count)]
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


def small_data(folder: Path, **options: Any) -> TextBlocks:
    values: dict[str, Any] = dict(
        vocabulary_size=300, block=16, batch_size=4, eval_batch_size=4, cache_dir=folder / "c"
    )
    return TextBlocks(train_file=write_documents(folder / "train.txt"), **(values | options))


@pytest.mark.parametrize("length", [17, 33, 34, 48, 49])
def test_every_token_but_the_first_is_a_target_once(length: int) -> None:
    stream = np.arange(length, dtype=np.int32)
    blocks = Blocks(stream, 16)
    items = [blocks[k] for k in range(len(blocks))]
    targets = torch.cat([item["targets"] for item in items])
    assert targets[targets != IGNORED].tolist() == list(range(1, length))
    for item in items:
        is_target = item["targets"] != IGNORED
        assert torch.equal(item["input_ids"][is_target] + 1, item["targets"][is_target])
        assert item["input_ids"].shape == item["targets"].shape == (16,)
        assert item["input_ids"].max() < length


def test_the_stream_is_the_text_with_an_end_after_each_document(tmp_path: Path) -> None:
    data = small_data(tmp_path)
    decoded = data.tokenizer.decode(torch.from_numpy(data.streams["valid"].astype(np.int64)))
    assert decoded == "".join(text + "<|endoftext|>" for text in data.corpus.valid.documents)
    total = sum(len(split.documents) for split in (data.corpus.train, data.corpus.valid, data.corpus.test))
    assert total == 40


def test_tokens_come_from_the_cache_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small_data(tmp_path).streams
    monkeypatch.setattr("lit_ort_tasks.data.text_blocks.encode_documents", lambda *_: pytest.fail("tokenized again"))
    second = small_data(tmp_path).streams
    for name, stream in first.items():
        assert isinstance(second[name], np.memmap)
        assert np.array_equal(second[name], stream)


def test_another_text_is_tokenized_again(tmp_path: Path) -> None:
    before = small_data(tmp_path).streams["train"]
    other = small_data(tmp_path)
    path = tmp_path / "train.txt"
    path.write_text(path.read_text().replace("alpha0", "omega0"))
    assert not np.array_equal(other.streams["train"], before)


def test_another_end_of_texts_is_tokenized_again_and_not_resumed(tmp_path: Path) -> None:
    data, other = small_data(tmp_path), small_data(tmp_path)
    data.tokenizer.add_tokens("<end>", special_tokens=True)
    other.tokenizer = copy.deepcopy(data.tokenizer)
    other.tokenizer.eos_token = "<end>"
    ends = {name: int(one.streams["valid"][-1]) for name, one in {"data": data, "other": other}.items()}
    assert ends == {"data": data.tokenizer.eos_token_id, "other": other.tokenizer.eos_token_id}
    assert ends["data"] != ends["other"]
    with pytest.raises(InputError, match=f"end with the token {ends['data']}, and those of the data end with"):
        other.load_state_dict(data.state_dict())
    other.load_state_dict({"tokenizer": tokenizer_key(other.tokenizer)})  # of an older version


def test_epochs_have_different_orders_that_repeat(tmp_path: Path) -> None:
    def epoch(number: int) -> list[list[int]]:
        loader = small_data(tmp_path).train_dataloader()
        assert loader.sampler is not None
        getattr(loader.sampler, "set_epoch")(number)  # noqa: B009 - DataLoader types its sampler without it
        return [batch["input_ids"].flatten().tolist() for batch in loader]

    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)
    assert all(len(batch) == 4 * 16 for batch in epoch(1))


def test_targets_are_counted() -> None:
    assert count_targets({"targets": torch.tensor([[1, IGNORED], [2, 3]])}) == 3


def test_files_are_their_splits(tmp_path: Path) -> None:
    train, test = write_documents(tmp_path / "a.txt"), write_documents(tmp_path / "b.txt", 5)
    corpus = corpus_of_files(train, None, test)
    assert corpus.test == text_file(test)
    assert len(corpus.train.documents) == 38
    assert len(corpus.valid.documents) == 2
    assert not set(corpus.train.documents) & set(corpus.valid.documents)


def test_a_text_of_one_document_is_split_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("\n".join(f"line {k}" for k in range(40)))
    corpus = corpus_of_files(path, None, None)
    lines = [line for split in (corpus.train, corpus.valid, corpus.test) for line in split.text.splitlines()]
    assert sorted(lines) == sorted(f"line {k}" for k in range(40))


def test_wikitext_titles_begin_documents(tmp_path: Path) -> None:
    path = tmp_path / "wiki.train.tokens"
    path.write_text(" \n = One = \n \n text \n \n = = Part = = \n \n more \n \n = Two = \n \n text \n")
    documents = text_file(path).documents
    assert [text.split()[1] for text in documents] == ["One", "Two"]
    assert "more" in documents[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(block=0), "data.block=0: must be a whole number"),
        (dict(seed="one"), "data.seed='one': must be a whole number of at least 0"),
        (dict(vocabulary_size=100), "data.vocabulary_size=100: must be a whole number of at least 257"),
        (dict(train_file=None, test_file="x"), "data.train_file=null: there are files"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TextBlocks(**options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"train\.txt: no such file"),
        (b"  \n ", r"train\.txt: no text in 4 bytes"),
        (b"abc\xff", r"train\.txt: byte 3 is 0xff, which is not UTF-8"),
        (b"a few words", r"tokens, and one block with its targets needs 17 \(data\.block=16\)"),
    ],
)
def test_invalid_files_are_refused_by_name(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    if content is not None:
        path.write_bytes(content)
    data = TextBlocks(train_file=path, block=16, vocabulary_size=300, cache_dir=tmp_path / "c")
    with pytest.raises(InputError, match=message):
        data.setup("fit")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    path = write_documents(tmp_path / "train.txt")
    monkeypatch.setattr(Path, "read_text", closed)
    with pytest.raises(InputError, match=r"train\.txt: cannot be read \(Permission denied\)"):
        text_file(path)


def test_the_home_folder_and_a_byte_order_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("\ufeffone\n\ntwo", encoding="utf-8")
    assert text_file("~/a.txt").documents == ("one", "two")
    (tmp_path / "a.csv").write_text("text,label\na,0\nb,1\n")
    assert table("~/a.csv", "~/a.csv", "~/a.csv").train.texts[:2] == ("a", "b")
    for read in (python_docs, docstring_classes, wikitext2):
        with pytest.raises(InputError, match=f"{tmp_path}/absent: no such folder"):
            read("~/absent")
    with pytest.raises(InputError, match=f"data.dir={tmp_path}/absent: no such folder"):
        PretrainingShards(dir="~/absent", vocabulary_size=9).setup("fit")
    data = small_data(tmp_path)
    data.tokenizer.save_pretrained(tmp_path / "words")
    assert small_data(tmp_path, tokenizer="~/words").tokenizer.get_vocab() == data.tokenizer.get_vocab()


def test_a_missing_tokenizer_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.tokenizer=.*nowhere: no such folder"):
        small_data(tmp_path, tokenizer=tmp_path / "nowhere").setup("fit")


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    data = small_data(tmp_path)
    data.load_state_dict(data.state_dict())
    with pytest.raises(InputError, match="another tokenizer"):
        data.load_state_dict({"tokenizer": "other"})


@pytest.mark.parametrize("ranks", [1, 2, 100])
def test_each_process_has_training_data(ranks: int, tmp_path: Path) -> None:
    sampler = {"num_replicas": ranks, "rank": 0}
    words = WikiText2(dir=write_wikitext(tmp_path / "words"), batch_size=4, eval_batch_size=2, bptt=5)
    for data in (small_data(tmp_path), words):
        data.trainer = cast("Trainer", SimpleNamespace(distributed_sampler_kwargs=sampler, overfit_batches=0))
        if ranks < 100:
            data.setup("fit")
            assert len(data.train_dataloader()) > 0
        else:
            with pytest.raises(InputError, match="100 processes. Give a smaller one"):
                data.setup("fit")
