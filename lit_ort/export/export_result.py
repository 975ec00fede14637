"""The results of an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Checked:
    """The error of a model, compared with its module at one size.

    Args:
        shapes: the shapes of the inputs, by name.
        error: the largest absolute difference of any result, relative to the result's largest value.
        output: the result with this error, and the operator that computes it.
    """

    shapes: dict[str, tuple[int, ...]]
    error: float
    output: str

    def __str__(self) -> str:
        shapes = ", ".join(f"{name}{list(shape)}" for name, shape in self.shapes.items())
        return f"largest error compared with eager: {self.error:.1e} in {self.output} at {shapes}"


def inputs_as_text(inputs: Mapping[str, tuple[int | str, ...]]) -> str:
    return ", ".join(f"{name}[{', '.join(map(str, sizes))}]" for name, sizes in inputs.items())


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of `export`; prints as a summary.

    Args:
        path: the path of the model; weights of more than 2 GiB are stored next to it, in a file with the suffix
            `.data`.
        inputs: the sizes of each input; dynamic sizes are names.
        outputs: the names of the results.
        checked: the error of the model at each size that was compared; empty with `verify=False`.
        form: `float16`, `bfloat16` or `int8`, or None for float32.
        size_bytes: the size of the file, including weights.
        float32_bytes: the size of the float32 form.
        was_training: whether the module was in training mode; it is exported in eval mode.
        fixed_sizes: sizes that could not be dynamic, and where the module uses them as constants.
    """

    path: Path
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    checked: tuple[Checked, ...]
    form: str | None
    size_bytes: int
    float32_bytes: int
    was_training: bool = False
    fixed_sizes: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """The largest error of all sizes; None if nothing was compared."""
        return max((check.error for check in self.checked), default=None)

    def __str__(self) -> str:
        inputs = inputs_as_text(self.inputs)
        form = "" if self.form is None else f" in {self.form}, {self.float32_bytes / MIB:.1f} MiB in float32"
        lines = [f"{self.path}: {self.size_bytes / MIB:.1f} MiB{form}; {inputs} -> {', '.join(self.outputs)}"]
        if self.was_training:
            lines.append("  exported in eval mode; the module itself stays in training mode")
        if self.fixed_sizes:
            lines.append(f"  sizes that the module uses as constants: {'; '.join(self.fixed_sizes)}")
        return "\n".join([*lines, *(f"  {check}" for check in self.checked)])
