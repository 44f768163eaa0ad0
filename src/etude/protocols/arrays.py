"""Episode trees as arrays, for analysis: one row for each path through a tree.

The keys and shapes match the rollouts of Neural Interactive Proofs. Sizes: B rows, R rounds of the
longest schedule, A agents, C channels. numpy is imported when the first arrays are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.errors import MissingExtraError, RequestError
from etude.protocols.decision import UNDECIDED, decision_code
from etude.protocols.tree import EpisodeTree, Node


class Rollouts:
    """Finished episodes of one protocol. Capitals in array names are axes: Batch, Round, Agent, Channel."""

    def __init__(self, rows: Sequence[tuple[EpisodeRecord, EpisodeTree, Node]]) -> None:
        """Keep `rows`: an episode, its tree and one leaf each. `of` checks that they share one protocol."""
        self.rows = rows
        self._rounds = max((tree.max_rounds for _, tree, _ in rows), default=0)

    @classmethod
    def of(cls, records: Iterable[EpisodeRecord]) -> Rollouts:
        """Return the rollouts of the episodes that did not fail.

        Raises RequestError if an episode played no protocol, or if the protocols differ.
        """
        finished = [
            (record, EpisodeTree.from_json(record.output)) for record in records if not record.failure
        ]
        kinds = {(tree.protocol, tree.agents, tree.channels) for _, tree in finished}
        if len(kinds) > 1:
            names = ", ".join(sorted(name for name, _, _ in kinds))
            raise RequestError(f"arrays need one protocol, but the episodes played several: {names}")
        return cls([(record, tree, leaf) for record, tree in finished for leaf in tree.leaves()])

    def to_arrays(self) -> dict[str, Any]:
        """Return the episodes as nested arrays. Text has the dtype object, with None for missing text.

        - `round`, `y`, `datapoint_id`, `prover_stance`, every input of the example, `padding` (rounds after
          the end): (B, R)
        - `message_history`, `message_agent_id` (-1: nobody): (B, R, R, C); `raw_message_history`:
          (B, R, R, A): all messages before the round of the second axis
        - `agents`: `decision` (codes of `decision_code`), `continuous_decision`: (B, R, A)
        - `next`: `agents.reward` (B, R, A), the reward earned by the round

        Raises RequestError without rows, MissingExtraError without numpy.
        """
        if not self.rows:
            raise RequestError("there are no finished episodes to turn into arrays")
        try:
            import numpy as np
        except ModuleNotFoundError as error:
            raise MissingExtraError("a view as arrays (numpy is not installed)", "local") from error
        agents = {agent: index for index, agent in enumerate(self.rows[0][1].agents)}
        channels = {channel: index for index, channel in enumerate(self.rows[0][1].channels)}
        text_BRC, who_BRC = self._full(None, channels), self._full(-1, channels)
        raw_BRA = self._full(None, agents)
        decision_BRA, exact_BRA = self._full(UNDECIDED, agents), self._full(0.0, agents)
        reward_BRA = self._full(0.0, agents)
        for b, (_, tree, leaf) in enumerate(self.rows):
            for node in tree.path(leaf):
                index = (b, node.round, agents[node.agent])
                raw_BRA[index] = node.text
                decision_BRA[index] = decision_code(node.decision)
                exact_BRA[index] = node.decision or 0.0
                for channel, text in node.messages.items():
                    text_BRC[b, node.round, channels[channel]] = text
                    who_BRC[b, node.round, channels[channel]] = agents[node.agent]
                for agent, reward in node.rewards.items():
                    reward_BRA[b, node.round, agents[agent]] += reward
        rounds = np.arange(self._rounds)
        played_B1 = np.array([[leaf.round + 1] for _, _, leaf in self.rows])
        examples = [record.example for record, _, _ in self.rows]
        inputs = dict.fromkeys(name for example in examples for name in example.inputs)
        earlier = np.tri(self._rounds, self._rounds, -1, dtype=bool)[None, :, :, None]
        return {
            **{name: self._repeated([example.inputs.get(name) for example in examples]) for name in inputs},
            "round": np.minimum(rounds, played_B1),
            "y": self._repeated([tree.truth for _, tree, _ in self.rows], int),
            "prover_stance": self._repeated([tree.stance for _, tree, _ in self.rows], int),
            "datapoint_id": self._repeated([example.id for example in examples]),
            "padding": rounds >= played_B1,
            "message_history": np.where(earlier, text_BRC[:, None], None),
            "message_agent_id": np.where(earlier, who_BRC[:, None], -1),
            "raw_message_history": np.where(earlier, raw_BRA[:, None], None),
            "agents": {"decision": decision_BRA, "continuous_decision": exact_BRA},
            "next": {"agents": {"reward": reward_BRA}},
        }

    def _full(self, value: Any, *axes: Sized) -> Any:
        """Return an array filled with `value`, of shape (B, R, *axes). For None the dtype is object."""
        import numpy as np

        shape = (len(self.rows), self._rounds, *map(len, axes))
        return np.full(shape, value, dtype=object if value is None else type(value))

    def _repeated(self, values: list[Any], dtype: type = object) -> Any:
        """Return an array of shape (B, R) with one value for each row, the same in all of its rounds."""
        import numpy as np

        return np.repeat(np.fromiter(values, dtype, len(values))[:, None], self._rounds, axis=1)
