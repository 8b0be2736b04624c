"""A training run: its loop of steps, its folder, its metrics and its checkpoints."""
