"""TextArena's games as a workflow, a model on each seat: `workflow: {_type: textarena, id: Nim-v0, …}`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, FiniteFloat

from etude.config.references import LlmRef
from etude.config.registry import register_workflow
from etude.config.supplies import Starter, Supplies
from etude.core.episode import WORKFLOW
from etude.core.example import Example
from etude.integrations.games.turns import (
    Course,
    EnvironmentFailed,
    GameConfig,
    OwnRandom,
    Player,
    opened,
    unknown,
    whole_number,
)
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder


class TextArenaConfig(GameConfig, name="textarena"):
    """A game of TextArena's. Each player's reward is the game's, from -1 to 1."""

    package = "textarena"
    extra = "textarena"
    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    id: str
    """A registered game, such as `TicTacToe-v0`."""
    seats: list[LlmRef] = Field(default_factory=list)
    """The models of player 0, 1, …; left out: one player, the trained model. Their agents are called
    `player_0`, `player_1`, …"""
    rules: bool = True
    """Whether players are shown the game's own rules at the beginning."""
    invalid_penalty: FiniteFloat = Field(default=0.0, ge=0)
    """Taken from a player's reward where the game was ended by its invalid move."""

    def agents(self) -> Mapping[str, str | None]:
        """A seat's agent, and its model."""
        if len(self.seats) < 2:
            return {WORKFLOW: self.seats[0] if self.seats else None}
        return {f"player_{number}": model for number, model in enumerate(self.seats)}

    def supplies(self) -> Supplies:
        """Seeds, each player's reward, turns and invalid moves."""
        return self.measures(self.agents())

    @classmethod
    def starter(cls, task: str | None) -> Starter:
        """A game of Nim between two models that are both trained, or another game of two."""
        players = ("first", "second")
        workflow = {"_type": "textarena", "id": task or "Nim-v0", "seats": [*players], "max_turns": 30}
        return Starter({"workflow": workflow}, models=players)


@register_workflow(config_type=TextArenaConfig)
async def textarena(config: TextArenaConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises MissingExtraError without TextArena, RequestError for a game that it does not know."""
    make = maker_of(config)
    yield Workflow(config.id, TextArenaGame(config, make), config.timeout)


def maker_of(config: TextArenaConfig) -> Callable[[], Any]:
    """A function that makes the game. Raises RequestError for one that there is not.

    With `history` it is made without the wrappers that write the game so far into each observation, as the
    conversation has that already.
    """
    library = config.library()
    registry = config.library("textarena.envs.registration").ENV_REGISTRY
    if config.id not in registry:
        raise unknown("game of TextArena's", config.id, registry)
    raw = f"{config.id}-raw"
    if not config.history or raw not in registry:
        return lambda: library.make(config.id, **config.arguments)
    wrappers = registry[config.id].default_wrappers or ()
    of_actions = [wrapper for wrapper in wrappers if issubclass(wrapper, library.ActionWrapper)]

    def make() -> Any:
        env = library.make(raw, **config.arguments)
        for wrapper in of_actions:
            env = wrapper(env)
        return env

    return make


@dataclass(frozen=True)
class TextArenaGame:
    """The workflow: plays one game for each example, with its `seed`."""

    config: TextArenaConfig
    make: Callable[[], Any]

    async def __call__(self, example: Example, episode: Episode) -> dict[str, Any]:
        """Play until it is over. Raises EnvironmentFailed, also for a game without an end in `max_turns`."""
        config, seed = self.config, whole_number(example, "seed", self.config.id)
        agents = config.agents()
        players = [Player(name, model, config.prompt, config.history) for name, model in agents.items()]
        course = Course(config.id)
        # Its games draw from Python's global generator.
        async with opened(config.id, self.make, config.call_timeout, OwnRandom(seed)) as guest:
            await guest.call("reset()", lambda env: env.reset(num_players=len(players), seed=seed))
            over = False
            while not over:
                if course.turns == config.max_turns:
                    raise EnvironmentFailed(
                        f"{config.id}: it has no result after {config.max_turns} turns; raise `max_turns` of "
                        "the workflow"
                    )
                seat, shown = await guest.call("get_observation()", self._observed)
                text = await players[seat].answer(episode, shown)
                course.turns += 1
                over = await guest.call("step()", partial(_stepped, text))
            rewards, info = await guest.call("close()", lambda env: env.close())
            for seat, player in enumerate(players):
                course.earn(player.name, (rewards or {}).get(seat))
                course.invalid[player.name] += bool((info.get(seat) or {}).get("invalid_move"))
        return course.record(episode, config.invalid_penalty)

    def _observed(self, env: Any) -> tuple[int, str]:
        """Whose turn it is, and what was said or happened since its last one."""
        seat, observation = env.get_observation()
        models = max(1, len(self.config.seats))
        if seat not in range(models):
            raise EnvironmentFailed(
                f"{self.config.id}: it asked player {seat}, and `seats` has {models} models"
            )
        if isinstance(observation, str):
            return seat, observation.strip()
        texts = [
            message
            for sender, message, kind in observation
            if sender != seat and (self.config.rules or getattr(kind, "name", "") != "PROMPT")
        ]
        return seat, "\n\n".join(text.strip() for text in texts) or "It is your turn."


def _stepped(action: str, env: Any) -> bool:
    """Whether the game is over after a player's answer."""
    return bool(env.step(action=action)[0])
