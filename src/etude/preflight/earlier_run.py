"""What an earlier run of the same agent took: better than any assumption."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from etude.config.schema import Config
from etude.core.errors import EtudeError
from etude.core.history import History
from etude.store.episodes import iter_episodes
from etude.store.facts import list_runs
from etude.store.log import EpochLog
from etude.store.run_folder import RunFolder
from etude.store.stored_config import CONFIG, stored_data

_EPISODES = 64
_MODEL_KEYS = ("model", "model_name", "max_tokens")


@dataclass(frozen=True, slots=True)
class Earlier:
    """Averages over the episodes of an earlier run."""

    name: str
    calls: float
    prompt_tokens: float
    completion_tokens: float
    seconds_per_episode: float | None
    """Wall time of its epochs, by their episodes; None when it finished no epoch."""


def earlier_run(config: Config) -> Earlier | None:
    """The latest run in the config's output folder with the same agent and model, when there is one."""
    for run in list_runs(config.finetuning.output_dir):
        try:
            if (run / CONFIG).is_file() and _is_alike(stored_data(run), config):
                with RunFolder.read(run) as folder:
                    found = _averages(folder)
                if found is not None:
                    return found
        except EtudeError:
            continue  # A run that cannot be read is no help; `etude runs list` says why.
    return None


def _is_alike(data: dict[str, Any], config: Config) -> bool:
    """Whether a stored config has the same agent, and the same models under the same names."""
    agent, models = config.workflow, data.get("llms") or {}
    if agent is None or set(models) != set(config.llms):
        return False
    for name, llm in config.llms.items():
        now = llm.model_dump(mode="json", fallback=str)
        if any(models[name].get(key) != now.get(key) for key in _MODEL_KEYS):
            return False
    now = {"_type": agent.type_name, **agent.model_dump(mode="json", fallback=str)}
    return bool(data.get("workflow") == now)


def _averages(run: RunFolder) -> Earlier | None:
    episodes = list(islice(iter_episodes(run.journal, "train/"), _EPISODES))
    episodes = [one for one in episodes if one.failure is None]
    if not episodes:
        return None
    done = [call.completion for one in episodes for call in one.calls if call.completion is not None]
    count = len(episodes)
    return Earlier(
        name=run.name,
        calls=len(done) / count,
        prompt_tokens=sum(completion.usage.prompt_tokens for completion in done) / count,
        completion_tokens=sum(completion.usage.completion_tokens for completion in done) / count,
        seconds_per_episode=_seconds(EpochLog(run.journal).history(run.name)),
    )


def _seconds(history: History) -> float | None:
    episodes = sum(entry.metrics.get("episodes") or 0 for entry in history.epochs)
    seconds = sum(
        (entry.metrics.get(key) or 0.0)
        for entry in history.epochs
        for key in ("collecting_seconds", "training_seconds")
    )
    return seconds / episodes if episodes and seconds else None
