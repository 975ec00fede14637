"""Models of the transformers library for images and sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.zoo.cases import Case, Made, own_loss
from tests.zoo.text_models import WIDTH, configured, dropouts

BATCH, SIZE, LABELS = 2, 16, 5


def images(size: int = SIZE) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def classifying(kind: str, **figures: Any) -> Case:
    """A model that tells what an image shows."""

    def make(dropout: float) -> Made:
        head = "ForImageClassification"
        model = configured(kind, head, dropout, image_size=SIZE, num_labels=LABELS, **figures)
        return model, {"pixel_values": images(), "labels": torch.randint(LABELS, (BATCH,))}

    return Case(make, own_loss)


def clip(dropout: float) -> Made:
    text = dict(WIDTH, vocab_size=64, max_position_embeddings=16, projection_dim=16, attention_dropout=dropout)
    vision = dict(WIDTH, image_size=SIZE, patch_size=4, projection_dim=16, attention_dropout=dropout)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = {"input_ids": torch.randint(3, 60, (BATCH, 6)), "pixel_values": images(), "return_loss": True}
    return transformers.CLIPModel(config), batch


def whisper(dropout: float) -> Made:
    config = transformers.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        use_cache=False,
    )
    model = transformers.WhisperForConditionalGeneration(dropouts(config, dropout))
    return model, {"input_features": torch.randn(BATCH, 8, 40), "labels": torch.randint(3, 60, (BATCH, 6))}


CASES: dict[str, Case] = {
    "ViT": classifying("ViT", **WIDTH, patch_size=4),
    "Swin": classifying("Swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2, patch_size=2),
    "ConvNeXt": classifying("ConvNext", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, patch_size=2),
    "CLIP": Case(clip, own_loss),
    "Whisper": Case(whisper, own_loss),
}
