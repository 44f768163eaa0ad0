"""A policy: model, tokenizer, chat template, LoRA weights."""
