"""The run directory and its journal."""
