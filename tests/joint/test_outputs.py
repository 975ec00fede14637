"""Outputs as results, inputs and views of them: sizes, strides and shared memory as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lit_ort._compat.torch import memory_of
from lit_ort.errors import CaptureError
from lit_ort.joint.outputs import Returned
from lit_ort.runtime.program import DETACHED, NO_GRAD, TRACKED, Mutation, Output, View
from tests.compare import backend
from tests.joint.traced import returned_by

Function = Callable[[Tensor], tuple[Tensor, ...]]


@torch.library.custom_op("lit_ort_tests::gappy", mutates_args=())
def gappy(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


@gappy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def weight() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()


def result_values(returned: Returned) -> list[Tensor]:
    output = next(node for node in returned.joint.module.graph.nodes if node.op == "output")
    return [node.meta["val"] for node in output.args[0][: len(returned.joint.results)]]


def test_contiguous_results_need_no_view() -> None:
    returned = returned_by(lambda w: (w.exp(), w.sum()), weight())
    assert returned.outputs == (Output("result", 0), Output("result", 1))
    assert returned.mutations == ()


def test_views_of_a_result_are_not_results() -> None:
    def function(w: Tensor) -> tuple[Tensor, ...]:
        hidden = w.exp()
        return hidden, hidden.view(-1), hidden[1:3], hidden.t(), hidden.unsqueeze(0).expand(2, 4, 6)

    returned = returned_by(function, weight())
    assert len(returned.joint.results) == 1
    assert returned.outputs == (
        Output("result", 0),
        Output("result", 0, view=View((24,), (1,), 0)),
        Output("result", 0, view=View((2, 6), (6, 1), 6)),
        Output("result", 0, view=View((6, 4), (1, 6), 0)),
        Output("result", 0, view=View((2, 4, 6), (0, 6, 1), 0)),
    )


def test_views_whose_base_is_not_returned_share_a_result() -> None:
    returned = returned_by(lambda w: (lambda hidden: (hidden[:, 2:], hidden.t()))(w.exp()), weight())
    assert [result.kind for result in returned.joint.results] == ["base"]
    assert returned.outputs == (
        Output("result", 0, view=View((4, 4), (6, 1), 2)),
        Output("result", 0, view=View((6, 4), (1, 6), 0)),
    )


def test_views_of_an_input() -> None:
    returned = returned_by(lambda w: (w.sum(), w[2:], w.t()), weight())
    assert returned.outputs == (
        Output("result", 0),
        Output("input", 0, view=View((2, 6), (6, 1), 12)),
        Output("input", 0, view=View((6, 4), (1, 6), 0)),
    )


def test_the_offset_of_a_view_is_relative_to_its_input() -> None:
    rows = torch.randn(6, 4)[2:]
    returned = returned_by(lambda x: (x.sum(), x[1:]), rows)
    assert returned.outputs[1] == Output("input", 0, view=View((3, 4), (4, 1), 4))


def test_a_result_in_another_memory_layout() -> None:
    """It is computed permuted to that layout, and a view restores its shape."""
    w = weight()
    returned = returned_by(lambda w: (w.t().exp(),), w)
    (value,) = result_values(returned)
    assert value.shape == (4, 6)
    assert value.is_contiguous()
    assert returned.outputs == (Output("result", 0, view=View((6, 4), w.t().exp().stride(), 0)),)
    tangent = next(n for n in returned.joint.module.graph.nodes if n.op == "placeholder" and n.name == "tangents_1")
    assert tangent.meta["val"].shape == (4, 6)


def double_a_parameter(x: Tensor, w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(2)


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        (lambda x, w: x.mul_(w.sum()), TRACKED),
        (double_a_parameter, DETACHED),
        (lambda x, w: x.mul_(2), NO_GRAD),
    ],
)
def test_mutated_inputs(change: Callable[[Tensor, Tensor], Any], mode: str) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        change(x, w)
        return ((x * w).sum(),)

    returned = returned_by(function, torch.randn(4, 6), weight())
    kinds = [result.kind for result in returned.joint.results]
    assert returned.mutations == (Mutation(0, kinds.index("mutation"), mode),)


def test_a_view_with_another_dtype_is_rejected() -> None:
    with pytest.raises(CaptureError, match=r"torch\.float32 view of a torch\.complex64 tensor"):
        returned_by(lambda w: (lambda z: (z, z.real))(torch.complex(w, w).exp()), weight())


def permuted(w: Tensor) -> tuple[Tensor, ...]:
    return (w.reshape(2, 2, 6).permute(2, 0, 1).exp(),)


def transposed_and_views(w: Tensor) -> tuple[Tensor, ...]:
    hidden = w.t().exp()
    return hidden, hidden[1:], hidden.t()


def overlapping(w: Tensor) -> tuple[Tensor, ...]:
    hidden = w.exp()
    return hidden[:3], hidden[1:]


def column(w: Tensor) -> tuple[Tensor, ...]:
    return (w.exp()[:, 1],)


def every_second_column_and_loss(w: Tensor) -> tuple[Tensor, ...]:
    return w.exp()[:, ::2], w.exp().sum()


def expanded(w: Tensor) -> tuple[Tensor, ...]:
    return (w.exp().unsqueeze(0).expand(3, 4, 6),)


def windows(w: Tensor) -> tuple[Tensor, ...]:
    return (w.exp().unfold(1, 3, 1),)


def chunks(w: Tensor) -> tuple[Tensor, ...]:
    return w.exp().chunk(2, 1)


def rows(w: Tensor) -> tuple[Tensor, ...]:
    return w.exp().unbind(0)


def chunks_and_their_base(w: Tensor) -> tuple[Tensor, ...]:
    hidden = w.exp()
    return *hidden.split([1, 5], 1), hidden


def a_view_and_its_detached_view(w: Tensor) -> tuple[Tensor, ...]:
    hidden = w.exp()
    view = hidden.view(-1)
    return view, hidden.view(-1).detach(), hidden[1:].detach()


def chunks_of_an_input(w: Tensor) -> tuple[Tensor, ...]:
    return w.chunk(2, 1)


def unsafe_chunks_of_an_input(w: Tensor) -> tuple[Tensor, ...]:
    return torch.unsafe_chunk(w, 2, 1)


def transposed_parts_of_an_input_and_loss(w: Tensor) -> tuple[Tensor, ...]:
    return *(part.t() for part in w.split([1, 5], 1)), w.exp().sum()


def rows_of_an_input_and_an_image(w: Tensor) -> tuple[Tensor, ...]:
    return *w.unbind(0), w.exp()


def parts_of_a_changed_input(w: Tensor) -> tuple[Tensor, ...]:
    return w.mul_(2).chunk(2, 1)


def shuffled_pixels(w: Tensor) -> tuple[Tensor, ...]:
    images = w.view(1, 4, 3, 2).repeat(2, 2, 1, 1).contiguous(memory_format=torch.channels_last)
    return (functional.pixel_shuffle(images, 2),)


def one_channel(w: Tensor) -> tuple[Tensor, ...]:
    images = w.view(1, 4, 3, 2).repeat(2, 1, 1, 1).contiguous(memory_format=torch.channels_last)
    return images[:, :1] * 2, functional.pixel_shuffle(images, 2), images[:, :1].transpose(1, 2).exp()


def rolled_images(w: Tensor) -> tuple[Tensor, ...]:
    """The fake result of `roll` has other strides than the real one."""
    return (w.view(2, 2, 3, 2).contiguous(memory_format=torch.channels_last).roll(1, 0).exp(),)


def normalized_sequences(w: Tensor) -> tuple[Tensor, ...]:
    """So has that of batch normalization."""
    return (functional.batch_norm(w.view(2, 3, 4).transpose(1, 2), None, None, training=True).relu(),)


def transposed_and_loss(w: Tensor) -> tuple[Tensor, ...]:
    return w.t().exp(), (w.t() * 2).tanh().sum()


OF_ONE_BASE = [column, every_second_column_and_loss, expanded, windows, chunks, rows, chunks_and_their_base]
OF_OPERATORS = [shuffled_pixels, one_channel, rolled_images, normalized_sequences]


@pytest.mark.parametrize(
    "function",
    [
        *(permuted, transposed_and_views, overlapping, transposed_and_loss, a_view_and_its_detached_view),
        *(OF_ONE_BASE + OF_OPERATORS),
    ],
)
def test_outputs_have_the_same_memory_layout_as_in_eager(function: Function) -> None:
    w = weight()
    actual, expected = torch.compile(function, backend=backend())(w), function(w)

    def layouts(values: tuple[Tensor, ...]) -> list[tuple[torch.Size, tuple[int, ...], bool]]:
        first = values[0].untyped_storage().data_ptr()
        return [(v.shape, v.stride(), v.untyped_storage().data_ptr() == first) for v in values]

    assert layouts(actual) == layouts(expected)
    factors = [torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape) for value in expected]
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference)
    tracked = [k for k, value in enumerate(expected) if value.requires_grad]
    assert tracked == [k for k, value in enumerate(actual) if value.requires_grad]
    gradients = [
        torch.autograd.grad([values[k] for k in tracked], w, [factors[k] for k in tracked])
        for values in (actual, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("function", [torch.frac, lambda x: x + 1, lambda x: x + x.detach().exp()])
def test_a_gradient_that_the_graph_passes_on_has_the_order_of_its_result(function: Callable[[Tensor], Tensor]) -> None:
    x = weight().detach().t().requires_grad_()
    factors = torch.linspace(0.5, 1.5, 24).view(6, 4)
    calls = (torch.compile(function, backend=backend()), function)
    torch.testing.assert_close(*(torch.autograd.grad(call(x), x, factors) for call in calls))


@pytest.mark.parametrize("function", [*OF_ONE_BASE, a_view_and_its_detached_view])
def test_writing_to_a_result_changes_those_that_share_its_memory(function: Function) -> None:
    w = weight().detach()
    actual, expected = torch.compile(function, backend=backend())(w), function(w)
    for values in (actual, expected):
        values[0][0] = 7.0
    torch.testing.assert_close(actual, expected)


OF_AN_INPUT = [
    chunks_of_an_input,
    unsafe_chunks_of_an_input,
    transposed_parts_of_an_input_and_loss,
    rows_of_an_input_and_an_image,
    parts_of_a_changed_input,
]


@pytest.mark.parametrize("function", OF_AN_INPUT)
def test_parts_of_an_input_share_its_memory(function: Function) -> None:
    layouts, gradients = [], []
    for call in (torch.compile(function, backend=backend()), function):
        w = weight()
        x = w * 1
        results = call(x)
        layouts.append([(v.stride(), v.storage_offset(), memory_of(v) == memory_of(x)) for v in results])
        gradients.append(torch.autograd.grad([(value * value).sum() for value in results], w))
    assert layouts[0] == layouts[1]
    torch.testing.assert_close(*gradients)


def test_parts_that_are_written_are_no_views() -> None:
    def function(w: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.unsafe_chunk(w * 2, 2, 1)
        return (first.sigmoid_() * second,)

    actual, expected = ([*call(weight())] for call in (torch.compile(function, backend=backend()), function))
    torch.testing.assert_close(actual, expected)


def test_a_result_with_gaps_that_is_no_view_of_a_value_of_the_graph_is_rejected() -> None:
    def function(w: Tensor) -> tuple[Tensor, ...]:
        return (gappy(w),)

    with pytest.raises(CaptureError, match=r"strides \(12, 2\) for the shape \(4, 6\) have gaps"):
        returned_by(function, weight().detach())
