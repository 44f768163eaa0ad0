"""Every page over HTTP, of runs of the store, who may look, and the exact tokens of an episode."""

import hashlib
import html
import json
import re
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from etude.core.episode import Failure
from etude.core.interfaces import Totals
from etude.store.status import JournalStatus, ModelStatus, RunnerStatus, RunStatus, Wait
from etude.view.app import create_view
from etude.view.episodes import CHUNK
from etude.view.pages import url
from tests.support import draws
from tests.view.conftest import KEY, opened_at
from tests.view.stored import Told, epoch_entry, store_run


def get(client, path, status=200):
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    return answer.text


def words(text):
    """The text of a page, without its tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def charts(text):
    """The charts of a page, by their titles."""
    drawn = [json.loads(html.unescape(chart)) for chart in re.findall(r'data-chart="([^"]*)"', text)]
    return {chart["title"]: chart for chart in drawn}


def test_runs_are_listed_with_their_rewards(client):
    text = words(get(client, "/"))
    assert "first grpo unfinished 2/3 0.500 [0.400, 0.600] in epoch 1 0.900 [0.800, 1.000] in epoch 2" in text


def test_a_run_has_charts_of_what_was_measured(client):
    drawn = charts(get(client, "/runs/first"))
    assert {"reward", "correct", "style", "loss", "KL to the sampler"} <= drawn.keys()
    (reward,) = drawn["reward"]["lines"]
    assert reward["values"] == [0.5, 0.9, None] and reward["low"][:2] == [0.4, 0.8]
    assert charts(get(client, "/runs/second"))["failures by cause"]["lines"][0]["values"] == [None, 3.0]


def test_groups_show_the_spread_of_their_rewards(client):
    text = words(get(client, "/runs/first/phases/train/1"))
    assert re.search(r"a episode 0, reward 0 episode 1, reward 1 0.500 0 … 1", text)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("apples", ["train/1/b/0"]),
        ("drifted reward=1", ["train/1/a/1"]),
        ("retried", ["validation/0/a/0"]),
        ("nothing like it", []),
    ],
)
def test_a_filter_finds_in_all_phases(client, query, found):
    text = get(client, f"/runs/first/phases?q={query}")
    assert re.findall(r'data-row href="/runs/first/episodes/([^"]*)"', text) == found


def test_an_episode_shows_everything(client):
    text = words(get(client, "/runs/first/episodes/train/2/a/0"))
    for part in ("two and two?", "it is four", "Thinking, 5 characters", "2 + 2", "it is <b>right</b>",
                 "step reward 0.5 good", "correct, the reward 1", "expected four"):  # fmt: skip
        assert part in text
    assert "timeout took 30 s" in words(get(client, "/runs/first/episodes/train/1/b/0"))


def test_tool_calls_of_any_kind_are_shown(tmp_path):
    calls = [{"id": "1"}, {"id": "2", "function": {"name": "add", "arguments": {"a": 1}}}]
    odd = {"role": "assistant", "content": None, "tool_calls": calls}
    store_run(tmp_path, episodes=[Told("train/1/a/0", (odd,))])
    assert 'add ({ "a": 1 })' in words(get(opened_at(tmp_path), "/runs/r/episodes/train/1/a/0"))


def test_the_page_of_now_shows_what_a_killed_run_did_last(tmp_path):
    path, now = store_run(tmp_path, epochs=[epoch_entry(1)]), time.time()
    parts = {
        "models": [ModelStatus(name="policy", version=1, waiting=2, oldest=3.0)],
        "runners": [RunnerStatus(number=4, node="node-7", state="ready", seconds=1.0, episodes=5)],
        "journal": JournalStatus(committed=6, waiting=0),
        "waits": [Wait(what="2 answers of model 'policy'", seconds=3.0)],
    }
    phase = {"phase": "collecting", "phase_seconds": 1.0, "epoch": 2, "num_epochs": 3}
    counts = {"expected": 8, "finished": 3, "playing": 5, "waiting": 0, "totals": Totals()}
    host = socket.gethostname()
    status = RunStatus(run="r", pid=1, host=host, at=now, since=now - 60, **phase, **counts, **parts)
    (path / "status.json").write_text(status.model_dump_json())
    text = words(get(opened_at(tmp_path), "/runs/r/now"))
    for part in ("collecting, epoch 2 of 3", "6 entries written", "2 answers of model 'policy', 3.0 s",
                 "policy v1 2 3.0 s", "4 node-7 ready 5", "its process was killed"):  # fmt: skip
        assert part in text


def test_a_status_that_another_version_has_left_hides_no_run(tmp_path):
    (store_run(tmp_path, epochs=[epoch_entry(1)]) / "status.json").write_text('{"run": "r"}')
    assert "unfinished" in words(get(opened_at(tmp_path), "/runs/r"))


def test_siblings_stand_side_by_side(client):
    text = words(get(client, "/runs/first/groups/train/1/a"))
    assert (
        "Episode 0 reward 0" in text and "Episode 1 reward 1" in text and "drifted: the tool's answer" in text
    )


def test_what_is_not_there_is_said(client):
    for path in ("/nowhere", "/runs/third", "/runs/first/phases/train/9", "/runs/first/episodes/train/1/a/7",
                 "/runs/first/groups/train/1/z"):  # fmt: skip
        assert "no" in words(get(client, path, status=404))
    assert "a number" in words(get(client, "/runs/first/episodes/train/1/a/0?turn=abc", status=404))


def test_reading_writes_nothing(runs, client):
    def state():
        # SQLite keeps an index of its log beside a database that is read.
        files = (path for path in runs.rglob("*") if not path.name.endswith(("-wal", "-shm")))
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = state()
    for path in ("/", "/runs/first", "/runs/first/phases", "/runs/first/episodes/train/1/a/0"):
        get(client, path)
    assert state() == before


def test_a_page_of_groups_leads_to_the_next(tmp_path):
    # The last group of the page has episodes whose names are in another order than their numbers.
    many = [Told(f"eval/e{number:03}/{n}") for number in range(45) for n in range(12 if number == 39 else 1)]
    store_run(tmp_path, episodes=many)
    client = opened_at(tmp_path)
    first = client.get("/runs/r/phases/eval").text
    after = re.search(r'href="([^"]*after=[^"]*)"', first)
    assert first.count("data-row") == 40 and after is not None
    rest = client.get(html.unescape(after[1])).text
    assert re.findall(r">(e\d+)<", rest) == [f"e{number:03}" for number in range(40, 45)]


_NAMED = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onfocus='x", "{{ 7*7 }}", "]]>"]
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)


def is_addressable(name):
    """Browsers and clients take dots and double slashes out of addresses."""
    return not {"", ".", ".."} & set(name.split("/"))


@settings(max_examples=draws(4), deadline=None)
@given(
    text=st.just(" ".join(_NAMED)) | _TEXT,
    name=st.text("<>\"'&/%?#. é;", min_size=1, max_size=8).filter(is_addressable),
)
def test_run_data_is_text_and_nothing_else(tmp_path_factory, text, name):
    """Whatever models, tools, judges and data sets say: a page has no element that the template has not."""
    tools = [{"id": "1", "type": "function", "function": {"name": text, "arguments": text}}]
    answer = {"role": "assistant", "content": text, "tool_calls": tools, "reasoning_content": text}
    score = {"score": 0.5, "reasoning": text, "error": text}
    scores, failure = {"correct": score, text: score}, Failure("raised", text)
    told = Told(f"train/1/{name}/0", (answer,), text, scores, failure, function=text)
    cause = {"kind": text, "reason": text, "count": 1, "episode": told.id}
    root = tmp_path_factory.mktemp("evil")
    store_run(root, "r", [told], [epoch_entry(1, failures={text: 1}, failure_causes=[cause])])
    client = opened_at(root)
    for path in (
        "/",
        "/runs/r",
        url("runs", "r", "phases", "train/1"),
        url("runs", "r", "phases", q="failed"),
        url("runs", "r", "phases", q=text),
        url("runs", "r", "episodes", told.id),
        url("runs", "r", "groups", "train/1", name),
    ):
        answer = client.get(path)
        assert answer.status_code == 200 or "q=" in path, (path, answer.text)
        tags = re.findall(r"<\s*(script|img)\b([^>]*)", answer.text)
        assert all(tag == "script" and rest.startswith(' src="/static/') for tag, rest in tags)
        assert not re.search(r"<[^>]*\son\w+\s*=", re.sub(r'"[^"]*"', '""', answer.text))


def test_failures_are_shown_by_cause_with_an_episode(tmp_path):
    told = Told("train/1/b/0", failure=Failure("raised", "no, 7"), scores={})
    cause = {"kind": "raised", "reason": "no, 7", "count": 1234, "episode": told.id}
    store_run(tmp_path, "r", [told], [epoch_entry(1, failure_causes=[cause])])
    text = words(get(opened_at(tmp_path), "/runs/r"))
    assert "1 234 raised: no, 7 train/1/b/0" in text.replace("\u202f", " ")


def browser(runs):
    return TestClient(create_view(runs, KEY), base_url="http://127.0.0.1", follow_redirects=False)


def test_without_the_link_nothing_is_shown(runs):
    client = browser(runs)
    for path in ("/", "/runs/first", "/static/view.css", "/nowhere", "/?open=wrong"):
        answer = client.get(path)
        assert answer.status_code == 401 and "first" not in answer.text
    client.cookies.set("etude-view-0", "wrong")
    assert client.get("/").status_code == 401


def test_the_link_gives_a_cookie_and_an_address_without_the_key_and_leads_nowhere_else(runs):
    answer = browser(runs).get("/runs/first", params={"open": KEY, "q": "a b"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/first?q=a+b")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))
    answer = browser(runs).get("http://127.0.0.1//elsewhere.example/runs", params={"open": KEY})
    assert answer.status_code == 303 and answer.headers["location"] == "/elsewhere.example/runs"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"host": "127.0.0.1.evil.example"},
    ],
)
def test_other_pages_get_nothing(client, headers):
    assert client.get("/runs/first", headers=headers).status_code == 403


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_nothing_is_changed(client, method):
    assert getattr(client, method)("/runs/first").status_code == 405


def test_pages_run_no_scripts_but_their_own(client):
    for path in ("/", "/runs/first", "/runs/first/episodes/train/1/a/0", "/nowhere"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        for forbidden in ("<style", " style=", "onclick", "javascript:", "https://"):
            assert forbidden not in answer.text


@pytest.mark.parametrize("name", ["..", ".", "%2e%2e", "no such", "first%2f..", "first\\"])
def test_only_runs_of_the_folder_are_shown(client, name):
    assert client.get(f"/runs/{name}/config").status_code == 404


ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"


def test_the_files_are_those_that_were_noted():
    noted = json.loads((WEB / "vendored.json").read_text(encoding="utf-8"))
    for place, facts in noted.items():
        assert hashlib.sha256((ROOT / place).read_bytes()).hexdigest() == facts["sha256"], (
            f"{place} is not what web/vendored.json says; python web/vendor.py writes both"
        )
    vendored = {
        str(path.relative_to(ROOT))
        for folder in {Path(place).parent for place in noted}
        for path in (ROOT / folder).iterdir()
    }
    assert vendored == set(noted)
    licensed = {place.partition(".")[0] for place in noted if place.endswith(".LICENSE")}
    assert licensed == {place.partition(".")[0] for place in noted}


def test_releases_are_exact_and_locked():
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    wanted = {**package["dependencies"], **package["devDependencies"]}
    lock = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name, release in wanted.items():
        assert re.fullmatch(r"[\d.]+", release)
        assert lock[f"node_modules/{name}"]["version"] == release
        assert lock[f"node_modules/{name}"]["integrity"].startswith("sha512-")
    assert f"(v{wanted['uplot']})" in (ROOT / "src/etude/view/static/vendor/uPlot.min.js").read_text()[:80]


SAYS = ({"role": "assistant", "content": "hm"}, {"role": "assistant", "content": "four"})


@pytest.fixture(scope="module")
def opened_run(tmp_path_factory):
    """A run with short, long and unknown sequences."""
    root = tmp_path_factory.mktemp("runs")
    long, told = Told("eval/l/0", SAYS[:1] * 600), Told("train/1/b/0", SAYS[1:], has_ids=False)
    store_run(root, episodes=[Told("train/1/a/0", SAYS), long, told])
    return opened_at(root)


def chunk(client, id, start=0):
    return client.get(f"/runs/r/chunks/{id}?sequence=0&from={start}").json()


def test_the_page_says_what_was_sampled_and_what_is_not_recorded(opened_run):
    text = words(get(opened_run, "/runs/r/tokens/train/1/a/0"))
    assert "13 tokens of policy, 8 of them sampled in 2 answers" in text
    assert "shown by their ids" in text
    assert "no token ids" in words(get(opened_run, "/runs/r/tokens/train/1/b/0", status=404))


def test_every_token_has_its_numbers(opened_run):
    data = chunk(opened_run, "train/1/a/0")
    assert data["ids"] == [1, 2, 3, 10, 11, 12, 13, 4, 5, 11, 12, 13, 14]
    assert data["spans"] == [[3, 7, 0, "<workflow>", 0], [9, 13, 1, "<workflow>", 0]]
    assert data["logprobs"] == [None] * 3 + [-0.1, -0.7, -0.01, -2.5] + [None] * 2 + [-0.1, -0.7, -0.01, -2.5]


def test_a_long_sequence_comes_in_chunks_that_make_it_up(opened_run):
    whole = []
    while part := chunk(opened_run, "eval/l/0", len(whole)).get("ids"):
        assert len(part) <= CHUNK
        whole += part
    assert len(whole) == 3 + 600 * 6 - 2


@pytest.mark.parametrize("query", ["sequence=9", "sequence=-1", "sequence=x", "from=y"])
def test_what_is_not_there_is_no_page(opened_run, query):
    assert opened_run.get(f"/runs/r/chunks/train/1/a/0?{query}").status_code == 404
