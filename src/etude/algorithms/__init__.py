"""TrajectoryBuilder and the algorithms."""
