"""What a policy is applied to: one decoder in Flax Linen, and presets with published sizes."""
