"""Language models of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.cases import Case, ModuleAndBatch, loss_of_output

WORDS, BATCH, LENGTH = 64, 2, 10
WIDTH: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def words(low: int = 3) -> Tensor:
    return torch.randint(low, WORDS, (BATCH, LENGTH))


def padding() -> Tensor:
    """An attention mask with all tokens of the first text and some of the second."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 7:] = 0
    return mask


def with_dropout(config: Any, probability: float) -> Any:
    """Set every dropout probability of a configuration."""
    for name in vars(config):
        if "dropout" in name or name.endswith(("pdrop", "drop_prob", "dropout_prob", "path_rate")):
            setattr(config, name, probability)
    return config


def random_model(kind: str, head: str, dropout: float, **settings: Any) -> nn.Module:
    """A model with random weights of a kind and a head, such as `Bert` and `ForMaskedLM`."""
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**settings)
    return getattr(transformers, f"{kind}{head}")(with_dropout(config, dropout))


def causal(kind: str, **settings: Any) -> Case:
    """A causal language model."""

    def make(dropout: float) -> ModuleAndBatch:
        head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        model = random_model(kind, head, dropout, vocab_size=WORDS, use_cache=False, **settings)
        ids = words()
        return model, {"input_ids": ids, "attention_mask": padding(), "labels": ids}

    return Case(make, loss_of_output)


def masked(kind: str, **settings: Any) -> Case:
    """A masked language model."""

    def make(dropout: float) -> ModuleAndBatch:
        model = random_model(kind, "ForMaskedLM", dropout, **(dict(vocab_size=WORDS) | WIDTH | settings))
        ids = words()
        labels = torch.where(torch.arange(LENGTH) % 3 == 0, ids, -100)
        return model, {"input_ids": ids, "attention_mask": padding(), "labels": labels}

    return Case(make, loss_of_output)


def sequence_to_sequence(kind: str, **settings: Any) -> Case:
    """A sequence-to-sequence model."""

    def make(dropout: float) -> ModuleAndBatch:
        head = "ForConditionalGeneration"
        model = random_model(kind, head, dropout, vocab_size=WORDS, use_cache=False, **settings)
        return model, {"input_ids": words(), "attention_mask": padding(), "labels": words()}

    return Case(make, loss_of_output)


LLAMA: dict[str, Any] = dict(WIDTH, num_key_value_heads=2, max_position_embeddings=32, head_dim=8)
MIXTRAL: dict[str, Any] = dict(LLAMA, num_local_experts=4, num_experts_per_tok=2)
# Ids of special tokens, within the small vocabulary.
SPECIAL_TOKENS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
BART: dict[str, Any] = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=32,
)

CASES: dict[str, Case] = {
    "GPT-2": causal("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "OPT": causal(
        "OPT", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32
    ),
    "GPT-NeoX": causal("GPTNeoX", **WIDTH, max_position_embeddings=32),
    "Llama": causal("Llama", **LLAMA),
    "Mistral": causal("Mistral", **LLAMA, sliding_window=4),
    "Qwen2": causal("Qwen2", **{k: v for k, v in LLAMA.items() if k != "head_dim"}),
    "Qwen3": causal("Qwen3", **LLAMA),
    "Gemma 2": causal("Gemma2", **LLAMA, sliding_window=4),
    "Gemma 3": causal("Gemma3", **LLAMA, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "Mixtral": causal("Mixtral", **MIXTRAL, router_aux_loss_coef=0.02, output_router_logits=True),
    "Mixtral, experts in turn": dataclasses.replace(
        causal("Mixtral", **MIXTRAL, experts_implementation="eager"), breaks=True
    ),
    "Mamba": causal("Mamba", hidden_size=32, num_hidden_layers=2, state_size=8, expand=2, conv_kernel=4),
    "BERT": masked("Bert"),
    "FNet": masked("FNet", max_position_embeddings=32, tpu_short_seq_length=LENGTH),
    "RoBERTa": masked("Roberta", max_position_embeddings=32, pad_token_id=1),
    "DistilBERT": masked("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "ALBERT": masked("Albert", embedding_size=16),
    "ELECTRA": masked("Electra", embedding_size=16),
    "DeBERTa-v2": masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    "ModernBERT": masked("ModernBert", max_position_embeddings=32, local_attention=4, **SPECIAL_TOKENS),
    "T5": sequence_to_sequence("T5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "BART": sequence_to_sequence("Bart", **BART),
}
