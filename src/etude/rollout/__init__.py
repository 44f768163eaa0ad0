"""Running workflows over datasets."""
