"""Compiles samples of torch's databases of operators and modules with inputs and incoming gradients in several layouts.

    python -m tests.operators.layouts               # all operators and modules; prints failures and counts
    python -m tests.operators.layouts GroupNorm     # those whose name contains a text
    python -m tests.operators.layouts --part 3/32   # the fourth of 32 parts

Each sample is compared with eager in both forms: with the loss inside of the graph, and with gradients from outside.
Compared are the results, their strides, and all gradients. Where values differ from eager's, they may be as far from
those in float64 as eager's are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_unflatten

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend
from tests.operators.op_db import (
    FALLBACK,
    RAISES,
    RIGHT,
    SAMPLES,
    WRONG,
    Outcome,
    is_close,
    name_of,
    operators,
    other_dropout,
    outcomes_in_processes,
    weighted,
)

MODULE_SAMPLES = 4
# Modules and operators of many operators, with one sample.
LARGE = frozenset(
    {
        *("nn.Transformer", "nn.TransformerEncoder", "nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer"),
        *("nn.LSTM", "svd_lowrank", "pca_lowrank"),
    }
)
# Samples for which eager is no reference, by name and layout: its kernels read the memory of expanded values as if it
# were contiguous, and equal rows have no eigenvectors.
NO_REFERENCE = frozenset({("native_group_norm", "expanded"), ("masked.median", "expanded"), ("linalg.eig", "expanded")})
FUSED, SPLIT = "loss inside", "loss outside"


def permuted(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats.get(x.dim(), torch.contiguous_format))


def sliced(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(-1)], -1)[..., 0]


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


# Values of two or more dimensions in the layout; the others are sliced.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": channels_last,
    "permuted": permuted,
    "sliced": sliced,
    "expanded": expanded,
}


def in_layout(value: Any, layout: str) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() == 0 or not value.numel():
        return value
    laid_out = LAYOUTS[layout if value.dim() > 1 or layout != "permuted" else "sliced"](value.detach())
    return laid_out.requires_grad_(value.requires_grad)


def copy_of(value: Tensor) -> Tensor:
    """A leaf with the same strides and memory of its own."""
    if value.layout != torch.strided:
        return value.detach().clone().requires_grad_(value.requires_grad)
    memory = value.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype).set_(memory, value.storage_offset(), value.shape, value.stride())
    return copy.requires_grad_(value.requires_grad)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A call and its tensors in one layout; the call returns a list of tensors."""

    call: Callable[[Sequence[Tensor]], list[Tensor]]
    tensors: Sequence[Tensor]
    layout: str


def samples_of_operator(op: OpInfo) -> Iterator[Sample]:
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    count = 1 if name_of(op) in LARGE else SAMPLES
    for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=differentiable), count):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

        def call(arguments: Sequence[Any], spec: Any = spec, sample: Any = sample) -> Any:
            input, args, kwargs = tree_unflatten(list(arguments), spec)
            return sample.output_process_fn_grad(op.get_op()(input, *args, **kwargs))

        yield from _in_layouts(call, leaves)


def samples_of_module(info: ModuleInfo) -> Iterator[Sample]:
    torch.manual_seed(0)
    inputs = list(info.module_inputs_func(info, "cpu", torch.float32, True, True))
    # Neighbors differ least.
    count = 1 if info.name in LARGE else MODULE_SAMPLES
    for sample in random.Random(0).sample(inputs, min(len(inputs), count)):
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs)
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        forward = sample.forward_input
        leaves, spec = tree_flatten(([*module.parameters(), *module.buffers()], forward.args, forward.kwargs))

        def call(arguments: Sequence[Any], spec: Any = spec, module: Any = module, names: Any = tuple(names)) -> Any:
            values, args, kwargs = tree_unflatten(list(arguments), spec)
            return torch.func.functional_call(module, dict(zip(names, values, strict=True)), args, kwargs)

        yield from _in_layouts(call, leaves)


def _in_layouts(call: Callable[[Sequence[Any]], Any], leaves: Sequence[Any]) -> Iterator[Sample]:
    positions = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def results_of(tensors: Sequence[Tensor]) -> list[Tensor]:
        arguments = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            arguments[position] = tensor
        return [leaf for leaf in tree_flatten(call(arguments))[0] if isinstance(leaf, Tensor)]

    seen: set[Any] = set()
    for layout in LAYOUTS:
        tensors = [in_layout(leaves[k], layout) for k in positions]
        strides = tuple(t.stride() if t.layout == torch.strided else None for t in tensors)
        if strides not in seen and _runs(results_of, tensors):
            seen.add(strides)
            yield Sample(results_of, tensors, layout)


def _runs(call: Callable[[Sequence[Tensor]], list[Tensor]], tensors: Sequence[Tensor]) -> bool:
    try:
        run(SPLIT, [Sample(call, tensors, "")], lambda function: function)
    # Eager can raise any error for a layout that it doesn't support.
    except Exception:
        return False
    return True


def together(samples: Sequence[Sample], tensors: Sequence[Tensor]) -> list[Tensor]:
    remaining, results = list(tensors), []
    for sample in samples:
        results += sample.call(remaining[: len(sample.tensors)])
        remaining = remaining[len(sample.tensors) :]
    return results


def run(form: str, samples: Sequence[Sample], compile: Callable[..., Any]) -> dict[str, Any]:
    """Results, their strides, and the gradients for incoming gradients of several layouts."""
    copies = [copy_of(tensor) for sample in samples for tensor in sample.tensors]
    torch.manual_seed(0)

    def step(tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        results = together(samples, tensors)
        if form == SPLIT:
            return None, results
        parts = [weighted(r) for r in results if r.requires_grad]
        return (sum(parts[1:], parts[0]) if parts else None), results

    loss, results = compile(step)(copies)
    values: dict[str, Any] = {}
    for k, result in enumerate(results):
        values[f"result {k}"] = result.detach().clone()
        values[f"strides of result {k}"] = _strides(result)
    leaves = [(k, copy) for k, copy in enumerate(copies) if copy.requires_grad]
    roots = [r for r in results if r.requires_grad] if form == SPLIT else [loss] if loss is not None else []
    for layout in LAYOUTS if form == SPLIT else ("contiguous",):
        if roots and leaves:
            incoming = [None if form == FUSED else _incoming(root, layout) for root in roots]
            found = torch.autograd.grad(
                roots, [copy for _, copy in leaves], incoming, retain_graph=form == SPLIT, allow_unused=True
            )
            for (k, _), gradient in zip(leaves, found, strict=True):
                values[f"gradient of input {k} for {layout}"] = gradient
    return values


def _strides(result: Tensor) -> list[int] | None:
    """The strides of dimensions with more than one element; the others are arbitrary."""
    if result.layout != torch.strided or not result.numel():
        return None
    return [stride for stride, size in zip(result.stride(), result.shape, strict=True) if size > 1]


def _incoming(root: Tensor, layout: str) -> Tensor:
    values = torch.linspace(0.5, 1.5, root.numel(), dtype=root.real.dtype if root.is_complex() else root.dtype)
    return in_layout(values.reshape(root.shape).to(root.dtype), layout)


def difference(form: str, samples: Sequence[Sample]) -> tuple[str, str]:
    """The outcome of samples in one graph."""
    torch._dynamo.reset()
    expected = run(form, samples, lambda function: function)
    with other_dropout():
        again = run(form, samples, lambda function: function)
    engine = backend(fallback="warn")
    try:
        with dynamo_settings("step", strict=False):
            actual = run(form, samples, lambda function: torch.compile(function, backend=engine))
    # Any error is a failure, since eager raises none.
    except Exception:
        return RAISES, traceback.format_exc(limit=-1).strip().splitlines()[-1][:300]
    if actual.keys() != expected.keys():
        return WRONG, f"{form}: {sorted(actual.keys() ^ expected.keys())}"
    exact = functools.cache(lambda: run(form, [in_float64(sample) for sample in samples], lambda function: function))
    for name, value in expected.items():
        is_drawn = not _is_alike(again[name], value, exact=True)
        if not _is_alike(actual[name], value, shapes_only=is_drawn) and not _is_as_exact(name, actual, expected, exact):
            return WRONG, f"{form}, {name}: {_text(actual[name])}, in eager {_text(value)}"
    fallbacks = [graph.fallback for graph in engine.compile_log.graphs if graph.fallback is not None]
    return (FALLBACK, fallbacks[0][:300]) if fallbacks else (RIGHT, "")


def in_float64(sample: Sample) -> Sample:
    def converted(tensor: Tensor) -> Tensor:
        is_float = tensor.dtype is torch.float32 and tensor.layout == torch.strided
        return tensor.detach().double().requires_grad_(tensor.requires_grad) if is_float else tensor

    return dataclasses.replace(sample, tensors=[converted(tensor) for tensor in sample.tensors])


def _is_as_exact(name: str, actual: Any, expected: Any, exact: Callable[[], dict[str, Any]]) -> bool:
    """Whether a value is about as far from that in float64 as eager's is."""
    values = actual[name], expected[name]
    if not all(isinstance(value, Tensor) and value.dtype is torch.float32 for value in values):
        return False
    try:
        reference = exact()[name]
    # An operator without a float64 form.
    except RuntimeError:
        return False
    own, eagers = (float((value - reference).norm()) for value in values)
    return own <= 2 * eagers <= 0.1 * float(reference.norm())


def _text(value: Any) -> str:
    return " ".join(str(value).split())[:100]


def _is_alike(value: Any, reference: Any, exact: bool = False, shapes_only: bool = False) -> bool:
    if isinstance(value, Tensor) and reference is None:
        # Eager has no gradient for a value that it doesn't read; a graph has zeros.
        return not value.any()
    if not isinstance(value, Tensor) or not isinstance(reference, Tensor):
        return value == reference
    return is_close(value, reference, exact, shapes_only)


def outcomes_of(subject: OpInfo | ModuleInfo) -> list[Outcome]:
    samples = list(samples_of_module(subject) if isinstance(subject, ModuleInfo) else samples_of_operator(subject))
    samples = [sample for sample in samples if (_name(subject), sample.layout) not in NO_REFERENCE]
    outcomes: list[Outcome] = []
    for form in (FUSED, SPLIT) if samples else ():
        kind, detail = difference(form, samples)
        if kind == RIGHT:
            continue
        for sample in samples:
            kind, detail = difference(form, [sample])
            if kind != RIGHT:
                outcomes.append(Outcome(f"{_name(subject)}, {sample.layout}, {form}", kind, detail))
    return outcomes or [Outcome(_name(subject), RIGHT)]


def _name(subject: OpInfo | ModuleInfo) -> str:
    return subject.name if isinstance(subject, ModuleInfo) else name_of(subject)


def subjects(text: str = "") -> list[OpInfo | ModuleInfo]:
    """The modules and operators whose name contains a text."""
    modules = [info for info in module_db if text in info.name and "Lazy" not in info.name]
    return [*modules, *operators(text)]


def sweep(text: str = "", part: int = 0, parts: int = 1) -> Iterator[Outcome]:
    yield from outcomes_in_processes(subjects(text)[part::parts], outcomes_of, _name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="", help="a text that the names contain")
    parser.add_argument("--part", default="0/1", help="for example, 3/16: the fourth of sixteen parts")
    parser.add_argument("--json", type=Path, help="a file to which the outcomes are appended, one in each line")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    counts: Counter[str] = Counter()
    for outcome in sweep(options.text, part, parts):
        counts[outcome.kind] += 1
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        if outcome.kind != RIGHT:
            print(f"{outcome.kind:8} {outcome.name}: {outcome.detail}", flush=True)
    print(", ".join(f"{kind} {count}" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()
