"""Who looks at whom when the tokens of a tree go through a model as one row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from etude.learner.tree import TokenTree

_TILE = 64
"""Queries of a tile: fewer cost more calls, more make the kernel compute what is masked."""
_KEPT_SCORES = 1 << 24
"""Masks of so many scores in all are kept from layer to layer; larger ones are made anew."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries from `start` to `stop`, and all that they may look at."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    """Ranges in rising order; the last ends with the tile itself."""

    @property
    def scores(self) -> int:
        """Pairs of a query and a key."""
        return (self.stop - self.start) * sum(stop - start for start, stop in self.keys)


@dataclass(slots=True, eq=False)
class TreeLayout:
    """How the N tokens of a forward pass stand to each other; the model is handed it as `tree=`.

    The tokens of a tile of depth-first order look at nothing but tokens of the tile, and what comes
    before its first token: so the keys of a tile are few, and masks are as small.
    """

    depths_N: torch.Tensor
    ends_N: torch.Tensor
    tiles: tuple[Tile, ...]
    windows: list[int | None] = field(default_factory=list)
    """The sliding window of each attention that was computed."""
    _masks: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device) -> TreeLayout:
        """The layout of a tree of one token or more."""
        depths, ends = (torch.from_numpy(values).to(device) for values in (tree.depths, tree.ends))
        return cls(depths, ends, tuple(_tile(tree, start) for start in range(0, len(tree), _TILE)))

    def binding(self, sliding_window: int | None) -> int | None:
        """The window, if any token is too far down to see its first."""
        binds = sliding_window is not None and int(self.depths_N.max()) >= sliding_window
        return sliding_window if binds else None

    def sees(self, query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
        """Whether the tokens at `query` look at those at `key`; the two broadcast."""
        seen = (key <= query) & (query < self.ends_N[key])
        return seen if window is None else seen & (self.depths_N[query] - self.depths_N[key] < window)

    def mask(self, tile: Tile, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of a tile, [queries, keys]: 0, or minus infinity."""
        name = tile.start, window, dtype
        if name in self._masks:
            return self._masks[name]  # type: ignore[no-any-return]
        device = self.ends_N.device
        queries = torch.arange(tile.start, tile.stop, device=device)[:, None]
        keys = torch.cat([torch.arange(*part, device=device) for part in tile.keys])
        hidden = ~self.sees(queries, keys, window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        if sum(one.scores for one in self.tiles) <= _KEPT_SCORES:
            self._masks[name] = mask
        return mask

    def block_mask(self, window: int | None) -> Any:
        """The same as a block mask of FlexAttention."""
        from torch.nn.attention.flex_attention import create_block_mask

        def looks(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self.sees(query, key, window)

        name = "blocks", window
        if name not in self._masks:
            size, device = len(self.ends_N), self.ends_N.device
            # Uncompiled, it would hold all pairs of tokens at once.
            self._masks[name] = create_block_mask(
                looks, None, None, size, size, device=device, _compile=device.type == "cuda"
            )
        return self._masks[name]


def _tile(tree: TokenTree, start: int) -> Tile:
    stop = min(start + _TILE, len(tree))
    places = np.concatenate([tree.before(start), np.arange(start, stop)])
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return Tile(start, stop, tuple((int(run[0]), int(run[-1]) + 1) for run in runs))
