from __future__ import annotations

import socket

import pytest

from etude.core.errors import RequestError
from etude.wire.listening import listen


def test_answers_in_two_writes_do_not_wait_for_an_acknowledgement():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_a_wrong_request():
    with listen("127.0.0.1", 0) as first, pytest.raises(RequestError, match="is in use by another program"):
        listen("127.0.0.1", first.getsockname()[1])
