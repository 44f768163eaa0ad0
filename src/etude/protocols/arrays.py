"""Episode trees as arrays, for analysis: one row for each way that a play went.

The keys and shapes are those of Neural Interactive Proofs' rollouts. Sizes: B rows, R rounds of the
longest protocol, A agents, C channels, M messages of the longest prompt. numpy is imported when the first
arrays are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.errors import MissingExtraError, RequestError
from etude.protocols.decision import UNDECIDED, code_of
from etude.protocols.tree import EpisodeTree, Node

PROMPT_FIELDS = ("content", "name", "role")
"""The last axis of `agents.prompt`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way that a play went."""

    record: EpisodeRecord
    tree: EpisodeTree
    path: tuple[Node, ...]


class Rollouts:
    """Finished episodes of one protocol. Letters in names are axes: Batch, Round, Agent, Channel."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """`rows` are of one protocol: `of` sees to that."""
        self.rows = rows
        tree = rows[0].tree if rows else None
        self._agents = {agent: index for index, agent in enumerate(tree.agents if tree else ())}
        self._channels = {channel: index for index, channel in enumerate(tree.channels if tree else ())}
        self._rounds = max((row.tree.max_rounds for row in rows), default=0)
        self._nodes = [(b, node) for b, row in enumerate(rows) for node in row.path]

    @classmethod
    def of(cls, records: Iterable[EpisodeRecord]) -> Rollouts:
        """The rollouts of episodes; failed ones are left out.

        Raises RequestError when anything else than one protocol was played.
        """
        rows: list[Row] = []
        for record in records:
            if record.failure is None:
                tree = EpisodeTree.from_json(record.output)
                rows += [Row(record, tree, tuple(tree.path(leaf))) for leaf in tree.leaves()]
        kinds = {(row.tree.protocol, row.tree.agents, row.tree.channels) for row in rows}
        if len(kinds) > 1:
            names = ", ".join(sorted(name for name, _, _ in kinds))
            raise RequestError(f"arrays have one protocol, and the episodes have several: {names}")
        return cls(rows)

    def to_arrays(self, *, prompts: bool = False) -> dict[str, Any]:
        """Nested arrays; texts are objects, None where there is none.

        - `round`, `seed`, `y`, `datapoint_id`, `prover_stance`, `done`, `terminated`, `padding`, every
          input of the example, `_node_id`, `_parent_node_id`: (B, R)
        - `message_history`, `message_agent_id` (-1: nobody): (B, R, R, C); `raw_message_history`:
          (B, R, R, A): everything said before the round of the second axis
        - `agents`: `message`, `retry_count`, `token_limit` (B, R, A, C); `raw_message`, `decision` (codes
          of `code_of`), `continuous_decision`, `valid_response`, `done`, `expected_reward`, and `active`
          (whether it had a turn: average over those only) (B, R, A); with `prompts` also `prompt`
          (B, R, A, M, 3), the last axis content, name, role
        - `next`: the histories, `done`, `terminated` and `agents.done` after the round, `agents.reward`

        Rounds after the end are padding. Node ids are unique over all rows. Raises RequestError without
        rows, MissingExtraError without numpy.
        """
        if not self.rows:
            raise RequestError("there are no finished episodes to make arrays of")
        try:
            import numpy as np
        except ModuleNotFoundError as error:
            raise MissingExtraError("a view as arrays (numpy is not installed)", "local") from error
        rows = self.rows
        rounds = np.arange(self._rounds)
        played_B1 = np.array([[row.path[-1].round + 1] for row in rows])
        undecided_B1 = np.array([[row.path[-1].ending != "decided"] for row in rows])
        done_BR, ends_BR = rounds >= played_B1, rounds >= played_B1 - 1
        agents, rewards_BRA = self._of_agents()
        agents["done"] = self._for_agents(done_BR)
        if prompts:
            agents["prompt"] = self._prompts()
        examples = [row.record.example for row in rows]
        inputs = dict.fromkeys(name for example in examples for name in example.inputs)
        return {
            **{name: self._repeated([example.inputs.get(name) for example in examples]) for name in inputs},
            "round": np.minimum(rounds, played_B1),
            "seed": self._repeated([row.tree.key for row in rows], int),
            "y": self._repeated([row.tree.truth for row in rows], int),
            "prover_stance": self._repeated([row.tree.stance for row in rows], int),
            "datapoint_id": self._repeated([example.id for example in examples]),
            **self._histories(after=0),
            **self._node_ids(),
            "done": done_BR,
            "terminated": done_BR & undecided_B1,
            "padding": done_BR.copy(),
            "agents": agents,
            "next": {
                **self._histories(after=1),
                "done": ends_BR,
                "terminated": ends_BR & undecided_B1,
                "agents": {"reward": rewards_BRA, "done": self._for_agents(ends_BR)},
            },
        }

    def _histories(self, *, after: int) -> dict[str, Any]:
        """Everything said before each round, or with `after` 1 until its end."""
        import numpy as np

        text_BRC, who_BRC = self._full(None, self._channels), self._full(-1, self._channels)
        raw_BRA = self._full(None, self._agents)
        for b, node in self._nodes:
            raw_BRA[b, node.round, self._agents[node.agent]] = node.text
            for channel, text in node.messages.items():
                text_BRC[b, node.round, self._channels[channel]] = text
                who_BRC[b, node.round, self._channels[channel]] = self._agents[node.agent]
        visible = np.tri(self._rounds, self._rounds, after - 1, dtype=bool)[None, :, :, None]
        return {
            "message_history": np.where(visible, text_BRC[:, None], None),
            "message_agent_id": np.where(visible, who_BRC[:, None], -1),
            "raw_message_history": np.where(visible, raw_BRA[:, None], None),
        }

    def _of_agents(self) -> tuple[dict[str, Any], Any]:
        """The answers of the agents in each round, and the rewards that they earned by it."""
        agents, channels = self._agents, self._channels
        message_BRAC = self._full(None, agents, channels)
        arrays: dict[str, Any] = {
            "message": message_BRAC,
            "raw_message": self._full(None, agents),
            "active": self._full(False, agents),
            "decision": self._full(UNDECIDED, agents),
            "continuous_decision": self._full(0.0, agents),
            "valid_response": self._full(True, agents),
            "retry_count": self._full(0, agents, channels),
            "token_limit": self._full(False, agents, channels),
            "expected_reward": self._full(0.0, agents),
        }
        rewards_BRA = self._full(0.0, agents)
        for b, node in self._nodes:
            index = (b, node.round, agents[node.agent])
            for channel, text in node.messages.items():
                message_BRAC[(*index, channels[channel])] = text
            arrays["raw_message"][index] = node.text
            arrays["active"][index] = True
            arrays["decision"][index] = code_of(node.decision)
            arrays["continuous_decision"][index] = node.decision or 0.0
            arrays["valid_response"][index] = node.malformed is None
            arrays["retry_count"][index] = len(node.rejected)
            arrays["token_limit"][index] = node.truncated
            for agent, a in agents.items():
                rewards_BRA[b, node.round, a] += node.rewards.get(agent, 0.0)
                arrays["expected_reward"][b, node.round, a] = self.rows[b].tree.values(agent)[node.id]
        return arrays, rewards_BRA

    def _node_ids(self) -> dict[str, Any]:
        """The last answer of each round and the last before it; -1 for none."""
        first_id: dict[str, int] = {}
        total = 0
        node_BR, parent_BR = self._full(-1), self._full(-1)
        for b, row in enumerate(self.rows):
            if row.record.id not in first_id:
                first_id[row.record.id] = total
                total += len(row.tree.nodes)
            before = -1
            # Rounds that a fork passed over are not among them.
            for number, last in {node.round: node for node in row.path}.items():
                node_BR[b, number] = first_id[row.record.id] + last.id
                parent_BR[b, number], before = before, node_BR[b, number]
        return {"_node_id": node_BR, "_parent_node_id": parent_BR}

    def _prompts(self) -> Any:
        """The prompts of the agents, message by message."""
        calls = [{call.index: call.request.messages for call in row.record.calls} for row in self.rows]
        longest = max(len(calls[b][node.call]) for b, node in self._nodes)
        prompt = self._full(None, self._agents, range(longest), PROMPT_FIELDS)
        for b, node in self._nodes:
            for m, message in enumerate(calls[b][node.call]):
                for field, name in enumerate(PROMPT_FIELDS):
                    prompt[b, node.round, self._agents[node.agent], m, field] = message.get(name)
        return prompt

    def _full(self, value: Any, *axes: Sized) -> Any:
        """An array of batch, round and further axes, of the type that `value` has: objects for None."""
        import numpy as np

        shape = (len(self.rows), self._rounds, *map(len, axes))
        return np.full(shape, value, dtype=object if value is None else type(value))

    def _repeated(self, values: list[Any], dtype: type = object) -> Any:
        """An array of batch and round, with the same value in all rounds of a row."""
        import numpy as np

        return np.repeat(np.fromiter(values, dtype, len(values))[:, None], self._rounds, axis=1)

    def _for_agents(self, array_BR: Any) -> Any:
        return array_BR[:, :, None].repeat(len(self._agents), axis=2)
