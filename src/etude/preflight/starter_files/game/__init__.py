"""A guessing game: several turns, and a reward at the end."""
