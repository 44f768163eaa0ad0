"""Ready-made tasks for protocols."""
