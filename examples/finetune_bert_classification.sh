#!/usr/bin/env bash
# Fine-tunes a BERT that was trained on chemical reactions (package rxnfp, MIT licence) to tell which functional group a
# reaction changes, and the same model from random weights, with five seeds each; prints accuracy, F1 and Matthews
# correlation of each, and fails if the trained encoder is not ahead by 5 points of accuracy in the mean. The reactions
# are made up by examples/finetune_bert_data.py, which says how.
#
#   bash examples/finetune_bert_classification.sh [FOLDER] [SEEDS] [ITERATIONS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-runs/finetune_bert}
seeds=${2:-5}
iterations=${3:-15}
python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || bash tools/make_venv.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

find='from importlib.util import find_spec as f; s = f("rxnfp"); print(s.submodule_search_locations[0] if s else "")'
package=$($python -c "$find")
if [ -z "$package" ]; then
  $python -m pip install -q --no-deps rxnfp==0.1.0
  package=$($python -c "$find")
fi
trained=$package/models/transformers/bert_pretrained
$python examples/finetune_bert_data.py --output-dir "$folder" --vocabulary "$trained/vocab.txt"

flags=(
  --num-layers 12 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --bert-layout original
  --norm-epsilon 1e-12 --seq-length 80 --max-position-embeddings 512
  --tokenizer-type BertWordPieceCase --vocab-file "$folder/vocab.txt"
  --train-data-path "$folder/train.tsv" --test-data-path "$folder/test.tsv"
  --class-names ester ketone alcohol nitrile carbamate acid
  --micro-batch-size 16 --global-batch-size 16 --train-iters "$iterations"
  --lr 5e-4 --lr-warmup-fraction 0.1 --eval-iters 0 --num-workers 0 --log-interval 5 --no-save-optim
)
for seed in $(seq 1 "$seeds"); do
  for start in trained random; do
    encoder=()
    if [ "$start" = trained ]; then encoder=(--pretrained-checkpoint "$trained"); fi
    $python finetune_bert.py "${flags[@]}" --seed "$seed" --save "$folder/$start-$seed" "${encoder[@]}"
  done
done
$python examples/finetune_bert_report.py --folder "$folder" --seeds "$seeds" --least-gain 5
