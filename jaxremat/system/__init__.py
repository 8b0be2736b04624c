"""The operating system: signals, files, and whose code lies where."""
