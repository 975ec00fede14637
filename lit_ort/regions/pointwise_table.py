"""The pointwise operators of regions, one line each.

A line has the operator's name, the ATen overloads that it computes, its rule of dtypes, a reference in torch, and a
formula for code. Formulas are written on the values of `kernels.vector_text`, which have operators and methods of a
tensor's names. Arguments are in the order of ATen's schema; numbers among them are nodes too. `cost` is in instructions
of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from lit_ort.regions.counter_random import uniform

# How the dtypes of arguments and result are related. Arguments have one dtype unless the rule says otherwise.
SAME = "same"  # the result has it
FLOAT = "float"  # a float, which the result has
INTEGER = "integer"  # an integer or bool, which the result has
COMPARE = "compare"  # the result is bool
CHOOSE = "choose"  # the first argument is bool, the result has the dtype of the others
RANDOM = "random"  # int64; the result is float32


@dataclass(frozen=True)
class Pointwise:
    """A pointwise operator.

    Args:
        name: as in `Apply.operator`.
        overloads: names of ATen overloads, such as "add.Tensor"; each computes this with the same arguments.
        rule: how the dtypes of arguments and result are related.
        reference: from tensors of these dtypes to the result.
        formula: from values of `kernels.vector_text` to the result.
        cost: about how many instructions of a vector it takes.
    """

    name: str
    overloads: tuple[str, ...]
    rule: str
    reference: Callable[..., torch.Tensor]
    formula: Callable[..., Any]
    cost: int = 1


def _gelu(x: Any) -> Any:
    return x * 0.5 * ((x * math.sqrt(0.5)).erf() + 1.0)


# From this exponent on, a density doesn't change the slope, but denormal numbers take a hundred times as long.
_NO_DENSITY = -60.0


def _gelu_slope(x: Any) -> Any:
    exponent = x * x * -0.5
    is_near = exponent.gt(_NO_DENSITY)
    density = is_near.where(is_near.where(exponent, 0.0).exp(), 0.0) * (1 / math.sqrt(2 * math.pi))
    return ((x * math.sqrt(0.5)).erf() + 1.0) * 0.5 + x * density


_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(x: Any) -> Any:
    return x * 0.5 * ((x * (x * x * _TANH_CUBE + 1.0) * _TANH_SCALE).tanh() + 1.0)


def _gelu_tanh_slope(x: Any) -> Any:
    square = x * x
    t = (x * (square * _TANH_CUBE + 1.0) * _TANH_SCALE).tanh()
    return (t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * ((square * (3 * _TANH_CUBE) + 1.0) * _TANH_SCALE)


def _silu_slope(x: Any) -> Any:
    s = x.sigmoid()
    return s * (x * (1.0 - s) + 1.0)


def _softplus(x: Any, beta: Any, threshold: Any) -> Any:
    scaled = x * beta
    return scaled.gt(threshold).where(x, scaled.exp().log1p() / beta)


def _softplus_backward(grad: Any, x: Any, beta: Any, threshold: Any) -> Any:
    scaled = x * beta
    return scaled.gt(threshold).where(grad, grad * scaled.sigmoid())


def _log_sigmoid(x: Any) -> Any:
    return x.minimum(0.0) - (-x.abs()).exp().log1p()


def _elu(x: Any, alpha: Any, scale: Any, input_scale: Any) -> Any:
    return x.gt(0.0).where(x * scale, (x * input_scale).expm1() * (alpha * scale))


def _elu_backward(grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: Any, x: Any) -> Any:
    """The last argument is ELU's result in place of its input if `is_result`, which is a number here."""
    slope = is_result.ne(0.0).where(x + alpha * scale, (x * input_scale).exp() * (alpha * scale))
    return x.le(0.0).where(grad * input_scale * slope, grad * scale)


def _xlogy(x: Any, y: Any) -> Any:
    return y.isnan().where(y, x.eq(0.0).where(0.0, x * y.log()))


def _logaddexp(x: Any, y: Any) -> Any:
    # Equal infinities have no difference.
    total = x.maximum(y) + (-(x - y).abs()).exp().log1p()
    return (x.isinf() & x.eq(y)).where(x, total)


def _mish(x: Any) -> Any:
    return x * x.exp().log1p().tanh()


def _mish_slope(x: Any) -> Any:
    t = x.exp().log1p().tanh()
    return t + x * x.sigmoid() * (1.0 - t * t)


def _hard_gate(x: Any) -> Any:
    return (x + 3.0).maximum(0.0).minimum(6.0) * (1 / 6)


def _hardswish_backward(grad: Any, x: Any) -> Any:
    slope = x.ge(3.0).where(1.0, x * (1 / 3) + 0.5)
    return x.le(-3.0).where(0.0, grad * slope)


def _required(test: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not test.all():
        wrong = x.expand(torch.broadcast_shapes(test.shape, x.shape))[~test.expand_as(x)][0]
        raise ValueError(f"{wrong.item()} is not a value that the operator accepts")
    return x


def _sign(x: Any) -> Any:
    zero, one = x.like(0), x.like(1)
    if x.dtype in ("bool", "uint8"):
        return x.ne(zero).where(one, zero)
    below = x.lt(zero).where(x.like(-1), zero)
    # NaN is neither, so its sign is 0, as torch's.
    return x.gt(zero).where(one, below)


def _rounded_to_bfloat16(x: Any) -> Any:
    bits = x.bits()
    even = bits.shift_right(16, signed=False) & 1
    return x.isnan().where(x, ((bits + 0x7FFF + even) & -0x10000).as_float())


def _rounded_to_float16(x: Any) -> Any:
    return x.convert("fptrunc", "float16").convert("fpext", "float32")


def _gelu_backward(grad: torch.Tensor, x: torch.Tensor, approximate: str) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


def _torch_elu_backward(
    grad: torch.Tensor,
    alpha: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor,
    is_result: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    slope = torch.where(is_result != 0, x + alpha * scale, (x * input_scale).exp() * (alpha * scale))
    return torch.where(x <= 0, grad * input_scale * slope, grad * scale)


OPERATORS: dict[str, Pointwise] = {
    operator.name: operator
    for operator in (
        # arithmetic
        Pointwise("add", ("add.Tensor", "add.Scalar"), SAME, torch.add, lambda x, y: x + y),
        Pointwise("sub", ("sub.Tensor", "sub.Scalar"), SAME, torch.sub, lambda x, y: x - y),
        Pointwise("rsub", ("rsub.Tensor", "rsub.Scalar"), SAME, torch.rsub, lambda x, y: y - x),
        Pointwise("mul", ("mul.Tensor", "mul.Scalar"), SAME, torch.mul, lambda x, y: x * y),
        Pointwise("div", ("div.Tensor", "div.Scalar", "true_divide.Tensor"), FLOAT, torch.div, lambda x, y: x / y, 4),
        Pointwise("neg", ("neg.default",), SAME, torch.neg, lambda x: -x),
        Pointwise("abs", ("abs.default",), SAME, torch.abs, lambda x: x.abs()),
        Pointwise("sign", ("sign.default", "sgn.default"), SAME, torch.sign, _sign, 3),
        Pointwise("square", ("square.default",), SAME, torch.square, lambda x: x * x),
        Pointwise("maximum", ("maximum.default", "clamp_min.Tensor", "clamp_min.default"), SAME, torch.maximum, lambda x, y: x.maximum(y), 3),  # noqa: E501
        Pointwise("minimum", ("minimum.default", "clamp_max.Tensor", "clamp_max.default"), SAME, torch.minimum, lambda x, y: x.minimum(y), 3),  # noqa: E501
        Pointwise("relu", ("relu.default",), SAME, torch.relu, lambda x: x.maximum(0), 3),
        Pointwise("clamp", ("clamp.default", "clamp.Tensor", "hardtanh.default"), SAME, lambda x, low, high: torch.minimum(torch.maximum(x, low), high), lambda x, low, high: x.maximum(low).minimum(high), 6),  # noqa: E501
        Pointwise("addcmul", (), SAME, lambda x, a, b, value: x + value * a * b, lambda x, a, b, value: x + value * a * b, 3),  # noqa: E501
        Pointwise("addcdiv", (), FLOAT, lambda x, a, b, value: x + value * a / b, lambda x, a, b, value: x + value * a / b, 6),  # noqa: E501
        Pointwise("lerp", ("lerp.Tensor", "lerp.Scalar"), FLOAT, torch.lerp, lambda x, y, w: w.abs().lt(0.5).where(x + w * (y - x), y - (y - x) * (1.0 - w)), 8),  # noqa: E501
        # division with remainder
        Pointwise("floor_divide", ("floor_divide.default", "floor_divide.Scalar"), SAME, torch.floor_divide, lambda x, y: x.floor_divide(y), 40),  # noqa: E501
        Pointwise("trunc_divide", (), SAME, lambda x, y: torch.div(x, y, rounding_mode="trunc"), lambda x, y: x.trunc_divide(y), 40),  # noqa: E501
        Pointwise("remainder", ("remainder.Tensor", "remainder.Scalar"), SAME, torch.remainder, lambda x, y: x.remainder(y), 40),  # noqa: E501
        Pointwise("fmod", ("fmod.Tensor", "fmod.Scalar"), SAME, torch.fmod, lambda x, y: x.fmod(y), 40),
        # comparisons and choices
        Pointwise("eq", ("eq.Tensor", "eq.Scalar"), COMPARE, torch.eq, lambda x, y: x.eq(y)),
        Pointwise("ne", ("ne.Tensor", "ne.Scalar"), COMPARE, torch.ne, lambda x, y: x.ne(y)),
        Pointwise("lt", ("lt.Tensor", "lt.Scalar"), COMPARE, torch.lt, lambda x, y: x.lt(y)),
        Pointwise("le", ("le.Tensor", "le.Scalar"), COMPARE, torch.le, lambda x, y: x.le(y)),
        Pointwise("gt", ("gt.Tensor", "gt.Scalar"), COMPARE, torch.gt, lambda x, y: x.gt(y)),
        Pointwise("ge", ("ge.Tensor", "ge.Scalar"), COMPARE, torch.ge, lambda x, y: x.ge(y)),
        Pointwise("isnan", ("isnan.default",), COMPARE, torch.isnan, lambda x: x.isnan()),
        Pointwise("isinf", ("isinf.default",), COMPARE, torch.isinf, lambda x: x.isinf(), 2),
        Pointwise("logical_not", ("logical_not.default",), COMPARE, torch.logical_not, lambda x: x.eq(0)),
        Pointwise("logical_and", ("logical_and.default",), COMPARE, torch.logical_and, lambda x, y: x.ne(0) & y.ne(0)),
        Pointwise("logical_or", ("logical_or.default",), COMPARE, torch.logical_or, lambda x, y: x.ne(0) | y.ne(0)),
        Pointwise("logical_xor", ("logical_xor.default",), COMPARE, torch.logical_xor, lambda x, y: x.ne(0) ^ y.ne(0)),
        Pointwise("where", ("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar"), CHOOSE, torch.where, lambda test, x, y: test.where(x, y)),  # noqa: E501
        # a value, where a test is met; elsewhere an error of the run
        Pointwise("require", (), CHOOSE, _required, lambda test, x: x.require(test), 2),
        # bits
        Pointwise("bitwise_and", ("bitwise_and.Tensor", "bitwise_and.Scalar"), INTEGER, torch.bitwise_and, lambda x, y: x & y),  # noqa: E501
        Pointwise("bitwise_or", ("bitwise_or.Tensor", "bitwise_or.Scalar"), INTEGER, torch.bitwise_or, lambda x, y: x | y),  # noqa: E501
        Pointwise("bitwise_xor", ("bitwise_xor.Tensor", "bitwise_xor.Scalar"), INTEGER, torch.bitwise_xor, lambda x, y: x ^ y),  # noqa: E501
        Pointwise("bitwise_not", ("bitwise_not.default",), INTEGER, torch.bitwise_not, lambda x: ~x),
        Pointwise("lshift", ("bitwise_left_shift.Tensor", "__lshift__.Tensor", "__lshift__.Scalar"), INTEGER, torch.bitwise_left_shift, lambda x, y: x.lshift(y), 4),  # noqa: E501
        Pointwise("rshift", ("bitwise_right_shift.Tensor", "__rshift__.Tensor", "__rshift__.Scalar"), INTEGER, torch.bitwise_right_shift, lambda x, y: x.rshift(y), 4),  # noqa: E501
        # rounding
        Pointwise("floor", ("floor.default",), SAME, torch.floor, lambda x: x.floor()),
        Pointwise("ceil", ("ceil.default",), SAME, torch.ceil, lambda x: x.ceil()),
        Pointwise("trunc", ("trunc.default",), SAME, torch.trunc, lambda x: x.trunc()),
        Pointwise("round", ("round.default",), SAME, torch.round, lambda x: x.round()),
        Pointwise("round_to_bfloat16", (), FLOAT, lambda x: x.bfloat16().float(), _rounded_to_bfloat16, 6),
        Pointwise("round_to_float16", (), FLOAT, lambda x: x.half().float(), _rounded_to_float16, 2),
        # functions of a float
        Pointwise("exp", ("exp.default",), FLOAT, torch.exp, lambda x: x.exp(), 20),
        Pointwise("exp2", ("exp2.default",), FLOAT, torch.exp2, lambda x: x.exp2(), 20),
        Pointwise("expm1", ("expm1.default",), FLOAT, torch.expm1, lambda x: x.expm1(), 20),
        Pointwise("log", ("log.default",), FLOAT, torch.log, lambda x: x.log(), 28),
        Pointwise("log2", ("log2.default",), FLOAT, torch.log2, lambda x: x.log2(), 28),
        Pointwise("log10", ("log10.default",), FLOAT, torch.log10, lambda x: x.log10(), 28),
        Pointwise("log1p", ("log1p.default",), FLOAT, torch.log1p, lambda x: x.log1p(), 40),
        Pointwise("sqrt", ("sqrt.default",), FLOAT, torch.sqrt, lambda x: x.sqrt(), 6),
        Pointwise("rsqrt", ("rsqrt.default",), FLOAT, torch.rsqrt, lambda x: x.rsqrt(), 10),
        Pointwise("reciprocal", ("reciprocal.default",), FLOAT, torch.reciprocal, lambda x: 1.0 / x, 4),
        Pointwise("sin", ("sin.default",), FLOAT, torch.sin, lambda x: x.sin(), 50),
        Pointwise("cos", ("cos.default",), FLOAT, torch.cos, lambda x: x.cos(), 50),
        Pointwise("tan", ("tan.default",), FLOAT, torch.tan, lambda x: x.tan(), 60),
        Pointwise("tanh", ("tanh.default",), FLOAT, torch.tanh, lambda x: x.tanh(), 28),
        Pointwise("sigmoid", ("sigmoid.default",), FLOAT, torch.sigmoid, lambda x: x.sigmoid(), 26),
        Pointwise("erf", ("erf.default",), FLOAT, torch.erf, lambda x: x.erf(), 28),
        Pointwise("erfc", ("erfc.default",), FLOAT, torch.erfc, lambda x: x.erfc(), 60),
        Pointwise("pow", ("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar"), FLOAT, torch.pow, lambda x, y: x.pow(y), 150),  # noqa: E501
        Pointwise("atan", ("atan.default",), FLOAT, torch.atan, lambda x: x.atan(), 50),
        Pointwise("atan2", ("atan2.default",), FLOAT, torch.atan2, lambda x, y: x.atan2(y), 54),
        Pointwise("asin", ("asin.default",), FLOAT, torch.asin, lambda x: x.asin(), 50),
        Pointwise("acos", ("acos.default",), FLOAT, torch.acos, lambda x: x.acos(), 50),
        Pointwise("sinh", ("sinh.default",), FLOAT, torch.sinh, lambda x: x.sinh(), 50),
        Pointwise("cosh", ("cosh.default",), FLOAT, torch.cosh, lambda x: x.cosh(), 46),
        Pointwise("asinh", ("asinh.default",), FLOAT, torch.asinh, lambda x: x.asinh(), 100),
        Pointwise("acosh", ("acosh.default",), FLOAT, torch.acosh, lambda x: x.acosh(), 96),
        Pointwise("atanh", ("atanh.default",), FLOAT, torch.atanh, lambda x: x.atanh(), 92),
        Pointwise("lgamma", ("lgamma.default",), FLOAT, torch.lgamma, lambda x: x.lgamma(), 250),
        Pointwise("digamma", ("digamma.default",), FLOAT, torch.digamma, lambda x: x.digamma(), 220),
        Pointwise("xlogy", ("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"), FLOAT, torch.xlogy, _xlogy, 32),
        Pointwise("logaddexp", ("logaddexp.default",), FLOAT, torch.logaddexp, _logaddexp, 72),
        Pointwise("frac", ("frac.default",), FLOAT, torch.frac, lambda x: x - x.trunc(), 2),
        Pointwise("copysign", ("copysign.Tensor", "copysign.Scalar"), FLOAT, torch.copysign, lambda x, y: x.copysign(y), 3),  # noqa: E501
        Pointwise("hypot", ("hypot.default",), FLOAT, torch.hypot, lambda x, y: x.hypot(y), 16),
        # activations and their gradients
        Pointwise("gelu", (), FLOAT, F.gelu, _gelu, 34),
        Pointwise("gelu_backward", (), FLOAT, lambda g, x: _gelu_backward(g, x, "none"), lambda g, x: g * _gelu_slope(x), 60),  # noqa: E501
        Pointwise("gelu_tanh", (), FLOAT, lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh, 36),
        Pointwise("gelu_tanh_backward", (), FLOAT, lambda g, x: _gelu_backward(g, x, "tanh"), lambda g, x: g * _gelu_tanh_slope(x), 46),  # noqa: E501
        Pointwise("silu", ("silu.default",), FLOAT, F.silu, lambda x: x * x.sigmoid(), 27),
        Pointwise("silu_backward", ("silu_backward.default",), FLOAT, torch.ops.aten.silu_backward, lambda g, x: g * _silu_slope(x), 31),  # noqa: E501
        Pointwise("sigmoid_backward", ("sigmoid_backward.default",), FLOAT, torch.ops.aten.sigmoid_backward, lambda g, y: g * (1.0 - y) * y, 3),  # noqa: E501
        Pointwise("tanh_backward", ("tanh_backward.default",), FLOAT, torch.ops.aten.tanh_backward, lambda g, y: g * (1.0 - y * y), 3),  # noqa: E501
        Pointwise("threshold", ("threshold.default",), SAME, lambda x, t, v: torch.where(x <= t, v, x), lambda x, t, v: x.le(t).where(v, x), 2),  # noqa: E501
        Pointwise("threshold_backward", ("threshold_backward.default",), SAME, lambda g, x, t: torch.where(x <= t, 0, g), lambda g, x, t: x.le(t).where(0, g), 2),  # noqa: E501
        Pointwise("leaky_relu", ("leaky_relu.default",), FLOAT, lambda x, s: torch.where(x > 0, x, x * s), lambda x, s: x.gt(0.0).where(x, x * s), 3),  # noqa: E501
        Pointwise("softplus", ("softplus.default",), FLOAT, lambda x, b, t: torch.where(x * b > t, x, torch.log1p(torch.exp(x * b)) / b), _softplus, 66),  # noqa: E501
        Pointwise("softplus_backward", ("softplus_backward.default",), FLOAT, lambda g, x, b, t: torch.where(x * b > t, g, g * torch.sigmoid(x * b)), _softplus_backward, 30),  # noqa: E501
        Pointwise("log_sigmoid", (), FLOAT, F.logsigmoid, _log_sigmoid, 62),
        Pointwise("elu", ("elu.default",), FLOAT, lambda x, a, s, i: torch.where(x > 0, x * s, torch.expm1(x * i) * (a * s)), _elu, 26),  # noqa: E501
        Pointwise("elu_backward", ("elu_backward.default",), FLOAT, _torch_elu_backward, _elu_backward, 26),
        Pointwise("leaky_relu_backward", ("leaky_relu_backward.default",), FLOAT, lambda g, x, s, r: torch.where(x > 0, g, g * s), lambda g, x, s, r: x.gt(0.0).where(g, g * s), 3),  # noqa: E501
        Pointwise("mish", ("mish.default",), FLOAT, F.mish, _mish, 90),
        Pointwise("mish_backward", ("mish_backward.default",), FLOAT, torch.ops.aten.mish_backward, lambda g, x: g * _mish_slope(x), 120),  # noqa: E501
        Pointwise("hardtanh_backward", ("hardtanh_backward.default",), FLOAT, lambda g, x, low, high: torch.where((x <= low) | (x >= high), 0, g), lambda g, x, low, high: (x.le(low) | x.ge(high)).where(0.0, g), 3),  # noqa: E501
        Pointwise("hardsigmoid_backward", ("hardsigmoid_backward.default",), FLOAT, torch.ops.aten.hardsigmoid_backward, lambda g, x: (x.gt(-3.0) & x.lt(3.0)).where(g * (1 / 6), 0.0), 4),  # noqa: E501
        Pointwise("hardswish", ("hardswish.default",), FLOAT, F.hardswish, lambda x: x * _hard_gate(x), 8),
        Pointwise("hardswish_backward", ("hardswish_backward.default",), FLOAT, torch.ops.aten.hardswish_backward, _hardswish_backward, 6),  # noqa: E501
        Pointwise("hardsigmoid", ("hardsigmoid.default",), FLOAT, F.hardsigmoid, _hard_gate, 7),
        # random numbers: seed, stream, row, column
        Pointwise("random", (), RANDOM, uniform, lambda seed, stream, row, column: seed.random(stream, row, column), 60),  # noqa: E501
    )
}  # fmt: skip

BY_OVERLOAD: dict[str, Pointwise] = {
    overload: operator for operator in OPERATORS.values() for overload in operator.overloads
}


def result_dtype(operator: Pointwise, arguments: tuple[str, ...]) -> str:
    """The dtype of the result from those of the arguments."""
    if operator.rule == COMPARE:
        return "bool"
    return "float32" if operator.rule == RANDOM else arguments[-1]
