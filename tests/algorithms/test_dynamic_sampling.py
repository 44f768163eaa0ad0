"""Dynamic sampling: examples whose episodes all earn the same are replaced, in a resumed run by the same."""

from __future__ import annotations

import json

import pytest

from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.grpo import Grpo
from tests.training import Interrupted, Run, examples


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    made.examples = examples(8)
    return made


def easy(names):
    """Everybody earns the same on these examples; on the others it depends on the answer."""

    def correct(example, output):
        return 1.0 if example.id in names else float(output == "yes")

    return correct


def use(run, limit):
    algorithm = Grpo(
        num_generations=4, examples_per_epoch=3, replace_flat_groups=limit, drop_flat_groups=False
    )
    run.builder = CollectingBuilder(algorithm)
    return run


def lines(run):
    return [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]


async def test_flat_groups_are_replaced_up_to_the_limit(run):
    run.evaluator = easy({example.id for example in run.examples})
    await use(run, 4).start(num_epochs=1)
    # All are flat: three, three in their place, and one more.
    assert len(run.engine.requests) == (3 + 4) * 4
    (line,) = lines(run)
    assert (line["replacements"], line["episodes"]) == (4, 28)
    assert line["reward_groups"] == {"compared": 7, "flat": 7}


async def test_a_resumed_run_has_the_same_replacements(run, tmp_path):
    names = {example.id for example in run.examples}
    (tmp_path / "other").mkdir()
    whole = use(Run(tmp_path / "other" / "run"), 4)
    whole.examples, whole.evaluator = run.examples, easy(names)
    await whole.start(num_epochs=1)
    run.evaluator = easy(names)
    seen = []

    def stop(episode):
        seen.append(episode)
        if len(seen) == 20:
            raise Interrupted

    run.watcher.episode_finished = stop
    with pytest.raises(Interrupted):
        await use(run, 4).start(num_epochs=1)
    again = use(run.restarted(), 4)
    again.evaluator = easy(names)
    await again.start(num_epochs=1)
    assert len(run.engine.requests) + len(again.engine.requests) == len(whole.engine.requests)
    assert {
        key: value for key, value in lines(run)[0].items() if "seconds" not in key and key != "timestamp"
    } == {key: value for key, value in lines(whole)[0].items() if "seconds" not in key and key != "timestamp"}
