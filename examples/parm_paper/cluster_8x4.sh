#!/usr/bin/env bash
# The paper's experiments on a cluster of 8 nodes with 4 GPUs each: run this on every node, or submit slurm.sh.
#
#   NODE_RANK=0 MASTER_ADDR=first-node bash examples/parm_paper/cluster_8x4.sh      on the first node
#   NODE_RANK=1 MASTER_ADDR=first-node bash examples/parm_paper/cluster_8x4.sh      on the second, and so on
#
# The repository and RESULTS must lie on a file system that all nodes share.
set -euo pipefail
export NODE_RANK=${NODE_RANK:?the place of this node, from 0}
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --cluster torchrun --nodes "${NNODES:-8}" \
  --ranks-per-node "${GPUS_PER_NODE:-4}" --node-rank "$NODE_RANK" \
  --master-addr "${MASTER_ADDR:?the name of the first node}" --master-port "${MASTER_PORT:-29500}" \
  --results "${RESULTS:-runs/parm_paper_8x4}" "$@"
