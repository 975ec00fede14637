"""The HTML of `explain` in a notebook: the summary, the advice, a table of graphs and the details of each graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from lit_ort.runtime.report import GraphReport

_COLUMNS = ("graph", "kind", "inputs", "gradients", "precision", "memory", "compiled in", "runs in")


def page(summary: str, advice: Sequence[str], graphs: Sequence[GraphReport]) -> str:
    """Return HTML without scripts and styles, in which every text is escaped.

    Args:
        summary: the lines of the summary.
        advice: one line for each fallback, graph break or recompile.
        graphs: the reports of all graphs.
    """
    parts = [f"<p>{'<br>'.join(map(escape, summary.splitlines()))}</p>"]
    if advice:
        parts.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in advice)}</ul>")
    if graphs:
        rows = "".join(_row("td", _cells(graph)) for graph in graphs)
        parts.append(f"<table><thead>{_row('th', _COLUMNS)}</thead><tbody>{rows}</tbody></table>")
    parts.extend(_details(graph) for graph in graphs)
    return f"<div>{''.join(parts)}</div>"


def _cells(graph: GraphReport) -> tuple[str, ...]:
    is_eager = graph.fallback is not None
    return (
        graph.name,
        graph.kind,
        str(graph.inputs),
        str(graph.gradient_count),
        graph.precision,
        "" if is_eager else f"{graph.peak_bytes / 1e6:.0f} MB",
        f"{graph.seconds:.1f} s",
        "eager PyTorch" if is_eager else "ONNX Runtime",
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _details(graph: GraphReport) -> str:
    return f"<details><summary>{escape(graph.name)}</summary><pre>{escape(str(graph))}</pre></details>"
