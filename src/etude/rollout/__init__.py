"""Rollouts: workflows, the recording of their calls, and the scores of their episodes."""
