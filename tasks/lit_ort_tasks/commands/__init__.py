"""The commands `lit-ort train`, `lit-ort compare` and `lit-ort predict`, which are also programs of a clone."""
