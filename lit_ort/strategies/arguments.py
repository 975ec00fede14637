"""Types and defaults of the strategies' arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

Precision = Literal["32-true", "bf16-mixed"]
Fallback = Literal["warn", "error"]
# "layers", or the share of activation memory to keep.
Recompute = Literal["layers"] | float
Compile = Literal["auto", "always", "never"]
Dynamic = Literal["auto", "never"]
EngineName = Literal["auto", "training", "stock"]
Schedule = Literal["1f1b", "gpipe", "interleaved"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

# gloo's default.
TIMEOUT = timedelta(minutes=30)
