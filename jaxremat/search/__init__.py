"""The largest batch that fits a budget, and the budget itself.

The compiler is only known here as a function.
"""
