"""The options of the engine, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch

from lit_ort.errors import OptionsError

Precision = Literal["32-true", "bf16-mixed"]
Fallback = Literal["warn", "error"]
# "layers", or the share of activation memory to keep.
Recompute = Literal["layers"] | float
Dynamic = Literal["auto", "never"]
EngineName = Literal["auto", "training", "stock"]
FLOAT32: Precision = "32-true"
BF16_MIXED: Precision = "bf16-mixed"
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Lightning's names for graphs whose tensors have another dtype than float32.
TRUE_PRECISIONS = {torch.float64: "64-true", torch.bfloat16: "bf16-true", torch.float16: "16-true"}
LAYERS = "layers"
AUTO, NEVER = "auto", "never"
TRAINING, STOCK = "training", "stock"
_CHOICES = {
    "precision": PRECISIONS,
    "fallback": get_args(Fallback),
    "dynamic": get_args(Dynamic),
    "engine": get_args(EngineName),
}
IN_KEY = "in_key"


def _of_the_run(default: Any) -> Any:
    """A field that affects runs but not the compiled graph, so that cached graphs are valid for all of its values.

    Every other field is part of the cache's key. A field that is wrongly marked as one of the run makes the cache
    return wrong graphs; a field that is wrongly part of the key only causes another compilation.
    """
    return dataclasses.field(default=default, metadata={IN_KEY: False})


@dataclasses.dataclass(frozen=True)
class ORTOptions:
    """Options of the `ort` backend and of `ORTStrategy`.

    Args:
        precision: `"32-true"` computes in float32; `"bf16-mixed"` computes in bfloat16 what `torch.autocast` does
            (matmuls, convolutions, attention), with weights and their gradients in float32; recurrent layers
            stay in float32. Under Lightning, the Trainer sets it. Float64, bfloat16 and float16 modules are computed in
            their dtypes.
        fallback: what to do with a graph that can't be compiled, and with a function that Dynamo can't trace as a
            whole. `"warn"` runs it in eager PyTorch, with one warning that has the reason; `"error"` raises.
        verify_first_step: compare the loss and every gradient of each graph's first run with eager, with dropout off,
            and raise `VerificationError` with the largest errors.
        verify_every_n_steps: the same for each graph's first run and every n-th run, with the weights at that time;
            `explain(...).details()` shows the largest errors.
        verify_tolerance: the largest relative error, in the 2-norm of each tensor, that verification accepts. If a
            graph computes in bfloat16, several times the error of eager autocast is added.
        recompute: what the backward recomputes, for less memory and more time. `"layers"` saves, of each layer (a
            module in a list, such as `encoder.layers.3`), its input and the results of attention. A float from 0 to 1
            is the share of activation memory to keep. torch's min-cut partitioner chooses the tensors, and the peak
            doesn't necessarily decrease: near 0 everything is recomputed at once, so compare the memory in
            `explain(...).details()`. None recomputes nothing except in the module's own activation checkpoints.
        optimizer_in_graph: the run of a step also clips gradients and takes the optimizer's step. Parameters are
            updated soon after their gradients are computed, so that not all gradients are in memory at a time; with
            clipping by norm, parameters are updated when all gradients are computed. It is for steps under
            `ORTStrategy` whose loss and gradients are computed by one graph, with an optimizer whose step is one of
            torch's, and where no code of the step, of hooks or of callbacks reads gradients. Otherwise the optimizer
            steps after the backward, with a warning.
        dynamic: `"auto"` compiles the first batch for its sizes, and the first batch of another size for any size of
            the dimensions that changed; `"never"` compiles every size separately.
        disable_passes: exact names of fusions and passes to skip (`lit_ort.fusions.fusion_pipeline.names()` and
            `lit_ort.passes.pass_pipeline.names()` list them).
        dump_dir: a folder to which every stage of every graph is written: FX graphs as text, the models that run as
            ONNX, their regions as functions of standard operators. Graphs in `cache_dir` are compiled again for it.
        cache_dir: a folder that keeps compiled graphs for later runs. Choose one to which only you can write.
            `lit-ort cache` lists and clears it.
        threads: the threads of a session's operators; None uses `torch.get_num_threads()`.
        allow_spinning: let idle session threads spin. Off by default: spinning threads take the cores from the torch
            optimizer that runs between two sessions (upstream issue microsoft/onnxruntime#13808).
        engine: the build of ONNX Runtime that runs sessions: `"training"` is onnxruntime-training, `"stock"`
            onnxruntime; `"auto"` uses the installed one. Both install the same module, so only one can be installed.
        keep_memory: let the C library keep the memory that a step frees for the next step, up to 1 GiB, instead of
            returning it to the system. This applies to the whole process, if the library is glibc.

    Raises:
        OptionsError: an invalid value.
    """

    precision: Precision = "32-true"
    fallback: Fallback = _of_the_run("warn")
    verify_first_step: bool = _of_the_run(False)
    verify_every_n_steps: int | None = _of_the_run(None)
    verify_tolerance: float = _of_the_run(1e-4)
    recompute: Recompute | None = None
    optimizer_in_graph: bool = False
    dynamic: Dynamic = "auto"
    disable_passes: Sequence[str] = ()
    dump_dir: str | None = _of_the_run(None)
    cache_dir: str | None = _of_the_run(None)
    threads: int | None = _of_the_run(None)
    allow_spinning: bool = _of_the_run(False)
    engine: EngineName = _of_the_run("auto")
    keep_memory: bool = _of_the_run(True)

    def __post_init__(self) -> None:
        for option, choices in _CHOICES.items():
            if (value := getattr(self, option)) not in choices:
                raise OptionsError(f"{option}={value!r} is not one of {choices}. Choose one of them.")
        _require_recompute(self.recompute)
        if not isinstance(self.disable_passes, Sequence):
            raise OptionsError(
                f"disable_passes={self.disable_passes!r} is not a sequence of names. Omit it, or pass ()."
            )
        if isinstance(self.disable_passes, str):
            raise OptionsError(
                f"disable_passes={self.disable_passes!r} is one string, but must be a sequence of names. "
                f"Write disable_passes=({self.disable_passes!r},)."
            )
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))
        for option in ("verify_first_step", "optimizer_in_graph", "allow_spinning", "keep_memory"):
            require_bool(option, getattr(self, option))
        for option in ("cache_dir", "dump_dir"):
            if getattr(self, option) is not None:
                object.__setattr__(self, option, _folder(option, getattr(self, option)))
        tolerance = self.verify_tolerance
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
            raise OptionsError(f"verify_tolerance={tolerance!r} is not a number. YAML needs a point: 1.0e-4.")
        if not tolerance > 0:
            raise OptionsError(f"verify_tolerance={self.verify_tolerance!r} must be above 0. The default is 1e-4.")
        for option, otherwise in (("threads", "torch's own"), ("verify_every_n_steps", "none after the first")):
            require_count(option, getattr(self, option), or_none_for=otherwise)

    @property
    def verifies(self) -> bool:
        return self.verify_first_step or self.verify_every_n_steps is not None

    @property
    def key(self) -> dict[str, str]:
        """The options that the compiled graph depends on, as text."""
        fields = [field.name for field in dataclasses.fields(self) if field.metadata.get(IN_KEY, True)]
        return {name: repr(getattr(self, name)) for name in sorted(fields)}

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> ORTOptions:
        """Options from the dictionary of `torch.compile(..., options=...)` or of a configuration file."""
        values = dict(options or {})
        require_known(values, [field.name for field in dataclasses.fields(cls)])
        return cls(**values)


class OptionArguments(TypedDict, total=False):
    """The options that are keyword arguments of every strategy; `ORTOptions` documents them and has their defaults."""

    precision: Precision
    fallback: Fallback
    verify_first_step: bool
    verify_every_n_steps: int | None
    verify_tolerance: float
    recompute: Recompute | None
    dynamic: Dynamic
    disable_passes: Sequence[str]
    dump_dir: str | None
    cache_dir: str | None
    threads: int | None
    allow_spinning: bool
    engine: EngineName
    keep_memory: bool


def require_known(names: Iterable[str], known: Sequence[str]) -> None:
    """Raises OptionsError for a name that no option has."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionsError(f"Unknown option {name!r}.{guess} The options are {', '.join(known)}.")


def require_bool(option: str, value: object) -> None:
    """Raises OptionsError for values other than True and False."""
    if not isinstance(value, bool):
        raise OptionsError(f"{option}={value!r} is not a bool. Pass True or False.")


def require_count(option: str, value: object, or_none_for: str | None = None) -> None:
    """Raises OptionsError for values other than an integer above 0, or None.

    Args:
        option: the option's name.
        value: its value.
        or_none_for: the meaning of None; without it, None is invalid too.
    """
    if value is None and or_none_for is not None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        otherwise = "" if or_none_for is None else f", or None for {or_none_for}"
        raise OptionsError(f"{option}={value!r} must be an integer above 0{otherwise}.")


def _require_recompute(value: object) -> None:
    if value is None or value == LAYERS or (isinstance(value, float) and 0 <= value <= 1):
        return
    raise OptionsError(
        f"recompute={value!r} must be None, {LAYERS!r} or a float from 0 to 1. Pass the share of activation memory to "
        "keep, such as 0.5, or None to keep all of it."
    )


def _folder(option: str, value: Any) -> str:
    """The absolute path of a folder, which stays valid when the working directory changes."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise OptionsError(f"{option}={value!r} is not a path. Pass the path of a folder, or None.")
    path = Path(value).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise OptionsError(f"{option}={str(value)!r} is a file, but must be a folder. Choose another name.")
    return str(path)
