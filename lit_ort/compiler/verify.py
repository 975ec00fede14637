"""Compares a compiled graph with eager on one call's own inputs, dropout off in both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_ort.compiler.kernel_nodes import call_at, kernel_of
from lit_ort.compiler.kernels.attention import RATIO_POSITIONS as ATTENTION_RATIOS
from lit_ort.compiler.kernels.dropout import RATIO_POSITIONS as DROPOUT_RATIOS
from lit_ort.compiler.signature import tensors_of
from lit_ort.errors import LitOrtWarning, VerificationError
from lit_ort.runtime.random import RANDOM_OPERATORS

WORST = 5
# Gradients smaller than this beside the largest one are measured against this floor: with the default tolerance, what
# passes is then an error of 1e-7 of the largest, which is float32's rounding. The gradient of an attention's key bias,
# zero but for rounding, is of that size.
FLOOR = 1e-3
# In bfloat16, errors may be so many times those of eager autocast: two ways of rounding differ by their sum at least.
SLACK = 4


class DropoutOff(TorchDispatchMode):
    """Eager dropout keeps everything: its Bernoulli draws come out as the probability it then divides by."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if func is torch.ops.aten.bernoulli_.float:
            probability = args[1] if len(args) > 1 else 0.5
            return args[0].fill_(probability)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))


def without_dropout(model: ir.Model) -> ir.Model:
    """A copy of a training model in which every Dropout has ratio 0."""
    copy = model.clone()
    name = "lit_ort_no_dropout"
    ratio = ir.Value(name=name, const_value=ir.tensor(0.0, dtype=ir.DataType.FLOAT, name=name))
    ratio.dtype, ratio.shape = ir.DataType.FLOAT, ir.Shape([])
    copy.graph.register_initializer(ratio)
    positions = DROPOUT_RATIOS | ATTENTION_RATIOS
    for node in copy.graph:
        position = positions.get(kernel_of(node) or "")
        if position is not None:
            node.replace_input_with(position, ratio)
        elif node.op_type == "Dropout":
            node.replace_input_with(1, ratio)
        elif node.op_type == "DropoutGrad":
            node.replace_input_with(2, ratio)
        elif node.op_type in RANDOM_OPERATORS or ((call := call_at(node)) is not None and call.draws):
            warnings.warn(
                f"verification can't compare {node.op_type} ({node.name}): its draws differ from eager's",
                LitOrtWarning,
                stacklevel=2,
            )
    return copy


def require_agreement(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    names: Sequence[str],
    tolerance: float,
    graph: str,
    exact: Callable[..., Any] | None = None,
) -> tuple[str, ...]:
    """Compares outputs and gradients; returns the worst, each with its error.

    Args:
        eager, compiled: two ways to run one graph.
        arguments: one call's inputs; they are not touched.
        names: the name of every tensor among `arguments`, in order.
        tolerance: largest relative error in the 2-norm.
        graph: name for the message.
        exact: a third way, in float32, for a graph in bfloat16: errors are measured against it, and `SLACK` times those
            of `eager` are accepted beside the tolerance.

    Raises:
        VerificationError: names the worst outputs and gradients.
    """
    with DropoutOff():
        rounded = _outputs_and_gradients(eager, arguments, names)
        expected = rounded if exact is None else _outputs_and_gradients(exact, arguments, names)
    actual = _outputs_and_gradients(compiled, arguments, names)
    largest = max((float(t.norm()) for name, t in expected.items() if name.startswith("gradient")), default=0.0)

    def error_of(found: dict[str, torch.Tensor], name: str) -> float:
        return _relative_error(expected[name], found.get(name), FLOOR * largest if "gradient" in name else 0.0)

    errors = {name: error_of(actual, name) for name in expected}
    allowed = {name: tolerance + SLACK * error_of(rounded, name) for name in expected}
    ordered = sorted(errors, key=lambda name: -errors[name])
    wrong = [name for name in ordered if not errors[name] <= allowed[name]]
    if wrong:
        listed = "; ".join(f"{name} {errors[name]:.1e}" for name in wrong[:WORST])
        raise VerificationError(
            f"{graph} disagrees with eager in {len(wrong)} of {len(errors)} values beyond {tolerance:.0e}: {listed}. "
            "Don't train on; report the graph (dump_dir keeps its stages) and use strategy='auto' meanwhile."
        )
    return tuple(f"{name} {errors[name]:.1e}" for name in ordered[:WORST])


def _outputs_and_gradients(
    function: Callable[..., Any], arguments: Sequence[Any], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    copies = [
        argument.detach().clone().requires_grad_(argument.requires_grad)
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in arguments
    ]
    outputs = [output for output in function(*copies) if isinstance(output, torch.Tensor)]
    values = {f"output {k}": output.detach() for k, output in enumerate(outputs)}
    roots = [output for output in outputs if output.requires_grad and output.grad_fn is not None]
    leaves = {name: t for name, t in zip(names, tensors_of(copies), strict=True) if t.requires_grad}
    if roots and leaves:
        weights = [_weights(root) for root in roots]
        gradients = torch.autograd.grad(roots, list(leaves.values()), weights, allow_unused=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            values[f"gradient of {name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return values


def _weights(root: torch.Tensor) -> torch.Tensor:
    """Fixed, uneven output gradients, so that errors can't cancel."""
    if root.dim() == 0:
        return root.new_ones(())
    return torch.linspace(0.5, 1.5, root.numel(), dtype=root.dtype).reshape(root.shape)


def _relative_error(expected: torch.Tensor, actual: torch.Tensor | None, floor: float) -> float:
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    wide = torch.float32 if torch.bfloat16 in (expected.dtype, actual.dtype) else expected.dtype
    expected, actual = expected.to(wide), actual.to(wide)
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, actual) else float("inf")
    same = torch.equal(expected.nan_to_num(), actual.nan_to_num()) if not torch.isfinite(expected).all() else False
    if same:
        return 0.0
    norm = max(float(expected.norm()), floor, torch.finfo(expected.dtype).tiny)
    return float((actual - expected).norm()) / norm
