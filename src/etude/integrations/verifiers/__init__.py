"""Environments of the verifiers library as workflows: `workflow: {_type: verifiers, environment: …}`."""

CHAT = "etude-chat"
"""The id of the chat loop in this process; an environment may name it: `harness: {id: etude-chat}`."""
