"""A small project to start from: an agent, examples, a config."""
