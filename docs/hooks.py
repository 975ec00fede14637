"""What mkdocs adds to the pages of docs/: files from the rest of the repository, benchmark tables, inline drawings.

Links in Markdown files are relative to the repository, so that they also work where the repository is browsed.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import suite_report  # noqa: E402 - the repository is not a package

# Pages from files outside of docs/, by their path in the repository.
INCLUDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
    "examples/serve/README.md": "serve.md",
}
# Pictures from outside of docs/.
PICTURES = {"benchmarks/results.png": "benchmarks/results.png"}
RESULTS = ROOT / "benchmarks" / "results.jsonl"
IN_RESULTS = (
    "[Benchmarks](../docs/benchmarks/index.md) has the summary, [Every model](../docs/benchmarks/models.md) the table "
    "of each size and precision."
)

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that are stored elsewhere in the repository."""
    for source, uri in INCLUDED.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for source, uri in PICTURES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in benchmark tables and rewrites links to where the site has their targets."""
    uri = page.file.src_uri
    sources = {target: source for source, target in INCLUDED.items()}
    source = sources.get(uri, f"docs/{uri}")
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]
    markdown = with_tables(markdown, source)
    return outside_of_code(markdown, lambda text: _LINK.sub(lambda link: site_link(link, source, uri), text))


def with_tables(markdown: str, source: str) -> str:
    """Markdown with the tables of benchmarks/results.jsonl where a page asks for them by a comment.

    RESULTS.md has the same tables as text, for readers of the repository. The site has them once.
    """
    if "<!-- suite:" not in markdown and source != "benchmarks/RESULTS.md":
        return markdown
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    if source == "benchmarks/RESULTS.md":
        return replaced(replaced(markdown, suite_report.summary(lines), IN_RESULTS), suite_report.table(lines), "")
    parts = {"setup": setup(lines), "summary": suite_report.summary(lines), "models": models(lines)}
    return re.sub(r"<!-- suite: (\w+) -->", lambda name: parts[name[1]], markdown)


def setup(lines: list[dict[str, Any]]) -> str:
    """Machine, versions and date of the measurements, as a list."""
    facts = [(line["machine"], ", ".join(f"{k} {v}" for k, v in line["versions"].items())) for line in lines]
    machines, versions = ("; ".join(dict.fromkeys(column)) for column in zip(*facts, strict=True))
    dates = sorted({line["date"] for line in lines})
    between = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"- Machine: {machines}\n- Versions: {versions}\n- Date: {between}\n- Measurements: {len(lines)}"


def models(lines: list[dict[str, Any]]) -> str:
    """A section for each size and precision."""
    parts = []
    for size, precision in dict.fromkeys((line["size"], line["precision"]) for line in lines):
        own = [line for line in lines if (line["size"], line["precision"]) == (size, precision)]
        parts.append(f"## {size.capitalize()} models, {precision}\n\n{suite_report.table(own)}")
    return "\n\n".join(parts)


def replaced(text: str, old: str, new: str) -> str:
    """Text with one part replaced, which has to be there."""
    if old not in text:
        raise ValueError(
            "benchmarks/RESULTS.md differs from what results.jsonl gives. Run python benchmarks/suite.py "
            "benchmarks/results.jsonl --report and paste its tables."
        )
    return text.replace(old, new)


def outside_of_code(markdown: str, change: Any) -> str:
    """Applies a change to everything but fenced code."""
    parts, end = [], 0
    for block in _CODE.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])


def site_link(link: re.Match[str], source: str, uri: str) -> str:
    """A link from a file of the repository, as the site has it. A drawing becomes part of the page.

    Args:
        source: the file's path in the repository.
        uri: the page's path in the site's sources.
    """
    mark, text, path, anchor = link[1], link[2], link[3], link[4] or ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if mark and target.endswith(".svg"):
        drawing = "\n".join(line for line in (ROOT / target).read_text().splitlines() if line.strip())
        return f"<figure>\n{drawing}\n</figure>"
    here = {**INCLUDED, **PICTURES}.get(target)
    if here is None and target.startswith("docs/"):
        here = target.removeprefix("docs/")
    if here is None:
        # Code of the repository, which the site doesn't have.
        return text
    return f"{mark}[{text}]({posixpath.relpath(here, posixpath.dirname(uri) or '.')}{anchor})"
