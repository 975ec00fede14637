"""A folder of compiled graphs, looked up by content: a graph that any process has compiled is read instead of built.

The name of an entry is a digest of everything that the model depends on: the graph, the types of its inputs, options,
versions, and the code of this package. So an entry is never out of date: after a change its name is another one.
Entries are as trustworthy as the folder: the checksum detects damage, but not a forgery.
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

from lit_ort._compat.torch_blas import bfloat16_instructions
from lit_ort.backend.cache.content import Content
from lit_ort.backend.cache.entry import FORMAT, NotPlain, UnusableEntry, decode, encode
from lit_ort.backend.compilation import Compilation
from lit_ort.errors import LitOrtWarning
from lit_ort.files import read_regular, remove_unfinished, whole_file
from lit_ort.options import ORTOptions
from lit_ort.runtime.engines.engine_interface import Engine
from lit_ort.runtime.region_calls import why_no_kernels

# Of graphs, and of what steps were measured to take.
SUFFIX, MEASURED_SUFFIX = ".ortgraph", ".ortstep"
# Bytes of an entry. Entries of the benchmark suite have at most some hundred thousand.
LARGEST = 2**30
_OWN_FILE = re.compile(r"\.?[0-9a-f]{64}\.(ortgraph|ortstep)(\.[0-9a-f]{32}\.tmp)?")


class GraphCache:
    """Reads and writes the entries of one set of options.

    Args:
        options: with a `cache_dir`.
        engine: the build of ONNX Runtime that runs the graphs.
    """

    def __init__(self, options: ORTOptions, engine: Engine) -> None:
        assert options.cache_dir is not None
        self._folder = Path(options.cache_dir)
        self._reads = options.dump_dir is None
        self._options, self._engine = options.key, name_of(engine)

    def read(self, content: Content) -> Compilation | None:
        """The graph with that content, or None. An entry that can't be used is reported in a warning."""
        if content.digest is None or not self._reads:
            return None
        path = self.path(content.digest)
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
        path = self.path(content.digest)
        message = (
            f"The cached graph {path} can't be used: {reason}. The graph is compiled again, and its entry is replaced."
        )
        warnings.warn(message, LitOrtWarning, stacklevel=2)

    def write(self, content: Content, compilation: Compilation) -> str:
        """Writes a graph, and returns the outcome for its report. An unwritable folder causes a warning."""
        if content.digest is None:
            return f"not kept: {content.obstacle}"
        path = self.path(content.digest)
        try:
            data = encode(compilation, path.stem)
            remove_unfinished(self._folder)
            with whole_file(path) as file:
                file.write(data)
        except NotPlain as reason:
            return f"not kept: {reason}"
        except OSError as error:
            warnings.warn(
                f"cache_dir={str(self._folder)!r} can't be written to: {error.strerror}. Training continues, and the "
                "next run compiles again. Choose a writable folder with free space, or leave cache_dir out.",
                LitOrtWarning,
                stacklevel=2,
            )
            return f"not kept: {error.strerror}"
        return "written"

    def path(self, digest: str) -> Path:
        """The file of a graph whose content has a digest, for these options and this environment."""
        key = json.dumps([digest, self._options, environment(self._engine)])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}{SUFFIX}"


@functools.cache
def environment(engine: str) -> dict[str, str]:
    """The versions of everything that a model depends on, and the CPU, which torch's tracing can depend on.

    Args:
        engine: the engine's name and version.
    """
    return {
        "format": FORMAT.decode(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {bfloat16_instructions()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "onnxruntime": engine,
        # Importing onnx takes longer than reading a graph.
        "onnx": importlib.metadata.version("onnx"),
        "regions": why_no_kernels() or "",
        "lit_ort": _code(Path(__file__).parents[2]),
    }


def name_of(engine: Engine) -> str:
    """An engine's name and version."""
    return f"{engine.name} {engine.version}"


def own_files(folder: Path) -> Iterator[Path]:
    """The files in a folder that a cache wrote: graphs, measured steps, and incomplete files of killed processes."""
    return (path for path in sorted(folder.iterdir()) if _OWN_FILE.fullmatch(path.name) and path.is_file())


def _code(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
