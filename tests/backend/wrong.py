"""Makes compiled graphs wrong, for tests of verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lit_ort._compat.torch_fx import output_of, returned_by
from lit_ort.passes import pass_pipeline


def scale_outputs(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], factor: float) -> None:
    """Multiplies the outputs of one shape by a factor, in graphs that are built from now on."""
    apply = pass_pipeline.apply

    def wrong(module: fx.GraphModule, *rest: Any, **others: Any) -> Any:
        reports = apply(module, *rest, **others)
        output, values = output_of(module.graph), returned_by(module.graph)
        for k, value in enumerate(values):
            if isinstance(value, fx.Node) and tuple(value.meta["val"].shape) == shape:
                with module.graph.inserting_before(output):
                    values[k] = module.graph.call_function(torch.ops.aten.mul.Tensor, (value, factor))
                values[k].meta = {**value.meta}
        output.args = (tuple(values),)
        return reports

    monkeypatch.setattr(pass_pipeline, "apply", wrong)
