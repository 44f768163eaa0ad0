"""Opening the runners that a config asks for."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from etude.budget.ledger import Ledger
from etude.config.builder import Builder
from etude.config.schema import Config
from etude.core.interfaces import Engine, Portable, bare
from etude.rewards.scorer import Scorer
from etude.runners.assembly import build_evaluators
from etude.runners.head import Head
from etude.runners.pool import RunnerPool
from etude.runners.process import Cluster, Launcher, LocalLauncher
from etude.runners.shipping import shipped
from etude.store.run_folder import RunFolder

LOGS = "runners"
"""The folder of their logs in a run folder."""

_GRACE_SECONDS = 10.0
"""In which a runner may stop by itself what blocks its event loop for as long as an episode may take."""


@asynccontextmanager
async def open_runner(
    builder: Builder,
    run: RunFolder,
    models: Mapping[str, Engine],
    given: Mapping[str, Engine],
    ledger: Ledger,
) -> AsyncIterator[RunnerPool | None]:
    """The runners that the config asks for, started when an episode needs them; None where it asks for none.

    `given` are those of `models` that are not the config's; what is spent on all is counted in `ledger`.
    Raises RequestError for a config that cannot be sent to other processes.
    """
    config, general = builder.config, builder.config.eval.general
    cluster: Cluster | None = await builder.get_cluster()
    launcher = None if cluster is None else cluster.runners
    if launcher is None and general.isolation != "process":
        yield None
        return
    workflow = await builder.get_workflow()
    seconds = general.timeout if workflow.timeout is None else workflow.timeout
    at_head = [name for name in models if name in given or not isinstance(bare(models[name]), Portable)]
    patience = seconds + _GRACE_SECONDS
    head = Head(run.journal, models, frozenset(at_head), patience, general.runner_memory, ledger)
    scorer = Scorer(
        await build_evaluators(builder),
        run.journal,
        timeout=general.timeout,
        max_concurrency=general.max_concurrency,
    )
    runners = number_of_runners(config)
    each = -(-general.max_concurrency // runners)
    where: Launcher = launcher or LocalLauncher(run.path / LOGS)
    sent = shipped(config, over_network=bool(where.address), at_head=at_head)
    build: dict[str, Any] = {"config": sent, "run": str(run.path), "models": [*models], "at_head": at_head}
    build["bounds_calls"] = ledger.bounds_calls
    async with RunnerPool(head, where, scorer, build, runners=runners, episodes_each=each) as pool:
        yield pool


def number_of_runners(config: Config) -> int:
    """As many as asked for; else one for each core, and none without an episode."""
    general = config.eval.general
    wanted = (config.cluster and config.cluster.runners) or general.runners
    return min(wanted or os.cpu_count() or 1, general.max_concurrency)
