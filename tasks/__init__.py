"""The workloads: one file a task, and the files that read its data. Nothing in `lit_ort` imports them."""
