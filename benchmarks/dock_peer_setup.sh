#!/usr/bin/env bash
# Makes .venv-peer, the environment of the peer's side of dock.py, once. Needs a finished .venv.
#
#   bash benchmarks/dock_peer_setup.sh
#
#   ASYNCFLOW_TORCH_INDEX  package index with CPU builds of torch, used where the usual one only has CUDA builds
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv-peer
pins=$root/benchmarks/dock_peer_requirements.txt
torch_pin=$root/scripts/requirements/torch.txt
stamp=$({ echo "$venv"; cat "$pins" "$torch_pin"; } | sha256sum | cut -c1-16)

grep -qxs "$stamp" "$venv/stamp" && exit 0
[[ -x $root/.venv/bin/python ]] || { echo "[set-up] first: bash scripts/bootstrap.sh" >&2; exit 1; }
eval "$(grep '^torch_index=' "$root/scripts/bootstrap.sh")"
echo "[set-up] the peer in $venv" >&2
rm -rf "$venv"
mkdir -p "$root/.cache"
base=$("$root/.venv/bin/python" -c 'import sys; print(sys._base_executable)')
"$base" -m venv "$venv"
log=$root/.cache/dock_peer_setup.log
: >"$log"
pip_install() { "$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$@" >>"$log" 2>&1; }
trap '[[ $? == 0 ]] || { tail -n 5 "$log"; echo "[set-up] the peer could not be installed (whole log: $log)"; } >&2' EXIT

# As in scripts/bootstrap.sh: the metadata of the wheel tells whether the usual index serves a CUDA build.
report=$root/.cache/dock_peer_torch.json
if pip_install --dry-run --report "$report" -r "$torch_pin" &&
    "$venv/bin/python" "$root/scripts/environment.py" cpu-torch "$report"; then
    pip_install -r "$torch_pin"
else
    pip_install --index-url "$torch_index" -r "$torch_pin"
fi
pip_install -r "$pins"
"$venv/bin/python" -c 'import ray, torch, zmq, transfer_queue' >>"$log" 2>&1
echo "$stamp" >"$venv/stamp"
