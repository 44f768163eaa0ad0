"""Trackers: readers of a run's journal that show the run elsewhere, each on a separate thread."""
