"""Preflight: checks that a config would run here, and estimates of its cost."""
