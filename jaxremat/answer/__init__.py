"""Answer one policy of a request: its records, a plan for it, or what would fit instead. Here the planner meets XLA."""
