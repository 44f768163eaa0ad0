"""Exports from a run: weights with a model card, and trajectories as files for other programs."""
