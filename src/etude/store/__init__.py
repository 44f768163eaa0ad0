"""The run folder, its journal, and the readers of stored runs."""
