"""Workflows for Gymnasium's environments and TextArena's games.

`workflow: {_type: gym, id: FrozenLake-v1}` or `workflow: {_type: textarena, id: Nim-v0, …}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import Supplies
from etude.config.import_path import is_import_path
from etude.config.references import LlmRef
from etude.config.registry import register_workflow
from etude.core.data_model import name_type, number
from etude.core.episode import WORKFLOW, Example
from etude.core.errors import EpisodeError, RequestError
from etude.integrations.games.turn_game import (
    EnvironmentFailed,
    Game,
    GameConfig,
    GameResult,
    IsolatedRandom,
    Player,
    named_function,
    unknown,
    whole_number,
)
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

Reader: TypeAlias = Callable[[str], Any]
"""A function that converts an answer to an action. Raises ValueError with a message for the model."""

_MOST_NUMBERS = 256
"""The longest array shown as text. Longer arrays are usually pictures."""


class GymConfig(GameConfig, name="gym"):
    """A Gymnasium game, or a custom one with the same interface. The reward is the sum of its rewards."""

    package = "gymnasium"
    extra = "gym"

    id: str
    """A registered id such as `FrozenLake-v1`, or `module:name` of a class or function that makes one."""
    observation: str | None = None
    """`module:function` that converts an observation to text. Default: text, numbers and small arrays are
    shown as they are, and an environment that renders as `ansi` shows its rendering."""
    action: list[str] | dict[str, Any] | str | None = None
    """The words for actions 0, 1, …; a mapping from words to actions; or `module:function`, which converts an
    answer's text or raises ValueError. Default: the numbers of a discrete space, or the text itself."""
    step_rewards: bool = False
    """Set this to credit each answer with the rewards after it, instead of the reward of the whole game."""
    model: LlmRef | None = None
    """The model that plays. Default: the trained model."""

    def supplies(self) -> Supplies:
        """Return the seeds, and the evaluators for the reward, turns and invalid answers."""
        return self.measures({WORKFLOW: self.model})


@register_workflow(config_type=GymConfig)
async def gym(config: GymConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build the workflow. Raises MissingExtraError without gymnasium, RequestError for an unknown id."""
    gymnasium = config.library()
    if is_import_path(config.id):
        make = partial(named_function(config.id, "id"), **config.arguments)
    else:
        names = {*gymnasium.registry, *(name.rpartition("-v")[0] for name in gymnasium.registry)}
        if config.id not in names:
            raise unknown("environment of Gymnasium's", config.id, names)
        # Gymnasium's checker only prints warnings. Etude checks what an episode needs, and raises.
        make = partial(gymnasium.make, config.id, disable_env_checker=True, **config.arguments)
    observation = None if config.observation is None else named_function(config.observation, "observation")
    yield Workflow(config.id, GymGame(config, make, observation))


@dataclass(frozen=True)
class GymGame:
    """The workflow: plays one game for each example, and passes its `seed` and `options` to `reset`."""

    config: GymConfig
    make: Callable[[], Any]
    observation: Callable[..., Any] | None = None

    async def __call__(self, example: Example, episode: Episode) -> dict[str, Any]:
        """Play until the game is over, or for `max_turns` turns. Raises EnvironmentFailed."""
        config = self.config
        player = Player(WORKFLOW, config.model, config.prompt, config.history)
        course = GameResult(config.id, rewards={WORKFLOW: 0.0})
        seed, options = _start_state(example, config.id)
        async with Game(config.id, self.make, config.call_timeout) as guest:
            read = choose_reader(config.action, getattr(guest.env, "action_space", None))
            shown, over = await guest.call("reset()", partial(self._reset, seed, options)), False
            asked = shown
            while not over and course.turns < config.max_turns:
                text = await player.answer(episode, asked)
                course.turns += 1
                try:
                    action = read(text)
                except ValueError as error:
                    course.invalid[WORKFLOW] += 1
                    asked = f"That is not an action: {error}"
                    if not config.history:  # The player does not see its first question again.
                        asked += f"\n\n{shown}"
                    continue
                shown, reward, over = await guest.call("step()", partial(self._step, action))
                asked = shown
                earned = course.earn(WORKFLOW, reward)
                if config.step_rewards:
                    episode.step_reward(earned)
        if config.step_rewards:
            episode.step_reward(-course.rewards[WORKFLOW], "part of the reward already")
        return course.record(episode)

    def _reset(self, seed: int | None, options: Any, env: Any) -> str:
        observation, _ = env.reset(seed=seed, options=options)
        return self._shown(env, observation)

    def _step(self, action: Any, env: Any) -> tuple[str, Any, bool]:
        observation, reward, terminated, truncated, _ = env.step(action)
        return self._shown(env, observation), reward, bool(terminated or truncated)

    def _shown(self, env: Any, observation: Any) -> str:
        """Return an observation as text. Runs in the environment's thread, because it may render."""
        if self.observation is not None:
            return str(self.observation(observation, env))
        if getattr(env, "render_mode", None) == "ansi" and not isinstance(observation, str):
            return str(env.render())
        try:
            return text_of_observation(observation)
        except ValueError as error:
            raise EnvironmentFailed(
                f"{self.config.id}: an observation is {error}, which text does not show; name a function of "
                "(observation, env) that makes text of it: `observation: module:function`"
            ) from None


def _start_state(example: Example, what: str) -> tuple[int | None, Mapping[str, Any] | None]:
    """Return the `seed` and `options` to reset a game with. A row has one of them or both.

    Raises EpisodeError for an example with neither, because each of its episodes would be a different game.
    """
    options = example.inputs.get("options")
    if options is not None and not isinstance(options, Mapping):
        raise EpisodeError(f"example {example.id!r}: 'options' is a mapping, found {name_type(options)}")
    needs_seed = options is None or example.inputs.get("seed") is not None
    return (whole_number(example, "seed", what) if needs_seed else None), options


def choose_reader(written: list[str] | dict[str, Any] | str | None, space: Any) -> Reader:
    """Return the action reader from the config, or the default for the environment's action space.

    Raises RequestError if there is neither.
    """
    if isinstance(written, str):
        return named_function(written, "action")
    if isinstance(written, list):
        start = int(getattr(space, "start", 0))
        written = {word: start + number for number, word in enumerate(written)}
    kind = type(space).__name__
    if written is None and kind == "Discrete":
        written = {str(number): number for number in range(int(space.start), int(space.start + space.n))}
    if written is not None:
        actions = written
        return lambda text: chosen_action(text, actions)
    if kind in ("Text", "NoneType"):
        return str.strip
    raise RequestError(
        f"action: nothing says how an answer becomes an action of {space}; name a function of the answer's "
        "text, `action: module:function`, which raises ValueError for anything else"
    )


def chosen_action(text: str, actions: Mapping[str, Any]) -> Any:
    """Return the action whose word the answer is, or is the only one in the answer. Case does not matter.

    Raises ValueError if the answer has no action, or several.
    """
    words = {word.casefold(): action for word, action in actions.items()}
    answer = text.strip().casefold()
    if answer in words:
        return words[answer]
    # The 1 of -1 and of 1.5 is not the action 1, and `up left` is neither `up` nor `left`.
    any_word = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    mentioned = {*re.findall(rf"(?<![\w-])(?<!\d[.,])(?:{any_word})(?!\w|[.,]\d)", answer)}
    if len(mentioned) == 1:
        return words[mentioned.pop()]
    reason = "several of the actions are in it" if mentioned else "it is none of the actions"
    raise ValueError(f"{reason}. Answer with one of: {', '.join(actions)}")


def text_of_observation(value: Any) -> str:
    """Return text unchanged, numbers and arrays on one line, and mappings as lines.

    Raises ValueError for large arrays and other objects.
    """
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {text_of_observation(inner)}" for key, inner in value.items())
    if hasattr(value, "tolist"):
        if value.size > _MOST_NUMBERS:
            raise ValueError(f"an array of {value.size} numbers, shape {value.shape}")
        return text_of_observation(value.tolist())
    if isinstance(value, list | tuple):
        between = "\n" if any(isinstance(inner, list | tuple) for inner in value) else " "
        return between.join(map(text_of_observation, value))
    try:
        exact = number(value)
    except ValueError:
        raise ValueError(f"an object of the type {type(value).__qualname__}") from None
    return str(int(exact)) if math.isfinite(exact) and exact == int(exact) else f"{exact:.4g}"


class TextArenaConfig(GameConfig, name="textarena"):
    """A TextArena game. Each player's reward comes from the game, from -1 to 1."""

    package = "textarena"
    extra = "textarena"
    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    id: str
    """A registered game, such as `TicTacToe-v0`."""
    seats: list[LlmRef] = Field(default_factory=list)
    """The models of player 0, 1, … Default: one player, the trained model. The agents are called `player_0`,
    `player_1`, …"""
    rules: bool = True
    """Show players the game's rules at the start."""

    def agents(self) -> Mapping[str, str | None]:
        """Return the agent of each seat, with its model."""
        if len(self.seats) < 2:
            return {WORKFLOW: self.seats[0] if self.seats else None}
        return {f"player_{number}": model for number, model in enumerate(self.seats)}

    def supplies(self) -> Supplies:
        """Return the seeds, and the evaluators for each player's reward, turns and invalid moves."""
        return self.measures(self.agents())


@register_workflow(config_type=TextArenaConfig)
async def textarena(config: TextArenaConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build the workflow. Raises MissingExtraError without TextArena, RequestError for an unknown game.

    With `history`, the game omits the wrappers that repeat the game so far in each observation, because the
    conversation already has it.
    """
    library = config.library()
    registry = config.library("textarena.envs.registration").ENV_REGISTRY
    if config.id not in registry:
        raise unknown("game of TextArena's", config.id, registry)
    name, wrappers = config.id, list[Any]()
    if config.history and f"{name}-raw" in registry:
        default = registry[name].default_wrappers or ()
        wrappers = [wrapper for wrapper in default if issubclass(wrapper, library.ActionWrapper)]
        name = f"{name}-raw"

    def make() -> Any:
        env = library.make(name, **config.arguments)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    yield Workflow(config.id, TextArenaGame(config, make))


@dataclass(frozen=True)
class TextArenaGame:
    """The workflow: plays one game for each example, from the example's `seed`."""

    config: TextArenaConfig
    make: Callable[[], Any]

    async def __call__(self, example: Example, episode: Episode) -> dict[str, Any]:
        """Play until the game is over. Raises EnvironmentFailed, also after `max_turns` without an end."""
        config, seed = self.config, whole_number(example, "seed", self.config.id)
        agents = config.agents()
        players = [Player(name, model, config.prompt, config.history) for name, model in agents.items()]
        course = GameResult(config.id)
        # TextArena's games draw from Python's global random generator.
        async with Game(config.id, self.make, config.call_timeout, IsolatedRandom(seed)) as guest:
            await guest.call("reset()", lambda env: env.reset(num_players=len(players), seed=seed))
            over = False
            while not over:
                if course.turns == config.max_turns:
                    raise EnvironmentFailed(
                        f"{config.id}: it has no result after {config.max_turns} turns; raise `max_turns` of "
                        "the workflow"
                    )
                seat, shown = await guest.call("get_observation()", self._observe)
                text = await players[seat].answer(episode, shown)
                course.turns += 1
                over = await guest.call("step()", partial(_step, text))
            rewards, info = await guest.call("close()", lambda env: env.close())
            for seat, player in enumerate(players):
                course.earn(player.name, (rewards or {}).get(seat))
                course.invalid[player.name] += bool((info.get(seat) or {}).get("invalid_move"))
        return course.record(episode)

    def _observe(self, env: Any) -> tuple[int, str]:
        """Return the player whose turn it is, and the messages and events since its last turn."""
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


def _step(action: str, env: Any) -> bool:
    return bool(env.step(action=action)[0])
