#!/usr/bin/env bash
# Installs MindSpeed, at the commit that goes with the pinned megatron-core, into the Python of an NPU trainer.
#
#   bash scripts/install_mindspeed.sh [PYTHON]      (default: python3)
#
# The package index only holds a stub that fails to install. Load CANN's set_env.sh first: MindSpeed compiles operators.
#   ASYNCFLOW_MINDSPEED_SRC  where to clone from: another address, or a folder that holds the repository
# Written from MindSpeed's instructions; not run on an NPU.
set -euo pipefail

source=${ASYNCFLOW_MINDSPEED_SRC:-https://gitcode.com/Ascend/MindSpeed.git}
commit=e4772499f7eb9fa9a68919dd1eaddef00e915b2d  # branch core_r0.16.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$root/.cache/mindspeed
python=${1:-python3}

"$python" -c 'import torch, torch_npu' || {
    echo "$python has no torch_npu; install it first: $python -m pip install -e '${root}[npu-train]'" >&2
    exit 2
}
if [[ ! -d $folder/.git ]]; then
    mkdir -p "$root/.cache"
    git clone --no-checkout "$source" "$folder"
fi
git -C "$folder" checkout --quiet "$commit"
"$python" -m pip install --no-build-isolation --editable "$folder"
"$python" -c 'import mindspeed; print("MindSpeed", mindspeed.__file__)'
