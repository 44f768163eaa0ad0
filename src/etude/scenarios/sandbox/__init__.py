"""Running code that nobody has vouched for, in a process that can do next to nothing."""
