"""The fence: private interfaces of torch, Lightning and onnxruntime, used nowhere else in lit_ort.

A new release of one of them breaks a file of this folder; tests/compat has a canary for each symbol.
"""
