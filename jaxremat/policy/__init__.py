"""Policies: what is saved for the backward pass, by which names, and how that is applied."""
