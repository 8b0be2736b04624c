"""Compiles steps with XLA and reads the results: targets, compiled memory, memory maps, FLOPs and predicted step times."""
