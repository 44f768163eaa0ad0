"""Filling the arrays of rollouts. numpy is imported when the first are filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.protocols.decision import UNDECIDED, code_of
from etude.protocols.rows import Row
from etude.protocols.tree import Node

PROMPT_FIELDS = ("content", "name", "role")
"""The last axis of `agents.prompt`."""


class Filler:
    """Arrays of rows that have one protocol. Letters in names are axes: Batch, Round, Agent, Channel."""

    def __init__(self, rows: Sequence[Row]) -> None:
        import numpy as np

        self.np = np
        self.rows = rows
        tree = rows[0].tree
        self.agents = {agent: index for index, agent in enumerate(tree.agents)}
        self.channels = {channel: index for index, channel in enumerate(tree.channels)}
        self.rounds = max(row.tree.max_rounds for row in rows)
        self.played_B = np.array([row.played for row in rows])

    def arrays(self, *, prompts: bool) -> dict[str, Any]:
        """See `Rollouts.to_arrays`."""
        np = self.np
        acted, rewards_BRA = self._agents()
        done_BR = np.arange(self.rounds) >= self.played_B[:, None]
        ends_BR = np.arange(self.rounds) >= self.played_B[:, None] - 1
        undecided_B = np.array([row.path[-1].ending != "decided" for row in self.rows])
        acted["done"] = self._for_agents(done_BR)
        if prompts:
            acted["prompt"] = self._prompts()
        return {
            **self._facts(),
            **self._histories(after=0),
            **self._node_ids(),
            "done": done_BR,
            "terminated": done_BR & undecided_B[:, None],
            "padding": done_BR.copy(),
            "agents": acted,
            "next": {
                **self._histories(after=1),
                "done": ends_BR,
                "terminated": ends_BR & undecided_B[:, None],
                "agents": {"reward": rewards_BRA, "done": self._for_agents(ends_BR)},
            },
        }

    def _facts(self) -> dict[str, Any]:
        """What is the same in all rounds of a row, and the number of the round."""
        np = self.np
        facts: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in self.rows for name in row.record.example.inputs):
            facts[name] = self._over_rounds(
                [row.record.example.inputs.get(name) for row in self.rows], object
            )
        return facts | {
            "round": np.minimum(np.arange(self.rounds), self.played_B[:, None]),
            "seed": self._over_rounds([row.tree.key for row in self.rows], np.int64),
            "y": self._over_rounds([row.tree.truth for row in self.rows], np.int64),
            "prover_stance": self._over_rounds([row.tree.stance for row in self.rows], np.int64),
            "datapoint_id": self._over_rounds([row.record.example.id for row in self.rows], object),
        }

    def _histories(self, *, after: int) -> dict[str, Any]:
        """What had been said before each round, or with `after` 1 what has been said after it."""
        np = self.np
        text_BRC, who_BRC = self._full(None, object, self.channels), self._full(-1, np.int64, self.channels)
        raw_BRA = self._full(None, object, self.agents)
        for b, node in self._nodes():
            raw_BRA[b, node.round, self.agents[node.agent]] = node.text
            for channel, text in node.messages.items():
                text_BRC[b, node.round, self.channels[channel]] = text
                who_BRC[b, node.round, self.channels[channel]] = self.agents[node.agent]
        said = np.tri(self.rounds, self.rounds, after - 1, dtype=bool)[None, :, :, None]
        return {
            "message_history": np.where(said, text_BRC[:, None], None),
            "message_agent_id": np.where(said, who_BRC[:, None], -1),
            "raw_message_history": np.where(said, raw_BRA[:, None], None),
        }

    def _agents(self) -> tuple[dict[str, Any], Any]:
        """What agents did in each round, and what they earned by it."""
        np, of_agents = self.np, self.agents
        message_BRAC = self._full(None, object, of_agents, self.channels)
        acted: dict[str, Any] = {
            "message": message_BRAC,
            "raw_message": self._full(None, object, of_agents),
            "active": self._full(False, bool, of_agents),
            "decision": self._full(UNDECIDED, np.int64, of_agents),
            "continuous_decision": self._full(0.0, np.float64, of_agents),
            "valid_response": self._full(True, bool, of_agents),
            "retry_count": self._full(0, np.int64, of_agents, self.channels),
            "token_limit": self._full(False, bool, of_agents, self.channels),
            "expected_reward": self._full(0.0, np.float64, of_agents),
        }
        rewards_BRA = self._full(0.0, np.float64, of_agents)
        for b, node in self._nodes():
            place = (b, node.round, of_agents[node.agent])
            for channel, text in node.messages.items():
                message_BRAC[(*place, self.channels[channel])] = text
            acted["raw_message"][place] = node.text
            acted["active"][place] = True
            acted["decision"][place] = code_of(node.decision)
            acted["continuous_decision"][place] = node.decision or 0.0
            acted["valid_response"][place] = node.malformed is None
            acted["retry_count"][place] = len(node.rejected)
            acted["token_limit"][place] = node.truncated
            for agent, index in of_agents.items():
                rewards_BRA[b, node.round, index] += node.rewards.get(agent, 0.0)
                value = self.rows[b].tree.values(agent)[node.id]
                acted["expected_reward"][b, node.round, index] = value
        return acted, rewards_BRA

    def _node_ids(self) -> dict[str, Any]:
        """The last answer of each round and the last before it; -1 for none."""
        np = self.np
        first_of: dict[str, int] = {}
        total = 0
        for row in self.rows:
            if row.record.id not in first_of:
                first_of[row.record.id] = total
                total += len(row.tree.nodes)
        node_BR, parent_BR = self._full(-1, np.int64), self._full(-1, np.int64)
        for b, row in enumerate(self.rows):
            before = -1
            for number in range(row.played):
                nodes = row.round(number)
                if nodes:  # A fork may have passed over the round.
                    node_BR[b, number] = first_of[row.record.id] + nodes[-1].id
                    parent_BR[b, number], before = before, node_BR[b, number]
        return {"_node_id": node_BR, "_parent_node_id": parent_BR}

    def _prompts(self) -> Any:
        """What agents were asked, message by message."""
        calls = [{call.index: call.request.messages for call in row.record.calls} for row in self.rows]
        longest = max(len(calls[b][node.call]) for b, node in self._nodes())
        prompt = self._full(None, object, self.agents, range(longest), PROMPT_FIELDS)
        for b, node in self._nodes():
            for index, message in enumerate(calls[b][node.call]):
                place = (b, node.round, self.agents[node.agent], index)
                for field, name in enumerate(PROMPT_FIELDS):
                    prompt[(*place, field)] = message.get(name)
        return prompt

    def _nodes(self) -> list[tuple[int, Node]]:
        return [(b, node) for b, row in enumerate(self.rows) for node in row.path]

    def _full(self, value: Any, dtype: Any, *axes: Any) -> Any:
        """An array of batch, round and further axes."""
        shape = (len(self.rows), self.rounds, *(len(axis) for axis in axes))
        return self.np.full(shape, value, dtype=dtype)

    def _over_rounds(self, values: list[Any], dtype: Any) -> Any:
        """An array of batch and round, with the same value in all rounds of a row."""
        array = self._full(None if dtype is object else 0, dtype)
        for b, value in enumerate(values):
            for number in range(self.rounds):
                array[b, number] = value
        return array

    def _for_agents(self, array_BR: Any) -> Any:
        return self.np.repeat(array_BR[:, :, None], len(self.agents), axis=2)
