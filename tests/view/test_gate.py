"""Who may look, from where, and what a browser may do with the pages."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from etude.view.app import create_view
from tests.view.conftest import KEY


def browser(runs):
    return TestClient(create_view(runs, KEY), base_url="http://127.0.0.1", follow_redirects=False)


def test_without_the_link_nothing_is_shown(runs):
    for path in ("/", "/runs/first", "/static/view.css", "/nowhere"):
        answer = browser(runs).get(path)
        assert answer.status_code == 401 and "first" not in answer.text


def test_the_link_gives_a_cookie_and_an_address_without_the_key(runs):
    answer = browser(runs).get("/runs/first", params={"open": KEY, "q": "a b"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/first?q=a+b")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))


def test_the_link_leads_nowhere_else(runs):
    answer = browser(runs).get("http://127.0.0.1//elsewhere.example/runs", params={"open": KEY})
    assert answer.status_code == 303 and answer.headers["location"] == "/elsewhere.example/runs"


def test_a_wrong_key_opens_nothing(runs):
    client = browser(runs)
    assert client.get("/", params={"open": "wrong"}).status_code == 401
    client.cookies.set("etude-view-0", "wrong")
    assert client.get("/").status_code == 401


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
