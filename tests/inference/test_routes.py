"""Which address a call goes to: conversations stay, a loss moves only its own, and nobody gets too much."""

from __future__ import annotations

import cProfile
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.inference.routes import Routes, conversation_of

URLS = tuple(f"http://node-{number}:8000/v1" for number in range(8))
counts = st.integers(2, 8)
names = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=60)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def routes_of(count: int) -> tuple[Routes, Clock]:
    clock = Clock()
    return Routes(URLS[:count], clock), clock


def homes(routes: Routes, conversations: list[str]) -> dict[str, str]:
    return {name: routes.choose(name).url for name in conversations}


@given(counts, names, st.randoms())
def test_a_conversation_stays_whatever_others_come_and_go(count, conversations, random):
    routes, _ = routes_of(count)
    before = homes(routes, conversations)
    random.shuffle(conversations)
    homes(routes, [f"another {number}" for number in range(40)])
    assert homes(routes, conversations) == before


@given(counts, names, st.integers(0, 7))
def test_a_lost_address_moves_its_own_conversations_and_no_others(count, conversations, lost):
    routes, _ = routes_of(count)
    before = homes(routes, conversations)
    gone = routes.addresses[lost % count]
    routes.set_aside(gone, "refused")
    after = homes(routes, conversations)
    assert gone.url not in after.values()
    moved = {name for name in conversations if after[name] != before[name]}
    assert moved == {name for name in conversations if before[name] == gone.url}
    # No more than its share of them, which has a bound.
    assert len(moved) <= math.ceil(1.25 * len(conversations) / count)


@given(counts, names)
def test_no_address_has_far_more_than_its_share_of_the_conversations(count, conversations):
    routes, _ = routes_of(count)
    shares = Counter(homes(routes, conversations).values())
    assert max(shares.values()) <= math.ceil(1.25 * len(conversations) / count)
    assert [address.conversations for address in routes.addresses] == [shares[url] for url in URLS[:count]]


@given(counts, st.integers(1, 200))
def test_one_conversation_with_many_calls_at_once_is_shared_out(count, calls):
    routes, _ = routes_of(count)
    holding = [routes.call("the same") for _ in range(calls)]
    for call in holding:
        call.__enter__()
    most = max(address.calls for address in routes.addresses)
    assert most <= math.ceil(1.5 * (calls + 1) / count) + 4
    for call in holding:
        call.__exit__(None, None, None)
    assert not any(address.calls for address in routes.addresses)


def test_another_process_with_the_same_addresses_would_rather_have_the_same_homes():
    conversations = [f"episode {number}" for number in range(400)]
    one, other = routes_of(4)[0], Routes(tuple(reversed(URLS[:4])))
    alike = [name for name, url in homes(one, conversations).items() if other.choose(name).url == url]
    assert len(alike) > 0.9 * len(conversations), "but for those that the bound moved"


def test_forgotten_conversations_count_no_more():
    routes, clock = routes_of(2)
    homes(routes, ["a", "b", "c"])
    with routes.call("held"):
        clock.now = 1000.0
        routes.choose("d")
        assert sum(address.conversations for address in routes.addresses) == 2, "d and the one under way"


def test_an_address_that_is_back_gets_one_call_until_it_has_answered():
    routes, _ = routes_of(2)
    one, other = routes.addresses
    routes.set_aside(one, "refused")
    assert set(homes(routes, [str(number) for number in range(10)]).values()) == {other.url}
    routes.take_back(one)
    with routes.call("new 1") as first, routes.call("new 2") as second:
        assert (first, second) == (one, other), "the one that has fewer conversations; then it is busy"
    routes.answered(one)
    assert one.state == "up"
    assert {routes.choose(f"more {number}") for number in range(5)} == {one}, "until it has its share"


def test_a_draining_address_keeps_its_conversations_and_gets_no_new_ones():
    routes, clock = routes_of(2)
    names = [str(number) for number in range(20)]
    before, draining = homes(routes, names), routes.addresses[0]
    routes.drain(draining, 30, "HTTP 503")
    assert homes(routes, names) == before
    assert draining.url not in homes(routes, [f"new {number}" for number in range(20)]).values()
    clock.now = 31
    assert draining.url in homes(routes, [f"newer {number}" for number in range(20)]).values()
    for address in routes.addresses:
        routes.drain(address, 30, "HTTP 503")
    assert routes.choose("all are draining") in routes.addresses


def test_an_address_that_is_taken_out_is_drained_once_its_conversations_are_over():
    routes, _ = routes_of(2)
    names = [str(number) for number in range(20)]
    before, out = homes(routes, names), routes.addresses[0]
    own = [name for name, url in before.items() if url == out.url]
    with routes.call(own[0]):
        routes.take_out([out.url])
        assert homes(routes, names) == before, "those that it has stay"
        assert out.url not in homes(routes, [f"new {number}" for number in range(20)]).values()
        for name in names:
            routes.end(name)
        assert (out.row.state, out.row.conversations, out.row.calls) == ("draining", 1, 1)
    assert (out.row.state, out.row.conversations, out.row.calls) == ("drained", 0, 0)
    routes.take_out([])
    assert out.row.state == "up"
    assert out.url in homes(routes, [f"newer {number}" for number in range(40)]).values()


def test_the_last_address_that_answers_is_used_even_if_it_is_taken_out():
    routes, _ = routes_of(2)
    one, other = routes.addresses
    routes.take_out([one.url])
    routes.set_aside(other, "refused")
    assert routes.choose("a") is one


def test_each_time_that_an_address_fails_it_is_set_aside_for_longer():
    routes, _ = routes_of(2)
    address = routes.addresses[0]
    waits = [routes.set_aside(address, "refused") for _ in range(10)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0] and waits[-1] == 60.0
    routes.take_back(address)
    routes.answered(address)
    assert routes.set_aside(address, "refused") == 0.5


def test_useless_answers_count_only_in_a_row_and_silence_only_where_nobody_was_answered():
    routes, clock = routes_of(2)
    address, clock.now = routes.addresses[0], 5.0
    assert [routes.failed(address, 4.0, is_gone=False) for _ in range(3)] == [False, False, True]
    assert routes.failed(address, 4.0, is_gone=True)
    routes.answered(address)
    assert not routes.failed(address, 4.0, is_gone=True), "somebody was answered since"
    assert not routes.failed(address, 6.0, is_gone=False)
    alone, _ = routes_of(1)
    assert not any(alone.failed(alone.addresses[0], 0.0, is_gone=True) for _ in range(5))


def test_when_all_are_set_aside_the_next_to_be_probed_is_tried_and_never_one_without_the_model():
    routes, clock = routes_of(3)
    for seconds, address in enumerate(routes.addresses):
        clock.now = float(seconds)
        routes.set_aside(address, "refused")
    first, second, _ = routes.addresses
    assert routes.choose("a") is first
    assert routes.choose("b", avoid={first.url}) is second
    first.lacks_model = True
    assert routes.choose("c") is second


@pytest.mark.parametrize("urls", [(), ("http://a/v1", "http://a/v1")])
def test_addresses_are_different_ones(urls):
    with pytest.raises(ValueError, match="one address or several different ones"):
        Routes(urls)


def test_without_an_episode_the_beginning_says_what_belongs_together():
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}
    answered = (system, question, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"})
    first = conversation_of(ChatRequest(messages=(system, question)))
    assert conversation_of(ChatRequest(messages=answered)) == first
    other = (system, {"role": "user", "content": "2 + 2?"})
    assert conversation_of(ChatRequest(messages=other)) != first
    assert conversation_of(ChatRequest(messages=other, conversation="train/3")) == "train/3"
    ids = tuple(range(300))
    prompts = [conversation_of(ChatRequest(messages=(), prompt=ids + more)) for more in ((), (7, 8))]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("count", [4, 400])
def test_the_next_call_of_a_conversation_costs_the_same_among_many_addresses(count):
    routes = Routes([f"http://{number}" for number in range(count)])
    home = routes.choose("talk")
    profile = cProfile.Profile()
    profile.enable()
    again = routes.choose("talk")
    profile.disable()
    assert again is home
    assert sum(entry.callcount for entry in profile.getstats()) < 15
