"""Code of the documentation, run as it stands, one page in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lit_ort.runtime.engines.choice import installed_kind

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(installed_kind() != "training", reason="the page trains on a device")
@pytest.mark.parametrize("page", ["deploy.md"])
def test_a_page(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"block_{number}.py"
        path.write_text(block)
        ended = subprocess.run(
            [sys.executable, str(path)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{block}\n{ended.stderr}"
