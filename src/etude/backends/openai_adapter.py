"""Training at OpenAI through its fine-tuning API: `_type: openai`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.backends.capabilities import Capabilities
from etude.backends.openai_api import JobsConfig, connect, run_key, trained_model
from etude.backends.openai_jobs import OpenAiJobs
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.conversion import TrajectoryCollection, item_message
from etude.core.episode import Example
from etude.core.errors import CapabilityError
from etude.core.job import Skipped, TrainingJobRef
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Method, Trajectory

if TYPE_CHECKING:
    from etude.config.builder import Builder


class OpenAiAdapterConfig(JobsConfig, name="openai"):
    """Train at OpenAI, through its fine-tuning API."""

    min_rows: int = Field(default=10, ge=1)
    """The fewest rows that a job trains on. The API refuses files with fewer."""
    reinforcement: dict[str, Any] | None = None
    """OpenAI's reinforcement fine-tuning for the method `grpo`, as its API takes it: a `grader`, and optional
    `hyperparameters`. OpenAI samples and grades. A row has `item.expected` and `item.inputs`."""


AUTO_EPOCHS = 3
"""The number of epochs assumed for `auto`: OpenAI's choice for data sets of a few hundred rows."""

_FEWEST_BYTES_PER_TOKEN = 3
"""For the upper bound of a job's tokens."""
_FRAME_TOKENS = 4
"""Tokens around each message."""

Examples = Callable[[], Awaitable[Mapping[str, Example]]]
"""Reads the run's examples by id."""


class OpenAiAdapter(OpenAiJobs):
    """Jobs at OpenAI: supervised, DPO, and reinforcement fine-tuning if a grader is given."""

    adapter_config: OpenAiAdapterConfig

    read_examples: Examples | None = None
    """Reads the examples whose expected answers a grader compares with."""
    _examples: Mapping[str, Example] = MappingProxyType({})

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        await self.check()

    def capabilities(self) -> Capabilities:
        """Return the capabilities. `grpo` needs a grader, because OpenAI accepts no external rewards."""
        methods: frozenset[Method] = frozenset({"supervised", "dpo"})
        if self.adapter_config.reinforcement is not None:
            methods |= {"grpo"}
        return Capabilities(methods=methods, options=frozenset({"beta"}), versions=True, from_base=True)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Upload the rows and create a job."""
        if trajectories.method == "grpo" and not self._examples and self.read_examples is not None:
            self._examples = await self.read_examples()
        return await super().submit(trajectories)

    def rows(self, trajectories: TrajectoryCollection) -> list[dict[str, Any]]:
        """Return the rows of the training file. For GRPO: each group's prompt, with data for its grader."""
        if trajectories.method != "grpo":
            return super().rows(trajectories)
        return [
            reinforcement_row(group, self._examples.get(str(group[0].example_id)))
            for group in trajectories.trajectories
            if group
        ]

    def choose_method(self, method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job's `method`. `grpo` is OpenAI's `reinforcement`."""
        settings = self.adapter_config.reinforcement
        if method != "grpo" or settings is None:
            return super().choose_method(method, options)
        parameters = self.hyperparameters(method, options) | settings.get("hyperparameters", {})
        return {"type": "reinforcement", "reinforcement": {**settings, "hyperparameters": parameters}}

    def charged_tokens(self, trajectories: TrajectoryCollection) -> int | None:
        """Return an upper bound: 3 bytes per token. None for reinforcement, charged by the hour."""
        if trajectories.method == "grpo":
            return None
        texts = [text.encode() for row in self.rows(trajectories) for text in read_texts(row)]
        tokens = sum(len(text) / _FEWEST_BYTES_PER_TOKEN + _FRAME_TOKENS for text in texts)
        epochs = self._hyperparameters.num_epochs or self.adapter_config.n_epochs
        return round((AUTO_EPOCHS if epochs == "auto" else epochs) * tokens)


@register_trainer_adapter(config_type=OpenAiAdapterConfig)
async def openai(config: OpenAiAdapterConfig, builder: Builder) -> AsyncIterator[OpenAiAdapter]:
    """Yield the adapter of the run's target model. Raises CapabilityError if it is not OpenAI's."""
    llm = trained_model(builder, "openai")

    async def examples() -> Mapping[str, Example]:
        dataset = await builder.get_dataset(builder.config.finetuning.run_configuration.dataset)
        return {example.id: example for example in dataset.examples()}

    log = None if builder.run is None else builder.run.path / "openai_jobs.jsonl"
    client = connect(config, llm, needs_key=True)
    try:
        adapter = OpenAiAdapter(config, client, llm.model_name, log, await run_key(builder))
        adapter.read_examples = examples
        yield adapter
    finally:
        await client.close()


def reinforcement_row(group: Sequence[Trajectory], example: Example | None) -> dict[str, Any]:
    """Return a group's prompt for OpenAI to answer: `{"messages": […], "expected": …, "inputs": {…}}`.

    Raises CapabilityError unless the episode is one answer to one user message.
    """
    items = [item for item in group[0].episode if isinstance(item, EpisodeItem)]
    sampled = [index for index, item in enumerate(items) if item.is_sampled]
    if len(sampled) != 1 or items[sampled[0] - 1].role is not EpisodeItemRole.USER:
        raise CapabilityError(
            "OpenAI's reinforcement fine-tuning answers a user's message once, and an episode has "
            f"{len(sampled)} answers; train agents with tools or several turns with another adapter"
        )
    row: dict[str, Any] = {"messages": [item_message(item) for item in items[: sampled[0]]]}
    if example is not None:
        row |= {"expected": example.expected, "inputs": dict(example.inputs)}
    return row


def read_texts(value: Any) -> Iterator[str]:
    """Yield all texts of a row that a model reads: contents, tool calls and tool results."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("role", "id", "type", "tool_call_id"):
                yield from read_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from read_texts(inner)
