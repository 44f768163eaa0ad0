"""Taking a port."""

from __future__ import annotations

import errno
import socket

from etude.core.errors import RequestError

_BACKLOG = 512


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises RequestError when that is not possible."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. asyncio would set it only where the socket was made with IPPROTO_TCP, and an
    # answer whose head and body are two writes waits 40 ms for the client's delayed acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise RequestError(
                f"port {port} on {host} is in use by another program; stop it, or choose another port "
                f"(0 takes a free one)"
            ) from error
        raise RequestError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port"
        ) from error
    listening.setblocking(False)
    return listening
