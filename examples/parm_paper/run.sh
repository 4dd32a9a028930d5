#!/usr/bin/env bash
# The paper's experiments in one command: calibrate, a grid of layers, whole models, the peers, growth, and a report.
#
#   bash examples/parm_paper/run.sh --cluster emulated-2x4 --quick
#   bash examples/parm_paper/run.sh --cluster emulated-8 --results runs/one_node
#
# --cluster is emulated-8, emulated-2x4, emulated-8x4 (this machine; they need root) or torchrun (real ranks; with
# several nodes the same command on each, see slurm.sh). What is finished is not done again, so the same command goes
# on after an interruption. All flags are those of stages.py. The results folder must lie where every node sees it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
data=${DATA:-runs/parm_paper_data}
python=${PYTHON_OF_VENV:-.venv/bin/python}

[ -n "${PYTHON_OF_VENV:-}" ] || bash tools/make_venv.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Real text, the documentation that every Python carries: once for a GPT, once for a BERT.
prepare() {
  local kind=$1 suffix=$2
  shift 2
  if [ ! -f "$data/$kind/corpus_text_$suffix.idx" ]; then
    "$python" tools/preprocess_data.py --input "$data/$kind/corpus.jsonl" --output-prefix "$data/$kind/corpus" \
      --workers 2 "$@"
  fi
}
if [ "${NODE_RANK:-0}" -eq 0 ]; then
  "$python" examples/quickstart_corpus.py --output-dir "$data/gpt"
  prepare gpt document --tokenizer-type GPT2BPETokenizer --vocab-file "$data/gpt/vocab.json" \
    --merge-file "$data/gpt/merges.txt" --append-eod
  "$python" examples/quickstart_corpus.py --output-dir "$data/bert" --word-pieces
  prepare bert sentence --tokenizer-type BertWordPieceLowerCase --vocab-file "$data/bert/vocab.txt" --split-sentences
  : > "$data/ready"
fi
until [ -f "$data/ready" ]; do sleep 1; done

exec "$python" examples/parm_paper/stages.py --data "$data" "$@"
