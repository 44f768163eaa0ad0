"""TrainerAdapter and the backends."""
