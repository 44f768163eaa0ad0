"""`${NAME}`, `${NAME:-default}` and `$$`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.load import interpolate


def escape(text: str) -> str:
    """The text that `interpolate` turns into `text`."""
    return text.replace("$", "$$")


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(max_size=20)
ENVIRONMENTS = st.dictionaries(NAMES, TEXTS, min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${HOST}", "example.org"),
        ("http://${HOST}:${PORT}/v1", "http://example.org:8000/v1"),
        ("${HOST:-localhost}", "example.org"),
        ("${NOT_SET:-localhost}", "localhost"),
        ("${NOT_SET:-}", ""),
        ("${EMPTY}", ""),
        ("${EMPTY:-localhost}", "localhost"),
        ("$${HOST}", "${HOST}"),
        ("$$$${HOST}", "$${HOST}"),
        ("$${HOST} $$ ${HOST}", "${HOST} $ example.org"),
        ("costs 5 $", "costs 5 $"),
        ("$HOST", "$HOST"),
        ("${NESTED}", "${HOST} $$"),
    ],
)
def test_references(text: str, value: str):
    environ = {"HOST": "example.org", "PORT": "8000", "EMPTY": "", "NESTED": "${HOST} $$"}
    assert interpolate(text, environ) == value


def test_a_missing_variable_is_named_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"'API_KYE' is not set; did you mean 'API_KEY'\? Set it, or give"):
        interpolate("${API_KYE}", {"API_KEY": "hunter2"})
    with pytest.raises(
        ValueError, match=r"'HOST' is not set\. Set it, or give a default: \$\{HOST:-default\}"
    ):
        interpolate("${HOST}", {"API_KEY": "hunter2"})


@pytest.mark.parametrize("text", ["${", "${}", "${1X}", "${HOST", "${HOST-x}", "${HO ST}", "a ${:-b}"])
def test_what_only_begins_like_a_reference_is_an_error(text: str):
    with pytest.raises(ValueError, match="must begin"):
        interpolate(text, {"HOST": "example.org"})


@given(TEXTS, ENVIRONMENTS)
def test_escaped_text_comes_back_as_it_was(text: str, environ: dict[str, str]):
    assert interpolate(escape(text), environ) == text


@given(ENVIRONMENTS, st.lists(TEXTS, min_size=1, max_size=6), st.data())
def test_values_are_put_in_as_they_are(environ: dict[str, str], between: list[str], data: st.DataObject):
    """Each reference is replaced once; what a value holds is not looked at again."""
    names = [data.draw(st.sampled_from(sorted(environ))) for _ in between]
    text = "".join(escape(part) + f"${{{name}}}" for part, name in zip(between, names, strict=True))
    assert interpolate(text, environ) == "".join(
        part + environ[name] for part, name in zip(between, names, strict=True)
    )


@given(NAMES, st.text(max_size=20).filter(lambda text: "}" not in text), st.sampled_from([None, ""]))
def test_the_default_stands_in_for_a_variable_that_is_not_set_or_empty(
    name: str, default: str, value: str | None
):
    environ = {} if value is None else {name: value}
    assert interpolate(f"${{{name}:-{default}}}", environ) == default
