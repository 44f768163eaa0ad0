"""Playing an episode of an environment: one task, its agents answered by Etude's models."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import verifiers.v1 as vf

from etude.config.import_path import where_raised
from etude.core.errors import EpisodeError
from etude.core.example import Example
from etude.integrations.verifiers.client import EpisodeCalls, EpisodeClientConfig
from etude.integrations.verifiers.failures import failure_of, problems_of
from etude.integrations.verifiers.scores import AgentScores, scores_of
from etude.integrations.verifiers.serving import Servers
from etude.integrations.verifiers.tasks import Tasks
from etude.rollout.episode import Episode

DEFAULT_MODEL = "policy"
"""The name that verifiers has for the model of a role that names none; Etude takes the one that it trains."""


class Player:
    """The workflow of an environment. Its output is what each agent said last."""

    def __init__(self, env: Any, tasks: Tasks) -> None:
        self.env = env
        self.tasks = tasks
        self.name = env.config.env_id
        self._servers = Servers(env)

    async def __call__(self, example: Example, episode: Episode) -> Any:
        """Play the task of an example. Raises EpisodeError, with its cause, when there is no result."""
        task = self.tasks.of(example)
        await self._servers.start()
        calls = EpisodeCalls(episode)
        context = vf.ModelContext(model=DEFAULT_MODEL, client=EpisodeClientConfig.of(calls))
        try:
            played = await self.env.run_episode(task, context)
        except Exception as error:
            raise EpisodeError(f"'{self.name}', task {example.id!r}: {where_raised(error)}") from error
        if not self.env.complete(played):
            raise failure_of(self.name, example.id, list(problems_of(played)), calls.errors)
        for score in scores_of([_given(trace) for trace in played.traces]):
            reason = f"mean of {score.runs} runs" if score.runs > 1 else None
            episode.score(score.name, score.value, reason, agent=score.agent)
        for trace in played.traces:
            if trace.stop_condition not in (None, "agent_completed", "user_closed"):
                episode.note(f"{trace.agent.name} was stopped: {trace.stop_condition}")
        return _said(played)

    async def close(self) -> None:
        """Stop the environment's servers."""
        await self._servers.close()


def _given(trace: Any) -> AgentScores:
    rewards = {
        name: None if each is None else (each.score, each.weight) for name, each in trace.rewards.items()
    }
    return AgentScores(trace.agent.name, rewards, dict(trace.metrics))


def _said(played: Any) -> Any:
    """The last answer of the agent, or of each; several where one ran several times."""
    replies: dict[str, list[str]] = defaultdict(list)
    for trace in played.traces:
        replies[trace.agent.name].append(trace.last_reply)
    by_agent = {agent: texts[0] if len(texts) == 1 else texts for agent, texts in replies.items()}
    return next(iter(by_agent.values())) if len(by_agent) == 1 else by_agent
