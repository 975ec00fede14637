"""The names of the smaller forms of an exported model."""

from __future__ import annotations

# Weights in 16 bits, and matmuls with weights in 8 bits.
FLOAT16, BFLOAT16, INT8 = "float16", "bfloat16", "int8"
