"""Canaries for what tracing packed sequences needs of Dynamo and of torch's recurrent modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.compare import backend
from tests.compat.canary import canary

FILE = "packed_sequences"
LENGTHS = ([3, 5, 2, 4], [1, 2, 2, 4], [3, 3, 3, 2], [2, 2, 3, 5], [4, 3, 2, 1])
# Torch and sessions take a size for a constant until it changes.
MOST_GRAPHS = 3


def graphs_of(step: Callable[..., Any], batches: list[tuple[Any, ...]]) -> int:
    """Compares a step with eager on batches, and returns the number of its graphs; a graph break is an error."""
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for batch in batches:
        torch.testing.assert_close(compiled(*batch), step(*batch))
    assert not engine.compile_log.breaks, [str(found) for found in engine.compile_log.breaks]
    return engine.count


def padded(form: Callable[[list[int]], Any]) -> list[tuple[Tensor, Any]]:
    return [(torch.randn(4, 5, 2), form(lengths)) for lengths in LENGTHS]


def test_pack_padded_sequence() -> None:
    from lit_ort._compat.packed_sequences import packed_batch_sizes, packed_order, packed_places

    effect = "rows of packed sequences are in another order than in eager"
    with canary("torch._VF._pack_padded_sequence", FILE, effect):
        for lengths in map(tensor, LENGTHS):
            rows = torch.arange(20).view(4, 5)
            expected = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            places = packed_places(lengths, False)
            assert torch.equal(rows.t().flatten()[places], expected.data)
            assert torch.equal(packed_batch_sizes(lengths), expected.batch_sizes)
            torch.testing.assert_close(packed_order(lengths), expected.sorted_indices)


@pytest.mark.parametrize("message", ["greater than 0", "sorted"])
def test_errors_of_pack_padded_sequence(message: str) -> None:
    from lit_ort._compat.packed_sequences import packed_places

    with canary("torch._VF._pack_padded_sequence", FILE, "lengths that eager refuses don't raise"):
        lengths = tensor([2, 0] if message == "greater than 0" else [1, 2])
        with pytest.raises(RuntimeError, match=message):
            packed_places(lengths, True)


def test_packing_is_in_the_graph() -> None:
    def step(x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return packed.data, pad_packed_sequence(packed, batch_first=True)

    with canary("OutputGraph.remove_node, VariableBuilder._id_dispatch", FILE, "packed sequences end the graph"):
        assert graphs_of(step, padded(tensor)) <= MOST_GRAPHS


def test_lists_of_lengths() -> None:
    def step(x: Tensor, lengths: list[int]) -> Tensor:
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False).data

    effect = "a list of lengths is compiled again for every batch"
    with canary("LazyVariableTracker.peek_value, GuardBuilder.TYPE_MATCH", FILE, effect):
        assert graphs_of(step, padded(list)) <= MOST_GRAPHS


def test_lists_that_a_step_makes() -> None:
    def step(x: Tensor, lengths: Tensor) -> Tensor:
        values: Any = lengths.tolist()
        return pack_padded_sequence(x, values, batch_first=True, enforce_sorted=False).data

    with canary("TensorVariable.method_tolist, LazyCache", "unread_lists", "lengths.tolist() ends the graph"):
        assert graphs_of(step, padded(tensor)) <= MOST_GRAPHS


def test_lists_that_a_step_reads() -> None:
    torch.compiler.reset()

    def step(x: Tensor, lengths: Tensor) -> Any:
        values = lengths.tolist()
        return x * 2, [value + 1 for value in values], values

    effect = "a step that reads lengths.tolist() fails"
    with canary("RestartAnalysis, InstructionTranslator.speculation_log", "unread_lists", effect):
        engine = backend()
        compiled = torch.compile(step, backend=engine)
        for batch in padded(tensor):
            torch.testing.assert_close(compiled(*batch), step(*batch))
        assert engine.compile_log.breaks


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.sampled(1)
def test_modules_read_the_first_batch_size(kind: Callable[..., nn.RNNBase]) -> None:
    layer = kind(2, 3)

    def step(sequence: PackedSequence) -> Any:
        output, state = layer(sequence)
        return output.data, state

    batches = []
    sizes = [3, 2], [4, 3, 1], [5, 2, 2, 1], [6, 5, 4, 3, 2], [3, 3, 2, 1, 1, 1], [7, 4, 1], [4, 4, 4, 2]
    for lengths in sizes:
        x = torch.randn(len(lengths), lengths[0], 2)
        batches.append((pack_padded_sequence(x, tensor(lengths), batch_first=True),))
    effect = "a layer of a PackedSequence ends the graph"
    with canary("sorted_indices in RNN.forward, InstructionTranslator.symbolic_locals", FILE, effect):
        # A packed sequence has three sizes.
        assert graphs_of(step, batches) <= MOST_GRAPHS + 2


def test_projections_end_the_graph() -> None:
    torch.compiler.reset()
    layer = nn.LSTM(2, 4, proj_size=3, batch_first=True)

    def step(x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return layer(packed)[0].data

    effect = "an LSTM with proj_size on a packed sequence fails rather than runs in eager"
    with canary("torch._dynamo.exc.unimplemented", FILE, effect):
        engine = backend()
        compiled = torch.compile(step, backend=engine)
        for batch in padded(tensor):
            torch.testing.assert_close(compiled(*batch), step(*batch))
        assert any("projection" in found.reason for found in engine.compile_log.breaks)
