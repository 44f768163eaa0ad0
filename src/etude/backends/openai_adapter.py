"""Training at OpenAI: `_type: openai`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.backends.capabilities import Capabilities
from etude.backends.openai_config import OpenAiAdapterConfig
from etude.backends.openai_connection import connect, run_key, trained_model
from etude.backends.openai_jobs import OpenAiJobs
from etude.backends.openai_prices import trained_tokens, usd_for
from etude.backends.openai_rows import reinforcement_row, texts_of
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.job import TrainingJobRef
from etude.core.skipped import Skipped
from etude.core.trajectory import Method, TrajectoryCollection

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from etude.config.builder import Builder

Examples = Callable[[], Awaitable[Mapping[str, Example]]]
"""The examples of the run by id, read when they are needed."""


async def _no_examples() -> Mapping[str, Example]:
    return {}


class OpenAiAdapter(OpenAiJobs):
    """Jobs at OpenAI: supervised and DPO; and its reinforcement fine-tuning, where a grader is given."""

    adapter_config: OpenAiAdapterConfig

    def __init__(
        self,
        adapter_config: OpenAiAdapterConfig,
        client: AsyncOpenAI,
        model: str,
        log: Path | None = None,
        examples: Examples = _no_examples,
        run_key: str | None = None,
    ) -> None:
        """See OpenAiJobs; `examples` are what a grader compares answers with."""
        super().__init__(adapter_config, client, model, log, run_key)
        self._base_model = model
        self._read_examples = examples
        self._examples: Mapping[str, Example] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Ask the API whether it is there and takes the key. Raises BackendError with what it says."""
        await super().initialize(run_config)
        await self.check()

    def capabilities(self) -> Capabilities:
        """`grpo` is there with a grader only: OpenAI takes no rewards that somebody else gave."""
        methods: frozenset[Method] = frozenset({"supervised", "dpo"})
        if self.adapter_config.reinforcement is not None:
            methods |= {"grpo"}
        return Capabilities(methods=methods, options=frozenset({"beta"}), versions=True, from_base=True)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """See `TrainerAdapter.submit`. Raises RequestError for a job that would cost more than `max_usd`."""
        if trajectories.method == "grpo" and not self._examples:
            self._examples = await self._read_examples()
        return await super().submit(trajectories)

    def rows(self, trajectories: TrajectoryCollection) -> list[dict[str, Any]]:
        """See OpenAiJobs; of GRPO, the prompt of each group with what its grader needs."""
        if trajectories.method != "grpo":
            return super().rows(trajectories)
        groups = [group for group in trajectories.trajectories if group]
        names = [str(group[0].example_id) for group in groups]
        return [
            reinforcement_row(group, self._examples.get(name))
            for group, name in zip(groups, names, strict=True)
        ]

    def accept(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The estimated price. Raises RequestError when it is over the limit."""
        config = self.adapter_config
        tokens = trained_tokens([text for row in rows for text in texts_of(row)], config.n_epochs)
        usd = usd_for(tokens, config.usd_per_million_tokens, self._base_model)
        if config.max_usd is not None and usd is not None and usd > config.max_usd:
            raise RequestError(
                f"the job would train about {tokens:,} tokens for about ${usd:.2f}, and max_usd is "
                f"${config.max_usd:.2f}. Nothing was uploaded; raise max_usd, or collect less per epoch"
            )
        return {"estimated_tokens": tokens, "estimated_usd": usd}

    def method_of(self, method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
        """See OpenAiJobs; `grpo` is OpenAI's `reinforcement`."""
        settings = self.adapter_config.reinforcement
        if method != "grpo" or settings is None:
            return super().method_of(method, options)
        parameters = self.hyperparameters(method, options) | {
            "reasoning_effort": settings.reasoning_effort,
            "compute_multiplier": settings.compute_multiplier,
        }
        return {
            "type": "reinforcement",
            "reinforcement": {"grader": settings.grader, "hyperparameters": parameters},
        }


@register_trainer_adapter(config_type=OpenAiAdapterConfig)
async def openai(config: OpenAiAdapterConfig, builder: Builder) -> AsyncIterator[OpenAiAdapter]:
    """The adapter of the run's target model. Raises CapabilityError when that is not OpenAI's."""
    llm = trained_model(builder, "openai")

    async def examples() -> Mapping[str, Example]:
        dataset = await builder.get_dataset(builder.config.finetuning.run_configuration.dataset)
        return {example.id: example for example in dataset.examples()}

    log = None if builder.run is None else builder.run.path / "openai_jobs.jsonl"
    client = connect(config, llm, needs_key=True)
    try:
        yield OpenAiAdapter(config, client, llm.model_name, log, examples, await run_key(builder))
    finally:
        await client.close()
