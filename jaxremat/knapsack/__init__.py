"""Finds the values of one layer that are best saved in a budget of bytes.

The others are recomputed. That is a 0/1 knapsack problem in which what a value is worth depends on what else is saved. Nothing
here knows of compiles, batches or searches.

Example: a chain x -> a -> b -> c, of which the backward pass reads all three values:

    value    bytes    seconds to make it
    a        40       4
    b        40       1
    c        20       3

In 20 bytes the best decision saves `c` and recomputes `a` and `b`, which costs 5 seconds. In 40 bytes it saves `a` instead,
for 4 seconds, and in 60 bytes `a` and `c`, for 1 second. Two such layers that have 80 bytes together cost 6 seconds at best:
one saves `c`, and the other `a` and `c`. If both saved `a`, they would cost 8.

* `problem.py` describes the layer as data, and `evaluate.py` says what a decision costs by replaying it.
* `solve.py` finds the best decision as a 0/1 program, and shares nothing with the judge.
* `hull.py` goes from one layer to a stack of equal layers. `prices.py` says what saving each value is worth.
"""
