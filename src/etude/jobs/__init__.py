"""Training jobs: planned, trained step by step, checkpointed and resumed, on any machine."""
