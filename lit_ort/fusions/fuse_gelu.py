"""Fuses the formula of GELU into one operator.

In:  `0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3)))` or `0.5 * x * (1 + erf(x / sqrt(2)))`, as in the
     transformers library
Out: `aten.gelu(x, approximate="tanh")` or `aten.gelu(x)`
Saves seven passes over the values in the forward, as many in the backward, and six saved tensors.

Source: Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import ancestors_of, arguments_of
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "gelu"
_CUBIC = 0.044715


def fuse_gelu(graph: FusionGraph) -> PassReport:
    """Fuses formulas of GELU in a captured graph, in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target not in (aten.tanh.default, aten.erf.default):
            continue
        x = _argument_of_tanh(node.args[0]) if node.target is aten.tanh.default else _argument_of_erf(node.args[0])
        if x is None:
            continue
        last = _last_product(node, x)
        if last is None:
            declined.append(f"{node.name}: it is not used as in 0.5 * x * (1 + {node.target})")
            continue
        if not graph.may_join({last, *ancestors_of([last], beyond=x)}, [x]):
            declined.append(f"{node.name}: it is in another grad mode than the product, or x is written between them")
            continue
        with graph.graph.inserting_before(last):
            kwargs: dict[str, Any] = {"approximate": "tanh"} if node.target is aten.tanh.default else {}
            gelu = graph.graph.call_function(aten.gelu.default, (x,), kwargs)
        gelu.meta = dict(last.meta)
        last.replace_all_uses_with(gelu)
        graph.graph.erase_node(last)
        fired += 1
    return PassReport(NAME, fired, tuple(declined))


def _argument_of_tanh(value: Any) -> fx.Node | None:
    """The x in sqrt(2/pi) * (x + 0.044715 * x**3), or None for any other value."""
    total = _scaled(value, math.sqrt(2 / math.pi))
    if total is None or total.target is not aten.add.Tensor or total.kwargs:
        return None
    for x, rest in (total.args[:2], tuple(reversed(total.args[:2]))):
        cube = _scaled(rest, _CUBIC)
        if isinstance(x, fx.Node) and cube is not None and cube.target is aten.pow.Tensor_Scalar:
            if cube.args[0] is x and cube.args[1] == 3:
                return x
    return None


def _argument_of_erf(value: Any) -> fx.Node | None:
    """The x in x / sqrt(2), or None for any other value."""
    if isinstance(value, fx.Node) and value.target is aten.div.Tensor and _is_number(value.args[1], math.sqrt(2)):
        return arguments_of(value)[0]
    return _scaled(value, 1 / math.sqrt(2))


def _last_product(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """The node that is 0.5 * x * (1 + node), for any order of the factors, or None."""
    one_plus = _only_user(node)
    if one_plus is None or one_plus.target is not aten.add.Tensor or not _has_number(one_plus, 1.0):
        return None
    product = _only_user(one_plus)
    if product is None or product.target is not aten.mul.Tensor:
        return None
    other = next((a for a in product.args if a is not one_plus), None)
    if isinstance(other, fx.Node) and _scaled(other, 0.5) is x:
        return product
    if other is x:
        halved = _only_user(product)
        return halved if halved is not None and _scaled(halved, 0.5) is product else None
    return None


def _scaled(value: Any, factor: float) -> fx.Node | None:
    """The node that is multiplied by this factor to compute the value, or None."""
    if not isinstance(value, fx.Node) or value.target is not aten.mul.Tensor:
        return None
    first, second = value.args[:2]
    if isinstance(first, fx.Node) and _is_number(second, factor):
        return first
    return second if isinstance(second, fx.Node) and _is_number(first, factor) else None


def _has_number(node: fx.Node, number: float) -> bool:
    return any(_is_number(argument, number) for argument in node.args[:2]) and not node.kwargs


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and math.isclose(value, number, rel_tol=1e-6)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
