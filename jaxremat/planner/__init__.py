"""Choose what each layer keeps: the decision as data, its solver, its judge, and plans. No JAX, Flax or XLA here."""
