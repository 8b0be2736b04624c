"""What fits: the budget, the largest batch in it, and batches of similar lengths.

No JAX, Flax or XLA is imported here.

* `budget.py` has the bytes that a step may take.
* `batch.py` finds the largest batch that fits, and `compiles.py` counts the compiles of a search.
* `histogram.py` reads the lengths of a data set, and `buckets.py` divides them into buckets.
"""
