"""Workflows for Gymnasium's environments and TextArena's games.

`workflow: {_type: gym, id: FrozenLake-v1}` or `workflow: {_type: textarena, id: Nim-v0, …}`.
"""

import asyncio
import importlib
import math
import random
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import Entries, LlmRef, Supplies, WorkflowConfig
from etude.config.import_path import import_object, is_import_path, where_raised
from etude.config.registry import register_workflow
from etude.core.data_model import name_type, number
from etude.core.episode import WORKFLOW, Example
from etude.core.errors import EpisodeError, RequestError, alternatives, require_extra
from etude.core.message import Message
from etude.core.threads import call_in_thread
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

T = TypeVar("T")

CALL_SECONDS = 60.0
"""The time limit of each call into an environment."""
_MOST_NUMBERS = 256
"""The longest array shown as text. Longer arrays are usually pictures."""


class SizesConfig(WorkflowConfig):
    """The number of examples that an environment supplies."""

    package: ClassVar[str]
    """The import name of the library."""
    extra: ClassVar[str]

    size: int = Field(default=256, ge=1)
    """The number of training examples to generate."""
    validation_size: int = Field(default=128, ge=1)
    """The number of held-out examples to generate."""

    @classmethod
    def library(cls, module: str | None = None) -> Any:
        """Import the library, or a module of it. Raises MissingExtraError if it is not installed."""
        require_extra(cls.package, f"`_type: {cls.type_name}`", cls.extra)
        return importlib.import_module(module or cls.package)

    def datasets(self, kind: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Return the two datasets for `Supplies`, from the config of a dataset component."""
        return {
            "dataset": {**kind, "size": self.size},
            "validation": {**kind, "size": self.validation_size, "split": "validation"},
        }


class GameConfig(SizesConfig):
    """Options of turn-based games."""

    prompt: str | None = None
    """Text to put before a player's first observation."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(default=50, ge=1)
    """The maximum number of answers of all players together. The game stops after them."""
    history: bool = True
    """Show a player the whole game so far. If false, show only the prompt and the current observation."""

    def supplies(self) -> Supplies:
        """Return seeds, and evaluators for turns, invalid answers and the reward of each seat."""
        seats = self.agents() or {}
        several = len(seats) > 1
        rewards = {seat: f"reward_{seat}" if several else "reward" for seat in seats}
        evaluators: dict[str, Entries] = {
            name: {"_type": "measured", "agent": seat if several else None} for seat, name in rewards.items()
        }
        evaluators |= {name: {"_type": "measured", "name": name} for name in ("turns", "invalid")}
        by_model: dict[str, str] = {}
        for seat, model in seats.items():
            if model is not None:
                by_model.setdefault(model, rewards[seat])
        datasets, first = self.datasets({"_type": "seeds"}), next(iter(rewards.values()))
        return Supplies(**datasets, evaluators=evaluators, reward=first, reward_of_model=by_model)


def unknown(what: str, name: str, known: Any) -> RequestError:
    """Return the error for an unknown environment, with the nearest known name."""
    return RequestError(f"there is no {what} '{name}'" + alternatives(name, sorted(known)))


def whole_number(example: Example, name: str, what: str) -> int:
    """Return a required whole number from an example's inputs. Raises EpisodeError if it is not one.

    Text is converted, because all values of a CSV file are text.
    """
    value = example.inputs.get(name)
    try:
        return int(str(value))
    except ValueError:
        found = "it has none" if value is None else f"found {name_type(value)}"
        raise EpisodeError(
            f"example {example.id!r} cannot start a game: {what} needs a whole number as '{name}', and "
            f"{found}; give each row one, or leave out the dataset, and the workflow supplies its own"
        ) from None


async def call_with_timeout(what: str, fn: Callable[[], T]) -> T:
    """Run `fn` in a thread, for at most a minute. Raises EpisodeError about `what` if it fails."""
    try:
        async with asyncio.timeout(CALL_SECONDS) as limit:
            return await call_in_thread(fn)
    except EpisodeError:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise EpisodeError(f"{what} took longer than {CALL_SECONDS:g} s") from None
        raise EpisodeError(f"{what} failed: {where_raised(error)}") from error


_global_random = threading.Lock()


@asynccontextmanager
async def open_game(
    name: str, make: Callable[[], Any], seed: int | None = None
) -> AsyncIterator[tuple[Any, Callable[[str, Callable[[], Any]], Awaitable[Any]]]]:
    """Yield an environment of another library, and a function that calls it. Close it on exit.

    Calls run in threads, one at a time. With a seed, code that draws from Python's
    global random generator gets a stream of its own, and only one such call runs in the whole process. Raises
    EpisodeError if a call fails.
    """
    lock = threading.Lock() if seed is None else _global_random
    state = None if seed is None else random.Random(seed).getstate()

    async def call(what: str, fn: Callable[[], Any]) -> Any:
        def call_locked() -> Any:
            nonlocal state
            with lock:
                if state is None:
                    return fn()
                before = random.getstate()
                random.setstate(state)
                try:
                    return fn()
                finally:
                    state = random.getstate()
                    random.setstate(before)

        return await call_with_timeout(f"{name}: {what}", call_locked)

    env = await call("making it", make)
    try:
        yield env, call
    finally:
        with suppress(EpisodeError):
            await call("close()", getattr(env, "close", lambda: None))


@dataclass
class Player:
    """One seat of a game: its conversation, and the model that answers for it."""

    name: str
    model: str | None = None
    prompt: str | None = None
    history: bool = True
    messages: list[Message] = field(default_factory=list)

    async def answer(self, episode: Episode, observation: str) -> str:
        """Return the model's answer to an observation. The call is recorded under the seat's name."""
        if not self.history:
            self.messages.clear()
        if not self.messages and self.prompt:
            observation = f"{self.prompt}\n\n{observation}"
        self.messages.append({"role": "user", "content": observation})
        with episode.function(self.name):
            reply = await episode.chat(self.messages, model=self.model)
        self.messages.append(reply.message)
        return reply.text


@dataclass
class GameResult:
    """The results of a game so far: turns, invalid answers, and the rewards of each seat."""

    game: str
    turns: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)

    def earn(self, seat: str, given: Any) -> None:
        """Add a reward to a seat. Raises EpisodeError unless it is a finite number."""
        try:
            reward = number(given)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise EpisodeError(f"{self.game}: the reward {given!r:.80} is not a finite number")
        self.rewards[seat] = self.rewards.get(seat, 0.0) + reward

    def record(self, episode: Episode) -> dict[str, Any]:
        """Record the scores of the episode, or of each of several seats, and return the episode's output."""
        episode.score("turns", self.turns)
        episode.score("invalid", self.invalid.total())
        for seat, reward in self.rewards.items():
            episode.score("reward", reward, agent=seat if len(self.rewards) > 1 else None)
        return {"rewards": self.rewards, "turns": self.turns, "invalid": dict(self.invalid)}


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
    model: LlmRef | None = None
    """The model that plays. Default: the trained model."""

    def agents(self) -> Mapping[str, str | None]:
        """Return the player, with its model."""
        return {WORKFLOW: self.model}


@register_workflow(config_type=GymConfig)
async def gym(config: GymConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build the workflow. Raises MissingExtraError without gymnasium, RequestError for an unknown id."""
    gymnasium = config.library()
    if is_import_path(config.id):
        make = partial(import_object(config.id), **config.arguments)
    else:
        names = {*gymnasium.registry, *(name.rpartition("-v")[0] for name in gymnasium.registry)}
        if config.id not in names:
            raise unknown("environment of Gymnasium's", config.id, names)
        # Gymnasium's checker only prints warnings. Etude checks what an episode needs, and raises.
        make = partial(gymnasium.make, config.id, disable_env_checker=True, **config.arguments)
    observation = None if config.observation is None else import_object(config.observation)
    yield Workflow(config.id, GymGame(config, make, observation))


@dataclass(frozen=True)
class GymGame:
    """The workflow: plays one game for each example, and passes its `seed` and `options` to `reset`."""

    config: GymConfig
    make: Callable[[], Any]
    observation: Callable[..., Any] | None = None

    async def __call__(self, example: Example, episode: Episode) -> dict[str, Any]:
        """Play until the game is over, or for `max_turns` turns. Raises EpisodeError."""
        config = self.config
        player = Player(WORKFLOW, config.model, config.prompt, config.history)
        course = GameResult(config.id, rewards={WORKFLOW: 0.0})
        options = example.inputs.get("options")
        needs_seed = options is None or example.inputs.get("seed") is not None
        seed = whole_number(example, "seed", config.id) if needs_seed else None
        async with open_game(config.id, self.make) as (env, call):

            def reset() -> str:
                observation, _ = env.reset(seed=seed, options=options)
                return self._show_observation(env, observation)

            def step(action: Any) -> tuple[str, Any, bool]:
                observation, reward, terminated, truncated, _ = env.step(action)
                return self._show_observation(env, observation), reward, bool(terminated or truncated)

            read = choose_reader(config.action, getattr(env, "action_space", None))
            asked = shown = await call("reset()", reset)
            over = False
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
                shown, reward, over = await call("step()", partial(step, action))
                asked = shown
                course.earn(WORKFLOW, reward)
        return course.record(episode)

    def _show_observation(self, env: Any, observation: Any) -> str:
        """Return an observation as text. Runs in the environment's thread, because it may render."""
        if self.observation is not None:
            return str(self.observation(observation, env))
        if getattr(env, "render_mode", None) == "ansi" and not isinstance(observation, str):
            return str(env.render())
        try:
            return text_of_observation(observation)
        except ValueError as error:
            raise EpisodeError(
                f"{self.config.id}: an observation is {error}, which text does not show; name a function of "
                "(observation, env) that makes text of it: `observation: module:function`"
            ) from None


def choose_reader(written: list[str] | dict[str, Any] | str | None, space: Any) -> Callable[[str], Any]:
    """Return a function that turns an answer into an action: the config's, or one for the action space.

    The function raises ValueError with a message for the model. Raises RequestError if there is neither.
    """
    if isinstance(written, str):
        own: Callable[[str], Any] = import_object(written)
        return own
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
        """Play until the game is over. Raises EpisodeError, also after `max_turns` without an end."""
        config, seed = self.config, whole_number(example, "seed", self.config.id)
        agents = config.agents()
        players = [Player(name, model, config.prompt, config.history) for name, model in agents.items()]
        course = GameResult(config.id)
        # TextArena's games draw from Python's global random generator.
        async with open_game(config.id, self.make, seed) as (env, call):
            await call("reset()", lambda: env.reset(num_players=len(players), seed=seed))
            over = False
            while not over:
                if course.turns == config.max_turns:
                    raise EpisodeError(
                        f"{config.id}: it has no result after {config.max_turns} turns; raise `max_turns` of "
                        "the workflow"
                    )
                seat, observation = await call("get_observation()", env.get_observation)
                if seat not in range(len(players)):
                    raise EpisodeError(
                        f"{config.id}: it asked player {seat}, but `seats` has {len(players)} models"
                    )
                if isinstance(observation, str):
                    asked = observation.strip()
                else:  # The messages and events since its last turn.
                    texts = [
                        message.strip()
                        for sender, message, kind in observation
                        if sender != seat and (config.rules or getattr(kind, "name", "") != "PROMPT")
                    ]
                    asked = "\n\n".join(texts) or "It is your turn."
                text = await players[seat].answer(episode, asked)
                course.turns += 1
                over, _ = await call("step()", partial(env.step, action=text))
            rewards, info = await call("close()", env.close)
            for seat, player in enumerate(players):
                course.earn(player.name, (rewards or {}).get(seat))
                course.invalid[player.name] += bool((info.get(seat) or {}).get("invalid_move"))
        return course.record(episode)
