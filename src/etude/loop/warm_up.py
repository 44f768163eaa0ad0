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


class WarmUp:
    """Takes a run's model through its warm-up. Training begins with the resulting weights.

    The steps between two measurements are one job, whose transcripts follow from the seed. It is submitted,
    followed, adopted and journalled like an epoch's job.
    """

    def __init__(self, books: Bookkeeper) -> None:
        self._books = books
        self._model, self._log, self._runtime = books.model, books.log, books.runtime
        self._jobs = self._log.state.warm_up_jobs

    async def run(self) -> None:
        """Run the rest of the warm-up, if there is one. Raises TrainingError when it does not reach its goal,
        DatasetError for transcripts that cannot be read."""
        warm_up = self._books.config.warm_up
        if warm_up is None or self._books.history.warm_up is not None:
            return
        model, settings, started = self._model, self._model.settings, time.monotonic()
        self._runtime.progress.phase("warming up")
        model.settings = replace(settings, freeze_agent=False, fine_tune_from_scratch=False)
        try:
            if self._jobs and (version := self._jobs[-1].version) is not None:
                await model.adapter.restore(version)
                await model.sample_from(version)
            if not (self._jobs and self._jobs[-1].is_over):
                await self._imitate(warm_up)
        finally:
            model.settings = settings
            model.use_hyperparameters(JobHyperparameters())
        last = self._jobs[-1]
        entry = WarmUpEntry(
            steps=sum(job.steps for job in self._jobs),
            jobs=len(self._jobs),
            seconds=time.monotonic() - started,
            metrics=last.metrics,
            version=last.version,
        )
        if entry.version is not None:
            await model.adapter.begin_from(entry.version)
        await self._log.add(entry)

    async def _imitate(self, warm_up: WarmUpConfig) -> None:
        books = self._books
        transcripts = read_transcripts(warm_up.transcripts, self._runtime.examples, books.config.seed)
        self._model.use_hyperparameters(
            JobHyperparameters(
                num_epochs=1, learning_rate=warm_up.learning_rate, batch_size=warm_up.batch_size
            )
        )
        done = sum(job.steps for job in self._jobs)
        say = self._runtime.progress.message
        say(f"warm-up: imitating {warm_up.transcripts}, {len(transcripts)} transcripts, from step {done}")
        while steps := warm_up.next_steps(done):
            job = await self._job(warm_up, transcripts, done, steps)
            done += steps
            await self._log.add(job)
            if job.version is not None:
                await self._model.adapter.prune([job.version])
            if not job.is_over:
                say(f"warm-up: {done} of {warm_up.max_steps} steps at most, {show(job.metrics)}")
            else:
                what = f"{warm_up.until}: " if warm_up.until else ""
                say(f"warm-up: imitated {warm_up.transcripts} for {done} steps; {what}{show(job.metrics)}")
                return
        raise TrainingError(
            f"the warm-up on {warm_up.transcripts} did not get where it should: after {done} steps the "
            f"{show(self._jobs[-1].metrics)}, and 'warm_up.until' asks for a {warm_up.until}; ask for less, "
            "take a larger model, or raise max_steps"
        )

    async def _job(
        self, warm_up: WarmUpConfig, transcripts: Sequence[Transcript], done: int, steps: int
    ) -> WarmUpJob:
        order = shuffled_forever(len(transcripts), self._books.config.seed, "warm-up", 0)
        drawn = islice(order, done * warm_up.batch_size, (done + steps) * warm_up.batch_size)
        status = await self._train([[_sample(transcripts[index])] for index in drawn])
        measured: dict[str, Any] = {"loss": status.metrics.get("nll", status.metrics.get("train_loss"))}
        if warm_up.until is not None and warm_up.until.reward is not None:
            reward, target = self._books.config.require_reward(), self._books.target
            phase = f"warm-up/{'' if target is None else f'{target}-'}{len(self._jobs) + 1}"
            examples = self._runtime.examples[: warm_up.examples]
            output = await self._runtime.evaluation.run(examples, phase=phase, keep_episodes=False)
            measured |= validation_metrics(output, reward)
        value = measured.get("avg_reward", measured["loss"])
        if warm_up.until is not None and value is None:
            missing = "the backend does not tell a loss" if warm_up.until.loss else "no episode was scored"
            raise TrainingError(f"the warm-up is to go on until a {warm_up.until}, and {missing}")
        is_over = warm_up.until is None or warm_up.until.is_reached(value)
        made: dict[str, Any] = {"metrics": finite(measured), "version": self._model.version}
        return WarmUpJob(steps=steps, status=status, is_over=is_over, **made)

    async def _train(self, groups: list[list[Sample]]) -> TrainingJobStatus:
        """Train and adopt one job. If it fails, a resumed run makes it again under another name."""
        model, name = self._model, self._books.job_name(None, len(self._jobs) + 1)
        collection = TrajectoryCollection(trajectories=groups, run_id=name, method="supervised")
        ref = await model.submit(collection)
        if isinstance(ref, Skipped):
            raise TrainingError(f"the warm-up cannot begin: {ref.reason}")
        async with record_failure(self._log, JobDropped(epoch=None)):
            status = await model.wait(ref, _JOB_TIMEOUT, _POLL)
            await model.adopt(ref, status)
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
