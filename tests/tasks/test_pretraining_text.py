"""Pre-training batches from text: sentences, pairs, masks, epochs, and the errors of invalid input."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lit_ort_tasks.data import pretraining_text
from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.corpora import Corpus, Split
from lit_ort_tasks.data.pretraining_pairs import (
    A_START,
    B_START,
    LABEL,
    RANDOM_NEXT,
    Sentences,
    draw_pairs,
    split_sentences,
)
from lit_ort_tasks.data.pretraining_text import PretrainingText
from lit_ort_tasks.data.tokenization import BERT_SPECIALS
from lit_ort_tasks.errors import InputError

from tests.pretraining import (
    DOCUMENT_OF,
    DOCUMENTS,
    ENDS,
    KEYS,
    LENGTH,
    MASK,
    PAD,
    SEPARATOR,
    START,
    assert_same,
    check_resuming,
    epoch_of,
    joined,
    sentence_lengths,
    write_text,
    write_tokenizer,
)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The options of data whose splits are all the same text."""
    text = write_text(tmp_path / "text.txt")
    return dict(
        train_file=text,
        valid_file=text,
        test_file=text,
        tokenizer=write_tokenizer(tmp_path / "tokenizer"),
        max_length=LENGTH,
        batch_size=8,
        eval_batch_size=32,
        cache_dir=tmp_path / "cache",
    )


def text_data(options: dict[str, Any], **changes: Any) -> PretrainingText:
    return PretrainingText(**{**options, **changes})


# --- Sentences and pairs ----------------------------------------------------------------------------------------------


def test_sentences_end_with_lines_and_after_punctuation() -> None:
    text = "One is 1.5 wide. Two (\"really?\") ends!\n\n  Three has no end\nFour. 'Five.' Six?\n"
    expected = ["One is 1.5 wide.", 'Two ("really?") ends!', "Three has no end", "Four.", "'Five.'", "Six?"]
    assert split_sentences(text) == expected
    assert split_sentences(" \n\n") == []


def test_a_batch_has_pairs_with_special_tokens_around_them(options: dict[str, Any]) -> None:
    data = text_data(options)
    batches = epoch_of(data, 0)
    assert all(batch["input_ids"].shape == (8, LENGTH) for batch in batches)
    assert all(value.dtype == torch.int64 for batch in batches for value in batch.values())
    whole = joined(batches)
    ids = np.where(whole["labels"] >= 0, whole["labels"], whole["input_ids"])
    for item, types, attention in zip(ids, whole["token_type_ids"], whole["attention_mask"], strict=True):
        first, second = np.flatnonzero(item == SEPARATOR)
        assert item[0] == START
        assert 1 < first < second - 1
        assert (item[second + 1 :] == PAD).all()
        positions = np.arange(LENGTH)
        assert (types == ((positions > first) & (positions <= second))).all()
        assert (attention == (positions <= second)).all()
    assert whole["attention_mask"].mean() > 0.8


def pair_of(item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.flatnonzero(item == SEPARATOR)
    return item[1:first], item[first + 1 : second]


def test_true_pairs_are_adjacent_and_random_ones_from_another_document(options: dict[str, Any]) -> None:
    data = text_data(options)
    whole = joined([batch for epoch in range(6) for batch in epoch_of(data, epoch)])
    ids = np.where(whole["labels"] >= 0, whole["labels"], whole["input_ids"])
    in_two_documents = 0
    for item, label in zip(ids, whole["next_sentence_label"], strict=True):
        a, b = pair_of(item)
        assert (np.diff(a) == 1).all()
        assert (np.diff(b) == 1).all()
        (a_document,) = set(DOCUMENT_OF[a])
        (b_document,) = set(DOCUMENT_OF[b])
        if label == RANDOM_NEXT:
            assert a_document != b_document
            in_two_documents += 1
        else:
            assert b[0] == a[-1] + 1
            assert a_document == b_document
    # Two of the 80 documents have a single sentence, whose pairs are always random.
    forced = int(np.isin(DOCUMENT_OF[ids[:, 1]], (3, 4)).sum())
    free = len(ids) - forced
    assert 0 < forced < free / 10
    assert abs(in_two_documents - forced - free / 2) < 5 * sqrt(free / 4)


def test_pairs_begin_and_end_with_sentences_unless_they_are_too_long(options: dict[str, Any]) -> None:
    ends = np.cumsum([len(BERT_SPECIALS), *(length for lengths in sentence_lengths() for length in lengths)])
    whole = joined(epoch_of(text_data(options), 0))
    ids = np.where(whole["labels"] >= 0, whole["labels"], whole["input_ids"])
    for item in ids:
        a, b = pair_of(item)
        assert a[-1] + 1 in ends
        assert b[0] in ends
        if len(a) + len(b) < LENGTH - 3:
            assert a[0] in ends
            assert b[-1] + 1 in ends


def test_the_unused_rest_of_a_random_pair_is_read_again() -> None:
    """Sentences of one token fill chunks exactly, so that nothing is truncated."""
    text = Sentences(np.arange(200, dtype=np.int32), np.arange(201), np.array([0, 100, 200]))
    pairs = draw_pairs(text, 10, np.random.default_rng(0)).tolist()
    position = 0
    for a_start, a_stop, _, b_stop, label in pairs:
        # A single last sentence forms no pair.
        assert a_start == position or (position, a_start) == (99, 100)
        position = a_stop if label == RANDOM_NEXT else b_stop
    assert position >= 199


def test_the_longer_sentence_is_truncated() -> None:
    """Both sentences are truncated to half where both are long."""
    bounds = np.array([0, 40, 80, 83, 123])
    text = Sentences(np.arange(123, dtype=np.int32), bounds, np.array([0, 2, 4]))
    pairs = draw_pairs(text, 21, np.random.default_rng(0))
    lengths = [(stop_a - start_a, stop_b - start_b) for start_a, stop_a, start_b, stop_b, _ in pairs.tolist()]
    assert lengths
    assert set(lengths) <= {(11, 10), (3, 18), (18, 3)}
    assert all(sum(pair) == 21 for pair in lengths)
    true = pairs[pairs[:, LABEL] != RANDOM_NEXT]
    assert all(pair[B_START] > pair[A_START] for pair in true)


# --- Masks ------------------------------------------------------------------------------------------------------------


def test_masks_over_an_epoch(options: dict[str, Any]) -> None:
    data = text_data(options, max_predictions=3)
    whole = joined([batch for epoch in range(4) for batch in epoch_of(data, epoch)])
    predicted = whole["labels"] >= 0
    assert (whole["labels"][predicted] > MASK).all()
    tokens = whole["attention_mask"].sum(axis=1) - 3
    assert (predicted.sum(axis=1) == np.clip(np.rint(0.15 * tokens), 1, 3)).all()
    masked = (whole["input_ids"] == MASK)[predicted].mean()
    assert abs(masked - 0.8) < 5 * sqrt(0.8 * 0.2 / predicted.sum())
    assert not (whole["input_ids"] == MASK)[~predicted].any()
    without_limit = joined(epoch_of(text_data(options), 0))
    tokens = without_limit["attention_mask"].sum() - 3 * len(without_limit["labels"])
    assert (without_limit["labels"] >= 0).sum() / tokens == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize(("length", "share", "most"), [(64, 0.15, 10), (128, 0.15, 20), (512, 0.15, 77), (64, 0.3, 20)])
def test_the_limit_of_masks_is_their_share(options: dict[str, Any], length: int, share: float, most: int) -> None:
    assert text_data(options, max_length=length, masked_share=share).max_predictions == most


def test_pairs_with_only_unknown_tokens_are_left_out(options: dict[str, Any], tmp_path: Path) -> None:
    text = "\n\n".join([*["alien words\nand more of it"] * 9, "w7 w8\nw9 w10"])
    (tmp_path / "alien.txt").write_text(text)
    data = text_data(options, train_file=tmp_path / "alien.txt", batch_size=1)
    assert ((joined(epoch_of(data, 0))["labels"] >= 0).sum(axis=1) >= 1).all()
    (tmp_path / "alien.txt").write_text(text.replace("w", "v"))
    with pytest.raises(InputError, match=r"alien\.txt: no pair.*data\.tokenizer"):
        text_data(options, valid_file=tmp_path / "alien.txt").setup("fit")


def test_the_masked_positions_of_an_item_differ_between_epochs(options: dict[str, Any]) -> None:
    data = text_data(options, masked_share=0.5)
    first, second = (joined(epoch_of(data, epoch))["labels"] >= 0 for epoch in (0, 1))
    assert (first & second).sum() / first.sum() == pytest.approx(0.45, abs=0.1)
    neighbours = (first[1:] & first[:-1]).sum() / first[1:].sum()
    assert neighbours == pytest.approx(0.45, abs=0.1)


# --- Epochs -----------------------------------------------------------------------------------------------------------


def test_epochs_differ_in_pairs_and_masks_and_have_one_length(options: dict[str, Any]) -> None:
    data = text_data(options)
    epochs = [epoch_of(data, epoch) for epoch in range(3)]
    assert len({len(epoch) for epoch in epochs}) == 1

    def pairs(epoch: list[Batch]) -> set[bytes]:
        whole = joined(epoch)
        return {item.tobytes() for item in np.where(whole["labels"] >= 0, whole["labels"], whole["input_ids"])}

    shared = pairs(epochs[0]) & pairs(epochs[1])
    assert len(shared) < len(pairs(epochs[0])) / 2
    assert not torch.equal(epochs[0][0]["labels"] >= 0, epochs[1][0]["labels"] >= 0)
    assert not torch.equal(epochs[1][0]["labels"] >= 0, epochs[2][0]["labels"] >= 0)


def test_batches_follow_from_the_seed_and_the_epoch_alone(options: dict[str, Any]) -> None:
    data = text_data(options)
    first = epoch_of(data, 2)
    state = torch.get_rng_state()
    torch.manual_seed(99)
    np.random.seed(99)
    again = text_data(options)
    epoch_of(again, 5)
    assert_same(first, epoch_of(again, 2))
    torch.set_rng_state(state)
    list(data.train_dataloader())
    assert torch.equal(state, torch.get_rng_state())
    other = text_data(options, seed=2)
    assert not torch.equal(epoch_of(other, 2)[0]["input_ids"], first[0]["input_ids"])


def test_items_do_not_depend_on_the_size_of_batches(options: dict[str, Any]) -> None:
    small, large = (joined(epoch_of(text_data(options, batch_size=size), 1)) for size in (1, 16))
    count = len(large["labels"])
    assert len(small["labels"]) > count  # the last batch that is not full
    assert len(small["labels"]) - count < 16
    assert all((small[key][:count] == large[key]).all() for key in KEYS)


def test_validation_and_test_are_fixed_and_complete(options: dict[str, Any]) -> None:
    data = text_data(options)
    valid = list(data.val_dataloader())
    assert sum(len(batch["labels"]) for batch in valid) == len(data.splits.valid)
    assert len(data.splits.valid) % 32 != 0
    later: Any = data.val_dataloader()
    later.sampler.set_epoch(3)  # as Lightning does before each epoch
    assert_same(valid, list(later))
    assert_same(valid, list(text_data(options, seed=5).test_dataloader()))


@pytest.mark.parametrize("limits", ENDS)
@pytest.mark.sampled(1)
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_one(
    options: dict[str, Any], tmp_path: Path, limits: dict[str, int]
) -> None:
    third = len(text_data(options).splits.train) // 3
    check_resuming(lambda: text_data(options, batch_size=third), tmp_path, limits)


def test_a_checkpoint_of_another_tokenizer_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    data = text_data(options)
    data.load_state_dict(data.state_dict())
    other = text_data(options, tokenizer=None, vocabulary_size=60)
    with pytest.raises(InputError, match=rf"tokenizer of {len(DOCUMENT_OF)} tokens, and the data has another one"):
        other.load_state_dict(data.state_dict())
    same_size = data.state_dict() | dict(tokenizer="another")
    with pytest.raises(InputError, match="the data has another one"):
        data.load_state_dict(same_size)


# --- Sources of text and tokenizer ------------------------------------------------------------------------------------


def test_the_arguments_of_the_task_have_the_tokenizer_and_its_size(options: dict[str, Any]) -> None:
    arguments = text_data(options).task_arguments
    assert len(arguments.pop("tokenizer")) == len(DOCUMENT_OF)
    assert arguments == {"vocabulary_size": len(DOCUMENT_OF), "max_length": LENGTH}


def test_without_a_tokenizer_a_wordpiece_is_trained_on_the_training_text(options: dict[str, Any]) -> None:
    data = text_data(options, tokenizer=None, vocabulary_size=60)
    tokenizer = data.task_arguments["tokenizer"]
    assert len(tokenizer) == 60 == data.task_arguments["vocabulary_size"]
    assert tokenizer.decode(tokenizer("w5")["input_ids"]) == "[CLS] w5 [SEP]"
    assert joined(epoch_of(data, 0))["input_ids"].max() < 60


def test_without_files_pythons_documentation_is_read(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split("here", tuple(f"w{n} w6\nw7 w8" for n in range(5, 45)))
    monkeypatch.setattr(pretraining_text, "python_docs", lambda: Corpus(split, split, split))
    no_files = dict(train_file=None, valid_file=None, test_file=None)
    assert len(text_data(options, **no_files).splits.train) >= 40


def test_every_twentieth_document_is_held_out(options: dict[str, Any]) -> None:
    def words(split: Split) -> set[int]:
        return {int(DOCUMENT_OF[int(word[1:])]) for document in split.documents for word in document.split()}

    both = text_data(options, valid_file=None, test_file=None).corpus()
    assert (words(both.valid), words(both.test)) == ({9, 29, 49, 69}, {19, 39, 59, 79})
    assert words(both.train) == set(range(DOCUMENTS)) - words(both.valid) - words(both.test)
    one = text_data(options, valid_file=None).corpus()
    assert words(one.train) == set(range(DOCUMENTS)) - words(one.valid)
    assert words(one.test) == set(range(DOCUMENTS))


def test_tokenized_text_is_cached_and_an_incomplete_entry_is_ignored(options: dict[str, Any]) -> None:
    first = epoch_of(text_data(options), 0)
    cache: Path = options["cache_dir"]
    (entry,) = cache.iterdir()  # one text in all three splits
    written = entry.stat().st_mtime_ns
    (cache / f".{entry.name}-stopped").mkdir()
    assert_same(first, epoch_of(text_data(options), 0))
    assert entry.stat().st_mtime_ns == written
    entry.rename(cache / f".{entry.name}-unfinished")
    assert_same(first, epoch_of(text_data(options), 0))
    assert entry.is_dir()
    with options["train_file"].open("a") as file:
        file.write("\nw5 w6 w7")
    text_data(options).setup("fit")
    assert len([path for path in cache.iterdir() if not path.name.startswith(".")]) == 2


# --- Invalid input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size", "vocabulary_size", "max_predictions"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "many"])
def test_invalid_numbers_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"data.{name}={value!r}: must be a whole number of at least 1"):
        PretrainingText(**{name: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("masked_share", 0.0, "above 0 and below 1"),
        ("masked_share", 1.0, "above 0 and below 1"),
        ("masked_share", -0.1, "above 0 and below 1"),
        ("masked_share", "most", "above 0 and below 1"),
        ("max_length", 7, "at least 8"),
        ("max_length", None, "at least 8"),
        ("seed", -1, "at least 0"),
        ("seed", None, "at least 0"),
        ("valid_file", "a.txt", r"has no effect without data\.train_file"),
        ("test_file", "a.txt", r"has no effect without data\.train_file"),
    ],
)
def test_invalid_options_are_refused_by_name(name: str, value: object, rule: str) -> None:
    with pytest.raises(InputError, match=rf"data\.{name}='?{value}'?: .*{rule}"):
        PretrainingText(**{name: value})  # pyright: ignore[reportArgumentType]


def test_the_smallest_length_is_valid(options: dict[str, Any]) -> None:
    data = text_data(options, max_length=8)
    assert joined(epoch_of(data, 0))["input_ids"].shape[1] == 8


@pytest.mark.parametrize("name", ["train_file", "valid_file", "test_file"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b" \n", "no text in 2 bytes"),
        (b"abc \xff", "byte 4 is 0xff, which is not UTF-8"),
        (b"w5 w6\nw7", "1 documents with text.*at least 2"),
        (b"w5 w6\n\n\x01", "1 documents with text.*at least 2"),
    ],
)
def test_invalid_files_are_refused_by_name(
    options: dict[str, Any], tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(InputError, match=rf"bad\.txt: {message}"):
        text_data(options, **{name: tmp_path / "bad.txt"}).setup("fit")


@pytest.mark.parametrize(("held_out", "needed"), [(("valid", "test"), 40), (("valid",), 30), (("test",), 40)])
def test_too_few_documents_to_hold_some_out(
    options: dict[str, Any], tmp_path: Path, held_out: tuple[str, ...], needed: int
) -> None:
    def data(documents: int) -> PretrainingText:
        (tmp_path / "few.txt").write_text("w5 w6\nw7 w8\n\n" * documents)
        no_files = {f"{name}_file": None for name in held_out}
        return text_data(options, train_file=tmp_path / "few.txt", **no_files)

    data(needed).setup("fit")
    message = rf"data\.train_file=.*few\.txt: {needed - 1} documents.*{needed} are needed.*data\.{held_out[-1]}_file"
    with pytest.raises(InputError, match=message):
        data(needed - 1).setup("fit")


def test_fewer_items_than_one_batch_are_refused(options: dict[str, Any]) -> None:
    items = len(text_data(options).splits.train)
    assert len(text_data(options, batch_size=items).train_dataloader()) == 1
    message = rf"data\.batch_size={items + 1}: training has only {items} items"
    with pytest.raises(InputError, match=message):
        text_data(options, batch_size=items + 1).setup("fit")


def test_a_tokenizer_without_berts_special_tokens_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "unmasked", cls_token="[CLS]", sep_token="[SEP]")
    with pytest.raises(InputError, match=r"data\.tokenizer=.*unmasked: has no mask_token"):
        text_data(options, tokenizer=folder).setup("fit")
    with pytest.raises(InputError, match=r"tokenizer=.*absent: no such folder"):
        text_data(options, tokenizer=tmp_path / "absent").setup("fit")
