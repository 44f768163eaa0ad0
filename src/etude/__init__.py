"""Etude: fine-tune the models inside LLM agents from the agents own runs."""
