"""Access to the report of one fusion or pass."""

from __future__ import annotations

from lit_ort.backend.backend import ORTBackend
from lit_ort.runtime.report import PassReport


def report_of(engine: ORTBackend, name: str) -> PassReport:
    """The report of a fusion or pass on the only graph of a backend, summed over its phases."""
    (graph,) = engine.compile_log.graphs
    reports = [report for report in graph.passes if report.name == name]
    assert reports
    declined = tuple(reason for report in reports for reason in report.declined)
    return PassReport(name, sum(report.fired for report in reports), declined)
