"""What steps were measured to take, beside the graphs in `cache_dir`: a later run decides by it whether to compile.

The name of a file is a digest of the step, of the options and of the environment, as for a graph. Its content is a name
and numbers, in JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

from lit_ort.backend.cache.store import MEASURED_SUFFIX, environment
from lit_ort.files import read_regular, whole_file
from lit_ort.options import ORTOptions

_LARGEST, _LONGEST_NAME = 2**12, 200


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """Seconds of one step of a module.

    Args:
        eager, compiled: of a call with its backward, in turns.
        compiling: of compiling it.
        from_cache: whether graphs were read then.
    """

    eager: float
    compiled: float
    compiling: float
    from_cache: bool

    def __post_init__(self) -> None:
        seconds = self.eager, self.compiled, self.compiling
        if not all(isinstance(one, float) and math.isfinite(one) and one > 0 for one in seconds):
            raise ValueError(f"seconds {seconds} are not all above 0")


class MeasuredSteps:
    """Reads and writes what steps take with one set of options.

    Args:
        options: with a `cache_dir`.
        engine: the engine's name and version.
    """

    def __init__(self, options: ORTOptions, engine: str) -> None:
        assert options.cache_dir is not None
        self._folder, self._key = Path(options.cache_dir), [options.key, environment(engine)]

    def read(self, step: str) -> MeasuredStep | None:
        """What a step took; None if that is not known, or not readable: then it is measured again.

        Args:
            step: describes the step and its module.
        """
        try:
            return decoded(read_regular(self._path(step), _LARGEST))[1]
        except (OSError, ValueError):
            return None

    def write(self, step: str, name: str, measured: MeasuredStep) -> None:
        """Keeps what a step took.

        Args:
            step: as in `read`.
            name: of the step, for people.
            measured: what it took.

        Raises:
            OSError: the folder can't be written to.
        """
        with whole_file(self._path(step)) as file:
            file.write(json.dumps([name[:_LONGEST_NAME], dataclasses.asdict(measured)]).encode())

    def _path(self, step: str) -> Path:
        key = json.dumps([step, *self._key])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}{MEASURED_SUFFIX}"


def decoded(data: bytes) -> tuple[str, MeasuredStep]:
    """The name of a step, and what it took.

    Raises:
        ValueError: the data are not those of a file of this module.
    """
    try:
        name, fields = json.loads(data)
        return str(name), MeasuredStep(**fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no measured step: {error}") from error
