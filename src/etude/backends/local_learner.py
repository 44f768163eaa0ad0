"""Training in the run's own process, on the policy that the agents sample from."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from etude.backends.local_job import FinishedJob, Job, Work, failure, learner_options
from etude.config.finetuning import FinetuneConfig
from etude.core.job import ModelVersion
from etude.jobs.folders import StateFolders
from etude.learner.learner import Learner, LearnerOptions
from etude.models.memory import give_back_freed
from etude.models.policy import Policy


class LocalLearner:
    """A workplace in a thread. A killed job leaves nothing behind, and is trained again from its start."""

    def __init__(
        self, policy: Policy, versions: StateFolders, seed: int, run: FinetuneConfig, options: LearnerOptions
    ) -> None:
        """Raises RequestError for options that do not go with the policy's model."""
        self._policy = policy
        self._versions = versions
        self._seed = seed
        self._run = run
        self.learner = Learner(policy, options)
        self._optimiser_of = 0
        """The version that the optimiser's state belongs to; engines adopt versions on their own."""
        self._begins_from = 0
        """The version whose optimiser has taken no step: the base, or what a warm-up made."""

    @property
    def note(self) -> str | None:
        """Why tokens that sequences share are computed for each of them."""
        return self.learner.note

    async def train(self, job: Job, start: ModelVersion, number: int) -> FinishedJob:
        """Train in a thread, with the policy's lock held."""
        return await asyncio.to_thread(self._train, job, start, number)

    def go_to(self, number: int) -> None:
        """Put the optimiser to where it was when a version was made."""
        if self._optimiser_of != number:
            self._take_optimiser_of(number)

    def begin_from(self, version: ModelVersion) -> None:
        """Forget the optimiser's steps up to that version."""
        self._begins_from = version.number
        if self._optimiser_of == version.number:
            self._take_optimiser_of(version.number)

    def _train(self, job: Job, start: ModelVersion, number: int) -> FinishedJob:
        learner, policy = self.learner, self._policy
        content = replace(job.content, start=str(start.number))
        work = Work(job.name, number, job.algorithm, job.config, job.groups, content, self._seed)
        for sampler in [*policy.samplers]:
            sampler.rest()
        job.groups = []  # They are no longer needed once the job is over.
        with policy.lock:
            self.go_to(start.number)
            learner.options = learner_options(job.config, self._run)
            try:
                metrics = work.train(learner, job, job.canceled)
                finished = work.write(learner, self._versions, metrics)
            except BaseException as error:
                policy.mark_changed(start.number)  # Whatever they are: `adopt` compares them.
                policy.adopt(start)
                self._take_optimiser_of(start.number)
                if isinstance(error, RuntimeError):
                    raise failure(error) from error
                raise
            assert finished is not None
            policy.mark_changed(number, finished.version.digest)
            self._optimiser_of = number
        give_back_freed()
        return finished

    def _take_optimiser_of(self, number: int) -> None:
        if number > self._begins_from:
            self.learner.restore(self._versions.folder(number))
        else:
            self.learner.reset()
        self._optimiser_of = number
