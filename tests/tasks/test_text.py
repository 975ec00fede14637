"""Corpora, tokens, vocabulary, batches, and the errors of invalid input."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
import torch
from lit_ort_tasks.data import corpora
from lit_ort_tasks.data.corpora import python_docs, wikitext2
from lit_ort_tasks.data.text import StreamBatches, WikiText2, batchify, build_vocabulary, count_tokens, encode, tokenize
from lit_ort_tasks.errors import InputError

WORDS = "the quick brown fox jumps over the lazy dog and the cat sees it . "


def write_wikitext(folder: Path, repeats: int = 12, form: str = "{}.txt") -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("train", "valid", "test"):
        (folder / form.format(name)).write_text(WORDS * repeats, encoding="utf-8")
    return folder


def small_data(folder: Path) -> WikiText2:
    return WikiText2(dir=folder, batch_size=4, eval_batch_size=2, bptt=5)


def test_tokenize_is_basic_english() -> None:
    assert tokenize("You can't stop,\n now: (really)!") == "you can ' t stop , now ( really ) !".split()


def test_vocabulary_is_ordered_by_frequency_then_alphabet() -> None:
    assert build_vocabulary("b b a c c <unk> <unk> <unk>".split()) == ["<unk>", "b", "c", "a"]
    assert build_vocabulary("b b a c c".split(), min_frequency=2) == ["<unk>", "b", "c"]


def test_words_outside_the_vocabulary_are_unknown() -> None:
    ids = encode("a zebra b".split(), ["<unk>", "a", "b"])
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 0, 2]


def test_batchify_splits_one_stream_into_columns() -> None:
    columns = batchify(torch.arange(11), batch_size=2)
    assert columns.tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]


def test_batches_cover_the_stream_and_the_last_is_shorter() -> None:
    columns = batchify(torch.arange(24), batch_size=2)
    batches = [StreamBatches(columns, bptt=5)[index] for index in range(len(StreamBatches(columns, bptt=5)))]
    assert [inputs.shape[0] for inputs, _ in batches] == [5, 5, 1]
    inputs = torch.cat([inputs for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    assert torch.equal(inputs, columns[:-1])
    assert torch.equal(targets, columns[1:])
    assert sum(count_tokens(batch) for batch in batches) == 22


@pytest.mark.parametrize("index", [3, -1])
def test_batches_end(index: int) -> None:
    with pytest.raises(IndexError, match=f"batch {index} of 3"):
        StreamBatches(batchify(torch.arange(24), batch_size=2), bptt=5)[index]


@pytest.mark.parametrize("form", ["{}.txt", "wiki.{}.tokens"])
def test_wikitext2_reads_either_file_name(tmp_path: Path, form: str) -> None:
    data = small_data(write_wikitext(tmp_path, form=form))
    assert data.task_arguments == {"vocabulary_size": 14, "max_length": 5}
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (5, 4)
    assert torch.equal(inputs[1:], targets[:-1])
    assert next(iter(data.val_dataloader()))[0].shape == next(iter(data.test_dataloader()))[0].shape == (5, 2)


def test_python_docs_reads_docstrings_in_a_fixed_order(tmp_path: Path) -> None:
    for number in range(20):
        source = f'"""module{number:02}"""\n\nclass A:\n    """inner"""\n    def f(self):\n        """deep"""\n'
        (tmp_path / f"m{number:02}.py").write_text(source)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text('"""left out"""')
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "nested.py").write_text("x = " + "(" * 5000 + ")" * 5000)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nothing")
    corpus = python_docs(tmp_path)
    assert corpus.valid.text.split() == ["module09", "inner", "deep"]
    assert corpus.test.text.split() == ["module19", "inner", "deep"]
    expected = [f"module{n:02}" for n in range(20) if n not in (9, 19)]
    assert [word for word in corpus.train.text.split() if word.startswith("module")] == expected
    assert "left out" not in corpus.train.text


def test_python_docs_finds_docstrings_below_conditions() -> None:
    """The standard library has many definitions below `if` and `try`."""
    source = 'try:\n    def f():\n        "one"\nexcept E:\n    def g():\n        "two"\nelse:\n    class H: "three"\n'
    assert list(corpora.docstrings(source.encode())) == ["one", "two", "three"]


@pytest.mark.slow
def test_the_documentation_of_the_running_python_is_large_enough() -> None:
    corpus = python_docs()
    sizes = [len(tokenize(split.text)) for split in (corpus.train, corpus.valid, corpus.test)]
    assert sizes[0] > 300_000
    assert min(sizes[1:]) > 10_000


def test_python_docs_refuses_too_few_documents(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""only"""')
    with pytest.raises(InputError, match=r"1 Python files with docstrings.*at least 20.*data=wikitext2"):
        python_docs(tmp_path)


@pytest.mark.parametrize("read", [python_docs, wikitext2])
def test_a_missing_folder_is_refused(tmp_path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(InputError, match=r"absent: no such folder.*data\.dir"):
        read(tmp_path / "absent")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    (write_wikitext(tmp_path) / "valid.txt").unlink()
    message = r"wiki\.valid\.tokens: no such file, and no valid\.txt.*contains test\.txt, train\.txt"
    with pytest.raises(InputError, match=message):
        wikitext2(tmp_path)


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (write_wikitext(tmp_path) / "test.txt").write_text(" \n")
    with pytest.raises(InputError, match=r"test\.txt: no text in 2 bytes"):
        wikitext2(tmp_path)


def test_a_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (write_wikitext(tmp_path) / "train.txt").write_bytes(b"abc \xff def")
    with pytest.raises(InputError, match=r"train\.txt: byte 4 is 0xff, which is not UTF-8"):
        wikitext2(tmp_path)


def test_a_split_shorter_than_one_batch_is_refused_with_the_numbers(tmp_path: Path) -> None:
    (write_wikitext(tmp_path) / "valid.txt").write_text("one two three")
    message = r"valid\.txt: 3 tokens.*needs 12 \(data\.eval_batch_size=2 x \(data\.bptt=5 \+ 1\)\)"
    with pytest.raises(InputError, match=message):
        small_data(tmp_path).setup("fit")


def test_a_split_of_exactly_one_batch_is_valid(tmp_path: Path) -> None:
    (write_wikitext(tmp_path) / "valid.txt").write_text("one " * 12)
    assert len(small_data(tmp_path).val_dataloader()) == 1


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size", "bptt", "min_frequency"])
@pytest.mark.parametrize("value", [0, "many"])
def test_invalid_numbers_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"data.{name}={value!r}: must be a whole number"):
        WikiText2(dir=None, **{name: value})  # pyright: ignore[reportArgumentType]


def test_without_a_folder_and_a_network_the_error_names_both_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*names: str) -> None:
        raise OSError(f"offline={datasets.config.HF_HUB_OFFLINE}")

    def unreachable(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(InputError, match=r"offline=True.*Set data\.dir.*pip install datasets"):
        wikitext2()
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    data = small_data(write_wikitext(tmp_path))
    data.load_state_dict(data.state_dict())
    with pytest.raises(InputError, match="vocabulary of 2 words, and the data has another one, of 14"):
        data.load_state_dict({"vocabulary": ["<unk>", "other"]})
