"""Chooses what each layer saves for the backward pass, and the batch that goes with it.

No JAX, Flax or XLA is imported here.

The modules, in the order in which they build on each other:

* `problem.py` describes one layer as data. `evaluate.py` says what a choice costs, and `solve.py` finds the best choice.
* `hull.py` goes from one layer to a stack of equal layers. `estimate.py` has what is known about a layer.
* `shared_budget.py` makes one layer of several kinds of layers.
* `candidates.py` makes policies for the whole stack. `corrections.py` corrects them by compiled steps.
* `steps.py` is the interface to the compiler, and `curve.py` has everything around the layers, by batch.
* `search.py` is the one loop that compiles. `race.py` runs it on several meshes, and `plan.py` makes a plan of its answer.
"""
