"""Etude inside NVIDIA's NeMo Agent Toolkit: the components that `nat finetune` finds, and its agents here."""
