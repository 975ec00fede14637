"""Random training steps as source code: operators, views, in-place writes, no_grad, autocast, graph breaks, dtypes.

A statement is kept if eager runs it and its values are not large, so that rounding has no large effect.
"""

from __future__ import annotations

import dataclasses
import random
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.steps.case import Case, Net

LARGEST = 1e3
RESULTS = (
    "{a}.tanh()",
    "{a}.sigmoid()",
    "{a}.relu()",
    "F.gelu({a})",
    "F.silu({a})",
    "F.softplus({a})",
    "F.leaky_relu({a}, 0.1)",
    "-{a}",
    "({a}.abs() + 0.5).sqrt()",
    "({a} * 0.1).exp()",
    "{a}.clamp(-0.8, 0.9)",
    "{a}.sin() * 2",
    "{a} ** 2",
    "{a}.softmax(-1)",
    "{a}.log_softmax(0)",
    "{a}.cumsum(0)",
    "{a}.sort(-1)[0]",
    "{a}.topk(2, 0)[0]",
    "{a}.flip(0)",
    "{a}.roll(1, -1)",
    "{a}.tril()",
    "{a}.sum(0)",
    "{a}.mean(-1, keepdim=True)",
    "{a}.amax(0)",
    "{a}.max(-1)[0]",
    "{a}.std(0)",
    "{a}.norm(dim=-1)",
    "{a}.logsumexp(0)",
    "{a}.mean()",
    "{a}.prod(0)",
    "F.normalize({a}, dim=-1)",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "F.dropout({a}, 0.0)",
    "{a}.clone()",
    "{a}.float()",
    "{a}.double()",
    "{a}.bfloat16()",
    "{a} > 0.1",
    "{a}.argmax(-1)",
    "{a}.to(torch.int64)",
    "m.first({a})",
    "m.norm({a})",
    "{a} * m.scale",
    "{a} @ m.first.weight",
    "{a} * steps",
    "{a} * {a}.shape[0]",
    "torch.zeros_like({a})",
    "torch.full({a}.shape, 0.3)",
    "{a} + {b}",
    "{a} - 2 * {b}",
    "{a} * {b}",
    "{a} / ({b}.abs() + 1)",
    "torch.maximum({a}, {b})",
    "torch.where({a} > {b}, {a}, {b})",
    "torch.where({a} > 0, {b}, 0.5)",
    "{a}.masked_fill({b} > 0, 0.25)",
    "{a}.lerp({b}, 0.3)",
    "{a} @ {b}",
    "{a} @ {b}.transpose(-1, -2)",
    "torch.einsum('ij,kj->ik', {a}, {b})",
    "torch.cat([{a}, {b}], 0)",
    "torch.stack([{a}, {b}], -1)",
    "torch.outer({a}.flatten()[:4], {b}.flatten()[:4])",
    "F.mse_loss({a}, {b})",
    "F.cross_entropy({a}, index[: len({a})] % {a}.shape[-1])",
    "{a}[index]",
    "{a}[{b} > 0]",
    "{a}.index_select(0, index)",
    "{a}.index_add(0, index, {b}[: len(index)])",
    "{a}.scatter_add(0, index[:, None].expand(-1, {a}.shape[-1]), {b}[: len(index)])",
    "F.embedding(index, {a})",
    "{a}.gather(-1, index[: len({a})].unsqueeze(-1) % {a}.shape[-1])",
    "{a}.detach()",
    "m.batch({a})",
    "torch.stack([{a}] * 4, 1).unsqueeze(-1).contiguous(memory_format=torch.channels_last)",
    "F.group_norm({a}, 2)",
    "F.instance_norm({a})",
    "F.max_pool2d({a}, (2, 1))",
    "F.pixel_shuffle({a}, 2)",
    "F.interpolate({a}, scale_factor=2.0)",
    "F.scaled_dot_product_attention({a}, {a}, {a})",
)
VIEWS = (
    "{a}.t()",
    "{a}[1:]",
    "{a}[..., ::2]",
    "{a}[:, 1]",
    "{a}.unsqueeze(0)",
    "{a}.squeeze()",
    "{a}.view(-1)",
    "{a}.flatten()",
    "{a}.reshape(-1, 2)",
    "{a}.expand(2, *{a}.shape)",
    "{a}.chunk(2, -1)[1]",
    "{a}.narrow(0, 0, 2)",
    "{a}.diagonal()",
    "{a}.contiguous()",
    "{a}.unbind(0)[-1]",
    "{a}.view_as({b})",
)
WRITES = (
    "{a}.add_(1)",
    "{a}.mul_(0.5)",
    "{a}.relu_()",
    "{a}.clamp_(-1, 1)",
    "{a}.zero_()",
    "{a}.fill_(0.3)",
    "{a}.add_({b})",
    "{a}.mul_({b})",
    "{a}.copy_({b})",
    "{a}[0] = 0.5",
    "{a}[..., 0] = {b}[..., 0]",
    "{a}[{b} > 0] = 0.25",
    "{a}[{b} > 0] = {b}.mean()",
    "{a}[1:] += {b}[1:]",
    "{a}[index] = 0.75",
    "{a}.masked_fill_({b} > 0.5, 1.5)",
    "{a}.index_add_(0, index, {b}[: len(index)].clone())",
    "m.total.add_({a}.detach().float().mean())",
    "m.total = m.total * 0.9 + {a}.detach().float().sum() * 0.1",
    "m.running.copy_({a}.detach())",
    "m.steps += 1",
    "m.batch({a})",
    "m.instance({a}.unsqueeze(0))",
)
BREAKS = (
    "torch._dynamo.graph_break()",
    "steps = {a}.float().mean().item()",
    "steps = {a}.shape[0] / 4",
    "steps = m.steps",
    "steps = 2.0 if {a}.sum() > 0 else 0.5",
)
REGIONS = (
    "",
    "with torch.no_grad(): ",
    "with torch.autocast('cpu', torch.bfloat16): ",
    "with torch.enable_grad(): ",
    "with torch.no_grad(), torch.enable_grad(): ",
)


def _backward_of_others(results: tuple[Tensor, ...], keeps_graph: bool) -> None:
    """Starts at all results but the loss, with unequal gradients of their elements."""
    roots = [value for value in results[1:] if value.requires_grad and value.grad_fn is not None]
    if roots:
        weights = [torch.linspace(0.5, 1, root.numel()).view(root.shape).to(root.dtype) for root in roots]
        torch.autograd.backward(roots, weights, retain_graph=keeps_graph)


def _others_then_loss(results: tuple[Tensor, ...]) -> None:
    _backward_of_others(results, keeps_graph=True)
    results[0].backward()


def _loss_twice(results: tuple[Tensor, ...]) -> None:
    results[0].backward(retain_graph=True)
    results[0].backward()


BACKWARDS: dict[str, Callable[[tuple[Tensor, ...]], None]] = {
    "loss": lambda results: results[0].backward(),
    "others": lambda results: _backward_of_others(results, keeps_graph=False),
    "others, then the loss": _others_then_loss,
    "the loss twice": _loss_twice,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A step and its inputs.

    Args:
        source: the source of a function `step(m, x, y, index)`.
        tracks_inputs: whether `y` requires a gradient.
        rows: the batch size of each call.
        layouts: the memory layouts of `x` and `y`.
        backward: the name of what computes gradients, in `BACKWARDS`.
    """

    source: str
    tracks_inputs: bool
    rows: tuple[int, ...]
    layouts: tuple[str, str] = ("contiguous", "contiguous")
    backward: str = "loss"

    def case(self) -> Case:
        """A case of the step; modules and batches are equal in all cases of a program."""
        step = _function(self.source)
        batches = [_batch(rows, self.tracks_inputs, self.layouts) for rows in self.rows]
        return Case(_module(step), batches, BACKWARDS[self.backward])


def draw_program(draw: random.Random) -> Program:
    """Draws a random program."""
    tracks_inputs = draw.random() < 0.3
    first, second = draw.choices(tuple(LAYOUTS), (6, 1, 1, 1), k=2)
    while True:
        writer = _Writer(draw, tracks_inputs, (first, second))
        for _ in range(draw.randint(3, 14)):
            writer.write()
        if writer.is_differentiable():
            break
    rows = (4, 4) if draw.random() < 0.6 else (4, 6)
    backward = draw.choices(tuple(BACKWARDS), (8, 1, 1, 1))[0]
    return Program(writer.source(), tracks_inputs, rows, (first, second), backward)


class _Writer:
    """Writes a function line by line; keeps the lines that eager can run."""

    def __init__(self, draw: random.Random, tracks_inputs: bool, layouts: tuple[str, str]) -> None:
        self._draw = draw
        x, y, index = _batch(4, tracks_inputs, layouts)
        self._names = {"m": _module(None), "x": x, "y": y, "index": index, "steps": 1.5, "torch": torch, "F": F}
        self._tensors = ["x", "y"]
        self._lines: list[str] = []

    def write(self) -> None:
        kinds = (self._result, self._view, self._writing, self._break)
        kind = self._draw.choices(kinds, (10, 4, 4, 1))[0]
        for _ in range(8):
            if kind():
                return

    def is_differentiable(self) -> bool:
        """Whether the backward of all values runs, so that no in-place change overwrites a value that it needs.

        A compiled graph computes the gradients of all its inputs, even if the loss depends on a part of them only.
        """
        values = [self._names[name] for name in self._tensors]
        try:
            sums = [value.double().sum() for value in values if value.requires_grad and value.grad_fn is not None]
            torch.stack([*sums, self._names["m"].scale.sum().double()]).sum().backward()
        except RuntimeError:
            return False
        return True

    def source(self) -> str:
        """The source of the function; its results are a loss and up to two other values."""
        floats = [name for name in self._tensors if self._names[name].is_floating_point()]
        summands = self._draw.sample(floats, min(len(floats), self._draw.randint(1, 4)))
        terms = " + ".join(f"{name}.double().mean()" for name in summands)
        others = self._draw.sample(self._tensors, self._draw.choice((0, 0, 1, 2)))
        results = ", ".join(["loss", *others])
        lines = ["steps = 1.5", *self._lines, f"loss = ({terms} + m.scale.sum()).float()", f"return ({results},)"]
        return "def step(m, x, y, index):\n" + "".join(f"    {line}\n" for line in lines)

    def _result(self) -> bool:
        return self._define(RESULTS)

    def _view(self) -> bool:
        return self._define(VIEWS)

    def _define(self, templates: Sequence[str]) -> bool:
        name = f"v{len(self._tensors)}"
        if not self._run(f"{name} = {self._filled(templates)}"):
            return False
        self._tensors.append(name)
        return True

    def _writing(self) -> bool:
        line = self._filled(WRITES)
        target = self._names[re.split(r"[.\[]", line)[0]]
        # A write to elements that share their memory is undefined.
        return not (isinstance(target, Tensor) and _has_overlap(target)) and self._run(line)

    def _break(self) -> bool:
        return self._run(self._filled(BREAKS))

    def _filled(self, templates: Sequence[str]) -> str:
        # Recent values are used more often, so that statements build on each other.
        first, second = (self._draw.choice(self._tensors[-self._draw.randint(1, 8) :]) for _ in range(2))
        return self._draw.choice(templates).format(a=first, b=second)

    def _run(self, line: str) -> bool:
        line = self._draw.choices(REGIONS, (16, 2, 1, 1, 1))[0] + line
        before = dict(self._names)
        try:
            exec(line, self._names)
            is_valid = all(_is_small(value) for value in self._names.values())
        # Statements that eager rejects are not used.
        except Exception:
            is_valid = False
        if not is_valid:
            self._names = before
            return False
        self._lines.append(line)
        return True


def _has_overlap(value: Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _is_small(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.numel() == 0:
        return not isinstance(value, float) or abs(value) < LARGEST
    return value.numel() < 500 and bool((value.detach().abs() < LARGEST).all())


def _function(source: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(source, "<program>", "exec"), names)
    step = names["step"]
    assert isinstance(step, types.FunctionType)
    return step


def _module(step: Any) -> Net:
    torch.manual_seed(0)
    module = Net(
        step,
        norm=nn.LayerNorm(8),
        batch=nn.BatchNorm1d(8),
        instance=nn.InstanceNorm1d(4, track_running_stats=True),
        scale=nn.Parameter(torch.rand(8)),
        total=torch.zeros(()),
        running=torch.zeros(4, 8),
    )
    module.__dict__["steps"] = 1.5
    return module


# Copies of a matrix in memory layouts of their own.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "permuted": lambda value: value.t().contiguous().t(),
    "sliced": lambda value: torch.stack([value, value], -1)[..., 0],
    "expanded": lambda value: value[:1].clone().expand(value.shape),
}


def _batch(rows: int, tracks_inputs: bool, layouts: tuple[str, str]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, y = (LAYOUTS[layout](torch.randn(rows, 8, generator=generator)) for layout in layouts)
    return x, y.requires_grad_(tracks_inputs), torch.randint(4, (4,), generator=generator)
