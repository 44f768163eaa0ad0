"""The spending of a run: on what, how much, and where it has to stop."""
