#!/usr/bin/env bash
# Linter and type checker over the whole project; makes the environment first where it is missing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/bootstrap.sh" dev
cd "$root"
python=${ASYNCFLOW_VENV:-$root/.venv}/bin/python
"$python" -m ruff check .
"$python" -m mypy mindspeed_asyncflow
