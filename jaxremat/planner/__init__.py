"""Chooses what all layers save for the backward pass, and the batch that goes with it.

Few steps are compiled for that. No JAX, Flax or XLA is imported here. The best choice for a single layer is that of `knapsack/`.

The modules, in the order in which they build on each other:

* `estimate.py` has what is known about a layer, and `shared_budget.py` makes one layer of several kinds of layers.
* `candidates.py` makes policies for the whole stack. `corrections.py` and `seconds.py` correct them by compiled steps.
* `steps.py` is the interface to the compiler, and `curve.py` has everything around the layers, by batch.
* `known.py` has the steps as far as they are known, and `places.py` says which loss and batch promise the most.
* `search.py` is the one loop that compiles, and `plan.py` makes a plan of its answer.
"""
