"""On-policy distillation: the policy samples, and a teacher scores every token.

Agarwal et al. (2024); as a policy gradient, Lu and Thinking Machines (2025). A token's advantage is log
π_teacher - log π_sampled. It samples the gradient of the reverse KL, alone or added to the reward's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, FiniteFloat

from etude.algorithms.algorithm import OfCollection
from etude.algorithms.grpo import Grpo
from etude.algorithms.samples import UnitGroup
from etude.config.component import LlmRef
from etude.core.errors import RequestError, TrainingError
from etude.core.interfaces import innermost
from etude.core.sample import Sample
from etude.engines.meter import asking_for

if TYPE_CHECKING:
    from etude.runtime import Runtime


class Distillation(Grpo, name="distillation"):
    """Samples with a teacher's logprobs, for on-policy distillation.

    The teacher is an entry of `llms` with the same tokenizer: a model in this process (`_type: local`), or an
    endpoint that returns `prompt_logprobs`. A token's advantage is `reward_weight` times GRPO's advantage
    plus log π_teacher - log π_sampled.
    """

    teacher: OfCollection[LlmRef] = "teacher"
    """Name the entry of `llms` that teaches."""
    reward_weight: FiniteFloat = Field(0.0, ge=0)
    """Set the weight of the reward's advantage; 0: only the teacher counts."""
    drop_flat_groups: OfCollection[bool] = False
    """Leave out groups whose rewards give no advantage."""

    def check(self) -> None:
        """Raise RequestError for options without effect. With only a teacher, one episode is enough."""
        if self.reward_weight:
            super().check()
            return
        if self.cut_off_penalty:
            raise RequestError("cut_off_penalty changes only the reward, and reward_weight is 0: set it too")

    async def check_run(self, runtime: Runtime) -> None:
        """Raise RequestError for logged chats, and for a teacher that cannot teach the trained model. One
        behind an address is given two tokens to score, and EngineError is raised if it cannot."""
        await super().check_run(runtime)
        engine, policy = self._find_teacher(runtime)
        if policy is None:
            with asking_for("teacher", ""):
                await runtime.run.journal.step(f"teacher/{self.teacher}", partial(engine.score, (0, 1)))

    def find_comparable(self, groups: Sequence[UnitGroup]) -> list[bool]:
        """Return for each group whether its rewards give any advantage. No teacher was asked yet."""
        return [bool(group.units) and self.has_advantage(group.samples) for group in groups]

    async def complete_groups(self, groups: list[UnitGroup], runtime: Runtime | None) -> list[UnitGroup]:
        """Add the teacher's logprobs to the samples. A run asks for each only once.

        Raises EngineError if the teacher does not answer.
        """
        if runtime is None:
            raise RequestError("distillation needs a teacher, and only a run has one")
        samples = [unit for group in groups for unit in group.units if isinstance(unit, Sample)]
        values = await self._scores(samples, runtime) if samples else []
        pairs = zip(samples, values, strict=True)
        taught = (replace(sample, teacher_logprobs=tuple(own)) for sample, own in pairs)
        return [replace(group, units=[next(taught) for _ in group.units]) for group in groups]

    async def _scores(self, samples: Sequence[Sample], runtime: Runtime) -> Sequence[Sequence[float]]:
        for sample in samples:
            if not sample.ids:
                raise TrainingError(f"episode {sample.episode} has no token ids, which a teacher needs")
        engine, policy = self._find_teacher(runtime)
        journal = runtime.run.journal
        # Targets share episodes, and each counts the branches of its own model.
        asker = self.teacher if runtime.target is None else f"{self.teacher}/{runtime.target}"
        keys = [f"teacher/{asker}/{one.episode}/{one.branch}/{one.agent or ''}" for one in samples]
        if policy is not None:
            from etude.learner.learner import sample_logprobs

            # All at once, so that shared prefixes are computed once.
            read = partial(asyncio.to_thread, sample_logprobs, policy, samples)
            return [*await journal.step(f"{keys[0]}/{len(keys)}", read)]

        async def request(sample: Sample) -> list[float]:
            with asking_for("teacher", sample.episode or ""):
                logprobs = await engine.score(sample.ids)
            return [float(value) if own else 0.0 for value, own in zip(logprobs, sample.mask, strict=True)]

        asked = [partial(request, sample) for sample in samples]
        return [*await asyncio.gather(*map(journal.step, keys, asked))]

    def _find_teacher(self, runtime: Runtime) -> tuple[Any, Any]:
        """Return the teacher's engine, and its policy if it is a model in this process.

        Raises RequestError if it is the trained model, cannot score tokens, or has another tokenizer.
        """
        if self.teacher == runtime.target_model:
            raise RequestError(f"distillation: '{self.teacher}' is the model in training; name another")
        engine = runtime.engines[self.teacher]
        policy = getattr(innermost(engine), "policy", None)
        config: Any = runtime.builder.config.llms[self.teacher]
        is_served = getattr(config, "provider", None) == "etude"
        if policy is None and (is_served or not hasattr(innermost(engine), "score")):
            what = "`etude serve`" if is_served else type(innermost(engine)).__name__
            raise RequestError(
                f"distillation: '{self.teacher}' ({what}) cannot score tokens; a teacher is `_type: local`, "
                "or an endpoint that gives `prompt_logprobs`, such as vLLM"
            )
        pupil = getattr(innermost(runtime.engines[runtime.target_model]), "policy", None)
        if policy is not None and pupil is not None:
            own, others = (each.codec.tokenizer.get_vocab() for each in (pupil, policy))
            if own != others:
                raise RequestError(
                    f"distillation: '{self.teacher}' has a different tokenizer from '{runtime.target_model}' "
                    f"({len(others)} and {len(own)} tokens); a teacher needs the same one"
                )
        return engine, policy

    def assign_advantages(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Return the samples with the weighted advantages of reward and teacher, token by token."""
        if any(sample.advantages is not None for group in groups for sample in group):
            return super().assign_advantages(groups)

        def with_teacher(sample: Sample) -> Sample:
            taught, sampled, earned = sample.teacher_logprobs, sample.logprobs, sample.advantages
            if taught is None or sampled is None or earned is None:
                raise TrainingError(f"episode {sample.episode or '?'} has no logprobs of a teacher")
            rows = zip(sample.mask, earned, taught, sampled, strict=True)
            gains = (
                self.reward_weight * own + teacher - student if trained else 0.0
                for trained, own, teacher, student in rows
            )
            return replace(sample, advantages=tuple(gains))

        return [[*map(with_teacher, group)] for group in super().assign_advantages(groups)]
