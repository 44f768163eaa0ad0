"""PyTorch: batches, objectives, the optimiser step, checkpoints."""
