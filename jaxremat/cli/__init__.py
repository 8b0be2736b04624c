"""The command line: flags as typed values, and the commands that take them."""
