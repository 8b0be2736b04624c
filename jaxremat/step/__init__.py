"""One training step: optimizer, the step around a loss, and what a step is run with."""
