"""The machine itself: its GPUs as the driver reports them, and what stands in the way of using them. No JAX in this process."""
