"""One model on one target: what a command calls, and what a person uses in a notebook."""
