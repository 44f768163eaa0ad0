"""The parts of an environment that need no verifiers: its scores, its failures, what its block supplies."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from etude.core.episode import Example
from etude.core.errors import DatasetError, EngineAway, EnvironmentAway, EpisodeError
from etude.integrations.verifiers.components import VerifiersWorkflowConfig
from etude.integrations.verifiers.environment import Score, Tasks, episode_error, find_scores
from etude.rollout.collector import make_failure as failure_of_episode


def ran(agent: str, rewards: dict[str, tuple[float, float]], metrics: dict[str, Any] | None = None) -> Any:
    """A run of an agent as verifiers has it: rewards with their weights."""
    given = {name: SimpleNamespace(score=s, value=s * weight) for name, (s, weight) in rewards.items()}
    return SimpleNamespace(agent=SimpleNamespace(name=agent), rewards=given, metrics=metrics or {})


def test_the_reward_is_the_weighted_sum_and_one_agent_has_no_scores_apart():
    run = ran("agent", {"right": (1.0, 1.0), "short": (0.5, 2.0)}, {"words": 3.0, "left_out": None})
    assert find_scores([run]) == [
        Score("words", 3.0, None, 1),
        Score("right", 1.0, None, 1),
        Score("short", 0.5, None, 1),
        Score("reward", 2.0, None, 1),
    ]


def test_several_runs_give_their_mean_and_agents_without_rewards_take_no_part():
    right, wrong = (ran("solver", {"right": (score, 1.0)}) for score in (1.0, 0.0))
    runs = [right, wrong, ran("user", {}, {"turns": 4.0})]
    by_name = {(score.name, score.agent): (score.value, score.runs) for score in find_scores(runs)}
    assert by_name == {
        ("right", None): (0.5, 2),
        ("reward", None): (0.5, 2),
        ("turns", None): (4.0, 1),
        ("right", "solver"): (0.5, 2),
        ("reward", "solver"): (0.5, 2),
        ("turns", "user"): (4.0, 1),
    }


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_an_error_and_not_zero(value: float):
    with pytest.raises(EpisodeError, match=r"'right' of 'agent' is (nan|inf);"):
        find_scores([ran("agent", {"right": (value, 1.0)})])


def bad_episode(agent: str | None = None, **error: Any) -> Any:
    """An unfinished episode, in which an agent or the environment failed, or nothing says why."""
    errors = [SimpleNamespace(traceback=None, **error)] if error else []
    failed = [SimpleNamespace(agent=SimpleNamespace(name=agent), ok=False, errors=errors)] if agent else []
    return SimpleNamespace(traces=failed, errors=[] if agent else errors)


def test_infrastructure_is_nobodys_failure_and_a_models_error_the_models():
    away = episode_error("my_env", "t", bad_episode("solver", type="SandboxError", message="no docker"), [])
    assert isinstance(away, EnvironmentAway) and "no docker" in str(away)
    assert failure_of_episode(away).origin == "environment"
    cause = EngineAway("no memory")
    call = episode_error("my_env", "t", bad_episode(type="ProviderError", message="500"), [cause])
    assert call.__cause__ is cause and "no memory" in str(call)
    found = failure_of_episode(call)
    assert (found.kind, found.origin) == ("call_failed", "model")
    assert "not say why" in str(episode_error("my_env", "t", bad_episode(), []))
    raised = bad_episode("solver", type="TaskError", message="@reward good: ZeroDivisionError: no luck")
    own = episode_error("my_env", "t", raised, [cause])
    assert own.__cause__ is None and "no luck" in str(own)
    assert failure_of_episode(own).origin == "agent"


def config(**fields: Any) -> VerifiersWorkflowConfig:
    return VerifiersWorkflowConfig(environment="not_installed_env", **fields)


def test_dataset_and_rewards_follow_from_one_line():
    supplies = config(size=5).supplies()
    assert supplies.dataset == {"_type": "verifiers", "size": 5, "split": "train"}
    assert supplies.validation == {"_type": "verifiers", "size": 5, "split": "validation"}
    assert supplies.evaluators == {"reward": {"_type": "measured", "name": "reward"}}
    assert supplies.reward == "reward"
    assert config(held_out=0).supplies().validation is None


def test_each_model_may_have_the_reward_of_its_role():
    models = {"proposer": "alice", "checker": "bob", "judge": "carol", "critic": "carol"}
    supplies = config(models=models, own_rewards=True, scores=["turns"]).supplies()
    assert supplies.reward_of_model == {"alice": "proposer_reward", "bob": "checker_reward"}
    own = {"_type": "measured", "name": "reward", "agent": "proposer"}
    assert supplies.evaluators["proposer_reward"] == own
    assert list(supplies.evaluators) == ["reward", "turns", "proposer_reward", "checker_reward"]
    assert config(models=models).supplies().reward_of_model == {}


def test_a_quarter_is_held_out_and_endless_tasks_are_not_all_made():
    made: list[int] = []

    class Endless:
        bounded = False
        config = SimpleNamespace(id="endless")

        def __iter__(self):
            number = 0
            while True:
                made.append(number)
                data = SimpleNamespace(model_dump=lambda number=number, **_: {"idx": number, "answer": "a"})
                yield SimpleNamespace(key=f"task-{number}", data=data)
                number += 1

    tasks = Tasks(Endless())
    train, held_out = (tasks.examples(split, 12, 4) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (12, 4)
    assert len({each.id for each in (*train, *held_out)}) == 16
    assert train[0].inputs == {} and train[0].expected == "a"
    assert max(made) == 15


def test_an_example_is_the_task_of_its_id_unless_it_says_something_else():
    class Task:
        def __init__(self, data: Any, config: Any = None) -> None:
            self.data, self.key = data, "0"

        @staticmethod
        def data_type() -> Any:
            return Data

    class Data(BaseModel):
        question: str = ""
        answer: str = ""

    class Taskset:
        config = SimpleNamespace(id="mine", task=None)

        @staticmethod
        def task_type() -> Any:
            return Task

    own = Task(Data(question="q", answer="a"))
    tasks = Tasks(Taskset(), {"0": own})
    same = [Example("0"), Example("0", {"question": "q"}), Example("0", {"question": "q"}, "a")]
    assert all(tasks.find(example) is own for example in same)
    assert tasks.find(Example("0", {"question": "another"}, "b")).data == Data(question="another", answer="b")
    assert tasks.find(Example("0", {"question": "q"}, "b")).data == Data(question="q", answer="b")
    with pytest.raises(DatasetError, match=r"'1' .*taskset 'mine', .*columns"):
        tasks.find(Example("1", {"question": 5}))
