"""Packed sequences: one graph for all lengths, with eager's results, states and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from lit_ort.backend.backend import ORTBackend
from tests.compare import backend, gradients, mostly

WIDTH, HIDDEN, WORDS = 5, 6, 20
Step = Callable[..., Any]


def lengths_of(batch: int, longest: int, is_sorted: bool) -> Tensor:
    lengths = torch.cat([torch.randint(1, longest + 1, (batch - 1,)), torch.tensor([longest])])
    return lengths.sort(descending=True)[0] if is_sorted else lengths[torch.randperm(batch)]


def compare(module: nn.Module, step: Step, batches: list[tuple[Any, ...]], graphs: int = 2) -> ORTBackend:
    """Compares results and gradients with eager's for all batches."""
    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for number, batch in enumerate(batches):
        found: list[Any] = []
        for call in (step, compiled):
            module.zero_grad()
            inputs = [value.detach().requires_grad_() if is_float(value) else value for value in batch]
            results = tree_leaves(call(*inputs))
            floats = [result for result in results if is_float(result) and result.requires_grad]
            torch.manual_seed(number)
            torch.stack([(result * torch.randn_like(result)).sum() for result in floats]).sum().backward()
            found.append((results, gradients(module), [value.grad for value in inputs if is_float(value)]))
        torch.testing.assert_close(found[1], found[0])
        for result, expected in zip(found[1][0], found[0][0], strict=True):
            assert not isinstance(result, Tensor) or result.stride() == expected.stride()
    assert len(engine.compile_log.graphs) <= graphs, [str(graph) for graph in engine.compile_log.graphs]
    assert not engine.compile_log.breaks
    assert all(graph.fallback is None for graph in engine.compile_log.graphs)
    return engine


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def padded_batches(is_sorted: bool, batch_first: bool, sizes: Any = None) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    found = []
    for batch, longest in sizes or ((4, 5), (4, 7), (4, 3), (4, 12), (4, 7)):
        x = torch.randn(batch, longest, WIDTH)
        found.append((x if batch_first else x.transpose(0, 1).contiguous(), lengths_of(batch, longest, is_sorted)))
    return found


def twin(kind: str, **settings: Any) -> nn.RNNBase:
    torch.manual_seed(1)
    if kind in ("tanh", "relu"):
        return nn.RNN(WIDTH, HIDDEN, nonlinearity=kind, **settings)
    return getattr(nn, kind)(WIDTH, HIDDEN, **settings)


# enforce_sorted, batch_first, and settings of a layer.
FORMS: list[tuple[bool, bool, dict[str, Any]]] = [
    (True, True, {}),
    (False, False, {"bidirectional": True}),
    (False, True, {"num_layers": 2, "bidirectional": True}),
    (True, False, {"num_layers": 2, "bias": False}),
]


# `test_all_settings` has the others.
@pytest.mark.parametrize(
    ("kind", "enforce_sorted", "batch_first", "settings"),
    [
        ("LSTM", *FORMS[3]),
        ("GRU", *FORMS[2]),
    ],
)
@pytest.mark.sampled(1)
def test_layers(kind: str, enforce_sorted: bool, batch_first: bool, settings: dict[str, Any]) -> None:
    layer = twin(kind, batch_first=batch_first, **settings)

    def step(x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=enforce_sorted)
        output, state = layer(packed)
        return pad_packed_sequence(output, batch_first=batch_first), state

    compare(layer, step, padded_batches(enforce_sorted, batch_first))


@pytest.mark.parametrize("kind", ["LSTM", pytest.param("GRU", marks=pytest.mark.sweep)])
def test_all_batch_sizes_and_lengths(kind: str) -> None:
    layer = twin(kind, batch_first=True, bidirectional=True)

    def step(x: Tensor, lengths: Tensor) -> Any:
        output, state = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(output, batch_first=True)[0], state

    sizes = [(4, 5), (3, 7), (6, 4), (9, 11), (2, 2)]
    compare(layer, step, padded_batches(False, True, sizes))


def test_given_states() -> None:
    layer = twin("LSTM", num_layers=2)

    def step(x: Tensor, lengths: Tensor, h: Tensor, c: Tensor) -> Any:
        output, state = layer(pack_padded_sequence(x, lengths, enforce_sorted=False), (h, c))
        return pad_packed_sequence(output)[0], state

    batches = [(*batch, *torch.randn(2, 2, 4, HIDDEN)) for batch in padded_batches(False, False)]
    compare(layer, step, batches)


@pytest.mark.parametrize(
    ("enforce_sorted", "batch_first"),
    [
        pytest.param(*case, marks=() if case[0] == case[1] else pytest.mark.sweep)
        for case in itertools.product((False, True), repeat=2)
    ],
)
@pytest.mark.sampled(1)
def test_total_length_and_padding_value(enforce_sorted: bool, batch_first: bool) -> None:
    layer = twin("GRU", batch_first=batch_first)

    def step(x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted)
        total = x.size(1 if batch_first else 0) + 2
        return pad_packed_sequence(layer(packed)[0], batch_first, padding_value=-3.0, total_length=total)

    compare(layer, step, padded_batches(enforce_sorted, batch_first))


def test_steps_behind_the_longest_sequence() -> None:
    layer = twin("GRU", batch_first=True)

    def step(x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, True, False)
        return pad_packed_sequence(layer(packed)[0], True, total_length=x.size(1))[0] + x.sum(2, keepdim=True)

    batches = [(torch.randn(3, 9, WIDTH), torch.tensor([n, 1, 2])) for n in (8, 7, 5, 4)]
    compare(layer, step, [*batches, (torch.randn(3, 12, WIDTH), torch.tensor([3, 7, 2]))], graphs=3)


@pytest.mark.sweep
def test_embedded_and_projected_data() -> None:
    parts = nn.ModuleList([nn.Embedding(WORDS, WIDTH), twin("LSTM", batch_first=True), nn.Linear(HIDDEN, WORDS)])
    embedding, layer, out = parts

    def step(tokens: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(tokens, lengths, batch_first=True, enforce_sorted=False)
        embedded = PackedSequence(
            embedding(packed.data), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )
        output, _ = layer(embedded)
        logits = out(output.data)
        padded, _ = pad_packed_sequence(output._replace(data=logits.relu()), batch_first=True)
        return nn.functional.cross_entropy(logits, packed.data), padded

    batches = [(torch.randint(WORDS, x.shape[:2]), lengths) for x, lengths in padded_batches(False, True)]
    # Two results are differentiated, which makes other forms of a graph.
    compare(parts, step, [*batches, *batches], graphs=5)


@pytest.mark.sweep
def test_packed_labels() -> None:
    parts = nn.ModuleList([nn.Embedding(WORDS, WIDTH), twin("GRU", batch_first=True), nn.Linear(HIDDEN, WORDS)])
    embedding, layer, out = parts

    def step(tokens: Tensor, lengths: Tensor) -> Any:
        inputs = pack_padded_sequence(embedding(tokens[:, :-1]), lengths - 1, batch_first=True, enforce_sorted=False)
        labels = pack_padded_sequence(tokens[:, 1:], lengths - 1, batch_first=True, enforce_sorted=False)
        return nn.functional.cross_entropy(out(layer(inputs)[0].data), labels.data)

    batches = [
        (torch.randint(WORDS, x.shape[:2]), (lengths + 1).clamp(max=x.shape[1]))
        for x, lengths in padded_batches(False, True)
    ]
    compare(parts, step, batches)


@pytest.mark.parametrize(
    "form", ["list", "sum", *(pytest.param(f, marks=pytest.mark.sweep) for f in ("int32", "tuple", "mask"))]
)
@pytest.mark.sampled(1)
def test_forms_of_lengths(form: str) -> None:
    layer = twin("LSTM", batch_first=True)

    def step(x: Tensor, lengths: Any) -> Any:
        if form == "mask":
            lengths = lengths.sum(1)
        if form == "sum":
            lengths = (lengths != 0).sum(-1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, sizes = pad_packed_sequence(layer(packed)[0], batch_first=True)
        return output, sizes

    batches: list[Any] = []
    for x, lengths in padded_batches(False, True):
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        forms = {
            "list": lengths.tolist(),
            "tuple": tuple(lengths.tolist()),
            "int32": lengths.int(),
            "mask": mask,
            "sum": mask.long() * 3,
        }
        batches.append((x, forms[form]))
    compare(layer, step, batches)


def test_a_list_of_lengths_for_any_batch_size() -> None:
    layer = twin("GRU", batch_first=True)

    def step(x: Tensor, lengths: list[int]) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(layer(packed)[0], batch_first=True)

    sizes = [(4, 5), (3, 7), (6, 4), (9, 11), (2, 2)]
    compare(layer, step, [(x, lengths.tolist()) for x, lengths in padded_batches(False, True, sizes)])


@pytest.mark.parametrize("form", mostly(pytest.mark.sweep, ["tolist", "numpy", "counts", "written"], 2))
def test_lengths_that_a_step_puts_into_a_list(form: str) -> None:
    layer = twin("LSTM", batch_first=True)

    def step(x: Tensor, lengths: Tensor) -> Any:
        if form == "counts":
            lengths = (torch.arange(12) < lengths[:, None]).sum(1).int().cpu()
        values: Any = lengths.numpy() if form == "numpy" else lengths.tolist()
        if form == "written":
            lengths = lengths.clone()
            values = lengths.add_(0).tolist()
        packed = pack_padded_sequence(x, values, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(layer(packed)[0], batch_first=True)

    batches = padded_batches(False, True)
    if form != "written":
        compare(layer, step, batches)
        return
    compiled = torch.compile(step, backend=backend(fallback="warn"))
    for batch in batches:
        torch.testing.assert_close(compiled(*batch), step(*batch))


def returned(x: Tensor, lengths: Tensor, values: list[int]) -> Any:
    return x * 2, values


def written(x: Tensor, lengths: Tensor, values: list[int]) -> Any:
    lengths.add_(1)
    return x + lengths.sum(), values


def appended(x: Tensor, lengths: Tensor, values: list[int]) -> Any:
    values.append(3)
    return x * len(values), values


def looped(x: Tensor, lengths: Tensor, values: list[int]) -> Any:
    for position, value in enumerate(values):
        x = x * value + position
    return x, {"values": values, "again": values}, values if values else None


def split(x: Tensor, lengths: Tensor, values: list[int]) -> Any:
    return [part.sum() for part in x.split(values)], max(values), sum(values), values == [1, 2, 3]


def packed_and_read(x: Tensor, lengths: Tensor, values: list[int]) -> Any:
    return pack_padded_sequence(x[:, None], values, enforce_sorted=False).data, [value + 1 for value in values]


@pytest.mark.parametrize("read", [returned, written, appended, looped, split, packed_and_read])
def test_lists_that_are_read_end_the_graph(read: Callable[..., Any]) -> None:
    def step(x: Tensor, lengths: Tensor) -> Any:
        return read(x * 3, lengths, lengths.tolist())

    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for values in ([1, 2, 3], [2, 3, 1]):
        x = torch.randn(6, requires_grad=True)
        if read is packed_and_read:
            values, x = [4], torch.randn(6, requires_grad=True)
        lengths = [torch.tensor(values), torch.tensor(values)]
        torch.testing.assert_close(compiled(x, lengths[0]), step(x, lengths[1]))
        assert torch.equal(*lengths)
    assert engine.compile_log.breaks


def test_packed_batches_as_a_data_loader_makes_them() -> None:
    layer = twin("GRU", num_layers=2)

    def step(sequence: PackedSequence) -> Any:
        output, state = layer(sequence)
        return pad_packed_sequence(output), state, output.data

    batches: list[Any] = []
    for batch, longest in ((4, 5), (3, 7), (6, 4), (4, 9), (2, 6), (7, 8), (5, 3), (8, 10)):
        parts = [torch.randn(length, WIDTH) for length in lengths_of(batch, longest, False).tolist()]
        batches.append((rnn.pack_sequence(parts, enforce_sorted=False),))
    # Of an input, each size is taken for a constant until it changes.
    compare(layer, step, batches, graphs=5)


@pytest.mark.sweep
def test_two_packs_in_one_step() -> None:
    parts = nn.ModuleList([twin("LSTM", batch_first=True), nn.LSTM(HIDDEN, HIDDEN, batch_first=True)])
    first, second = parts

    def step(x: Tensor, lengths: Tensor) -> Any:
        hidden, sizes = pad_packed_sequence(first(pack_padded_sequence(x, lengths, True, False))[0], True)
        output, (state, _) = second(pack_padded_sequence(hidden.tanh(), sizes, True, False))
        return pad_packed_sequence(output, True)[0], state

    compare(parts, step, padded_batches(False, True))


def test_lengths_that_depend_on_weights_end_the_graph() -> None:
    parts = nn.ModuleList([twin("LSTM", batch_first=True), nn.Linear(WIDTH, 1)])
    layer, score = parts

    def step(x: Tensor) -> Any:
        lengths = (score(x).squeeze(2) > 0).sum(1).clamp(min=1)
        return pad_packed_sequence(layer(pack_padded_sequence(x, lengths, True, False))[0], True)[0]

    x, engine = torch.randn(4, 6, WIDTH), backend(fallback="warn")
    torch.testing.assert_close(torch.compile(step, backend=engine)(x), step(x))
    assert engine.compile_log.breaks


@pytest.mark.parametrize(
    ("lengths", "enforce_sorted", "message"),
    [([2, 0, 4], False, "greater than 0"), ([2, 3, 4], True, "sorted"), ([9, 3, 4], False, ".")],
)
@pytest.mark.sampled(1)
def test_lengths_that_eager_refuses_raise(lengths: list[int], enforce_sorted: bool, message: str) -> None:
    layer = twin("LSTM", batch_first=True)

    def step(x: Tensor, lengths: Tensor) -> Any:
        return layer(pack_padded_sequence(x, lengths, True, enforce_sorted))[0].data

    compiled = torch.compile(step, backend=backend(fallback="warn"))
    for number, given in enumerate(([4, 3, 2], lengths, [5, 2, 2], lengths)):
        arguments = torch.randn(3, 5, WIDTH), torch.tensor(given)
        if number % 2 == 0:
            torch.testing.assert_close(compiled(*arguments), step(*arguments))
            continue
        for call in (step, compiled):
            with pytest.raises(RuntimeError, match=message):
                call(*arguments)


def test_fewer_lengths_than_rows() -> None:
    layer = twin("LSTM", batch_first=True)

    def step(x: Tensor, lengths: Tensor) -> Any:
        return pad_packed_sequence(layer(pack_padded_sequence(x, lengths, True, False))[0], True)[0]

    compare(layer, step, [(x, lengths[:2]) for x, lengths in padded_batches(False, True)], graphs=3)


@pytest.mark.sweep
def test_dropout_between_layers() -> None:
    layer = twin("LSTM", num_layers=3, dropout=0.5, batch_first=True)
    compiled = torch.compile(
        lambda x, lengths: layer(pack_padded_sequence(x, lengths, True, False))[0].data, backend=backend()
    )
    batches = padded_batches(False, True)
    drawn = [compiled(*batches[0]), compiled(*batches[0])]
    assert not torch.equal(*drawn)
    layer.eval()
    for x, lengths in batches:
        expected = layer(pack_padded_sequence(x, lengths, True, False))[0].data
        torch.testing.assert_close(compiled(x, lengths), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "tanh", "relu"])
def test_all_settings(kind: str) -> None:
    for layers, directions, bias, first, is_sorted in itertools.product(*[(False, True)] * 5):
        torch.compiler.reset()
        settings = {"num_layers": 1 + layers, "bidirectional": directions, "bias": bias}
        test_layers(kind, is_sorted, first, settings)
