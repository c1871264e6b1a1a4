#!/usr/bin/env bash
# Makes .venv-trl, the environment of the TRL side of main_job.py, once. Needs a finished .venv.
#
#   bash benchmarks/trl_setup.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv-trl
pins=$root/benchmarks/trl_requirements.txt
torch_pin=$root/scripts/requirements/torch.txt
stamp=$(cat "$pins" "$torch_pin" | sha256sum | cut -c1-16)

grep -qxs "$stamp" "$venv/stamp" && exit 0
eval "$(grep '^torch_index=' "$root/scripts/bootstrap.sh")"
echo "[set-up] TRL in $venv" >&2
rm -rf "$venv"
mkdir -p "$root/.cache"
base=$("$root/.venv/bin/python" -c 'import sys; print(sys._base_executable)')
"$base" -m venv "$venv"
log=$root/.cache/trl_setup.log
: >"$log"
pip_install() { "$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$@" >>"$log" 2>&1; }
trap '[[ $? == 0 ]] || { tail -n 5 "$log"; echo "[set-up] TRL could not be installed (whole log: $log)"; } >&2' EXIT

# As in scripts/bootstrap.sh: the metadata of the wheel tells whether the usual index serves a CUDA build.
report=$root/.cache/trl_torch.json
if pip_install --dry-run --report "$report" -r "$torch_pin" &&
    "$venv/bin/python" "$root/scripts/environment.py" cpu-torch "$report"; then
    pip_install -r "$torch_pin"
else
    pip_install --index-url "$torch_index" -r "$torch_pin"
fi
pip_install -r "$pins"
"$venv/bin/python" -c 'from trl import GRPOTrainer' 2>>"$log"
echo "$stamp" >"$venv/stamp"
