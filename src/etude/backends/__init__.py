"""TrainerAdapter and the training backends."""
