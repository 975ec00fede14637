"""Random numbers of regions in torch: Philox 4x32-10 (Salmon et al. 2011), the reference of the code.

A number depends on the seed, the stream, and the row and column of its element alone. 64 columns share 16 counters,
each of which yields four words: columns 0 to 15 have the first words, columns 16 to 31 the second ones, and so on.
"""

from __future__ import annotations

from typing import Any

import torch

# With this seed operators apply no dropout, for comparison with eager.
DROPOUT_OFF = -1
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def uniform(seed: torch.Tensor, stream: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """float32 in [0, 1) for int64 arguments, which broadcast."""
    counter = (column >> 6 << 4) | (column & 15)
    words = philox((seed & _WORD, seed >> 32 & _WORD), (counter, row & _WORD, row >> 32 & _WORD, stream & _WORD))
    stacked = torch.stack(torch.broadcast_tensors(*words))
    number = (column >> 4 & 3).expand(stacked.shape[1:])
    word = stacked.gather(0, number[None])[0]
    return (word >> 8).float() * 2.0**-24


def philox(key: tuple[Any, ...], counter: tuple[Any, ...]) -> tuple[Any, ...]:
    """Four words from two words of a key and four of a counter; words are int64 from 0 to 2³² - 1.

    They are tensors, or values with a tensor's operators.
    """
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _wide_product(c0, 0xD2511F53)
        high1, low1 = _wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _wide_product(word: Any, factor: int) -> tuple[Any, Any]:
    """The upper and the lower word of a product of two words, without an overflow of int64."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | (low & 0xFFFF)
