"""The same training step in PyTorch: the same shapes, parameters, data, dtypes and optimizer, for numbers side by side."""
