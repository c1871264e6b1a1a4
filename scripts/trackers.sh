#!/usr/bin/env bash
# Makes the environment with the libraries of the trackers W&B, SwanLab and MLflow, once; prints its Python. Needs a
# finished .venv. A run takes it by a setting, and tests/observe tries them there:
#
#   bash scripts/trackers.sh
#   asyncflow train my.yaml --set observe.trackers='[wandb, mlflow]' --set observe.trackers_python=.cache/trackers/bin/python
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=$(realpath "${ASYNCFLOW_VENV:-$root/.venv}")
venv=$root/.cache/trackers
pins=$root/scripts/requirements/trackers.txt
log=$root/.cache/trackers.log
stamp=$({ echo "$base" "$venv"; cat "$pins"; } | sha256sum | cut -c1-16)

grep -qxs "$stamp" "$venv/stamp" && { echo "$venv/bin/python"; exit 0; }
[[ -x $base/bin/python ]] || { echo "[set-up] first make the environment: bash scripts/bootstrap.sh" >&2; exit 1; }
echo "[set-up] W&B, SwanLab and MLflow in $venv" >&2
rm -rf "$venv"
mkdir -p "$root/.cache"
"$base/bin/python" -m venv --without-pip "$venv"
site() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
echo "import site; site.addsitedir('$(site "$base/bin/python")')" >"$(site "$venv/bin/python")/project.pth"
trap '[[ $? == 0 ]] || { tail -n 5 "$log"; echo "[set-up] the trackers could not be installed (whole log: $log)"; } >&2' EXIT
"$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --no-deps --no-compile \
    --disable-pip-version-check -r "$pins" >"$log" 2>&1
"$venv/bin/python" -c 'import mlflow, swanlab, wandb' >>"$log" 2>&1
echo "$stamp" >"$venv/stamp"
echo "$venv/bin/python"
