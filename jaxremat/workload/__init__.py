"""What is trained: a loss or a whole step of anybody's, with its arrays as shapes; and what makes one for a batch."""
