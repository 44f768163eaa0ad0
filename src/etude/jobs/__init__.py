"""Training jobs: planned, trained step by step, checkpointed and gone on with, wherever they run."""
