"""What `lit-ort train` and `lit-ort compare` run, and the programs of the same names at the top of the repository."""
