"""ONNX Runtime's C interface in the training build, whose Python module doesn't export it.

`SessionOptions.register_custom_ops_library` calls a function of a shared library with the interface. Here, this library
is a file of a few hundred bytes whose only function jumps to a callback of this process. Source: the ELF specification
(System V ABI), and RegisterCustomOps of onnxruntime_c_api.h.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

_SYMBOL = b"RegisterCustomOps"
# By machine: its number in ELF, and the code that jumps to the address behind it.
_MACHINES = {
    "x86_64": (62, b"\x48\xb8", b"\xff\xe0"),  # mov rax, address; jmp rax
    "aarch64": (183, b"\x50\x00\x00\x58\x00\x02\x1f\xd6", b""),  # ldr x16, address; br x16
}
_HEADER, _SEGMENT, _SEGMENTS = 64, 56, 3
_LOADED, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_READABLE, _WRITABLE, _EXECUTABLE = 4, 2, 1
_Register = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def is_available() -> bool:
    """Whether this system loads such files."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def base_of(options: Any) -> int:
    """The address of the struct OrtApiBase.

    Args:
        options: an `onnxruntime.SessionOptions` of the training build.
    """
    bases: list[int] = []

    @_Register
    def register(_: int, base: int) -> None:
        bases.append(base)

    address = ctypes.cast(register, ctypes.c_void_p).value
    assert address is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lit_ort_operators.so"
        path.write_bytes(_shared_library(address, platform.machine()))
        options.register_custom_ops_library(str(path))
    return bases[0]


def _shared_library(address: int, machine: str) -> bytes:
    """An ELF file with one function, which jumps to an address."""
    number, before, after = _MACHINES[machine]
    names = _padded(b"\0" + _SYMBOL + b"\0")
    code = _padded(before + struct.pack("<Q", address) + after)
    hashes = _HEADER + _SEGMENTS * _SEGMENT
    # A hash table of one bucket with the only symbol, after the empty one.
    table = struct.pack("<6I", 1, 2, 1, 0, 0, 0)
    symbols = hashes + len(table)
    strings = symbols + 48
    start = strings + len(names)
    dynamic = start + len(code)
    # A global function of section 1.
    symbol = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 1, start, len(code))
    entries = ((4, hashes), (5, strings), (6, symbols), (10, len(names)), (11, 24), (0, 0))
    table_of_contents = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    end = dynamic + len(table_of_contents)
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, _SEGMENTS, 0, 0, 0)
    segments = (
        _segment(_LOADED, _READABLE | _EXECUTABLE, 0, end, 0x10000),
        _segment(_DYNAMIC, _READABLE, dynamic, len(table_of_contents), 8),
        _segment(_STACK, _READABLE | _WRITABLE, 0, 0, 16),
    )
    return identity + header + b"".join(segments) + table + symbol + names + code + table_of_contents


def _segment(kind: int, flags: int, offset: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, alignment)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
