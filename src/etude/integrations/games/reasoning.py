"""The workflow for reasoning-gym's tasks: `workflow: {_type: reasoning_gym, task: gcd}`."""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import DatasetConfig, LlmRef, Supplies
from etude.config.registry import register_dataset, register_workflow
from etude.core.episode import Example
from etude.core.errors import DatasetError, EpisodeError, RequestError
from etude.core.keys import content_hash, fold
from etude.integrations.games.gym_textarena import SizesConfig, call_with_timeout, unknown, whole_number
from etude.rollout.datasets import dataset
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

_ALL = 2**20
"""The size of a reasoning-gym dataset. It generates each entry on access."""
_TRIES = 200
"""The maximum number of entries to generate for each requested example."""
_HELD_OUT = 4
"""One in this many questions is held out, by its content hash."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymConfig(SizesConfig, name="reasoning_gym"):
    """One question and one answer, which the task's `score_answer` scores. The answer is the text in the last
    `<answer>…</answer>`, or the whole reply without such a tag."""

    package = "reasoning_gym"
    extra = "reasoning-gym"

    task: str
    """The task, such as `gcd`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's options, such as `{max_value: 20}`."""
    prompt: str = "{question}"
    """The prompt for the model. `{question}` stands for the question."""
    model: LlmRef | None = None
    """The model that answers. Default: the trained model."""

    def supplies(self) -> Supplies:
        """Return the questions, and the evaluator for their scores."""
        kind = {"_type": "reasoning_gym", "task": self.task, "config": self.config}
        reward = {"reward": {"_type": "measured", "name": "reward"}}
        return Supplies(**self.datasets(kind), evaluators=reward, reward="reward")


class ReasoningGymDatasetConfig(DatasetConfig, name="reasoning_gym"):
    """The distinct questions of a reasoning-gym task. One in four is held out for validation, whatever the
    seed is, so that no question is in both splits."""

    task: str
    """The task, such as `gcd`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's options."""
    size: int = Field(default=256, ge=1)
    """The number of examples."""
    seed: int = Field(default=0, ge=0)
    """The seed of the questions. Another seed gives other questions."""
    split: Literal["train", "validation"] = "train"
    """The split: `train` or `validation`."""

    def examples(self) -> list[Example]:
        """Generate the examples. Raises DatasetError if the task has too few different questions."""
        entries, made = make_dataset(self.task, self.config, self.seed), dict[str, Example]()
        for index in range(min(_ALL, self.size * _TRIES)):
            try:
                entry = entries[index]
            except Exception as error:
                raise DatasetError(f"reasoning-gym's task '{self.task}' failed: {error}") from error
            question = str(entry["question"])
            held_out = int(content_hash(question), 16) % _HELD_OUT == 0
            if held_out == (self.split == "validation") and question not in made:
                inputs = {"question": question, "seed": self.seed, "index": index}
                made[question] = Example(f"{self.task}-{self.seed}-{index}", inputs, entry["answer"])
            if len(made) == self.size:
                return list(made.values())
        raise DatasetError(
            f"reasoning-gym's task '{self.task}' with {dict(self.config)} has {len(made)} different "
            f"questions for {self.split}, and {self.size} are needed; take fewer, or options with more"
        )


def make_dataset(task: str, options: Mapping[str, Any], seed: int) -> Any:
    """Return a task's dataset. Raises RequestError for an unknown task and for options that do not fit."""
    library = ReasoningGymConfig.library()
    known = ReasoningGymConfig.library("reasoning_gym.factory").DATASETS
    if task not in known:
        raise unknown("task of reasoning-gym's", task, known)
    try:
        return library.create_dataset(task, **{"size": _ALL, **options, "seed": fold(seed, task) % 2**31})
    except (TypeError, ValueError, AssertionError) as error:
        raise RequestError(f"reasoning-gym's task '{task}' does not take {dict(options)}: {error}") from error


register_dataset(config_type=ReasoningGymDatasetConfig)(dataset)


@register_workflow(config_type=ReasoningGymConfig)
async def reasoning_gym(config: ReasoningGymConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build the workflow. Raises MissingExtraError without reasoning-gym, RequestError as `make_dataset`."""
    name = f"reasoning-gym's {config.task}"
    await call_with_timeout(name, lambda: make_dataset(config.task, config.config, 0))
    yield Workflow(config.task, ReasoningTask(config))


@dataclass(frozen=True)
class ReasoningTask:
    """The workflow: asks one question, and records the score of the answer."""

    config: ReasoningGymConfig
    _entries: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache of the datasets, by seed."""

    async def __call__(self, example: Example, episode: Episode) -> str:
        """Ask the question, record the score, and return the answer."""
        name = f"reasoning-gym's {self.config.task}"
        entries, entry = await call_with_timeout(name, lambda: self._entry(example))
        prompt = self.config.prompt.replace("{question}", str(entry["question"]))
        reply = await episode.chat([{"role": "user", "content": prompt}], model=self.config.model)
        tagged = _TAG.findall(reply.text)
        answer = (tagged[-1] if tagged else reply.text).strip()
        score = await call_with_timeout(
            f"{name}: score_answer()", lambda: entries.score_answer(answer=answer, entry=entry)
        )
        episode.score("reward", score)
        return answer

    def _entry(self, example: Example) -> tuple[Any, Any]:
        """Return an example's dataset and entry. Raises EpisodeError if its question is not the entry's."""
        what = f"the task '{self.config.task}' of reasoning-gym, which makes and scores its own questions,"
        seed, index = (whole_number(example, name, what) for name in ("seed", "index"))
        entries = self._entries.get(seed) or make_dataset(self.config.task, self.config.config, seed)
        self._entries[seed] = entries
        entry = entries[index]
        if example.inputs.get("question", entry["question"]) != entry["question"]:
            raise EpisodeError(
                f"example {example.id!r} has another 'question' than {what} has at seed {seed} and index "
                f"{index}, whose answer would be the measure; leave the column out, or take its own dataset"
            )
        return entries, entry
