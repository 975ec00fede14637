"""Models from one sequence to another, and models of sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.models.case import SMALL, Made, Model
from benchmarks.models.texts import figures


def translating(kind: str, settings: dict[str, Any], size: str) -> Made:
    f = figures(size)
    config = getattr(transformers, f"{kind}Config")(vocab_size=f.words, use_cache=False, **settings)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    ids = f.ids()
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": f.ids(f.length // 2)}


def t5(size: str) -> Made:
    f = figures(size)
    settings = dict(d_model=f.width, d_kv=64, d_ff=4 * f.width, num_layers=f.layers // 2, num_heads=f.heads)
    return translating("T5", {**settings, "decoder_start_token_id": 0}, size)


def layers(size: str) -> dict[str, Any]:
    """Encoder and decoder, as BART and Whisper name them."""
    f = figures(size)
    parts = ("encoder", "decoder")
    found: dict[str, Any] = {"d_model": f.width}
    for part in parts:
        found |= {f"{part}_layers": f.layers // 2, f"{part}_attention_heads": f.heads, f"{part}_ffn_dim": 4 * f.width}
    return found


def bart(size: str) -> Made:
    return translating("Bart", {**layers(size), "max_position_embeddings": 1024}, size)


def whisper(size: str) -> Made:
    f = figures(size)
    frames = 200 if size == SMALL else 400
    config = transformers.WhisperConfig(
        vocab_size=f.words,
        num_mel_bins=80,
        max_source_positions=frames // 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        **layers(size),
    )
    batch = {"input_features": torch.randn(f.batch, 80, frames), "labels": f.ids(f.length // 2)}
    return transformers.WhisperForConditionalGeneration(config), batch


def wav2vec2(size: str) -> Made:
    f = figures(size)
    common = {name: value for name, value in f.common.items() if not name.startswith(("vocab", "max_position"))}
    config = transformers.Wav2Vec2Config(
        vocab_size=32, conv_dim=(128,) * 7, mask_time_prob=0.0, layerdrop=0.0, ctc_zero_infinity=True, **common
    )
    samples = 16_000 if size == SMALL else 32_000
    batch = {"input_values": torch.randn(f.batch, samples), "labels": torch.randint(1, 32, (f.batch, 20))}
    return transformers.Wav2Vec2ForCTC(config), batch


MODELS: dict[str, Model] = {
    "T5": Model(t5),
    "BART": Model(bart),
    "Whisper": Model(whisper),
    "Wav2Vec2": Model(wav2vec2),
}
