"""This machine: its GPUs as the driver reports them, and running programs. No JAX here."""
