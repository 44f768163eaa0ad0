"""The warm-up of a run: supervised jobs on transcripts, until its reward or loss is good enough."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from etude.backends.trainer_adapter import JobHyperparameters
from etude.config.finetuning import Transcript, WarmUpConfig, read_transcripts
from etude.core.data_model import finite
from etude.core.errors import TrainingError
from etude.core.history import Score, WarmUpEntry, WarmUpJob
from etude.core.job import Skipped, TrainingJobStatus
from etude.core.keys import shuffled_forever
from etude.core.records import JobDropped
from etude.core.sample import Sample, TrajectoryCollection, Turn
from etude.loop.bookkeeper import Bookkeeper, record_failure
from etude.loop.metrics import validation_metrics

_JOB_TIMEOUT, _POLL = 86400.0, 5.0


async def run_warm_up(books: Bookkeeper) -> None:
    """Run the rest of a model's warm-up, if there is one. Training begins with the resulting weights.

    The steps between two measurements are one job, whose transcripts follow from the seed. It is submitted,
    followed, adopted and journalled like an epoch's job. Raises TrainingError when the warm-up does not reach
    its goal, DatasetError for transcripts that cannot be read.
    """
    warm_up, log, model = books.config.warm_up, books.log, books.model
    if warm_up is None or books.history.warm_up is not None:
        return
    jobs, settings, started = log.state.warm_up_jobs, model.settings, time.monotonic()
    books.runtime.progress.phase("warming up")
    model.settings = replace(settings, freeze_agent=False, fine_tune_from_scratch=False)
    try:
        if jobs and (version := jobs[-1].version) is not None:
            await model.adapter.restore(version)
            await model.sample_from(version)
        if not (jobs and jobs[-1].is_over):
            await _imitate(books, warm_up)
    finally:
        model.settings = settings
        model.use_hyperparameters(JobHyperparameters())
    last = jobs[-1]
    entry = WarmUpEntry(
        steps=sum(job.steps for job in jobs),
        jobs=len(jobs),
        seconds=time.monotonic() - started,
        metrics=last.metrics,
        version=last.version,
    )
    if entry.version is not None:
        await model.adapter.begin_from(entry.version)
    await log.add(entry)


async def _imitate(books: Bookkeeper, warm_up: WarmUpConfig) -> None:
    transcripts = read_transcripts(warm_up.transcripts, books.runtime.examples, books.config.seed)
    books.model.use_hyperparameters(
        JobHyperparameters(num_epochs=1, learning_rate=warm_up.learning_rate, batch_size=warm_up.batch_size)
    )
    jobs, say = books.log.state.warm_up_jobs, books.runtime.progress.message
    done = sum(job.steps for job in jobs)
    say(f"warm-up: imitating {warm_up.transcripts}, {len(transcripts)} transcripts, from step {done}")
    while steps := warm_up.next_steps(done):
        job = await _run_job(books, warm_up, transcripts, done, steps)
        done += steps
        await books.log.add(job)
        if job.version is not None:
            await books.model.adapter.prune([job.version])
        if job.is_over:
            what = f"{warm_up.until}: " if warm_up.until else ""
            say(f"warm-up: imitated {warm_up.transcripts} for {done} steps; {what}{show(job.metrics)}")
            return
        say(f"warm-up: {done} of {warm_up.max_steps} steps at most, {show(job.metrics)}")
    raise TrainingError(
        f"the warm-up on {warm_up.transcripts} did not reach its goal: after {done} steps the "
        f"{show(jobs[-1].metrics)}, and 'warm_up.until' asks for a {warm_up.until}; ask for less, "
        "take a larger model, or raise max_steps"
    )


async def _run_job(
    books: Bookkeeper, warm_up: WarmUpConfig, transcripts: Sequence[Transcript], done: int, steps: int
) -> WarmUpJob:
    order = shuffled_forever(len(transcripts), books.config.seed, "warm-up", 0)
    drawn = islice(order, done * warm_up.batch_size, (done + steps) * warm_up.batch_size)
    number, until = len(books.log.state.warm_up_jobs) + 1, warm_up.until
    status = await _train(books, number, [[_sample(transcripts[index])] for index in drawn])
    measured: dict[str, Any] = {"loss": status.metrics.get("nll", status.metrics.get("train_loss"))}
    if until is not None and until.reward is not None:
        reward, target = books.config.require_reward(), books.target
        phase = f"warm-up/{'' if target is None else f'{target}-'}{number}"
        examples = books.runtime.examples[: warm_up.examples]
        output = await books.runtime.evaluation.run(examples, phase=phase, keep_episodes=False)
        measured |= validation_metrics(output, reward)
    value = measured.get("avg_reward", measured["loss"])
    if until is not None and value is None:
        missing = "the backend does not report a loss" if until.loss else "no episode was scored"
        raise TrainingError(f"the warm-up should continue until a {until}, but {missing}")
    is_over = until is None or until.is_reached(value)
    made: dict[str, Any] = {"metrics": finite(measured), "version": books.model.version}
    return WarmUpJob(steps=steps, status=status, is_over=is_over, **made)


async def _train(books: Bookkeeper, number: int, groups: list[list[Sample]]) -> TrainingJobStatus:
    """Train and adopt one job. If it fails, a resumed run makes it again under another name."""
    name = books.job_name(None, number)
    ref = await books.model.submit(
        TrajectoryCollection(trajectories=groups, run_id=name, method="supervised")
    )
    if isinstance(ref, Skipped):
        raise TrainingError(f"the warm-up cannot begin: {ref.reason}")
    async with record_failure(books.log, JobDropped(epoch=None)):
        status = await books.model.wait(ref, _JOB_TIMEOUT, _POLL)
        await books.model.adopt(ref, status)
    return status


def _sample(transcript: Transcript) -> Sample:
    """Return a transcript as a sample to imitate. The backend makes its tokens. An assistant message with
    `weight` 0 is only context."""
    return Sample(
        turns=tuple(
            Turn(message=index, replaced=True)
            for index, message in enumerate(transcript.messages)
            if message.get("role") == "assistant" and message.get("weight") != 0
        ),
        example=transcript.where,
        messages=tuple(transcript.messages),
        tools=tuple(transcript.tools),
    )


def show(metrics: dict[str, Any]) -> str:
    """Return the measurement of a warm-up job as text."""
    if "avg_reward" in metrics:
        return f"reward is {Score.from_metrics(metrics)} on {metrics['num_scored']} training examples"
    loss = metrics.get("loss")
    return "loss is not known" if loss is None else f"loss is {loss:.3f}"
