"""A folder of compiled graphs, found by their content: a graph that any process compiled before is read, not built.

The name of an entry digests everything that decides about the model: the graph, the types of its inputs, options,
versions, and the code of this package. So an entry is never out of date: after a change it is
no longer looked for.
Entries are as trustworthy as the folder: the checksum tells damage, not a forgery.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from lit_ort.backend.cache.content import Content
from lit_ort.backend.cache.entry import FORMAT, NotPlain, UnusableEntry, decode, encode
from lit_ort.backend.compilation import Compilation
from lit_ort.errors import LitOrtWarning
from lit_ort.files import read_regular, remove_unfinished, whole_file
from lit_ort.options import ORTOptions
from lit_ort.runtime.engines.engine import Engine

SUFFIX = ".ortgraph"
# Bytes of an entry; the largest of the suite's models has some hundred thousand.
LARGEST = 2**30
_OWN_FILE = re.compile(rf"\.?[0-9a-f]{{64}}{re.escape(SUFFIX)}(\.[0-9a-f]{{32}}\.tmp)?")


class GraphCache:
    """The entries that one set of options reads and writes.

    Args:
        options: with a `cache_dir`.
        engine: what runs the graphs.
    """

    def __init__(self, options: ORTOptions, engine: Engine) -> None:
        assert options.cache_dir is not None
        self._folder = Path(options.cache_dir)
        self._reads = options.dump_dir is None
        self._options, self._engine = options.key, f"{engine.name} {engine.version}"

    def read(self, content: Content) -> Compilation | None:
        """The graph of that content; None where there is none, or none that is whole, which is warned of."""
        if content.digest is None or not self._reads:
            return None
        path = self._path(content.digest)
        try:
            return decode(read_regular(path, LARGEST), path.stem)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnusableEntry) as error:
            self.refuse(content, error)
            return None

    def refuse(self, content: Content, reason: Exception) -> None:
        """Warns of an entry that can't be used."""
        assert content.digest is not None
        path = self._path(content.digest)
        message = (
            f"The cached graph {path} can't be used: {reason}. The graph is compiled again, and its entry replaced."
        )
        warnings.warn(message, LitOrtWarning, stacklevel=2)

    def write(self, content: Content, compilation: Compilation) -> str:
        """Keeps a graph. Returns what came of it, for the report; a folder that can't be written to is warned of."""
        if content.digest is None:
            return f"not kept: {content.obstacle}"
        path = self._path(content.digest)
        try:
            data = encode(compilation, path.stem)
            remove_unfinished(self._folder)
            with whole_file(path) as file:
                file.write(data)
        except NotPlain as reason:
            return f"not kept: {reason}"
        except OSError as error:
            warnings.warn(
                f"cache_dir={str(self._folder)!r} can't be written to: {error.strerror}. Training goes on, and the "
                "next run compiles again. Choose a folder of your own with space left, or leave cache_dir out.",
                LitOrtWarning,
                stacklevel=2,
            )
            return f"not kept: {error.strerror}"
        return "written"

    def _path(self, digest: str) -> Path:
        key = json.dumps([digest, self._options, environment(self._engine)])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}{SUFFIX}"


@functools.cache
def environment(engine: str) -> dict[str, str]:
    """The versions of all that takes part in making a model, and the CPU, which torch's tracing may ask for.

    Args:
        engine: its name and version.
    """
    return {
        "format": FORMAT.decode(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "onnxruntime": engine,
        # Importing it takes longer than reading a graph.
        "onnx": importlib.metadata.version("onnx"),
        "lit_ort": _code(Path(__file__).parents[2]),
    }


def own_files(folder: Path) -> Iterator[Path]:
    """The files in a folder that a cache wrote: entries, and what an interrupted process left of one."""
    return (path for path in sorted(folder.iterdir()) if _OWN_FILE.fullmatch(path.name) and path.is_file())


def _code(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
