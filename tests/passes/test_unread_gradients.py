from __future__ import annotations

import onnx_ir as ir
import torch

from lit_ort.compiler.passes.unread_gradients import UnreadGradients
from tests.passes.models import model, run

NODE = 'org.pytorch.aten.ATen<operator = "lit_ort::linear_cross_entropy_bias", overload_name = "">(h, w, y, k, b)'


def text(outputs: str) -> str:
    return f"""g (float[20, 4] h, float[9, 4] w, int64[20] y, float[9] b) => ({outputs}) {{
        k = Constant<value_ints = [-100, 1, 1, 1, 1]>()
        loss, gh, gw, gb = {NODE}
    }}"""


def typed(outputs: str) -> ir.Model:
    made = model(text(outputs))
    (node,) = (node for node in made.graph if node.op_type == "ATen")
    for value, shape in zip(node.outputs, ([], [20, 4], [9, 4], [9]), strict=True):
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(shape)
    return made


def inputs() -> dict[str, torch.Tensor]:
    return {"h": torch.randn(20, 4), "w": torch.randn(9, 4), "y": torch.randint(9, (20,)), "b": torch.randn(9)}


def settings_of(made: ir.Model) -> list[int]:
    (node,) = (node for node in made.graph if node.op_type == "ATen")
    constant = ir.convenience.get_const_tensor(node.inputs[3]) if node.inputs[3] else None
    assert constant is not None
    return constant.numpy().tolist()


def test_fires() -> None:
    made = typed("loss, gw")
    assert UnreadGradients().apply(made).fired == 1
    assert settings_of(made) == [-100, 1, 0, 1, 0]


def test_must_not_fire() -> None:
    made = typed("loss, gh, gw, gb")
    assert UnreadGradients().apply(made).fired == 0
    assert settings_of(made) == [-100, 1, 1, 1, 1]


def test_same_numbers() -> None:
    given = inputs()
    expected = run(typed("loss, gw"), given)
    made = typed("loss, gw")
    UnreadGradients().apply(made)
    for actual, reference in zip(run(made, given), expected, strict=True):
        torch.testing.assert_close(actual, reference)
