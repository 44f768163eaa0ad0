"""A run with two models that are trained, a prover and a verifier; real but for models and backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.config.load import parse_config
from etude.config.schema import Config
from etude.core.episode import Example
from etude.run import Run
from etude.show.metrics_files import write_metrics
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.training import Watcher, examples, learning_engine


async def play(example: Example, episode: Any) -> dict[str, str]:
    claim = await episode.chat([{"role": "user", "content": example.inputs["question"]}], model="prover")
    verdict = await episode.chat([{"role": "user", "content": f"is {claim.text} right?"}], model="verifier")
    return {"prover": claim.text, "verifier": verdict.text}


def prover_yes(example: Example, output: dict[str, str]) -> float:
    return float(output["prover"] == "yes")


def verifier_yes(example: Example, output: dict[str, str]) -> float:
    return float(output["verifier"] == "yes")


def questions() -> list[Example]:
    return examples(3)


def held_out() -> list[Example]:
    return examples(3, "v")


def config(num_epochs: int = 2, *, prover: Any = None, verifier: Any = None, **changes: Any) -> Config:
    """The config of a run; `prover` and `verifier` are keys of their targets."""
    data: dict[str, Any] = {
        "llms": dict.fromkeys(("prover", "verifier"), "tests.cli.parts:open_scripted"),
        "workflow": "tests.several:play",
        "eval": {
            "general": {"dataset": "tests.several:questions"},
            "evaluators": {"proved": "tests.several:prover_yes", "verified": "tests.several:verifier_yes"},
        },
        "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 4}},
        "trainer_adapters": {"backend": "tests.cli.parts:counting"},
        "finetuning": {
            "enabled": True,
            "num_epochs": num_epochs,
            "targets": {
                "prover": {"reward_function": {"name": "proved"}, **(prover or {})},
                "verifier": {"reward_function": {"name": "verified"}, **(verifier or {})},
            },
        },
    }
    finetuning = changes.pop("finetuning", {})
    data |= changes
    data["finetuning"] |= finetuning
    return parse_config(data)


class Several:
    """A run folder and its two models; `await start()` trains until the end or an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engines = {"prover": learning_engine(), "verifier": learning_engine(base=45)}
        self.watcher = Watcher()

    async def start(self, config: Config) -> Run:
        folder = (
            RunFolder.open(self.path) if self.path.exists() else RunFolder.create(self.path.parent, "run")
        )
        with folder:
            return await train_in(
                config,
                folder,
                engines=self.engines,
                progress=self.watcher,
                report=lambda history, folder, final: write_metrics(history, folder),
            )

    def restart(self) -> Several:
        """The same run in a new process: same folder and backends, new engines."""
        return Several(self.path)

    def requests(self) -> dict[str, int]:
        """Calls of each model."""
        return {name: len(engine.requests) for name, engine in self.engines.items()}
