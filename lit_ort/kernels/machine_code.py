"""Machine code from LLVM's text, in memory, for the CPU of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llvmlite import binding as llvm

from lit_ort.errors import KernelError

_NEEDED_ON_X86 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Cpu:
    """The CPU that code is made for.

    Args:
        name: LLVM's name of it.
        features: LLVM's list of its features.
        vector_bytes: the width of its vectors.
    """

    name: str
    features: str
    vector_bytes: int

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether an instruction adds products of bfloat16 numbers to float32 ones, in vectors of 512 bits."""
        return self.vector_bytes == 64 and "+avx512bf16" in self.features.split(",")


def host_cpu() -> Cpu:
    """The CPU of this machine, with the widest vectors that it has.

    Raises:
        KernelError: its vectors have no fused multiply-add or no conversion of 16-bit floats.
    """
    return cpu_of(llvm.get_host_cpu_name(), dict(llvm.get_host_cpu_features()), llvm.get_process_triple())


def cpu_of(name: str, features: Mapping[str, bool], triple: str) -> Cpu:
    """The CPU with these features of LLVM.

    Raises:
        KernelError: its vectors have no fused multiply-add or no conversion of 16-bit floats.
    """
    flat = ",".join(f"{'+' if has else '-'}{feature}" for feature, has in sorted(features.items()))
    if triple.startswith(("aarch64", "arm64")):
        return Cpu(name, flat, 16)
    missing = [feature for feature in _NEEDED_ON_X86 if not features.get(feature)]
    if missing:
        remedy = "Run on a newer CPU, or without compiled regions."
        raise KernelError(f"The CPU {name} ({triple}) lacks {', '.join(missing)}, which kernels need. {remedy}")
    if all(features.get(feature) for feature in _AVX512):
        # Some CPUs would otherwise split vectors of 512 bits.
        return Cpu(name, f"{flat},-prefer-256-bit", 64)
    return Cpu(name, flat, 32)


class MachineCode:
    """The machine code of one module; it lives as long as this object.

    Args:
        text: the module.
        cpu: what to make code for.
        symbols: the addresses of functions that it declares; others are those of the C library.

    Raises:
        RuntimeError: the text is not valid.
    """

    def __init__(self, text: str, cpu: Cpu, symbols: Mapping[str, int] | None = None) -> None:
        machine, symbols = _target_machine(cpu), symbols or {}
        code = _object_code(text, machine)
        # The engine would keep a module that it compiles, several times the size of its code.
        declared = llvm.parse_assembly("".join(f"declare void @{name}()\n" for name in symbols))
        self._engine: Any = llvm.create_mcjit_compiler(declared, machine)
        for name, address in symbols.items():
            self._engine.add_global_mapping(declared.get_function(name), address)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """The address of a function."""
        address = self._engine.get_function_address(name)
        assert address, name
        return address


def _object_code(text: str, machine: Any) -> bytes:
    with llvm.create_context() as context, llvm.parse_assembly(text, context) as module:
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        return machine.emit_object(module)


def _target_machine(cpu: Cpu) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu.name, features=cpu.features, opt=2, jit=True)
