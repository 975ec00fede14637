"""Canaries of the compiler and the engine: traces, operators, sizes, AOTAutograd, memory, onnxruntime-training."""

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
ORT, RECURRENT, INTERPOLATION = "onnxruntime", "recurrent_shapes", "interpolation"
aten = torch.ops.aten


def dynamo_graph(function: Callable[..., Any], *arguments: Any, **settings: Any) -> fx.GraphModule:
    """Dynamo's graph of a function."""
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


def descriptions_in(trace: Any) -> tuple[list[Any], list[Any]]:
    """The descriptions of the inputs and of the outputs of a trace."""
    from lit_ort._compat.torch_aot import description_of, descriptor_of

    nodes = list(trace.graph_module.graph.nodes)
    inputs = [description_of(descriptor_of(node)) for node in nodes if node.op == "placeholder"]
    return inputs, [None if d is None else description_of(d) for d in descriptor_of(nodes[-1])]


# torch


def test_autocast_borders() -> None:
    effect = "attention and losses in an autocast region are fused in float32"

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
    effect = "fusions assume that values under no_grad require grad"

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
    effect = "graphs with calls of torch's API logging can't be traced"

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._C._log_api_usage_once("canary")
        return x * 2

    with canary("torch._C._log_api_usage_once", TORCH, effect) as compat:
        assert compat.log_api_usage in targets(dynamo_graph(function, torch.ones(2)))


def test_dlpack() -> None:
    with canary("torch._C._to_dlpack and _from_dlpack", TORCH, "sessions can't accept or return tensors") as compat:
        tensor = torch.arange(6.0).reshape(2, 3).t()
        back = compat.from_dlpack(compat.to_dlpack(tensor))
        assert back.data_ptr() == tensor.data_ptr()
        assert back.stride() == tensor.stride()


def test_version() -> None:
    effect = "optimizer_in_graph misses that code outside of the graph accumulates into a gradient"
    with canary("Tensor._version", TORCH, effect) as compat:
        tensor = torch.ones(2)
        before = compat.version_of(tensor)
        tensor.add_(1)
        assert compat.version_of(tensor) == before + 1


@pytest.mark.parametrize("keep", [True, False])
def test_keep_graph(keep: bool) -> None:
    effect = "backward(retain_graph=True) returns gradients once only, or never frees them"
    with canary("torch._C._autograd._get_current_graph_task_keep_graph", TORCH, effect) as compat:
        results: list[bool] = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: results.append(compat.keeps_graph()))
        x.sum().backward(retain_graph=keep)
        assert results == [keep]


def test_hooks_on_saved_tensors() -> None:
    effect = "a compiled part of an activation checkpoint raises in the backward of its first run"
    with canary("torch._C._autograd._saved_tensors_hooks_set_tracing", TORCH, effect) as compat:
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor

        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with compat.unhooked():
                x.exp()
            assert not packed
            x.exp()
        assert packed


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents() -> None:
    effect = "forward-mode differentiation through a compiled function gives no derivative"
    with canary("torch.autograd.forward_ad._current_level", TORCH, effect) as compat:
        x = torch.ones(2)
        assert not compat.have_tangents([x])
        with torch.autograd.forward_ad.dual_level():
            assert not compat.have_tangents([x])
            assert compat.have_tangents([x, torch.autograd.forward_ad.make_dual(x, x)])


def test_storage() -> None:
    effect = "a graph that returns two views of one value is fused, and its gradients are wrong"
    with canary("UntypedStorage._cdata", TORCH, effect) as compat:
        from lit_ort._compat.torch_fx import fake_mode

        with fake_mode(symbolic=False):
            first, other = torch.empty(4), torch.empty(4)
            assert compat.memory_of(first) == compat.memory_of(first[1:])
            assert compat.memory_of(first) != compat.memory_of(other)


def test_owners_of_memory() -> None:
    effect = "a torch node's result can be overwritten while another value shares its memory"
    with canary("torch._C._storage_Use_Count", TORCH, effect) as compat:
        tensor = torch.zeros(4)
        assert compat.owners_of_memory(tensor) == 1
        view = tensor[1:]
        assert compat.owners_of_memory(tensor) == compat.owners_of_memory(view) == 2
        del view
        assert compat.owners_of_memory(tensor) == 1


def test_dispatch_mode() -> None:
    effect = "verification compares runs with different dropout masks"
    with canary("torch.utils._python_dispatch.TorchDispatchMode", TORCH, effect) as compat:
        operators = []

        class Recorder(compat.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                operators.append(func)
                return func(*args, **(kwargs or {}))

        with Recorder():
            nn.functional.dropout(torch.ones(4), 0.5, True)
        assert aten.bernoulli_.float in operators


def test_hooks_on_nodes() -> None:
    effect = "hooks on the node of a view from which a graph computes others see a part of its gradient"
    with canary("torch.autograd.Function._register_hook", "tensor_hooks", effect) as hooks:
        node, taken, refused = torch.ones(2, 3, requires_grad=True).exp().t().grad_fn, list[Any](), list[Any]()
        hooks.hand_over_node_hooks(node, taken.append, refused.append)
        assert node is not None
        node.register_prehook(print)
        node.register_hook(print)
        assert (taken, refused) == ([print], [print])


# Operators


def test_operator_types() -> None:
    effect = "views, in-place operators and random operators of a graph aren't recognized"
    with canary("torch._ops.OpOverload and HigherOrderOperator", OPS, effect) as ops:
        assert isinstance(aten.mm.default, ops.OpOverload)
        assert isinstance(torch.ops.higher_order.cond, ops.HigherOrderOperator)


def test_schemas() -> None:
    effect = "views are copied, and in-place or random operators are merged"
    with canary("OpOverload._schema and its tags", OPS, effect) as ops:
        assert [ops.is_mutable(target) for target in (aten.add_.Tensor, aten.add.Tensor, len)] == [True, False, False]
        assert [ops.returns_alias(target) for target in (aten.t.default, aten.clone.default, len)] == [
            True,
            False,
            False,
        ]
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        calls = [(aten.bernoulli.default, {}), (aten.add.Tensor, {}), (flash, {}), (flash, {"dropout_p": 0.1})]
        draws = [ops.draws(fx.Graph().call_function(target, kwargs=kwargs)) for target, kwargs in calls]
        assert draws == [True, False, False, True]
        assert [ops.is_pointwise(target) for target in (aten.exp.default, aten.mm.default, len)] == [True, False, False]
        assert [ops.returns_list(target) for target in (aten.unbind.int, aten.exp.default, len)] == [True, False, False]
        counts = [ops.result_count(target) for target in (aten.native_layer_norm.default, aten.exp.default)]
        assert counts == [3, 1]


def test_out_overloads() -> None:
    effect = "large results are allocated at every run instead of using the pool's memory"
    with canary("OpOverload._overloadname and arguments that are is_out", OPS, effect) as ops:
        assert ops.out_overload(aten.exp.default) is aten.exp.out
        assert ops.out_overload(aten.sum.dim_IntList) is aten.sum.IntList_out
        assert ops.out_overload(aten.native_layer_norm.default) is None
        assert ops.overload_name(aten.sum.IntList_out) == "IntList_out"
        assert ops.memory_argument(aten.exp.out) == "out"


def test_functorch_functions() -> None:
    effect = "steps with torch.func fail while functorch's levels are traced"
    with canary("the modules of functorch's functions", OPS, effect) as ops:
        graph = dynamo_graph(torch.func.vmap(lambda x: x * 2), torch.ones(2, 2))
        assert any(ops.of_functorch(target) for target in targets(graph))
        assert not ops.of_functorch(torch.relu)


def test_qualified_names() -> None:
    effect = "graphs with these functions are not cached in cache_dir"
    with canary("torch.fx.node._get_qualified_name", OPS, effect) as ops:
        assert ops.qualified_name(nn.functional.relu) == "torch.nn.functional.relu"
        assert ops.qualified_name(nn.functional.gelu) == "torch._C._nn.gelu"
        assert ops.qualified_name(operator.add) == "_operator.add"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_onednn_linear() -> None:
    effect = "large matmuls fail on AMD CPUs"
    with canary("torch.ops.mkldnn._linear_pointwise", OPS, effect) as ops:
        x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
        for optional_bias in (bias, None):
            expected = nn.functional.linear(x, weight, optional_bias)
            torch.testing.assert_close(ops.onednn_linear(x, weight, optional_bias), expected)


# FX


def test_composite_operators() -> None:
    effect = "no fusion matches its pattern"
    with canary("torch.fx.experimental.proxy_tensor.make_fx(pre_dispatch=True)", FX, effect) as compat:

        class Net(nn.Module):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(nn.functional.linear(x, x), labels)

        mode = compat.fake_mode(symbolic=False)
        examples = fakes(mode, torch.ones(2, 4), torch.ones(2, dtype=torch.int64))
        graph = compat.aten_graph(fx.symbolic_trace(Net()), examples, mode)
        composite = {aten.linear.default, aten.cross_entropy_loss.default}
        assert composite <= set(targets(graph))
        assert all(isinstance(n.meta["val"], compat.FakeTensor) for n in graph.graph.nodes if n.target in composite)


@pytest.mark.parametrize("symbolic", [True, False])
def test_fake_mode(symbolic: bool) -> None:
    with canary("FakeTensorMode and ShapeEnv", FX, "no graph can be traced") as compat:
        mode = compat.fake_mode(symbolic)
        assert isinstance(mode, compat.FakeTensorMode)
        assert (mode.shape_env is not None) is symbolic


def test_trees() -> None:
    effect = "memory can't be planned, and equal values of a graph aren't merged"
    with canary("torch.utils._pytree", FX, effect) as compat:
        tree = {"a": [1, (2, 3)]}
        leaves, spec = compat.tree_flatten(tree)
        assert leaves == compat.tree_leaves(tree) == [1, 2, 3]
        assert str(spec) == str(compat.tree_flatten({"a": [4, (5, 6)]})[1])
        assert compat.tree_map(lambda leaf: -leaf, tree) == {"a": [-1, (-2, -3)]}


def test_views_and_elements() -> None:
    effect = "views are copied, or other values are treated as views"
    with canary("the targets of FX nodes", FX, effect) as compat:

        def function(x: torch.Tensor) -> torch.Tensor:
            return x.t().exp().split(1)[0]

        mode = compat.fake_mode(symbolic=False)
        graph = compat.aten_graph(fx.symbolic_trace(function), fakes(mode, torch.ones(2, 3)), mode)
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        kinds = {str(node.target): (compat.is_view(node), compat.is_element(node)) for node in calls}
        assert kinds["aten.t.default"] == (True, False)
        assert kinds["aten.exp.default"] == (False, False)
        assert kinds["<built-in function getitem>"] == (False, True)


def test_module_path() -> None:
    effect = "recompute='layers' recognizes no layers"
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
        (size, _), _ = sizes.symbolic_sizes(mode.shape_env, torch.ones(6, 2), "x", {0: "a"}, {})
        assert sizes.FUNCTIONS[sizes.expression_of(size // 4).func] == "quotient"
        assert sizes.FUNCTIONS[sizes.expression_of(size % 4).func] == "remainder"
        assert sizes.FUNCTIONS[sizes.expression_of(torch.sym_max(size, 9)).func] == "largest"


def test_symbolic_sizes() -> None:
    effect = "a graph for any size is compiled for the first size, or its conditions aren't checked"
    with canary("ShapeEnv and SymInt.node", SIZES, effect) as sizes:
        from lit_ort._compat.torch_fx import fake_mode

        environment, known = fake_mode(symbolic=True).shape_env, {}
        shape, stride = sizes.symbolic_sizes(environment, torch.ones(6, 5, 2), "x", {1: "a"}, known)
        same, _ = sizes.symbolic_sizes(environment, torch.ones(5, 5), "y", {0: "b", 1: "a"}, known)
        assert shape[0] == 6
        assert isinstance(shape[0], int)
        length = shape[1]
        # Sizes are equal by their names, not by their values.
        assert [sizes.expression_of(size) == sizes.expression_of(length) for size in same] == [False, True]
        assert isinstance(length, torch.SymInt)
        assert sizes.expression_of(length).is_symbol
        assert sizes.expression_of(stride[0]) == 2 * sizes.expression_of(length)
        assert (sizes.hint_of(length), sizes.hint_of(7)) == (5, 7)
        assert sizes.guards_of(environment) == []
        smallest, largest = sizes.range_of(environment, sizes.expression_of(length))
        assert smallest in (0, 1, 2)
        assert largest is None
        assert bool(length > 4)
        (guard,) = sizes.guards_of(environment)
        assert guard.subs(sizes.expression_of(length), 5)


# AOTAutograd


def mixed(w: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A function with a mutation, views, and inputs among its outputs."""
    buffer.add_(x)
    y = w * x
    return y.sum(), y[:1], y[1:], x, x[:1]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(4, requires_grad=True), torch.ones(4), torch.ones(4)


def test_joint_stages() -> None:
    with canary("AOTAutograd's two stages", AOT, "no graph can be compiled") as aot:
        trace = trace_of(mixed, *inputs())
        assert trace.differentiable
        assert isinstance(trace, aot.JointTrace)
        assert not any(str(target).startswith("aten.add_") for target in targets(trace.graph_module))
        assert not trace_of(lambda x: (x * 2,), torch.ones(2)).differentiable


def test_descriptors() -> None:
    effect = "results and gradients of a graph are confused, or no graph can be compiled"
    with canary("torch._functorch._aot_autograd.descriptors", AOT, effect):
        arguments, results = descriptions_in(trace_of(mixed, *inputs()))
        assert [(d.kind, d.index) for d in arguments if d.kind == "input"] == [("input", k) for k in range(3)]
        assert {d.kind for d in arguments} == {"input", "tangent"}
        assert any(d.of_base for d in arguments if d.kind == "tangent")
        assert ("mutation", 2) in [(d.kind, d.index) for d in results if d is not None]
        assert ("gradient", 0) in [(d.kind, d.index) for d in results if d is not None]
        assert {d.kind for d in results if d is not None} >= {"output", "mutation", "base", "gradient"}


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
        arguments, _ = descriptions_in(joint_trace(graph, fakes(mode, torch.ones(2, requires_grad=True)), mode))
        assert [d.name for d in arguments if d.kind == "constant"] == ["scale"]


def test_aliases_and_writes() -> None:
    effect = "outputs that are views are copied, and buffers aren't updated"
    with canary("AOTAutograd's input_info and output_info", AOT, effect) as aot:
        metadata = trace_of(mixed, *inputs()).metadata
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
def test_writes_into_inputs(no_grad: bool) -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        factor = w * 2
        with torch.set_grad_enabled(not no_grad):
            x.mul_(factor.detach() if no_grad else factor)
        return x.sum()

    with canary("AOTAutograd's input_info", AOT, "autograd gets wrong information about in-place changes") as aot:
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
    effect = "graphs with effectful operators can't be compiled, or the operators are removed"

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
        ((target, operands),) = (effect for effect in effects if effect is not None)
        assert target is torch.ops.lit_ort_canary.note.default
        assert len(operands) == 1
        arguments, results = descriptions_in(trace)
        assert "token" in {d.kind for d in arguments}
        assert "token" in {d.kind for d in results if d is not None}


def test_side_effects() -> None:
    with canary("torch.fx.node.has_side_effect", AOT, "effectful operators are removed from graphs") as aot:
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
    effect = "split steps can't be compiled, or recompute=0.5 saves everything"
    with canary("torch._functorch.partitioners", AOT, effect) as aot:
        trace = trace_of(long, torch.ones(4, requires_grad=True))
        forward, backward = aot.partition(trace.graph_module, 1, budget)
        assert any(target is aten.exp.default for target in targets(backward)) is (budget is not None)
        tags = [node.meta["partitioner_tag"] for node in backward.graph.nodes if "partitioner_tag" in node.meta]
        assert aot.OF_BACKWARD["partitioner_tag"] in tags
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
    effect = "graphs of modules with torch.utils.checkpoint can't be compiled"

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()

    with canary("higher_order.tag_activation_checkpoint", AOT, effect):
        from lit_ort.capture.inlined_checkpoints import CHECKPOINT

        assert CHECKPOINT in targets(dynamo_graph(function, torch.ones(2, requires_grad=True)))


# Recurrent layers


def test_recurrent_shapes() -> None:
    effect = "RNNs are compiled for every length, with all of their time steps"
    with canary("OpOverload.py_kernels and _dispatch_cache", RECURRENT, effect) as recurrent:
        layer = nn.LSTM(3, 4, batch_first=True)
        with recurrent.shapes_without_steps(), torch._dynamo.config.patch(allow_rnn=True):
            graph = dynamo_graph(lambda x: layer(x)[0], torch.ones(2, 5, 3))
        (node,) = (node for node in graph.graph.nodes if node.target in recurrent.LAYERS)
        assert [tuple(value.shape) for value in node.meta["example_value"]] == [(2, 5, 4), (1, 2, 4), (1, 2, 4)]


# onnxruntime

training_build = pytest.mark.skipif(engine_of(AUTO).name != TRAINING, reason="needs the training build")


@training_build
def test_training_build() -> None:
    effect = "no session can be created"
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
        feeds, fetches = ort.C.OrtValueVector(), ort.C.OrtValueVector()
        feeds.push_back(to_dlpack(torch.tensor([1.0, 2.0])), False)
        ort.run_of(session)(ort.C.RunOptions(), ["x"], feeds, ["y"], fetches, [ort.CPU])
        (result,) = fetches.to_dlpacks(from_dlpack)
        assert result.tolist() == [-1.0, -2.0]
        assert list(fetches.bool_tensor_indices()) == []


@training_build
def test_environment() -> None:
    effect = "no session runs without Python"
    with canary("memory layout of PyInferenceSession", ORT, effect) as ort:
        import onnxruntime

        from lit_ort.runtime.engines.engine_interface import SMALLEST_MODEL

        sessions = [onnxruntime.InferenceSession(SMALLEST_MODEL) for _ in range(3)]
        first, second = ort.environment_of(sessions[:2]), ort.environment_of(sessions[1:])
        assert first == second != 0
        assert ort.environment_of([sessions[0], sessions[0]]) is None


@training_build
def test_checkpoint_is_torchs_own() -> None:
    effect = "the graph breaks at every checkpoint of a module"
    with canary("torch.utils.checkpoint.checkpoint, which onnxruntime wraps", ORT, effect):
        assert not torch.utils.checkpoint.checkpoint.__module__.startswith("onnxruntime")


def test_interpolations() -> None:
    effect = "interpolations are decomposed to gathers and scatters, or fail to trace with dynamic sizes"
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
            upsampled = aten.upsample_bilinear2d.default(images, [size, 8], False)
            assert upsampled.shape[2] is size or str(upsampled.shape[2]) == str(size)
            gradient = aten.upsample_bilinear2d_backward.default(upsampled, [size, 8], [2, 3, 4, 4], False)
            assert tuple(gradient.shape) == (2, 3, 4, 4)
        images = torch.randn(2, 3, 4, 4, requires_grad=True)
        trace = trace_of(lambda x: (torch.nn.functional.interpolate(x, scale_factor=2).sum(),), images)
        names = [str(target) for target in targets(trace.graph_module)]
        assert {"aten.upsample_nearest2d.default", "aten.upsample_nearest2d_backward.default"} <= set(names)


def test_functorch_levels() -> None:
    effect = "graphs with torch.vmap are not fused"
    with canary("torch._functorch.predispatch", "torch_functorch", effect) as functorch:
        graph = dynamo_graph(lambda x: torch.vmap(torch.sin)(x), torch.randn(2, 3))
        assert {functorch.VMAP_START, functorch.VMAP_END, functorch.LOAD_RULES} <= set(targets(graph))
        functions = {target for target in targets(graph) if "functorch" in (getattr(target, "__module__", None) or "")}
        assert functions <= functorch.VMAP_FUNCTIONS
        traced = functorch.operators_of(graph, [torch.randn(2, 3)])
        assert aten.sin.default in targets(traced)
        assert not functions & set(targets(traced))


@pytest.mark.parametrize(("transform", "differentiates"), [(torch.func.grad, True), (torch.func.vmap, False)])
def test_functorch_transforms(transform: Callable[..., Any], differentiates: bool) -> None:
    effect = "torch.func.grad in a step ignores the backward of an autograd.Function"
    with canary("torch._C._functorch.get_interpreter_stack", "torch_functorch", effect) as functorch:
        results: list[bool] = []

        def noting(x: torch.Tensor) -> torch.Tensor:
            results.append(functorch.is_differentiating())
            return x.sin().sum()

        transform(noting)(torch.ones(2))
        assert results == [differentiates]
        assert not functorch.is_differentiating()
