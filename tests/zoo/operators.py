"""Modules and functions of torch.nn, and other operators of models, in groups; each group is one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.cases import Case, weighted_mean

Operation = Callable[[Tensor], Tensor]
INDEX = torch.tensor([[0, 2], [1, 1], [2, 0]])
CLASSES, LABELS = 4, torch.tensor([1, 3, 0])


class Operations(nn.Module):
    """Applies each operation to a separate input, which is a parameter, so that a wrong gradient names its operation.

    Args:
        operations: the operations by name.
        shape: the shape of each input.
        positive: whether inputs are between 0.1 and 0.9 instead of normally distributed.
    """

    def __init__(self, operations: dict[str, Operation], shape: tuple[int, ...], positive: bool) -> None:
        super().__init__()
        self.operations = operations
        for name, operation in operations.items():
            start = torch.rand(shape) * 0.8 + 0.1 if positive else torch.randn(shape)
            self.register_parameter(f"input_of_{name}", nn.Parameter(start))
            if isinstance(operation, nn.Module):
                self.add_module(f"module_of_{name}", operation)

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for name, operation in self.operations.items():
            total = total + weighted_mean(operation(getattr(self, f"input_of_{name}")).float())
        return total


def group(make: Callable[[], dict[str, Operation]], *shape: int, positive: bool = False) -> Case:
    return Case(lambda dropout: (Operations(make(), shape, positive), {}), lambda loss: loss)


def activations() -> dict[str, Operation]:
    return {
        "ELU": nn.ELU(0.7),
        "Hardshrink": nn.Hardshrink(),
        "Hardsigmoid": nn.Hardsigmoid(),
        "Hardtanh": nn.Hardtanh(-0.5, 0.8),
        "Hardswish": nn.Hardswish(),
        "LeakyReLU": nn.LeakyReLU(0.2),
        "LogSigmoid": nn.LogSigmoid(),
        "PReLU": nn.PReLU(4),
        "ReLU": nn.ReLU(),
        "ReLU in place": lambda x: F.relu(x * 2, inplace=True),
        "ReLU6": nn.ReLU6(),
        "RReLU": lambda x: F.rrelu(x, training=False),
        "SELU": nn.SELU(),
        "CELU": nn.CELU(0.6),
        "GELU": nn.GELU(),
        "GELU by tanh": nn.GELU("tanh"),
        "Sigmoid": nn.Sigmoid(),
        "SiLU": nn.SiLU(),
        "Mish": nn.Mish(),
        "Softplus": nn.Softplus(2.0),
        "Softshrink": nn.Softshrink(),
        "Softsign": nn.Softsign(),
        "Tanh": nn.Tanh(),
        "Tanhshrink": nn.Tanhshrink(),
        "Threshold": nn.Threshold(0.1, 20.0),
        "GLU": nn.GLU(),
        "Softmin": nn.Softmin(1),
        "Softmax": nn.Softmax(-1),
        "LogSoftmax": nn.LogSoftmax(1),
    }


def normalizations() -> dict[str, Operation]:
    fixed = nn.BatchNorm2d(4).eval()
    return {
        "BatchNorm1d": nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(4)),
        "BatchNorm2d": nn.BatchNorm2d(4),
        "BatchNorm2d without weights": nn.BatchNorm2d(4, momentum=0.3, affine=False),
        "BatchNorm2d without statistics": nn.BatchNorm2d(4, track_running_stats=False),
        "BatchNorm2d in evaluation": lambda x: F.batch_norm(
            x, fixed.running_mean, fixed.running_var, fixed.weight, fixed.bias
        ),
        "BatchNorm3d": nn.Sequential(nn.Unflatten(2, (2, 3)), nn.BatchNorm3d(4)),
        "GroupNorm": nn.GroupNorm(2, 4),
        "InstanceNorm2d": nn.InstanceNorm2d(4, affine=True),
        "InstanceNorm2d with statistics": nn.InstanceNorm2d(4, track_running_stats=True),
        "LayerNorm": nn.LayerNorm([6, 6]),
        "LayerNorm of the last dimension": nn.LayerNorm(6, bias=False),
        "RMSNorm": nn.RMSNorm(6),
        "LocalResponseNorm": nn.LocalResponseNorm(2),
        "normalize": lambda x: F.normalize(x, dim=1),
        "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
    }


def pooling() -> dict[str, Operation]:
    return {
        "MaxPool1d": lambda x: F.max_pool1d(x.flatten(2), 3, 2, 1),
        "MaxPool2d": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        "MaxPool2d with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        "MaxPool3d": lambda x: F.max_pool3d(x, 2),
        "AvgPool1d": lambda x: F.avg_pool1d(x.flatten(2), 3),
        "AvgPool2d": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        "AvgPool3d": lambda x: F.avg_pool3d(x, 2),
        "LPPool2d": lambda x: F.lp_pool2d(x, 2.0, 2),
        "AdaptiveMaxPool1d": lambda x: F.adaptive_max_pool1d(x.flatten(2), 5),
        "AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(4),
        "AdaptiveAvgPool1d": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5),
        "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d((4, 3)),
        "AdaptiveAvgPool3d": lambda x: F.adaptive_avg_pool3d(x, 2),
        "MaxUnpool2d": lambda x: nn.MaxUnpool2d(2)(*F.max_pool2d(x, 2, return_indices=True)),
    }


def padding_and_resizing() -> dict[str, Operation]:
    return {
        "ReflectionPad1d": lambda x: F.pad(x.flatten(2), (3, 2), "reflect"),
        "ReflectionPad2d": nn.ReflectionPad2d(2),
        "ReplicationPad2d": nn.ReplicationPad2d((1, 2, 0, 3)),
        "CircularPad2d": nn.CircularPad2d(2),
        "ZeroPad2d": nn.ZeroPad2d((1, -1, 2, 0)),
        "ConstantPad2d": nn.ConstantPad2d(1, 0.5),
        "nearest": nn.Upsample(scale_factor=2),
        "nearest exact": nn.Upsample(size=(4, 9), mode="nearest-exact"),
        "bilinear": nn.Upsample(scale_factor=1.5, mode="bilinear"),
        "bilinear with corners": nn.Upsample(size=(9, 4), mode="bilinear", align_corners=True),
        "bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
        "area": lambda x: F.interpolate(x, size=3, mode="area"),
        "linear": lambda x: F.interpolate(x.flatten(2), size=20, mode="linear"),
        "antialias": lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True),
        "PixelShuffle": nn.PixelShuffle(2),
        "PixelUnshuffle": nn.PixelUnshuffle(2),
        "ChannelShuffle": nn.ChannelShuffle(2),
        "Unfold": nn.Unfold(3, padding=1),
        "Fold": lambda x: F.fold(x.reshape(3, 4 * 4, 9), 6, 2, stride=2),
        "grid_sample": lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
    }


def convolutions() -> dict[str, Operation]:
    return {
        "Conv1d": nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 5, 2, 2)),
        "Conv2d": nn.Conv2d(4, 6, 3, 2, 1),
        "Conv2d with groups": nn.Conv2d(4, 8, 3, groups=4, bias=False),
        "Conv2d with dilation": nn.Conv2d(4, 2, 2, dilation=2),
        "Conv2d with same padding": nn.Conv2d(4, 2, 3, padding="same", padding_mode="reflect"),
        "Conv3d": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, 2)),
        "ConvTranspose1d": nn.Sequential(nn.Flatten(2), nn.ConvTranspose1d(4, 2, 3, 2)),
        "ConvTranspose2d": nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
        "ConvTranspose2d with groups": nn.ConvTranspose2d(4, 4, 2, groups=2, bias=False),
        "ConvTranspose3d": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.ConvTranspose3d(2, 3, 2)),
        "Bilinear": lambda x: F.bilinear(x, x.flip(0), torch.linspace(-1, 1, 108).reshape(3, 6, 6)),
    }


def losses() -> dict[str, Operation]:
    target = torch.linspace(0.1, 0.9, 12).reshape(3, 4)
    signs = torch.tensor([1.0, -1.0, 1.0])
    classes = torch.tensor([0.5, 2.0, 1.0, 0.7])
    return {
        "L1": lambda x: F.l1_loss(x, target),
        "MSE": lambda x: F.mse_loss(x, target, reduction="sum"),
        "SmoothL1": lambda x: F.smooth_l1_loss(x, target, beta=0.3),
        "Huber": lambda x: F.huber_loss(x, target, delta=0.3),
        "CrossEntropy": lambda x: F.cross_entropy(x, LABELS),
        "CrossEntropy weighted": lambda x: F.cross_entropy(x, LABELS, classes, ignore_index=3),
        "CrossEntropy smoothed": lambda x: F.cross_entropy(x, LABELS, classes, label_smoothing=0.1),
        "CrossEntropy soft": lambda x: F.cross_entropy(x, target.softmax(1)),
        "CrossEntropy without reduction": lambda x: F.cross_entropy(x, LABELS, reduction="none"),
        "NLL": lambda x: F.nll_loss(x.log_softmax(1), LABELS, classes),
        "NLL without reduction": lambda x: F.nll_loss(x.log_softmax(1), LABELS, reduction="none"),
        "PoissonNLL": lambda x: F.poisson_nll_loss(x, target, full=True),
        "KLDiv": lambda x: F.kl_div(x.log_softmax(1), target.softmax(1), reduction="batchmean"),
        "KLDiv of logarithms": lambda x: F.kl_div(
            x.log_softmax(1), target.log_softmax(1), reduction="sum", log_target=True
        ),
        "BCE": lambda x: F.binary_cross_entropy(x, target),
        "BCE weighted": lambda x: F.binary_cross_entropy(x, target, classes),
        "BCEWithLogits": lambda x: F.binary_cross_entropy_with_logits(x, target, pos_weight=classes),
        "MarginRanking": lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], signs, margin=0.1),
        "HingeEmbedding": lambda x: F.hinge_embedding_loss(x[:, 0], signs),
        "SoftMargin": lambda x: F.soft_margin_loss(x[:, 0], signs),
        "MultiLabelSoftMargin": lambda x: F.multilabel_soft_margin_loss(x, (target > 0.5).float()),
        "CosineEmbedding": lambda x: F.cosine_embedding_loss(x, target, signs),
        "MultiMargin": lambda x: F.multi_margin_loss(x, LABELS),
        "TripletMargin": lambda x: F.triplet_margin_loss(x, target, x.flip(0)),
        "cosine similarity": lambda x: F.cosine_similarity(x, target),
        "pairwise distance": lambda x: F.pairwise_distance(x, target, 3.0),
        "cdist": lambda x: torch.cdist(x, target),
    }


def losses_that_read_values() -> dict[str, Operation]:
    """Losses that read values of tensors, which breaks the graph."""
    lengths = torch.tensor([3]), torch.tensor([1])
    return {
        "GaussianNLL": lambda x: F.gaussian_nll_loss(x, x.detach() * 2, x.square() + 0.1),
        "CTC": lambda x: F.ctc_loss(x.log_softmax(1).unsqueeze(1), torch.tensor([[1]]), *lengths),
    }


def indexing() -> dict[str, Operation]:
    index = torch.tensor([2, 0])
    return {
        "gather": lambda x: x.gather(1, INDEX),
        "scatter": lambda x: x.scatter(1, INDEX[:, :1], x[:, 1:2] * 2),
        "scatter_add": lambda x: x.scatter_add(1, INDEX, x[:, :2]),
        "scatter_reduce": lambda x: x.scatter_reduce(1, INDEX, x[:, :2], "amax"),
        "index_select": lambda x: x.index_select(0, index),
        "index_add": lambda x: x.index_add(0, index, x[:2]),
        "index_copy": lambda x: x.index_copy(0, index, x[:2] * 3),
        "index_put": lambda x: x.index_put((index, index), torch.tensor(0.5)),
        "assignment": lambda x: with_assignments(x),
        "take_along_dim": lambda x: torch.take_along_dim(x, INDEX, 1),
        "an index of tensors": lambda x: x[index, index + 1],
        "an index in the middle": lambda x: x.reshape(3, 2, 2)[:, index.clamp(max=1)],
        "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
        "where": lambda x: torch.where(x > 0.5, x[:1], x * 2),
        "embedding": lambda x: F.embedding(INDEX, x, padding_idx=1),
        "embedding_bag": lambda x: F.embedding_bag(INDEX, x, mode="mean"),
        "sort": lambda x: x.sort(1, descending=True)[0],
        "argsort": lambda x: x.gather(1, x.argsort(1)) * torch.arange(4),
        "topk": lambda x: x.topk(2, 1)[0],
        "kthvalue": lambda x: x.kthvalue(2, 1)[0],
        "median": lambda x: x.median(1)[0],
        "mode of rounds": lambda x: x + x.round().mode(1, keepdim=True)[0],
        "unbind": lambda x: x.unbind(1)[1] * x.unbind(1)[2],
        "diagonal": lambda x: x.diagonal() + x.diagonal(1),
        "diag_embed": lambda x: x.diag_embed(),
        "tril": lambda x: x.tril(-1) + x.triu(1),
        "roll": lambda x: x.roll(1, 1),
        "flip": lambda x: x.flip(1),
        "rot90": lambda x: x.rot90(),
        "unfold": lambda x: x.unfold(1, 2, 1),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
        "movedim": lambda x: x.reshape(3, 2, 2).movedim(0, 2),
        "chunks": lambda x: torch.cat([part * k for k, part in enumerate(x.chunk(3, 1))], 1),
        "tile": lambda x: x.tile(2, 2),
        "one_hot": lambda x: x @ F.one_hot(LABELS, 4).T.float(),
    }


def with_assignments(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[:, 1] = copy[:, 2] * 2
    copy[0] += 1
    return copy


def arithmetic() -> dict[str, Operation]:
    return {
        "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
        "einsum of a diagonal": lambda x: torch.einsum("bi,bj->bij", x, x.exp()),
        "matrix and vector": lambda x: x @ x[0],
        "vector and vector": lambda x: x[0] @ x[1],
        "outer": lambda x: torch.outer(x[0], x[1]),
        "bmm": lambda x: torch.bmm(x[None], x.T[None]),
        "baddbmm": lambda x: torch.baddbmm(x[None, :, :3], x[None], x.T[None], beta=0.5),
        "tensordot": lambda x: torch.tensordot(x, x.T, 1),
        "cumsum": lambda x: x.cumsum(1),
        "cumprod": lambda x: x.cumprod(1),
        "cummax": lambda x: x.cummax(1)[0],
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "prod": lambda x: x.prod(1) + x.prod(),
        "max": lambda x: x.max(1)[0] + x.max(),
        "min": lambda x: x.min(0)[0],
        "amax": lambda x: x.amax((0, 1)),
        "aminmax": lambda x: x.aminmax(dim=1)[0],
        "maximum": lambda x: torch.maximum(x, x.flip(0)) + torch.minimum(x, x.flip(1)),
        "clamp": lambda x: x.clamp(0.2, 0.7) + x.clamp(min=0.5),
        "norm": lambda x: x.norm() + x.norm(1, 1) + x.norm(float("inf"), 1) + torch.linalg.vector_norm(x, 3),
        "var": lambda x: x.var(1) + x.std(1, correction=0) + x.var(),
        "pow": lambda x: x**2.5 + x**x + 2**x + x.rsqrt(),
        "logarithms": lambda x: x.log2() + x.log10() + x.log1p() + x.logit(),
        "exponentials": lambda x: x.exp2() + x.expm1() + torch.logaddexp(x, -x),
        "trigonometry": lambda x: x.sin() + x.cos() + x.tan() + x.asin() + x.acos() + x.atan(),
        "hyperbolic": lambda x: x.sinh() + x.cosh() + x.asinh() + x.atanh() + (x + 1).acosh(),
        "atan2": lambda x: torch.atan2(x, x.flip(1)),
        "erf": lambda x: x.erf() + x.erfc() + x.erfinv(),
        "gamma": lambda x: x.lgamma() + x.digamma(),
        "rounding": lambda x: x * x.floor() + x.ceil() + x.round() + x.trunc() + x.sign() + x.frac(),
        "remainder": lambda x: x % 0.3 + x.fmod(0.4),
        "lerp": lambda x: x.lerp(x.flip(0), 0.3),
        "addcmul": lambda x: x.addcmul(x, x, value=2) + x.addcdiv(x, x + 1),
        "softmax of two": lambda x: x.reshape(3, 2, 2).softmax(1) + x.mean((0, 1), keepdim=True),
        "in place": lambda x: x.clone().mul_(2).add_(x).clamp_(max=1.5),
        "attention": lambda x: F.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None], is_causal=True
        ),
        "float64": lambda x: (x.double() * x.double().exp()).sum(1),
        "det": lambda x: torch.linalg.det(x[:, :3]),
    }


READING = dataclasses.replace(group(losses_that_read_values, 3, 4, positive=True), breaks=True)
GROUPS: dict[str, Case] = {
    "activations": group(activations, 3, 4, 4),
    "normalizations": group(normalizations, 3, 4, 6, 6),
    "pooling": group(pooling, 3, 4, 6, 6),
    "padding and resizing": group(padding_and_resizing, 3, 4, 6, 6),
    "convolutions": group(convolutions, 3, 4, 6, 6),
    "losses": group(losses, 3, 4, positive=True),
    "indexing": group(indexing, 3, 4, positive=True),
    "arithmetic": group(arithmetic, 3, 4, positive=True),
}
