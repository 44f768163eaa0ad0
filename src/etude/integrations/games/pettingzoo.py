"""PettingZoo's turn-based environments as a workflow, a model on each seat: `_type: pettingzoo`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, FiniteFloat

from etude.config.import_path import is_import_path
from etude.config.references import LlmRef
from etude.config.registry import register_workflow
from etude.config.supplies import Starter, Supplies
from etude.core.data_model import kind_of
from etude.core.example import Example
from etude.integrations.games.actions import reader_of
from etude.integrations.games.config import GameConfig, own_function, own_maker, unknown
from etude.integrations.games.guard import Guard, guarded
from etude.integrations.games.observations import text_of_observation
from etude.integrations.games.turns import Course, Player, beginning_of
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder


class PettingZooConfig(GameConfig, name="pettingzoo"):
    """An environment with PettingZoo's AEC interface, in which agents act in turn. Each agent's reward is the
    sum of its own."""

    package = "pettingzoo"
    extra = "pettingzoo"
    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    id: str
    """A registered id, such as `classic/tictactoe-v3`, or `module:name` of a function or class that
    makes an AEC environment."""
    seats: Annotated[dict[str, LlmRef], Field(min_length=1)]
    """The model of each agent of the environment, such as `{player_1: alice, player_2: bob}`."""
    observation: str | None = None
    """`module:function` of (observation, agent, env) that makes text of what an agent sees."""
    action: list[str] | dict[str, Any] | str | None = None
    """As for `gym`."""
    invalid_penalty: FiniteFloat = Field(default=0.0, ge=0)
    """Taken from an agent's reward for each answer that is no legal action; it is told, and asked again."""

    def agents(self) -> Mapping[str, str | None]:
        """Those of `seats`."""
        return dict(self.seats)

    def supplies(self) -> Supplies:
        """Seeds, each agent's reward, turns and invalid answers."""
        return self.measures(self.agents())

    @classmethod
    def starter(cls, task: str | None) -> Starter:
        """Tic-tac-toe between two models that are both trained, or another game."""
        players = ("first", "second")
        workflow = {
            "_type": "pettingzoo",
            "id": task or "classic/tictactoe-v3",
            "seats": {"player_1": "first", "player_2": "second"},
            "max_turns": 20,
            "invalid_penalty": 0.1,
        }
        return Starter({"workflow": workflow}, models=players)


@register_workflow(config_type=PettingZooConfig)
async def pettingzoo(config: PettingZooConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises MissingExtraError without PettingZoo, RequestError for what it does not have."""
    make = maker_of(config)
    game = PettingZooGame(config, make, own_function(config.observation, "observation"))
    yield Workflow(config.id, game, config.timeout)


def maker_of(config: PettingZooConfig) -> Callable[[], Any]:
    """A function that makes the environment. Raises RequestError for one that there is not."""
    library = config.library()
    if is_import_path(config.id):
        return own_maker(config.id, config.arguments)
    if config.id not in library.aec_registry:
        raise unknown("environment of PettingZoo's with turns", config.id, library.aec_registry)
    return lambda: library.make("aec", config.id, **config.arguments)


@dataclass(frozen=True, slots=True)
class _View:
    """An agent's turn."""

    agent: str
    shown: str
    legal: Any
    """For each action whether it is legal; None where the environment does not say."""
    space: Any


@dataclass(frozen=True)
class PettingZooGame:
    """The workflow: plays one game for each example, whose `seed` and `options` go to `reset`."""

    config: PettingZooConfig
    make: Callable[[], Any]
    observation: Callable[..., Any] | None = None

    async def __call__(self, example: Example, episode: Episode) -> dict[str, Any]:
        """Play until all agents are done, or `max_turns`. Raises EnvironmentFailed."""
        config, seats = self.config, self.config.seats
        players = {name: Player(name, model, config.prompt, config.history) for name, model in seats.items()}
        course = Course(rewards=dict.fromkeys(seats, 0.0))
        seed, options = beginning_of(example, config.id)
        async with guarded(config.id, self.make, config.call_timeout) as guard:
            await guard.call("reset()", lambda env: env.reset(seed=seed, options=options))
            while course.turns < config.max_turns:
                view = await guard.call("last()", lambda env: self._next_view(guard, course))
                if view is None:
                    break
                await self._turn(view, players[view.agent], guard, course, episode)
            await guard.call("rewards", lambda env: _collect_rest(guard, course))
        return course.record(episode, config.invalid_penalty)

    async def _turn(
        self, view: _View, player: Player, guard: Guard[Any], course: Course, episode: Episode
    ) -> None:
        """Ask an agent until it has a legal action, and take it."""
        read, shown = reader_of(self.config.action, view.space), view.shown
        while course.turns < self.config.max_turns:
            text = await player.answer(episode, shown)
            course.turns += 1
            try:
                action = read(text)
                if view.legal is not None and not view.legal[int(action)]:
                    raise ValueError("it is not legal now")
            except ValueError as error:
                course.invalid[player.name] += 1
                shown = f"That is no action: {error}"
                continue
            await guard.call("step()", partial(_stepped, action))
            return

    def _next_view(self, guard: Guard[Any], course: Course) -> _View | None:
        """The view of the next agent that can act, after rewards are taken in; None when all are done."""
        env = guard.env
        while env.agents:
            agent = env.agent_selection
            observation, reward, terminated, truncated, info = env.last()
            course.earn(agent, guard.reward(f"last() of '{agent}'", reward))
            if terminated or truncated:
                env.step(None)
                continue
            if agent not in self.config.seats:
                raise guard.problem(f"the agent '{agent}' has no model; name it in `seats`")
            is_masked = isinstance(observation, Mapping) and "action_mask" in observation
            legal = observation["action_mask"] if is_masked else (info or {}).get("action_mask")
            bare = observation.get("observation", observation) if is_masked else observation
            return _View(agent, self._shown(guard, bare, agent), legal, env.action_space(agent))
        return None

    def _shown(self, guard: Guard[Any], observation: Any, agent: str) -> str:
        if self.observation is not None:
            text = self.observation(observation, agent, guard.env)
            if not isinstance(text, str):
                raise guard.problem(f"'{self.config.observation}' gave {kind_of(text)}; return text")
            return text
        if getattr(guard.env, "render_mode", None) == "ansi":
            return str(guard.env.render())
        try:
            return text_of_observation(observation)
        except ValueError as error:
            raise guard.problem(
                f"the observation of '{agent}' is {error}, which text does not show; name a function of "
                "(observation, agent, env) that makes text of it: `observation: module:function`"
            ) from None


def _collect_rest(guard: Guard[Any], course: Course) -> None:
    """Take in the rewards of agents that were not asked again before the game was stopped."""
    for agent in guard.env.agents:
        reward = guard.env._cumulative_rewards.get(agent, 0.0)
        course.earn(agent, guard.reward(f"step() for '{agent}'", reward))


def _stepped(action: Any, env: Any) -> None:
    env.step(action)
