"""One training step: data, loss, optimizer, and the donated step around them."""
