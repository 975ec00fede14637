from __future__ import annotations

from lit_ort.compiler.liveness import Liveness, home, size_bytes
from tests.passes.models import model


def test_values_live_until_their_last_reader() -> None:
    made = model("""g (float[10] x) => (float[10] y) {
        a = Neg(x)
        b = Relu(a)
        y = Add(a, b)
    }""")
    liveness = Liveness(made.graph)
    held = []
    for node in made.graph:
        liveness.run(node)
        held.append(liveness.held_bytes)
    assert held == [40, 80, 40]


def test_a_reshape_takes_no_memory_and_keeps_its_source() -> None:
    made = model("""g (float[10] x) => (float[2, 5] y) <int64[2] s = {2, 5}> {
        a = Neg(x)
        b = Reshape(a, s)
        y = Relu(b)
    }""")
    neg, reshape, relu = made.graph
    liveness = Liveness(made.graph)
    liveness.run(neg)
    assert liveness.grown_by(reshape) == 0
    liveness.run(reshape)
    assert liveness.held_bytes == 40
    assert home(reshape.outputs[0]) is neg.outputs[0]
    liveness.run(relu)
    assert liveness.held_bytes == 40


def test_sizes() -> None:
    made = model("g (float[N] x, int64[3, 4] i) => (float[N] y, int64[3, 4] j) { y = Neg(x) j = Neg(i) }")
    assert [size_bytes(value) for value in made.graph.outputs] == [0, 96]
