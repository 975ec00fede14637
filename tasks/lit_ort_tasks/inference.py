"""The parts of a task that are exported for inference: a module from tensors to logits, a tokenizer, a description."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn

from lit_ort import Exported, export
from lit_ort.files import whole_file
from lit_ort_tasks.commands.program import command_line
from lit_ort_tasks.prediction.facts import MODEL, TOKENIZER, Facts, digest_of

UNKNOWN = "<unk>"
# What torchtext's basic_english does to a text in lower case, in its order.
_BASIC_ENGLISH = (
    *(("'", " ' "), ('"', ""), (".", " . "), ("<br />", " "), (",", " , "), ("(", " ( "), (")", " ) ")),
    *(("!", " ! "), ("?", " ? "), (";", " "), (":", " ")),
)


@dataclasses.dataclass(frozen=True)
class Inference:
    """A task for inference.

    Args:
        module: returns logits.
        batch: the arguments of one call, int64[batch, length] each.
        dynamic: names of the dynamic sizes.
        tokenizer: from texts to ids.
        facts: the description that predictions need.
    """

    module: nn.Module
    batch: Mapping[str, Tensor]
    dynamic: Mapping[str, Mapping[int, str]]
    tokenizer: Tokenizer
    facts: Facts


class Logits(nn.Module):
    """Calls a transformers model by keywords and returns its logits alone.

    Args:
        model: the model.
        name: of the logits in the model's output.
        settings: arguments other than tensors.
    """

    def __init__(self, model: nn.Module, name: str = "logits", **settings: Any) -> None:
        super().__init__()
        self.model, self._name, self._settings = model, name, settings

    def forward(self, **tensors: Tensor) -> Tensor:
        return getattr(self.model(**tensors, **self._settings), self._name)


class BatchFirst(nn.Module):
    """Calls a language model of int64[length, batch] with int64[batch, length]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids.t()).transpose(0, 1)


def changing(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return the names of the dynamic sizes, batch and length, for inputs."""
    return {name: {0: "batch", 1: "length"} for name in names}


def example(vocabulary: int, length: int, *names: str) -> dict[str, Tensor]:
    """Return two rows of ids for each name."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(vocabulary, (2, length), generator=generator) for name in names}


def bert_example(config: Any) -> dict[str, Tensor]:
    """Return BERT's inputs for two texts, the second one shorter; int64[2, length] each."""
    # Below the longest sequence: a slice of all positions would make the length a constant.
    length = max(2, min(16, config.max_position_embeddings // 2))
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length * 5 // 8 :] = 0
    types = example(config.type_vocab_size, length, "token_type_ids")
    return {**example(config.vocab_size, length, "input_ids"), **types, "attention_mask": mask}


def word_tokenizer(vocabulary: Sequence[str]) -> Tokenizer:
    """Return torchtext's basic_english with a vocabulary as a tokenizer of the tokenizers library."""
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    replacements = [normalizers.Replace(old, new) for old, new in _BASIC_ENGLISH]
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *replacements, spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def write_inference(inference: Inference, folder: Path, checkpoint: str, settings: Mapping[str, Any]) -> Exported:
    """Writes a model, its tokenizer and a README.md to a folder.

    Args:
        checkpoint: the source of the weights.
        settings: of `lit_ort.export`.

    Raises:
        ExportError: the model can't be exported.
        OSError: the folder can't be written to.
    """
    facts = dataclasses.replace(inference.facts, vocabulary=digest_of(inference.tokenizer.get_vocab()))
    metadata = {"facts": facts.as_text(), "checkpoint": checkpoint, "tokenizer": TOKENIZER}
    exported = export(
        inference.module,
        folder / MODEL,
        dict(inference.batch),
        dynamic=inference.dynamic,
        output_names=["logits"],
        metadata=metadata,
        **settings,
    )
    with whole_file(folder / TOKENIZER) as file:
        file.write(inference.tokenizer.to_str().encode())
    with whole_file(folder / "README.md") as file:
        file.write(_readme(exported, inference, checkpoint).encode())
    return exported


def _readme(exported: Exported, inference: Inference, checkpoint: str) -> str:
    facts = inference.facts
    inputs = "; ".join(f"{name}: int64[{', '.join(map(str, sizes))}]" for name, sizes in exported.inputs.items())
    texts = 'text="..." pair="..."' if facts.pairs else 'text="..."'
    error = "not compared" if exported.error is None else f"{exported.error:.1e}"
    return f"""# {MODEL}

A {facts.kind}, exported from {checkpoint}; {exported.size_bytes / 2**20:.1f} MiB ({exported.form or "float32"}).

- inputs: {inputs}, at most {facts.max_length} tokens; result: logits
- largest error to PyTorch, of the largest logit: {error}
- {TOKENIZER}: from text to ids, for `tokenizers.Tokenizer.from_file`
- labels: {", ".join(facts.labels) or "none"}

    {command_line("predict")} run=FOLDER {texts}   (FOLDER: the folder of this file)

predict.py of a clone also runs in a separate environment with `pip install onnxruntime tokenizers` alone.
"""
