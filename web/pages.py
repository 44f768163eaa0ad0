"""Write the pages of the site into build/docs: the pages in docs/, and the README as the first.

An item of a list that is a link to a Python name (docs/api.md) becomes the name's signature and docstring.

`make site` calls it. The site has no other files of the repository: a link to one becomes text and a path.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = ROOT / "build" / "docs"

_BLOCK = r"^```(?P<language>\w*)(?P<orders>[^\n]*)(?P<code>\n.*?^```)$"
_LINK = r"\[(?P<text>[^\]]*)\]\((?P<address>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)"
_NAME = re.compile(r"^- \[`(etude\.[\w.]+)`\]\(\S+\)$", re.MULTILINE)
_PIECE = re.compile(f"{_BLOCK}|{_LINK}", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write the folder anew. The navigation must have every page, which strict builds do not check."""
    listed = {*re.findall(r'"([\w-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))}
    pages = {"index.md", *(page.name for page in DOCS.glob("*.md"))}
    if listed != pages:
        sys.exit(f"zensical.toml and docs/ differ in {', '.join(sorted(listed ^ pages))}")
    shutil.rmtree(BUILT, ignore_errors=True)
    shutil.copytree(DOCS, BUILT)
    for page in DOCS.glob("*.md"):
        (BUILT / page.name).write_text(converted(page), encoding="utf-8")
    (BUILT / "index.md").write_text(converted(ROOT / "README.md"), encoding="utf-8")


def converted(page: Path) -> str:
    """The page with links that the site can follow, and with a block's file as the block's title."""

    def piece(match: re.Match[str]) -> str:
        if match["code"]:
            file = re.search(r" file=(\S+)", match["orders"])
            title = f' title="{file[1]}"' if file else ""
            return f"```{match['language']}{title}{match['code']}"
        path = Path(os.path.normpath(page.parent / match["address"]))
        text, anchor = match["text"], match["anchor"] or ""
        if path == ROOT / "README.md":
            return f"[{text}](index.md{anchor})"
        if path.is_relative_to(DOCS):
            return f"[{text}]({path.relative_to(DOCS)}{anchor})"
        name = f"`{path.relative_to(ROOT)}`"
        return name if text.strip("`") in name else f"{text} ({name})"

    return _PIECE.sub(piece, _NAME.sub(r"::: \1\n", page.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
