"""Turns Python floats that change between steps into 0-d tensors in the bodies of autograd functions.

In:  a body that reads a float64 tensor with `item()`, computes with the number, and hands it to the backward's body
Out: the same arithmetic on the tensor, in the dtype in which torch computes with a Python number
Saves a compilation for each value, as of a gradient reversal whose strength follows a schedule.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from lit_ort._compat.torch_fx import inputs_of, returned_by, tree_leaves
from lit_ort._compat.torch_ops import AUTOGRAD_FUNCTION
from lit_ort.capture.locations import source_line
from lit_ort.capture.numbers import arithmetic_dtype, replace_number
from lit_ort.errors import CaptureError

_OF_NUMBERS = frozenset({operator.neg, operator.pos, operator.add, operator.sub, operator.mul, operator.truediv})


def numbers_of_functions_to_tensors(module: fx.GraphModule) -> None:
    """Rewrites the bodies of a graph's autograd functions in place.

    Raises:
        CaptureError: a body uses such a number other than in arithmetic.
    """
    for node in module.graph.nodes:
        if node.target is AUTOGRAD_FUNCTION:
            forward, backward = (getattr(module, str(body.target)) for body in node.args[:2])
            results, saved = returned_by(forward.graph)
            numbers = _to_tensors(forward, ())
            inputs = inputs_of(backward.graph)[len(tree_leaves(results)) :]
            _to_tensors(backward, [own for own, value in zip(inputs, saved, strict=True) if value in numbers])


def pass_tensors_of_numbers(module: fx.GraphModule) -> None:
    """Passes floats that change to a graph's autograd functions as tensors, which their bodies read with `item()`.

    So Dynamo does up to torch 2.14.
    """
    for node in list(module.graph.nodes):
        if node.target is not AUTOGRAD_FUNCTION:
            continue
        forward = getattr(module, str(node.args[0].target))
        for position, number in enumerate(node.args[2:]):
            if isinstance(_example(number), torch.SymFloat):
                _read_tensor(forward, inputs_of(forward.graph)[position])
                node.update_arg(position + 2, _tensor_before(node, number))


def _tensor_before(node: fx.Node, number: fx.Node) -> fx.Node:
    with node.graph.inserting_before(node):
        tensor = node.graph.call_function(torch.tensor, (number,), {"dtype": torch.float64})
    tensor.meta["example_value"] = torch.empty((), dtype=torch.float64)
    return tensor


def _read_tensor(body: fx.GraphModule, given: fx.Node) -> None:
    """Lets a body read an input that was a number; the tensor itself is what a forward saves."""
    with body.graph.inserting_after(inputs_of(body.graph)[-1]):
        number = body.graph.call_method("item", (given,))
    number.meta["example_value"] = given.meta["example_value"]
    given.meta["example_value"] = torch.empty((), dtype=torch.float64)
    given.replace_all_uses_with(number, delete_user_cb=lambda user: user is not number and user.op != "output")
    body.recompile()


def _example(value: object) -> object:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else None


def _to_tensors(body: fx.GraphModule, inputs: Iterable[fx.Node]) -> set[fx.Node]:
    """Rewrites one body. Returns the nodes that were numbers.

    Args:
        body: of the forward or of the backward.
        inputs: its inputs that were numbers.
    """
    numbers = set(inputs)
    for node in list(body.graph.nodes):
        if _reads_number(node):
            numbers.add(node.args[0])
            node.replace_all_uses_with(node.args[0])
            body.graph.erase_node(node)
        elif node.op == "output" or numbers.isdisjoint(node.all_input_nodes):
            continue
        elif numbers.issuperset(node.all_input_nodes) and node.target in _OF_NUMBERS:
            numbers.add(node)
        else:
            for number in numbers.intersection(node.all_input_nodes):
                _convert(node, number)
    body.recompile()
    return numbers


def _reads_number(node: fx.Node) -> bool:
    if node.op != "call_method" or node.target != "item" or not isinstance(node.args[0], fx.Node):
        return False
    value = _example(node.args[0])
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64 and value.dim() == 0


def _convert(user: fx.Node, number: fx.Node) -> None:
    dtype = arithmetic_dtype(user, number)
    if dtype is None or number not in user.args:
        raise CaptureError(
            f"{user.name} in an autograd.Function uses {number.name}, a number that changes from step to step, other "
            "than in arithmetic with a tensor",
            remedy="Pass the number to the function as a tensor.",
            operator=str(user.target),
            module=source_line(user),
        )
    with user.graph.inserting_before(user):
        converted = user.graph.call_method("to", (number, dtype))
    replace_number(user, number, converted)
