"""The machine: its GPUs as the driver reports them, what keeps JAX from using them, and running programs. No JAX here."""
