"""The built-in model as a workload: one decoder in Flax Linen, and presets."""
