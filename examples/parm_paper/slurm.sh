#!/usr/bin/env bash
# The paper's experiments as a Slurm job, one launcher a node. A cluster of 8 nodes with 4 GPUs each:
#
#   sbatch --nodes 8 --gpus-per-node 4 examples/parm_paper/slurm.sh --all-layers
#
# Submit it again after the job's time is up: it goes on where it was.
#SBATCH --job-name=parm_paper
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export NNODES=$SLURM_JOB_NUM_NODES GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-${GPUS_PER_NODE:-4}}
# shellcheck disable=SC2016  # each node expands its own place
exec srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash examples/parm_paper/cluster_8x4.sh "$@"' - "$@"
