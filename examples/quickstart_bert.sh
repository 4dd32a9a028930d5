#!/usr/bin/env bash
# Trains a small BERT with Mixture-of-Experts layers on real text, on 4 CPU processes with tensor, expert and
# expert-sharding parallelism, in one command on a bare machine with Python 3.11: words under a mask, and the order of two
# segments. Run it again at any time: what is finished is not done again.
#
#   bash examples/quickstart_bert.sh [FOLDER]        results go to FOLDER (default: runs/quickstart_bert)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-runs/quickstart_bert}
iterations=200

bash tools/make_venv.sh
export OMP_NUM_THREADS=1
python=.venv/bin/python
step() { printf '\n== %s\n' "$*"; }

step "Text and word pieces"
$python examples/quickstart_corpus.py --output-dir "$folder/data" --word-pieces
tokenizer=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$folder/data/vocab.txt")
corpus=$folder/data/corpus_text_sentence
if [ ! -f "$corpus.idx" ] || [ "$folder/data/corpus.jsonl" -nt "$corpus.idx" ]; then
  $python tools/preprocess_data.py --input "$folder/data/corpus.jsonl" --output-prefix "$folder/data/corpus" \
    "${tokenizer[@]}" --split-sentences --workers 2
fi

flags=(
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
  --seq-length 128 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0
  --num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 1.25
  --micro-batch-size 8 --global-batch-size 16 --train-iters $iterations
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95
  --data-path "$corpus" --split 90,8,2 --num-workers 0 "${tokenizer[@]}"
  --log-interval 20 --eval-interval 50 --eval-iters 4 --log-json "$folder/run.jsonl"
)
if [ ! -f "$folder/checkpoints/latest_checkpointed_iteration.txt" ]; then
  step "Before training: the losses of random weights, on one process"
  rm -f "$folder/run.jsonl"
  $python pretrain_bert.py "${flags[@]}" --skip-train
fi
step "Training, 4 processes: tp 2, ep 2, esp 2"
.venv/bin/torchrun --standalone --nproc-per-node 4 pretrain_bert.py "${flags[@]}" \
  --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2 \
  --save "$folder/checkpoints" --load "$folder/checkpoints"

step "Result"
$python tools/plot_run.py "$folder/run.jsonl" --output "$folder/loss.png" \
  --title "quickstart: BERT-MoE on Python's own documentation"
$python examples/quickstart_bert_report.py --log "$folder/run.jsonl" --least-fall 1.0
