"""Secrets in text: which are found, in which forms, and what is left alone."""

import json
from urllib.parse import quote

import pytest

from etude.core.errors import EtudeError, error_words
from etude.core.secrets import MASK, holds_secret, is_secret_name, keep_secret, mask_secrets, masked_data

SECRET = 'canary "7f3a" \\ ü'


@pytest.mark.parametrize(
    "name", ["MY_API_KEY", "GITHUB_TOKEN", "dbPassword", "AWS_SECRET_ACCESS_KEY", "CREDENTIALS"]
)
def test_a_value_of_the_environment_with_such_a_name_is_masked(monkeypatch, name: str):
    monkeypatch.setenv(name, f"canary-{name}-91")
    assert mask_secrets(f"got canary-{name}-91!") == f"got {MASK}!"


@pytest.mark.parametrize("value", ["/home/me/key.pem", "short", "123456789", "3.14e+10"])
def test_paths_and_numbers_and_short_values_of_the_environment_are_left_alone(monkeypatch, value: str):
    monkeypatch.setenv("SOME_KEY", value)
    assert mask_secrets(f"it is {value}") == f"it is {value}"


def test_the_environment_may_change_at_any_time(monkeypatch):
    assert mask_secrets("canary-late-5512") == "canary-late-5512"
    monkeypatch.setenv("LATE_TOKEN", "canary-late-5512")
    assert mask_secrets("canary-late-5512") == MASK
    monkeypatch.delenv("LATE_TOKEN")
    assert mask_secrets("canary-late-5512") == MASK


@pytest.mark.parametrize("write", [str, json.dumps, repr, quote])
def test_a_secret_is_found_however_it_is_written(write):
    keep_secret(SECRET)
    assert "canary" not in mask_secrets(f"<{write(SECRET)}>")


def test_of_an_authorization_header_the_secret_is_found_alone():
    keep_secret("Bearer canary-bearer-5")
    assert mask_secrets("token canary-bearer-5.") == f"token {MASK}."


def test_a_short_secret_is_found_as_a_word_unless_it_is_a_number():
    keep_secret("hus5", "1000")
    assert mask_secrets("hus5, and xhus5 of 1000") == f"{MASK}, and xhus5 of 1000"


def test_a_long_number_that_is_declared_as_secret_is_found():
    keep_secret("481516234209")
    assert mask_secrets("pin 481516234209") == f"pin {MASK}"


@pytest.mark.parametrize(
    "text, shown",
    [
        ("postgres://me:pw@host/db", f"postgres://me:{MASK}@host/db"),
        ("https://host/a?x=1&api_key=abc&y=2", f"https://host/a?x=1&api_key={MASK}&y=2"),
        ("Authorization: Bearer abc123def", f"Authorization: Bearer {MASK}"),
        ("no key sk-abcdefghij0123456789.", f"no key {MASK}."),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\n", f"{MASK}\n"),
        ('{"a": "http://x", "b": "c:d@e"}', '{"a": "http://x", "b": "c:d@e"}'),
        ("basic arithmetic, bearer bonds, 12:30, a@b.org", "basic arithmetic, bearer bonds, 12:30, a@b.org"),
    ],
)
def test_well_known_forms_are_masked_in_every_text(text: str, shown: str):
    assert mask_secrets(text) == shown


@pytest.mark.parametrize(
    "name, value, is_secret, is_sure",
    [
        ("password", "correct horse", True, True),
        ("api_key", "abcdefgh", True, True),
        ("key", "a1b2c3d4e5f6g7", True, False),
        ("eos_token", "end-of-turn-1", False, False),
        ("pad_token", "<|endoftext|>", False, False),
        ("url", "http://me:secret@host", True, True),
        ("name", "a perfectly fine name", False, False),
        ("key_file", "/run/secrets/key", False, False),
    ],
)
def test_entries_of_a_config(name: str, value: str, is_secret: bool, is_sure: bool):
    assert holds_secret(name, value) is is_secret
    assert holds_secret(name, value, sure=True) is is_sure


def test_names():
    assert is_secret_name("OPENAI_API_KEY") and is_secret_name("x-auth-token")
    assert not is_secret_name("TOKENIZERS_PARALLELISM") and not is_secret_name("KEYBOARD_LAYOUT")


def test_errors_have_no_secrets_in_their_text():
    keep_secret("canary-error-66")
    assert str(EtudeError("refused canary-error-66")) == f"refused {MASK}"
    assert error_words(ValueError("canary-error-66")) == f"ValueError: {MASK}"
    assert "canary" not in error_words(ValueError("x" * 19_990 + "canary-error-66" + "x" * 10_000))


def test_data_without_secrets_is_the_same_object():
    keep_secret("canary-data-8")
    data = {"a": [1, "b", None]}
    assert masked_data(data) is data
    assert masked_data({"a": ["canary-data-8", 1.5]}) == {"a": [MASK, 1.5]}


def test_a_word_that_stands_for_no_key_is_none():
    keep_secret("none", "EMPTY", "Not-Needed")
    text = "say none, or leave it EMPTY where it is not-needed"
    assert mask_secrets(text) == text
