"""Results and gradients of recurrent layers, compared with torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lit_ort.ops import OPERATORS, recurrent
from tests.compare import relative_error
from tests.ops.helpers import RecordingAllocator

layer_of = torch.ops.lit_ort.recurrent_layer
loop_of = torch.ops.lit_ort.recurrent_loop
gradients_of = torch.ops.lit_ort.recurrent_loop_backward
steps_of = torch.ops.lit_ort.packed_steps
MODES = ["lstm", "gru", "tanh", "relu"]
LENGTH, BATCH, WIDTH, HIDDEN = 5, 3, 4, 6


@pytest.fixture(params=["machine code", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test by machine code, and by torch's operators as on CPUs without it."""
    if request.param == "torch":
        monkeypatch.setattr(recurrent, "recurrent_loops", lambda: None)
    else:
        pytest.importorskip("llvmlite")


def twin(mode: str, biases: bool, hidden: int = HIDDEN, dtype: torch.dtype = torch.float64) -> nn.RNNBase:
    """Torch's module for a mode."""
    if mode in ("lstm", "gru"):
        return {"lstm": nn.LSTM, "gru": nn.GRU}[mode](WIDTH, hidden, bias=biases, dtype=dtype)
    return nn.RNN(WIDTH, hidden, nonlinearity=mode, bias=biases, dtype=dtype)


def arguments(
    module: nn.RNNBase, mode: str, reverse: bool, length: int = LENGTH, batch: int = BATCH
) -> tuple[Any, ...]:
    """The arguments of the operator; all tensors require grad, and x is not contiguous."""
    weights = list(module.parameters())
    dtype, hidden = weights[0].dtype, module.hidden_size
    x = torch.randn(batch, length, WIDTH, dtype=dtype).transpose(0, 1).requires_grad_()
    state, cell = (torch.randn(1, batch, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    return (x, state, cell if mode == "lstm" else None, *weights, *([None] * (4 - len(weights))), mode, reverse)


def loop_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the loop, from those of the layer."""
    x, state, cell, input_weight, *rest = args
    return ((x @ input_weight.t()).detach(), state, cell, *rest)


def gradient_arguments(given: list[Any], results: tuple[torch.Tensor, ...], mode: str, *rest: Any) -> tuple[Any, ...]:
    """The arguments of the loop's gradient, from those of the loop and its results."""
    output, *last, saved = results
    grads = [torch.randn_like(value) for value in (output, *last)]
    return (*grads, *given[1:4], output, saved if saved.numel() else None, mode, *rest)


def leaves_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [argument for argument in args if isinstance(argument, torch.Tensor)]


def detached(args: tuple[Any, ...]) -> list[Any]:
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in args]


def check(module: nn.RNNBase, args: tuple[Any, ...]) -> None:
    """Compares results and all gradients with torch's; the gradient of the output is not contiguous."""
    x, state, cell, *_, reverse = args
    expected, last = module(x.flip(0) if reverse else x, state if cell is None else (state, cell))
    expected = expected.flip(0) if reverse else expected
    actual, *last_states = layer_of(*args)
    pairs = [(actual, expected), *zip(last_states, [last] if cell is None else last, strict=False)]
    weight = torch.randn(*expected.shape[1:], len(expected), dtype=x.dtype).permute(2, 0, 1)
    losses = [
        (results[0] * weight).sum() + sum((result**3).sum() for result in results[1:])
        for results in zip(*pairs, strict=True)
    ]
    for result, wanted in pairs:
        torch.testing.assert_close(result, wanted)
    gradients = [torch.autograd.grad(loss, leaves_of(args)) for loss in losses]
    limit = 1e-7 if x.dtype == torch.float64 else 1e-4
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=limit, atol=limit)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_matches_torch(mode: str, biases: bool, reverse: bool, length: int) -> None:
    module = twin(mode, biases)
    check(module, arguments(module, mode, reverse, length))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 15), (13, 33)])
def test_matches_torch_in_float32(mode: str, batch: int, hidden: int) -> None:
    module = twin(mode, True, hidden, torch.float32)
    check(module, arguments(module, mode, batch == 1, batch=batch))


@pytest.mark.sweep
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", [1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 64, 130, 200])
def test_matches_torch_for_all_sizes(mode: str, dtype: torch.dtype, hidden: int) -> None:
    module = twin(mode, True, hidden, dtype)
    for length in (1, 2, 7):
        for batch in (1, 2, 3, 4, 5, 8, 9, 16, 31, 64):
            check(module, arguments(module, mode, batch % 2 == 1, length, batch))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_are_not_finite_spread_as_in_eager(mode: str, value: float) -> None:
    module = twin(mode, True)
    args = arguments(module, mode, False)
    with torch.no_grad():
        args[0][1, 1, 2] = value
        expected, _ = module(*detached(args)[:1], detached(args)[1] if mode != "lstm" else tuple(detached(args)[1:3]))
    torch.testing.assert_close(layer_of(*detached(args))[0], expected, equal_nan=True)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck_and_opcheck(mode: str) -> None:
    args = arguments(twin(mode, True), mode, False)

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [tensors[1], tensors[2] if mode == "lstm" else None]
        return layer_of(tensors[0], *states, *tensors[-4:], mode, False)[: 3 if mode == "lstm" else 2]

    assert torch.autograd.gradcheck(outputs, leaves_of(args))
    loop = loop_arguments(args)
    torch.library.opcheck(loop_of.default, (loop[0].requires_grad_(), *loop[1:]))
    torch.library.opcheck(loop_of.default, (*loop_arguments(args)[:-1], True))
    given = detached(loop)
    torch.library.opcheck(gradients_of.default, gradient_arguments(given, loop_of(*given), mode, False))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mode", MODES)
def test_results_use_the_given_memory(mode: str) -> None:
    allocator = RecordingAllocator()
    args = detached(loop_arguments(arguments(twin(mode, True), mode, False)))
    results = OPERATORS[loop_of.default].kernel(allocator, *args)
    assert all(allocator.contains(result) for result in results)
    backward = OPERATORS[gradients_of.default]
    gradients = backward.kernel(allocator, *gradient_arguments(args, results, mode, False))
    assert all(allocator.contains(gradient) for gradient in gradients)
    assert not any(gradient.isnan().any() for gradient in gradients)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_the_last_state_alone(mode: str) -> None:
    module = twin(mode, True)
    args = arguments(module, mode, False)
    x, state, cell = args[:3]
    _, last = module(x, state if cell is None else (state, cell))
    results = [last] if cell is None else last
    for actual, expected in zip(layer_of(*args)[1:3], results, strict=False):
        pairs = [torch.autograd.grad(value.sum(), leaves_of(args), retain_graph=True) for value in (actual, expected)]
        for gradient, reference in zip(*pairs, strict=True):
            torch.testing.assert_close(gradient, reference)


def test_an_input_that_requires_no_grad_has_no_gradient() -> None:
    args = arguments(twin("gru", True), "gru", False)
    output, *_ = layer_of(args[0].detach(), *args[1:])
    output.sum().backward()
    assert args[0].grad is None
    assert args[1].grad is not None


def packed_arguments(module: nn.RNNBase, mode: str, reverse: bool, lengths: list[int]) -> tuple[Any, ...]:
    """The arguments of the operator for a packed sequence; all tensors require grad."""
    _, state, cell, *rest = arguments(module, mode, reverse, batch=len(lengths))
    x = torch.randn(sum(lengths), WIDTH, dtype=state.dtype, requires_grad=True)
    return (
        x,
        state,
        cell,
        *rest,
        torch.tensor([sum(length > step for length in lengths) for step in range(lengths[0])]),
    )


def packed_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """The results of a layer for a packed sequence, whose batch sizes are the last argument."""
    *given, batch_sizes = args
    return layer_of(*given, *steps_of(batch_sizes, len(given[0]), given[1].shape[1], given[-1]))


def check_packed(module: nn.RNNBase, args: tuple[Any, ...]) -> None:
    """Compares results and all gradients with torch's; its reverse direction is that of a layer of two."""
    x, state, cell, *weights, mode, reverse, batch_sizes = args
    states = state if cell is None else (state, cell)
    sequence = nn.utils.rnn.PackedSequence(x, batch_sizes)
    if reverse:
        make: Any = type(module)
        both = make(WIDTH, module.hidden_size, bias=module.bias, bidirectional=True, dtype=x.dtype)
        both.mode = module.mode
        names = [name for name, _ in module.named_parameters()]
        given = {f"{name}_reverse": weight for name, weight in zip(names, weights, strict=False)}
        twice = tuple(value.expand(2, -1, -1) for value in ([state] if cell is None else states))
        found, last = torch.func.functional_call(both, given, (sequence, twice[0] if cell is None else twice))
        expected = found.data[:, module.hidden_size :]
        last = [value[1:] for value in ([last] if cell is None else last)]
    else:
        found, last = module(sequence, states)
        expected, last = found.data, [last] if cell is None else last
    actual, *last_states = packed_layer(*args)
    pairs = [(actual, expected), *zip(last_states, last, strict=False)]
    weight = torch.randn(expected.shape[::-1], dtype=x.dtype).t()
    losses = [
        (results[0] * weight).sum() + sum((result**3).sum() for result in results[1:])
        for results in zip(*pairs, strict=True)
    ]
    for result, wanted in pairs:
        torch.testing.assert_close(result, wanted)
    leaves = [leaf for leaf in leaves_of(args) if leaf.requires_grad]
    gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
    limit = 1e-7 if x.dtype == torch.float64 else 1e-4
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=limit, atol=limit)


LENGTHS = [[1], [4], [3, 3, 3], [5, 4, 1], [9, 7, 7, 4, 4, 4, 2, 2, 1, 1, 1]]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_packed_sequences_match_torch(mode: str, biases: bool, reverse: bool) -> None:
    module = twin(mode, biases)
    for lengths in LENGTHS:
        check_packed(module, packed_arguments(module, mode, reverse, lengths))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reverse", [True, False])
def test_packed_sequences_match_torch_by_threads(mode: str, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.kernels.recurrent_loop._ONE_BLOCK", 0)
    for hidden, dtype in ((33, torch.float32), (17, torch.float64)):
        module = twin(mode, True, hidden, dtype)
        lengths = sorted(torch.randint(1, 12, (37,)).tolist(), reverse=True)
        check_packed(module, packed_arguments(module, mode, reverse, lengths))


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_in_bfloat16_are_as_near_to_float64_as_torch(mode: str) -> None:
    distances = []
    for _ in range(5):
        module = twin(mode, True, dtype=torch.bfloat16)
        args = packed_arguments(module, mode, False, LENGTHS[4])
        leaves = leaves_of(args[:-1])
        exact = copy.deepcopy(module).double()
        exact_leaves = [*(leaf.detach().double().requires_grad_() for leaf in leaves[:-4]), *exact.parameters()]
        outputs = [
            of_torch(exact, exact_leaves[:-4], args[-1]),
            of_torch(module, leaves[:-4], args[-1]),
            packed_layer(*args)[0],
        ]
        weight = torch.randn(outputs[0].shape, dtype=torch.bfloat16)
        sums = [(output * weight).sum() for output in outputs]
        gradients = [torch.autograd.grad(sums[0], exact_leaves)]
        gradients += [torch.autograd.grad(value, leaves) for value in sums[1:]]
        wanted, *others = ([output.detach(), *found] for output, found in zip(outputs, gradients, strict=True))
        distances.append([[relative_error(*pair) for pair in zip(other, wanted, strict=True)] for other in others])
    of_torchs, ours = torch.tensor(distances).mean(0)
    assert (ours <= 1.25 * of_torchs).all(), f"{ours} for {of_torchs}"


def of_torch(module: nn.RNNBase, values: list[torch.Tensor], batch_sizes: torch.Tensor) -> torch.Tensor:
    """The output of torch's module for the packed data, state and cell."""
    x, *states = values
    sequence = nn.utils.rnn.PackedSequence(x, batch_sizes)
    return module(sequence, tuple(states) if len(states) > 1 else states[0])[0].data


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_opcheck_of_packed_sequences(mode: str) -> None:
    *args, batch_sizes = packed_arguments(twin(mode, True), mode, False, LENGTHS[3])
    steps = steps_of(batch_sizes, len(args[0]), len(LENGTHS[3]), False)
    loop = (*loop_arguments(tuple(args)), *steps)
    torch.library.opcheck(loop_of.default, loop)
    given = detached(loop)
    results = loop_of(*given)
    torch.library.opcheck(gradients_of.default, gradient_arguments(given, results, mode, False, steps[0]))
    for reverse in (True, False):
        torch.library.opcheck(steps_of.default, (batch_sizes, len(args[0]), len(LENGTHS[3]), reverse))


def test_batch_sizes_of_other_rows_are_refused() -> None:
    *given, _ = packed_arguments(twin("gru", True), "gru", False, LENGTHS[3])
    for sizes in ([3, 3, 3, 2], [2, 3, 3, 2], [4, 3, 2, 1], [3, 4, 2, 1], [3, 3, 4, 0]):
        with pytest.raises(RuntimeError, match="must fall"):
            packed_layer(*given, torch.tensor(sizes))
