"""Studies that need more than a user repeats: of GPUs, of full size."""
