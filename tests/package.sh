#!/usr/bin/env bash
# Builds the sdist, and the wheel from it, into dist/ or the folder that is named; then tries the wheel in a fresh environment.
# Usage: tests/package.sh [FOLDER]     PYTHON names the interpreter, which needs hatchling; by default that of .venv
set -euo pipefail

checkout=$(cd "$(dirname "$0")/.." && pwd)
dist=$(realpath -m "${1:-$checkout/dist}")
python=${PYTHON:-$checkout/.venv/bin/python}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

rm -f "$dist"/etude-*
(cd "$checkout" && "$python" -m hatchling build -t sdist -d "$dist")
tar -xzf "$dist"/etude-*.tar.gz -C "$place"
cd "$place"/etude-*
# What an example leaves beside itself is in no wheel.
mkdir -p examples/sort/{base,runs}
touch examples/sort/{base/weights,runs/run.db}
"$python" -m hatchling build -t wheel -d "$dist"

"$python" - "$dist" <<'PROGRAM'
import subprocess, sys, tarfile, zipfile
from pathlib import Path

(sdist,), (wheel,) = Path(sys.argv[1]).glob("etude-*.tar.gz"), Path(sys.argv[1]).glob("etude-*.whl")
inside = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
packed = set(zipfile.ZipFile(wheel).namelist())
beside = {f"etude/{name}" for name in inside if name.startswith(("examples/", "docs/"))} - {"etude/docs/view.gif"}
of_source = {name.removeprefix("src/") for name in inside if name.startswith("src/")}
wrong = (of_source | beside) ^ {name for name in packed if ".dist-info/" not in name}
assert not wrong, f"in one of sdist and wheel alone: {sorted(wrong)}"
wanted = ["py.typed", "view/templates/run.html", "view/static/view.css", "view/static/vendor/htmx.LICENSE"]
wanted += ["preflight/starter_files/tickets/train.jsonl.txt", "examples/code_validation/programs.jsonl", "cli/skill.md"]
assert {f"etude/{name}" for name in wanted} <= packed, wanted
stray = [name for name in inside if any(part in name for part in ("/runs/", "__pycache__", ".db", ".venv", "/base/"))]
assert not stray, f"left by a run: {stray}"
assert sdist.stat().st_size < 4e6 > wheel.stat().st_size, "more than 4 MB"
PROGRAM

"$python" -m venv "$place/venv"
export PATH="$place/venv/bin:$PATH"
unset PYTHONPATH VIRTUAL_ENV
pip install --quiet --constraint "$checkout/constraints.txt" "$dist"/etude-*.whl
cd "$place"
etude --version
etude --help > /dev/null
python -c '
import sys, etude
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
assert "site-packages" in etude.__file__
for name in etude.__all__: getattr(etude, name)'
for task in larger tickets sql game tool; do etude init "$task" --task "$task" > /dev/null; done
# Without the extra `local` the check reads agent, data and config, and says what is missing.
etude check larger/config.yml > checked.txt || [ $? = 2 ]
grep --quiet '^✓ examples: 512' checked.txt
grep '^✗' checked.txt | grep --invert-match "needs the extra 'local'" && exit 1
ls -l "$dist"
