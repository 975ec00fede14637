"""The commands of `lit-ort`, one per file."""
