"""The fence: the only package of lit_ort that uses private interfaces of torch, Lightning and onnxruntime.

A new release that changes a private interface breaks only a file of this folder. tests/compat has a canary for each
symbol.
"""
