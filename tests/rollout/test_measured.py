"""Scores that are measured inside of an episode: recorded, kept, read by evaluators, and shown."""

from __future__ import annotations

from etude.core.episode import Event, measured
from etude.core.evaluation import EvalInputItem
from etude.export.episodes import _event
from etude.rewards.evaluation import item_of
from etude.rewards.evaluator import MeasuredEvaluator
from etude.store.episodes import read_episode
from etude.store.journal import Journal
from tests.rollout.running import collect_one


async def game(example, episode):
    await episode.chat([{"role": "user", "content": "go"}])
    episode.score("reward", 0.25, "too slow")
    episode.score("reward", True)
    episode.score("reward", -1, "lost", agent="bob")
    episode.step_reward(0.5, agent="bob")
    return "over"


async def test_a_score_is_in_the_journal_and_the_last_one_counts(journal: Journal):
    record = await collect_one(game, journal)
    assert record.events == (
        Event("score", 0, 0.25, "too slow", "reward"),
        Event("score", 0, 1.0, "", "reward"),
        Event("score", 0, -1.0, "lost", "reward", "bob"),
        Event("step_reward", 0, 0.5, agent="bob"),
    )
    assert read_episode(journal, record.id) == record
    assert [_event(event) for event in record.events[1:]] == [
        {"score": "reward", "value": 1.0},
        {"score": "reward", "agent": "bob", "value": -1.0, "reason": "lost"},
        {"agent": "bob", "step_reward": 0.5},
    ]
    assert (measured(record, "reward"), measured(record, "speed")) == (record.events[1], None)


async def test_an_evaluator_reads_it_by_name_and_agent(journal: Journal):
    item = item_of(await collect_one(game, journal))
    own = await MeasuredEvaluator("reward").evaluate_item(item)
    bobs = await MeasuredEvaluator("reward", "bob").evaluate_item(item)
    assert (own.score, bobs.score, bobs.reasoning) == (1.0, -1.0, "lost")
    missing = await MeasuredEvaluator("speed").evaluate_item(item)
    assert missing.score is None
    assert missing.error == "the episode recorded no score 'speed' (it recorded: 'reward', 'reward' of 'bob')"
    assert (await MeasuredEvaluator("reward").evaluate_item(EvalInputItem(id="q"))).score is None
