"""Environments of other libraries as workflows: Gymnasium, TextArena, reasoning-gym."""
