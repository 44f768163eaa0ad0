"""Etude for NVIDIA's NeMo Agent Toolkit: the components for `nat finetune`, and its agents as workflows."""
