"""How an extra of Etude is installed, here."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """The command that adds the extra to this environment: `pip install -e '/home/me/etude[plots]'`.

    It names what Etude was installed from, a checkout or a file (PEP 610), so that it can be typed anywhere.
    """
    try:
        origin = json.loads(distribution("etude").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    source = unquote(urlsplit(url).path) if url.startswith("file:") else "etude"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"
