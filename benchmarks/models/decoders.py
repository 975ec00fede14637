"""Decoders that predict the next word."""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers

from benchmarks.models.case import Made, Model
from benchmarks.models.texts import Figures, figures


def causal(kind: str, config: str | None = None, **own: Any) -> Model:
    """A model with a head for the next word."""

    def make(size: str) -> Made:
        return predicting(kind, config or f"{kind}Config", figures(size), {**figures(size).common, **own})

    return Model(make)


def predicting(kind: str, config: str, of_size: Figures, settings: dict[str, Any]) -> Made:
    ids = of_size.ids()
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(getattr(transformers, config)(**settings, use_cache=False))
    return model, {"input_ids": ids, "labels": ids.clone()}


def gpt2(size: str) -> Made:
    f = figures(size)
    settings = dict(vocab_size=f.words, n_embd=f.width, n_layer=f.layers, n_head=f.heads, n_positions=4 * f.length)
    return predicting("GPT2", "GPT2Config", f, settings)


def opt(size: str) -> Made:
    f = figures(size)
    common = {name: value for name, value in f.common.items() if name != "intermediate_size"}
    return predicting("OPT", "OPTConfig", f, {**common, "ffn_dim": 4 * f.width, "word_embed_proj_dim": f.width})


def mamba(size: str) -> Made:
    # Without kernels of its own, transformers scans word by word.
    f = dataclasses.replace(figures(size), length=32)
    settings = dict(vocab_size=f.words, hidden_size=f.width, num_hidden_layers=f.layers, state_size=16)
    return predicting("Mamba", "MambaConfig", f, settings)


def experts(size: str) -> Made:
    f = figures(size)
    own = dict(intermediate_size=2 * f.width, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2)
    return predicting("Mixtral", "MixtralConfig", f, {**f.common, **own})


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
