"""How messages move: local (torchgpipe in one process)."""
