"""Copies of a run folder at any address that fsspec knows, made while it goes on, and the way back."""
