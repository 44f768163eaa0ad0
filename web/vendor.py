"""Fetch the front-end packages that package-lock.json names, and copy of them what is used.

    python web/vendor.py

Needs npm. `web/vendored.json` then has the digest of every file, and tests/view/test_pages.py holds the
repository to it, so that nobody needs Node to install Etude, to use its view or to test it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

WEB = Path(__file__).parent
ROOT = WEB.parent
VIEW = "src/etude/view/static/vendor"
TESTS = "tests/view/vendor"
SITE = "docs/vendor"
FILES = {
    "htmx.org/dist/htmx.min.js": f"{VIEW}/htmx.min.js",
    "htmx.org/LICENSE": f"{VIEW}/htmx.LICENSE",
    "uplot/dist/uPlot.iife.min.js": f"{VIEW}/uPlot.min.js",
    "uplot/dist/uPlot.min.css": f"{VIEW}/uPlot.min.css",
    "uplot/LICENSE": f"{VIEW}/uPlot.LICENSE",
    "axe-core/axe.min.js": f"{TESTS}/axe.min.js",
    "axe-core/LICENSE": f"{TESTS}/axe.LICENSE",
    "iframe-worker/shim/index.js": f"{SITE}/iframe-worker.js",
    "iframe-worker/LICENSE": f"{SITE}/iframe-worker.LICENSE",
}
"""Files of packages, and where they go in the repository."""


def main() -> None:
    """Install exactly what the lock file says, copy, and note the digests."""
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=WEB, check=True)
    digests = {}
    for source, place in FILES.items():
        target = ROOT / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(WEB / "node_modules" / source, target)
        digests[place] = {"from": source, "sha256": hashlib.sha256(target.read_bytes()).hexdigest()}
    (WEB / "vendored.json").write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
