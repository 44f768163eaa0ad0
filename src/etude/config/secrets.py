"""The secrets that a config holds: what its classes declare, and what looks like one anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import SecretBytes, SecretStr

from etude.config.document import KeyPath, strings
from etude.config.schema import Config
from etude.config.slots import Slot, walk
from etude.core.secrets import holds_secret, keep_secret, secrets_in_address

Declared = SecretStr | SecretBytes
"""The classes of values that are declared as secret."""


def secrets_in(data: Any, *, sure: bool = False) -> Iterator[tuple[KeyPath, str]]:
    """The texts that are secret by their names and forms, each with its path, as in `holds_secret`."""
    for path, text in strings(data):
        name = next((key for key in reversed(path) if isinstance(key, str)), "")
        if holds_secret(name, text, sure=sure):
            yield path, text


def secrets_of(config: Config, data: Any, *, sure: bool = False) -> dict[KeyPath, str]:
    """All secrets of a config, by their paths; `data` is its JSON.

    A default is none: anybody can read it. `sure` leaves out what may be something else.
    """
    slots = {path: (slot, value) for path, slot, value in walk(config, Slot(Config))}
    declared = {
        path: _plain(value)
        for path, (slot, value) in slots.items()
        if isinstance(value, Declared) and value != slot.default and value.get_secret_value()
    }
    looking = {
        path: text
        for path, text in secrets_in(data, sure=sure)
        if path not in slots or (slots[path][0].default != text and not isinstance(slots[path][1], Declared))
    }
    return looking | declared


def remember_secrets(config: Config, data: Any) -> None:
    """Have the secrets of a config masked in all text from now on."""
    for text in secrets_of(config, data).values():
        keep_text(text)


def keep_text(text: str) -> None:
    """Have a secret masked from now on; of an address, what is secret in it."""
    keep_secret(*secrets_in_address(text) if "://" in text else (text,))


def _plain(value: Any) -> str:
    plain = value.get_secret_value()
    return plain.decode(errors="replace") if isinstance(plain, bytes) else str(plain)
