"""The block of arguments that the machine code of matmuls reads, all 64-bit words."""

from __future__ import annotations

from lit_ort.kernels.kernel_arguments import FINISH_FUNCTION

_FIRST_WORD = FINISH_FUNCTION + 1
# Addresses of the left and the right factor and of the result; of a batch, those of arrays of addresses.
LEFT, RIGHT, RESULT = range(_FIRST_WORD, _FIRST_WORD + 3)
# Sizes; the distances of neighbouring rows and columns in elements; whether the result is added to what is there.
ROWS, COLUMNS, INNER = range(_FIRST_WORD + 3, _FIRST_WORD + 6)
LEFT_ROW, LEFT_COLUMN, RIGHT_ROW, RIGHT_COLUMN, RESULT_ROW, IS_ADDED = range(_FIRST_WORD + 6, _FIRST_WORD + 12)
# What blocks divide, and the number of matrices in a batch.
AXIS, COUNT = range(_FIRST_WORD + 12, _FIRST_WORD + 14)
BY_ROWS, BY_COLUMNS, BY_MATRICES = range(3)
WORDS = _FIRST_WORD + 14
