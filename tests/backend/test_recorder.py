"""Functions of `torch.compile` alone, without a strategy: what Dynamo leaves in eager is reported or refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_ort._compat import container_writes
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.explanation import explain
from lit_ort.errors import DEFECT, CaptureError, LitOrtWarning, OptionsError
from lit_ort.options import ORTOptions
from tests.compare import assert_same_step, backend

HERE = __file__


def looping(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x.exp()
        print(end="")
    return x.sum()


PRINT = f"{HERE}:{looping.__code__.co_firstlineno + 3}"


def scaled(x: Tensor, word: str) -> Tensor:
    return x.exp().sum() * len(word)


def test_a_function_in_eager_is_warned_of_and_counted() -> None:
    engine = backend(fallback="warn")
    compiled = torch.compile(looping, backend=engine)
    with pytest.warns(LitOrtWarning, match=r"^looping runs in eager PyTorch: Dynamo can't trace `print`") as caught:
        assert compiled(torch.zeros(2)) == looping(torch.zeros(2))
    (warning,) = caught
    assert f"{warning.filename}:{warning.lineno}" == PRINT
    assert explain(engine).counts == "no graph, 1 function in eager PyTorch, no graph break"


def test_a_function_in_eager_is_refused() -> None:
    compiled = torch.compile(looping, backend=backend())
    with pytest.raises(CaptureError, match=r"^looping can't run through ONNX Runtime \(.*\): Dynamo can't .*`print`"):
        compiled(torch.zeros(2))
    with pytest.raises(CaptureError):
        compiled(torch.zeros(2))


def test_the_named_backend_reports_too() -> None:
    options: dict[str, Any] = {"fallback": "error"}
    with pytest.raises(CaptureError, match="`print`"):
        torch.compile(looping, backend="ort", options=options)(torch.zeros(2))
    with pytest.warns(LitOrtWarning, match="looping runs in eager"):
        torch.compile(looping, backend="ort")(torch.zeros(2))


def test_an_invalid_option_is_an_error_of_its_own() -> None:
    with pytest.raises(OptionsError, match="fallback='never'"):
        torch.compile(looping, backend="ort", options={"fallback": "never"})(torch.zeros(2))
    with pytest.raises(OptionsError, match=r"torch.compile\(mode='max-autotune'\) is not for backend='ort'"):
        torch.compile(looping, backend="ort", mode="max-autotune")(torch.zeros(2))


def test_a_recurrent_layer_of_packed_sequences_is_one_graph() -> None:
    layer = nn.GRU(4, 3, batch_first=True)

    def packed(x: Tensor, lengths: Tensor) -> Tensor:
        outputs, _ = layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)[0]

    engine, inputs = backend(), (torch.randn(2, 5, 4), torch.tensor([5, 3]))
    torch.testing.assert_close(torch.compile(packed, backend=engine)(*inputs), packed(*inputs))
    assert explain(engine).counts == "1 graph (1 split), no fallback, no graph break"


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_need_no_setting(layer: Any) -> None:
    torch.manual_seed(0)
    module = layer(4, 3, batch_first=True)
    engine = assert_same_step(module, lambda module, x: module(x)[0].square().sum(), torch.randn(2, 5, 4))
    assert explain(engine).counts == "1 graph (1 fused), no fallback, no graph break"
    direct, alone = torch.compile(module, backend=(engine := backend())), torch.randn(2, 5, 4)
    torch.testing.assert_close(direct(alone)[0], module(alone)[0])
    direct(alone)
    assert explain(engine).counts.endswith("no fallback, no graph break")
    assert len(explain(engine).graphs) == 1
    assert torch._dynamo.config.allow_rnn is False


def test_settings_that_hold_while_tracing_cause_no_recompile() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    recurrent = nn.LSTM(8, 8, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    engine = backend()
    compiled = torch.compile(lambda x: recurrent(encoder(x, mask))[0].sum(), backend=engine)
    compiled(torch.randn(2, 3, 8))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(2, 3, 8))
    assert explain(engine).counts == "1 graph (1 fused), no fallback, no graph break"


def test_a_module_of_torch_that_is_left_in_eager() -> None:
    class Printing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return looping(x)

    engine = backend(fallback="warn")
    module = torch.compile(nn.Sequential(Printing()), backend=engine)
    with pytest.warns(LitOrtWarning, match="^the compiled module runs in eager PyTorch|^looping runs"):
        module(torch.zeros(2))
    assert explain(engine).is_partly_eager
    torch.compiler.reset()
    with pytest.raises(CaptureError, match=r"can't run through ONNX Runtime"):
        torch.compile(nn.Sequential(Printing()), backend=backend())(torch.zeros(2))


def test_the_recompile_limit_is_torchs() -> None:
    def run(compiled: Any) -> None:
        for count in range(10):
            assert compiled(torch.zeros(2), "x" * count) == scaled(torch.zeros(2), "x" * count)

    engine = backend(fallback="warn")
    compiled = torch.compile(scaled, backend=engine, dynamic=False)
    with pytest.warns(LitOrtWarning, match="scaled runs in eager PyTorch: it was compiled 8 times") as caught:
        run(compiled)
    assert len(caught) == 1
    torch.compiler.reset()
    compiled = torch.compile(scaled, backend=backend(), dynamic=False)
    with pytest.raises(
        CaptureError, match="it was compiled 8 times.*the guard `word == 'x*'` failed. If the value keeps"
    ):
        run(compiled)


def test_an_exception_in_torch_is_named() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2)])

    def wrong(x: Tensor) -> Tensor:
        return layers[3](x)

    message = "wrong runs in eager PyTorch: an exception is raised while Dynamo traces it: IndexError.*out of range"
    with pytest.raises(IndexError, match="out of range"), pytest.warns(LitOrtWarning, match=message):
        torch.compile(wrong, backend=backend(fallback="warn"))(torch.zeros(2, 2))


def test_an_exception_of_the_function_is_no_report() -> None:
    def failing(x: Tensor) -> Tensor:
        raise KeyError("third batch")

    with pytest.raises(KeyError, match="third batch"):
        torch.compile(failing, backend=backend())(torch.zeros(2))


def test_other_backends_keep_torchs_settings() -> None:
    """Only functions for `ort` are traced with its settings."""
    module = nn.LSTM(4, 3)
    graphs = []

    def other(graph_module: Any, _: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    with warnings.catch_warnings():
        warnings.simplefilter("error", LitOrtWarning)
        torch.compile(module, backend=other)(torch.zeros(2, 1, 4))
    assert graphs == []
    torch.compiler.reset()
    torch.compile(module, backend=ORTBackend(ORTOptions(fallback="error")))(torch.zeros(2, 1, 4))


def test_a_function_that_raises_in_dynamos_view_alone_is_in_the_explanation() -> None:
    class Hidden(nn.Module):
        """nn.Module finds the submodule where the property raises an AttributeError."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)  # pyright: ignore[reportAttributeAccessIssue] - hidden

        @property
        def head(self) -> Any:
            return self._head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    module = Hidden()
    for _ in range(2):
        engine = backend()
        torch.compile(module, backend=engine)(torch.zeros(2, 2))
        assert ["_head" in function.reason for function in explain(engine).eager_functions] == [True]


def test_an_error_in_a_hook_of_this_package_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(compile("def fail(*_):\n    raise KeyError('missing')\n", container_writes.__file__, "exec"), names)
    monkeypatch.setattr(container_writes, "_length", names["fail"])
    compiled = torch.compile(lambda x: x * len([1]), backend=backend(fallback="warn"))
    with pytest.raises(AssertionError, match=rf"{DEFECT}: .*missing, at _compat.container_writes\.py:2"):
        compiled(torch.ones(2))
