"""What `lit-ort` runs: a command a file, with its arguments."""
