"""What articles and papers say about rematerialization, each claim reproduced or refuted: `python -m experiments.claims`."""
