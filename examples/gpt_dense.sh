#!/usr/bin/env bash
# Pretrain a dense GPT on one server or on several. By default one server of 8 GPUs and a model of 1.3 billion
# parameters.
#
#   DATA_PATH=data/corpus_text_document VOCAB_FILE=gpt2/vocab.json MERGE_FILE=gpt2/merges.txt bash examples/gpt_dense.sh
#
# Four servers of 8 GPUs: the same on each, with NNODES=4 RENDEZVOUS=first-server:29500. Under Slurm: see slurm.sh.
# The same on a laptop without a GPU, on the quickstart's text, in a minute:
#
#   GPUS_PER_NODE=2 TP=2 LAYERS=2 HIDDEN=32 HEADS=4 SEQ=64 MICRO_BATCH=2 GLOBAL_BATCH=8 ITERATIONS=20 PRECISION=fp32 SPLIT=90,5,5 \
#     bash examples/gpt_dense.sh
#
# Further arguments go to pretrain_gpt.py: bash examples/gpt_dense.sh --lr 1e-4
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DATA_PATH:-runs/quickstart/data/corpus_text_document}
checkpoints=${CHECKPOINT_PATH:-runs/gpt_dense}
iterations=${ITERATIONS:-100000}
sequence=${SEQ:-2048}

launch=(torchrun --nnodes "${NNODES:-1}" --nproc-per-node "${GPUS_PER_NODE:-8}")
if [ -n "${RENDEZVOUS:-}" ]; then
  launch+=(--rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${JOB_ID:-gpt-dense}")
else
  launch+=(--standalone)
fi

exec "${launch[@]}" pretrain_gpt.py \
  --num-layers "${LAYERS:-24}" --hidden-size "${HIDDEN:-2048}" --num-attention-heads "${HEADS:-16}" \
  --seq-length "$sequence" --max-position-embeddings "$sequence" \
  --tensor-model-parallel-size "${TP:-2}" --sequence-parallel \
  --micro-batch-size "${MICRO_BATCH:-4}" --global-batch-size "${GLOBAL_BATCH:-512}" --train-iters "$iterations" \
  --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 \
  --precision "${PRECISION:-bf16}" \
  --data-path "$data" --split "${SPLIT:-969,30,1}" \
  --vocab-file "${VOCAB_FILE:-runs/quickstart/data/vocab.json}" \
  --merge-file "${MERGE_FILE:-runs/quickstart/data/merges.txt}" \
  --save "$checkpoints" --load "$checkpoints" --save-interval "${SAVE_INTERVAL:-1000}" --exit-signal-handler \
  --eval-interval "${EVAL_INTERVAL:-1000}" --eval-iters "${EVAL_ITERS:-10}" --log-interval "${LOG_INTERVAL:-10}" \
  --log-json "$checkpoints/run.jsonl" "$@"
