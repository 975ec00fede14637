"""Sequence-to-sequence models and models of sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.models.case import SMALL, Model, ModuleAndBatch
from benchmarks.models.texts import sizes_of


def sequence_to_sequence(kind: str, settings: dict[str, Any], size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    config = getattr(transformers, f"{kind}Config")(vocab_size=s.words, use_cache=False, **settings)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    ids = s.ids()
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": s.ids(s.length // 2)}


def t5(size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    settings = dict(d_model=s.width, d_kv=64, d_ff=4 * s.width, num_layers=s.layers // 2, num_heads=s.heads)
    return sequence_to_sequence("T5", {**settings, "decoder_start_token_id": 0}, size)


def layers(size: str) -> dict[str, Any]:
    """The dimensions of encoder and decoder by their names in BART's and Whisper's configurations."""
    s = sizes_of(size)
    parts = ("encoder", "decoder")
    settings: dict[str, Any] = {"d_model": s.width}
    for part in parts:
        settings |= {
            f"{part}_layers": s.layers // 2,
            f"{part}_attention_heads": s.heads,
            f"{part}_ffn_dim": 4 * s.width,
        }
    return settings


def bart(size: str) -> ModuleAndBatch:
    return sequence_to_sequence("Bart", {**layers(size), "max_position_embeddings": 1024}, size)


def whisper(size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    frames = 200 if size == SMALL else 400
    config = transformers.WhisperConfig(
        vocab_size=s.words,
        num_mel_bins=80,
        max_source_positions=frames // 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        **layers(size),
    )
    batch = {"input_features": torch.randn(s.batch, 80, frames), "labels": s.ids(s.length // 2)}
    return transformers.WhisperForConditionalGeneration(config), batch


def wav2vec2(size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    common = {name: value for name, value in s.common.items() if not name.startswith(("vocab", "max_position"))}
    config = transformers.Wav2Vec2Config(
        vocab_size=32, conv_dim=(128,) * 7, mask_time_prob=0.0, layerdrop=0.0, ctc_zero_infinity=True, **common
    )
    samples = 16_000 if size == SMALL else 32_000
    batch = {"input_values": torch.randn(s.batch, samples), "labels": torch.randint(1, 32, (s.batch, 20))}
    return transformers.Wav2Vec2ForCTC(config), batch


MODELS: dict[str, Model] = {
    "T5": Model(t5),
    "BART": Model(bart),
    "Whisper": Model(whisper),
    "Wav2Vec2": Model(wav2vec2),
}
