"""Whether the functions that are to be trained call the model at all, noticed while episodes come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from etude.algorithms.samples import is_targeted
from etude.config.nearest import nearest
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.progress import Progress

_PATIENCE = 8
"""Episodes with calls, none of them targeted, after which it is said."""


class TargetWatch:
    """Looks at the first episodes for calls by the target functions to the trained model."""

    def __init__(self, functions: Collection[str], model: str, progress: Progress) -> None:
        self._functions = functions
        self._model = model
        self._progress = progress
        self._callers: Counter[str] = Counter()
        self._episodes = 0
        self._done = False

    def saw(self, episode: EpisodeRecord) -> None:
        """Look at an episode.

        Raises RequestError when the first ones have no call that is targeted, and a target function is
        called almost like one that calls the model; a warning is given when there is no such name.
        """
        if self._done or not any(call.completion is not None for call in episode.calls):
            return
        if any(is_targeted(call, self._functions, self._model) for call in episode.calls):
            self._done = True
            return
        self._episodes += 1
        self._callers.update({call.function for call in episode.calls if call.model == self._model})
        if self._episodes >= _PATIENCE:
            self._done = True
            self._complain()

    def _complain(self) -> None:
        callers = ", ".join(f"'{name}'" for name in sorted(self._callers)) or "none"
        text = (
            f"none of the first {self._episodes} episodes has a call to '{self._model}' by a target function "
            f"({', '.join(self._functions)}); functions that called it: {callers}"
        )
        for name in self._functions:
            meant = nearest(name, self._callers)
            if meant is not None:
                raise RequestError(f"{text}. Did you mean 'finetuning.target_functions: [{meant}]'?")
        self._progress.message(f"{text}. Nothing is trained on unless one of them does", warning=True)
