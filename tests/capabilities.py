"""What torch can do on this CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def _has_autocast_lstms() -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


NEEDS_AUTOCAST_LSTMS = pytest.mark.skipif(
    not _has_autocast_lstms(), reason="autocast calls oneDNN's LSTM, which isn't in bfloat16 here"
)
