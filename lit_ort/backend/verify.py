"""Compares a compiled graph with eager on the inputs of one call, with dropout off in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import device_of
from lit_ort._compat.torch import TorchDispatchMode
from lit_ort._compat.torch_distributed import has_collectives
from lit_ort._compat.torch_fx import inputs_of
from lit_ort.backend.eager import in_float32, in_float64, run_in_eager
from lit_ort.backend.executable import Executable
from lit_ort.backend.explanation import CompileLog
from lit_ort.capture.names import readable_name
from lit_ort.capture.numbers import NumberedGraph
from lit_ort.errors import VerificationError
from lit_ort.options import BF16_MIXED, ORTOptions
from lit_ort.runtime.program import Signature, tensors_of
from lit_ort.runtime.random import WITHOUT_DROPOUT, SeedSource, draw_from, seeded, without_dropout

WORST = 5
# The errors of gradients whose norm is less than this fraction of the largest one are relative to this fraction. With
# the default tolerance they may then be 1e-7 of the largest, float32's rounding error. The gradient of the key bias of
# an attention, which is zero up to rounding, is that small.
FLOOR = 1e-3
# Errors relative to a wider dtype may be this many times eager's: two ways to round differ by at least their sum.
SLACK = 4
# Eager runs of inputs and parameters that differ by some units in the last place, whose errors decide at last.
_PERTURBATIONS, _UNITS = 4, 4


class DropoutOff(TorchDispatchMode):
    """Makes eager draw the numbers of a session that runs under `without_dropout`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return WITHOUT_DROPOUT.get(func, func)(*args, **(kwargs or {}))


class Check:
    """Compares runs of a graph with eager, with dropout off in both: the first run, and every n-th if requested.

    Args:
        executable: the compiled graph.
        graph, original: the graph that it was compiled from, with separated numbers and as Dynamo created it.
        name: the graph's name, for messages.
        options: select the runs and the tolerance.
        compile_log: records the results.
    """

    def __init__(
        self,
        executable: Executable,
        graph: NumberedGraph,
        original: fx.GraphModule,
        name: str,
        options: ORTOptions,
        compile_log: CompileLog,
    ) -> None:
        self._executable, self._graph, self._original = executable, graph, original
        self._name, self._options, self._compile_log = name, options, compile_log
        self._runs = 0

    def before_run(self, arguments: Sequence[Any]) -> None:
        """Counts a run, and compares it if it is due. The step's random numbers stay the same.

        Raises:
            VerificationError: names the values with the largest errors.
        """
        every = self._options.verify_every_n_steps
        if self._runs == 0 or (every is not None and self._runs % every == 0):
            with draw_from(SeedSource(torch.Generator())), without_dropout():
                worst = self._compare(arguments)
            self._executable.forget_wanted()
            self._compile_log.note_verification(self._name, worst)
        self._runs += 1

    def _compare(self, arguments: Sequence[Any]) -> tuple[str, ...]:
        original, precision = self._original, self._options.precision
        signature = self._executable.signature
        low = BF16_MIXED in signature.precisions
        names = [readable_name(str(n.target)) for n in inputs_of(original.graph)]
        return require_agreement(
            lambda *inputs: run_in_eager(original, inputs, precision),
            self._compiled,
            arguments,
            names=[name for name, argument in zip(names, arguments, strict=True) if isinstance(argument, torch.Tensor)],
            tolerance=self._options.verify_tolerance,
            graph=self._name,
            exact=lambda *inputs: (in_float32 if low else in_float64)(original, inputs),
            low=low,
            together=has_collectives(original.graph),
            root=_root(signature),
        )

    def _compiled(self, *arguments: Any) -> tuple[Any, ...]:
        tensors, _, numbers = self._graph.arguments(arguments)
        return self._executable(tensors, numbers)


def require_agreement(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    names: Sequence[str],
    tolerance: float,
    graph: str,
    exact: Callable[..., Any],
    low: bool = False,
    together: bool = False,
    root: int | None = None,
) -> tuple[str, ...]:
    """Compares outputs and gradients, and returns those with the largest errors.

    Where float32 disagrees with eager, both are compared with float64: each can be far from the other because a step
    amplifies rounding errors. A ReLU of a value that is zero up to rounding has a gradient or none, so that eager's
    errors are then also those of inputs that differ by rounding. 16-bit values may be rounded to either neighbour.

    Args:
        eager, compiled: run the graph.
        arguments: the inputs of one call, which are not changed.
        names: the name of every tensor among `arguments`, in order.
        tolerance: the largest relative error in the 2-norm.
        graph: the graph's name, for the message.
        exact: runs the graph in a wider dtype. Errors are relative to it, and `SLACK` times the errors of `eager` are
            accepted in addition to the tolerance.
        low: whether the graph is in bfloat16, so that it is compared with `exact` from the start.
        together: whether all ranks run the graph together, which has collectives: then all comparisons are made, since
            the ranks can disagree about which are needed.
        root: the output at which the backward starts; None for all that require a gradient.

    Raises:
        VerificationError: names the outputs and gradients with the largest errors.
    """
    rounded = _outputs_and_gradients(eager, arguments, names, root, DropoutOff())
    actual = _outputs_and_gradients(compiled, arguments, names, root)
    expected = _outputs_and_gradients(exact, arguments, names, root, DropoutOff()) if low else rounded
    errors, wrong = _compared(expected, [rounded], actual, tolerance)
    if (wrong or together) and not low:
        expected = _exact_or(rounded, lambda: _outputs_and_gradients(exact, arguments, names, root, DropoutOff()))
        errors, wrong = _compared(expected, [rounded], actual, tolerance)
    if (wrong or together) and not low:
        others = (_perturbed(arguments, seed) for seed in range(_PERTURBATIONS))
        roundings = [rounded, *(_outputs_and_gradients(eager, one, names, root, DropoutOff()) for one in others)]
        errors, wrong = _compared(expected, roundings, actual, tolerance)
    if wrong:
        listed = "; ".join(f"{name} {errors[name]:.1e}" for name in wrong[:WORST])
        raise VerificationError(
            f"{graph} disagrees with eager in {len(wrong)} of {len(errors)} values beyond {tolerance:.0e}: {listed}. "
            "Stop training; report the graph (dump_dir writes its stages), and use strategy='auto' meanwhile."
        )
    return tuple(f"{name} {errors[name]:.1e}" for name in list(errors)[:WORST])


Values = dict[str, torch.Tensor]


def _compared(
    expected: Values, roundings: Sequence[Values], actual: Values, tolerance: float
) -> tuple[dict[str, float], list[str]]:
    """The errors of the session's values, the largest first, and the names of those that are wrong.

    Args:
        roundings: eager's values, and those of inputs that differ by rounding.
    """
    largest = max((float(t.norm()) for name, t in expected.items() if name.startswith("gradient")), default=0.0)

    def error_of(values: Values, name: str) -> float:
        return _relative_error(expected[name], values.get(name), FLOOR * largest if "gradient" in name else 0.0)

    errors = {name: error_of(actual, name) for name in expected}
    ordered = dict(sorted(errors.items(), key=lambda item: -item[1]))
    allowed = {
        name: tolerance + SLACK * max(error_of(one, name) for one in roundings) + _unit_of_16_bits(value)
        for name, value in roundings[0].items()
    }
    return ordered, [name for name, error in ordered.items() if not error <= allowed[name]]


def _perturbed(arguments: Sequence[Any], seed: int) -> list[Any]:
    """Arguments whose elements of float32 and float64 differ by rounding."""

    def perturbed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
            return value
        noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)).to(value) * 2 - 1
        changed = value.detach() * (1 + _UNITS * torch.finfo(value.dtype).eps * noise)
        return changed.requires_grad_(value.requires_grad)

    return [perturbed(argument) for argument in arguments]


def _unit_of_16_bits(value: torch.Tensor) -> float:
    """The distance between neighbouring numbers around 1 of a 16-bit dtype, to one of which results are rounded."""
    is_narrow = value.is_floating_point() and value.dtype.itemsize == 2
    return torch.finfo(value.dtype).eps if is_narrow else 0.0


def _exact_or(rounded: Values, exact: Callable[[], Values]) -> Values:
    """The values in the wider dtype; those of eager if the graph doesn't run in it."""
    try:
        return exact()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return rounded


def _root(signature: Signature) -> int | None:
    """The output that training starts the backward of a fused graph at."""
    tracked = ((k, o) for k, o in enumerate(signature.outputs) if not (o.detached or o.untracked))
    return next((k for k, output in tracked if output.source == "result" and output.index == signature.loss), None)


def _outputs_and_gradients(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    names: Sequence[str],
    root: int | None,
    mode: AbstractContextManager[Any] | None = None,
) -> Values:
    copies = [
        argument.detach().clone().requires_grad_(argument.requires_grad)
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in arguments
    ]
    device = device_of(tensors_of(arguments))
    with seeded(0, device=device), nullcontext() if mode is None else mode:
        returned = function(*copies)
        outputs = [output for output in returned if isinstance(output, torch.Tensor)]
        values = {f"output {k}": output.detach() for k, output in enumerate(outputs)}
        starts = outputs if root is None else [returned[root]]
        roots = [output for output in starts if output.requires_grad and output.grad_fn is not None]
        leaves = {name: t for name, t in zip(names, tensors_of(copies), strict=True) if t.requires_grad}
        if roots and leaves:
            weights = [_weights(root) for root in roots]
            gradients = torch.autograd.grad(roots, list(leaves.values()), weights, allow_unused=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                values[f"gradient of {name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return values


def _weights(root: torch.Tensor) -> torch.Tensor:
    """Fixed, unequal output gradients, so that errors can't cancel."""
    if root.dim() == 0:
        return root.new_ones(())
    return torch.linspace(0.5, 1.5, root.numel(), dtype=root.dtype).reshape(root.shape)


def _relative_error(expected: torch.Tensor, actual: torch.Tensor | None, floor: float) -> float:
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    if expected.is_complex() and actual.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    wide = torch.float32 if torch.bfloat16 in (expected.dtype, actual.dtype) else expected.dtype
    expected, actual = expected.to(wide), actual.to(wide)
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, actual) else float("inf")
    finite = expected.isfinite()
    if not finite.all():
        # Masked logits, for example: the norm is of the others.
        same = (expected == actual) | (expected.isnan() & actual.isnan())
        if not (same | finite).all():
            return float("inf")
        expected, actual = expected[finite], actual[finite]
    norm = max(float(expected.norm()), floor, torch.finfo(expected.dtype).tiny)
    return float((actual - expected).norm()) / norm
