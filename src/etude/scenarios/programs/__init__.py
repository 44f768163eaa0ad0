"""Small programs with and without a bug, made by the dozen."""
