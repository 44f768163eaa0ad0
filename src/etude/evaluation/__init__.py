"""Evaluations: an agent on examples, or stored episodes again, and how sure the scores are."""
