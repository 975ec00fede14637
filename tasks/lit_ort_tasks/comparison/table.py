"""The table of a comparison, for the terminal and for report.md."""

from __future__ import annotations

from collections.abc import Sequence

from lit_ort_tasks.comparison.outcome import ADDED_MEMORY, STEP_TIME, Column, Outcome


def columns(outcomes: Sequence[Outcome]) -> list[Column]:
    """The figures that every run has, and the headline figures of the task."""
    results = next((outcome.results for outcome in outcomes if outcome.results is not None), None)
    item = (results["steps"] or {}).get("item", "items") if results else "items"
    headline = [(split, name) for split in ("val", "test") for name in (results["headline"] if results else ())]
    return [
        STEP_TIME,
        Column(f"{item}/s", "steps", "items_per_s", ".0f"),
        Column("first step s", "steps", "first_step_s", ".1f"),
        Column("peak MiB", "steps", "peak_mib", ".0f"),
        ADDED_MEMORY,
        Column("train loss", "metrics", "train/loss", ".4f"),
        *(
            Column(f"{split} {name}", "metrics", f"{split}/{name}", ".2f" if name == "ppl" else ".4f")
            for split, name in headline
        ),
    ]


def ratio(outcome: Outcome, first: Outcome) -> float | None:
    """How many times as fast a step is as the first strategy's; None where one of the two has no figure."""
    own, other = outcome.value(STEP_TIME), first.value(STEP_TIME)
    return other / own if own and other else None


def titles(outcomes: Sequence[Outcome], first: str = "strategy") -> list[str]:
    return [first, *(column.title for column in columns(outcomes)), f"x {outcomes[0].strategy}"]


def cells(outcome: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    """The row of one of the strategies."""
    values = [(outcome.value(column), column.form) for column in columns(outcomes)]
    values.append((ratio(outcome, outcomes[0]), ".2f"))
    return [outcome.strategy, *("-" if value is None else format(value, form) for value, form in values)]


def text_table(outcomes: Sequence[Outcome], first: str = "strategy") -> str:
    """The table for the terminal. The words of a title are below each other, and a failure fills its row.

    Args:
        outcomes: one for each row.
        first: the title of the column with their names.
    """
    head = [title.split(" ") for title in titles(outcomes, first)]
    top = [words[0] if len(words) > 1 else "" for words in head]
    rows = {outcome.strategy: cells(outcome, outcomes) for outcome in outcomes if outcome.failure is None}
    grid = [top, [words[-1] if len(words) < 3 else " ".join(words[1:]) for words in head], *rows.values()]
    widths = [max(len(row[index]) for row in grid) for index in range(len(head))]
    widths[0] = max(widths[0], *(len(outcome.strategy) for outcome in outcomes))

    def line(row: Sequence[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([row[0].ljust(len(first)), *rest]).rstrip()

    lines = [line(row) for row in grid[:2]]
    for outcome in outcomes:
        name = outcome.strategy.ljust(widths[0])
        failure = f"{name}  failed, {outcome.failure}\n{' ' * widths[0]}  log: {outcome.log}"
        lines.append(failure if outcome.failure else line(rows[outcome.strategy]))
    return "\n".join(lines)


def markdown_table(outcomes: Sequence[Outcome]) -> str:
    """The same table for report.md. Where a strategy failed, the table has one more column, with the failures."""
    grid = [titles(outcomes), *(cells(outcome, outcomes) for outcome in outcomes)]
    if any(outcome.failure for outcome in outcomes):
        notes = ["failed", *(f"{o.failure} (log: {o.log})" if o.failure else "" for o in outcomes)]
        grid = [[*row, note.replace("|", r"\|")] for row, note in zip(grid, notes, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in grid]
    return "\n".join([lines[0], "|" + " --- |" * len(grid[0]), *lines[1:]])
