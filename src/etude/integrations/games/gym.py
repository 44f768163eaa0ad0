"""Gymnasium's environments as a workflow: `workflow: {_type: gym, id: FrozenLake-v1}`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field, FiniteFloat

from etude.config.import_path import is_import_path
from etude.config.references import LlmRef
from etude.config.registry import register_workflow
from etude.config.supplies import Starter, Supplies
from etude.core.data_model import kind_of
from etude.core.episode import WORKFLOW
from etude.core.example import Example
from etude.integrations.games.actions import Reader, reader_of
from etude.integrations.games.config import GameConfig, own_function, own_maker, unknown
from etude.integrations.games.guard import Guard, guarded
from etude.integrations.games.observations import text_of_observation
from etude.integrations.games.turns import Course, Player, beginning_of
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder


class GymConfig(GameConfig, name="gym"):
    """A game of Gymnasium's, or of your own with the same interface. The reward is the sum of its rewards."""

    package = "gymnasium"
    extra = "gym"

    id: str
    """A registered id such as `FrozenLake-v1`, or `module:name` of a class or function that makes one."""
    observation: str | None = None
    """`module:function` that makes text of an observation. Left out: text, numbers and small arrays are shown
    as they are, and where the environment renders as `ansi`, that is shown."""
    action: list[str] | dict[str, Any] | str | None = None
    """The words of actions 0, 1, …; words with their actions; or `module:function` of the answer's text,
    which raises ValueError for what is none. Left out: numbers of a discrete space, or the text itself."""
    invalid_penalty: FiniteFloat = Field(default=0.0, ge=0)
    """Taken from the reward for each answer that is no action; the model is told, and asked again."""
    step_rewards: bool = False
    """Credit each answer with what came after it, in place of the whole game's reward."""
    model: LlmRef | None = None
    """The model that plays; left out: the trained one."""

    def supplies(self) -> Supplies:
        """Seeds, the reward, turns and invalid answers."""
        return self.measures({WORKFLOW: self.model})

    @classmethod
    def starter(cls, task: str | None) -> Starter:
        """A frozen lake, or another game."""
        prompt = "Reach G from S over F, and never step on H. Answer with left, down, right or up."
        lake = {
            "id": "FrozenLake-v1",
            "arguments": {"is_slippery": False, "render_mode": "ansi"},
            "prompt": prompt,
            "action": ["left", "down", "right", "up"],
            "max_turns": 12,
        }
        return Starter({"workflow": {"_type": "gym", **(lake if task is None else {"id": task})}})


@register_workflow(config_type=GymConfig)
async def gym(config: GymConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises MissingExtraError without gymnasium, RequestError for an id that it does not know."""
    make = maker_of(config)
    game = GymGame(config, make, own_function(config.observation, "observation"))
    yield Workflow(config.id, game, config.timeout)


def maker_of(config: GymConfig) -> Callable[[], Any]:
    """A function that makes the environment. Raises RequestError for one that there is not."""
    gymnasium = config.library()
    if is_import_path(config.id):
        return own_maker(config.id, config.arguments)
    names = {*gymnasium.registry, *(name.rpartition("-v")[0] for name in gymnasium.registry)}
    if config.id not in names:
        raise unknown("environment of Gymnasium's", config.id, names)
    # Its checker only prints warnings; what an episode needs is checked here, and raised.
    return lambda: gymnasium.make(config.id, disable_env_checker=True, **config.arguments)


@dataclass(frozen=True)
class GymGame:
    """The workflow: plays one game for each example, whose `seed` and `options` go to `reset`."""

    config: GymConfig
    make: Callable[[], Any]
    observation: Callable[..., Any] | None = None

    async def __call__(self, example: Example, episode: Episode) -> dict[str, Any]:
        """Play until it is over, or `max_turns`. Raises EnvironmentFailed."""
        config = self.config
        player = Player(WORKFLOW, config.model, config.prompt, config.history)
        course = Course(rewards={WORKFLOW: 0.0})
        seed, options = beginning_of(example, config.id)
        async with guarded(config.id, self.make, config.call_timeout) as guard:
            read = reader_of(config.action, getattr(guard.env, "action_space", None))
            shown, over = await guard.call("reset()", lambda env: self._reset(guard, seed, options)), False
            while not over and course.turns < config.max_turns:
                text = await player.answer(episode, shown)
                course.turns += 1
                shown, over = await self._step(guard, read, text, course, episode)
        if config.step_rewards:
            episode.step_reward(-course.rewards[WORKFLOW], "part of the reward already")
        return course.record(episode, config.invalid_penalty)

    async def _step(
        self, guard: Guard[Any], read: Reader, text: str, course: Course, episode: Episode
    ) -> tuple[str, bool]:
        """The text that the model is shown next, and whether the game is over."""
        try:
            action = read(text)
        except ValueError as error:
            course.invalid[WORKFLOW] += 1
            return f"That is no action: {error}", False
        shown, reward, over = await guard.call("step()", lambda env: self._stepped(guard, action))
        earned = guard.reward("step()", reward)
        course.earn(WORKFLOW, earned)
        if self.config.step_rewards:
            episode.step_reward(earned)
        return shown, over

    def _reset(self, guard: Guard[Any], seed: Any, options: Any) -> str:
        outcome = guard.env.reset(seed=seed, options=options)
        if not isinstance(outcome, tuple) or len(outcome) != 2:
            raise guard.problem(f"reset() returned {kind_of(outcome)}; return (observation, info)")
        return self._shown(guard, outcome[0], "reset()")

    def _stepped(self, guard: Guard[Any], action: Any) -> tuple[str, Any, bool]:
        outcome = guard.env.step(action)
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            values = "(observation, reward, terminated, truncated, info)"
            raise guard.problem(f"step() returned {kind_of(outcome)}; return {values}")
        observation, reward, terminated, truncated, _ = outcome
        return self._shown(guard, observation, "step()"), reward, bool(terminated or truncated)

    def _shown(self, guard: Guard[Any], observation: Any, call: str) -> str:
        """The text of an observation; made in the environment's thread, which may have to render it."""
        if self.observation is not None:
            text = self.observation(observation, guard.env)
            if not isinstance(text, str):
                raise guard.problem(f"'{self.config.observation}' gave {kind_of(text)}; return text")
            return text
        if getattr(guard.env, "render_mode", None) == "ansi" and not isinstance(observation, str):
            return str(guard.env.render())
        try:
            return text_of_observation(observation)
        except ValueError as error:
            raise guard.problem(
                f"the observation of {call} is {error}, which text does not show; name a function of "
                "(observation, env) that makes text of it: `observation: module:function`"
            ) from None
