#!/usr/bin/env bash
# Every check of the repository, on a bare machine with Python 3.11: makes .venv if it is missing, then linter, formatter,
# types and tests.
#
#   bash tests/run.sh                  a pairwise cover of every table of layouts, cases and faults
#   bash tests/run.sh --full           everything
#   bash tests/run.sh tests/moe -k s1  any arguments of pytest pass through
#
# Exit code 0 only if all four passed. The last line is pytest's closing line, or names what failed before the tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/make_venv.sh requirements-dev.txt requirements-assets.txt || exit $?
export OMP_NUM_THREADS=1
python=.venv/bin/python
failed=()

step() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check --quiet .
step "mypy" "$python" -m mypy --no-error-summary

echo "== pytest $*"
"$python" -m pytest "$@"
result=$?
if [ ${#failed[@]} -gt 0 ]; then
  (IFS=,; echo "failed before the tests: ${failed[*]}")
  [ $result -ne 0 ] || result=1
fi
exit $result
