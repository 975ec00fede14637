"""Steps that return a view of an input, for every operator that returns views and inputs of every memory layout.

python -m tests.joint.views             # all of them; prints differences from eager and counts
python -m tests.joint.views narrow      # those of the operators whose name contains a text
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lit_ort._compat.torch import memory_of
from lit_ort.errors import first_line_of
from tests.compare import backend
from tests.operators.op_db import FALLBACK, RAISES, RIGHT, WRONG

# Eager allows no change of one of several views that one operator returns; here it has its effect, and its gradient.
NO_ERROR = "no error"

# x: float[3, 4, 4]
OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "alias": torch.ops.aten.alias.default,
    "as_strided": lambda x: x.as_strided((2, 2), (x.stride(0), x.stride(2)), x.storage_offset()),
    "chunk": lambda x: x.chunk(2, 1),
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(0, 0, 1),
    "dsplit": lambda x: x.dsplit(2),
    "expand": lambda x: x[:1].expand(5, 4, 4),
    "flatten of a part": lambda x: x[0, 0:1].flatten(),
    "hsplit": lambda x: x.hsplit(2),
    "index None": lambda x: x[None, :, 1],
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, -1),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "select": lambda x: x.select(0, 1),
    "select twice": lambda x: x[1][2],
    "slice": lambda x: x[1:],
    "slice of columns": lambda x: x[:, 1:],
    "slice with a step": lambda x: x[..., ::2],
    "split": lambda x: x.split([1, 2]),
    "squeeze": lambda x: x[:1].squeeze(0),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "tensor_split": lambda x: x.tensor_split(2, 2),
    "transpose": lambda x: x.transpose(0, 1),
    "unbind": lambda x: x.unbind(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "view": lambda x: x.view(3, 4, 2, 2),
    "view_as": lambda x: x.view_as(x),
    "vsplit": lambda x: x[:2].vsplit(2),
    "two views": lambda x: (x[1:], x.transpose(0, 1)),
    "itself and a view": lambda x: (x, x[1]),
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: values(3, 4, 4),
    "permuted": lambda: values(4, 3, 4).permute(1, 2, 0),
    "sliced": lambda: values(5, 4, 8)[1:4, :, ::2],
    "expanded rows": lambda: values(1, 4, 4).expand(3, 4, 4),
    "expanded columns": lambda: values(3, 4, 1).expand(3, 4, 4),
    "expanded twice": lambda: values(4, 1).expand(3, 4, 4),
    "overlapping": lambda: values(20).as_strided((3, 4, 4), (4, 2, 1)),
}
INPUTS = ("leaf", "computed", "untracked")
USES = ("alone", "beside a loss", "loss inside", "changed", "changed without gradients")


def values(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def input_of(kind: str, layout: str) -> tuple[Tensor, Tensor]:
    """An input, and the leaf that it is computed from."""
    x = LAYOUTS[layout]()
    if kind == "computed":
        memory = torch.empty(0).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes() // 4,), (1,))
        leaf = memory.clone().requires_grad_()
        return (leaf * 1).as_strided(x.shape, x.stride(), x.storage_offset()), leaf
    x = x.detach().requires_grad_(kind == "leaf")
    return x, x


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def weighted(value: Tensor) -> Tensor:
    return (value * torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape)).square().sum()


def run(operator: Callable[[Tensor], Any], use: str, kind: str, layout: str, compile: Callable[..., Any]) -> Any:
    def step(x: Tensor) -> tuple[Any, ...]:
        views = tensors_of(operator(x))
        if use == "beside a loss":
            return (*views, x.sin().sum())
        if use == "loss inside":
            return (*views, sum(weighted(view) for view in views))
        return tuple(views)

    x, leaf = input_of(kind, layout)
    if kind == "computed":
        x.retain_grad()
    results = compile(step)(x)
    found: dict[str, Any] = {}
    for k, result in enumerate(results):
        found[f"result {k}"] = result.detach().clone()
        shares = memory_of(result) == memory_of(x)
        offset = result.storage_offset() - x.storage_offset() if shares else None
        found[f"layout {k}"] = (result.stride(), shares, offset, result.requires_grad)
    if use == "changed":
        results[0].mul_(3)
    elif use == "changed without gradients":
        with torch.no_grad():
            results[0].mul_(3)
    if use.startswith("changed"):
        found["input"] = x.detach().clone()
        found |= {f"changed {k}": result.detach().clone() for k, result in enumerate(results)}
    losses = [weighted(result) for result in (results[-1:] if use == "loss inside" else results)]
    losses = [loss for loss in losses if loss.requires_grad]
    if losses:
        sum(losses[1:], losses[0]).backward()
        found["gradient"] = leaf.grad
        found["strides of gradient"] = None if leaf.grad is None else leaf.grad.stride()
        if kind == "computed":
            found["gradient of input"] = x.grad
    return found


def outcome(operator: Callable[[Tensor], Any], use: str, kind: str, layout: str) -> tuple[str, str] | None:
    """How a step differs from eager; None if both raise an error."""
    try:
        expected = run(operator, use, kind, layout, lambda step: step)
    # Eager refuses some views and changes, by several errors.
    except Exception as error:
        expected = type(error)
    torch._dynamo.reset()
    engine = backend(fallback="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            actual = run(operator, use, kind, layout, lambda step: torch.compile(step, backend=engine))
        except Exception as error:
            return None if isinstance(expected, type) else (RAISES, first_line_of(error)[:200])
    if isinstance(expected, type):
        return NO_ERROR, f"eager raises {expected.__name__}"
    for name, value in expected.items():
        if not is_alike(actual[name], value):
            return WRONG, " ".join(f"{name}: {actual[name]}, in eager {value}".split())[:300]
    reasons = [graph.fallback for graph in engine.compile_log.graphs if graph.fallback is not None]
    return (FALLBACK, reasons[0]) if reasons else (RIGHT, "")


def is_alike(value: Any, reference: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(reference, Tensor):
        return value.shape == reference.shape and torch.allclose(value, reference, rtol=1e-5, atol=1e-6)
    return value == reference


def sweep(names: Iterable[str], layouts: Iterable[str] = LAYOUTS) -> Iterator[tuple[str, str, str]]:
    for name, use, kind, layout in itertools.product(names, USES, INPUTS, layouts):
        found = outcome(OPERATORS[name], use, kind, layout)
        if found is not None:
            yield f"{name}, {use}, {kind}, {layout}", *found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="")
    text = parser.parse_args().text
    counts: Counter[str] = Counter()
    for name, kind, detail in sweep(name for name in OPERATORS if text in name):
        counts[kind] += 1
        if kind != RIGHT:
            print(f"{kind:8} {name}: {detail[:200]}", flush=True)
    print(", ".join(f"{kind} {count}" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()
