"""The loops of exported training steps in Node and in a browser, beside that in Python.

They need Node, Chromium, and the packages onnxruntime-node and onnxruntime-web in `node_modules` of the repository or
in the folder that LIT_ORT_TEST_NODE_MODULES names.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import lit_ort
from lit_ort.export.safetensors_file import read_tensors
from tests.export.elsewhere import train_elsewhere
from tests.export.training_cases import CASES

ROOT = Path(__file__).parents[2]
PACKAGES = Path(os.environ.get("LIT_ORT_TEST_NODE_MODULES", ROOT / "node_modules"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS = 5
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
    pytest.mark.skipif(not shutil.which("node"), reason="needs Node"),
    # Before a step is exported, which takes longer than these tests.
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs onnxruntime-node and onnxruntime-web"),
]


@pytest.fixture(
    scope="module", params=["convolutions", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("BERT", "LSTM"))]
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported step with what it became after some steps in Python, `python.safetensors`."""
    torch.manual_seed(0)
    case, folder = CASES[request.param], tmp_path_factory.mktemp("javascript") / "step"
    batch = case.batch(6, 0)
    lit_ort.export_training(case.make(), folder, batch, dynamic=case.dynamic, **case.settings)
    trained = shutil.copytree(folder, folder.parent / "python")
    losses = train_elsewhere(trained, [batch] * STEPS, 1e-3)["loss"].tolist()
    shutil.copy(trained / "parameters.safetensors", folder / "python.safetensors")
    (folder / "losses.json").write_text(json.dumps(losses))
    return folder


def test_node_trains_as_python(exported: Path, tmp_path: Path) -> None:
    if not (PACKAGES / "onnxruntime-node").is_dir():
        pytest.skip("needs onnxruntime-node")
    folder = shutil.copytree(exported, tmp_path / "step")
    (folder / "node_modules").symlink_to(PACKAGES)
    command = ["node", str(folder / "train.mjs"), str(STEPS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert not ended.returncode, ended.stderr
    losses = [float(value) for value in re.findall(r" loss ([\d.]+)", ended.stdout)]
    assert losses == pytest.approx(json.loads((folder / "losses.json").read_text()), abs=1e-4)
    expected = read_tensors(folder / "python.safetensors")
    left_out = [part for case in CASES.values() for part in case.left_out]
    for name, value in read_tensors(folder / "parameters.safetensors").items():
        if not any(part in name for part in left_out):
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_browser_trains_as_python(exported: Path, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    if not (PACKAGES / "onnxruntime-web").is_dir():
        pytest.skip("needs onnxruntime-web")
    folder = shutil.copytree(exported, tmp_path / "step")
    (folder / "ort").symlink_to(PACKAGES / "onnxruntime-web" / "dist")
    with served(folder) as address:
        page = f"{address}/train.html?ort=/ort/&steps={STEPS}"
        settings = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command = [CHROMIUM, *settings, "--virtual-time-budget=120000", "--dump-dom", page]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = re.search(r'data-losses="([^"]*)"', ended.stdout)
    assert found, ended.stdout
    losses = json.loads(html.unescape(found[1]))
    assert losses == pytest.approx(json.loads((folder / "losses.json").read_text()), abs=1e-4)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on a free port of this machine."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
