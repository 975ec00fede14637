"""Canaries of what the engine uses: traces, operators, sizes, AOTAutograd, memory, ONNX Runtime's training build."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import fx, nn

from lit_ort.options import AUTO, TRAINING
from lit_ort.runtime.engines.choice import engine_of
from tests.compat.canary import canary

TORCH, OPS, FX, SIZES, AOT = "torch", "torch_ops", "torch_fx", "torch_sizes", "torch_aot"
ORT, RECURRENT, INTERPOLATION = "onnxruntime", "recurrent", "interpolation"
aten = torch.ops.aten


def dynamo_graph(function: Callable[..., Any], *arguments: Any, **settings: Any) -> fx.GraphModule:
    """The one graph that Dynamo makes of a function."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, examples: Any) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, **settings)(*arguments)
    (graph,) = graphs
    return graph


def targets(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes]


def fakes(mode: Any, *tensors: torch.Tensor) -> list[Any]:
    with mode:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, requires_grad=t.requires_grad) for t in tensors]


def trace_of(function: Callable[..., Any] | nn.Module, *tensors: torch.Tensor) -> Any:
    """AOTAutograd's trace of a function of tensors."""
    from lit_ort._compat.torch_aot import joint_trace
    from lit_ort._compat.torch_fx import aten_graph, fake_mode

    mode = fake_mode(symbolic=False)
    examples = fakes(mode, *tensors)
    return joint_trace(aten_graph(fx.symbolic_trace(function), examples, mode), examples, mode)


def described_in(trace: Any) -> tuple[list[Any], list[Any]]:
    """What the inputs and the outputs of a trace are."""
    from lit_ort._compat.torch_aot import described, descriptor_of

    nodes = list(trace.graph_module.graph.nodes)
    inputs = [described(descriptor_of(node)) for node in nodes if node.op == "placeholder"]
    return inputs, [None if one is None else described(one) for one in descriptor_of(nodes[-1])]


# torch


def test_autocast_borders() -> None:
    effect = "attention and losses inside an autocast region are fused in float32"

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    with canary("torch.amp.autocast_mode._enter_autocast", TORCH, effect) as compat:
        graph = dynamo_graph(function, torch.ones(2, 2))
        (enter,) = (node for node in graph.graph.nodes if node.target is compat.enter_autocast)
        (leave,) = (node for node in graph.graph.nodes if node.target is compat.exit_autocast)
        assert enter.args[:3] == ("cpu", torch.bfloat16, True)
        assert len(enter.args) == 4
        assert leave.args[0] is enter


def test_set_grad_enabled() -> None:
    effect = "fusions take values under no_grad for such that need a gradient"

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return x * y

    with canary("torch._C._set_grad_enabled", TORCH, effect) as compat:
        graph = dynamo_graph(function, torch.ones(2, requires_grad=True))
        assert [node.args[0] for node in graph.graph.nodes if node.target is compat.set_grad_enabled] == [False, True]


def test_data_attribute() -> None:
    with canary("torch._C._autograd._get_data_attr", TORCH, "steps that read tensor.data run in eager") as compat:
        assert compat.data_of in targets(dynamo_graph(lambda x: x.data * 2, torch.ones(2, requires_grad=True)))


def test_log_api_usage() -> None:
    effect = "a note of torch's about its use keeps graphs from being traced"

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._C._log_api_usage_once("canary")
        return x * 2

    with canary("torch._C._log_api_usage_once", TORCH, effect) as compat:
        assert compat.log_api_usage in targets(dynamo_graph(function, torch.ones(2)))


def test_dlpack() -> None:
    with canary("torch._C._to_dlpack and _from_dlpack", TORCH, "no session can take or give a tensor") as compat:
        tensor = torch.arange(6.0).reshape(2, 3).t()
        back = compat.from_dlpack(compat.to_dlpack(tensor))
        assert back.data_ptr() == tensor.data_ptr()
        assert back.stride() == tensor.stride()


def test_version() -> None:
    effect = "optimizer_in_graph takes gradients for its own that something was added to"
    with canary("Tensor._version", TORCH, effect) as compat:
        tensor = torch.ones(2)
        before = compat.version_of(tensor)
        tensor.add_(1)
        assert compat.version_of(tensor) == before + 1


@pytest.mark.parametrize("keep", [True, False])
def test_keep_graph(keep: bool) -> None:
    effect = "backward(retain_graph=True) hands out gradients once, or keeps them for ever"
    with canary("torch._C._autograd._get_current_graph_task_keep_graph", TORCH, effect) as compat:
        seen: list[bool] = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: seen.append(compat.keeps_graph()))
        x.sum().backward(retain_graph=keep)
        assert seen == [keep]


def test_storage() -> None:
    effect = "a graph that returns two views of one value is fused, and its gradients are wrong"
    with canary("UntypedStorage._cdata", TORCH, effect) as compat:
        from lit_ort._compat.torch_fx import fake_mode

        with fake_mode(symbolic=False):
            first, other = torch.empty(4), torch.empty(4)
            assert compat.memory_of(first) == compat.memory_of(first[1:])
            assert compat.memory_of(first) != compat.memory_of(other)


def test_owners_of_memory() -> None:
    effect = "a torch node's result may be written over while another value lies in its memory"
    with canary("torch._C._storage_Use_Count", TORCH, effect) as compat:
        alone = torch.zeros(4)
        assert compat.owners_of_memory(alone) == 1
        view = alone[1:]
        assert compat.owners_of_memory(alone) == compat.owners_of_memory(view) == 2
        del view
        assert compat.owners_of_memory(alone) == 1


def test_dispatch_mode() -> None:
    effect = "verification compares draws of dropout that differ"
    with canary("torch.utils._python_dispatch.TorchDispatchMode", TORCH, effect) as compat:
        seen = []

        class Watch(compat.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Watch():
            nn.functional.dropout(torch.ones(4), 0.5, True)
        assert aten.bernoulli_.float in seen


# Operators


def test_operator_types() -> None:
    effect = "nothing of a graph is known: views, writes, draws"
    with canary("torch._ops.OpOverload and HigherOrderOperator", OPS, effect) as ops:
        assert isinstance(aten.mm.default, ops.OpOverload)
        assert isinstance(torch.ops.higher_order.cond, ops.HigherOrderOperator)


def test_schemas() -> None:
    effect = "views are copied, writes and copies of draws merged"
    with canary("OpOverload._schema and its tags", OPS, effect) as ops:
        assert [ops.is_mutable(one) for one in (aten.add_.Tensor, aten.add.Tensor, len)] == [True, False, False]
        assert [ops.returns_alias(one) for one in (aten.t.default, aten.clone.default, len)] == [True, False, False]
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        calls = [(aten.bernoulli.default, {}), (aten.add.Tensor, {}), (flash, {}), (flash, {"dropout_p": 0.1})]
        drawing = [ops.draws(fx.Graph().call_function(target, kwargs=given)) for target, given in calls]
        assert drawing == [True, False, False, True]
        assert [ops.is_pointwise(one) for one in (aten.exp.default, aten.mm.default, len)] == [True, False, False]
        assert [ops.returns_list(one) for one in (aten.unbind.int, aten.exp.default, len)] == [True, False, False]
        counts = [ops.result_count(one) for one in (aten.native_layer_norm.default, aten.exp.default)]
        assert counts == [3, 1]


def test_out_overloads() -> None:
    effect = "large results take memory of their own at every run, beside the pool's"
    with canary("OpOverload._overloadname and arguments that are is_out", OPS, effect) as ops:
        assert ops.out_overload(aten.exp.default) is aten.exp.out
        assert ops.out_overload(aten.sum.dim_IntList) is aten.sum.IntList_out
        assert ops.out_overload(aten.native_layer_norm.default) is None
        assert ops.overload_name(aten.sum.IntList_out) == "IntList_out"
        assert ops.memory_argument(aten.exp.out) == "out"


def test_functorch_functions() -> None:
    effect = "steps with torch.func are traced through functorch's levels, and fail"
    with canary("the modules of functorch's functions", OPS, effect) as ops:
        graph = dynamo_graph(torch.func.vmap(lambda x: x * 2), torch.ones(2, 2))
        assert any(ops.of_functorch(target) for target in targets(graph))
        assert not ops.of_functorch(torch.relu)


def test_qualified_names() -> None:
    effect = "graphs with these functions are not kept in cache_dir"
    with canary("torch.fx.node._get_qualified_name", OPS, effect) as ops:
        assert ops.qualified_name(nn.functional.relu) == "torch.nn.functional.relu"
        assert ops.qualified_name(nn.functional.gelu) == "torch._C._nn.gelu"
        assert ops.qualified_name(operator.add) == "_operator.add"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_onednn_linear() -> None:
    effect = "large products fail on CPUs of AMD's"
    with canary("torch.ops.mkldnn._linear_pointwise", OPS, effect) as ops:
        x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
        for added in (bias, None):
            expected = nn.functional.linear(x, weight, added)
            torch.testing.assert_close(ops.onednn_linear(x, weight, added), expected)


# FX


def test_whole_composite_operators() -> None:
    effect = "no fusion finds its pattern"
    with canary("torch.fx.experimental.proxy_tensor.make_fx(pre_dispatch=True)", FX, effect) as compat:

        class Net(nn.Module):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(nn.functional.linear(x, x), labels)

        mode = compat.fake_mode(symbolic=False)
        examples = fakes(mode, torch.ones(2, 4), torch.ones(2, dtype=torch.int64))
        graph = compat.aten_graph(fx.symbolic_trace(Net()), examples, mode)
        called = {aten.linear.default, aten.cross_entropy_loss.default}
        assert called <= set(targets(graph))
        assert all(isinstance(n.meta["val"], compat.FakeTensor) for n in graph.graph.nodes if n.target in called)


@pytest.mark.parametrize("symbolic", [True, False])
def test_fake_mode(symbolic: bool) -> None:
    with canary("FakeTensorMode and ShapeEnv", FX, "no graph can be traced") as compat:
        mode = compat.fake_mode(symbolic)
        assert isinstance(mode, compat.FakeTensorMode)
        assert (mode.shape_env is not None) is symbolic


def test_trees() -> None:
    effect = "plan_memory and equal values of a graph aren't found"
    with canary("torch.utils._pytree", FX, effect) as compat:
        tree = {"a": [1, (2, 3)]}
        leaves, spec = compat.tree_flatten(tree)
        assert leaves == compat.tree_leaves(tree) == [1, 2, 3]
        assert str(spec) == str(compat.tree_flatten({"a": [4, (5, 6)]})[1])
        assert compat.tree_map(lambda leaf: -leaf, tree) == {"a": [-1, (-2, -3)]}


def test_views_and_elements() -> None:
    effect = "views are computed, or values taken for views"
    with canary("the targets of FX nodes", FX, effect) as compat:

        def function(x: torch.Tensor) -> torch.Tensor:
            return x.t().exp().split(1)[0]

        mode = compat.fake_mode(symbolic=False)
        graph = compat.aten_graph(fx.symbolic_trace(function), fakes(mode, torch.ones(2, 3)), mode)
        found = {str(n.target): (compat.is_view(n), compat.is_element(n)) for n in graph.graph.nodes if n.op[0] == "c"}
        assert found["aten.t.default"] == (True, False)
        assert found["aten.exp.default"] == (False, False)
        assert found["<built-in function getitem>"] == (False, True)


def test_module_path() -> None:
    effect = "recompute='layers' finds no layers"
    with canary("nn_module_stack of FX nodes", FX, effect) as compat:
        graph = dynamo_graph(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), torch.ones(1, 2))
        (path,) = {compat.module_path(node) for node in graph.graph.nodes if node.op == "call_function"}
        assert ".0" in path or "[0]" in path or "['0']" in path


# Sizes


def test_size_functions() -> None:
    effect = "graphs whose sizes are divided or compared are compiled for each size"
    with canary("torch.utils._sympy.functions", SIZES, effect) as sizes:
        rounding = {"ceiling", "float", "floor", "truncated"}
        divisions = {"quotient", "remainder", "true quotient"}
        assert set(sizes.FUNCTIONS.values()) == {"largest", "smallest"} | divisions | rounding
        from lit_ort._compat.torch_fx import fake_mode

        mode = fake_mode(symbolic=True)
        (size, _), _ = sizes.symbolic_sizes(mode.shape_env, torch.ones(6, 2), "x", [0])
        assert sizes.FUNCTIONS[sizes.expression_of(size // 4).func] == "quotient"
        assert sizes.FUNCTIONS[sizes.expression_of(size % 4).func] == "remainder"
        assert sizes.FUNCTIONS[sizes.expression_of(torch.sym_max(size, 9)).func] == "largest"


def test_symbolic_sizes() -> None:
    effect = "a graph for all sizes has the first one's, or conditions that aren't checked"
    with canary("ShapeEnv and SymInt.node", SIZES, effect) as sizes:
        from lit_ort._compat.torch_fx import fake_mode

        environment = fake_mode(symbolic=True).shape_env
        shape, stride = sizes.symbolic_sizes(environment, torch.ones(6, 5, 2), "x", [1])
        assert shape[0] == 6
        assert isinstance(shape[0], int)
        changing = shape[1]
        assert isinstance(changing, torch.SymInt)
        assert sizes.expression_of(changing).is_symbol
        assert sizes.expression_of(stride[0]) == 2 * sizes.expression_of(changing)
        assert (sizes.hint_of(changing), sizes.hint_of(7)) == (5, 7)
        assert sizes.guards_of(environment) == []
        smallest, largest = sizes.range_of(environment, sizes.expression_of(changing))
        assert smallest in (0, 1, 2)
        assert largest is None
        assert bool(changing > 4)
        (guard,) = sizes.guards_of(environment)
        assert guard.subs(sizes.expression_of(changing), 5)


# AOTAutograd


def everything(w: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    buffer.add_(x)
    y = w * x
    return y.sum(), y[:1], y[1:], x, x[:1]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(4, requires_grad=True), torch.ones(4), torch.ones(4)


def test_joint_stages() -> None:
    with canary("AOTAutograd's two stages", AOT, "no graph can be compiled") as aot:
        trace = trace_of(everything, *inputs())
        assert trace.differentiable
        assert isinstance(trace, aot.JointTrace)
        assert not any(str(target).startswith("aten.add_") for target in targets(trace.graph_module))
        assert not trace_of(lambda x: (x * 2,), torch.ones(2)).differentiable


def test_descriptors() -> None:
    effect = "results and gradients of a graph are taken for each other, or no graph can be compiled"
    with canary("torch._functorch._aot_autograd.descriptors", AOT, effect):
        given, returned = described_in(trace_of(everything, *inputs()))
        assert [(d.kind, d.index) for d in given if d.kind == "input"] == [("input", 0), ("input", 1), ("input", 2)]
        assert {d.kind for d in given} == {"input", "tangent"}
        assert any(d.of_base for d in given if d.kind == "tangent")
        assert ("mutation", 2) in [(d.kind, d.index) for d in returned if d is not None]
        assert ("gradient", 0) in [(d.kind, d.index) for d in returned if d is not None]
        assert {d.kind for d in returned if d is not None} >= {"output", "mutation", "base", "gradient"}


def test_constants() -> None:
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x * self.scale,)

    with canary("BufferAOTInput.target", AOT, "graphs with constants can't be compiled"):
        from lit_ort._compat.torch_aot import joint_trace
        from lit_ort._compat.torch_fx import fake_mode

        mode = fake_mode(symbolic=False)
        graph = fx.symbolic_trace(Scaled())
        graph.scale = fakes(mode, torch.ones(2))[0]
        given, _ = described_in(joint_trace(graph, fakes(mode, torch.ones(2, requires_grad=True)), mode))
        assert [d.name for d in given if d.kind == "constant"] == ["scale"]


def test_aliases_and_writes() -> None:
    effect = "outputs that are views are copies, and buffers keep their old values"
    with canary("AOTAutograd's input_info and output_info", AOT, effect) as aot:
        metadata = trace_of(everything, *inputs()).metadata
        aliases = aot.aliases_of(metadata)
        assert {position: kind for position, (kind, _) in aliases.items()} == {
            1: "base",
            2: "base",
            3: "same",
            4: "input",
        }
        assert (aliases[3][1], aliases[4][1]) == (1, 1)
        assert aot.writes_of(metadata) == {2: aot.Write(False, False, False, False)}

        def of_an_output(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = w * 2
            return y, y.view(2, 2)

        assert aot.aliases_of(trace_of(of_an_output, inputs()[0]).metadata) == {1: ("output", 0)}

        def reshaped(x: torch.Tensor) -> tuple[torch.Tensor]:
            x.t_()
            return (x * 2,)

        assert aot.writes_of(trace_of(reshaped, torch.ones(2, 3)).metadata)[0].reshapes


@pytest.mark.parametrize("no_grad", [True, False])
def test_how_inputs_are_written(no_grad: bool) -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        factor = w * 2
        with torch.set_grad_enabled(not no_grad):
            x.mul_(factor.detach() if no_grad else factor)
        return x.sum()

    with canary("AOTAutograd's input_info", AOT, "autograd's view of a write is wrong") as aot:
        graph = dynamo_graph(function, torch.ones(4, requires_grad=True), torch.ones(4))
        from lit_ort._compat.torch_fx import aten_graph, fake_mode

        mode = fake_mode(symbolic=False)
        examples = fakes(mode, torch.ones(4, requires_grad=True), torch.ones(4))
        metadata = aot.joint_trace(aten_graph(graph, examples, mode), examples, mode).metadata
        (write,) = aot.writes_of(metadata).values()
        assert not write.hidden
        assert write.under_no_grad is no_grad


@torch.library.custom_op("lit_ort_canary::note", mutates_args=())
def note(x: torch.Tensor) -> torch.Tensor:
    """An operator with an effect."""
    return x.clone()


@note.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_effects() -> None:
    effect = "operators with effects keep graphs from being compiled, or are left out"

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.ops.lit_ort_canary.note.default(x),)

    with canary("with_effects and its tokens", AOT, effect) as aot:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        handle = _register_effectful_op(torch.ops.lit_ort_canary.note.default, _EffectType.ORDERED)
        try:
            trace = trace_of(function, torch.ones(2))
        finally:
            handle.destroy()
        effects = [aot.effect_of(node) for node in trace.graph_module.graph.nodes]
        (found,) = (one for one in effects if one is not None)
        assert found[0] is torch.ops.lit_ort_canary.note.default
        assert len(found[1]) == 1
        given, returned = described_in(trace)
        assert "token" in {d.kind for d in given}
        assert "token" in {d.kind for d in returned if d is not None}


def test_side_effects() -> None:
    with canary("torch.fx.node.has_side_effect", AOT, "operators with effects are left out of graphs") as aot:
        aot.keep_effect(aten._print.default)
        graph = fx.Graph()
        graph.call_function(aten._print.default, ("",))
        graph.output(())
        graph.eliminate_dead_code()
        assert len(graph.nodes) == 2


def long(x: torch.Tensor) -> tuple[torch.Tensor]:
    for _ in range(4):
        x = x.sin().cos().exp()
    return (x.sum(),)


@pytest.mark.parametrize("budget", [None, 0.3])
def test_partitioners(budget: float | None) -> None:
    effect = "steps of two runs can't be compiled, or recompute=0.5 keeps everything"
    with canary("torch._functorch.partitioners", AOT, effect) as aot:
        trace = trace_of(long, torch.ones(4, requires_grad=True))
        forward, backward = aot.partition(trace.graph_module, 1, budget)
        assert any(target is aten.exp.default for target in targets(backward)) is (budget is not None)
        placed = [node.meta["partitioner_tag"] for node in backward.graph.nodes if "partitioner_tag" in node.meta]
        assert aot.OF_BACKWARD["partitioner_tag"] in placed
        assert len(targets(forward)) > 12


def test_recompute_marks() -> None:
    effect = "activation checkpoints and recompute='layers' save everything"
    with canary("node.meta['recompute'] and CheckpointPolicy", AOT, effect) as aot:
        trace = trace_of(long, torch.ones(4, requires_grad=True))
        nodes = [n for n in trace.graph_module.graph.nodes if n.target in (aten.sin.default, aten.exp.default)]
        for node in nodes:
            aot.mark_recomputed(node, 3)
        assert all(aot.must_recompute(node) and aot.is_marked(node) and aot.region_of(node) == 3 for node in nodes)
        aot.keep_saved(nodes[-1], 4)
        assert aot.is_marked(nodes[-1])
        assert not aot.must_recompute(nodes[-1])
        _, backward = aot.partition(trace.graph_module, 1, None)
        assert aten.exp.default in targets(backward)


def test_checkpoint_node() -> None:
    effect = "torch.utils.checkpoint in a module keeps its graphs from being compiled"

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()

    with canary("higher_order.tag_activation_checkpoint", AOT, effect):
        from lit_ort.capture.checkpoints import CHECKPOINT

        assert CHECKPOINT in targets(dynamo_graph(function, torch.ones(2, requires_grad=True)))


# Recurrent layers


def test_recurrent_shapes() -> None:
    effect = "RNNs compile a graph for every length, of all its steps in time"
    with canary("OpOverload.py_kernels and _dispatch_cache", RECURRENT, effect) as recurrent:
        layer = nn.LSTM(3, 4, batch_first=True)
        with recurrent.shapes_without_steps(), torch._dynamo.config.patch(allow_rnn=True):
            graph = dynamo_graph(lambda x: layer(x)[0], torch.ones(2, 5, 3))
        (node,) = (node for node in graph.graph.nodes if node.target in recurrent.LAYERS)
        assert [tuple(value.shape) for value in node.meta["example_value"]] == [(2, 5, 4), (1, 2, 4), (1, 2, 4)]


# onnxruntime

training_build = pytest.mark.skipif(engine_of(AUTO).name != TRAINING, reason="of the training build")


@training_build
def test_training_build() -> None:
    effect = "no session can be made"
    with canary("onnxruntime.capi._pybind_state", ORT, effect) as ort:
        names = ["register_aten_op_executor", "OrtValueVector", "OrtMemoryInfo", "OrtArenaCfg", "RunOptions"]
        names += ["create_and_register_allocator", "OrtAllocatorType", "OrtMemType"]
        assert [name for name in names if not hasattr(ort.C, name)] == []
        assert ort.CPU.device_type() == 0
        assert all(issubclass(error, BaseException) for error in ort.ORT_ERRORS)


@training_build
def test_runs_on_value_vectors() -> None:
    effect = "no session can run"
    with canary("InferenceSession._sess.run_with_ortvaluevector", ORT, effect) as ort:
        import onnxruntime
        from onnx import TensorProto, helper

        from lit_ort._compat.torch import from_dlpack, to_dlpack

        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "canary", values[:1], values[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        given, fetched = ort.C.OrtValueVector(), ort.C.OrtValueVector()
        given.push_back(to_dlpack(torch.tensor([1.0, 2.0])), False)
        ort.run_of(session)(ort.C.RunOptions(), ["x"], given, ["y"], fetched, [ort.CPU])
        (result,) = fetched.to_dlpacks(from_dlpack)
        assert result.tolist() == [-1.0, -2.0]
        assert list(fetched.bool_tensor_indices()) == []


@training_build
def test_checkpoint_is_torchs_own() -> None:
    effect = "a graph breaks at every checkpoint of a module"
    with canary("torch.utils.checkpoint.checkpoint, which onnxruntime wraps", ORT, effect):
        assert not torch.utils.checkpoint.checkpoint.__module__.startswith("onnxruntime")


def test_interpolations() -> None:
    effect = "graphs write them out as gathers and scatters, or can't tell their shapes at changing sizes"
    with canary(
        "py_kernels of operators, meta_table and op_implementations_dict", INTERPOLATION, effect
    ) as interpolation:
        from lit_ort._compat.torch_fx import fake_mode

        mode = fake_mode(symbolic=True)
        environment = mode.shape_env
        assert environment is not None
        size = environment.create_unbacked_symint()
        with interpolation.whole_interpolations(), mode:
            images = torch.empty(2, 3, 4, 4)
            grown = aten.upsample_bilinear2d.default(images, [size, 8], False)
            assert grown.shape[2] is size or str(grown.shape[2]) == str(size)
            back = aten.upsample_bilinear2d_backward.default(grown, [size, 8], [2, 3, 4, 4], False)
            assert tuple(back.shape) == (2, 3, 4, 4)
        trace = trace_of(lambda x: (torch.nn.functional.interpolate(x, scale_factor=2).sum(),), images_that_learn())
        names = [str(target) for target in targets(trace.graph_module)]
        assert {"aten.upsample_nearest2d.default", "aten.upsample_nearest2d_backward.default"} <= set(names)


def images_that_learn() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4, requires_grad=True)


def test_levels_of_functorch() -> None:
    effect = "graphs with torch.vmap have no fusions"
    with canary("torch._functorch.predispatch", "torch_functorch", effect) as functorch:
        graph = dynamo_graph(lambda x: torch.vmap(torch.sin)(x), torch.randn(2, 3))
        assert {functorch.VMAP_START, functorch.VMAP_END, functorch.LOAD_RULES} <= set(targets(graph))
        own = {target for target in targets(graph) if "functorch" in (getattr(target, "__module__", None) or "")}
        assert own <= functorch.VMAP_FUNCTIONS
        traced = functorch.operators_of(graph, [torch.randn(2, 3)])
        assert aten.sin.default in targets(traced)
        assert not own & set(targets(traced))
