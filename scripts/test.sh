#!/usr/bin/env bash
# Runs the tests; makes the environment first where it is missing. The exit status is pytest's.
#
#   bash scripts/test.sh [--fast | --nightly] [pytest arguments]
#
# Default: everything but the nightly sweeps. --fast: no test that starts engines or several processes.
# --nightly: everything, with the packaged model and tasks.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
layers=(dev)
marks="not nightly"
kernel_tools=yes
case ${1:-} in
    --fast) marks="not nightly and not slow"; kernel_tools=; shift ;;
    --nightly) marks=""; layers+=(tasks); shift ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

bash "$root/scripts/bootstrap.sh" "${layers[@]}"
if [[ $kernel_tools ]]; then
    # Named, so that tests/cann_kernels fails instead of skipping where it is incomplete.
    export ASYNCFLOW_KERNEL_TOOLS=${ASYNCFLOW_KERNEL_TOOLS:-$root/.cache/kernel-tools}
    bash "$root/scripts/kernel_tools.sh"
    bash "$root/scripts/browser.sh" || echo "[set-up] the tests of tests/report that need a browser are skipped" >&2
fi
cd "$root"
# One thread per process, and no spinning while it waits: several processes share few cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
exec "${ASYNCFLOW_VENV:-$root/.venv}/bin/python" -m pytest -m "$marks" "$@"
