"""The toolkit with its own ART plug-in, and `etude serve` where it looks for ART.

ETUDE_TEST_NAT=path/to/nat pytest -m nat
"""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from tests.integrations.nat.toolkit import SECONDS, serving

pytestmark = pytest.mark.nat

HOST, PORT = "127.0.0.2", 8000
"""The plug-in looks for inference at port 8000, whatever it is told."""
URL = f"http://{HOST}:{PORT}"
EXAMPLES, EPOCHS, HELD_OUT = 16, 8, 256


@pytest.fixture
def server(project):
    with serving(project, HOST, PORT):
        yield


@pytest.fixture
def art_project(project):
    """The example with ART's components in place of ours, on a few rows: all are collected in each epoch."""
    rows = (project.base / "train.jsonl").read_text().splitlines()[:EXAMPLES]
    (project.folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    project.configure(
        llms__sorter={"_type": "openai", "model_name": "agent", "base_url": f"{URL}/v1", "api_key": "none",
                      "max_tokens": 12, "logprobs": True, "temperature": 1.0},
        eval__general__dataset__file_path=str(project.folder / "train.jsonl"),
        eval__general__output_dir=str(project.folder / "eval"),
        eval__general__max_concurrency=16,
        trajectory_builders__rollouts={"_type": "openpipe_art_traj_builder", "num_generations": 8},
        trainer_adapters__here={
            "_type": "openpipe_art_trainer_adapter",
            "backend": {"ip": HOST, "port": PORT, "name": "agent", "project": "sorting", "base_model": "base",
                        "init_args": {"full_finetuning": True}},
            "training": {"learning_rate": 5e-4},
        },
        trainers__epochs={"_type": "openpipe_art_trainer"},
        finetuning__num_epochs=EPOCHS,
    )  # fmt: skip
    return project


def test_the_toolkits_own_art_plug_in_trains_on_an_etude_server(server, art_project):
    before = _held_out_reward(art_project, "base")
    nat, *arguments = art_project.command()
    # At its default log level this harness of the toolkit's fails; ours is not in it.
    done = art_project.run([nat, "--log-level", "WARNING", *arguments], seconds=3 * SECONDS)
    assert done.returncode == 0, done.stdout
    told = [json.loads(line) for line in (art_project.folder / "runs" / "training_metrics.jsonl").open()]
    assert len(told) == EPOCHS, done.stdout
    steps = [model.id for model in OpenAI(base_url=f"{URL}/v1", api_key="none").models.list()]
    assert f"agent@{EPOCHS}" in steps
    assert _held_out_reward(art_project, "agent") > before + 0.05


def _held_out_reward(project, model):
    """The mean share of letters in place, one sample for each of some held-out examples."""
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    scores = []
    for line in (project.base / "validation.jsonl").read_text().splitlines()[:HELD_OUT]:
        row = json.loads(line)
        asked = [{"role": "user", "content": f"Sort: {row['letters']}"}]
        answer = client.chat.completions.create(model=model, messages=asked, max_tokens=12, seed=0)
        said = (answer.choices[0].message.content or "").strip()
        right = sum(a == b for a, b in zip(said, row["answer"], strict=False))
        scores.append(right / max(len(said), len(row["answer"])))
    return sum(scores) / len(scores)
