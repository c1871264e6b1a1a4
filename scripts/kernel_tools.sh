#!/usr/bin/env bash
# Makes the environment with the compilers that check cann_kernels/ without a device, once: 0.7 GB. Needs a finished .venv.
#
#   bash scripts/kernel_tools.sh && bash scripts/test.sh tests/cann_kernels
#
# It is apart from .venv because triton-ascend has the import name of triton.
#   ASYNCFLOW_KERNEL_TOOLS  where it lies (default: .cache/kernel-tools of the project)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=$(realpath "${ASYNCFLOW_VENV:-$root/.venv}")
venv=${ASYNCFLOW_KERNEL_TOOLS:-$root/.cache/kernel-tools}
pins=$root/scripts/requirements/kernels.txt
log=$venv.log
stamp=$({ echo "$base" "$venv"; cat "$pins"; } | sha256sum | cut -c1-16)

grep -qxs "$stamp" "$venv/stamp" && exit 0
[[ -x $base/bin/python ]] || { echo "[set-up] first make the environment: bash scripts/bootstrap.sh dev" >&2; exit 1; }
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock --timeout 900 9 || { echo "[set-up] another set-up of the kernel tools did not end in 15 minutes" >&2; exit 1; }
grep -qxs "$stamp" "$venv/stamp" && exit 0
echo "[set-up] compilers for cann_kernels in $venv" >&2
rm -rf "$venv"
"$base/bin/python" -m venv --without-pip "$venv"
trap '[[ $? == 0 ]] || { tail -n 5 "$log"; echo "[set-up] the kernel tools could not be installed (whole log: $log)"; } >&2' EXIT
timeout 900 "$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --no-deps --no-compile \
    --disable-pip-version-check -r "$pins" >"$log" 2>&1
"$venv/bin/python" -c 'import ascendnpuir, triton.backends.ascend.compiler' >>"$log" 2>&1
echo "$stamp" >"$venv/stamp"
