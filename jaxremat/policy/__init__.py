"""What is saved for the backward pass: the policies, the checkpoint names that they list, and how they are applied."""
