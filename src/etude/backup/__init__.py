"""Backups: copies of a run folder at any fsspec address, made during the run, and the way to restore them."""
