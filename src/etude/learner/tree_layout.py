"""Who looks at whom when the tokens of a tree go through a model as one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from etude.learner.flex import block_mask, filled
from etude.learner.tree import Places, TokenTree

_TILE = 128
"""Queries of a tile at most: fewer cost more calls, more make the kernel compute what is masked."""
_CALL = 6000
"""Masked scores that take about as long as another call."""
_KEPT_SCORES = 1 << 22
"""Masks of so many scores in all are kept from layer to layer; larger ones are made anew."""

Kernel: TypeAlias = Literal["tiles", "flex", "plain flex"]
"""What attends: a call for each tile, which the CPU is good at; FlexAttention; or that as it is defined, for
tests, in memory for all pairs of tokens."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries from `start` to `stop`; they look at the first `width` keys of their run."""

    start: int
    stop: int
    width: int


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles that go on from each other, so that each looks at the keys of the one before it, and more."""

    keys: tuple[tuple[int, int], ...]
    """Ranges of places, in rising order."""
    tiles: tuple[Tile, ...]


@dataclass(slots=True, eq=False)
class TreeLayout:
    """How the N tokens of a forward pass stand to each other; the model is handed it as `tree=`.

    For FlexAttention these are more than the tree's, whose blocks are filled up with tokens without a parent.

    The tokens of a tile of depth-first order look at nothing but tokens of the tile, and what comes
    before its first token: so the keys of a tile are few, and masks are as small.
    """

    depths_N: torch.Tensor
    ends_N: torch.Tensor
    depth: int
    """The greatest of them."""
    kernel: Kernel
    runs: tuple[Run, ...]
    last_runs: tuple[Run, ...]
    """Those of the last layer, where only tokens matter that something is chosen after."""
    windows: list[int | None] = field(default_factory=list)
    """The sliding window of each attention that was computed."""
    _masks: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tree: TokenTree,
        device: torch.device,
        needed: Places,
        tile: int = _TILE,
        kernel: Kernel | None = None,
    ) -> TreeLayout:
        """The layout of a tree of one token or more, whose last hidden states are `needed` at some places."""
        kernel = kernel or ("flex" if device.type == "cuda" else "tiles")
        size = len(tree)
        # What it is filled up with looks at itself.
        more = 0 if kernel == "tiles" else filled(size) - size
        depths = torch.from_numpy(np.pad(tree.depths, (0, more))).to(device)
        ends = torch.from_numpy(np.concatenate([tree.ends, np.arange(size, size + more) + 1])).to(device)
        tiles = list(_tiles(tree, tile)) if kernel == "tiles" else []
        counts = np.bincount(needed, minlength=len(tree)).cumsum()
        before = np.concatenate([[0], counts])
        last = [one for one in tiles if before[one.stop] > before[one.start]]
        return cls(depths, ends, int(tree.depths.max()), kernel, _runs(tree, tiles), _runs(tree, last))

    def binding(self, sliding_window: int | None) -> int | None:
        """The window, if any token is too far down to see its first."""
        binds = sliding_window is not None and self.depth >= sliding_window
        return sliding_window if binds else None

    def sees(self, query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
        """Whether the tokens at `query` look at those at `key`; the two broadcast."""
        seen = (key <= query) & (query < self.ends_N[key])
        return seen if window is None else seen & (self.depths_N[query] - self.depths_N[key] < window)

    def mask(self, run: Run, tile: Tile, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of a tile, [queries, keys]: 0, or minus infinity."""
        name = tile.start, window, dtype
        if name in self._masks:
            return self._masks[name]  # type: ignore[no-any-return]
        device = self.ends_N.device
        queries = torch.arange(tile.start, tile.stop, device=device)[:, None]
        keys = torch.cat([torch.arange(*part, device=device) for part in run.keys])[: tile.width]
        mask = torch.where(self.sees(queries, keys, window), 0.0, float("-inf")).to(dtype)
        if sum((one.stop - one.start) * one.width for run in self.runs for one in run.tiles) <= _KEPT_SCORES:
            self._masks[name] = mask
        return mask

    def block_mask(self, window: int | None) -> Any:
        """The same as a block mask of FlexAttention."""
        name = "blocks", window
        if name not in self._masks:
            self._masks[name] = block_mask(self.ends_N, self.depths_N, window)
        return self._masks[name]


def _tiles(tree: TokenTree, most: int) -> Iterator[Tile]:
    """Cut a tree's tokens, also where a branch begins if its tokens would make the rest look at too much."""
    size, depths = len(tree), tree.depths
    begins = np.flatnonzero(np.diff(depths) != 1) + 1
    start = 0
    for begin, end in zip([0, *begins.tolist()], [*begins.tolist(), size], strict=True):
        more = min(end, start + most) - begin
        behind = int(depths[begin - 1]) + 1 - int(depths[begin]) if begin else 0
        if begin > start and more * (behind + begin - start) > _CALL:
            yield Tile(start, begin, int(depths[start]) + begin - start)
            start = begin
        while end - start >= most or (end == size and start < end):
            stop = min(start + most, end)
            yield Tile(start, stop, int(depths[start]) + stop - start)
            start = stop


def _runs(tree: TokenTree, tiles: list[Tile]) -> tuple[Run, ...]:
    """Join tiles that go on from each other."""
    joined: list[list[Tile]] = []
    for tile in tiles:
        follows = joined and joined[-1][-1].stop == tile.start
        if follows and joined[-1][-1].width == int(tree.depths[tile.start]):
            joined[-1].append(tile)
        else:
            joined.append([tile])
    return tuple(Run(_key_ranges(tree, run[-1]), tuple(run)) for run in joined)


def _key_ranges(tree: TokenTree, tile: Tile) -> tuple[tuple[int, int], ...]:
    places = np.concatenate([tree.before(tile.start), np.arange(tile.start, tile.stop)])
    parts = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)
