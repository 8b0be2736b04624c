"""What is saved for the backward pass: the policies, the checkpoint names they speak of, and where they are applied."""
