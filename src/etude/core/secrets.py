"""Secrets in text: which values are secret, and how they are masked.

Secret are environment values whose names say so, values that configs declare as secret (`keep_secret`), and
passwords and keys of well-known forms. Models' requests and answers, which are trained on, never change.
"""

import functools
import json
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

T = TypeVar("T")

MASK = "**********"
"""The text that replaces a secret."""

MIN_LENGTH, MIN_DECLARED = 8, 4
"""Minimum characters of a secret from the environment, and of a declared one. Shorter values appear in too
many words. A declared secret under 8 characters is only masked as a whole word, and not at all if it is a
number."""

PLACEHOLDERS = {
    *("none", "null", "empty", "unused", "not-used", "not-needed", "no-key", "nokey", "placeholder"),
    *("test", "testing", "example", "dummy", "fake", "change-me", "changeme"),
    *("token", "secret", "password", "local", "ollama", "vllm"),
}
"""Words that people give where a key is asked for and none is needed, in any case: no secrets."""

_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_ENDINGS = ("KEY", "KEYS", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWD", "PASSPHRASE")
_CONTAINED = ("PASSWORD", "CREDENTIAL", "SECRET", "APIKEY")
_WHOLE = {"PASS", "PWD", "AUTH", "AUTHORIZATION", "BEARER", "COOKIE", "JWT", "PAT", "SAS", "SIGNATURE", "SIG"}

_WEAK = ("KEY", "KEYS", "TOKENS")
"""Endings that also name other things in configs, such as a column of a dataset."""
_OF_KEYS = {"API", "ACCESS", "SECRET", "PRIVATE", "AUTH", "SIGNING", "ENCRYPTION", "ACCOUNT", "MASTER"}
"""Before `KEY`, these words leave no doubt."""
_PLAIN_TOKENS = {
    *("EOS", "BOS", "PAD", "UNK", "SEP", "CLS"),
    *("STOP", "SPECIAL", "IMAGE", "START", "END", "THINK"),
}
"""Before `TOKEN`, these words mean a token of a model's vocabulary."""

_SCHEME = re.compile(r"(?:bearer|basic|token)\s+", re.IGNORECASE)
"""The scheme of an authorization header's value, which is no part of the secret."""
_NUMBER = re.compile(r"[-+.,:\d\sEe]*")
_PATH = re.compile(r"(?:~|\.{1,2})?/")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w\-+/=.~:%]{12,}")

_FORMS: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (("://",), re.compile(r"""(?P<before>://[^\s/@:"'\\<>]*:)[^\s/@"'\\<>]+(?=@)""")),
    (
        ("?", "&", ";"),
        re.compile(
            r"""(?P<before>[?&;](?:[\w.-]*(?:key|token|secret|passw(?:or)?d|signature|credentials?)|sig|auth)=)"""
            r"""[^\s&;#"'\\<>]+""",
            re.IGNORECASE,
        ),
    ),
    (
        ("earer", "asic", "EARER", "ASIC"),
        re.compile(
            r"""(?P<before>\b(?:bearer|basic)\s+)(?=[^\s"'\\]*\d)[a-z0-9._~+/=-]{8,}""", re.IGNORECASE
        ),
    ),
    (
        ("sk-", "hf_", "gh", "glpat-", "xox", "AKIA", "ASIA", "AIza", "eyJ"),
        re.compile(
            r"(?P<before>)\b(?:sk-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
            r"|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{30,}"
            r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
        ),
    ),
    (
        ("PRIVATE KEY-----",),
        re.compile(
            r"(?P<before>)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            re.DOTALL,
        ),
    ),
)
"""Passwords in addresses, keys in their queries, authorization headers, keys of well-known services, and
private keys. A form is only searched if one of its fast substrings is in the text."""

_lock = threading.Lock()
_kept: dict[str, None] = {}
_seen: dict[str, str] = {}
"""The environment values already examined, by name."""


def keep_secret(*values: str | None) -> None:
    """Mask these values in all text from now on."""
    for value in values:
        if value is None:
            continue
        value = value.strip()
        scheme = _SCHEME.match(value)
        for secret in (value, value[scheme.end() :]) if scheme else (value,):
            if _is_long(secret, MIN_LENGTH if _NUMBER.fullmatch(secret) else MIN_DECLARED):
                with _lock:
                    _kept.setdefault(secret)


def mask_secrets(text: str) -> str:
    """Return the text with each secret replaced by `MASK`."""
    for name in list(os.environ):  # Each time, because a program may load keys from a file.
        value = os.environ.get(name, "")
        if _may_hold_secret(name) and _seen.get(name) != value:
            _seen[name] = value
            if "://" in value:
                keep_secret(*secrets_in_address(value))
            elif not _PATH.match(value) and not _NUMBER.fullmatch(value) and _is_long(value):
                keep_secret(value)
    if _kept:
        text = _pattern(tuple(_kept)).sub(MASK, text)
    for marks, form in _FORMS:
        if any(mark in text for mark in marks):
            text = form.sub(rf"\g<before>{MASK}", text)
    return text


def masked_data(data: T) -> T:
    """Return JSON data with all texts masked; the same object if there is nothing to mask."""
    changed: Any = data
    if isinstance(data, str):
        changed = mask_secrets(data)
    elif isinstance(data, dict):
        changed = {masked_data(key): masked_data(value) for key, value in data.items()}
    elif type(data) in (list, tuple):
        changed = type(changed)(map(masked_data, changed))
    return data if changed == data else changed


def holds_secret(name: str, value: Any, *, sure: bool = False) -> bool:
    """Return whether a config entry is or contains a secret, judged by its name and form. If it must be
    `sure`, names that other things also have do not count, such as a dataset column."""
    if not isinstance(value, str) or not _is_long(value):
        return False
    if mask_secrets(value) != value:
        return True
    # Judged more carefully than variables: configs have columns, templates and vocabulary tokens.
    if not is_secret_name(name) or _PATH.match(value) or value.startswith(("<", "[")) or "://" in value:
        return False
    words = [word.upper() for word in _WORDS.split(name) if word]
    if _NUMBER.fullmatch(value) and not is_secret_name(words[-1]):  # A limit of tokens is no secret.
        return False
    is_weak = words[-1] in _WEAK and not _OF_KEYS.intersection(words)
    is_doubtful = is_weak and (sure or _RANDOM.fullmatch(value) is None)
    return not is_doubtful and not _PLAIN_TOKENS.intersection(words)


def secrets_in_address(text: str) -> Iterator[str]:
    """Yield the password of an address, and the values in its query whose names say that they are secret."""
    try:
        parts = urlsplit(text)
        password = parts.password
    except ValueError:
        return
    if parts.scheme and password:
        yield from {password, unquote(password)}
    for name, value in parse_qsl(parts.query) if parts.scheme else ():
        if is_secret_name(name):
            yield value


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a name, such as a variable's, says that its value is secret."""
    words = [word.upper() for word in _WORDS.split(name) if word]
    return any(
        word in _WHOLE or word.endswith(_ENDINGS) or any(each in word for each in _CONTAINED)
        for word in words
    )


@functools.lru_cache(maxsize=4096)
def _may_hold_secret(name: str) -> bool:
    """Return whether an environment variable may be a secret, or an address that contains one."""
    is_address = any(word in name for word in ("URL", "DSN", "URI")) or "PROXY" in name.upper()
    return is_address or is_secret_name(name)


def _is_long(value: str, least: int = MIN_LENGTH) -> bool:
    is_word = value == MASK or value.casefold() in PLACEHOLDERS
    return len(value) >= least and not is_word


@functools.lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str]:
    """Match the values, also as JSON, Python's `repr` and addresses write them; the longest first."""
    forms: dict[str, None] = {}
    for value in values:
        ways = (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
        for form in (*ways, repr(value)[1:-1], quote(value, safe=""), quote(value)):
            forms.setdefault(form)
    patterns = [
        re.escape(form) if len(form) >= MIN_LENGTH else rf"(?<!\w){re.escape(form)}(?!\w)"
        for form in sorted(forms, key=len, reverse=True)
    ]
    return re.compile("|".join(patterns))
