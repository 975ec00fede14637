"""Passes over the joint graph: one transformation a file, their order in `lit_ort.passes.pipeline`."""
