from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from etude.core.beside import LARGE, beside_loop

NAME: ContextVar[str] = ContextVar("name")


async def test_the_loop_turns_while_large_work_is_done() -> None:
    turned = threading.Event()
    asyncio.get_running_loop().call_later(0.01, turned.set)
    assert await beside_loop(LARGE, turned.wait, timeout=60)


async def test_small_work_is_done_at_once_and_where_it_was_asked_for() -> None:
    assert await beside_loop(LARGE - 1, threading.get_ident) == threading.get_ident()
    assert await beside_loop(LARGE, threading.get_ident) != threading.get_ident()


async def test_the_work_has_the_callers_context() -> None:
    NAME.set("mine")
    assert await beside_loop(LARGE, NAME.get) == "mine"
