"""The built-in model as a workload: one decoder in Flax Linen with its next-token loss, and presets of published models."""
