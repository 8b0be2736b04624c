"""One training step: optimizer, the step function around a loss, and what a step is run with."""
