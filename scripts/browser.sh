#!/usr/bin/env bash
# Brings the headless Chromium and the driver with which tests/report opens reports, once: 0.4 GB. Needs a finished
# .venv, npm and node.
#
#   bash scripts/browser.sh && bash scripts/test.sh tests/report
#
#   ASYNCFLOW_BROWSER  where it lies (default: .cache/browser of the project); empty: none is wanted
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=$(realpath "${ASYNCFLOW_VENV:-$root/.venv}")
home=${ASYNCFLOW_BROWSER-$root/.cache/browser}
log=$home.log
pins=$root/scripts/requirements/browser.txt
package=@sparticuz/chromium@153.0.0 # a headless Chromium inside the package; others fetch theirs from elsewhere
digest=20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0
stamp=$({ echo "$base" "$digest"; cat "$pins"; } | sha256sum | cut -c1-16)

[[ $home ]] || exit 0
mkdir -p "$(dirname "$home")"
exec 9>"$home.lock"
flock --timeout 600 9 || { echo "[set-up] another set-up of the browser did not end in 10 minutes" >&2; exit 1; }
grep -qxs "$stamp" "$home/stamp" && exit 0
[[ -x $base/bin/python ]] || { echo "[set-up] first make the environment: bash scripts/bootstrap.sh dev" >&2; exit 1; }
for tool in npm node; do
    command -v "$tool" >/dev/null || { echo "[set-up] no browser without $tool: apt-get install nodejs npm" >&2; exit 1; }
done
echo "[set-up] headless Chromium in $home" >&2
rm -rf "$home"
mkdir -p "$home"
trap '[[ $? == 0 ]] || { tail -n 5 "$log"; echo "[set-up] the browser could not be installed (whole log: $log)"; } >&2' EXIT
cd "$home"
{
    timeout 300 npm pack --silent "$package"
    echo "$digest  $(ls ./*.tgz)" | sha256sum --check
    tar xzf ./*.tgz
    for part in chromium al2023.tar fonts.tar; do
        node -e 'const [, from, to] = process.argv, fs = require("fs")
fs.createReadStream(from).pipe(require("zlib").createBrotliDecompress()).pipe(fs.createWriteStream(to))' \
            "package/bin/$part.br" "$part"
    done
    mkdir libraries fonts
    tar xf al2023.tar -C libraries
    tar xf fonts.tar -C fonts
    cat >fonts/fonts.conf <<CONF # without a font, form fields would end the browser
<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>$home/fonts</dir><dir>/usr/share/fonts</dir><cachedir>$home/fonts/cache</cachedir></fontconfig>
CONF
    chmod +x chromium
    rm -r package ./*.tgz ./*.tar
    timeout 300 "$base/bin/python" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check \
        --target site -r "$pins"
    [[ -f site/playwright/sync_api/__init__.py ]]
    PYTHONPATH=site "$base/bin/python" -c 'import playwright.sync_api'
} >"$log" 2>&1
echo "$stamp" >stamp
