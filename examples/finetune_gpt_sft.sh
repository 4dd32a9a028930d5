#!/usr/bin/env bash
# Fine-tunes the model of examples/quickstart.sh (which runs first if it has not) on conversations: a question about a
# number, its answer in words. Loss on the answers alone, on another layout than the pretraining had.
#
#   bash examples/finetune_gpt_sft.sh [FOLDER]        the folder of the quickstart (default: runs/quickstart)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-runs/quickstart}
iterations=${2:-60}
python=${PYTHON:-.venv/bin/python}
if [ ! -f "$folder/checkpoints/latest_checkpointed_iteration.txt" ]; then bash examples/quickstart.sh "$folder"; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

$python - "$folder/chat.jsonl" <<'PYTHON'
import json, sys
ones = "zero one two three four five six seven eight nine".split()
with open(sys.argv[1], "w") as lines:
    for number in range(1000):
        words = " ".join(ones[int(digit)] for digit in str(number))
        lines.write(json.dumps({"prompt": f"How is {number} read? ", "completion": f"As {words}."}) + "\n")
PYTHON

# the flags of the model are those of examples/quickstart.sh
$python -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 \
  --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope \
  --attention-dropout 0 --hidden-dropout 0 \
  --num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 1.25 \
  --tokenizer-type GPT2BPETokenizer --vocab-file "$folder/data/vocab.json" --merge-file "$folder/data/merges.txt" \
  --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 \
  --sft --sft-tokenizer-prompt-format identity --data-path "$folder/chat.jsonl" --split 90,8,2 \
  --load "$folder/checkpoints" --finetune --save "$folder/sft" \
  --layer-lr-decay 0.9 --micro-batch-size 4 --global-batch-size 8 --train-iters "$iterations" \
  --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 5 --num-workers 0 \
  --log-interval 10 --eval-interval 30 --eval-iters 2 --log-json "$folder/sft.jsonl"

$python tools/generate_text.py --load "$folder/sft" --prompt "How is 42 read? " --prompt "How is 907 read? " \
  --temperature 0 --max-new-tokens 24
