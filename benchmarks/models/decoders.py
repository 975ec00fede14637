"""Decoders: causal language models."""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers

from benchmarks.models.case import Model, ModuleAndBatch
from benchmarks.models.texts import Sizes, sizes_of


def causal(kind: str, config: str | None = None, **settings: Any) -> Model:
    """A model with a language modeling head."""

    def make(size: str) -> ModuleAndBatch:
        return language_model(kind, config or f"{kind}Config", sizes_of(size), {**sizes_of(size).common, **settings})

    return Model(make)


def language_model(kind: str, config: str, sizes: Sizes, settings: dict[str, Any]) -> ModuleAndBatch:
    ids = sizes.ids()
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(getattr(transformers, config)(**settings, use_cache=False))
    return model, {"input_ids": ids, "labels": ids.clone()}


def gpt2(size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    settings = dict(vocab_size=s.words, n_embd=s.width, n_layer=s.layers, n_head=s.heads, n_positions=4 * s.length)
    return language_model("GPT2", "GPT2Config", s, settings)


def opt(size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    common = {name: value for name, value in s.common.items() if name != "intermediate_size"}
    return language_model("OPT", "OPTConfig", s, {**common, "ffn_dim": 4 * s.width, "word_embed_proj_dim": s.width})


def mamba(size: str) -> ModuleAndBatch:
    # Without Mamba's own kernels, transformers scans token by token, so the length is short.
    s = dataclasses.replace(sizes_of(size), length=32)
    settings = dict(vocab_size=s.words, hidden_size=s.width, num_hidden_layers=s.layers, state_size=16)
    return language_model("Mamba", "MambaConfig", s, settings)


def experts(size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    settings = dict(intermediate_size=2 * s.width, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2)
    return language_model("Mixtral", "MixtralConfig", s, {**s.common, **settings})


MODELS: dict[str, Model] = {
    "GPT-2": Model(gpt2),
    "OPT": Model(opt),
    "GPT-NeoX": causal("GPTNeoX"),
    "Llama": causal("Llama"),
    "Qwen3": causal("Qwen3", num_key_value_heads=2, head_dim=64),
    "Gemma 3": causal("Gemma3", "Gemma3TextConfig", num_key_value_heads=2, head_dim=64, sliding_window=64),
    "Mixtral": Model(experts),
    "Mamba": Model(mamba),
}
