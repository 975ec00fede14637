"""Modules whose training step is exported, with batches of two sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from tests import hf_models
from tests.zoo.plain_models import Adapter
from tests.zoo.text_models import LLAMA, WIDTH, with_dropout

WORDS, LABELS = 60, 3
Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class TrainingCase:
    """A module.

    Args:
        make: makes the module.
        batch: makes a batch of a size, with the number of the step.
        dynamic: the dimensions that change.
        settings: further arguments of `export_training`.
        left_out: parts of the names of parameters whose gradients are rounding alone, such as biases before a
            normalization.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    dynamic: Mapping[str, Mapping[int, str]]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()


class Images(LightningModule):
    """Classifies images of one channel, and logs as Lightning's users do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"accuracy": (logits.argmax(-1) == batch["y"]).float().mean()})
        return loss


def mlp() -> nn.Module:
    return Images(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, LABELS)))


def convolutions() -> nn.Module:
    body = [nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(6, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(3, 2, 1)]
    return Images(nn.Sequential(*body, *more, nn.Flatten(), nn.Linear(8, LABELS)))


def images(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(LABELS, (size,), generator=generator)
    return {"x": torch.randn(size, 1, 8, 8, generator=generator) + y.reshape(-1, 1, 1, 1), "y": y}


def text(size: int, step: int) -> Batch:
    """Texts whose length follows from the size of the batch."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS, (size, 5 + size), generator=generator)
    mask = torch.arange(5 + size) < torch.randint(4, 6 + size, (size, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": mask.long()}


def labeled_text(size: int, step: int) -> Batch:
    batch = text(size, step)
    return {**batch, "labels": batch["input_ids"][:, 0] % LABELS}


def continued_text(size: int, step: int) -> Batch:
    batch = text(size, step)
    return {**batch, "labels": batch["input_ids"]}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    config = BertConfig(vocab_size=WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    config.num_labels = LABELS
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False)
    config = GPT2Config(vocab_size=WORDS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    return GPT2LMHeadModel(config)


def llama_with_adapters() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **LLAMA))
    for layer in model.get_submodule("model.layers").children():
        attention: Any = layer.get_submodule("self_attn")
        attention.q_proj, attention.v_proj = Adapter(attention.q_proj, 0.0), Adapter(attention.v_proj, 0.0)
    return model.requires_grad_(True)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = dict(image_size=8, patch_size=4, num_channels=1, num_labels=LABELS)
    return ViTForImageClassification(with_dropout(ViTConfig(**WIDTH, **sizes), 0.0))


def labeled_pixels(size: int, step: int) -> Batch:
    batch = images(size, step)
    return {"pixel_values": batch["x"], "labels": batch["y"]}


class Recurrent(LightningModule):
    """Classifies texts by the last state of an LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(WORDS, 12), nn.LSTM(12, 16, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, LABELS)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, (state, _) = self.cells(self.words(batch["input_ids"]))
        return F.cross_entropy(self.head(state[-1]), batch["labels"])


def texts_of_any_length(size: int, step: int) -> Batch:
    ids = torch.randint(3, WORDS, (size, 2 + step % 4), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids[:, 0] % LABELS}


class Autoencoder(LightningModule):
    """A variational autoencoder that draws its codes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(batch["x"]).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -(1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean() / 2
        reconstruction = F.mse_loss(self.decoder(code), batch["x"].flatten(1), reduction="sum") / mean.shape[0]
        return {"loss": reconstruction + divergence, "divergence": divergence}


def task(name: str) -> TrainingCase:
    """A task of the project."""

    def batch_of(size: int, step: int) -> Batch:
        torch.manual_seed(step)
        return hf_models.CASES[name][1](hf_models.CASES[name][0](), size)

    names = {k: {0: "batch", **({1: "length"} if v.dim() > 1 else {})} for k, v in batch_of(2, 0).items()}
    return TrainingCase(hf_models.CASES[name][0], batch_of, names, left_out=("key.bias", "c_attn.bias"))


OF_IMAGES = {"x": {0: "batch"}, "y": {0: "batch"}}
OF_TEXT = {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "length"}}
OF_LABELS = {**OF_TEXT, "labels": {0: "batch"}}
OF_WORDS = {**OF_TEXT, "labels": {0: "batch", 1: "length"}}
CASES = {
    "MLP": TrainingCase(mlp, images, OF_IMAGES),
    "convolutions": TrainingCase(convolutions, images, OF_IMAGES),
    "BERT": TrainingCase(bert, labeled_text, OF_LABELS, left_out=("key.bias",)),
    "GPT-2": TrainingCase(gpt2, continued_text, OF_WORDS, left_out=("c_attn.bias",)),
    "LoRA on Llama": TrainingCase(
        llama_with_adapters, continued_text, OF_WORDS, {"trainable": ("*.down.weight", "*.up.weight")}
    ),
    "ViT": TrainingCase(
        vit,
        labeled_pixels,
        {"pixel_values": {0: "batch"}, "labels": {0: "batch"}},
        left_out=("key.bias", "k_proj.bias"),
    ),
    "LSTM": TrainingCase(
        Recurrent, texts_of_any_length, {"input_ids": {0: "batch", 1: "length"}, "labels": {0: "batch"}}
    ),
    "VAE": TrainingCase(Autoencoder, lambda size, step: {"x": images(size, step)["x"]}, {"x": {0: "batch"}}),
    **{f"the task {name}": task(name) for name in hf_models.CASES},
}
