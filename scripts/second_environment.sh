#!/usr/bin/env bash
# Makes a second Python environment over .venv, with another torch and another numpy, once: tests run rollout replicas in
# it while everything else runs in .venv. Needs a finished .venv, whose other libraries it uses. Prints its Python.
#
#   bash scripts/second_environment.sh
#
#   ASYNCFLOW_TORCH_INDEX  package index with CPU builds of torch, used where the usual one only has CUDA builds; where it
#                          is not set either, a CUDA build works too, without NVIDIA's libraries (needs a C compiler)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=$(realpath "${ASYNCFLOW_VENV:-$root/.venv}")
venv=$root/.cache/second
pins=$root/scripts/requirements/second.txt
log=$root/.cache/second.log
stamp=$({ echo "$base" "$venv"; cat "$pins" "$root/scripts/absent_libraries.py"; } | sha256sum | cut -c1-16)

mkdir -p "$root/.cache"
exec 9>"$root/.cache/second.lock"
flock --timeout 900 9
echo "$venv/bin/python"
grep -qxs "$stamp" "$venv/stamp" && exit 0

say() { echo "[set-up] $*" >&2; }
site() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
pip_install() {
    "$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --no-deps --no-compile \
        --disable-pip-version-check "$@" >>"$log" 2>&1
}

[[ -x $base/bin/python ]] || { say "first make the environment: bash scripts/bootstrap.sh dev"; exit 1; }
say "a second environment with another torch in $venv"
rm -rf "$venv"
: >"$log"
trap '[[ $? == 0 ]] || { tail -n 5 "$log"; say "it could not be made (whole log: $log)"; } >&2' EXIT
"$base/bin/python" -m venv --without-pip "$venv"
echo "import site; site.addsitedir('$(site "$base/bin/python")')" >"$(site "$venv/bin/python")/project.pth"
report=$root/.cache/second.json
pip_install --dry-run --ignore-installed --report "$report" -r "$pins"
if "$base/bin/python" "$root/scripts/environment.py" cpu-torch "$report"; then
    pip_install --ignore-installed -r "$pins"
elif [[ -n ${ASYNCFLOW_TORCH_INDEX:-} ]]; then
    pip_install --ignore-installed --extra-index-url "$ASYNCFLOW_TORCH_INDEX" -r "$pins"
else
    for tool in cc readelf nm; do
        command -v "$tool" >/dev/null || {
            echo "no CPU build of torch and no $tool: set ASYNCFLOW_TORCH_INDEX, or install gcc and binutils" >>"$log"
            exit 1
        }
    done
    pip_install --ignore-installed -r "$pins"
    "$base/bin/python" "$root/scripts/absent_libraries.py" "$(site "$venv/bin/python")" >>"$log" 2>&1
fi
"$venv/bin/python" -c 'import numpy, pyarrow, ray, torch, transformers; print(torch.__version__, numpy.__version__)' >>"$log" 2>&1
echo "$stamp" >"$venv/stamp"
