"""Searches that compile: the largest batch within a budget, and the budget itself. XLA is only known here as a function."""
