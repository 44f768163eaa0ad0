"""Taking things out of a run: weights with a model card, trajectories as files for other programs."""
