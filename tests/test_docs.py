"""The documentation: its code runs, its commands exist, its links resolve, its figures are the measured ones."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from lit_ort_tasks.commands.predict import CommandLine

import lit_ort
import lit_ort.callbacks
from benchmarks import suite_report
from lit_ort.commands.main import COMMANDS
from tests.scripts import run_script

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
NEW_PROCESS = "<!-- new process -->"
# What a page's code has from its reader.
READERS_OWN = {
    "README.md": """
import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


module = Classifier()
dataloader = DataLoader(TensorDataset(torch.randn(8, 8), torch.randint(2, (8,))), 4)
Trainer = __import__("functools").partial(Trainer, max_epochs=1, logger=False, enable_checkpointing=False)
""",
}
SECONDS = 240
TOOLS = ("bash", "curl", "lint-imports", "mkdocs", "pip", "pre-commit", "pyright", "pytest", "python", "ruff", "source")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str) -> Iterator[tuple[str, int, list[str]]]:
    """Language, number of the first line, and lines of each fenced block; comments that start processes among them."""
    language, block, start = None, [], 0
    for number, line in enumerate(text_of(page).splitlines()):
        if line.startswith("```"):
            if language is None:
                language, block, start = line.removeprefix("```").strip(), [], number + 1
            else:
                yield language, start, block
                language = None
        elif language is not None:
            block.append(line)
        elif line.strip() == NEW_PROCESS:
            yield NEW_PROCESS, number, []


def programs(page: str) -> list[str]:
    """The page's Python blocks, at the lines that they have on the page, one program for each process."""
    found: list[list[str]] = [[]]
    for language, start, block in fences(page):
        if language == NEW_PROCESS:
            found.append([])
        elif language == "python":
            found[-1] += [""] * (start - len(found[-1])) + block
    return ["\n".join(lines) + "\n" for lines in found if lines]


def expected_output(page: str) -> list[str]:
    return [line for language, _, block in fences(page) if language == "output" for line in block]


# Code


# Fine-tunes and exports a whole task, for more than a minute.
LONGEST = "docs/deploy.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.sweep] * (page == LONGEST)) for page in PAGES if programs(page)],
)
@pytest.mark.sampled(6)
def test_code_runs(page: str, tmp_path: Path) -> None:
    (tmp_path / "readers_own.py").write_text(READERS_OWN.get(page, ""))
    output = ""
    for number, program in enumerate(programs(page)):
        path = tmp_path / ("train.py" if number == 0 else f"train_{number}.py")
        # The first line of a page is its title.
        path.write_text(f"from readers_own import *{program}")
        # As a reader's process.
        unset = ("LIT_ORT_COMPILE",)
        ended = run_script(path, (), tmp_path, SECONDS, imports_from=(ROOT, ROOT / "tasks"), unset=unset)
        assert ended.returncode == 0, f"{page}, lines as in the page:\n{ended.stderr}"
        output += ended.stdout
    require_lines(expected_output(page), output)


def require_lines(expected: list[str], output: str) -> None:
    """Checks that the lines come in their order. Measured values can differ, and `...` is any text."""
    lines = iter(map(without_measured, output.splitlines()))
    for line in expected:
        pattern = re.escape(without_measured(line)).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, found) for found in lines), f"no {line!r} (in this order) in:\n{output}"


def without_measured(line: str) -> str:
    """A line with a sign for each number with a decimal point, percentage, and number with a unit of time or memory."""
    line = re.sub(r"\d+(\.\d+)?e[+-]?\d+|\d+\.\d+", "#", line)
    return re.sub(r"\b\d+(?=%| (ms|s|MB|MiB|GFLOP)\b)", "#", line.rstrip())


# Commands


def command_lines() -> list[tuple[str, str]]:
    """Page and text of every command in a block of shell code, without comments."""
    found = []
    for page in PAGES:
        for language, _, block in fences(page):
            if language == "bash":
                joined = "\n".join(block).replace("\\\n", " ")
                lines = [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines()]
                found += [(page, part.strip()) for line in lines if line for part in line.split("&&")]
    return found


@pytest.mark.parametrize(("page", "line"), dict.fromkeys(command_lines()))
def test_command_exists(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line.replace("$rank", "0"))
    if words[0] == "torchrun":
        words = ["python", *words[words.index("train.py") :]]
    words = words["=" in words[0] :]  # a variable of the environment
    words[0] = words[0].removeprefix("serving/bin/")  # of the environment that the page creates
    if words[0] == "lit-ort":
        require_lit_ort(words[1:], monkeypatch)
    elif words[:2] in (["python", "train.py"], ["python", "compare.py"]):
        require_lit_ort([words[1].removesuffix(".py"), *words[2:]], monkeypatch)
    elif words[:2] == ["python", "predict.py"]:
        require_lit_ort(["predict", *words[2:]], monkeypatch)
    elif words[0] == "python" and words[1] != "-m":
        require_options(ROOT / words[1], words[2:])
    elif words[:2] == ["python", "-m"] and words[2].startswith(("benchmarks.", "tests.")):
        require_options(ROOT / f"{words[2].replace('.', '/')}.py", words[3:])
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"(?:lit_ort|\.)\[([\w,]+)\]", line)
        table = text_of("pyproject.toml").partition("[project.optional-dependencies]")[2]
        assert all(f"\n{name} = [" in table for group in extras for name in group.split(","))
    else:
        assert words[0] in TOOLS, f"{page}: {line}"


def require_lit_ort(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a command of lit-ort as far as its arguments are read, without running it."""
    command, *arguments = words
    if command in ("--help", "--version"):
        return
    if command in ("train", "compare"):
        overrides = [re.sub(r"^(strategy)=.*,.*", r"\1=ort", word) for word in arguments if not word.startswith("-")]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            compose(command, overrides)
        return
    if command == "predict":
        CommandLine.parse(arguments)
        return
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def parse_and_stop(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)  # pyright: ignore[reportArgumentType, reportCallIssue]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed), contextlib.redirect_stderr(io.StringIO()):
        COMMANDS[command](arguments)


def require_options(script: Path, words: list[str]) -> None:
    source = script.read_text()
    assert all(f'"{word}"' in source for word in words if word.startswith("--"))


@pytest.mark.parametrize("line", ["lit-ort train no_such_key=1", "lit-ort train strategy=other", "python no_such.py"])
def test_a_command_that_does_not_exist_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="no_such|other"):
        test_command_exists("", line, monkeypatch)


def test_readme_has_the_test_command_of_ci() -> None:
    lines = text_of(".ci/run").replace(" --quiet", "").splitlines()
    install, test, *_ = (line for line in lines if line.startswith(("pip install", "pytest")))
    assert f"{install} && {test}" in text_of("README.md").replace("`", "\n").splitlines()


# Links and names


def headings(page: str) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)", prose):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}, which is not there"
        if anchor:
            assert anchor in headings(path.resolve().relative_to(ROOT).as_posix()), f"{page}: {target}#{anchor}"


def test_reference_has_every_public_name() -> None:
    reference = "\n".join(text_of(page) for page in PAGES if page.startswith("docs/reference/"))
    entries = set(re.findall(r"^::: (\S+)|heading: (\S+)", reference, re.MULTILINE))
    names = {name for pair in entries for name in pair if name}
    expected = {f"lit_ort.{name}" for name in lit_ort.__all__}
    expected |= {f"lit_ort.callbacks.{name}" for name in lit_ort.callbacks.__all__}
    assert expected - names == set()


def test_architecture_has_the_import_layers() -> None:
    pyproject = text_of("pyproject.toml")
    layers = re.search(r"^layers = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    assert layers is not None
    expected = re.findall(r'"(.*)"', layers[1])
    assert [block for language, _, block in fences("docs/architecture.md") if language == "layers"] == [expected]


# Figures


def lines_of(name: str) -> list[suite_report.Line]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def measurements() -> list[suite_report.Line]:
    return lines_of("results.jsonl")


@pytest.fixture(scope="module")
def measurements_with_avx2() -> list[suite_report.Line]:
    return lines_of("results_avx2.jsonl")


@pytest.fixture(scope="module")
def measurements_in_bf16() -> list[suite_report.Line]:
    return lines_of("results_bf16.jsonl")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of a table, by the first one."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first: others for first, *others in cells}


def groups(measured: list[suite_report.Line], precision: str = "32-true") -> dict[str, list[str]]:
    """The cells of the summary of small models in a precision, by group."""
    panel = f"| small, {precision} "
    lines = (line for line in suite_report.summary(measured).splitlines() if panel in line)
    return rows("\n".join(lines).replace(panel, ""))


def test_results_are_those_of_the_measurements(
    measurements: list[suite_report.Line],
    measurements_with_avx2: list[suite_report.Line],
    measurements_in_bf16: list[suite_report.Line],
) -> None:
    results = text_of("benchmarks/RESULTS.md")
    for measured in (measurements, measurements_in_bf16):
        assert suite_report.summary(measured) in results
        assert suite_report.table(measured) in results
    assert suite_report.summary(measurements_with_avx2) in results


def test_figures_of_bf16_are_those_of_the_measurements(measurements_in_bf16: list[suite_report.Line]) -> None:
    cells = groups(measurements_in_bf16, "bf16-mixed")
    eager, wins, inductor, *_ = next(cells[name] for name in cells if name.startswith("all "))
    readme, guide = (" ".join(text_of(path).split()) for path in ("README.md", "docs/bf16.md"))
    assert f"{eager} of eager's time under autocast, {wins} are faster, and {inductor} of inductor's" in readme
    assert f"under autocast, {eager} of its time" in guide
    assert f"Seven models take {inductor} of inductor's time" in guide


def test_readme_figures_are_those_of_the_measurements(
    measurements: list[suite_report.Line], measurements_with_avx2: list[suite_report.Line]
) -> None:
    summary, with_avx2 = groups(measurements), groups(measurements_with_avx2)
    expected = {
        group: [eager, wins, *with_avx2[group][:2], memory]
        for group, (eager, wins, _, _, memory, *_) in summary.items()
    }
    readme = text_of("README.md")
    assert {name: cells for name, cells in rows(readme).items() if name in expected} == expected
    prose = " ".join(readme.split())
    slowest = max(measurements, key=lambda line: suite_report.ratio(line, suite_report.EAGER))
    assert f"{slowest['model']}, {suite_report.ratio(slowest, suite_report.EAGER):.2f}" in prose
    (_, _, inductor, wins, _, _), *_ = (cells for name, cells in summary.items() if name.startswith("all "))
    assert f"{inductor} of inductor's time" in prose
    assert f"faster in {wins}" in prose


# The site


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the docs extra")
def test_site_builds_without_a_network(tmp_path: Path) -> None:
    proxies = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https")}
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **proxies, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    external = re.compile(
        r"<(?:script|img|iframe)[^>]* src=\"?https?:|<link[^>]* href=\"?https?:[^>]*stylesheet|@import"
    )
    for path in tmp_path.rglob("*.html"):
        assert not external.search(path.read_text()), f"{path.name} loads something from elsewhere"
