"""What is true of any chip."""

#: The share of a device's memory that JAX's allocator takes by default.
MEM_FRACTION = 0.75
