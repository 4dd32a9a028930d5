#!/usr/bin/env bash
# The paper's experiments on one server of 8 GPUs, with nothing emulated and the layers in full size.
#
#   bash examples/parm_paper/server_8gpu.sh                    a stratified sample of the reconstructed grid
#   bash examples/parm_paper/server_8gpu.sh --all-layers       all 1296 layers
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --cluster torchrun --nodes 1 --ranks-per-node "${GPUS_PER_NODE:-8}" \
  --results "${RESULTS:-runs/parm_paper_8gpu}" "$@"
