"""The tasks, one file each, with their data, commands and configurations. Nothing in `lit_ort` imports them."""
