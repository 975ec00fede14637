"""Passes over the joint graph, one transformation in each file; `lit_ort.passes.pass_pipeline` has their order."""
