"""Chips: what XLA is told of each one, and what its programs say."""
