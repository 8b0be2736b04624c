"""One file per question; each is a command, prints what it found, and files it as JSON under `results/`."""
