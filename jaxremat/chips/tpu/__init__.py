"""TPUs."""
