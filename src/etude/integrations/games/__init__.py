"""Workflows for environments of other libraries: Gymnasium, TextArena, reasoning-gym."""
