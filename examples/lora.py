"""Fine-tune a Hugging Face model with LoRA adapters: the base is frozen, and the checkpoint holds only the adapters.

    python examples/lora.py --strategy ort

A small Llama learns Python source byte by byte and is saved with `save_pretrained`. It is then loaded from that folder,
as any pretrained model, and adapted to English text with peft.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lit_ort  # registers strategy="ort"

LENGTH, BATCH, TEST_CHARACTERS = 128, 16, 32_768
STRATEGIES = {"eager": "auto", "ort": "ort"}


def blocks(text: str) -> TensorDataset:
    """Return the bytes of a text as int64[blocks, LENGTH]."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return TensorDataset(data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH))


def python_source() -> TensorDataset:
    files = sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    return blocks("".join(file.read_text(errors="ignore") for file in files))


def english_text() -> tuple[TensorDataset, TensorDataset]:
    """Return the documentation of Python's syntax, for training and for the test."""
    text = "".join(pydoc_data.topics.topics.values())
    return blocks(text[:-TEST_CHARACTERS]), blocks(text[-TEST_CHARACTERS:])


class LanguageModel(LightningModule):
    """Trains the parameters that require a gradient, and saves only those."""

    def __init__(self, model: PreTrainedModel | PeftModel, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        self.strict_loading = False  # a checkpoint has no frozen weights

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}


def trainer_for(strategy: str, checkpoint: ModelCheckpoint, steps: int) -> Trainer:
    return Trainer(
        strategy=STRATEGIES[strategy],
        accelerator="cpu",
        max_steps=steps,
        callbacks=[checkpoint],
        logger=False,
        enable_model_summary=False,
    )


def pretrain(strategy: str, steps: int, folder: Path) -> None:
    """Train a small Llama on Python source and save it as `from_pretrained` expects it."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    data = DataLoader(python_source(), BATCH, shuffle=True)
    trainer_for(strategy, ModelCheckpoint(folder), steps).fit(LanguageModel(model, lr=2e-3), data)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ort")
    parser.add_argument("--pretraining-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    seed_everything(0)
    train, test = english_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pretrain(args.strategy, args.pretraining_steps, folder / "base")

        adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), adapters).train()
        frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
        module = LanguageModel(model, lr=2e-3)
        checkpoint = ModelCheckpoint(folder / "adapters")
        trainer = trainer_for(args.strategy, checkpoint, args.steps)
        before = trainer.test(module, DataLoader(test, BATCH), verbose=False)[0]["test_loss"]
        trainer.fit(module, DataLoader(train, BATCH, shuffle=True))
        after = trainer.test(module, DataLoader(test, BATCH), verbose=False)[0]["test_loss"]
        weights = torch.load(checkpoint.best_model_path)["state_dict"]

    trained, total = model.get_nb_trainable_parameters()
    print(f"test loss {before:.2f} of the base, {after:.2f} with the adapters")
    print(f"trained parameters: {trained:,} of {total:,}")
    changed = [name for name, p in model.named_parameters() if name in frozen and not torch.equal(p, frozen[name])]
    print(f"frozen parameters that changed: {len(changed)}")
    others = [name for name in weights if "lora_" not in name]
    print(f"tensors in the checkpoint: {len(weights)}, of which not adapters: {len(others)}")
    if args.strategy == "ort":
        print(lit_ort.explain(trainer))


if __name__ == "__main__":
    main()
