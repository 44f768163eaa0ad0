"""The runtime: the parts of one run, assembled from its config."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from etude.config.builder import Builder
from etude.config.finetuning import TargetConfig
from etude.config.schema import Config
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.core.history import History
from etude.core.interfaces import Engine, Progress, ProgressSums
from etude.core.json_text import require_limits
from etude.core.keys import content_hash
from etude.engines.ledger import Ledger, within_budget
from etude.engines.local import LocalLlmConfig
from etude.engines.meter import MeteredEngine
from etude.models.source import keep_base
from etude.processes.pool import Cluster, open_runner
from etude.processes.shipping import build_collector, build_evaluators, target_model
from etude.processes.status import Parts, Watchdog, publish_status
from etude.rollout.evaluation import Evaluation, JournalledEvaluation
from etude.store.backup import back_up
from etude.store.episodes import encode_example, example_digest, stored_episodes
from etude.store.run_folder import EXAMPLES_STEP, RunFolder

Report = Callable[[History, Path, bool], None]
"""Writes the metrics files of a history into a folder. The flag is True when the run is over."""


@dataclass(frozen=True)
class Runtime:
    """All parts that builders and trainers work with."""

    run: RunFolder
    builder: Builder
    """Builds the parts, and has the config."""
    evaluation: Evaluation
    """Runs and scores episodes. During training, each call is a separate collection."""
    examples: Sequence[Example]
    engines: Mapping[str, Engine]
    """The engines by their names in `llms`."""
    target_model: str
    """The entry of `llms` to train; the first one if there are several."""
    target: str | None = None
    """The name of this runtime's target, if several models are trained in one run."""
    target_config: TargetConfig = field(default_factory=TargetConfig)
    """The schedule of the target."""
    validation_examples: Sequence[Example] = ()
    """Held-out examples; empty without validation."""
    progress: Progress = field(default_factory=Progress)
    report: Report | None = None
    """Called after every epoch and validation, once it is journalled."""
    watchdog: Watchdog | None = None
    """Notices when the run makes no progress."""
    ledger: Ledger | None = None
    """Counts the run's usage, and stops the run at a limit of its budget."""


@asynccontextmanager
async def open_runtime(
    config: Config,
    run: RunFolder,
    *,
    progress: Progress | None = None,
    report: Report | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> AsyncIterator[Runtime]:
    """Build the agent, its models, evaluators and examples, and close them at the end.

    `engines` replace entries of `llms` with the same names, and are not closed. The run is backed up while it
    is open, and once more at the end. Raises RequestError or DatasetError for parts that cannot be built.
    """
    progress = counts = ProgressSums(display=progress)
    async with AsyncExitStack() as exits:
        # Opened first and closed last, so that the final backup has everything the other parts write.
        await exits.enter_async_context(back_up(config.storage, run, progress))
        ledger = Ledger(run.journal, config.llms, config.budget)
        meter = partial(MeteredEngine, account=ledger, llms=config.llms)
        builder = await exits.enter_async_context(Builder(config, run, wrap_llm=meter))
        given = {name: meter(name, engine) for name, engine in (engines or {}).items()}
        models = {name: given.get(name) or await builder.get_llm(name) for name in config.llms} | given
        runner = await exits.enter_async_context(open_runner(builder, run, models, given, ledger))
        settings = config.finetuning.run_configuration
        cluster: Cluster | None = await builder.get_cluster()
        collector = await build_collector(builder, models, run.journal, runner)
        parts = Parts(run, counts, collector, runner, models, cluster)
        await exits.enter_async_context(publish_status(parts))
        watchdog = Watchdog(parts, config.stall)
        await exits.enter_async_context(watchdog.watching())
        evaluation = JournalledEvaluation(
            collector,
            await build_evaluators(builder),
            run.journal,
            error_budget=config.finetuning.error_budget,
            timeout=config.eval.general.timeout,
            max_concurrency=config.eval.general.max_concurrency,
        )
        examples = (await builder.get_dataset(settings.dataset)).examples()
        held_out = settings.validation_dataset
        validation = (await builder.get_dataset(held_out)).examples() if held_out is not None else []
        await _keep_examples(run, [*examples, *validation], progress)
        for name, llm in config.llms.items():
            if isinstance(llm, LocalLlmConfig) and llm.model is not None and name not in given:
                await keep_base(run.journal, name, str(llm.model))
        await exits.enter_async_context(within_budget(ledger, progress))
        yield Runtime(
            run=run,
            builder=builder,
            evaluation=evaluation,
            examples=examples,
            engines=models,
            target_model=target_model(config.finetuning, models),
            validation_examples=validation,
            progress=progress,
            report=report,
            watchdog=watchdog,
            ledger=ledger,
        )


async def _keep_examples(run: RunFolder, examples: Sequence[Example], progress: Progress) -> None:
    """Record a digest of the examples. Raises RequestError if episodes were run on others."""
    known = set[str]()
    for example in examples:
        try:
            encoded = encode_example(example)
            require_limits([encoded["inputs"], encoded["expected"]], 0)
            known.add(example_digest(encoded))
        except (ValueError, RecursionError) as error:
            is_deep = isinstance(error, RecursionError)
            reason = "it contains itself, or is nested too deep" if is_deep else error
            raise RequestError(f"example '{example.id}' cannot be stored as JSON: {reason}") from error
    before, now = run.journal.get(EXAMPLES_STEP), content_hash(sorted(known))
    if before == now:
        return
    if before is not None:
        for episode, stored in stored_episodes(run.journal):
            example = stored["example"]
            if stored["failure"] is None and example_digest(example) not in known:
                is_there = any(each.id == example["id"] for each in examples)
                raise RequestError(
                    f"example '{example['id']}' {'has changed' if is_there else 'is missing'} since episode "
                    f"{episode} of run {run.name} was run on it. Give the same examples again, or start a "
                    "new run with these"
                )
        text = "the examples are not quite those that the run began with: it goes on with the new ones"
        progress.message(text, warning=True)
    await run.journal.put(EXAMPLES_STEP, now)
