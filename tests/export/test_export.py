"""Exported models beside their modules, in sessions that know nothing of torch; and what can't be exported."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

import lit_ort
from lit_ort.errors import ExportError
from lit_ort.export import write as writing
from lit_ort.export.check import error_of
from tests.compare import SINCE_2_15
from tests.lightning_models import BATCH, Net, loader, trainer
from tests.zoo import image_and_sound_models, plain_models, text_models

CASES = {**text_models.CASES, **image_and_sound_models.CASES, **plain_models.CASES}
pytestmark = pytest.mark.usefixtures("one_thread", "forked_sessions")


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.append(nn.Linear(8, 4))


class Words(LightningModule):
    """Logits and their likeliest, from tokens and an optional scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.out = nn.Embedding(11, 16), nn.Dropout(0.5), nn.Linear(16, 11)
        self.example_input_array = torch.randint(11, (4, 6))

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.out(self.dropout(self.embedding(tokens)))
        logits = logits if scale is None else logits * scale
        return {"logits": logits, "likeliest": logits.argmax(-1)}

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["tokens"])["likeliest"]


def operators(path: Path) -> set[str]:
    model = onnx.load(path)
    onnx.checker.check_model(model)
    return {node.domain for node in model.graph.node}


@pytest.mark.slow
def test_a_module_in_training_is_exported_in_eval_and_left_as_it_was(tmp_path: Path) -> None:
    module = Convolutions().train()
    module[0].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    exported = lit_ort.export(module, tmp_path / "model.onnx", torch.randn(4, 3, 16, 16))
    assert [part.training for part in module] == [False, *[True] * 5]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert exported.inputs == {"input": ("input_0", 3, "input_2", "input_3")}
    assert [one.shapes["input"] for one in exported.checked] == [(4, 3, 16, 16), (2, 3, 8, 8), (1, 3, 1, 1)]
    assert exported.error is not None
    assert exported.error < 1e-5
    assert operators(exported.path) <= {"", "ai.onnx"}
    assert "largest error compared with eager" in str(exported)
    assert "exported in eval mode; the module itself stays in training mode" in str(exported)
    assert "training mode" not in str(lit_ort.export(module.eval(), exported.path, torch.randn(4, 3, 16, 16)))


@pytest.mark.slow
def test_names_sizes_and_facts(tmp_path: Path) -> None:
    exported = lit_ort.export(Words(), tmp_path / "model.onnx", metadata={"tokenizer": "words"})
    assert exported.inputs == {"tokens": ("tokens_0", "tokens_1")}
    assert exported.outputs == ("logits", "likeliest")
    facts = {fact.key: fact.value for fact in onnx.load(exported.path).metadata_props}
    assert facts["class"].endswith("test_export.Words")
    assert facts["tokenizer"] == "words"
    assert {"torch", "lit_ort", "step"} <= facts.keys()


@pytest.mark.slow
def test_a_batch_of_keywords_and_of_a_loader(tmp_path: Path) -> None:
    module, tokens = Words(), torch.randint(11, (2, 5))
    scale = torch.tensor(2.0, requires_grad=True)
    keywords = lit_ort.export(module, tmp_path / "a.onnx", {"tokens": tokens, "scale": scale})
    assert list(keywords.inputs) == ["tokens", "scale"]
    predicted = lit_ort.export(module, tmp_path / "b.onnx", {"tokens": tokens}, step="predict_step")
    assert list(predicted.inputs) == ["tokens"]
    assert predicted.outputs == ("output",)


@pytest.mark.slow
def test_names_and_sizes_may_be_given(tmp_path: Path) -> None:
    names: Any = {"input_names": ["words"], "output_names": ["scores", "best"]}
    exported = lit_ort.export(Words(), tmp_path / "m.onnx", dynamic={"words": {0: "batch"}}, **names)
    assert exported.inputs == {"words": ("batch", 6)}
    assert exported.outputs == ("scores", "best")
    fixed = lit_ort.export(Words(), tmp_path / "m.onnx", dynamic=False)
    assert fixed.inputs == {"tokens": (4, 6)}
    assert len(fixed.checked) == 1


@pytest.mark.slow
def test_one_item_is_enough_for_a_batch_that_changes(tmp_path: Path) -> None:
    exported = lit_ort.export(Net(), tmp_path / "m.onnx", torch.randn(1, 6))
    assert exported.inputs == {"x": ("x_0", 6)}
    named = lit_ort.export(Net(), tmp_path / "m.onnx", torch.randn(1, 6), dynamic={"x": {0: "batch"}})
    assert named.inputs == {"x": ("batch", 6)}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.sampled(1)
def test_weights_in_16_bits(tmp_path: Path, form: Any) -> None:
    module = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    exported = lit_ort.export(module, tmp_path / "m.onnx", torch.randn(4, 256), half=form)
    assert exported.form == form
    assert 0.49 < exported.size_bytes / exported.float32_bytes < 0.52
    assert exported.error is not None
    assert 1e-6 < exported.error < 1e-2
    with pytest.raises(ExportError, match=f"in {form} has an error of .* but tolerance=1e-07"):
        lit_ort.export(module, tmp_path / "n.onnx", torch.randn(4, 256), half=form, tolerance=1e-7)
    assert not (tmp_path / "n.onnx").exists()


@pytest.mark.slow
def test_matmuls_in_8_bits(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    exported = lit_ort.export(module, tmp_path / "m.onnx", torch.randn(4, 256), quantize="int8")
    assert 0.24 < exported.size_bytes / exported.float32_bytes < 0.28
    assert exported.error is not None
    # Eight bits would have 0.12 on a CPU without VNNI.
    assert 1e-5 < exported.error < 0.05
    assert "MatMulInteger" in {node.op_type for node in onnx.load(exported.path).graph.node}


@pytest.mark.sweep
def test_weights_beyond_two_gib_lie_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "EXTERNAL_BYTES", 2**10)
    exported = lit_ort.export(nn.Linear(64, 64), tmp_path / "m.onnx", torch.randn(2, 64))
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert exported.error is not None
    assert exported.size_bytes > 4 * 64 * 64
    halved = lit_ort.export(nn.Linear(64, 64), tmp_path / "h.onnx", torch.randn(2, 64), half="float16")
    assert halved.size_bytes < exported.size_bytes
    assert (tmp_path / "h.onnx.data").stat().st_size < 3 * 64 * 64
    small = lit_ort.export(nn.Linear(64, 64), tmp_path / "q.onnx", torch.randn(2, 64), quantize="int8")
    assert small.size_bytes < halved.size_bytes
    # Nothing is left of a larger model.
    monkeypatch.undo()
    lit_ort.export(nn.Linear(64, 64), tmp_path / "h.onnx", torch.randn(2, 64))
    assert not (tmp_path / "h.onnx.data").exists()


class Fitted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rows", float(len(batch[0])))
        return F.cross_entropy(self(x=batch[0]), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Fitted, pytest.param(Net, marks=pytest.mark.sweep)])
def test_the_batch_of_the_last_fit_is_the_example(kind: type[Net], tmp_path: Path) -> None:
    module = kind()
    trainer("ort", max_epochs=1).fit(module, loader(), loader())
    exported = lit_ort.export(module, tmp_path / "a.onnx")
    assert exported.inputs == {"x": ("x_0", 6)}
    assert exported.checked[0].shapes == {"x": (BATCH, 6)}
    predicted = lit_ort.export(module, tmp_path / "b.onnx", step="predict_step")
    assert predicted.checked[0].shapes["batch_0"] == (BATCH, 6)
    assert module.training


class Stepwise(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.body(batch[0])), batch[1])


def test_a_step_that_does_not_call_the_module_leaves_no_example(tmp_path: Path) -> None:
    module = Stepwise()
    trainer("ort", max_epochs=1).fit(module, loader(), loader())
    with pytest.raises(ExportError, match="Stepwise.training_step doesn't call the module itself"):
        lit_ort.export(module, tmp_path / "m.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("BERT", "ResNet", "LSTM", "VAE"),
        # Llama is exported with its cache below.
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("Llama", "ViT")),
    ],
)
@pytest.mark.sampled(2)
def test_models(name: str, tmp_path: Path) -> None:
    module, batch = CASES[name].make(0.0)
    exported = lit_ort.export(module, tmp_path / "m.onnx", {k: v for k, v in batch.items() if k != "labels"})
    assert len(exported.checked) >= 2
    assert exported.error is not None
    assert exported.error < 1e-4


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["BART", "T5"])
def test_an_encoder_and_a_decoder_are_two_files(name: str, tmp_path: Path) -> None:
    made, batch = CASES[name].make(0.0)
    module: Any = made.eval()
    words, mask = batch["input_ids"], batch["attention_mask"]
    encoder = lit_ort.export(module.get_encoder(), tmp_path / "e.onnx", {"input_ids": words, "attention_mask": mask})
    with torch.no_grad():
        states = module.get_encoder()(input_ids=words, attention_mask=mask).last_hidden_state
    given = {"encoder_outputs": (states,), "decoder_input_ids": batch["labels"][:, :6], "attention_mask": mask}
    decoder = lit_ort.export(module, tmp_path / "d.onnx", {**given, "use_cache": False})
    assert list(decoder.inputs) == ["encoder_outputs_0", "decoder_input_ids", "attention_mask"]
    assert [len(exported.checked) for exported in (encoder, decoder)] == [3, 3]
    assert max(encoder.error or 1.0, decoder.error or 1.0) < 1e-5


@pytest.mark.slow
# In transformers 5.24.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT-2", marks=pytest.mark.sweep)])
def test_a_decoder_goes_on_from_its_cache(name: str, tmp_path: Path) -> None:
    made, batch = CASES[name].make(0.0)
    module: Any = made.eval()
    words = batch["input_ids"]
    with torch.no_grad():
        past = module(input_ids=words[:, :8], use_cache=True).past_key_values
        whole = module(input_ids=words).logits
    before = past.layers[0].keys.clone()
    given = {"input_ids": words[:, 8:], "attention_mask": torch.ones_like(words), "past_key_values": past}
    dynamic: dict[str, dict[int, str]] = {
        "input_ids": {0: "batch", 1: "length"},
        "attention_mask": {0: "batch", 1: "past + length"},
    }
    kept = [f"past_key_values_{k}_{part}" for k in range(len(past.layers)) for part in ("key", "value")]
    dynamic |= {name: {0: "batch", 2: "past"} for name in kept}
    exported = lit_ort.export(module, tmp_path / "m.onnx", {**given, "use_cache": True}, dynamic=dynamic)
    assert exported.inputs["attention_mask"] == ("batch", "past + length")
    assert exported.outputs == ("logits", *(f"{name}_out" for name in kept))
    assert [one.shapes["attention_mask"][1] for one in exported.checked] == [10, 5, 2]
    assert torch.equal(past.layers[0].keys, before)

    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    empty = {name: np.zeros((2, *before.shape[1:2], 0, before.shape[3]), np.float32) for name in kept}
    for start, stop in ((0, 6), (6, 9), (9, 10)):
        feeds = {"input_ids": words[:, start:stop].numpy(), "attention_mask": np.ones((2, stop), np.int64), **empty}
        logits, *values = session.run(None, feeds)
        empty = dict(zip(kept, values, strict=True))
        np.testing.assert_allclose(logits, whole[:, start:stop], rtol=1e-4, atol=1e-5)


REJECTED = f"Net.forward rejects the batch: RuntimeError: {'addmm: ' if SINCE_2_15 else ''}mat1 and mat2"


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x @ x.T).real


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("module", "batch", "settings", "message"),
    [
        (Net(), None, {}, "Net has no example_input_array and wasn't fitted in this process. Pass a batch"),
        (Net(), torch.randn(2, 7), {}, REJECTED),
        (Net(), {"y": torch.randn(2, 6)}, {}, "got an unexpected keyword argument 'y'"),
        (Net(), "text", {}, "The batch, a str, has no tensor."),
        (Net(), torch.randn(2, 6), {"step": "fit"}, "Net has no step='fit'. Use forward or predict_step."),
        (Net(), torch.randn(2, 6), {"opset": 9}, "opset=9 is not supported. Use one of 18 to 21."),
        (Net(), torch.randn(2, 6), {"half": "fp16"}, "half='fp16' is unknown. Use None, 'float16' or 'bfloat16'."),
        (Net(), torch.randn(2, 6), {"quantize": "int4"}, "quantize='int4' is unknown. Use None or 'int8'."),
        (Net(), torch.randn(2, 6), {"half": "float16", "quantize": "int8"}, "can't be combined. Use one of them."),
        (Net(), torch.randn(2, 6), {"input_names": ["a", "b"]}, "input_names=['a', 'b'], but the call has 1 tensors."),
        (Net(), torch.randn(2, 6), {"dynamic": {"y": {0: "n"}}}, "dynamic names 'y', which is not an input. The"),
        (Net(), torch.randn(2, 6), {"dynamic": {"x": {1: "n"}}}, "Dimension 1 of x can't be dynamic"),
        (Net(), torch.randn(2, 6), {"dynamic": {"x": {2: "n"}}}, "dynamic names dimension 2 of x, which has 2."),
        (Sorted(), torch.randn(3, 3), {}, "Sorted can't be exported (operator"),
    ],
)
def test_what_is_refused_leaves_nothing(
    module: nn.Module, batch: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=re.escape(message)):
        lit_ort.export(module, tmp_path / "m.onnx", batch, **settings)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_file_stays_where_another_export_fails(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"before")
    with pytest.raises(ExportError, match="has an error of"):
        lit_ort.export(Net(), path, torch.randn(2, 6), tolerance=0.0)
    assert path.read_bytes() == b"before"


class Constant(nn.Module):
    """Takes a size for a constant where the exporter doesn't see it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(torch.tensor(x.shape[0]).item() if not torch.compiler.is_exporting() else 4)


@pytest.mark.slow
def test_a_size_that_is_a_constant_in_the_file_alone(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"'x': \(2, 3\)}, but tolerance=0.0001. Fix that size: dynamic=False, or name"
    ):
        lit_ort.export(Constant(), tmp_path / "m.onnx", torch.randn(4, 6))
    assert lit_ort.export(Constant(), tmp_path / "m.onnx", torch.randn(4, 6), dynamic=False).error == 0


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="can't be written: (Not a directory|File exists). Choose another path."):
        lit_ort.export(Net(), tmp_path / "file" / "m.onnx", torch.randn(2, 6))


@pytest.mark.slow
def test_another_result_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = writing.describe

    def wrong(model: onnx.ModelProto, *arguments: Any) -> None:
        describe(model, *arguments)
        bias = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("head.bias"))
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(1), bias.name))

    monkeypatch.setattr(writing, "describe", wrong)
    with pytest.raises(ExportError, match=r"of the largest value in output \(Gemm\) at {'x': \(2, 6\)}"):
        lit_ort.export(Net(), tmp_path / "m.onnx", torch.randn(2, 6))


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.body = kind(4, 8, **settings)
        self.head = nn.Linear(16 if settings.get("bidirectional") else 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sequence = self.body(x)[0]
        return self.head(sequence), sequence.mean((0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (nn.GRU, {"num_layers": 2, "batch_first": True}),
        (nn.LSTM, {"bidirectional": True}),
        pytest.param(nn.LSTM, {"num_layers": 2, "batch_first": True}, marks=pytest.mark.sweep),
        pytest.param(nn.GRU, {"bidirectional": True}, marks=pytest.mark.sweep),
        *(
            pytest.param(kind, {"bias": False, "batch_first": True}, marks=pytest.mark.sweep)
            for kind in (nn.GRU, nn.LSTM)
        ),
    ],
)
def test_recurrent_layers_of_any_length(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    module = Recurrent(kind, **settings).eval()
    path = tmp_path / "model.onnx"
    lit_ort.export(module, path, torch.randn(3, 7, 4))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in [(3, 7, 4), (5, 2, 4), (1, 12, 4)]:
        x = torch.randn(shape)
        for found, expected in zip(session.run(None, {"x": x.numpy()}), module(x), strict=True):
            torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-5, atol=1e-6)


class Weighted(nn.Module):
    """Reads the size of one dimension in Python, and multiplies another one by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        steps = sum(x[:, k] * k for k in range(x.shape[1]))
        return self.layer(steps) + y.mean()


@pytest.mark.slow
def test_fixed_sizes_are_named_with_their_place(tmp_path: Path) -> None:
    exported = lit_ort.export(Weighted(), tmp_path / "model.onnx", (torch.randn(2, 5, 4), torch.randn(3)))
    assert exported.inputs == {"x": ("x_0", 5, 4), "y": ("y_0",)}
    first = Weighted.forward.__code__.co_firstlineno
    assert exported.fixed_sizes == (
        f"x has 5 in dimension 1 at {__file__}:{first + 1}",
        f"x has 4 in dimension 2 at {__file__}:{first + 2}",
    )
    assert "sizes that the module uses as constants: x has 5" in str(exported)
    fixed = lit_ort.export(Weighted(), tmp_path / "model.onnx", (torch.randn(2, 5, 4), torch.randn(3)), dynamic=False)
    assert not fixed.fixed_sizes


def test_a_value_that_is_not_a_number_is_the_largest_error() -> None:
    one, nothing = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    assert error_of(nothing, one) == error_of(one, nothing) == torch.inf
    assert error_of(nothing, nothing) == error_of(one, one) == 0
