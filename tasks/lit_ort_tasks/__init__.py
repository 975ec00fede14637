"""The workloads: one file a task, and in `data` the files that read its data. Nothing in `lit_ort` imports them."""
