#!/usr/bin/env bash
# Installs MindSpeed, at the commit that goes with the pinned megatron-core, into the Python of an NPU trainer.
#
#   bash scripts/install_mindspeed.sh [PYTHON]      (default: python3)
#
# The package index only holds a stub that fails to install. Load CANN's set_env.sh first: MindSpeed compiles operators
# at first use.
#   ASYNCFLOW_MINDSPEED_SRC  where to clone from: another address, or a folder that holds the repository
#
# Which versions go together, after the README of the branch:
#   MindSpeed core_r0.16.0   megatron-core 0.16 (the wheel is enough: arguments that need Megatron-LM's tree are refused)
#   torch 2.7.1              torch_npu 2.7.1.post8 on CANN 9.1.0, 2.7.1.post4 on CANN 9.0.0
#   Python 3.10 or 3.11      triton-ascend: MindSpeed imports `triton` when it is loaded, whatever is switched on
# The vendor's older release, 26.1.0_core_r0.12.1, has the same torch_npu and megatron-core 0.12.1.
set -euo pipefail

case ${1:-} in
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "$1: expected nothing, or a Python" >&2; exit 2 ;;
esac

source=${ASYNCFLOW_MINDSPEED_SRC:-https://gitcode.com/Ascend/MindSpeed.git}
branch=core_r0.16.0
commit=e4772499f7eb9fa9a68919dd1eaddef00e915b2d
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${ASYNCFLOW_MINDSPEED_DIR:-$root/.cache/mindspeed}
python=${1:-python3}

"$python" -c 'import torch, torch_npu' || {
    echo "$python has no torch_npu; install it first: $python -m pip install -e '${root}[npu-train]'" >&2
    exit 2
}
torch=$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')
if [[ $torch != 2.7.1 ]]; then
    echo "warning: MindSpeed $branch is released for torch 2.7.1, $python has $torch" >&2
fi
core=$("$python" -c 'from importlib.metadata import version; print(version("megatron-core"))' 2>/dev/null || echo none)
if [[ $core != 0.16.* ]]; then
    echo "MindSpeed $branch changes megatron-core 0.16, $python has $core: $python -m pip install megatron-core==0.16.1" >&2
    exit 2
fi
"$python" -c 'import triton' 2>/dev/null || {
    echo "$python has no triton, which MindSpeed imports when it is loaded: $python -m pip install triton-ascend" >&2
    exit 2
}
if [[ ! -d $folder/.git ]]; then
    mkdir -p "$(dirname "$folder")"
    git clone --no-checkout "$source" "$folder"
fi
git -C "$folder" cat-file -e "$commit^{commit}" 2>/dev/null || git -C "$folder" fetch origin "$branch"
git -C "$folder" checkout --quiet "$commit"
"$python" -m pip install --no-build-isolation --editable "$folder"
"$python" -c 'import mindspeed; print("MindSpeed", mindspeed.__file__)'
echo "MindSpeed branch $branch, commit $commit"
