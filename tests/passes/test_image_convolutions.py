"""Convolutions of images with channels last as operators of pixels, in native sessions and in torch nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from lit_ort._compat import openmp
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from lit_ort.ops.image_convolution import convolutions, weight_gradient_of
from tests.backend.test_bf16 import assert_as_close_as_autocast, autocast
from tests.compare import assert_same_call, assert_same_step, backend
from tests.lower.test_native_phases import any_number_of_operators, assert_native
from tests.passes.reports import report_of

pytestmark = pytest.mark.usefixtures(any_number_of_operators.__name__)
CHANNELS = 16
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "3 x 3": lambda: nn.Conv2d(CHANNELS, 24, 3, padding=1),
    "strides": lambda: nn.Conv2d(CHANNELS, 40, (3, 2), stride=(2, 3), padding=1),
    "dilation": lambda: nn.Conv2d(CHANNELS, 16, 3, dilation=(2, 1), bias=False),
    "transposed": lambda: nn.ConvTranspose2d(CHANNELS, 24, 4, stride=2, padding=1, output_padding=1),
    "depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2, groups=CHANNELS),
    "depthwise with strides": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, groups=CHANNELS, bias=False),
    "odd channels": lambda: nn.Sequential(nn.Conv2d(CHANNELS, 17, 3), nn.Conv2d(17, 9, (1, 2), dilation=(1, 2))),
    "groups": lambda: nn.Conv2d(CHANNELS, 32, 3, stride=(1, 2), padding=2, dilation=(2, 1), groups=2),
    "transposed groups": lambda: nn.ConvTranspose2d(CHANNELS, 16, 3, stride=2, groups=2, bias=False),
    "few pixels": lambda: nn.Conv2d(CHANNELS, 24, 3, stride=7, padding=1),
}


class Net(nn.Module):
    """A layer between two others of images, so that its images have a gradient, with batch normalization."""

    def __init__(self, layer: nn.Module, width: int = CHANNELS) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(CHANNELS, width, 3, padding=1), nn.BatchNorm2d(width)
        self.layer = layer
        self.last = nn.LazyConv2d(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.norm(self.first(x).tanh())).sin()).square().mean()


def net(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Net:
    module = Net(layer).to(dtype)
    module(torch.randn(2, CHANNELS, 15, 14, dtype=dtype))
    return module


def step(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


@pytest.fixture
def on_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    if openmp.find_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    monkeypatch.setattr(openmp, "uses_openmp", lambda: True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("on_openmp")
def test_a_session_computes_them(name: str, dtype: torch.dtype) -> None:
    module = net(LAYERS[name](), dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    engine = assert_same_step(module, step, torch.randn(3, CHANNELS, 15, 14, dtype=dtype), tolerance=tolerance)
    assert_native(engine)
    (graph,) = engine.compile_log.graphs
    # Three operators for each layer, but that the images of the first one have no gradient.
    assert graph.operators_after["ImageConvolution"] == (8 if name == "odd channels" else 5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYERS)
def test_torch_nodes_compute_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "uses_openmp", lambda: False)
    module = net(LAYERS[name]())
    engine = assert_same_step(module, step, torch.randn(3, CHANNELS, 15, 14), tolerance=2e-5)
    assert report_of(engine, "image_convolutions").fired == (6 if name == "odd channels" else 4)


@pytest.mark.usefixtures("on_openmp")
def test_other_sizes_of_images_and_batches() -> None:
    """One graph for all sizes."""
    module = net(LAYERS["strides"]())
    engine = backend()
    call = torch.compile(step, backend=engine, dynamic=True)
    for batch, height, width in ((3, 15, 14), (2, 18, 15), (5, 9, 21), (3, 15, 14)):
        assert_same_call(module, step, call, torch.randn(batch, CHANNELS, height, width))
    (graph,) = engine.compile_log.graphs
    assert graph.fallback is None


def test_few_channels_stay_torchs() -> None:
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    engine = assert_same_step(module, lambda module, x: module(x).square().mean(), torch.randn(2, 3, 19, 19))
    assert report_of(engine, "image_convolutions").fired == 0


@pytest.mark.usefixtures("on_openmp")
def test_the_dumped_model_says_what_a_convolution_computes(tmp_path: Path) -> None:
    module = net(LAYERS["strides"]())
    torch.compile(step, backend=backend(dump_dir=str(tmp_path)))(module, torch.randn(3, CHANNELS, 15, 14)).backward()
    (path,) = tmp_path.glob("*/4_forward.onnx")
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "ImageConvolution"]
    found = [{one.name: onnx.helper.get_attribute_value(one) for one in node.attribute} for node in nodes]
    kinds = [b"convolution", b"convolution", b"image_gradient", b"weight_gradient", b"weight_gradient"]
    assert sorted(one["kind"] for one in found) == kinds
    assert sorted(one["strides"] for one in found) == [[1, 1]] * 2 + [[2, 3]] * 3
    assert {one["layout"] for one in found} == {b"NHWC"}
    assert {node.name for node in nodes} >= {"first.ImageConvolution", "layer.backward.ImageConvolution"}


def test_large_kernels_stay_torchs() -> None:
    module = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 17, groups=CHANNELS), nn.Tanh())
    engine = assert_same_step(module, lambda module, x: module(x).square().mean(), torch.randn(2, CHANNELS, 19, 19))
    assert report_of(engine, "image_convolutions").fired == 0


def test_an_empty_batch() -> None:
    images, weight = torch.empty(0, 5, 5, 16), torch.randn(24, 3, 3, 16)
    windows = [1, 1], [1, 1], [1, 1]
    assert torch.ops.lit_ort.image_convolution(images, weight, [5, 5], *windows, 1, False).shape == (0, 5, 5, 24)
    runs = torch.ops.lit_ort.image_weight_gradient(torch.empty(0, 5, 5, 24), images, [3, 3], *windows, 1)
    assert torch.equal(weight_gradient_of(runs, [3, 3], CHANNELS), torch.zeros_like(weight))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("on_openmp")
def test_autocast(name: str, has_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are as close to float64's as eager's are, in bfloat16 kernels and in float32 ones."""
    code = convolutions()
    if code is None or not has_bfloat16_matmuls():
        pytest.skip("torch's convolutions are faster here")
    monkeypatch.setattr(code, "multiplies_bfloat16", has_pairs and code.multiplies_bfloat16)
    module, engine = net(LAYERS[name]()), backend()
    mixed = autocast(step)
    compiled = torch.compile(mixed, backend=engine)
    assert_as_close_as_autocast(module, compiled, mixed, step, torch.randn(3, CHANNELS, 15, 14))
    assert_native(engine)


@pytest.mark.usefixtures("on_openmp")
def test_group_normalization_between_convolutions_under_autocast() -> None:
    """Torch declares the gradient of its input in the dtype of its weight."""
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16), nn.GELU(), nn.Conv2d(16, 16, 1))

    def squared(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).square().mean()

    compiled = torch.compile(autocast(squared), backend=backend())
    assert_as_close_as_autocast(module, compiled, autocast(squared), squared, torch.randn(2, 8, 12, 12))
