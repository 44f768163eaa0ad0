"""What is stored of runs, read back: where they are, how far they came, what they made."""
