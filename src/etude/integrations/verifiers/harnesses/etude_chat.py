"""A plug-in of verifiers': this folder is on the path of its harnesses, so that `id: etude-chat` finds it."""

from etude.integrations.verifiers.chat import ChatHarness

__all__ = ["ChatHarness"]
