"""Evaluators and the evaluation run."""
