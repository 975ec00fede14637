"""Passes over the joint graph, one transformation in each file; `lit_ort.passes.pipeline` has their order."""
