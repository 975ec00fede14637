"""Private interfaces of Dynamo: its settings, its callbacks, and its reports of the recompile limit."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.external_utils
from torch._dynamo import guards, trace_rules
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import Unsupported, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import (
    AutogradFunctionVariable,
    BaseListVariable,
    NumpyNdarrayVariable,
    OptimizerVariable,
    SkipFunctionVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    VariableTracker,
    builtin,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch.autograd.graph import get_gradient_edge
from torch.backends import cudnn
from torch.distributions import constraints, kl
from torch.distributions.utils import lazy_property
from torch.fx import _symbolic_trace
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.utils import rnn

from lit_ort._compat import packed_sequences
from lit_ort._compat.ctc_losses import ctc_loss
from lit_ort._compat.deferred_calls import READ_ATTRIBUTE, replace_method, tensor_method
from lit_ort._compat.imports import when_imported
from lit_ort._compat.patching import replaced, replaced_entry
from lit_ort._compat.torch_functorch import is_differentiating

# Reports the recompile limit, and each function that could not be traced.
FRAME_LOGGER = "torch._dynamo.convert_frame"
_LIMIT_LINE = "_dynamo hit config"
# One thread at a time traces: tracing changes tables of torch and flags of the process. Reentrant.
COMPILE_LOCK = compile_lock
# The file of the functions that call a library's module which is compiled itself.
MODULE_CALLS: str = torch._dynamo.external_utils.__file__
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
# Logs thirteen lines of advice at the first `item()` of a step in the process.
SCALAR_LOGGER = "torch._dynamo.variables.tensor"
# In the metadata of a node of Dynamo's graph: the part that its value has in what ends the graph, if that is one of
# `torch.autograd.grad`, `backward`, `register_hook`, `retain_grad` or `grad_fn`.
PART_IN_GRADIENT = "lit_ort_part_in_gradient"
INPUT, DIFFERENTIABLE, WATCHED, NODE = "input", "differentiable", "watched", "node"
_SCALAR_LINE = "Graph break from `Tensor.item()`"


def tracing_settings(strict: bool) -> AbstractContextManager[Any]:
    """A context with Dynamo's settings for any function that is compiled for ONNX Runtime.

    Args:
        strict: whether an error while tracing a function is raised. Otherwise the function runs in eager.
    """
    return torch._dynamo.config.patch({**_TRACING, "suppress_errors": not strict})


# By default, RNNs are not traced, Dynamo replaces calls of numpy's generator, which draw the same numbers as in eager
# here, by torch's, ignores hooks on modules that are registered after the first call, and calls two functions for a
# profiler at each graph.
_TRACING = {
    "allow_rnn": True,
    "use_numpy_random_stream": True,
    "skip_nnmodule_hook_guards": False,
    "record_runtime_overhead": False,
}


def step_settings(recompile_limit: int, strict: bool) -> AbstractContextManager[Any]:
    """A context with Dynamo's settings for a step.

    Counters that a step reads can change without a recompile.

    Args:
        recompile_limit: the number of times that one function can be compiled.
        strict: whether an error while tracing a function is raised. Otherwise the function runs in eager.
    """
    settings: dict[str, Any] = {
        **_TRACING,
        # The counters of self.global_step and self.current_epoch are attributes of the module.
        "allow_unspec_int_on_nn_module": True,
        "recompile_limit": recompile_limit,
        # Of all backends together, so that it limits the Trainers of a process.
        "accumulated_recompile_limit": sys.maxsize,
        "suppress_errors": not strict,
        # By default, a call of a logger breaks the graph.
        "ignore_logging_functions": _logging_functions(),
    }
    return torch._dynamo.config.patch(settings)


def ignore_traces_of_other_threads() -> None:
    """Lets a compiled function run while another thread traces with FX, for the rest of the process.

    Torch refuses to trace a compiled function, and recognizes a trace by a flag of the process.
    """
    is_tracing = _symbolic_trace.is_fx_symbolic_tracing

    def is_tracing_here() -> bool:
        if not is_tracing() or not COMPILE_LOCK.acquire(blocking=False):
            return False
        COMPILE_LOCK.release()
        return True

    _symbolic_trace.is_fx_symbolic_tracing = is_tracing_here


def skip_package(package: str) -> None:
    """Makes Dynamo call the functions of a package without tracing them, for the rest of the process."""
    origin = _origin(package)
    if origin is not None and not trace_rules.check_file(origin).skipped:
        trace_rules.add(package)


def mark_constant_result(module: str, function: str) -> None:
    """Makes Dynamo call a function while it traces, and use the result as a constant.

    Args:
        module: the name of its module, which can be imported later.
        function: its name.
    """

    def mark() -> None:
        attribute = getattr(sys.modules[module], function, None)
        if attribute is not None:
            torch._dynamo.assume_constant_result(attribute)

    when_imported(module, mark)


def keep_in_graph(module: str, *functions: str) -> None:
    """Makes Dynamo put calls of functions into its graph, whose operators are traced when the graph is captured.

    Args:
        module: the name of their module, which can be imported later.
        functions: their names. They take and return tensors, and otherwise constants and sizes. Calls with arrays of
            NumPy are traced.
    """

    def keep() -> None:
        kept = [getattr(sys.modules[module], function) for function in functions]
        for function in kept:
            torch.compiler.allow_in_graph(function)
        replace_method(TorchInGraphFunctionVariable, "call_function", functools.partial(_call_kept, kept))

    when_imported(module, keep)


def _call_kept(kept: Sequence[Any], original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    # In the graph arrays are tensors, and so would be the result.
    given = [item for arg in args for item in (arg.items if isinstance(arg, BaseListVariable) else (arg,))]
    if variable.value in kept and any(isinstance(item, NumpyNdarrayVariable) for item in given):
        return UserFunctionVariable(variable.value).call_function(tx, args, kwargs)
    return original(variable, tx, args, kwargs)


def _origin(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None else spec.origin


def is_recompile_limit(record: logging.LogRecord) -> bool:
    """Whether a record of `FRAME_LOGGER` reports that a function has reached the recompile limit."""
    return _LIMIT_LINE in str(record.msg)


def suppressed_error(record: logging.LogRecord) -> BaseException | None:
    """The error in a record of `FRAME_LOGGER` that kept Dynamo from tracing a function, or None."""
    is_report = record.levelno == logging.WARNING and isinstance(record.exc_info, tuple)
    return record.exc_info[1] if is_report and isinstance(record.exc_info, tuple) else None


def is_scalar_advice(record: logging.LogRecord) -> bool:
    """Whether a record of `SCALAR_LOGGER` is the advice on how to avoid a graph break at `item()`."""
    return str(record.msg).lstrip().startswith(_SCALAR_LINE)


def graphs_by_bucket(enabled: bool) -> AbstractContextManager[Any]:
    """A context that sets whether Dynamo splits graphs at the bucket boundaries of DistributedDataParallel."""
    return torch._dynamo.config.patch(optimize_ddp=enabled)


@contextmanager
def trace_corrections() -> Iterator[None]:
    """A context with what Dynamo traces otherwise than by default."""
    with (
        replaced_functions(),
        lazy_properties(),
        kept_backwards(),
        guarded_identities(),
        own_parameter_groups(),
        kept_memory(),
    ):
        # Dynamo times the guards of each function for its log, after it has cleared the caches: 20 ms a function.
        with marked_derivatives(), replaced(guards, "profile_guard_manager", lambda *_: 0.0):
            yield


@contextmanager
def replaced_functions() -> Iterator[None]:
    """A context in which Dynamo traces functions of torch that read values, or that it can't trace, in another way.

    The compiled code is valid outside of the context too.
    """
    with ExitStack() as stack:
        for function, kind, traced in _TRACED_AS:
            trace = functools.partial(_trace_as, kind, traced)
            stack.enter_context(replaced_entry(VariableBuilder._id_dispatch(), id(function), trace))
        yield


def _trace_as(
    kind: type[UserFunctionVariable], traced: Any, builder: VariableBuilder, value: Any
) -> UserFunctionVariable:
    """The variable of a function, with a guard on the function."""
    builder.install_guards(GuardBuilder.CLOSURE_MATCH)
    return kind(traced)


def _as_declared(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask is declared to be causal. The layer applies the mask in any case."""
    return is_causal is True


def _without_cudnn(*_: Any, **settings: Any) -> AbstractContextManager[None]:
    """`torch.backends.cudnn.flags` of a build without cuDNN, where the flags of a library that is not there are set."""
    return nullcontext()


def _is_dependent(constraint: Any) -> bool:
    """Whether a constraint of a distribution can't be checked."""
    return isinstance(constraint, constraints._Dependent)


class _Divergence(UserFunctionVariable):
    """`kl_divergence`, which at its first call for two types compares all functions that exist."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        pair = [*args, *(kwargs[name] for name in ("p", "q") if name in kwargs)]
        function: Any = NotImplemented
        if len(pair) == 2:
            types = (pair[0].python_type(), pair[1].python_type())
            function = kl._KL_MEMOIZE.get(types) or kl._dispatch_kl(*types)
        # The function itself raises an error about its arguments.
        if function is NotImplemented:
            return super().call_function(tx, args, kwargs)
        return UserFunctionVariable(function).call_function(tx, pair, {})


# By default Dynamo takes the second for an operator.
_TRACED_AS: tuple[tuple[Any, type[UserFunctionVariable], Any], ...] = (
    (transformer._detect_is_causal_mask, UserFunctionVariable, _as_declared),
    (functional.gaussian_nll_loss, UserFunctionVariable, functional.gaussian_nll_loss),
    # Its temperature follows schedules.
    (functional.gumbel_softmax, UserFunctionVariable, functional.gumbel_softmax),
    (functional.ctc_loss, UserFunctionVariable, ctc_loss),
    (constraints.is_dependent, UserFunctionVariable, _is_dependent),
    (kl.kl_divergence, _Divergence, kl.kl_divergence),
    (rnn.pack_padded_sequence, packed_sequences.Packing, packed_sequences.pack_padded_sequence),
    (rnn.pad_packed_sequence, UserFunctionVariable, packed_sequences.pad_packed_sequence),
    *(() if cudnn.is_available() else ((cudnn.flags, UserFunctionVariable, _without_cudnn),)),
)


def lazy_properties() -> AbstractContextManager[None]:
    """A context in which a lazy property of a distribution can be looked up in its class, as validation does.

    By default Dynamo takes the property for the value of the look-up, and its guards fail at once.
    """
    get_attribute = getattr(UserDefinedClassVariable, READ_ATTRIBUTE)

    def get(self: Any, tx: Any, name: str) -> Any:
        value = inspect.getattr_static(self.value, name, None)
        if isinstance(value, lazy_property):
            return UserDefinedObjectVariable(value)
        return get_attribute(self, tx, name)

    return replaced(UserDefinedClassVariable, READ_ATTRIBUTE, get)


def kept_backwards() -> AbstractContextManager[None]:
    """A context in which Dynamo leaves an `autograd.Function` in eager that `torch.func.grad` differentiates.

    Unless one of its inputs also requires grad, Dynamo would trace the forward alone, and drop the function's backward.
    """
    call_apply = AutogradFunctionVariable.call_apply

    def call_apply_with_backward(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_differentiating() and not _requires_grad((args, kwargs)):
            unimplemented(
                gb_type="autograd.Function under torch.func",
                context=f"{self.fn_cls.__name__}.apply",
                explanation=f"torch.func differentiates {self.fn_cls.__name__}, which has its own backward.",
                hints=["Differentiate with torch.autograd.grad."],
            )
        return call_apply(self, tx, args, kwargs)

    return replaced(AutogradFunctionVariable, "call_apply", call_apply_with_backward)


def kept_memory() -> AbstractContextManager[None]:
    """A context in which Dynamo leaves code in eager that assigns to `data` of a tensor, as moving averages do.

    It would trace an operator that replaces the tensor's memory, which no session can do.
    """
    call_setattr = builtin.SetAttrBuiltinVariable._call_setattr

    def call_setattr_of_others(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        if isinstance(obj, TensorVariable) and name.is_python_constant() and name.as_python_constant() == "data":
            unimplemented(
                gb_type="assignment to Tensor.data",
                context=str(obj),
                explanation="The code assigns to tensor.data, which replaces the memory of a tensor.",
                hints=["Write the values into the tensor with copy_ under torch.no_grad()."],
            )
        return call_setattr(self, tx, obj, name, value)

    return replaced(builtin.SetAttrBuiltinVariable, "_call_setattr", call_setattr_of_others)


@contextmanager
def marked_derivatives() -> Iterator[None]:
    """A context in which Dynamo marks the values of a graph that a call about gradients ends.

    Marked are values with respect to which `torch.autograd.grad` or `backward` differentiates, those whose gradient it
    makes differentiable, those on which a hook or `retain_grad` is set, and those whose `grad_fn` is read. They have no
    place in a compiled graph, which has derivatives of its results with respect to its inputs.
    """
    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    handle, compile_subgraph = handlers[torch.autograd.grad], OutputGraph.compile_subgraph
    retain, node = TensorVariable.method_attr_retain_grad, TensorVariable.method_attr_grad_fn
    hook_method, backward_method = tensor_method("register_hook"), tensor_method("backward")
    hook, backward = getattr(*hook_method), getattr(*backward_method)
    call_skipped = SkipFunctionVariable.call_function

    def note_and_handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo traces the function again as far as to the call, and gives values the same names.
        tx.speculation_log.lit_ort_parts = _parts_in_grad(*args, **kwargs)
        try:
            return handle(self, tx, *args, **kwargs)
        except Unsupported as obstacle:
            # Since torch 2.15, Dynamo leaves the function in eager, as its own graphs would lose the marked values.
            obstacle.skip_frame = False
            raise

    def note_and_backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        tx.speculation_log.lit_ort_parts = _parts_in_backward(self, *args, **kwargs)
        return backward(self, tx, *args, **kwargs)

    def note_and_skip(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.autograd.backward:
            tx.speculation_log.lit_ort_parts = _parts_in_backwards(*args, **kwargs)
        return call_skipped(self, tx, args, kwargs)

    def node_or_note(self: Any, tx: Any) -> Any:
        tx.speculation_log.lit_ort_parts = dict.fromkeys(_computed(self), NODE)
        return node(self, tx)

    def note_edge(self: Any, tx: Any, tensor: Any) -> None:
        tx.speculation_log.lit_ort_parts = dict.fromkeys(_computed(tensor), NODE)

    def retain_or_note(self: Any, tx: Any) -> Any:
        tx.speculation_log.lit_ort_parts = dict.fromkeys(_computed(self), WATCHED)
        return retain(self, tx)

    def hook_or_note(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, tx, *args, **kwargs)
        except Unsupported:
            tx.speculation_log.lit_ort_parts = dict.fromkeys(_computed(self), WATCHED)
            raise

    def mark_and_compile(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        parts = getattr(tx.speculation_log, "lit_ort_parts", {})
        for node in self.graph.nodes:
            if node.name in parts:
                node.meta[PART_IN_GRADIENT] = parts[node.name]
        return compile_subgraph(self, tx, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced_entry(handlers, torch.autograd.grad, note_and_handle))
        stack.enter_context(replaced(TensorVariable, "method_attr_retain_grad", retain_or_note))
        stack.enter_context(replaced(*hook_method, hook_or_note))
        stack.enter_context(replaced(TensorVariable, "method_attr_grad_fn", node_or_note))
        stack.enter_context(replaced_entry(handlers, get_gradient_edge, note_edge))
        stack.enter_context(replaced(*backward_method, note_and_backward))
        stack.enter_context(replaced(SkipFunctionVariable, "call_function", note_and_skip))
        stack.enter_context(replaced(OutputGraph, "compile_subgraph", mark_and_compile))
        yield


def _parts_in_grad(
    outputs: Any = None,
    inputs: Any = None,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: Any = None,
    *_: Any,
    **__: Any,
) -> dict[str, str]:
    """For each value that the graph computes and that has a part in a call of `torch.autograd.grad`, the part."""
    names: dict[str, str] = {}
    if create_graph is not None and create_graph.is_python_constant() and create_graph.as_python_constant():
        names = dict.fromkeys(_computed(outputs), DIFFERENTIABLE)
    return names | dict.fromkeys(_computed(inputs), INPUT)


def _parts_in_backward(
    self: Any, gradient: Any = None, retain_graph: Any = None, create_graph: Any = None, inputs: Any = None, *_: Any
) -> dict[str, str]:
    return _parts_in_grad(self, inputs, create_graph=create_graph)


def _parts_in_backwards(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: Any = None,
    grad_variables: Any = None,
    inputs: Any = None,
) -> dict[str, str]:
    return _parts_in_grad(tensors, inputs, create_graph=create_graph)


def _computed(variables: Any) -> list[str]:
    found: list[Any] = []
    VariableTracker.visit(found.append, variables)
    # Not isinstance, which reads inputs.
    nodes = [variable.as_proxy().node for variable in found if type(variable) is TensorVariable]
    return [node.name for node in nodes if node.op not in ("placeholder", "get_attr")]


def guarded_identities() -> AbstractContextManager[None]:
    """A context in which a comparison of two of the user's objects by `is` is a guard on both.

    Dynamo guards on their types alone, and the branch of the first call would be taken for other objects too.
    """
    module: Any = builtin
    compare = module.vt_identity_compare

    def compare_and_guard(left: VariableTracker, right: VariableTracker) -> VariableTracker | None:
        if isinstance(left, UserDefinedObjectVariable) and isinstance(right, UserDefinedObjectVariable):
            for source in filter(None, (left.source, right.source)):
                install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        return compare(left, right)

    return replaced(module, "vt_identity_compare", compare_and_guard)


def own_parameter_groups() -> AbstractContextManager[None]:
    """A context in which a step reads and writes an optimizer's parameter groups as they are.

    Dynamo sets `capturable` in its copy of them, for a trace of the optimizer's update, and a write such as
    `group["lr"] = 0.1` would put it into the optimizer, which then refuses tensors of the CPU.
    """
    set_capturable: Any = OptimizerVariable._set_capturable

    def set_in_updates(self: Any, tx: Any) -> None:
        if tx.f_code.co_filename.startswith(_OPTIMIZERS):
            set_capturable(self, tx)

    return replaced(OptimizerVariable, "_set_capturable", set_in_updates)


def _requires_grad(arguments: Any) -> bool:
    found: list[Any] = []
    VariableTracker.visit(found.append, arguments)
    return any(value.is_tensor() and value.requires_grad for value in found)


def _logging_functions() -> set[Callable[..., Any]]:
    """The methods of a logger. `warning_once` is the transformers library's, and exists once that is imported."""
    names = ("debug", "info", "warning", "error", "warning_once")
    return {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}


def fresh_inductor() -> AbstractContextManager[Any]:
    """A context in which inductor's cache is empty."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()
