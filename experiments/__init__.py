"""One module per question. Each is a command that prints its results and writes them as JSON under `results/`."""
