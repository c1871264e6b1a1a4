#!/usr/bin/env bash
# Builds the pages of docs/ as a site that also opens from the disk (without its search) and loads nothing from the
# network. Any warning, such as a link that leads nowhere, is an error. Makes its environment first where it is missing
# (0.1 GB); needs a finished .venv.
#
#   bash scripts/docs.sh [FOLDER]      (default: .cache/site of the project)
#   bash scripts/docs.sh --serve       shows the pages at http://127.0.0.1:8000 and again whenever one is changed
set -euo pipefail

case ${1:-} in
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=$(realpath "${ASYNCFLOW_VENV:-$root/.venv}")
venv=$(realpath -m "$root/.cache/docs")
pins=$root/scripts/requirements/docs.txt
log=$root/.cache/docs.log
stamp=$({ echo "$base" "$venv"; cat "$pins"; } | sha256sum | cut -c1-16)

[[ -x $base/bin/python ]] || { echo "[set-up] first make the environment: bash scripts/bootstrap.sh dev" >&2; exit 1; }
mkdir -p "$root/.cache"
exec 9>"$root/.cache/docs.lock"
flock --timeout 900 9 || { echo "[set-up] another build of the pages did not end in 15 minutes" >&2; exit 1; }
if ! grep -qxs "$stamp" "$venv/stamp"; then
    echo "[set-up] mkdocs-material in $venv" >&2
    rm -rf "$venv"
    "$base/bin/python" -m venv --without-pip "$venv"
    trap '[[ $? == 0 ]] || { tail -n 5 "$log"; echo "[set-up] it could not be installed (whole log: $log)"; } >&2' EXIT
    timeout 900 "$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --no-deps --no-compile \
        --disable-pip-version-check -r "$pins" >"$log" 2>&1
    "$venv/bin/python" -c 'import material, mkdocs' >>"$log" 2>&1
    echo "$stamp" >"$venv/stamp"
    trap - EXIT
fi
settings=$root/scripts/docs/mkdocs.yml
export NO_MKDOCS_2_WARNING=1  # advertising of the theme
if [[ ${1:-} == --serve ]]; then
    exec "$venv/bin/python" -m mkdocs serve --config-file "$settings" --strict
fi
exec "$venv/bin/python" -m mkdocs build --strict --config-file "$settings" --site-dir "$(realpath -m "${1:-$root/.cache/site}")"
