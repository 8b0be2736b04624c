"""Show: tables, sentences and progress. Reads records and plain dataclasses, never JAX."""
