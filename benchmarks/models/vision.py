"""Models for images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.models.case import SMALL, Model, ModuleAndBatch, identity
from benchmarks.models.texts import sizes_of

CLASSES = 10


def images(size: str) -> Tensor:
    """Random images, float32[batch, 3, height, width]: 8 of 64 x 64, or 8 of 128 x 128."""
    side = 64 if size == SMALL else 128
    return torch.randn(8, 3, side, side)


def image_classifier(kind: str, settings: dict[str, Any], size: str) -> ModuleAndBatch:
    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **settings)
    pictures = images(size)
    batch = {"pixel_values": pictures, "labels": torch.randint(CLASSES, (len(pictures),))}
    return getattr(transformers, f"{kind}ForImageClassification")(config), batch


def vit(size: str) -> ModuleAndBatch:
    s = sizes_of(size)
    common = {name: value for name, value in s.common.items() if not name.startswith(("vocab", "max_position"))}
    return image_classifier("ViT", {**common, "image_size": images(size).shape[-1], "patch_size": 8}, size)


def swin(size: str) -> ModuleAndBatch:
    width = 96 if size == SMALL else 128
    settings = dict(embed_dim=width, depths=[2, 2], num_heads=[3, 6] if size == SMALL else [4, 8], window_size=4)
    return image_classifier("Swin", {**settings, "image_size": images(size).shape[-1], "patch_size": 4}, size)


def stages(size: str) -> list[int]:
    return [64, 128, 256, 512] if size == SMALL else [96, 192, 384, 768]


def convnext(size: str) -> ModuleAndBatch:
    return image_classifier("ConvNext", dict(hidden_sizes=stages(size), depths=[2, 2, 2, 2]), size)


def resnet(size: str) -> ModuleAndBatch:
    settings = dict(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    return image_classifier("ResNet", settings, size)


def mobilenet(size: str) -> ModuleAndBatch:
    return image_classifier("MobileNetV2", dict(image_size=images(size).shape[-1]), size)


def segformer(size: str) -> ModuleAndBatch:
    config = transformers.SegformerConfig(id2label={k: str(k) for k in range(CLASSES)})
    pictures = images(size)
    labels = torch.randint(CLASSES, (len(pictures), *pictures.shape[2:]))
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": pictures, "labels": labels}


class UNet(nn.Module):
    """A U-Net of three levels with batch normalization, trained with the cross entropy of every pixel.

    Source: Ronneberger, Fischer and Brox 2015.
    """

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            parts = [(inputs, outputs), (outputs, outputs)]
            layers = [(nn.Conv2d(*p, 3, padding=1, bias=False), nn.BatchNorm2d(p[1]), nn.ReLU()) for p in parts]
            return nn.Sequential(*(layer for part in layers for layer in part))

        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.bottom = block(4 * width, 8 * width)
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths))
        self.up = nn.ModuleList(block(2 * w, w) for w in reversed(widths))
        self.last = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), rise(x)], 1))
        return F.cross_entropy(self.last(x), labels)


def unet(size: str) -> ModuleAndBatch:
    pictures = images(size)
    labels = torch.randint(CLASSES, (len(pictures), *pictures.shape[2:]))
    return UNet(32), {"x": pictures, "labels": labels}


MODELS: dict[str, Model] = {
    "ViT": Model(vit),
    "Swin": Model(swin),
    "ConvNeXt": Model(convnext),
    "ResNet": Model(resnet, clip=None),
    "MobileNet-v2": Model(mobilenet, clip=None),
    "SegFormer": Model(segformer, clip=None),
    "U-Net": Model(unet, identity, clip=None),
}
