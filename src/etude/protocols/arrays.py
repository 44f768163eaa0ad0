"""Episode trees as arrays, for analysis: one row for each way that a play went.

The keys and shapes are those of Neural Interactive Proofs' rollouts. Sizes: B rows, R rounds of the
longest protocol, A agents, C channels, M messages of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.errors import MissingExtraError, RequestError
from etude.protocols.fill import Filler
from etude.protocols.rows import Row
from etude.protocols.tree import EpisodeTree


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Finished episodes of one protocol."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, records: Iterable[EpisodeRecord]) -> Rollouts:
        """The rollouts of episodes; failed ones are left out.

        Raises RequestError when other things than one protocol were played.
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
        return cls(tuple(rows))

    def to_arrays(self, *, prompts: bool = False) -> dict[str, Any]:
        """Nested arrays; texts are objects, None where there is none.

        - `round`, `seed`, `y`, `datapoint_id`, `prover_stance`, `done`, `terminated`, `padding`, every
          input of the example, `_node_id`, `_parent_node_id`: (B, R)
        - `message_history`, `message_agent_id` (-1: nobody): (B, R, R, C); `raw_message_history`:
          (B, R, R, A): what had been said before the round of the second axis
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
        if find_spec("numpy") is None:
            raise MissingExtraError("a view as arrays (numpy is not installed)", "local")
        return Filler(self.rows).arrays(prompts=prompts)
