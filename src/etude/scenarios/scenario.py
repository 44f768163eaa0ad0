"""The scenario: prompts, answers, truth and stance of code validation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from string import Template

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.message import Message
from etude.protocols.decision import ACCEPT, REJECT, Verdict
from etude.protocols.protocol import Protocol
from etude.protocols.rules import Turn
from etude.protocols.scenario import Log, Scenario, dialogue
from etude.protocols.workflow import register_scenario
from etude.scenarios.prompts import LAST_TURN, PROMPTS, fields


@register_scenario("code_validation")
class CodeValidation(Scenario):
    """Is a program right? Examples have a `question`, a `solution`, and 1 or 0 as what is expected.

    Answers are read as `parse_answer` does: only a turn that may decide can decide.
    """

    def __init__(self, *, max_words: int = 150, prompts: Mapping[str, str] | None = None) -> None:
        """`max_words` is the length that the prompts ask agents to keep a message under.

        `prompts` are templates in place of `PROMPTS`, or beside them, by `protocol/agent`,
        `protocol/kind` or kind of role. Raises RequestError for a template with an unknown `$name`.
        """
        if max_words < 1:
            raise RequestError(f"max_words must be at least 1, found {max_words}")
        self._max_words = max_words
        self._prompts = {name: Template(text) for name, text in {**PROMPTS, **(prompts or {})}.items()}
        for name, template in self._prompts.items():
            _check(name, template)

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        """The system prompt of the agent, what was said so far and, to a verifier at last, to decide now.

        Raises RequestError for a role that no template is for.
        """
        words = fields(example, log, agent, turn, self._max_words)
        system = self._template(log.protocol, agent).substitute(words).strip()
        decides = log.protocol.agents[agent].may_decide
        closing = Template(LAST_TURN).substitute(words) if decides and log.own_turns > 1 else ""
        return dialogue(log, agent, system, last_words=closing)

    def truth(self, example: Example) -> Verdict:
        """1 when the program is right, 0 when it is wrong. Raises RequestError when that is not known."""
        expected = example.expected
        if expected in ("accept", 1):
            return ACCEPT
        if expected in ("reject", 0):
            return REJECT
        raise RequestError(
            f"example '{example.id}': expected is {expected!r}; it must be 1, for a right program, or 0"
        )

    def stance(self, example: Example) -> Verdict:
        """The side of provers where the protocol leaves it to the example: drawn from the program."""
        return stance_of(str(example.inputs.get("solution", "")))

    def check_protocol(self, protocol: Protocol) -> None:
        """Raises RequestError for an agent without a prompt, and for a prompt without its agent."""
        for agent in protocol.agents:
            self._template(protocol, agent)
        prefix = f"{protocol.name}/"
        names = [*protocol.agents, *dict.fromkeys(role.kind for role in protocol.agents.values())]
        for name in self._prompts:
            agent = name.removeprefix(prefix)
            if name.startswith(prefix) and agent not in names:
                raise RequestError(
                    f"scenario_arguments.prompts['{name}']: the protocol '{protocol.name}' has no agent or "
                    f"kind '{agent}'" + alternatives(agent, names)
                )

    def _template(self, protocol: Protocol, agent: str) -> Template:
        kind = protocol.agents[agent].kind
        for name in (f"{protocol.name}/{agent}", f"{protocol.name}/{kind}", kind):
            if name in self._prompts:
                return self._prompts[name]
        raise RequestError(
            f"code validation has no prompt for '{kind}', the role of '{agent}' in '{protocol.name}'; give "
            f"one under scenario_arguments.prompts['{kind}']"
        )


def stance_of(solution: str) -> Verdict:
    """The parity of the SHA-256 of a program: the same everywhere, and as good as a coin."""
    return ACCEPT if hashlib.sha256(solution.encode()).digest()[-1] % 2 else REJECT


_NAMES = (
    "question", "solution", "label", "readers", "stance", "others", "experts", "turns", "questions",
    "acting", "length", "deciding", "decision",
)  # fmt: skip


def _check(name: str, template: Template) -> None:
    if not template.is_valid():
        raise RequestError(f"prompt '{name}': a dollar sign that is no $name is written $$")
    unknown = [identifier for identifier in template.get_identifiers() if identifier not in _NAMES]
    if unknown:
        raise RequestError(f"prompt '{name}': there is no ${unknown[0]}" + alternatives(unknown[0], _NAMES))
