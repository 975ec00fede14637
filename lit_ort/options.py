"""Every choice a user can make about the engine, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_ort.errors import OptionsError

FALLBACKS = ("warn", "error")
FLOAT32, BF16_MIXED = "32-true", "bf16-mixed"
PRECISIONS = (FLOAT32, BF16_MIXED)
LAYERS = "layers"
AUTO, NEVER = "auto", "never"
SIZES = (AUTO, NEVER)
TRAINING, STOCK = "training", "stock"
ENGINES = (AUTO, TRAINING, STOCK)


IN_KEY = "in_key"


def _of_the_run(default: Any) -> Any:
    """A field that decides about runs and not about what a graph is compiled to, so that cached graphs serve all of its
    values. Any other field is part of the cache's key: one that is wrongly marked so gives wrong graphs, one that is
    not only compiles again.
    """
    return dataclasses.field(default=default, metadata={IN_KEY: False})


@dataclasses.dataclass(frozen=True)
class ORTOptions:
    """Options of the `ort` backend and of `ORTStrategy`.

    Args:
        precision: `"32-true"` computes in float32; `"bf16-mixed"` computes what `torch.autocast` does in
            bfloat16 (matrix products, convolutions, attention), with weights and their gradients in float32; GRUs and
            plain recurrent layers stay in float32. Under Lightning, the Trainer sets it.
        fallback: what happens to a graph that can't be compiled. `"warn"` runs that graph in eager PyTorch with one
            warning that gives the reason; `"error"` raises.
        verify_first_step: compare loss and every gradient of each graph's first run with eager, dropout off, and raise
            `VerificationError` with the worst offenders.
        verify_every_n_steps: the same at each graph's first run and every n-th one from then on, with weights as they
            are by then; `explain()` shows the largest errors.
        verify_tolerance: largest relative error, in the 2-norm of each tensor, that verification accepts. Where a graph
            computes in bfloat16, what eager autocast itself errs by is added, several times.
        recompute: what the backward computes again: less memory, more time. `"layers"` keeps of each layer (of modules
            in a list, such as `encoder.layers.3`) its input and the results of attention. A float from 0 to 1 is the
            share of activation memory to keep; torch's min-cut partitioner chooses what, and the peak itself may stay:
            near 0 all is computed again at once, so compare `explain()`'s memory. None keeps everything outside of the
            module's own activation checkpoints.
        optimizer_in_graph: the run of a step also clips and takes the optimizer's step, each parameter's as soon as its
            gradient is there, so that not all gradients are held at a time; with clipping by norm, or an optimizer that
            is not torch's own, when all are there. For steps whose loss and gradients are those of one graph, under
            `ORTStrategy`, where nothing else reads gradients; anything else keeps its optimizer's step, with a warning.
        dynamic: `"auto"` compiles the first batch for its sizes, and the first one of another size for any size of the
            dimensions that changed; `"never"` compiles every size by itself.
        disable_passes: exact names of fusions and passes to leave out (`lit_ort.fusions.pipeline.names()` and
            `lit_ort.passes.pipeline.names()` list them).
        dump_dir: folder that receives every stage of every graph, FX graphs as text and what runs as ONNX; graphs that
            `cache_dir` has are compiled again for it.
        cache_dir: folder that keeps compiled graphs for later runs, best one that only you can write to. `python -m
            lit_ort.cache` lists and clears it.
        threads: threads of a session's operators; None takes `torch.get_num_threads()`.
        allow_spinning: let idle session threads spin. Off by default: spinning threads take the cores from the torch
            optimizer that runs between two sessions (upstream issue microsoft/onnxruntime#13808).
        engine: which build of ONNX Runtime runs sessions: `"training"` is onnxruntime-training, `"stock"` onnxruntime;
            `"auto"` takes the one that is installed. Both install the same module, so there is one at a time.
        keep_memory: let the C library keep the memory that a step frees for the next one, up to 1 GiB, instead of
            giving it back to the system; for the whole process, where the library is glibc.

    Raises:
        OptionsError: a value outside its rule.
    """

    precision: str = FLOAT32
    fallback: str = _of_the_run("warn")
    verify_first_step: bool = _of_the_run(False)
    verify_every_n_steps: int | None = _of_the_run(None)
    verify_tolerance: float = _of_the_run(1e-4)
    recompute: str | float | None = None
    optimizer_in_graph: bool = False
    dynamic: str = AUTO
    disable_passes: tuple[str, ...] = ()
    dump_dir: str | None = _of_the_run(None)
    cache_dir: str | None = _of_the_run(None)
    threads: int | None = _of_the_run(None)
    allow_spinning: bool = _of_the_run(False)
    engine: str = _of_the_run(AUTO)
    keep_memory: bool = _of_the_run(True)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise OptionsError(f"precision={self.precision!r} is not one of {PRECISIONS}. Choose one of them.")
        if self.fallback not in FALLBACKS:
            raise OptionsError(f"fallback={self.fallback!r} is not one of {FALLBACKS}. Choose one of them.")
        _require_recompute(self.recompute)
        if self.dynamic not in SIZES:
            raise OptionsError(f"dynamic={self.dynamic!r} is not one of {SIZES}. Choose one of them.")
        if self.engine not in ENGINES:
            raise OptionsError(f"engine={self.engine!r} is not one of {ENGINES}. Choose one of them.")
        if isinstance(self.disable_passes, str):
            raise OptionsError(
                f"disable_passes={self.disable_passes!r} is one string, and a sequence of names is needed. "
                f"Write disable_passes=({self.disable_passes!r},)."
            )
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))
        for option in ("verify_first_step", "optimizer_in_graph", "allow_spinning", "keep_memory"):
            require_bool(option, getattr(self, option))
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", _folder("cache_dir", self.cache_dir))
        if not self.verify_tolerance > 0:
            raise OptionsError(f"verify_tolerance={self.verify_tolerance!r} must be above 0. The default is 1e-4.")
        for option, otherwise in (("threads", "torch's own"), ("verify_every_n_steps", "none after the first")):
            require_count(option, getattr(self, option), or_none_for=otherwise)

    @property
    def verifies(self) -> bool:
        return self.verify_first_step or self.verify_every_n_steps is not None

    @property
    def key(self) -> dict[str, str]:
        """The options that decide what a graph is compiled to, as text."""
        fields = [field.name for field in dataclasses.fields(self) if field.metadata.get(IN_KEY, True)]
        return {name: repr(getattr(self, name)) for name in sorted(fields)}

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> ORTOptions:
        """Options from the dictionary of `torch.compile(..., options=...)` or of a config file."""
        given = dict(options or {})
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise OptionsError(f"Unknown option {unknown[0]!r}. The options are {', '.join(known)}.")
        return cls(**given)


def require_bool(option: str, value: object) -> None:
    """Raises OptionsError for anything but True and False."""
    if not isinstance(value, bool):
        raise OptionsError(f"{option}={value!r} is not a bool. Pass True or False.")


def require_count(option: str, value: object, or_none_for: str | None = None) -> None:
    """Raises OptionsError for anything but a whole number above 0, or None where that means something."""
    if value is None and or_none_for is not None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        otherwise = "" if or_none_for is None else f", or None for {or_none_for}"
        raise OptionsError(f"{option}={value!r} must be a whole number above 0{otherwise}.")


def _require_recompute(value: object) -> None:
    if value is None or value == LAYERS or (isinstance(value, float) and 0 <= value <= 1):
        return
    raise OptionsError(
        f"recompute={value!r} is neither None nor {LAYERS!r} nor a float from 0 to 1. Pass the share of activation "
        "memory to keep, such as 0.5, or None to keep all of it."
    )


def _folder(option: str, given: Any) -> str:
    """An absolute path, so that it stays when the working folder changes."""
    if not isinstance(given, (str, os.PathLike)) or not str(given):
        raise OptionsError(f"{option}={given!r} is no path. Pass the path of a folder, or None for none.")
    path = Path(given).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise OptionsError(f"{option}={str(given)!r} is a file, and a folder is needed. Choose another name.")
    return str(path)
