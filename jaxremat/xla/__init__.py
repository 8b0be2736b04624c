"""Compile with XLA and read what it says: targets, compiled memory, FLOPs, a predicted step time."""
