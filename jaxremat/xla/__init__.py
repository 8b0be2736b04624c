"""Compiles steps with XLA and reads the results: memory, FLOPs, predicted times."""
