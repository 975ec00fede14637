"""The example notebook: executed as a whole, and the outputs in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

PATH = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
LARGEST_BYTES = 64_000
# Fewer rows and a smaller model in the test.
SMALLER = {"data(6_400)": "data(640)", "width=128, layers=2": "width=16, layers=1"}


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def results_of(notebook: Any, kind: str) -> list[str]:
    """Return the values of cells as one MIME type."""
    return [output.data[kind] for output in outputs_of(notebook) if kind in output.get("data", {})]


def printed_by(notebook: Any) -> str:
    return "".join(output.text for output in outputs_of(notebook) if output.output_type == "stream")


def accuracy_of(notebook: Any) -> float:
    return float(printed_by(notebook).split("accuracy ")[1].split()[0])


def assert_shows_a_run(notebook: Any) -> None:
    """Checks report and table."""
    (report,) = results_of(notebook, "text/html")
    assert "no fallback" in report
    (table,) = results_of(notebook, "text/markdown")
    assert "| eager |" in table
    assert "| ort |" in table


@pytest.mark.slow
@pytest.mark.sweep
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(PATH, 4)
    for cell in notebook.cells:
        for text, smaller in SMALLER.items():
            cell.source = cell.source.replace(text, smaller)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert 0 < accuracy_of(notebook) < 1
    assert_shows_a_run(notebook)


def test_the_file_has_the_outputs_of_a_run() -> None:
    notebook = nbformat.read(PATH, 4)
    nbformat.validate(notebook)
    assert all(text in "".join(cell.source for cell in notebook.cells) for text in SMALLER)
    assert accuracy_of(notebook) > 0.8
    assert_shows_a_run(notebook)
    assert PATH.stat().st_size < LARGEST_BYTES
