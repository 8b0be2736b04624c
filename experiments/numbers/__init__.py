"""The numbers of the pages are those of the results: `python -m experiments.numbers` writes them into the pages."""
