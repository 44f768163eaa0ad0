"""A run as others see it: on the console, in files and plots, at trackers, and exported."""
