"""`${NAME}` and `${NAME:-default}` in the strings of a config; `$$` stands for one dollar sign."""

from __future__ import annotations

import re
from collections.abc import Mapping

from etude.config.nearest import nearest

_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<name>[A-Za-z_]\w*)(?P<default>:-[^}]*)?\}|(?P<broken>\{))"
)


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """`text` with its references replaced. As in a shell, a default also stands in for an empty value.

    What a variable holds is taken as it is, and never shown. Raises ValueError, naming the variable,
    when one without a default is not set, and for a `${` that is not a reference.
    """

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        if match["broken"]:
            raise ValueError("'${' must begin ${NAME} or ${NAME:-default}; write $${ for the text itself")
        name, default = match["name"], match["default"]
        if default is not None:
            return environ.get(name) or default.removeprefix(":-")
        if name not in environ:
            close = nearest(name, environ)
            hint = f"; did you mean '{close}'?" if close else "."
            raise ValueError(
                f"the environment variable '{name}' is not set{hint} "
                f"Set it, or give a default: ${{{name}:-default}}"
            )
        return environ[name]

    return _REFERENCE.sub(value, text)


def escape(text: str) -> str:
    """The text that `interpolate` turns into `text`."""
    return text.replace("$", "$$")
