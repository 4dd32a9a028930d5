#!/usr/bin/env bash
# Run gpt_dense.sh or gpt_moe.sh on every node of a Slurm job, one torchrun a node. A cluster of 8 nodes with 4 GPUs:
#
#   TP=4 EP=8 ESP=4 sbatch --nodes 8 --gpus-per-node 4 examples/slurm.sh gpt_moe.sh
#
# The job asks for SIGUSR1 two minutes before its time is up: the run saves and ends, and the same line goes on from there.
#SBATCH --job-name=megatron_parm
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
set -euo pipefail
script=${1:?name a script of examples/, for instance gpt_moe.sh}
shift
cd "${SLURM_SUBMIT_DIR:-.}"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
export NNODES=$SLURM_JOB_NUM_NODES GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-${GPUS_PER_NODE:-8}} JOB_ID=$SLURM_JOB_ID
export RENDEZVOUS=$first:${PORT:-29500}
exec srun --kill-on-bad-exit=1 bash "examples/$script" "$@"
