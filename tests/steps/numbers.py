"""Steps with several dtypes, and with values at the limits of dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.steps.case import Case, Net, case
from tests.steps.reported import LABELS, rows


@case
def float64_in_the_middle() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x).double()
        return (hidden.logsumexp(1) - hidden.mean(1)).mean().float() + m.second(x).sum() * torch.tensor(0.5).double()

    return Case(Net(step), [(rows(),)])


@case
def a_module_in_float64() -> Case:
    return Case(Net(lambda m, x: m.second(m.first(x).tanh()).pow(2).mean()).double(), [(rows().double(),)])


@case
def half_and_bfloat16_in_the_middle() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.first(x)
        low = hidden.half() * 2 + hidden.bfloat16().half()
        return (low.float() - hidden).pow(2).mean() + low.sum(), low

    return Case(Net(step), [(rows(),)])


@case
def images_of_bytes() -> Case:
    def step(m: Any, images: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.second(m.first(images / 255.0)), y.long()) + (images.float() > 3).float().mean()

    images = torch.arange(48, dtype=torch.uint8).view(6, 8)
    return Case(Net(step), [(images, LABELS.int()), (images + 1, LABELS.to(torch.int8))])


@case
def integers_and_booleans_in_arithmetic() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        keep = (y > 1) | ~(y == 0)
        weight = keep * 2 + y // 2 - y % 3
        hidden = m.first(x) * weight[:, None]
        return hidden.sum() / keep.sum(), keep, weight, (keep & (y < 3)).any(), y.float().mean().int()

    return Case(Net(step), [(rows(), LABELS)])


@case
def losses_of_large_values() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = m.first(x) * 200
        binary = F.binary_cross_entropy_with_logits(hidden, (x > 0).float(), pos_weight=torch.full((8,), 3.0))
        classes = F.cross_entropy(m.second(x) * 1e4, y, label_smoothing=0.1)
        return binary + classes + F.softplus(hidden).mean() + F.huber_loss(hidden, x) + F.silu(-hidden).sum()

    return Case(Net(step), [(rows(), LABELS)])


@case
def every_label_is_ignored() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.second(x), y, ignore_index=-1)

    return Case(Net(step), [(rows(), torch.full((6,), -1)), (rows(), LABELS)])


@case
def roots_and_norms_of_zero() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x) * 0
        norm = F.normalize(hidden, dim=1).sum() + hidden.norm() + hidden.norm(dim=1).sum()
        return norm + (m.base + hidden).sqrt().sum() + (m.base**0.5).sum() + (hidden / (hidden + 1)).sum()

    return Case(Net(step, base=nn.Parameter(torch.zeros(8))), [(rows(),)])


@case
def infinities_masked_by_where() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        safe = torch.where(hidden > 0, hidden, 1.0)
        scores = hidden.masked_fill(x > 0, float("-inf"))
        return torch.where(hidden > 0, safe.log(), 0.0).sum() + scores.logsumexp(0).nan_to_num(neginf=0).sum()

    return Case(Net(step), [(rows(),)])


@case
def nan_propagates() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = m.first(x)
        return hidden.sum(), hidden.max(), hidden.clamp(-1, 1), hidden.relu(), hidden.isnan().sum(), torch.sign(hidden)

    x = rows()
    x[0, 0] = float("nan")
    return Case(Net(step), [(x,)])


@case
def ties_are_handled_as_in_eager() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        level = (m.first(x) * 0 + m.base).round()
        extremes = level.max() + level.max(1)[0].sum() + level.amax(0).sum() + level.median() + level.min(0)[0].sum()
        return extremes + torch.maximum(level, level.flip(0)).sum() + level.clamp(0, 0).sum() + m.base.abs().sum()

    return Case(Net(step, base=nn.Parameter(torch.tensor([0.0, 1.0, 1.0, -0.0, 2.0, 2.0, 2.0, -1.0]))), [(rows(),)])


@case
def small_and_large_sums() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        tiny, huge = (hidden * 1e-20).square().sum(), (hidden * 1e30).tanh().sum()
        return tiny + huge + hidden.exp().cumsum(0).log1p().mean() + torch.expm1(hidden * 1e-7).sum() * 1e6

    return Case(Net(step), [(rows(),)])


@case
def integer_division_and_shifts() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        bits = torch.stack([(y >> k) & 1 for k in range(8)], 1)
        return (
            (m.first(x) * bits).sum()
            + torch.div(x, 0.7, rounding_mode="floor").sum()
            + (-y // 3).sum()
            + (-x % 0.4).sum()
        )

    return Case(Net(step), [(rows(), LABELS + 3)])


@case
def complex_spectrum() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(m.first(x), norm="ortho")
        filtered = torch.fft.irfft(spectrum * torch.view_as_complex(m.filter), n=8)
        return filtered.pow(2).mean() + spectrum.abs().log1p().sum() + torch.angle(spectrum[:, 1]).cos().sum()

    return Case(Net(step, filter=nn.Parameter(torch.randn(5, 2))), [(rows(),)])


@case
def complex_parameter_and_batch() -> Case:
    def step(m: Any, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        rotated = torch.polar(torch.ones(8), m.first(x)) * z * m.factor
        energy = (rotated * rotated.conj()).real.sum()
        return energy + (rotated**2).imag.mean() + torch.exp(m.factor).abs().sum(), rotated

    factor = nn.Parameter(torch.randn(8, dtype=torch.complex64))
    return Case(Net(step, factor=factor), [(rows(), torch.randn(6, 8, dtype=torch.complex64))])


@case
def rotary_positions() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(m.first(x).view(6, 4, 2)) * m.frequencies
        return torch.view_as_real(pairs).flatten(1).softmax(1).square().sum()

    frequencies = torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4) / 10)
    return Case(Net(step, frequencies=frequencies), [(rows(),)])


@case
def audio_spectrum() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        wave = m.first(x).flatten()
        spectrum = torch.stft(wave, 16, window=torch.hann_window(16), return_complex=True)
        return spectrum.abs().clamp(min=1e-5).log().mean()

    return Case(Net(step), [(rows(),)])
