"""A simulated user: a model that is not trained, which talks with the agent until it has what it wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from etude.core.episode import SIMULATED_USER
from etude.core.errors import RequestError
from etude.core.message import Message, text_of
from etude.rollout.episode import Episode

INSTRUCTIONS = """\
You are a person who talks with an assistant. Stay in that role: you are not the assistant.
{persona}Your goal: {goal}
Write one short message at a time, in your own words, and say no more than is needed.
When you have reached your goal, or see that you cannot, write only {stop}"""
"""The system message of a user that has no other."""


class SimulatedUser:
    """A user of an agent, played by a model. Its calls are recorded, and never trained on.

    `reply(messages)` is the user's next message to a conversation as the agent has it, or None when the user
    has stopped.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        goal: str,
        persona: str = "",
        model: str = "user",
        stop: str = "[DONE]",
        max_turns: int = 10,
        greeting: str = "Hello! How can I help you?",
        instructions: str = INSTRUCTIONS,
    ) -> None:
        """`model` is an entry of `llms`. The user stops by writing `stop`, and after `max_turns` messages.

        `instructions` is its system message, with `{goal}`, `{persona}` and `{stop}` filled in; `greeting` is
        the assistant's first words, as the user sees them where it speaks first. Raises RequestError for a
        model that there is not, an empty goal, and a limit that allows no message.
        """
        episode.require_model(model)
        if not goal.strip():
            raise RequestError("a simulated user needs a goal")
        if max_turns < 1 or not stop:
            raise RequestError("a simulated user needs a word to stop with, and at least one turn")
        self._episode, self._model = episode, model
        self._stop, self._max_turns = stop, max_turns
        self._greeting = greeting
        texts = {"goal": goal, "persona": f"{persona.strip()}\n" if persona else "", "stop": stop}
        self._instructions = instructions
        for name, text in texts.items():
            self._instructions = self._instructions.replace(f"{{{name}}}", text)
        self.turns = 0
        """Messages that the user has written."""
        self.ended: Literal["stop", "turns"] | None = None
        """Why the user has stopped: by the word, or by the limit of turns. None while it talks."""

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """The user's answer to the conversation so far, of which it sees the texts alone; None at its end.

        Raises as `Episode.chat` does, and EngineError for a model that writes nothing.
        """
        if self.ended is None and self.turns >= self._max_turns:
            self.ended = "turns"
        if self.ended is not None:
            return None
        with self._episode.function(SIMULATED_USER):
            reply = await self._episode.chat(self._seen(messages), model=self._model)
        self.turns += 1
        if self._stop in reply.text:
            self.ended = "stop"
            return None
        return reply.text

    def _seen(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation from the user's side: its own words are those of the model that plays it."""
        seen: list[Message] = [{"role": "system", "content": self._instructions}]
        for message in messages:
            text = text_of(message)
            if message["role"] in ("user", "assistant") and text:
                if len(seen) == 1 and message["role"] == "user":
                    seen.append({"role": "user", "content": self._greeting})
                role = "assistant" if message["role"] == "user" else "user"
                seen.append({"role": role, "content": text})
        if len(seen) == 1:
            seen.append({"role": "user", "content": self._greeting})
        return seen
