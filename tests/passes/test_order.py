"""All passes together on a real training graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort.compiler import passes
from lit_ort.errors import OptionsError
from tests.compare import backend, gradients, relative_error


class TwoHeads(nn.Module):
    """A table, attention, and two heads: the loss alone reads the first one's scores, and others the second's too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, 64)
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
        self.heads = nn.ModuleList(nn.Linear(64, 4200) for _ in range(2))
        self.heads[0].bias.requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layer(self.table(x))
        heads = hidden.unflatten(-1, (4, 16)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, 2 * heads, heads + 1, is_causal=True)
        hidden = hidden + seen.transpose(1, 2).flatten(2)
        scores = self.heads[1](hidden).flatten(0, 1)
        first = F.cross_entropy(self.heads[0](hidden).flatten(0, 1), y.flatten(), ignore_index=3)
        return first + F.cross_entropy(scores, y.flatten()) + 1e-3 * scores.square().mean()


def test_all_on_equals_all_off() -> None:
    module = TwoHeads()
    twin = copy.deepcopy(module)
    x, y = torch.randint(3000, (100, 20)), torch.randint(4200, (100, 20))
    on, off = backend(), backend(disable_passes=passes.optional_names())
    loss = torch.compile(TwoHeads.loss, backend=on)(module, x, y)
    torch.compiler.reset()
    plain = torch.compile(TwoHeads.loss, backend=off)(twin, x, y)
    torch.testing.assert_close(loss, plain)
    loss.backward()
    plain.backward()
    for name, gradient in gradients(twin).items():
        assert relative_error(gradients(module)[name], gradient) < 1e-5
    fired = {report.name: report.fired for report in on.compile_log.graphs[0].passes}
    last = (*passes.MEMORY_PASSES, *passes.ORDER_PASSES)
    assert list(fired) == [p.name for p in (*passes.FORWARD_PASSES, *passes.TRAINING_PASSES, *last)]
    # Attention has its kernel, there is no dropout to draw, no tied table and no checkpoint, and large_gemm takes
    # tall_gemm's products.
    idle = [name for name, count in fired.items() if not count]
    assert idle == ["attention_expansion", "torch_dropout", "tied_embedding", "tall_gemm", "recompute"]


def test_all_of_them_in_mixed_precision() -> None:
    module, engine = TwoHeads(), backend(precision="bf16-mixed")
    x, y = torch.randint(3000, (100, 20)), torch.randint(4200, (100, 20))
    torch.compile(TwoHeads.loss, backend=engine)(module, x, y).backward()
    reports = engine.compile_log.graphs[0].passes
    assert {report.name for report in reports} == set(passes.names()) - {p.name for p in passes.UPDATE_PASSES}
    assert all(report.fired for report in reports if report.name.startswith("bf16"))


def test_names_are_unique_and_checked() -> None:
    assert len(set(passes.names())) == len(passes.names())
    passes.require_names(passes.optional_names())
    with pytest.raises(OptionsError, match="no pass"):
        passes.require_names(("nonsense",))
