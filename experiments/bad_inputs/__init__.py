"""Bad inputs of many kinds, each drawn, and how the command should end on each."""
