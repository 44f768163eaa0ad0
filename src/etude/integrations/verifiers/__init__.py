"""Environments of the verifiers library as workflows: `workflow: {_type: verifiers, environment: …}`."""
