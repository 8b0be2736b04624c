"""One training step: data, loss and optimizer, and the step function that joins them."""
