"""`explain`: the two lines, what to act on, the details, the page of a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

from lit_ort.backend.explanation import CompileLog, Explanation, explain
from lit_ort.runtime.clock import Clock
from lit_ort.runtime.report import EagerFunction, GraphBreak, GraphReport, Recompile
from tests.compare import backend

NASTY = "<script>alert(\"x\" & 'y')</script>"


def report(name: str, kind: str = "fused", fallback: str | None = None, fixed_sizes: str | None = None) -> GraphReport:
    return GraphReport(
        name, kind, 3, 2, ("x float32[2, 3]",), {"mm": 1}, {"ATen": 1}, (), 0.25, fallback, fixed_sizes=fixed_sizes
    )


BREAK = GraphBreak("training_step", "model.py:4", "Dynamo can't trace `print`.", "Print in a hook.")
DESIGNED = GraphBreak("training_step", "model.py:7", "lit_ort runs `Metric.forward` outside of graphs.", by_design=True)
FUNCTION = EagerFunction("training_step", "loss", "model.py:9", "a loop.")
AGAIN = Recompile("training_step", "training_step", "model.py:2", "the guard `x` failed.", "Keep it out.", count=2)


@pytest.mark.parametrize(
    ("explanation", "counts"),
    [
        (Explanation((report("a"),)), "1 graph (1 fused), no fallback, no graph break"),
        (
            Explanation((report("a"), report("b", "forward")), breaks=(BREAK,)),
            "2 graphs (1 forward, 1 fused), no fallback, 1 graph break",
        ),
        (
            Explanation((report("a"), report("b", "eager", "why")), breaks=(BREAK, BREAK)),
            "2 graphs (1 eager, 1 fused), 1 of them in eager PyTorch, 2 graph breaks",
        ),
        (
            Explanation((report("a"),), breaks=(BREAK, DESIGNED)),
            "1 graph (1 fused), no fallback, 1 graph break, 1 by design",
        ),
        (Explanation((), eager_functions=(FUNCTION,)), "no graph, 1 function in eager PyTorch, no graph break"),
        (
            Explanation((report("b", "eager", "why"),), eager_functions=(FUNCTION, FUNCTION)),
            "1 graph (1 eager), in eager PyTorch, 2 functions in eager PyTorch, no graph break",
        ),
    ],
)
def test_the_first_line_counts(explanation: Explanation, counts: str) -> None:
    assert explanation.counts == counts
    assert explanation.summary == f"lit_ort: {counts}\nno run yet"


def test_the_second_line_is_where_time_went() -> None:
    clock = Clock(sessions=3.0, torch_nodes=1.0, eager=1.0)
    assert Explanation((report("a"),), clock).times == (
        "time of runs: 50% ONNX Runtime, 25% torch operators in its sessions, 25% eager PyTorch"
    )


def test_printed_it_names_what_the_user_can_act_on() -> None:
    graphs = (
        report("step_0"),
        report("step_1", "eager", "reason A"),
        report("step_2", "eager", "reason A"),
        report("step_3", fixed_sizes="reason B"),
        report("step_4", fixed_sizes="reason B"),
    )
    explanation = Explanation(graphs, breaks=(BREAK, DESIGNED), eager_functions=(FUNCTION,), recompiles=(AGAIN,))
    assert str(explanation).splitlines()[2:] == [
        "fallback, 2 times: reason A",
        "loss of training_step runs in eager PyTorch (model.py:9): a loop.",
        "graph break in training_step at model.py:4: Dynamo can't trace `print`. Print in a hook.",
        "graphs end by design in training_step at model.py:7: lit_ort runs `Metric.forward` outside of graphs.",
        "training_step was compiled again 2 times, the last time at model.py:2: the guard `x` failed. Keep it out.",
        "step_3 is compiled for each size separately: reason B",
    ]


def test_printed_a_clean_step_is_two_lines() -> None:
    engine = backend()
    torch.compile(lambda x: x.exp().sum(), backend=engine)(torch.ones(3))
    assert len(str(explain(engine)).splitlines()) == 2
    assert "graph_0: forward" in explain(engine).details()


def test_nothing_compiled() -> None:
    explanation = explain(backend())
    assert str(explanation) == "lit_ort: nothing compiled yet. Graphs are compiled at their first run."
    assert "<table>" not in explanation._repr_html_()


def test_the_whole_process_adds_up() -> None:
    before = explain()
    log = CompileLog()
    log.graphs.append(report("a"))
    log.breaks.append(BREAK)
    log.clock.eager += 2.0
    after = explain()
    assert len(after.graphs) == len(before.graphs) + 1
    assert len(after.breaks) == len(before.breaks) + 1
    assert after.clock.eager == before.clock.eager + 2.0


class Page(HTMLParser):
    """The tags and texts of a page, whose tags have to be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_notebook_shows_a_table_and_details() -> None:
    graphs = (report("step_0"), report("step_1", "eager", "reason A"))
    explanation = Explanation(graphs, breaks=(BREAK,))
    page = Page(explanation._repr_html_())
    assert page.tags.count("details") == 2
    assert page.tags.count("li") == 2
    assert page.tags.count("tr") == 3
    assert page.texts[:2] == explanation.summary.splitlines()
    assert {"ONNX Runtime", "eager PyTorch", "fused", "0.2 s"} <= set(page.texts)
    assert all(str(graph) in page.texts for graph in graphs)
    assert str(BREAK) in page.texts


def test_a_notebook_runs_nothing_of_a_name() -> None:
    explanation = Explanation(
        (report(NASTY, NASTY, NASTY),),
        breaks=(GraphBreak(NASTY, NASTY, NASTY),),
        recompiles=(Recompile(NASTY, NASTY, NASTY, NASTY),),
    )
    html = explanation._repr_html_()
    assert "<script" not in html
    assert NASTY in "".join(Page(html).texts)
