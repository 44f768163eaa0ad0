"""Which address a call goes to: conversations stay, new ones take turns, and what fails is set aside."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.engines.routes import Address, Routes, conversation_key
from tests.support import pass_time, until

URLS = tuple(f"http://node-{number}:8000/v1" for number in range(8))
counts = st.integers(2, 8)
names = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=60)


def homes(routes: Routes, conversations: list[str]) -> dict[str, str]:
    return {name: routes.choose(name).url for name in conversations}


@given(counts, names, st.randoms(use_true_random=False))
def test_a_conversation_stays_whatever_others_come_and_go(count, conversations, random):
    routes = Routes(URLS[:count])
    before = homes(routes, conversations)
    for number in range(20):
        routes.choose(f"other {number}")
    assert homes(routes, random.sample(conversations, len(conversations))) == before


@given(counts, names, st.integers(0, 7))
def test_a_lost_address_moves_its_own_conversations_and_no_others(count, conversations, lost):
    routes = Routes(URLS[:count])
    before = homes(routes, conversations)
    gone = routes.addresses[lost % count]
    gone.is_aside = True
    after = homes(routes, conversations)
    assert {name for name in before if after[name] != before[name]} == {
        name for name, url in before.items() if url == gone.url
    }
    gone.is_aside = False
    assert homes(routes, conversations) == after, "a conversation that moved stays"


def watched(count: int, reasons: dict[str, str | None]) -> Routes:
    async def probe(address: Address) -> str | None:
        return reasons.get(address.url)

    return Routes(URLS[:count], "tiny", probe)


async def test_each_time_that_an_address_fails_it_is_set_aside_for_longer():
    routes = watched(2, {URLS[0]: "no answer"})
    address = routes.addresses[0]
    waits = []
    for _ in range(9):
        routes.set_aside(address, "no answer")
        waits.append(address.until - time.monotonic())
        address.is_aside = False
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60], abs=0.1)
    routes.answered(address)
    routes.set_aside(address, "no answer")
    assert address.until - time.monotonic() == pytest.approx(0.5, abs=0.1)
    await routes.close()


async def test_an_address_is_used_again_once_its_probe_finds_nothing_wrong():
    reasons: dict[str, str | None] = {URLS[0]: "no answer to a probe"}
    routes = watched(2, reasons)
    address = routes.addresses[0]
    routes.set_aside(address, "gone")
    await asyncio.sleep(0)
    pass_time(1.0)
    await until(lambda: address.reason == "no answer to a probe")
    assert address.is_aside and not routes.has_other([URLS[1]])
    reasons.clear()
    pass_time(60.0)
    await until(lambda: not address.is_aside)
    await routes.close()


async def test_useless_answers_count_only_in_a_row_and_silence_only_where_nobody_was_answered():
    routes = watched(2, {})
    address = routes.addresses[0]

    def fail(since: float, *, is_gone: bool = False) -> bool:
        routes.failed(address, since, "?", is_gone=is_gone)
        return address.is_aside

    assert [fail(time.monotonic()) for _ in range(2)] == [False, False]
    routes.answered(address)
    assert [fail(time.monotonic()) for _ in range(3)] == [False, False, True]
    routes.answered(address)
    assert not fail(0.0, is_gone=True), "it has answered somebody since"
    assert fail(time.monotonic(), is_gone=True)
    await routes.close()


async def test_when_all_are_set_aside_the_next_to_be_probed_is_tried():
    routes = watched(3, {})
    first, second, third = routes.addresses
    for address in (first, second, third):
        routes.set_aside(address, "gone")
    first.until, second.until, third.until = 30.0, 10.0, 20.0
    assert routes.choose("talk") is second
    assert routes.choose("talk", avoid=[second.url]) is third
    await routes.close()


def test_without_an_episode_the_beginning_says_what_belongs_together():
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}
    answered = (system, question, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"})
    first = conversation_key(ChatRequest(messages=(system, question)))
    assert conversation_key(ChatRequest(messages=answered)) == first
    other = (system, {"role": "user", "content": "2 + 2?"})
    assert conversation_key(ChatRequest(messages=other)) != first
    assert conversation_key(ChatRequest(messages=other, conversation="train/3")) == "train/3"
    ids = tuple(range(300))
    prompts = [conversation_key(ChatRequest(messages=(), prompt=ids + more)) for more in ((), (7, 8))]
    assert prompts[0] == prompts[1]
