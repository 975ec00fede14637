"""Kernels: machine code of regions, made by LLVM."""
