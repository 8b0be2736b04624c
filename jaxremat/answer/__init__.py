"""Answers to one policy of a request: its records, a plan, or suggestions of what would fit.

The planner meets XLA here.

* `layer_problem.py` traces a layer to a problem, and `layer_estimate.py` makes the planner's estimate of it.
* `workload_estimate.py` does that for the layers that were found in a workload.
* `mesh_race.py` compares meshes, in the race of `race.py`.
* `planned.py` plans the decoder of a run, and `any_layer.py` plans anybody's layers.
* `records.py` makes the records of an answer. `suggestions.py` finds changes under which a step fits.
* `savings.py` says what recomputing a residual would free and cost.
"""
