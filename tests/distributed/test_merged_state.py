"""The order of parameters that several processes have."""

from __future__ import annotations

import pytest

from lit_ort.distributed.merged_state import in_order


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["p.stages.1.w", "p.stages.0.w", "p.stages.0.b"], ["p.stages.0.w", "p.stages.0.b", "p.stages.1.w"]),
        (["stages.stages.1.w", "stages.stages.0.w"], ["stages.stages.0.w", "stages.stages.1.w"]),
        (["a.stages.0.w", "b.stages.0.w", "a.stages.1.w", "b.stages.1.w"],
         ["a.stages.0.w", "a.stages.1.w", "b.stages.0.w", "b.stages.1.w"]),
        (["p.stages.1.stages.0.w", "p.stages.0.stages.3.w"], ["p.stages.0.stages.3.w", "p.stages.1.stages.0.w"]),
    ],
)  # fmt: skip
def test_names_are_in_the_order_of_one_process(names: list[str], expected: list[str]) -> None:
    assert in_order(names) == expected
