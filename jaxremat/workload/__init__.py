"""What is trained: a loss or a whole step, with its arrays as shapes, at any batch."""
