"""Model groups: the agents that share one trainable model, and that model's versions."""
