"""The larger of two numbers: one question, one answer, examples in the prompt."""
