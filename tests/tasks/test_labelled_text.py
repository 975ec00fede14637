"""Labelled corpora, their encoding, the order of the batches, and the errors of invalid input."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import config
from lightning.pytorch import LightningModule, Trainer
from lit_ort_tasks import huggingface
from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.labelled_corpora import DOCSTRING_CLASSES, LabelledCorpus, LabelledSplit, glue
from lit_ort_tasks.data.labelled_text import Docstrings, Glue, LabelledText, Table
from lit_ort_tasks.data.tables import TableColumns, table
from lit_ort_tasks.errors import InputError
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lit_ort.callbacks import first_dimension

SPLITS = ("train", "valid", "test")


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_rows(path: Path, count: int = 40) -> Path:
    """Writes a .csv of different texts, with the labels a, b and c alternating."""
    return write(path, "text,label", *(f"number {row} of the rows,{'abc'[row % 3]}" for row in range(count)))


def small_table(path: Path, **options: Any) -> Table:
    return Table(**{"train_file": path, "max_length": 12, "batch_size": 4, "eval_batch_size": 3, **options})


# --- Docstrings -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docstrings() -> Docstrings:
    return Docstrings()


def test_docstrings_are_balanced(docstrings: Docstrings) -> None:
    corpus = docstrings.corpus
    assert corpus.labels == tuple(sorted(DOCSTRING_CLASSES))
    for name, each in {"train": 160, "valid": 20, "test": 20}.items():
        split: LabelledSplit = getattr(corpus, name)
        assert Counter(split.labels) == dict.fromkeys(range(11), each)
        assert len(split.texts) == 11 * each
        assert split.pairs is None


def test_docstrings_are_in_one_split_once_and_long_enough(docstrings: Docstrings) -> None:
    corpus = docstrings.corpus
    texts = [" ".join(text.lower().split()) for name in SPLITS for text in getattr(corpus, name).texts]
    assert len(set(texts)) == len(texts) == 2200
    assert min(map(len, texts)) >= 20


def write_library(root: Path, each: int) -> Path:
    """Writes a standard library in which each class has this number of docstrings."""
    for name, parts in DOCSTRING_CLASSES.items():
        (root / parts[-1]).mkdir(parents=True)
        functions = [
            f'def f{row}():\n    """What the function {row} of {name} returns."""\n' for row in reversed(range(each))
        ]
        (root / parts[-1] / "__init__.py").write_text("\n".join(functions))
    return root


def test_docstrings_that_are_short_or_repeated_are_left_out(tmp_path: Path) -> None:
    root = write_library(tmp_path, 12)
    both = '"""A docstring of two classes."""'
    mail = (
        f'{both}\nclass A:\n    "short"\n    def f(self):\n        """what the Function 3 of mail\n        returns."""'
    )
    (root / "mailbox.py").write_text(mail)
    (root / "fractions.py").write_text(both)
    (root / "smtplib" / "tests").mkdir()
    (root / "smtplib" / "tests" / "a.py").write_text('"""This is the docstring of a test."""')
    corpus = Docstrings(dir=root).corpus
    by_class = Counter(label for name in SPLITS for label in getattr(corpus, name).labels)
    assert by_class == dict.fromkeys(range(11), 12)
    mail_label = corpus.labels.index("mail")
    mails = [
        text
        for name in SPLITS
        for text, label in zip(getattr(corpus, name).texts, getattr(corpus, name).labels, strict=True)
        if label == mail_label
    ]
    # "Function 3" in mailbox.py precedes the same text, and inspect.cleandoc removes its indentation.
    expected = {f"What the function {row} of mail returns." for row in range(12) if row != 3}
    assert set(mails) == expected | {"what the Function 3 of mail\nreturns."}


def test_each_class_has_as_many_docstrings_as_the_smallest_evenly_spaced(tmp_path: Path) -> None:
    root = write_library(tmp_path, 20)
    (root / "logging" / "__init__.py").write_text(
        "\n".join(f'def f{k}(): "This is the line number {k:02}."' for k in range(10))
    )
    corpus = Docstrings(dir=root).corpus
    assert len(corpus.train.texts) == 88
    markup = [text for text in corpus.train.texts if "markup" in text]
    assert markup == [f"What the function {row} of markup returns." for row in (19, 17, 15, 13, 9, 7, 5, 3)]
    assert [corpus.labels[label] for label in corpus.valid.labels] == list(corpus.labels)
    assert corpus.valid.texts[corpus.labels.index("logging")] == "This is the line number 04."


def test_a_class_with_too_few_docstrings_is_refused(tmp_path: Path) -> None:
    root = write_library(tmp_path, 9)
    with pytest.raises(InputError, match=r"9 docstrings of the class archives \(bz2.*at least 10.*data=table"):
        _ = Docstrings(dir=root).corpus


def test_a_missing_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent: no such folder.*data\.dir"):
        _ = Docstrings(dir=tmp_path / "absent").corpus


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_every_tenth_row_is_held_out(tmp_path: Path) -> None:
    corpus = table(write_rows(tmp_path / "rows.csv"))
    assert corpus.labels == ("a", "b", "c")
    numbers = {name: [int(text.split()[1]) for text in getattr(corpus, name).texts] for name in SPLITS}
    assert numbers["valid"] == [8, 18, 28, 38]
    assert numbers["test"] == [9, 19, 29, 39]
    assert numbers["train"] == [row for row in range(40) if row % 10 < 8]
    for name in SPLITS:
        assert getattr(corpus, name).labels == tuple(row % 3 for row in numbers[name])


@pytest.mark.parametrize("option", ["valid_file", "test_file"])
def test_rows_are_held_out_for_a_file_that_is_none(tmp_path: Path, option: str) -> None:
    file = write(tmp_path / "file.csv", "label,text", "c,a row")
    files: dict[str, Any] = {option: file}
    corpus = table(write_rows(tmp_path / "rows.csv"), **files)
    split, other = (corpus.valid, corpus.test) if option == "valid_file" else (corpus.test, corpus.valid)
    assert split == LabelledSplit(str(file), ("a row",), None, (2,))
    assert len(other.texts) == 4
    assert not set(other.texts) & set(corpus.train.texts)
    assert len(corpus.train.texts) == 36


def test_with_all_three_files_all_rows_are_for_training(tmp_path: Path) -> None:
    rows, other = write_rows(tmp_path / "rows.csv", 9), write_rows(tmp_path / "other.csv", 1)
    corpus = table(rows, other, other)
    assert [len(getattr(corpus, name).texts) for name in SPLITS] == [9, 1, 1]


QUOTED = 'He said ""so"", and left'


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("t.csv", ["a,question,kind", f'1,"{QUOTED}",yes', "", '2,"two\nlines",no']),
        ("T.CSV", ["\ufeffquestion,kind", f'"{QUOTED}",yes', '"two\nlines",no']),
        (
            "t.jsonl",
            [
                json.dumps({"question": QUOTED.replace('""', '"'), "kind": "yes"}),
                "",
                json.dumps({"kind": "no", "question": "two\nlines"}),
            ],
        ),
    ],
)
def test_all_formats_have_the_same_rows(tmp_path: Path, name: str, lines: list[str]) -> None:
    path = write(tmp_path / name, *lines)
    corpus = table(path, path, path, TableColumns(text="question", label="kind"))
    assert corpus.labels == ("no", "yes")
    assert corpus.train == LabelledSplit(str(path), ('He said "so", and left', "two\nlines"), None, (1, 0))


def test_a_quotation_mark_in_a_tsv_is_a_character(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tsv", "one\ttwo\tlabel", '"open\tb, b\t0', "c\td\t1")
    corpus = table(path, path, path, TableColumns("one", "two"))
    assert corpus.train == LabelledSplit(str(path), ('"open', "c"), ("b, b", "d"), (0, 1))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([10, 9, -1], ("-1", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["no", "Yes", "maybe"], ("Yes", "maybe", "no")),
    ],
)
def test_labels_are_sorted_whole_numbers_by_value(tmp_path: Path, labels: list[Any], expected: tuple[str]) -> None:
    path = write(tmp_path / "t.jsonl", *(json.dumps({"text": "t", "label": label}) for label in labels))
    corpus = table(path, path, path)
    assert corpus.labels == expected
    assert [corpus.labels[label] for label in corpus.train.labels] == [str(label) for label in labels]


HEAD = "text,label"
FINE = '{"text": "t", "label": "b"}'


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("t.csv", [""], r"t\.csv: no text in 1 bytes"),
        ("t.csv", [HEAD], r"t\.csv: no row below the names of the columns"),
        ("t.txt", [HEAD, "t,a"], r"t\.txt: unknown extension '\.txt'.*\.csv, \.tsv or \.jsonl"),
        ("t.csv", ["txt,label", "t,a"], r"line 2: no column 'text' \(data\.text_column\); there are 'txt', 'label'"),
        ("t.csv", ["text,class", "t,a"], r"no column 'label' \(data\.label_column\); there are 'text', 'class'"),
        ("t.csv", [HEAD, "t,a", "t"], r"t\.csv, line 3: 1 fields, and the first row names 2 columns"),
        ("t.csv", [HEAD, '"t\nt",a', "t,t,b"], r"t\.csv, line 4: 3 fields.*quote a field with a comma"),
        ("t.csv", [HEAD, "t,a", '"t"t,b'], r"t\.csv, line 3: cannot be read: .*quotation marks"),
        ("t.csv", [HEAD, "t,a", '"t,b'], r"t\.csv, line 3: cannot be read: unexpected end of data"),
        ("t.csv", [HEAD, "t,a", " ,b"], r"t\.csv, line 3: 'text' is ' ', and a text must be"),
        ("t.csv", [HEAD, "t,a", "t, "], r"t\.csv, line 3: 'label' is ' ', and a label must be"),
        ("t.csv", [HEAD, "t,a", "u,a"], r"t\.csv: 1 label \(a\), and a classifier needs at least 2"),
        ("t.csv", [HEAD, *["t,a", "u,b"] * 4], r"t\.csv: 8 rows, and every 10th is held out.*at least 10"),
        ("t.jsonl", [FINE, '{"text": "t"'], r"""t\.jsonl, line 2: '{"text": "t"' is not JSON: Expecting"""),
        ("t.jsonl", [FINE, "", "[1]"], r"t\.jsonl, line 3: '\[1\]' is not a JSON object"),
        ("t.jsonl", [FINE, '{"text": "t"}'], r"t\.jsonl, line 2: no column 'label'.*there are 'text'"),
        ("t.jsonl", [FINE, '{"text": 3, "label": 1}'], r"line 2: 'text' is 3, and a text must be a string"),
        ("t.jsonl", [FINE, r'{"text": "a \ud83d", "label": 1}'], r"line 2: 'text' is .*half a surrogate pair"),
        ("t.jsonl", [FINE, '{"text": "t", "label": 0.5}'], r"line 2: 'label' is 0\.5, and a label must be"),
        ("t.jsonl", [FINE, '{"text": "t", "label": true}'], r"line 2: 'label' is True, and a label must be"),
    ],
)
def test_an_invalid_table_is_refused_with_its_line(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        table(write(tmp_path / name, *lines))


def test_an_empty_second_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "text,other,label", "t,o,a", "t,,b")
    with pytest.raises(InputError, match=r"t\.csv, line 3: 'other' is ''"):
        table(path, columns=TableColumns(pair="other"))
    with pytest.raises(InputError, match=r"no column 'others' \(data\.pair_column\)"):
        table(path, columns=TableColumns(pair="others"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.train_file=null: no file to train on"):
        _ = Table(train_file=None).corpus
    with pytest.raises(InputError, match=r"absent\.csv: no such file"):
        table(tmp_path / "absent.csv")
    (tmp_path / "latin.csv").write_bytes("text,label\nä,a\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.csv: byte 11 is 0xe4, which is not UTF-8"):
        table(tmp_path / "latin.csv")


@pytest.mark.parametrize("which", ["valid_file", "test_file"])
def test_a_label_that_training_lacks_is_refused(tmp_path: Path, which: str) -> None:
    other = write(tmp_path / "other.csv", HEAD, "t,a", "t,d")
    files: dict[str, Any] = {which: other}
    with pytest.raises(InputError, match=r"other\.csv, line 3: label 'd' out of range: data\.train_file has a, b, c\."):
        table(write_rows(tmp_path / "rows.csv"), **files)


# --- GLUE -------------------------------------------------------------------------------------------------------------


def hub_copy(columns: tuple[str, ...], **sizes: int) -> datasets.DatasetDict:
    """A dataset of the `datasets` library, with the labels 0 and 1 alternating."""
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(
                {
                    **{column: [f"{name} {column} {row}" for row in range(size)] for column in columns},
                    "label": [row % 2 for row in range(size)],
                }
            )
            for name, size in sizes.items()
        }
    )


def serve(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, ...]]:
    """Replaces the hub by one that returns this answer. Returns the list of the requests."""
    requests: list[tuple[str, ...]] = []

    def load_dataset(*names: str) -> Any:
        requests.append(names)
        return answer

    monkeypatch.setattr(huggingface, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return requests


def test_glue_holds_every_twentieth_row_out_and_tests_on_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = serve(monkeypatch, hub_copy(("sentence",), train=60, validation=3, test=2))
    corpus = Glue(name="sst2").corpus
    assert requests == [("nyu-mll/glue", "sst2")]
    assert corpus.labels == ("negative", "positive")
    assert corpus.valid.texts == tuple(f"train sentence {row}" for row in (19, 39, 59))
    assert corpus.valid.labels == (1, 1, 1)
    assert corpus.train.texts == tuple(f"train sentence {row}" for row in range(60) if row % 20 != 19)
    assert corpus.test.texts == tuple(f"validation sentence {row}" for row in range(3))
    assert corpus.test.labels == (0, 1, 0)
    assert corpus.train.pairs is None


def test_mnli_validates_on_the_matched_and_tests_on_the_mismatched_split(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(train=40, validation_matched=2, validation_mismatched=3, test_matched=1)
    serve(monkeypatch, hub_copy(("premise", "hypothesis"), **sizes))
    corpus = Glue().corpus
    assert corpus.labels == ("entailment", "neutral", "contradiction")
    assert len(corpus.train.texts) == 40
    assert corpus.valid.texts == ("validation_matched premise 0", "validation_matched premise 1")
    assert corpus.test.pairs == tuple(f"validation_mismatched hypothesis {row}" for row in range(3))


def test_a_label_that_the_task_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"sentence": ["a", "b"], "label": [1, -1]}
    serve(monkeypatch, {"train": train, "validation": train})
    with pytest.raises(InputError, match=r"glue/cola \(train\): label -1 out of range: cola has 2 labels"):
        glue("cola")


@pytest.mark.parametrize(("name", "message"), [("stsb", "degrees of similarity"), ("ax", "no task of GLUE")])
def test_other_names_than_those_of_classification_tasks_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"data\.name='{name}': .*{message}.*cola, mnli"):
        Glue(name=name)


def test_without_a_hub_the_error_names_both_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(huggingface, "hub_answers", lambda: False)
    before = config.HF_HUB_OFFLINE
    message = (
        r"data\.name=rte: it cannot be fetched: .*OfflineModeIsEnabled.*data\.train_file=PATH.*pip install datasets"
    )
    with pytest.raises(InputError, match=message):
        glue("rte")
    assert before == config.HF_HUB_OFFLINE


def test_without_the_library_the_error_names_both_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "hub_answers", lambda: False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"`datasets` library is not installed.*data\.train_file=PATH.*pip install datasets"
    with pytest.raises(InputError, match=message):
        glue("rte")


# --- Batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_has_one_shape_and_int64(tmp_path: Path) -> None:
    data = small_table(write_rows(tmp_path / "rows.csv"))
    batches = [*data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader()]
    assert [first_dimension(batch) for batch in batches] == [4] * 8 + [3, 1] * 2
    for batch in batches:
        assert list(batch) == ["input_ids", "token_type_ids", "attention_mask", "labels"]
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
        rows = first_dimension(batch)
        assert [tuple(tensor.shape) for tensor in batch.values()] == [(rows, 12)] * 3 + [(rows,)]


def test_a_text_has_special_tokens_around_it_and_padding(tmp_path: Path) -> None:
    data = small_table(write_rows(tmp_path / "rows.csv"))
    item = data.encoded["train"][1]
    tokens = data.tokenizer.convert_ids_to_tokens(item["input_ids"].tolist())
    assert tokens == ["[CLS]", "number", "1", "of", "the", "rows", "[SEP]", *["[PAD]"] * 5]
    assert item["attention_mask"].tolist() == [1] * 7 + [0] * 5
    assert item["token_type_ids"].tolist() == [0] * 12
    assert item["labels"].item() == 1


def write_pairs(path: Path) -> Path:
    rows = [f"one two three four five six seven eight,nine ten,{'ab'[row % 2]}" for row in range(10)]
    return write(path, "text,other,label", *rows)


def test_the_longer_text_of_a_pair_is_truncated(tmp_path: Path) -> None:
    data = small_table(write_pairs(tmp_path / "rows.csv"), pair_column="other", max_length=9)
    item = data.encoded["valid"][0]
    tokens = data.tokenizer.convert_ids_to_tokens(item["input_ids"].tolist())
    assert tokens == ["[CLS]", "one", "two", "three", "four", "[SEP]", "nine", "ten", "[SEP]"]
    assert item["token_type_ids"].tolist() == [0] * 6 + [1] * 3


def test_a_field_of_a_csv_can_have_any_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"text,label\n{'a' * 200_000},0\nb,1\n")
    assert len(table(path, path, path).train.texts[0]) == 200_000


def test_several_batches_of_texts_are_encoded_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.csv")
    data = small_table(path)
    tokenizer = data.tokenizer
    whole = [data.encoded["train"][row]["input_ids"] for row in range(32)]
    monkeypatch.setattr("lit_ort_tasks.data.labelled_text.ENCODED_AT_A_TIME", 5)
    again = small_table(path)
    again.tokenizer = tokenizer
    assert all(torch.equal(again.encoded["train"][row]["input_ids"], whole[row]) for row in range(32))


def save_words(folder: Path, **special: Any) -> Path:
    """Saves a tokenizer of whole words without token_type_ids, like that of a model without segments."""
    words = ["[PAD]", "[UNK]", *"number of the rows".split(), *(str(number) for number in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **special).save_pretrained(folder)
    return folder


def test_token_types_of_a_tokenizer_without_them_are_zeros(tmp_path: Path) -> None:
    folder = save_words(tmp_path / "words", pad_token="[PAD]")
    data = small_table(write_rows(tmp_path / "rows.csv"), tokenizer=folder)
    batch = next(iter(data.val_dataloader()))
    assert batch["input_ids"][0].tolist() == [2, 14, 3, 4, 5, *[0] * 7]
    assert batch["token_type_ids"].count_nonzero() == 0
    assert batch["attention_mask"].sum(1).tolist() == [5, 5, 5]


def test_a_tokenizer_without_padding_or_with_a_short_length_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv")
    folder = save_words(tmp_path / "unpadded")
    with pytest.raises(InputError, match=r"model\.tokenizer=.*unpadded: has no padding token"):
        small_table(path, tokenizer=folder).setup("fit")
    folder = save_words(tmp_path / "short", pad_token="[PAD]", model_max_length=10)
    with pytest.raises(InputError, match=r"data\.max_length=12: the tokenizer .*short is for at most 10 tokens"):
        small_table(path, tokenizer=folder).setup("fit")


def test_the_arguments_of_the_task(tmp_path: Path) -> None:
    data = small_table(write_rows(tmp_path / "rows.csv"), vocabulary_size=50)
    arguments = data.task_arguments
    assert arguments == {"tokenizer": data.tokenizer, "labels": ["a", "b", "c"], "max_length": 12}
    assert len(arguments["tokenizer"]) == 50


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("vocabulary_size", 0, 1),
        ("max_length", 7, 8),
        ("batch_size", 0, 1),
        ("eval_batch_size", "many", 1),
        ("seed", -1, 0),
    ],
)
def test_invalid_numbers_are_refused_by_name(name: str, value: Any, least: int) -> None:
    with pytest.raises(InputError, match=f"data.{name}={value!r}: must be a whole number of at least {least}"):
        Docstrings(**{name: value})


def test_fewer_rows_than_a_batch_are_refused_in_training_alone(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv")
    with pytest.raises(InputError, match=r"rows\.csv.*: 32 rows, and it needs at least 33 \(data\.batch_size=33\)"):
        small_table(path, batch_size=33).setup("fit")
    data = small_table(path, batch_size=32, eval_batch_size=9)
    assert len(data.train_dataloader()) == 1
    assert [first_dimension(batch) for batch in data.test_dataloader()] == [4]


class NoRows(LabelledText):
    def read(self) -> LabelledCorpus:
        rows = LabelledSplit("rows", ("t",) * 20, None, (0, 1) * 10)
        return LabelledCorpus(rows, LabelledSplit("none", (), None, ()), rows, ("a", "b"))


def test_a_split_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match=r"none: 0 rows, and it needs at least 1 \(data\.eval_batch_size=32\)"):
        NoRows().setup("fit")


# --- The order of training, and checkpoints ---------------------------------------------------------------------------


class Recorder(LightningModule):
    """Trains one number, and records the texts of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))
        self.epochs: dict[int, list[list[int]]] = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.epochs.setdefault(self.current_epoch, []).extend(batch["input_ids"].tolist())
        return self.number * batch["labels"].float().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(data: LabelledText, epochs: int, **fit: Any) -> tuple[dict[int, list[list[int]]], Trainer]:
    task = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data, **fit)
    return task.epochs, trainer


@pytest.mark.usefixtures("one_thread")
def test_each_epoch_has_another_order_also_after_a_resume(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv")
    words = save_words(tmp_path / "words", pad_token="[PAD]")
    expected, _ = trained(small_table(path, tokenizer=words), 3)
    assert list(expected) == [0, 1, 2]
    for epoch in range(3):
        assert sorted(expected[epoch]) == sorted(expected[0])  # 32 rows are 8 full batches
        assert expected[epoch] != expected[(epoch + 1) % 3]
    _, stopped = trained(small_table(path, tokenizer=words), 1)
    stopped.save_checkpoint(tmp_path / "one.ckpt")
    torch.manual_seed(99)
    resumed, _ = trained(small_table(path, tokenizer=words), 3, ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert resumed == {epoch: expected[epoch] for epoch in (1, 2)}


def test_the_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    data = small_table(write_rows(tmp_path / "rows.csv"))
    orders: list[list[list[int]]] = []
    for global_seed, seed in ((1, 1), (2, 1), (2, 2)):
        torch.manual_seed(global_seed)
        data.seed = seed
        orders.append([ids for batch in data.train_dataloader() for ids in batch["input_ids"].tolist()])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_a_checkpoint_of_other_labels_or_another_tokenizer_is_refused(tmp_path: Path) -> None:
    data = small_table(write_rows(tmp_path / "rows.csv"))
    state = data.state_dict()
    data.load_state_dict(state)
    with pytest.raises(InputError, match=r"trained on the labels a, d, and the data has a, b, c\."):
        data.load_state_dict({**state, "labels": ["a", "d"]})
    words = save_words(tmp_path / "words", pad_token="[PAD]")
    other = small_table(tmp_path / "rows.csv", tokenizer=words)
    with pytest.raises(InputError, match=r"another tokenizer.*model\.tokenizer set to the huggingface folder"):
        other.load_state_dict(state)


def test_a_saved_tokenizer_is_the_same_one_after_a_call(tmp_path: Path) -> None:
    data = small_table(write_rows(tmp_path / "rows.csv"))
    data.setup("fit")
    data.task_arguments["tokenizer"].save_pretrained(tmp_path / "saved")
    resumed = small_table(tmp_path / "rows.csv", tokenizer=tmp_path / "saved", max_length=20)
    resumed.load_state_dict(data.state_dict())
    resumed.setup("fit")
    assert resumed.state_dict() == data.state_dict()
    assert resumed.encoded["test"][0]["input_ids"].tolist()[:12] == data.encoded["test"][0]["input_ids"].tolist()


def test_the_constructor_reads_nothing(tmp_path: Path) -> None:
    for data in (Table(train_file=tmp_path / "absent.csv"), Docstrings(dir=tmp_path / "absent"), Glue()):
        assert "corpus" not in vars(data)
