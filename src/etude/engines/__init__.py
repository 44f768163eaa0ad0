"""Engines that sample answers: embedded, vLLM and any endpoint; and the money that their calls cost."""
