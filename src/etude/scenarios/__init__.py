"""Code validation: a problem, a program that claims to solve it, and whether it does."""
