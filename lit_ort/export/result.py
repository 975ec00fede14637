"""What exporting a module tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Checked:
    """How far a model is from its module at one size.

    Args:
        shapes: of the inputs, by name.
        error: the largest absolute difference of any result, over the result's largest value.
        output: the result that it is of, with the operator that gives it.
    """

    shapes: dict[str, tuple[int, ...]]
    error: float
    output: str

    def __str__(self) -> str:
        shapes = ", ".join(f"{name}{list(shape)}" for name, shape in self.shapes.items())
        return f"largest error to eager {self.error:.1e} in {self.output} at {shapes}"


def inputs_as_text(inputs: Mapping[str, tuple[int | str, ...]]) -> str:
    return ", ".join(f"{name}[{', '.join(map(str, sizes))}]" for name, sizes in inputs.items())


@dataclasses.dataclass(frozen=True)
class Exported:
    """A file that `export` wrote, readable when printed.

    Args:
        path: of the model; weights beyond 2 GiB lie beside it in a file with `.data` behind its name.
        inputs: for each input, its sizes; those that may change by name.
        outputs: names of the results.
        checked: how far the model is from the module, at each size that was compared; empty with `verify=False`.
        form: `float16`, `bfloat16` or `int8`, or None for float32.
        size_bytes: of the file, weights included.
        float32_bytes: of the float32 form.
        was_training: whether the module was in training mode; the file has its eval mode.
    """

    path: Path
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    checked: tuple[Checked, ...]
    form: str | None
    size_bytes: int
    float32_bytes: int
    was_training: bool = False

    @property
    def error(self) -> float | None:
        """The largest of all that were compared; None where nothing was."""
        return max((one.error for one in self.checked), default=None)

    def __str__(self) -> str:
        inputs = inputs_as_text(self.inputs)
        form = "" if self.form is None else f" in {self.form}, {self.float32_bytes / MIB:.1f} MiB in float32"
        lines = [f"{self.path}: {self.size_bytes / MIB:.1f} MiB{form}; {inputs} -> {', '.join(self.outputs)}"]
        if self.was_training:
            lines.append("  exported in eval mode; the module is still in training mode")
        return "\n".join([*lines, *(f"  {one}" for one in self.checked)])
