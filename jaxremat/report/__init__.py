"""Tables, sentences, plots, pages and progress for a person.

The modules read records and plain dataclasses, never JAX.
"""
