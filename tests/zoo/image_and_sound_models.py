"""Models of transformers for images and sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.zoo.cases import Case, ModuleAndBatch, loss_of_output
from tests.zoo.text_models import WIDTH, random_model, with_dropout

BATCH, SIZE, LABELS = 2, 16, 5


def images(size: int = SIZE) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def image_classifier(kind: str, **settings: Any) -> Case:
    """A model that classifies images."""

    def make(dropout: float) -> ModuleAndBatch:
        head = "ForImageClassification"
        model = random_model(kind, head, dropout, image_size=SIZE, num_labels=LABELS, **settings)
        return model, {"pixel_values": images(), "labels": torch.randint(LABELS, (BATCH,))}

    return Case(make, loss_of_output)


def clip(dropout: float) -> ModuleAndBatch:
    text = dict(WIDTH, vocab_size=64, max_position_embeddings=16, projection_dim=16, attention_dropout=dropout)
    vision = dict(WIDTH, image_size=SIZE, patch_size=4, projection_dim=16, attention_dropout=dropout)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = {"input_ids": torch.randint(3, 60, (BATCH, 6)), "pixel_values": images(), "return_loss": True}
    return transformers.CLIPModel(config), batch


def whisper(dropout: float) -> ModuleAndBatch:
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
    model = transformers.WhisperForConditionalGeneration(with_dropout(config, dropout))
    return model, {"input_features": torch.randn(BATCH, 8, 40), "labels": torch.randint(3, 60, (BATCH, 6))}


def wav2vec2(dropout: float) -> ModuleAndBatch:
    """A model for speech recognition, trained with masked frames."""
    settings: dict[str, Any] = dict(WIDTH, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2))
    settings |= dict(num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2)
    settings |= dict(mask_time_length=2, mask_time_prob=0.2, layerdrop=0.0, ctc_zero_infinity=True)
    config = transformers.Wav2Vec2Config(vocab_size=32, pad_token_id=0, **settings)
    mask = torch.ones(BATCH, 400, dtype=torch.int64)
    mask[1, 300:] = 0
    labels = torch.randint(1, 32, (BATCH, 5))
    labels[1, 3:] = -100
    batch = {"input_values": torch.randn(BATCH, 400), "attention_mask": mask, "labels": labels}
    return transformers.Wav2Vec2ForCTC(with_dropout(config, dropout)), batch


def segformer(dropout: float) -> ModuleAndBatch:
    """A model for semantic segmentation."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        id2label={k: str(k) for k in range(LABELS)},
    )
    model = transformers.SegformerForSemanticSegmentation(with_dropout(config, dropout))
    return model, {"pixel_values": images(32), "labels": torch.randint(LABELS, (BATCH, 32, 32))}


CASES: dict[str, Case] = {
    "ViT": image_classifier("ViT", **WIDTH, patch_size=4),
    "Swin": image_classifier("Swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2, patch_size=2),
    "ConvNeXt": image_classifier("ConvNext", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, patch_size=2),
    "CLIP": Case(clip, loss_of_output),
    "Whisper": Case(whisper, loss_of_output),
    "Wav2Vec2 with CTC": Case(wav2vec2, loss_of_output, breaks=True),
    "SegFormer": Case(segformer, loss_of_output),
}
