"""The fused form of an optimizer's step: the results of torch's default form, or that form itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lit_ort._compat.torch_optim import has_step_hooks
from lit_ort.runtime.fused_form import fused_form
from tests.kernels.test_generated_regions import threads

STEPS = 10
Make = Callable[[list[Tensor]], Optimizer]

OF_ADAM: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3},
    {"weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"lr": torch.tensor(0.1)},
    {"lr": torch.tensor([0.1], dtype=torch.float64)},
    {"betas": (torch.tensor(0.8), torch.tensor(0.9))},
]
OF_SGD: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": torch.tensor(0.1)},
    {"momentum": 0.9, "lr": torch.tensor([0.1])},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True, "lr": torch.tensor(0.1)},
]
OF_ADAGRAD: list[dict[str, Any]] = [
    {},
    {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-3},
    {"initial_accumulator_value": 0.5, "maximize": True},
    {"lr": torch.tensor(0.1)},
]
SWEEP = [
    (kind, options)
    for kind, several in ((Adam, OF_ADAM), (AdamW, OF_ADAM), (SGD, OF_SGD), (Adagrad, OF_ADAGRAD))
    for options in several
]
# One of each kind, with state.
SAMPLE: list[tuple[Any, dict[str, Any]]] = [(Adam, {}), (AdamW, {}), (SGD, {"momentum": 0.9}), (Adagrad, {})]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((), (0, 3), (1,), (37,), (4, 5), (64, 65), (3, 4, 3, 3))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*made, made[-1].flip(0).contiguous(memory_format=torch.channels_last)]


def gradients_of(values: Sequence[Tensor], steps: int = STEPS) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    noise = [[torch.randn(value.shape, generator=generator).to(value.dtype) for value in values] for _ in range(steps)]
    return [[torch.empty_like(v).copy_(n) for v, n in zip(values, row, strict=True)] for row in noise]


class Run:
    """Steps of one optimizer, and whether each step of each group was fused."""

    def __init__(self, make: Make, values: Sequence[Tensor]) -> None:
        self.parameters: list[Tensor] = [nn.Parameter(value.clone()) for value in values]
        self.optimizer = make(self.parameters)
        self.forms: list[list[bool | None]] = []
        self.optimizer.register_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self.forms.append([group["fused"] for group in optimizer.param_groups])

    def steps(self, gradients: Sequence[Sequence[Tensor | None]], fused: bool) -> Run:
        for row in gradients:
            for parameter, gradient in zip(self.parameters, row, strict=True):
                parameter.grad = gradient
            if fused:
                with fused_form(self.optimizer):
                    self.optimizer.step()
            else:
                self.optimizer.step()
        return self


def assert_same(found: Run, expected: Run) -> None:
    """The same weights, options and state, to rounding."""
    for a, b in zip(found.parameters, expected.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    a, b = found.optimizer.state_dict(), expected.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"]
    torch.testing.assert_close(a["state"], b["state"], rtol=1e-6, atol=1e-7)
    for index, state in b["state"].items():
        assert {n: v.stride() for n, v in a["state"][index].items()} == {n: v.stride() for n, v in state.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("kind", "options"), SWEEP)
def test_same_weights_and_state(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    values = tensors(dtype)
    gradients = gradients_of(values)
    expected = Run(lambda parameters: kind(parameters, **options), values).steps(gradients, fused=False)
    found = Run(lambda parameters: kind(parameters, **options), values).steps(gradients, fused=True)
    assert_same(found, expected)
    # The default form creates the state.
    has_no_state = kind is Adagrad or (kind is SGD and "momentum" not in options)
    assert found.forms == [[True if has_no_state else None], *([[True]] * (STEPS - 1))]


class OwnStep(Adam):
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class Renamed(AdamW):
    """Has torch's step."""


def with_two_forms(parameters: list[Tensor]) -> Optimizer:
    return Adam([{"params": parameters[:4], "foreach": True}, {"params": parameters[4:]}])


def with_schedule(parameters: list[Tensor]) -> Optimizer:
    optimizer = Adam(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (lambda p: Adam(p, foreach=True), [None]),
        (lambda p: Adam(p, foreach=False), [None]),
        (lambda p: Adam(p, fused=False), [False]),
        (lambda p: Adam(p, fused=True), [True]),
        (lambda p: SGD(p, momentum=0.9, foreach=True), [None]),
        # The loop is as fast.
        (lambda p: SGD(p), [None]),
        (with_two_forms, [None, True]),
        (OwnStep, [None]),
        (Renamed, [True]),
        (with_schedule, [True]),
    ],
)
def test_a_form_or_step_of_the_users_own_stays(make: Make, form: list[bool | None]) -> None:
    gradients = gradients_of(tensors())
    found = Run(make, tensors()).steps(gradients, fused=True)
    # The step that OwnStep calls has hooks too.
    assert found.forms[2:] == [form] * (len(found.forms) - 2)
    assert_same(found, Run(make, tensors()).steps(gradients, fused=False))


def test_optimizers_without_a_fused_form_stay() -> None:
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.ones(2))])
    with fused_form(optimizer):
        assert not has_step_hooks(optimizer)
    with fused_form(object()):
        pass


def test_a_compiled_step_stays() -> None:
    optimizer = Adam([nn.Parameter(torch.ones(2))])
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    with fused_form(optimizer):
        assert not has_step_hooks(optimizer)


def other_order(gradient: Tensor) -> Tensor:
    return gradient.mT.contiguous().mT if gradient.dim() == 2 else gradient


@pytest.mark.parametrize(("kind", "options"), SAMPLE)
@pytest.mark.parametrize(
    ("change_value", "change_gradient"),
    [
        pytest.param(lambda v: v.to(torch.bfloat16), None, id="bfloat16"),
        pytest.param(lambda v: v.to(torch.float16), None, id="float16"),
        pytest.param(None, other_order, id="order of gradients"),
        pytest.param(other_order, other_order, id="order of parameters"),
        pytest.param(None, lambda g: g[..., :1].expand(g.shape) if g.dim() else g, id="expanded gradients"),
        pytest.param(lambda v: v.to(torch.complex64), None, id="complex"),
    ],
)
def test_what_torchs_kernels_compute_otherwise_has_the_default_form(
    kind: Any, options: dict[str, Any], change_value: Any, change_gradient: Any
) -> None:
    values = [change_value(v) for v in tensors()] if change_value else tensors()
    gradients = gradients_of(values, 3)
    if change_gradient:
        gradients = [[change_gradient(gradient) for gradient in row] for row in gradients]
    expected = Run(lambda parameters: kind(parameters, **options), values).steps(gradients, fused=False)
    found = Run(lambda parameters: kind(parameters, **options), values).steps(gradients, fused=True)
    assert found.forms == [[None]] * 3
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize(("kind", "options"), [(SGD, {"momentum": 0.9}), (SGD, {"weight_decay": 0.0}), (Adagrad, {})])
def test_sparse_gradients_have_the_default_form(kind: Any, options: dict[str, Any]) -> None:
    def trained(fused: bool) -> Run:
        run = Run(lambda parameters: kind(parameters, **options), [torch.ones(5, 3), torch.ones(3)])
        gradients = [[torch.eye(5, 3).to_sparse() * step, torch.ones(3)] for step in range(1, 4)]
        return run.steps(gradients, fused)

    found = trained(True)
    assert found.forms == [[None]] * 3
    assert_same(found, trained(False))


@pytest.mark.parametrize(("kind", "options"), SAMPLE)
def test_gradients_that_come_and_go(kind: Any, options: dict[str, Any]) -> None:
    values = tensors()
    gradients: list[list[Any]] = [list(row) for row in gradients_of(values)]
    for step, row in enumerate(gradients):
        row[3] = row[3] if step > 2 else None
        row[4] = row[4] if step % 3 else None
    gradients[5] = [None] * len(values)
    expected = Run(lambda parameters: kind(parameters, **options), values).steps(gradients, fused=False)
    found = Run(lambda parameters: kind(parameters, **options), values).steps(gradients, fused=True)
    assert found.forms[-1] == [True]
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning")
def test_a_parameter_that_is_twice_in_a_group() -> None:
    gradients = [[torch.full((3,), float(step))] for step in range(1, 5)]
    expected = Run(lambda p: Adam(p * 2), [torch.ones(3)]).steps(gradients, fused=False)
    assert_same(Run(lambda p: Adam(p * 2), [torch.ones(3)]).steps(gradients, fused=True), expected)


def test_state_in_another_order_than_its_parameter() -> None:
    """As from a checkpoint of before the module had channels last."""
    before, after = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = Run(Adam, [before]).steps([[torch.randn(2, 3, 4, 4)]], fused=False).optimizer.state_dict()
    runs = [Run(Adam, [after]), Run(Adam, [after])]
    gradients = gradients_of([after])
    for run, fused in zip(runs, (True, False), strict=True):
        run.optimizer.load_state_dict(copy.deepcopy(state))
        run.steps(gradients, fused)
    assert runs[0].forms == [[None]] * STEPS
    assert_same(*runs)


def test_channels_last_are_fused() -> None:
    values = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3)]
    gradients = gradients_of(values)
    found = Run(Adam, values).steps(gradients, fused=True)
    assert found.forms[1:] == [[True]] * (STEPS - 1)
    assert_same(found, Run(Adam, values).steps(gradients, fused=False))


def test_a_backward_through_changed_weights_is_noticed() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Adagrad([weight])
    loss = weight.square().square().sum()
    loss.backward(retain_graph=True)
    with fused_form(optimizer):
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closures_compute_the_gradients() -> None:
    def trained(fused: bool, *, by_name: bool) -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer, forms = Adagrad([weight]), []
        optimizer.register_step_post_hook(lambda o, *_: forms.append(o.param_groups[0]["fused"]))

        def closure() -> Tensor:
            assert optimizer.param_groups[0]["fused"] is None
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        loss: Any = None
        with fused_form(optimizer if fused else None):
            for _ in range(3):
                loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert forms == [True if fused else None] * 3
        return torch.cat([loss.reshape(1), weight.detach()])

    for by_name in (True, False):
        torch.testing.assert_close(trained(True, by_name=by_name), trained(False, by_name=by_name))


def test_an_exception_leaves_nothing_behind() -> None:
    optimizer = Adagrad([nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)

    def fail(*_: Any) -> None:
        assert optimizer.param_groups[0]["fused"]
        raise KeyboardInterrupt

    hook = optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyboardInterrupt), fused_form(optimizer):
        optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None
    hook.remove()
    assert not has_step_hooks(optimizer)


@pytest.mark.parametrize(("size", "expected"), [(64, 1), (100_000, 2)])
def test_small_parameters_are_updated_on_one_thread(size: int, expected: int) -> None:
    parameters = [nn.Parameter(torch.ones(size)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(size)
    optimizer = Adam(parameters)
    found: list[int] = []
    with threads(2), fused_form(optimizer):
        # After the hook that marks the groups.
        optimizer.register_step_pre_hook(lambda *_: found.append(torch.get_num_threads()))
        for _ in range(2):
            optimizer.step()
            assert torch.get_num_threads() == 2
    # The first step creates the state, in the default form.
    assert found == [2, expected]


def test_threads_are_restored_after_a_step_that_fails() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = Adam([parameter])
    optimizer.step()

    def fail(*_: Any) -> None:
        assert torch.get_num_threads() == 1
        raise ValueError("the step fails")

    def step() -> None:
        with fused_form(optimizer):
            optimizer.register_step_pre_hook(fail)
            optimizer.step()

    with threads(2):
        with pytest.raises(ValueError, match="the step fails"):
            step()
        assert torch.get_num_threads() == 2
