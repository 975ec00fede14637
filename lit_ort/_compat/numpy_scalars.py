"""Makes Dynamo treat NumPy's scalars, such as `np.int64(3)`, as numbers.

By default it takes them for arrays without dimensions, which are inputs of the graph: a size or a branch then depends
on the value of a tensor. Here they are constants of a trace, with guards, and operators on them compute as NumPy does.
An `int64` that has had another value is a symbolic number, as Python's integers are. Others that change stay arrays.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import NumpyDTypeVariable, NumpyVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lit_ort._compat.container_writes import owner_of
from lit_ort._compat.deferred_calls import READ_ATTRIBUTE, replace_method

# Those that Dynamo can guard on.
_NUMBERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.float16, np.float32, np.float64)
_OF_NUMBERS = (bool, int, float, np.generic)
# Their methods that return a scalar or a number.
_METHODS = frozenset({"item", "tolist", "astype", "round", "conj", "clip", "min", "max", "sum", "mean", "prod"})
# Functions whose result has the dtype of a NumPy scalar.
OF_DTYPE = frozenset({torch.tensor, torch.as_tensor, torch.asarray})

# Dynamo computes these by slots of a type, which it has for Python's types only.
_BINARY = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    divmod,
)


class _NumPyNumber(ConstantVariable):
    """A NumPy scalar: itself for the program, a number for operators of torch."""

    def __init__(self, value: Any, **kwargs: Any) -> None:
        super().__init__(value.item(), **kwargs)
        self.value = value

    def as_proxy(self) -> Any:
        # Torch takes NumPy's booleans for floats.
        return float(self.value) if isinstance(self.value, np.bool_) else self.value.item()

    def var_getattr(self, tx: Any, name: str) -> Any:
        if name == "dtype":
            return NumpyDTypeVariable(self.value.dtype)
        return getattr(super(), READ_ATTRIBUTE)(tx, name)

    tp_getattro_impl = var_getattr

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _METHODS and not kwargs and all(v.is_python_constant() for v in args):
            return ConstantVariable.create(
                getattr(self.value, name)(*(argument.as_python_constant() for argument in args))
            )
        return super().call_method(tx, name, args, kwargs)

    def reconstruct(self, codegen: Any) -> None:
        codegen.append_output(codegen.create_load_const_unchecked(self.value))


class _ChangingInteger(SymNodeVariable):
    """A NumPy integer of any value."""

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "item" and not args:
            return SymNodeVariable(self.proxy, self.sym_num, source=_item_of(self.source))
        return super().call_method(tx, name, args, kwargs)


def keep_numbers(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether scalars are numbers in the trace at hand.
    """
    replace_method(VariableBuilder, "_wrap", functools.partial(_wrap, is_enabled, WeakIdKeyDictionary()))
    replace_method(TorchInGraphFunctionVariable, "call_function", _call_torch)
    replace_method(NumpyVariable, "call_function", functools.partial(_call_numpy, is_enabled))
    replace_method(BuiltinVariable, "call_function", _call_builtin)
    create = ConstantVariable.create

    def create_number(value: Any, **kwargs: Any) -> Any:
        return (_NumPyNumber if isinstance(value, np.generic) else create)(value, **kwargs)

    ConstantVariable.create = create_number
    builder: Any = SourcelessBuilder
    for kind in (*_NUMBERS, np.bool_):
        builder._type_handlers[kind] = lambda _, value: create_number(value)


def _wrap(is_enabled: Callable[[], bool], known: Any, original: Any, builder: Any, value: Any) -> Any:
    if not is_enabled() or type(value) not in (*_NUMBERS, np.bool_) or value != value:
        return original(builder, value)
    root, source = builder.tx.output.root_tx, builder.source
    values = known.setdefault(owner_of(root, source) or root.f_code, {}).setdefault(source.name, set())
    values.add(value)
    if type(value) is np.int64 and len(values) > 1:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        number: Any = VariableBuilder(builder.tx, _item_of(source)).wrap_symint(value.item(), DimDynamic.DYNAMIC)
        return _ChangingInteger(number.proxy, number.sym_num, source=source)
    if type(value) is not np.bool_ and len(values) > 1:
        return original(builder, value)
    builder.install_guards(GuardBuilder.ID_MATCH if type(value) is np.bool_ else GuardBuilder.EQUALS_MATCH)
    return _NumPyNumber(value, source=source)


def _item_of(source: Any) -> CallFunctionNoArgsSource:
    return CallFunctionNoArgsSource(AttrSource(source, "item"))


def _call_torch(original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Passes the dtype of NumPy scalars on to functions for which it is not that of Python's numbers."""
    data = args[0] if args else kwargs.get("data")
    dtype = kwargs.get("dtype")
    has_dtype = dtype is not None and not dtype.is_constant_none()
    if variable.value in OF_DTYPE and data is not None and not has_dtype and data.is_python_constant():
        value = data.as_python_constant()
        if any(isinstance(leaf, np.generic) for leaf in tree_leaves(value)):
            kwargs = {**kwargs, "dtype": ConstantVariable.create(variable.value(value).dtype)}
    return original(variable, tx, args, kwargs)


def _call_builtin(original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Computes with numbers, and tells the type of an integer that changes, which else is one of Python's."""
    if variable.fn in _BINARY and len(args) == 2 and _are_numbers(args) and any(map(_is_numpys, args)):
        return _folded(variable.fn, args)
    if variable.fn in (isinstance, type) and args and isinstance(_realized(args[0]), _ChangingInteger):
        args = [_NumPyNumber(np.int64(0)), *args[1:]]
    return original(variable, tx, args, kwargs)


def _is_numpys(variable: Any) -> bool:
    return isinstance(variable.as_python_constant(), np.generic)


def _realized(variable: Any) -> Any:
    if not isinstance(variable, LazyVariableTracker):
        return variable
    return variable.realize() if variable.is_realized() or variable.peek_type() is np.int64 else None


def _call_numpy(is_enabled: Callable[[], bool], original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Computes functions of numbers, such as `np.sqrt(3)` and `np.int64(3)`, while tracing."""
    is_known = isinstance(variable.value, np.ufunc) or any(variable.value is known for known in (np.clip, *_NUMBERS))
    if is_enabled() and is_known and not kwargs and _are_numbers(args):
        return _folded(variable.value, args)
    return original(variable, tx, args, kwargs)


def _are_numbers(variables: Sequence[Any]) -> bool:
    return all(v.is_python_constant() and isinstance(v.as_python_constant(), _OF_NUMBERS) for v in variables)


def _folded(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    return ConstantVariable.create(function(*(argument.as_python_constant() for argument in args)))
