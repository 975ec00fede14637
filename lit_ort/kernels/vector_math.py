"""Mathematical functions on `Vector`s, in LLVM instructions.

Those of one argument are within 4 units in the last place of float32 and float64, apart from the digamma function of
float64 near its zeros, and exact for NaN, infinities, zeros of both signs and denormals. The polynomials are fitted for
these formulas (weighted least squares in 50 digits); the comment of each is its largest error. Arguments that few
programs have (a sine of 1e10), and what few programs need in float64, go to the C library, one lane at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lit_ort.kernels.vector_text import BITS, INTEGER_OF_SIZE, Text, Vector, suffix, type_text
from lit_ort.regions.element_types import is_float

Polynomial = tuple[float, ...]

# (e^r - 1 - r) / r² for |r| <= ln(2) / 2: 6e-8 and 1e-16.
_EXP32 = (0.5, 0.166665763, 0.0416663773, 0.00836320501, 0.00139410701)
_EXP64 = (
    0.50000000000000011,
    0.16666666666666674,
    0.04166666666662399,
    0.0083333333333223594,
    0.0013888888917283611,
    0.00019841269886135786,
    2.480152118780011e-05,
    2.7557242839415528e-06,
    2.7620139725133822e-07,
    2.5109864854835415e-08,
)
# (log((1 + s) / (1 - s)) / s - 2) / s² as a polynomial in s², for (1 + s) / (1 - s) from √½ to √2: 1e-9 and 3e-16.
_LOG32 = (0.666666687, 0.400001228, 0.285507262, 0.233326763)
_LOG64 = (
    0.66666666666666696,
    0.39999999999898272,
    0.28571428626472922,
    0.22222211061061636,
    0.18182894071060285,
    0.15331568618911517,
    0.14618224450697939,
)
# (sin(r) / r - 1) / r² and (cos(r) - 1 + r² / 2) / r⁴ as polynomials in r², for |r| <= π / 4: 2e-9 and 2e-17.
_SIN32 = (-0.166666672, 0.00833333191, -0.000198400856, 2.72496914e-06)
_SIN64 = (
    -0.16666666666666666,
    0.0083333333333309376,
    -0.00019841269836742536,
    2.7557316094119785e-06,
    -2.5051130066942508e-08,
    1.5918000020226167e-10,
)
_COS32 = (0.0416666642, -0.00138883025, 2.45477804e-05)
_COS64 = (
    0.041666666666666664,
    -0.0013888888888887391,
    2.4801587298755511e-05,
    -2.7557317266390161e-07,
    2.0876145144165402e-09,
    -1.1382550781131921e-11,
)
# erf(a) / a as a polynomial in a², for a from 0 to 1: 1e-9 and 7e-18.
_ERF32 = (1.12837911, -0.37612626, 0.112835839, -0.0268537737, 0.00518825511, -0.00080095575, 7.85175944e-05)
_ERF64 = (
    1.1283791670955126,
    -0.37612638903183521,
    0.11283791670944184,
    -0.026866170643111205,
    0.0052239776061164065,
    -0.00085483259292191516,
    0.00012055293574155561,
    -1.4924712251192502e-05,
    1.6447130966366149e-06,
    -1.6206309283581958e-07,
    1.3710961677396533e-08,
    -7.7794346488195712e-10,
)
# erfc(2.5 + 1.5 t) for t from -1 to 1: 6e-10.
_ERFC32 = (
    0.000406952313,
    -0.00326741743,
    0.0122528039,
    -0.0281819757,
    0.0436518528,
    -0.0464476831,
    0.0318664238,
    -0.00930473674,
    -0.00663259998,
    0.00974492356,
    -0.00467409939,
    -0.000674534182,
    0.00203753286,
    -0.000671215937,
    -0.000259256281,
    0.000153046043,
)
# erfc(a) e^(a²) with t = (a - 3) / (a + 3), for a from 1 to 6: 4e-17.
_ERFCX64 = (
    0.17900115118138996,
    -0.32623356004303733,
    0.24560380171233548,
    -0.15011593650075736,
    0.071665837197410764,
    -0.024392499320205974,
    0.004269136358904242,
    0.00070774650068620342,
    -0.00059706251328433396,
    4.5253898686839547e-05,
    6.4062651022734837e-05,
    -1.284292574516454e-05,
    -8.0069617175047026e-06,
    2.0068687686221897e-06,
    1.2644945305481489e-06,
)

# (atan(r) / r - 1) / r² as a polynomial in r², for r from 0 to tan(π / 8): 7e-10.
_ATAN = (-0.3333331424863919, 0.19998423698615744, -0.14242744303209467, 0.10588572175059456, -0.06066071362207226)
# (asin(r) / r - 1) / r² as a polynomial in r², for r from 0 to 0.5: 3e-10.
_ASIN = (
    0.1666666007915908,
    0.07500496931993776,
    0.04451852300289427,
    0.031793925561867345,
    0.014491950322214307,
    0.03744102660656317,
)
# erfc(a) e^(a²) with t = (a - 3) / (a + 3), for a from 1 to 10.5: 1e-9.
_ERFCX = (
    0.17900115120439392,
    -0.3262335566235492,
    0.24560379098824264,
    -0.15011612424403253,
    0.07166632018852846,
    -0.024389792776692794,
    0.0042625261422221455,
    0.00069386503637857,
    -0.0005621973293698569,
    6.564342926161369e-05,
)

# Stirling's series of log Γ(z) times z and of its derivative times -z², as polynomials in z⁻²; DLMF 5.11.1 and 5.11.2.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
_STIRLING_SLOPE = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)


@dataclass(frozen=True)
class _Format:
    """What depends on the precision."""

    mantissa: int
    bias: int
    exp_low: float
    exp_high: float
    expm1_low: float
    smallest_normal: float
    tanh_high: float
    sin_high: float
    ln2_high: float
    exp: Polynomial
    log: Polynomial
    sin: Polynomial
    cos: Polynomial
    erf: Polynomial

    @property
    def rounder(self) -> float:
        """A float and this have their sum rounded to an integer, in the low bits of the mantissa."""
        return 1.5 * 2.0**self.mantissa

    @property
    def ln2_low(self) -> float:
        # ln(2) = 0.693147180559945309417232121458...; the high part has few bits, so that the difference is exact.
        return (0.693147180559945286 - self.ln2_high) + 2.3190468138462996e-17

    @property
    def tiny(self) -> float:
        """Below this, f(x) rounds to x where f(x) = x + O(x²)."""
        return 2.0 ** -(self.mantissa + 2)


_FORMATS = {
    "float32": _Format(
        23, 127, -104.5, 89.0, -20.0, 2.0**-126, 10.0, 2.0**30, 45426 / 2.0**16, _EXP32, _LOG32, _SIN32, _COS32, _ERF32
    ),
    "float64": _Format(
        52,
        1023,
        -746.0,
        710.0,
        -40.0,
        2.0**-1022,
        22.0,
        2.0**20,
        2977044471 / 2.0**32,
        _EXP64,
        _LOG64,
        _SIN64,
        _COS64,
        _ERF64,
    ),
}


def _polynomial(x: Vector, coefficients: Sequence[float]) -> Vector:
    result = x.like(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result.fma(x, coefficient)
    return result


def _at_most(x: Vector, high: float) -> Vector:
    """x, or the limit if that is less; NaN stays."""
    return x.gt(high).where(high, x)


def _limited(x: Vector, low: float, high: float) -> Vector:
    """x within limits; NaN stays."""
    x = _at_most(x, high)
    return x.lt(low).where(low, x)


def _power_of_two(exponent: Vector, form: _Format, dtype: str) -> Vector:
    assert exponent.dtype == INTEGER_OF_SIZE[dtype]
    return (exponent + form.bias).shift_left(form.mantissa).as_float()


def _reduced_exp(x: Vector, form: _Format) -> tuple[Vector, Vector]:
    """(k, e^r - 1) with x = k · ln(2) + r."""
    shifted = x.fma(1.4426950408889634, form.rounder)
    whole = shifted - form.rounder
    rest = whole.fma(-form.ln2_low, whole.fma(-form.ln2_high, x))
    return _low_bits(shifted, form), _expm1_of_rest(rest, form)


def _low_bits(shifted: Vector, form: _Format) -> Vector:
    """The integer to which the rounder was added."""
    return shifted.bits() - shifted.like(form.rounder).bits()


def _expm1_of_rest(rest: Vector, form: _Format) -> Vector:
    """Of |rest| <= ln(2) / 2."""
    return (rest * rest).fma(_polynomial(rest, form.exp), rest)


def exp(x: Vector) -> Vector:
    form = _FORMATS[x.dtype]
    return _exp_of_small(_at_most(x, form.exp_high))


def _exp_of_small(x: Vector) -> Vector:
    """exp(x) for x up to where it overflows."""
    form = _FORMATS[x.dtype]
    # What becomes 0 is chosen, since to compute a result below the normal numbers takes a hundred times as long.
    vanishes = x.lt(form.exp_low)
    return vanishes.where(0.0, _scaled(*_reduced_exp(vanishes.where(0.0, x), form)))


def _scaled(exponent: Vector, rest: Vector) -> Vector:
    """(1 + rest) · 2^exponent, in two factors, since the power itself may be no normal number."""
    half, form = exponent.shift_right(1), _FORMATS[rest.dtype]
    first, second = (_power_of_two(part, form, rest.dtype) for part in (half, exponent - half))
    return (rest + 1.0) * first * second


def exp2(x: Vector) -> Vector:
    form = _FORMATS[x.dtype]
    vanishes = x.lt(-float(form.bias + form.mantissa))
    x = vanishes.where(0.0, _at_most(x, form.bias + 1.0))
    shifted = x + form.rounder
    rest = (x - (shifted - form.rounder)) * math.log(2)
    return vanishes.where(0.0, _scaled(_low_bits(shifted, form), _expm1_of_rest(rest, form)))


def expm1(x: Vector) -> Vector:
    form = _FORMATS[x.dtype]
    return _expm1_within(_limited(x, form.expm1_low, form.exp_high), x)


def _expm1_within(limited: Vector, x: Vector) -> Vector:
    """expm1(x), which is that of the limited x."""
    form = _FORMATS[x.dtype]
    exponent, rest = _reduced_exp(limited, form)
    half = _power_of_two(exponent - 1, form, x.dtype)
    result = half.fma(rest, half - 0.5) * 2.0
    return x.abs().lt(form.tiny).where(x, result)


def _split_log(x: Vector, form: _Format) -> tuple[Vector, Vector]:
    """(k, m) with x = 2^k · m and m from √½ to √2, for a positive x that is not denormal."""
    bits = x.bits()
    exponent = (bits - x.like(math.sqrt(0.5)).bits()).shift_right(form.mantissa)
    return exponent, (bits - exponent.shift_left(form.mantissa)).as_float()


def _log_parts(m: Vector, form: _Format) -> tuple[Vector, Vector]:
    """(f, g) with log(m) = f - g, where f = m - 1 is exact."""
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    square = f * f * 0.5
    return f, square - s * (square + z * _polynomial(z, form.log))


def _log_terms(x: Vector) -> tuple[Vector, Vector, Vector]:
    """(k, f, g) with x = 2^k m and log(m) = f - g, for a positive, finite x."""
    form = _FORMATS[x.dtype]
    shift = form.mantissa + 1
    small = x.lt(form.smallest_normal)
    exponent, m = _split_log(small.where(x * 2.0**shift, x), form)
    exponent = exponent - small.where(exponent.like(shift), exponent.like(0))
    f, g = _log_parts(m, form)
    return cast(exponent, x.dtype), f, g


def _log_of(x: Vector, correction: Vector | None = None) -> Vector:
    """log(x) + correction for a positive, finite x."""
    form = _FORMATS[x.dtype]
    k, f, g = _log_terms(x)
    low = k * form.ln2_low if correction is None else k.fma(form.ln2_low, correction)
    return k.fma(form.ln2_high, f - (g - low))


def _log_special(x: Vector, result: Vector) -> Vector:
    """The result for positive x; -inf for 0, NaN below, and inf for inf."""
    result = x.gt(0.0).where(result, x.eq(0.0).where(x.like(-math.inf), math.nan))
    return x.eq(math.inf).where(math.inf, result)


def log(x: Vector) -> Vector:
    return _log_special(x, _log_of(x))


def log1p(x: Vector) -> Vector:
    form = _FORMATS[x.dtype]
    u = x + 1.0
    rounded = u - 1.0
    lost = (1.0 - (u - rounded)) + (x - rounded)
    result = _log_special(u, _log_of(u, lost / u))
    return x.abs().lt(form.tiny).where(x, result)


def _log_to_base(x: Vector, of_two: float, of_e: float) -> Vector:
    k, f, g = _log_terms(x)
    return _log_special(x, k.fma(of_two, (f - g) * of_e))


def log2(x: Vector) -> Vector:
    return _log_to_base(x, 1.0, 1.4426950408889634)


def log10(x: Vector) -> Vector:
    return _log_to_base(x, 0.30102999566398120, 0.43429448190325182)


def tanh(x: Vector) -> Vector:
    size = _at_most(x.abs(), _FORMATS[x.dtype].tanh_high)
    e = _expm1_within(size + size, size + size)
    return (e / (e + 2.0)).copysign(x)


def sigmoid(x: Vector) -> Vector:
    e = _exp_of_small(-x.abs())
    return x.lt(0.0).where(e, 1.0) / (e + 1.0)


def erf(x: Vector) -> Vector:
    size = x.abs()
    near = x * _polynomial(x * x, _FORMATS[x.dtype].erf)
    if x.dtype == "float32":
        size = _at_most(size, 4.0)
        rest = _polynomial(size.fma(1 / 1.5, -2.5 / 1.5), _ERFC32)
    else:
        rest = _erfc_of_large(_at_most(size, 6.0), _ERFCX64)
    return size.lt(1.0).where(near, (1.0 - rest).copysign(x))


def _erfc_of_large(size: Vector, coefficients: Polynomial) -> Vector:
    """Of float64 from 1 on, by a polynomial of erfc(a) e^(a²) in (a - 3) / (a + 3)."""
    return exp(-(size * size)) * _polynomial((size - 3.0) / (size + 3.0), coefficients)


def rsqrt(x: Vector) -> Vector:
    return 1.0 / x.sqrt()


def sin(x: Vector) -> Vector:
    return _in_library("sin", lambda y: _periodic("sin", y, 0), x)


def cos(x: Vector) -> Vector:
    return _in_library("cos", lambda y: _periodic("cos", y, 1), x)


# π / 2 in three parts.
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)


def _sine_and_cosine(r: Vector) -> tuple[Vector, Vector]:
    """Of |r| <= π / 4."""
    form, z = _FORMATS[r.dtype], r * r
    return (r * z).fma(_polynomial(z, form.sin), r), (z * z).fma(_polynomial(z, form.cos), 1.0 - z * 0.5)


def _sine_and_cosine_of_rest(x: Vector) -> tuple[Vector, Vector, Vector]:
    """(k, sin(r), cos(r)) with x = k · π / 2 + r and |r| <= π / 4."""
    wide = cast(x, "float64")
    rounder = _FORMATS["float64"].rounder
    shifted = wide.fma(2 / math.pi, rounder)
    whole = shifted - rounder
    rest = wide
    for part in _HALF_PI[: 2 if x.dtype == "float32" else 3]:
        rest = whole.fma(-part, rest)
    return _resized(shifted.bits(), INTEGER_OF_SIZE[x.dtype]), *_sine_and_cosine(cast(rest, x.dtype))


def _periodic(name: str, x: Vector, quarter: int) -> Vector:
    """sin(x + quarter · π / 2)."""
    turn, sine, cosine = _sine_and_cosine_of_rest(x)
    turn = turn + quarter
    result = (turn & 1).ne(0).where(cosine, sine)
    sign = (turn & 2).shift_left(BITS[x.dtype] - 2)
    result = (result.bits() ^ sign).as_float()
    if name == "sin":
        result = x.eq(0.0).where(x, result)
    return _unless_large(name, x, result)


def _unless_large(name: str, x: Vector, result: Vector) -> Vector:
    return _unless(x.abs().gt(_FORMATS[x.dtype].sin_high), lambda: _c_library(name, x), result)


def tan(x: Vector) -> Vector:
    return _in_library("tan", _tan, x)


def _tan(x: Vector) -> Vector:
    turn, sine, cosine = _sine_and_cosine_of_rest(x)
    is_odd = (turn & 1).ne(0)
    result = is_odd.where(-cosine, sine) / is_odd.where(sine, cosine)
    return _unless_large("tan", x, x.eq(0.0).where(x, result))


def _unless(rare: Vector, slow: Callable[[], Vector], usual: Vector) -> Vector:
    """`usual`, and `slow()` where `rare`; a branch skips it if it is needed nowhere."""
    text = usual.text
    number = text.name()[2:]
    before = text.block
    text.line(f"br i1 {rare.total('or').name}, label %rare{number}, label %done{number}")
    text.label(f"rare{number}")
    with text.scope():
        other = rare.where(slow(), usual)
    last = text.block
    text.line(f"br label %done{number}")
    text.label(f"done{number}")
    phi = f"phi {usual.type} [ {usual.name}, %{before} ], [ {other.name}, %{last} ]"
    return Vector(text, text.effect(phi), usual.dtype, usual.lanes)


def _in_library(name: str, body: Callable[..., Vector], *arguments: Vector) -> Vector:
    """A call of a function of the library."""
    x = arguments[0]
    lanes = max(value.lanes for value in arguments)
    arguments = tuple(value.splat(lanes) for value in arguments)
    kind = arguments[0].type
    full = f"lit_ort.{name}.{suffix(x.dtype, lanes)}"
    if full not in x.text.library:
        text = x.text.library[full] = Text()
        given = [Vector(text, f"%x{position}", x.dtype, lanes) for position in range(len(arguments))]
        head = ", ".join(f"{value.type} {value.name}" for value in given)
        text.function(full, f"{kind} @{full}({head})", lambda: text.line(f"ret {kind} {body(*given).name}"), "nounwind")
    result = x.text.call(full, kind, *((kind, argument.name) for argument in arguments))
    return Vector(x.text, result, x.dtype, lanes)


def _mostly_inline(function: Callable[[Vector], Vector]) -> Callable[[Vector], Vector]:
    """A function that is in the library where code should be short."""

    def chosen(x: Vector) -> Vector:
        return function(x) if x.text.inline and x.lanes else _in_library(function.__name__, function, x)

    return chosen


def _c_library(name: str, *arguments: Vector) -> Vector:
    """The C library's function, called for each lane."""
    text, dtype = arguments[0].text, arguments[0].dtype
    lanes = max(argument.lanes for argument in arguments)
    values = [argument.splat(lanes) for argument in arguments]
    scalar, kind = type_text(dtype, 0), type_text(dtype, lanes)
    function = name + ("f" if dtype == "float32" else "")
    if not lanes:
        return Vector(text, text.call(function, scalar, *((scalar, value.name) for value in values)), dtype, 0)
    result = "poison"
    for lane in range(lanes):
        parts = [text.value(f"extractelement {kind} {value.name}, i64 {lane}") for value in values]
        one = text.call(function, scalar, *((scalar, part) for part in parts))
        result = text.value(f"insertelement {kind} {result}, {scalar} {one}, i64 {lane}")
    return Vector(text, result, dtype, lanes)


def pow(x: Vector, y: Vector) -> Vector:
    return _in_library("pow", _pow32 if x.dtype == "float32" else lambda *given: _c_library("pow", *given), x, y)


def _pow32(x: Vector, y: Vector) -> Vector:
    size = x.abs()
    wide = exp(log(cast(size, "float64")) * cast(y, "float64"))
    result = cast(wide, "float32")
    result = (size.eq(1.0) & ~y.isnan()).where(1.0, result)
    is_whole, half = y.floor().eq(y), y * 0.5
    is_odd = is_whole & half.floor().ne(half)
    negative = x.bits().lt(0)
    result = (negative & is_odd).where(-result, result)
    undefined = x.lt(0.0) & x.ne(-math.inf) & ~is_whole & ~y.isnan()
    result = undefined.where(math.nan, result)
    return (y.eq(0.0) | x.eq(1.0)).where(1.0, result)


# From here on Stirling's series is exact in float64; smaller numbers come here by the recurrence of Γ.
_STIRLING_LOW = 8


def _recurrence(x: Vector) -> tuple[Vector, Vector, Vector]:
    """(z, p, dp/dx) with Γ(x) = Γ(z) / p and z large enough for Stirling's series, for x that is not negative."""
    product, slope = x, x.like(1.0)
    for step in range(1, _STIRLING_LOW):
        factor = x + float(step)
        slope = slope.fma(factor, product)
        product = product * factor
    small = x.lt(float(_STIRLING_LOW))
    return small.where(x + float(_STIRLING_LOW), x), small.where(product, 1.0), small.where(slope, 0.0)


def _half_turn(x: Vector) -> tuple[Vector, Vector, Vector]:
    """(r, sin(r π / 2), cos(r π / 2)) where r is what x is above the nearest integer."""
    rest = x - x.round()
    return rest, *_sine_and_cosine(rest * (math.pi / 2))


def digamma(x: Vector) -> Vector:
    return _in_library("digamma", _digamma, x)


def _digamma(x: Vector) -> Vector:
    wide = cast(x, "float64")
    is_negative = wide.lt(0.0)
    z, product, slope = _recurrence(is_negative.where(1.0 - wide, wide))
    inverse = 1.0 / z
    square = inverse * inverse
    series = (-square).fma(_polynomial(square, _STIRLING_SLOPE), inverse * -0.5)
    result = log(z) + series - slope / product

    def reflected() -> Vector:
        rest, sine, cosine = _half_turn(wide)
        cotangent = (cosine - sine) * (cosine + sine) / (sine * cosine * 2.0)
        return rest.eq(0.0).where(math.nan, result - cotangent * math.pi)

    return cast(_unless(is_negative, reflected, result), x.dtype)


def _by_float64(body: Callable[..., Vector]) -> Callable[..., Vector]:
    """A function that is computed in float64 for float32, so that rounding and overflow need no care.

    For float64 it is the C library's.

    Args:
        body: computes it in float64 for arguments of float32; its name is that of the function after an underscore.
    """
    name = body.__name__.removeprefix("_")

    def computed(*arguments: Vector) -> Vector:
        if arguments[0].dtype != "float32":
            return _c_library(name, *arguments)
        return cast(body(*(cast(argument, "float64") for argument in arguments)), "float32")

    return lambda *arguments: _in_library(name, computed, *arguments)


def _lgamma(x: Vector) -> Vector:
    """The logarithms cancel where the result is near zero."""
    size = x.abs()
    z, product, _ = _recurrence(size)
    inverse = 1.0 / z
    series = inverse.fma(_polynomial(inverse * inverse, _STIRLING), 0.5 * math.log(2 * math.pi) - 0.5)
    result = (z - 0.5).fma(log(z) - 1.0, series) - log(product)
    result = (x.eq(1.0) | x.eq(2.0)).where(0.0, result)

    def reflected() -> Vector:
        _, sine, cosine = _half_turn(x)
        return log(math.pi / (size * (sine * cosine * 2.0).abs())) - result

    result = _unless(x.lt(0.0), reflected, result)
    return size.eq(math.inf).where(math.inf, result)


# Beyond this, hyperbolic functions are infinite in float32.
_HYPERBOLIC_HIGH = 100.0


def _sinh(x: Vector) -> Vector:
    e = expm1(_at_most(x.abs(), _HYPERBOLIC_HIGH))
    return ((e + e / (e + 1.0)) * 0.5).copysign(x)


def _cosh(x: Vector) -> Vector:
    e = exp(_at_most(x.abs(), _HYPERBOLIC_HIGH))
    return (e + 1.0 / e) * 0.5


def _asinh(x: Vector) -> Vector:
    size = x.abs()
    result = log1p(size + size * size / ((size * size + 1.0).sqrt() + 1.0))
    return size.eq(math.inf).where(math.inf, result).copysign(x)


def _acosh(x: Vector) -> Vector:
    above = x - 1.0
    return x.lt(1.0).where(math.nan, log1p(above + (above * (above + 2.0)).sqrt()))


def _atanh(x: Vector) -> Vector:
    size = x.abs()
    return (log1p((size + size) / (1.0 - size)) * 0.5).copysign(x)


def _hypot(x: Vector, y: Vector) -> Vector:
    return (x.isinf() | y.isinf()).where(math.inf, (x * x + y * y).sqrt())


def _angle(y: Vector, x: Vector) -> Vector:
    """The angle of (x, y) from the first axis, from 0 to π / 2, for what isn't negative."""
    both = x.eq(math.inf) & y.eq(math.inf)
    x, y = both.where(1.0, x), both.where(1.0, y)
    is_steep, is_level = y.gt(x * (math.sqrt(2) + 1)), y.le(x * (math.sqrt(2) - 1))
    above = is_steep.where(-x, is_level.where(y, y - x))
    below = is_steep.where(y, is_level.where(x, x + y))
    r = below.eq(0.0).where(0.0, above / below)
    turned = is_steep.where(math.pi / 2, is_level.where(x.like(0.0), math.pi / 4))
    return turned + (r * r * r).fma(_polynomial(r * r, _ATAN), r)


def _atan(x: Vector) -> Vector:
    return _angle(x.abs(), x.like(1.0)).copysign(x)


def _atan2(y: Vector, x: Vector) -> Vector:
    angle = _angle(y.abs(), x.abs())
    return x.bits().lt(0).where(math.pi - angle, angle).copysign(y)


def _arc_of_small_sine(x: Vector) -> tuple[Vector, Vector]:
    """(whether |x| <= 0.5, asin(|x|) or else asin(√((1 - |x|) / 2)))."""
    size = x.abs()
    is_small = size.le(0.5)
    square = is_small.where(size * size, (1.0 - size) * 0.5)
    root = is_small.where(size, square.sqrt())
    return is_small, (root * square).fma(_polynomial(square, _ASIN), root)


def _asin(x: Vector) -> Vector:
    is_small, arc = _arc_of_small_sine(x)
    return is_small.where(arc, math.pi / 2 - (arc + arc)).copysign(x)


def _acos(x: Vector) -> Vector:
    is_small, arc = _arc_of_small_sine(x)
    wide = x.lt(0.0).where(math.pi - (arc + arc), arc + arc)
    return is_small.where(math.pi / 2 - arc.copysign(x), wide)


def _erfc(x: Vector) -> Vector:
    size = x.abs()
    rest = _erfc_of_large(_at_most(size, 10.5), _ERFCX)
    near = 1.0 - x * _polynomial(x * x, _ERF64)
    return size.lt(1.0).where(near, x.lt(0.0).where(2.0 - rest, rest))


# Division.


def _safe_divisor(x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """(divisor, whether it stands for -1): machine division traps for 0 and for the smallest number by -1."""
    zero = y.eq(0)
    if x.text.report is not None:
        x.text.report("division", zero)
    if x.dtype == "uint8":
        return zero.where(1, y), x.text.literal(False, "bool", y.lanes)
    minus_one = y.eq(-1)
    return (zero | minus_one).where(1, y), minus_one


def _integer_quotient(x: Vector, y: Vector, *, to_floor: bool) -> Vector:
    divisor, minus_one = _safe_divisor(x, y)
    quotient = x.binary("udiv" if x.dtype == "uint8" else "sdiv", divisor)
    if x.dtype == "uint8":
        return quotient
    if to_floor:
        rest = x - quotient * divisor
        below = rest.ne(0) & (rest ^ divisor).lt(0)
        quotient = quotient - cast(below, x.dtype)
    return minus_one.where(-x, quotient)


def trunc_divide(x: Vector, y: Vector) -> Vector:
    return (x / y).trunc() if x.is_float else _integer_quotient(x, y, to_floor=False)


def fmod(x: Vector, y: Vector) -> Vector:
    if x.is_float:
        return _in_library("fmod", lambda *given: _c_library("fmod", *given), x, y)
    return x - _integer_quotient(x, y, to_floor=False) * y


def _differs_in_sign(rest: Vector, y: Vector) -> Vector:
    return rest.ne(0.0) & (y.lt(0.0) ^ rest.lt(0.0))


def floor_divide(x: Vector, y: Vector) -> Vector:
    if not x.is_float:
        return _integer_quotient(x, y, to_floor=True)
    rest = fmod(x, y)
    quotient = (x - rest) / y
    quotient = _differs_in_sign(rest, y).where(quotient - 1.0, quotient)
    floor = quotient.floor()
    floor = (quotient - floor).gt(0.5).where(floor + 1.0, floor)
    exact = x / y
    floor = quotient.eq(0.0).where(exact.like(0.0).copysign(exact), floor)
    return y.eq(0.0).where(exact, floor)


def remainder(x: Vector, y: Vector) -> Vector:
    if not x.is_float:
        return x - _integer_quotient(x, y, to_floor=True) * y
    rest = fmod(x, y)
    return _differs_in_sign(rest, y).where(rest + y, rest)


def lshift(x: Vector, y: Vector) -> Vector:
    """Zero for a negative count or one of all bits or more."""
    inside = y.ge(0) & y.lt(BITS[x.dtype]) if x.dtype != "uint8" else y.lt(8)
    return inside.where(x.shift_left(inside.where(y, 0)), 0)


def rshift(x: Vector, y: Vector) -> Vector:
    """The sign for a negative count or one of all bits or more."""
    if x.dtype == "uint8":
        inside = y.lt(8)
        return inside.where(x.shift_right(inside.where(y, 0), signed=False), 0)
    last = BITS[x.dtype] - 1
    inside = y.ge(0) & y.le(last)
    return x.shift_right(inside.where(y, last))


# Casts.


def cast(x: Vector, dtype: str) -> Vector:
    """The value in another dtype, as torch casts on x86: NaN and what doesn't fit in int64 or int32 is its smallest."""
    if x.dtype == dtype:
        return x
    if dtype == "bool":
        return x.ne(0.0 if x.is_float else 0)
    if is_float(dtype):
        if x.is_float:
            return x.convert("fpext" if BITS[dtype] > BITS[x.dtype] else "fptrunc", dtype)
        return x.convert("uitofp" if x.dtype in ("bool", "uint8") else "sitofp", dtype)
    if x.is_float:
        return _float_to_integer(x, dtype)
    return _resized(x, dtype)


def _resized(x: Vector, dtype: str) -> Vector:
    if x.dtype == dtype:
        return x
    if BITS[x.dtype] == BITS[dtype]:
        return Vector(x.text, x.name, dtype, x.lanes)
    if BITS[x.dtype] > BITS[dtype]:
        return x.convert("trunc", dtype)
    return x.convert("zext" if x.dtype in ("bool", "uint8") else "sext", dtype)


def _float_to_integer(x: Vector, dtype: str) -> Vector:
    # torch casts to 8 and 16 bits through a wider integer, of which the low bits stay.
    wide = "int64" if dtype in ("int64", "uint8") else "int32"
    limit = 2.0 ** (BITS[wide] - 1)
    fits = x.ge(-limit) & x.lt(limit)
    whole = fits.where(x, 0.0).convert("fptosi", wide)
    return _resized(fits.where(whole, -(2 ** (BITS[wide] - 1))), dtype)


# Random numbers.

_ROUNDS = 10


def philox(key: tuple[Vector, Vector], counter: tuple[Vector, Vector, Vector, Vector]) -> tuple[Vector, ...]:
    """Four words of Philox 4x32-10 (Salmon et al. 2011), each int32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        if number:
            k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        high0, low0 = _wide_product(c0, 0xD2511F53)
        high1, low1 = _wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _wide_product(x: Vector, factor: int) -> tuple[Vector, Vector]:
    """The upper and the lower word of x · factor."""
    if not x.lanes:
        product = x.convert("zext", "int64") * factor
        return product.shift_right(32, signed=False).convert("trunc", "int32"), product.convert("trunc", "int32")
    # Words in pairs, as the CPU's instruction of this product has them: LLVM takes long to find it by itself.
    pairs, low = _paired(x), 0xFFFFFFFF
    even, odd = (pairs & low) * factor, pairs.shift_right(32, signed=False) * factor
    upper = even.shift_right(32, signed=False) | (odd & ~low)
    return _unpaired(upper, x), _unpaired((even & low) | odd.shift_left(32), x)


def _paired(x: Vector) -> Vector:
    lanes = x.lanes // 2
    return Vector(x.text, x.text.value(f"bitcast {x.type} {x.name} to {type_text('int64', lanes)}"), "int64", lanes)


def _unpaired(x: Vector, like: Vector) -> Vector:
    return Vector(x.text, x.text.value(f"bitcast {x.type} {x.name} to {like.type}"), "int32", like.lanes)


def counter_of(column: Vector) -> tuple[Vector, Vector]:
    """(counter, word) of a column: 64 columns share 16 counters, so that 16 neighbours use the same word."""
    counter = column.shift_right(6).shift_left(4) | (column & 15)
    return cast(counter, "int32"), cast(column.shift_right(4) & 3, "int32")


def random_words(seed: Vector, stream: Vector, row: Vector, counter: Vector) -> tuple[Vector, ...]:
    """The four words of a counter in a row, of the stream of a seed; all but the counter are int64."""
    key = cast(seed, "int32"), cast(seed.shift_right(32), "int32")
    rest = cast(row, "int32"), cast(row.shift_right(32), "int32"), cast(stream, "int32")
    return _philox_in_library(*key, counter, *rest)


def _philox_in_library(*arguments: Vector) -> tuple[Vector, ...]:
    """`philox` as a function of the library; words that are the same in all lanes stay scalars."""
    outer, lanes = arguments[0].text, max(value.lanes for value in arguments)
    if lanes:
        arguments = tuple(
            value.splat(lanes if value.lanes or position == 2 else 0) for position, value in enumerate(arguments)
        )
    full = "lit_ort.philox." + ".".join(suffix("int32", value.lanes) for value in arguments)
    kind = type_text("int32", lanes)
    result = f"{{ {', '.join([kind] * 4)} }}"
    if full not in outer.library:
        text = outer.library[full] = Text()
        given = [Vector(text, f"%x{at}", "int32", value.lanes) for at, value in enumerate(arguments)]

        def write() -> None:
            words = philox((given[0], given[1]), (given[2], given[3], given[4], given[5]))
            packed = "poison"
            for at, word in enumerate(words):
                packed = text.value(f"insertvalue {result} {packed}, {kind} {word.splat(lanes).name}, {at}")
            text.line(f"ret {result} {packed}")

        head = ", ".join(f"{value.type} {value.name}" for value in given)
        text.function(full, f"{result} @{full}({head})", write, "nounwind")
    name = outer.call(full, result, *((value.type, value.name) for value in arguments))
    return tuple(Vector(outer, outer.value(f"extractvalue {result} {name}, {at}"), "int32", lanes) for at in range(4))


def uniform_of(word: Vector) -> Vector:
    """A float32 in [0, 1) of a word."""
    return cast(word.shift_right(8, signed=False), "float32") * 2.0**-24


def random(seed: Vector, stream: Vector, row: Vector, column: Vector) -> Vector:
    """A float32 in [0, 1) for each row and column, of the stream of a seed; all are int64."""
    counter, number = counter_of(column)
    words = random_words(seed, stream, row, counter)
    result = words[0]
    for position in (1, 2, 3):
        result = number.eq(position).where(words[position], result)
    return uniform_of(result)


_INLINE = (exp, exp2, expm1, log, log1p, log2, log10, tanh, sigmoid, erf)
_BY_FLOAT64 = (_acos, _acosh, _asin, _asinh, _atan, _atan2, _atanh, _cosh, _erfc, _hypot, _lgamma, _sinh)
FUNCTIONS: dict[str, Callable[..., Vector]] = {
    **{function.__name__: _mostly_inline(function) for function in _INLINE},
    **{
        function.__name__: function
        for function in (
            rsqrt,
            sin,
            cos,
            tan,
            pow,
            digamma,
            trunc_divide,
            fmod,
            floor_divide,
            remainder,
            lshift,
            rshift,
            cast,
            random,
        )
    },
    **{body.__name__.removeprefix("_"): _by_float64(body) for body in _BY_FLOAT64},
}
