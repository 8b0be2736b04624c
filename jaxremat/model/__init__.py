"""The model that policies are applied to: one decoder in Flax Linen, and presets of published models."""
