"""Compiled graphs on disk: hits, misses, and damaged or foreign files, which are neither used nor removed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor, fx, nn

import lit_ort
from lit_ort.backend.cache import store
from lit_ort.backend.cache.content import content_of
from lit_ort.backend.cache.entry import FORMAT, NotPlain, UnusableEntry, decode, encode, from_plain, to_plain
from lit_ort.backend.cache.measured_steps import MeasuredStep, MeasuredSteps
from lit_ort.backend.compilation import Compilation
from lit_ort.backend.request import Request
from lit_ort.capture.numbers import separate_numbers
from lit_ort.commands import cache as command
from lit_ort.errors import LitOrtWarning, OptionsError, VerificationError
from lit_ort.options import ORTOptions
from lit_ort.runtime.program import Phase
from tests.backend.wrong import scale_outputs
from tests.compare import REASON, backend, gradients, sparse_gradient
from tests.lightning_models import Net, loader, trainer
from tests.scripts import run_code


class Regressor(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.gelu(self.hidden(x))))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def step(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def outcome(folder: Path, function: Callable[..., Any] = step, rows: int = 5, **options: Any) -> dict[str, Any]:
    """Runs one step with a new backend on the same numbers. Returns its values, its backend and its cache's outcome."""
    torch.compiler.reset()
    torch.manual_seed(3)
    module, x = Regressor(), torch.randn(rows, 6)
    engine = backend(**{"cache_dir": str(folder), **options})
    result = torch.compile(function, backend=engine)(module, x)
    if result.requires_grad:
        result.sum().backward()
    values = {"result": result.detach(), **gradients(module)}
    return {"values": values, "engine": engine, "cache": engine.compile_log.graphs[0].cache}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ortgraph"))


def without_gradients(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x).mean()


KINDS = {"fused": step, "split": lambda module, x: module(x) * 2, "forward": without_gradients}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_has_the_results_of_a_miss(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miss = outcome(tmp_path, KINDS[kind])
    monkeypatch.setattr("lit_ort.backend.build.build", lambda *_, **__: pytest.fail("a hit builds nothing"))
    hit = outcome(tmp_path, KINDS[kind])
    assert (miss["cache"], hit["cache"]) == ("written", "read")
    assert_equal(miss["values"], hit["values"])
    reports = [result["engine"].compile_log.graphs[0] for result in (miss, hit)]
    assert reports[0].kind == reports[1].kind == kind
    assert reports[0].passes == reports[1].passes
    assert "cache    read" in lit_ort.explain(hit["engine"]).details()


def other_code(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).abs().mean()


def other_number(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean() * 1.5


def frozen(module: Regressor, x: Tensor) -> Tensor:
    module.head.bias.requires_grad_(False)
    return step(module, x)


def detached(module: Regressor, x: Tensor) -> Tensor:
    return module.head(module.hidden(x).detach()).square().mean()


def attached(module: Regressor, x: Tensor) -> Tensor:
    return module.head(module.hidden(x).clone()).square().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({}, {"rows": 7}, id="shape"),
        pytest.param({}, {"disable_passes": ("dropout",)}, id="pass"),
        pytest.param({}, {"function": other_code}, id="code"),
        pytest.param({"function": other_number}, {"function": step}, id="number"),
        pytest.param({}, {"function": frozen}, id="frozen"),
        pytest.param({}, {"function": without_gradients}, id="grad mode"),
        pytest.param({"function": attached}, {"function": detached}, id="detach"),
    ],
)
def test_another_graph_misses(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    for settings in (first, second):
        assert outcome(tmp_path, **settings)["cache"] == "written"
    assert len(entries(tmp_path)) == 2
    assert outcome(tmp_path, **first)["cache"] == "read"


def test_options_that_do_not_affect_the_model_hit(tmp_path: Path) -> None:
    outcome(tmp_path)
    assert outcome(tmp_path, threads=1, allow_spinning=True, verify_tolerance=1e-3)["cache"] == "read"


def test_another_version_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = store.environment("stock onnxruntime 1.24.1")
    parts = ("torch", "onnxruntime", "onnx", "python", "cpu", "lit_ort")
    assert environment.keys() >= set(parts)
    for part in ("none", *parts):
        changed = {name: "another" if name == part else value for name, value in environment.items()}
        monkeypatch.setattr(store, "environment", lambda engine, changed=changed: changed)
        assert outcome(tmp_path)["cache"] == "written", part
    assert len(entries(tmp_path)) == 1 + len(parts)


def graph_with(constant: object, function: Callable[..., Any] = torch.mul) -> fx.GraphModule:
    """x * constant, where the constant is an attribute of the module."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(3)
    root: Any = nn.Module()
    root.constant = constant
    result = graph.call_function(function, (x, graph.get_attr("constant")))
    result.meta["example_value"] = torch.zeros(3)
    graph.output((result,))
    return fx.GraphModule(root, graph)


def request(graph: fx.GraphModule) -> Request:
    return Request(separate_numbers(graph), graph, [torch.zeros(3)], (), any_sizes=False)


def test_constants_are_digested_by_value() -> None:
    first, same = (content_of(request(graph_with(torch.tensor([1.0, 2.0, 3.0])))).digest for _ in range(2))
    value = content_of(request(graph_with(torch.tensor([1.0, 2.0, 4.0])))).digest
    dtype = content_of(request(graph_with(torch.tensor([1, 2, 3])))).digest
    assert first is not None
    assert first == same
    assert len({first, value, dtype}) == 3


def test_graphs_that_their_content_does_not_determine_are_not_kept(tmp_path: Path) -> None:
    for graph, reason in (
        (graph_with(object()), "attribute constant is a object"),
        (graph_with(torch.ones(3), lambda a, b: a + b), "not torch's"),
    ):
        content = content_of(request(graph))
        assert content.digest is None
        assert reason in str(content.obstacle)
    torch.compiler.allow_in_graph(local_function)
    result = outcome(tmp_path, lambda module, x: local_function(module(x)).mean())
    assert result["cache"].startswith("not kept: it calls tests.backend.test_cache.local_function")
    assert not entries(tmp_path)


def local_function(x: Tensor) -> Tensor:
    return x * 3


def test_the_settings_around_a_graph_are_part_of_it(tmp_path: Path) -> None:
    graph = graph_with(torch.ones(3))
    plain = content_of(request(graph)).digest
    torch.set_default_dtype(torch.float64)
    try:
        assert content_of(request(graph)).digest != plain
    finally:
        torch.set_default_dtype(torch.float32)
    outcome(tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert outcome(tmp_path)["cache"] == "written"
        assert outcome(tmp_path)["cache"] == "read"


def broken(data: bytes) -> dict[str, bytes]:
    first, _, rest = data.partition(b"\n")
    middle = len(data) // 2
    return {
        "empty": b"",
        "half-written": data[:middle],
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "foreign": b"\x89PNG not an entry",
        "one line": FORMAT,
        "another format": first[:-1] + b"9\n" + rest,
        "model of another kind": sealed(data, model=b"\xff\xff\xff"),
        "model that can't run": sealed(data, model=b""),
        "invalid description": sealed(data, program={"kind": 3}),
        "incomplete description": sealed(data, report=None),
        "models of other sizes": sealed(data, models=[1, 2]),
        "another graph's": sealed(data, key="0" * 64),
    }


def sealed(data: bytes, model: bytes | None = None, **changes: object) -> bytes:
    """An entry with a changed description or another model, and a valid checksum."""
    _, _, text, original = data.split(b"\n", 3)
    content = json.dumps({**json.loads(text), **changes}).encode() + b"\n" + (original if model is None else model)
    return b"\n".join((FORMAT, hashlib.sha256(content).hexdigest().encode(), content))


@pytest.fixture(scope="module")
def entry_of_a_step(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes, dict[str, Tensor]]:
    """The name and the content of an entry, and the values of its step."""
    folder = tmp_path_factory.mktemp("cache")
    # With regions, the graph has too few operators for a model.
    miss = outcome(folder, disable_passes=("regions",))
    (entry,) = entries(folder)
    return entry.name, entry.read_bytes(), miss["values"]


# All but this are found by reading.
KINDS_OF_DAMAGE = [*broken(b"a\nb\n{}\nc")]
FOUND_BY_RUNNING = "model that can't run"


@pytest.mark.parametrize("kind", [kind for kind in KINDS_OF_DAMAGE if kind != FOUND_BY_RUNNING])
def test_a_damaged_entry_is_unusable(kind: str, entry_of_a_step: tuple[str, bytes, dict[str, Tensor]]) -> None:
    name, data, _ = entry_of_a_step
    key = name.removesuffix(".ortgraph")
    decode(data, key)
    with pytest.raises(UnusableEntry):
        decode(broken(data)[kind], key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("flipped", FOUND_BY_RUNNING) else pytest.mark.sweep)
        for kind in KINDS_OF_DAMAGE
    ],
)
def test_a_damaged_entry_is_replaced_with_a_warning(
    kind: str, tmp_path: Path, entry_of_a_step: tuple[str, bytes, dict[str, Tensor]]
) -> None:
    name, data, values = entry_of_a_step
    (tmp_path / name).write_bytes(broken(data)[kind])
    with pytest.warns(LitOrtWarning, match=r"cached graph .* can't be used: .* compiled again"):
        again = outcome(tmp_path, disable_passes=("regions",))
    assert again["cache"] == "written"
    assert_equal(values, again["values"])
    assert outcome(tmp_path, disable_passes=("regions",))["cache"] == "read"


def naming(data: bytes, target: str) -> bytes:
    """An entry whose first statement calls another operator."""
    program = json.loads(data.split(b"\n", 3)[2])["program"]
    program["forward"]["nodes"][0]["statements"][0]["target"] = target
    return sealed(data, program=program)


@pytest.mark.parametrize("target", ["aten.from_file.default", "aten.set_.source_Storage", "test_cache.twice.default"])
def test_an_entry_calls_only_operators_on_tensors(target: str, tmp_path: Path) -> None:
    if target.startswith("test_cache"):
        torch.library.custom_op("test_cache::twice", lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor")
    outcome(tmp_path, disable_passes=("regions",))
    (entry,) = entries(tmp_path)
    data = entry.read_bytes()
    key = entry.name.removesuffix(".ortgraph")
    decode(naming(data, "aten.mm.default"), key)
    with pytest.raises(UnusableEntry, match=rf"it calls {target}, which is not one of torch's operators on tensors"):
        decode(naming(data, target), key)
    model = data.split(b"\n", 3)[3]
    with pytest.raises(UnusableEntry, match="its models refer to other files"):
        decode(sealed(data, model=model[:-8] + b"location"), key)


def test_a_pipe_in_place_of_an_entry_does_not_block(tmp_path: Path) -> None:
    first = outcome(tmp_path)
    (entry,) = entries(tmp_path)
    entry.unlink()
    os.mkfifo(entry)
    with pytest.warns(LitOrtWarning, match="can't be used: .*is not a regular file"):
        again = outcome(tmp_path)
    assert_equal(first["values"], again["values"])


def decomposed(module: nn.Module, x: Tensor) -> Tensor:
    values = torch.linalg.svdvals(module(x)) + torch.linalg.eigvalsh(module(x).t() @ module(x))
    return values.sum() + torch.searchsorted(x[0].detach().sort().values, x[0].detach()).sum()


def test_operators_with_text_arguments_are_kept(tmp_path: Path) -> None:
    assert outcome(tmp_path, decomposed)["cache"] == "written"
    assert outcome(tmp_path, decomposed)["cache"] == "read"


def spectral(module: nn.Module, x: Tensor) -> Tensor:
    return torch.fft.fft(module(x)).real.T.square().mean()


def test_attributes_of_tensors_are_kept(tmp_path: Path) -> None:
    first, again = outcome(tmp_path, spectral), outcome(tmp_path, spectral)
    assert (first["cache"], again["cache"]) == ("written", "read")
    assert_equal(first["values"], again["values"])


def test_an_interrupted_write_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(LitOrtWarning, match=r"can't be written to: No space left"):
            result = outcome(tmp_path)
    assert result["cache"] == "not kept: No space left on device"
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OptionsError, match="is a file, but must be a folder"):
        ORTOptions(cache_dir=str(tmp_path / "file"))
    with pytest.warns(LitOrtWarning, match="can't be written to: Not a directory"):
        outcome(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("wrong", [3, "", True])
def test_other_values_than_paths_are_rejected(wrong: Any) -> None:
    with pytest.raises(OptionsError, match="cache_dir=.* is not a path"):
        ORTOptions(cache_dir=wrong)


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert ORTOptions(cache_dir="~/graphs").cache_dir == str(tmp_path / "graphs")
    assert ORTOptions(cache_dir="graphs").cache_dir == str(tmp_path / "graphs")


def test_a_graph_that_falls_back_is_not_cached(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.warns(LitOrtWarning, match=REASON):
            result = outcome(tmp_path, lambda module, x: sparse_gradient(module.hidden.weight), fallback="warn")
        assert result["cache"] is None
    assert not entries(tmp_path)


def test_a_dump_needs_a_build(tmp_path: Path) -> None:
    outcome(tmp_path / "cache")
    result = outcome(tmp_path / "cache", dump_dir=str(tmp_path / "dump"))
    assert result["cache"] == "written"
    assert len(list((tmp_path / "dump" / "graph_0").iterdir())) == 5


def test_verification_checks_the_cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome(tmp_path)
    assert outcome(tmp_path, verify_first_step=True)["cache"] == "read"
    (entry,) = entries(tmp_path)
    wrong = tmp_path / "wrong"
    with monkeypatch.context() as patch:
        scale_outputs(patch, (3, 8), 1.5)
        outcome(wrong)
    (other,) = entries(wrong)
    assert other.name == entry.name
    entry.write_bytes(other.read_bytes())
    with pytest.raises(VerificationError, match=r"graph_0 .* gradient of head\.weight 5\.0e-01"):
        outcome(tmp_path, verify_first_step=True)


def phases(compilation: Compilation) -> list[Phase]:
    return [phase for phase in (compilation.program.forward, compilation.program.backward) if phase is not None]


def test_an_entry_keeps_every_property_of_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Every(nn.Module):
        """Dynamic sizes, dropout, a buffer that is written, an alias, a number, two results with gradients."""

        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor, k: int) -> tuple[Any, ...]:
            hidden = F.dropout(self.linear(x), 0.5, True)
            self.mean.lerp_(hidden.detach().mean(0), 0.1)
            return hidden, hidden[: x.size(0) // 2], self.linear.weight.t() * 2, k + 1, "text", x > 0

    programs = []
    monkeypatch.setattr(store, "encode", lambda one, key: programs.append(one) or encode(one, key))
    engine = backend(cache_dir=str(tmp_path))
    compiled = torch.compile(Every(), backend=engine)
    for rows in (4, 6, 8):
        compiled(torch.randn(rows, 4), rows)[0].sum().backward()
    assert {compilation.program.kind for compilation in programs} == {"split"}
    assert any(compilation.program.signature.sizes for compilation in programs)
    for compilation in programs:
        again = decode(encode(compilation, "key"), "key")
        # Compared as JSON, because a value of type Any is read as a list where it was a tuple.
        for part in ("signature", "kind"):
            first, second = (json.dumps(to_plain(getattr(one.program, part))) for one in (again, compilation))
            assert first == second
        for phase, reference in zip(phases(again), phases(compilation), strict=True):
            assert phase.model == reference.model
            first, second = (json.dumps(to_plain(dataclasses.replace(one, model=b""))) for one in (phase, reference))
            assert first == second
        assert again.report == compilation.report
    with pytest.raises(UnusableEntry, match="another graph"):
        decode(encode(programs[0], "key"), "other")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (torch.dtype, torch.bfloat16),
        (torch.dtype | None, torch.int64),
        (torch.dtype | None, None),
        (frozenset[str], frozenset({"b", "a"})),
        (tuple[int | None, ...], (1, None)),
        (dict[str, int], {"Add": 2}),
    ],
)
def test_values_are_read_by_type(kind: Any, value: object) -> None:
    assert from_plain(kind, json.loads(json.dumps(to_plain(value)))) == value
    with pytest.raises(TypeError, match="is not"):
        from_plain(kind, 1.5)


def test_values_without_a_json_form_are_rejected() -> None:
    with pytest.raises(NotPlain, match="it contains a Size"):
        to_plain({"shape": torch.Size([3])})


SCRIPT = """
import sys, warnings, torch, lit_ort
warnings.simplefilter("error", lit_ort.LitOrtWarning)
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
step = torch.compile(lambda x: module(x).sum(), backend="ort", options={"cache_dir": sys.argv[1], "fallback": "error"})
step(torch.ones(2, 3)).backward()
# The training build of onnxruntime imports onnx itself.
stages = ("lit_ort.fusions", "lit_ort.joint", "lit_ort.lower", "lit_ort.passes")
building = ("onnx_ir", "onnxscript", "lit_ort.backend.build", "lit_ort.capture.capture", *stages)
print(module[0].weight.grad.sum().item(), lit_ort.explain().graphs[0].cache, *(m for m in building if m in sys.modules))
"""


def run_in_process(folder: Path) -> list[str]:
    ended = run_code([sys.executable, "-c", SCRIPT, str(folder)])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.slow
def test_processes_share_entries_and_a_hit_imports_no_stage_of_building(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(run_in_process, [tmp_path] * 2))
    assert any("lit_ort.lower" in imported for imported in together)
    assert len(list(tmp_path.iterdir())) == 1
    gradient, state, *imported = run_in_process(tmp_path)
    assert {result[0] for result in together} == {gradient}
    assert state == "read"
    assert not imported


@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval:UserWarning")
def test_through_lightning(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        torch.compiler.reset()
        seed_everything(1, verbose=False)
        module = Net(dropout=0.3)
        runner = trainer(lit_ort.ORTStrategy(fallback="error", cache_dir=str(tmp_path)), max_epochs=1)
        runner.fit(module, loader(), loader(batch=10))
        runs.append((module.losses, {graph.cache for graph in lit_ort.explain(runner).graphs}))
    (first, written), (second, read) = runs
    assert first == second
    assert "written" in written
    assert read == {"read"}


def test_list_and_clear_ignore_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome(tmp_path)
    (entry,) = entries(tmp_path)
    damaged = tmp_path / f"{'0' * 64}.ortgraph"
    damaged.write_bytes(b"")
    unfinished = tmp_path / f".{entry.name}.{'a' * 32}.tmp"
    unfinished.write_bytes(entry.read_bytes()[:100])
    others = [tmp_path / name for name in ("model.onnx", "mine.ortgraph", "notes.tmp")]
    for other in others:
        other.write_text("mine")
    (tmp_path / f"{'1' * 64}.ortgraph").mkdir()
    measured = MeasuredSteps(lit_ort.ORTOptions(cache_dir=str(tmp_path)), "an engine")
    measured.write("a step", "training_step of Net", MeasuredStep(0.007, 0.005, 3.0, from_cache=False))
    command.main(["list", str(tmp_path)])
    text = capsys.readouterr().out
    assert "fused graph_0: x float32[5, 6]" in text
    assert "unusable: it is in another format" in text
    assert "training_step of Net: 7.0 ms a call in eager, 5.0 ms compiled" in text
    assert "3 graphs, 1 measured step," in text
    command.main(["clear", str(tmp_path)])
    text = capsys.readouterr().out
    assert "removed 3 graphs, 1 measured step," in text
    assert "kept 4 other files" in text
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / f"{'1' * 64}.ortgraph"])
    with pytest.raises(SystemExit, match="is not a folder"):
        command.main(["clear", str(tmp_path / "missing")])
