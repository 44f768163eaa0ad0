"""Continuous backup of a run folder to any address that fsspec knows, and the way back from there."""
