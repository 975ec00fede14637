"""The operators of torch's database that fall back to eager for some of their samples, and why."""

from __future__ import annotations

from tests.compare import SINCE_2_15

_STRIDES = "depends on the strides of an input"
_VALUES = "its sizes depend on the values of a tensor"

# By the name that `tests.operators.op_db` uses.
FALLBACKS: dict[str, str] = {
    "as_strided": _STRIDES,
    "as_strided.partial_views": _STRIDES,
    "as_strided_copy": _STRIDES,
    "as_strided_scatter": _STRIDES,
    "hash_tensor": "sessions don't support uint64",
    "index_fill": "the gradient of a fill value that is a tensor has a data-dependent size",
    "narrow": _VALUES,
    "nn.functional.multilabel_margin_loss": "torch 2.13 traces it incorrectly",
    **({} if SINCE_2_15 else {"tensor_split": _VALUES}),
    "view_as_complex": "returned together with its input, with which it shares memory in another dtype",
}


def page() -> str:
    """The table of these operators in docs/support.md."""
    rows = "\n".join(f"| `{name}` | {reason} |" for name, reason in FALLBACKS.items())
    return f"| operator | reason |\n|---|---|\n{rows}"
