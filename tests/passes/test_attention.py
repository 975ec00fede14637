from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from lit_ort.compiler.passes.attention import Attention
from lit_ort.compiler.passes.attention_expansion import AttentionExpansion
from tests.passes.models import model, operators, run

B, H, L, S, D = 2, 3, 7, 9, 4
HEADS = (B, H)


def made(
    mask: str = "",
    *,
    kind: str = "float",
    leading: tuple[int, ...] = HEADS,
    more: str = "",
    given: str = "q, k, v",
    causal: int = 0,
    dropout: float = 0.0,
) -> ir.Model:
    """One attention of `q`, `k` and `v`; `mask` declares an input, `m`, or what `more` computes `m` from."""
    front = ", ".join(map(str, leading))
    inputs = f"{kind}[{front}, {L}, {D}] q, {kind}[{front}, {S}, {D}] k, {kind}[{front}, {S}, {D}] v"
    return model(f"""g ({inputs}{f", {mask}" if mask else ""}) => ({kind}[{front}, {L}, {D}] y) {{
        {more}
        y = lit_ort.Attention<scale = 0.4, causal = {causal}, dropout = {dropout}>({given}{", m" if mask else ""})
    }}""")


def inputs(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q": torch.randn(*HEADS, L, D), "k": torch.randn(*HEADS, S, D), "v": torch.randn(*HEADS, S, D), **more}


@pytest.mark.parametrize("mask", ["", f"bool[{B}, 1, {L}, {S}] m"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fires(mask: str, dropout: float) -> None:
    graph = made(mask, dropout=dropout)
    assert Attention().apply(graph).fired == 1
    assert operators(graph) - {"Constant"} == {"ATen"}


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (made(leading=(B,)), "[batch, heads, length, width]"),
        (made(kind="double"), "float32 is proven"),
        (made(given="q, k, k"), "three values"),
        (made(f"float[{L}, {S}] m"), "may want a gradient"),
    ],
)
def test_must_not_fire(graph: ir.Model, reason: str) -> None:
    report = Attention().apply(graph)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert operators(graph) == {"Attention"}


def test_a_float_mask_made_from_a_boolean_one_is_taken() -> None:
    graph = made(f"bool[{L}, {S}] b", more="m = Cast<to = 1>(b)")
    assert Attention().apply(graph).fired == 1


MASKS = {
    "": (),
    f"bool[{B}, 1, {L}, {S}] m": (B, 1, L, S),
    f"bool[1, {H}, {L}, {S}] m": (1, H, L, S),
    f"bool[{L}, {S}] m": (L, S),
    f"bool[{B}, 1, 1, {S}] m": (B, 1, 1, S),
}


@pytest.mark.parametrize(("mask", "causal"), [("", 1), *((mask, 0) for mask in MASKS)])
def test_same_numbers(mask: str, causal: int) -> None:
    given = inputs()
    if mask:
        given["m"] = torch.rand(MASKS[mask]) > 0.4
        given["m"][..., 0] = True
    plain = made(mask, causal=causal)
    assert AttentionExpansion().apply(plain).fired == 1
    kernel = made(mask, causal=causal)
    Attention().apply(kernel)
    expected = F.scaled_dot_product_attention(
        given["q"], given["k"], given["v"], given.get("m"), is_causal=bool(causal), scale=0.4
    )
    for graph in (plain, kernel):
        torch.testing.assert_close(run(graph, given)[0], expected)
