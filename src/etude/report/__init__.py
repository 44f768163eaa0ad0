"""Console progress, metrics files and plots."""
