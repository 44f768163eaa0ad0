"""Algorithms, and the `TrajectoryBuilder` interface."""
