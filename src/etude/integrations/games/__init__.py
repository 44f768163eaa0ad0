"""Environments of other libraries as workflows: Gymnasium, PettingZoo, TextArena, reasoning-gym."""
