#!/usr/bin/env bash
# Makes the environment in which tests/peers compares our losses with verl's and TRL's, once. Needs a finished .venv,
# whose torch and transformers it uses.
#
#   bash scripts/peers.sh && bash scripts/test.sh tests/peers
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=$(realpath "${ASYNCFLOW_VENV:-$root/.venv}")
venv=$root/.cache/peers
pins=$root/scripts/requirements/peers.txt
log=$root/.cache/peers.log
stamp=$({ echo "$base" "$venv"; cat "$pins"; } | sha256sum | cut -c1-16)

grep -qxs "$stamp" "$venv/stamp" && exit 0
[[ -x $base/bin/python ]] || { echo "[set-up] first make the environment: bash scripts/bootstrap.sh dev" >&2; exit 1; }
echo "[set-up] verl and TRL in $venv" >&2
rm -rf "$venv"
mkdir -p "$root/.cache"
"$base/bin/python" -m venv --without-pip "$venv"
site() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
echo "import site; site.addsitedir('$(site "$base/bin/python")')" >"$(site "$venv/bin/python")/project.pth"
trap '[[ $? == 0 ]] || { tail -n 5 "$log"; echo "[set-up] the peers could not be installed (whole log: $log)"; } >&2' EXIT
"$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --no-deps --no-compile \
    --disable-pip-version-check -r "$pins" >"$log" 2>&1
"$venv/bin/python" -c 'import trl.trainer.grpo_trainer, verl.trainer.ppo.core_algos' >>"$log" 2>&1
echo "$stamp" >"$venv/stamp"
