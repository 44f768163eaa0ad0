#!/usr/bin/env bash
# A run on SLURM: sbatch slurm.sh. Ray is started on every node; the command runs on the first, which is the head.
#SBATCH --job-name=arithmetic
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.out
set -euo pipefail

# On storage that all nodes see: the project, and an environment with Etude and its extra ray.
cd "${PROJECT:-$SLURM_SUBMIT_DIR}"
# shellcheck source=/dev/null
source .venv/bin/activate

# Keys come from the environment of `sbatch`, or from a file that only you can read.
if [[ -r "$HOME/.etude-keys" ]]; then
  # shellcheck source=/dev/null
  source "$HOME/.etude-keys"
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{ print $1 }')

# After a requeue, or when the job was sent again, the run goes on.
run=runs/arithmetic
if [[ -e $run/run.db ]]; then
  command=(etude resume "$run" -o cluster.address=auto)
else
  command=(etude train config.yml --name arithmetic --on auto)
fi

# The secret of this job's cluster, without which nobody else on these nodes can join it or run code there.
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | base64 | tr -d '/+=\n')
export RAY_AUTH_MODE RAY_AUTH_TOKEN

exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_PER_TASK" -- "${command[@]}"
