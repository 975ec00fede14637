"""Private names of other packages are used in lit_ort/_compat only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = ROOT / "lit_ort" / "_compat"
FOLDERS = ("lit_ort", "tasks", "benchmarks")
FILES = [
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if FENCE not in path.parents),
    *(ROOT / name for name in ("train.py", "compare.py", "predict.py")),
]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.Module) -> set[str]:
    """The names of functions, classes and attributes that a file defines."""
    definitions = (ast.FunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return names | {node.attr for node in stored if ast.unparse(node.value) in ("self", "cls")}


def is_own(node: ast.Attribute) -> bool:
    """Whether this is an attribute of the class itself, or an ATen operator; some of these begin with an underscore."""
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return ast.unparse(value) in ("self", "cls", "aten", "torch.ops.aten")


def private_names(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node) and node.attr not in own:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lit_ort"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}" for n in names if is_private(n))
        elif isinstance(node, ast.Import) and any(is_private(part) for a in node.names for part in a.name.split(".")):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_stay_behind_the_fence(path: Path) -> None:
    assert list(private_names(path)) == [], "move them to lit_ort/_compat, with a canary in test_canaries.py"


def test_private_names_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        "import torch._dynamo\nfrom torch.fx.node import _name\nfrom torch._ops import Op\n"
        "class A:\n    def f(self, other):\n        self._own = aten._softmax + other._own + super()._run()\n"
        "        return torch._C.x, other._foreign, other.__dict__\n"
    )
    names = [line.rpartition(": ")[2] for line in private_names(path)]
    assert sorted(names) == sorted(
        ["import torch._dynamo", "from torch.fx.node import _name", "from torch._ops import Op", "torch._C"]
        + ["other._foreign"]
    )
