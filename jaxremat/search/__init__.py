"""Decide: the budget, and the largest batch that fits it. Callables and dataclasses in, so that it is tested without XLA."""
