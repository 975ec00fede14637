"""Every reader on damaged files: it returns correct data or raises an error that names the file."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lit_ort_tasks.data.corpora import text_file, wikitext2
from lit_ort_tasks.data.pretraining_shard_files import FORM, check_shard, read_shard, to_batch
from lit_ort_tasks.data.tables import table
from lit_ort_tasks.data.token_cache import cached_arrays
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.huggingface import load_model, load_tokenizer
from torch import nn
from transformers import BertConfig, BertModel

from lit_ort import AtomicCheckpointIO, LitOrtWarning
from lit_ort.errors import CheckpointError
from tests.compare import backend
from tests.pretraining import write_tokenizer

EXAMPLES = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Change = Callable[[bytes], bytes]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """Random changes of a file's bytes."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "zeros", "garbage", "empty", "twice"]))
    position, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))
    other = draw(st.binary(min_size=1, max_size=40))

    def change(content: bytes) -> bytes:
        start = int(position * len(content))
        if kind == "flip":
            return content[:start] + bytes([content[start] ^ 1 << bit]) + content[start + 1 :]
        if kind == "cut":
            return content[:start]
        if kind == "insert":
            return content[:start] + other + content[start:]
        if kind == "overwrite":
            return content[:start] + other + content[start + len(other) :]
        if kind == "zeros":
            return content[:start] + bytes(len(content) - start)
        return {"garbage": other, "empty": b"", "twice": content * 2}[kind]

    return change


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


TEXT = "= Title = \n\n one two three \n\n = Other = \n\n four five six <unk> \n"


@EXAMPLES
@given(changes())
def test_text(change: Change) -> None:
    with folder() as folder_path:
        path = folder_path / "text.txt"
        path.write_bytes(change(TEXT.encode()))
        try:
            corpus = text_file(path)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017 - both outcomes are correct
        else:
            assert all(document.strip() for document in corpus.documents)


@EXAMPLES
@given(changes(), st.sampled_from(["train", "valid", "test"]))
def test_wikitext(change: Change, name: str) -> None:
    with folder() as folder_path:
        for split in ("train", "valid", "test"):
            (folder_path / f"{split}.txt").write_text(TEXT)
        path = folder_path / f"{name}.txt"
        path.write_bytes(change(path.read_bytes()))
        try:
            wikitext2(folder_path)
        except InputError as error:
            assert name in str(error)  # noqa: PT017


ROWS = [{"text": f"text, {k}", "label": k % 3} for k in range(20)]
TABLES = {
    ".csv": "text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in ROWS),
    ".tsv": "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in ROWS),
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
}


@EXAMPLES
@given(changes(), st.sampled_from(sorted(TABLES)))
def test_tables(change: Change, suffix: str) -> None:
    with folder() as folder_path:
        path = folder_path / f"rows{suffix}"
        path.write_bytes(change(TABLES[suffix].encode()))
        try:
            data = table(path)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            for split in (data.train, data.valid, data.test):
                assert len(split.texts) == len(split.labels)
                assert all(0 <= label < len(data.labels) for label in split.labels)


def test_a_row_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(TABLES[".jsonl"] + "[" * 100_000 + "\n")
    with pytest.raises(InputError, match=r"rows.jsonl, line 21: .* is not JSON"):
        table(path)


def shard() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"N": (6,), "NL": (6, 12), "NP": (6, 3)}
    return {key: random.integers(0, 2, shapes[dimensions]).astype(dtype) for key, (dimensions, dtype) in FORM.items()}


class Files:
    """The bytes of files by name, with a short repr for hypothesis."""

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"Files({', '.join(self.content)})"


@pytest.fixture(scope="module")
def valid_shard(tmp_path_factory: pytest.TempPathFactory) -> Files:
    path = tmp_path_factory.mktemp("shards") / "shard.hdf5"
    with h5py.File(path, "w") as file:
        for key, values in shard().items():
            file.create_dataset(key, data=values, compression="gzip")
    return Files({path.name: path.read_bytes()})


@EXAMPLES
@given(changes())
def test_shards(valid_shard: Files, change: Change) -> None:
    with folder() as folder_path:
        path = folder_path / "shard.hdf5"
        path.write_bytes(change(valid_shard.content[path.name]))
        try:
            batch = to_batch(read_shard(check_shard(path), 50))
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            assert batch["input_ids"].max() < 50


ARRAYS = {"ids": np.arange(300, dtype=np.int32), "starts": np.array([0, 100, 200])}


@EXAMPLES
@given(changes(), st.sampled_from(["ids.npy", "starts.npy", "checksums.json"]))
def test_token_cache(change: Change, name: str) -> None:
    """A damaged entry is created again."""
    with folder() as folder_path:
        cached_arrays(folder_path, "entry", lambda: ARRAYS)
        path = folder_path / "entry" / name
        path.write_bytes(change(path.read_bytes()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* is damaged .*; its text is tokenized again")
            arrays = cached_arrays(folder_path, "entry", lambda: ARRAYS)
        assert {key: values.tolist() for key, values in arrays.items()} == {
            key: values.tolist() for key, values in ARRAYS.items()
        }


STATE = {"state_dict": {"weight": torch.arange(100.0)}, "epoch": 3, "text": "x" * 100}


@EXAMPLES
@given(changes())
def test_checkpoints(change: Change) -> None:
    with folder() as folder_path:
        path = folder_path / "last.ckpt"
        AtomicCheckpointIO().save_checkpoint(STATE, path)
        path.write_bytes(change(path.read_bytes()))
        try:
            checkpoint = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            assert torch.equal(checkpoint["state_dict"]["weight"], STATE["state_dict"]["weight"])
            assert (checkpoint["epoch"], checkpoint["text"]) == (3, STATE["text"])


def square(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).square().mean()


@pytest.mark.slow
@settings(EXAMPLES, max_examples=20)
@given(changes())
def test_graph_cache(graph_entry: Files, change: Change) -> None:
    """A damaged entry is not used, and the graph is compiled again."""
    ((name, content),) = graph_entry.content.items()
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    with folder() as folder_path, warnings.catch_warnings():
        (folder_path / name).write_bytes(change(content))
        warnings.filterwarnings("ignore", category=LitOrtWarning)
        torch.compiler.reset()
        loss = torch.compile(square, backend=backend(cache_dir=str(folder_path)))(x)
        torch.testing.assert_close(loss, square(x))
        torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(square(x), x))


@pytest.fixture(scope="module")
def graph_entry(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder_path = tmp_path_factory.mktemp("graphs")
    torch.compiler.reset()
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    torch.compile(square, backend=backend(cache_dir=str(folder_path)))(x)
    (entry,) = folder_path.glob("*.ortgraph")
    return Files({entry.name: entry.read_bytes()})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a small model and its tokenizer."""
    folder_path = write_tokenizer(tmp_path_factory.mktemp("model"))
    sizes: dict[str, Any] = dict(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertModel(BertConfig(**sizes)).save_pretrained(folder_path)
    return Files({path.name: path.read_bytes() for path in folder_path.iterdir()})


@EXAMPLES
@given(changes(), st.sampled_from(["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]))
def test_folders_of_transformers(model_folder: Files, change: Change, name: str) -> None:
    with folder() as folder_path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file, content in model_folder.content.items():
            (folder_path / file).write_bytes(change(content) if file == name else content)
        for load in (lambda: load_model(BertModel, folder_path), lambda: load_tokenizer(folder_path)):
            try:
                load()
            except InputError as error:
                assert str(folder_path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_readers_reject_pipes_and_folders(tmp_path: Path, kind: str) -> None:
    def not_a_file(name: str) -> Path:
        path = tmp_path / name
        path.mkdir() if kind == "folder" else os.mkfifo(path)
        return path

    with pytest.raises(InputError, match=r"text\.txt"):
        text_file(not_a_file("text.txt"))
    with pytest.raises(InputError, match=r"rows\.csv"):
        table(not_a_file("rows.csv"))
    with pytest.raises(InputError, match=r"shard\.hdf5"):
        check_shard(not_a_file("shard.hdf5"))
    with pytest.raises(CheckpointError, match=r"last\.ckpt"):
        AtomicCheckpointIO().load_checkpoint(not_a_file("last.ckpt"))
    with pytest.raises(InputError, match=r"best\.ckpt"):
        load_model(nn.Module, not_a_file("best.ckpt"))
