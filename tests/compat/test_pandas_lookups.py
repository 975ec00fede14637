"""Look-ups in an Index of pandas: no graph break, eager's results, and a guard on the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend
from tests.compat.canary import canary

pandas = pytest.importorskip("pandas")

LOOKUPS: dict[str, Callable[[Tensor, Any], Any]] = {
    "get_loc": lambda x, columns: x[:, columns.get_loc("b")],
    "get_indexer": lambda x, columns: x[:, np.append(0, columns.get_indexer(["b"]))],
    "get_indexer of nothing": lambda x, columns: x[:, np.append(0, columns.get_indexer([]))],
    "in": lambda x, columns: x * 2 if "b" in columns and "z" not in columns else x,
    "len": lambda x, columns: x * len(columns),
    "tolist": lambda x, columns: x * len(set(columns.tolist()) & {"a", "c"}),
    "copy": lambda x, columns: x[:, columns.copy().get_loc("b")],
    "iteration": lambda x, columns: sum(x * (k + len(name)) for k, name in enumerate(columns)),
    "element": lambda x, columns: x * (1 if columns[0] == "a" else 2),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name: str) -> None:
    with canary("UserMethodVariable.call_function", "pandas_lookups", "a look-up in an Index ends the graph"):
        torch.compiler.reset()
        engine, lookup = backend(fallback="warn"), LOOKUPS[name]
        compiled = torch.compile(lookup, backend=engine)
        x = torch.randn(2, 4)
        first = pandas.Index(["a", "b"])
        for columns in (first, first, first.copy(), pandas.Index(["c", "a", "b"]), first):
            with dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log):
                actual = compiled(x, columns)
            torch.testing.assert_close(actual, lookup(x, columns), rtol=0, atol=0)
        assert not engine.compile_log.breaks
        assert engine.count <= 2


def test_equal_labels_of_another_type_are_others() -> None:
    torch.compiler.reset()
    lookup = torch.compile(lambda x, columns: x * columns.tolist()[0], backend=backend(fallback="warn"))
    x = torch.ones(2, dtype=torch.int64)
    assert lookup(x, pandas.Index([1, 2])).dtype == torch.int64
    assert lookup(x, pandas.Index([1.0, 2.0])).dtype == torch.float32


def test_a_missing_label_raises_eagers_error() -> None:
    torch.compiler.reset()
    lookup = torch.compile(lambda x, columns: x[columns.get_loc("z")], backend=backend(fallback="warn"))
    with pytest.raises(KeyError, match="z"):
        lookup(torch.ones(2), pandas.Index(["a"]))


def test_a_copy_with_another_name() -> None:
    torch.compiler.reset()
    step = torch.compile(lambda x, c: x * len(c.copy(name="renamed").name), backend=backend(fallback="warn"))
    assert step(torch.ones(()), pandas.Index(["a"], name="ab")) == 7
