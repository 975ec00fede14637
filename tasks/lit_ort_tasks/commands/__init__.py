"""The commands `lit-ort train` and `lit-ort compare`, which are also programs of a clone, and predict.py."""
