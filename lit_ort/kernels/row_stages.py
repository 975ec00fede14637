"""The passes over a row of a region: what needs a reduction's result comes in a later one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lit_ort.kernels.kernel_arguments import partial_dtype
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.region import LONG_SUM, Apply, ColumnReduction, Load, Reduce, Region, arguments_of

# A value of an earlier stage is kept if computing it again takes more instructions than this.
_KEEP_ABOVE = 5


@dataclass(frozen=True)
class Stages:
    """The passes over a row.

    Args:
        of: the first stage in which each node can be used.
        count: their number.
        kept: the full nodes whose values later stages load from scratch memory.
    """

    of: tuple[int, ...]
    count: int
    kept: tuple[int, ...]


def stages_of(region: Region) -> Stages:
    """The stages of a region."""
    of: list[int] = []
    for node in region.nodes:
        stage = max((of[arg] for arg in arguments_of(node)), default=0)
        of.append(stage + isinstance(node, Reduce))
    kept: set[int] = set()
    costs: dict[int, int] = {}

    def cost(number: int) -> int:
        node = region.nodes[number]
        if not region.full[number]:
            return 0
        if number not in costs:
            own = 1 if not isinstance(node, Apply) else 1 if node.operator == "cast" else OPERATORS[node.operator].cost
            costs[number] = own + sum(cost(arg) for arg in arguments_of(node))
        return costs[number]

    def need(number: int, stage: int) -> None:
        node = region.nodes[number]
        if region.full[number] and number not in kept:
            if of[number] < stage and cost(number) > _KEEP_ABOVE and not isinstance(node, Load):
                kept.add(number)
                stage = of[number]
            for arg in arguments_of(node):
                need(arg, stage)

    for number, stage in _roots(region, of):
        need(number, stage)
    return Stages(tuple(of), max(of, default=0) + 1, tuple(sorted(kept)))


def _roots(region: Region, of: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The nodes that a stage must compute, with the stage."""
    for node in region.nodes:
        if isinstance(node, Reduce):
            yield node.arg, of[node.arg]
    for store in region.stores:
        stage = max(of[number] for number in store.nodes)
        yield from ((number, stage) for number in store.nodes)
    for column in region.columns:
        yield column.value, of[column.value]


def scratch_arrays(region: Region) -> tuple[str, ...]:
    """The dtypes of a row block's arrays in scratch memory: results of columns, parts of long sums, and kept values."""
    partial = [partial_dtype(region, column) for column in (*region.columns, *parts_of(region).values())]
    return (*partial, *(region.nodes[number].dtype for number in stages_of(region).kept))


def parts_of(region: Region) -> dict[int, ColumnReduction]:
    """The sums of a few rows that are added to long sums of columns, by the position of these."""
    columns = enumerate(region.columns)
    return {
        at: replace(column, kind="sum")
        for at, column in columns
        if column.kind == LONG_SUM and region.full[column.value]
    }
