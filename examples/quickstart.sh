#!/usr/bin/env bash
# Trains a small GPT with Mixture-of-Experts layers on real text, on 4 CPU processes with tensor, expert and
# expert-sharding parallelism, in one command on a bare machine with Python 3.11. Run it again at any time: what is
# finished is not done again, and an interrupted run goes on from its last checkpoint.
#
#   bash examples/quickstart.sh [FOLDER]        results go to FOLDER (default: runs/quickstart)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-runs/quickstart}
iterations=240
half=$((iterations / 2))

bash tools/make_venv.sh
export OMP_NUM_THREADS=1
python=.venv/bin/python
step() { printf '\n== %s\n' "$*"; }

step "Text and tokenizer"
$python examples/quickstart_corpus.py --output-dir "$folder/data"
corpus=$folder/data/corpus_text_document
if [ ! -f "$corpus.idx" ] || [ "$folder/data/corpus.jsonl" -nt "$corpus.idx" ]; then
  $python tools/preprocess_data.py --input "$folder/data/corpus.jsonl" --output-prefix "$folder/data/corpus" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$folder/data/vocab.json" --merge-file "$folder/data/merges.txt" \
    --append-eod --workers 2
fi

flags=(
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
  --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
  --num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 1.25
  --micro-batch-size 8 --global-batch-size 16 --train-iters $iterations
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95
  --data-path "$corpus" --split 90,8,2 --num-workers 0
  --tokenizer-type GPT2BPETokenizer --vocab-file "$folder/data/vocab.json" --merge-file "$folder/data/merges.txt"
  --log-interval 20 --eval-interval 40 --eval-iters 4 --log-json "$folder/run.jsonl" --tensorboard-dir "$folder/tensorboard"
)
parallel=(--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2)
train=(
  .venv/bin/torchrun --standalone --nproc-per-node 4 pretrain_gpt.py "${flags[@]}" "${parallel[@]}"
  --save "$folder/checkpoints" --load "$folder/checkpoints" --save-interval 60 --exit-interval $half
)
reached() { cat "$folder/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

if [ "$(reached)" -lt 1 ]; then
  step "Before training: the loss of random weights, on one process"
  rm -f "$folder/run.jsonl"
  $python pretrain_gpt.py "${flags[@]}" --skip-train
fi
if [ "$(reached)" -lt $half ]; then
  step "Training to iteration $half, 4 processes: tp 2, ep 2, esp 2"
  "${train[@]}"
fi
if [ "$(reached)" -lt $iterations ]; then
  step "Resuming from the checkpoint to iteration $iterations"
  "${train[@]}"
fi

step "Result"
entropy=$($python examples/quickstart_report.py --log "$folder/run.jsonl" --data-path "$corpus" --split 90,8,2 \
  --vocab-file "$folder/data/vocab.json" --entropy-only)
$python tools/plot_run.py "$folder/run.jsonl" --output "$folder/loss.png" --title "quickstart: GPT-MoE on Python's own documentation" \
  --reference "unigram entropy of the validation text=$entropy"
step "Sampled text"
$python tools/generate_text.py --load "$folder/checkpoints" --prompt "Return the " --num-samples 3 --max-new-tokens 40 \
  --temperature 0.7 --top-k 50
$python examples/quickstart_report.py --log "$folder/run.jsonl" --data-path "$corpus" --split 90,8,2 \
  --vocab-file "$folder/data/vocab.json"
