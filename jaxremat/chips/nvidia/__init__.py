"""NVIDIA's GPUs: attached, and those that aren't here."""
