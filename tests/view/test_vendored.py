"""The front-end packages in the repository are those that web/ names."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"


def test_the_files_are_those_that_were_noted():
    noted = json.loads((WEB / "vendored.json").read_text(encoding="utf-8"))
    for place, facts in noted.items():
        assert hashlib.sha256((ROOT / place).read_bytes()).hexdigest() == facts["sha256"], (
            f"{place} is not what web/vendored.json says; python web/vendor.py writes both"
        )
    vendored = {
        str(path.relative_to(ROOT))
        for folder in ("src/etude/view/static/vendor", "tests/view/vendor")
        for path in (ROOT / folder).iterdir()
    }
    assert vendored == set(noted)
    assert {"htmx.LICENSE", "uPlot.LICENSE", "axe.LICENSE"} <= {Path(place).name for place in noted}


def test_releases_are_exact_and_locked():
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    wanted = {**package["dependencies"], **package["devDependencies"]}
    lock = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name, release in wanted.items():
        assert re.fullmatch(r"[\d.]+", release)
        assert lock[f"node_modules/{name}"]["version"] == release
        assert lock[f"node_modules/{name}"]["integrity"].startswith("sha512-")
    assert f"(v{wanted['uplot']})" in (ROOT / "src/etude/view/static/vendor/uPlot.min.js").read_text()[:80]
