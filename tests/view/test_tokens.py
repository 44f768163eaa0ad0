"""The exact tokens of an episode, with what the learner was given of them."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from etude.store.learned import Seen, Source, learned_lines, write_learned, write_submitted
from etude.view.app import create_view
from etude.view.tokens import CHUNK
from tests.view.conftest import KEY
from tests.view.stored import Told, epoch_entry, sample_of, store_run
from tests.view.test_pages import shown, words

SAYS = ({"role": "assistant", "content": "hm"}, {"role": "assistant", "content": "four"})


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A run with an episode that was trained on, and one that was not."""
    root = tmp_path_factory.mktemp("runs")
    trained, other = Told("train/1/a/0", SAYS), Told("train/1/a/1", SAYS, drifted=True)
    long = Told("eval/l/0", SAYS[:1] * 600)
    run = store_run(root, episodes=[trained, other, long], epochs=[epoch_entry(1)])
    sample = sample_of(trained)
    seen = {id(sample): Seen([-0.25] * 8)}
    write_learned(run / "checkpoints", 1, learned_lines(Source("job", version=1), [(sample,)], seen))
    client = TestClient(create_view(root, KEY), base_url="http://127.0.0.1")
    client.get("/", params={"open": KEY})
    return client


def chunk(client, id, start=0):
    return client.get(f"/runs/r/chunks/{id}?sequence=0&from={start}").json()


def test_the_page_says_what_was_trained_on_and_what_is_not_recorded(opened):
    text = words(shown(opened, "/runs/r/tokens/train/1/a/0"))
    assert "13 tokens of policy, 8 of them sampled in 2 answers" in text
    assert "Trained on, with reward 0.750, for version 1" in text and "Not recorded: entropy" in text
    assert "shown by their ids" in text
    other = words(shown(opened, "/runs/r/tokens/train/1/a/1"))
    assert (
        "Nothing of it is recorded as trained on" in other and "Not recorded: advantage, mask, ratio" in other
    )


def test_every_token_has_its_numbers(opened):
    data = chunk(opened, "train/1/a/0")
    assert data["ids"] == [1, 2, 3, 10, 11, 12, 13, 4, 5, 11, 12, 13, 14]
    assert data["spans"] == [[3, 7, 0, "<workflow>", 0], [9, 13, 1, "<workflow>", 0]]
    assert data["logprobs"] == [None] * 3 + [-0.1, -0.7, -0.01, -2.5] + [None] * 2 + [-0.1, -0.7, -0.01, -2.5]
    assert data["weights"] == [0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert data["advantages"] == [0, 0, 0, 1.5, 1.5, 1.5, 1.5, 0, 0, -0.5, -0.5, -0.5, -0.5]
    assert data["ratios"] == [None] * 3 + [0.25] * 4 + [None] * 2 + [0.25] * 4
    assert "entropies" not in data and "advantages" not in chunk(opened, "train/1/a/1")


def test_a_long_sequence_comes_in_chunks_that_make_it_up(opened):
    whole = []
    while part := chunk(opened, "eval/l/0", len(whole)).get("ids"):
        assert len(part) <= CHUNK
        whole += part
    assert len(whole) == 3 + 600 * 6 - 2


@pytest.mark.parametrize("query", ["sequence=9", "sequence=-1", "sequence=x", "from=y"])
def test_what_is_not_there_is_no_page(opened, query):
    assert opened.get(f"/runs/r/chunks/train/1/a/0?{query}").status_code == 404


def test_what_another_backend_was_handed_is_shown_with_what_it_does_not_tell(tmp_path):
    trained, told = Told("train/1/a/0", SAYS), Told("train/1/b/0", SAYS[1:], has_ids=False)
    run = store_run(tmp_path, episodes=[trained, told], epochs=[epoch_entry(1)])
    source = Source("r-epoch-1", backend="mine", makes_advantages=True)
    write_submitted(run, 1, "r-epoch-1", learned_lines(source, [(sample_of(trained),)]))
    client = TestClient(create_view(tmp_path, KEY), base_url="http://127.0.0.1")
    client.get("/", params={"open": KEY})
    text = words(shown(client, "/runs/r/tokens/train/1/a/0"))
    assert "As the backend 'mine' was handed it for the job r-epoch-1" in text and "the ratio" in text
    assert "makes advantages of them itself" in text
    assert chunk(client, "train/1/a/0")["advantages"][3:7] == [1.5] * 4
    assert "no token ids were recorded" in words(shown(client, "/runs/r/tokens/train/1/b/0", status=404))


def test_of_several_samples_of_the_same_tokens_each_can_be_seen(client):
    text = shown(client, "/runs/first/tokens/train/2/a/0?sample=1")
    assert "Also, with reward 0.750, for version 2 (shown)" in words(text)
    assert "/runs/first/tokens/train/2/a/0?sequence=0&amp;sample=0" in text
    assert "is not trained on" in words(shown(client, "/runs/first/tokens/validation/0/a/0"))
