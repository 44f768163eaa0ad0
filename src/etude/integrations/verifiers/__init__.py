"""Workflows for environments of the verifiers library: `workflow: {_type: verifiers, environment: …}`."""

CHAT = "etude-chat"
"""The id of the chat loop in this process. An environment can name it: `harness: {id: etude-chat}`."""
