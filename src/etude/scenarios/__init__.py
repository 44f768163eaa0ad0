"""Code validation: a problem, a program that is said to solve it, and whether it does."""
