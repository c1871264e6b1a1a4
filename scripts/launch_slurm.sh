#!/usr/bin/env bash
#SBATCH --job-name=asyncflow
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:TERM@90
# Trains over the nodes of a Slurm job: srun takes the place of ssh in scripts/launch_qwen_grpo.sh --hosts.
#
#   cd PROJECT && sbatch --nodes=4 scripts/launch_slurm.sh [arguments of scripts/launch_qwen_grpo.sh]
#   sbatch --nodes=2 --gres=npu:16 scripts/launch_slurm.sh --platform npu --config my.yaml
#
# The first node leads. Output is in the job's file and in runs/latest/logs. When the time limit is near, or the job is
# cancelled, the run is stopped on all nodes. Exit status: that of launch_qwen_grpo.sh.
#   ASYNCFLOW_ROOT   the project, if the job was not submitted from there
#   ASYNCFLOW_SLOTS  devices of each node (default: the NPUs that it has)
#   ASYNCFLOW_SRUN   more options of srun, such as --gres=npu:16 where steps do not have those of the job
set -euo pipefail

[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '7,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; }
if [[ -z ${SLURM_JOB_ID:-} || -z ${SLURM_JOB_NODELIST:-} ]]; then
    echo "not inside a Slurm job: submit it with sbatch --nodes=N ${BASH_SOURCE[0]}" >&2
    exit 2
fi
# Slurm runs a copy of this file, which lies elsewhere.
root=${ASYNCFLOW_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
if [[ ! -f $root/scripts/launch_qwen_grpo.sh ]]; then
    echo "$root is not the project: submit from there, or set ASYNCFLOW_ROOT" >&2
    exit 2
fi
if [[ ! ${ASYNCFLOW_SLOTS:-1} =~ ^[1-9][0-9]*$ ]]; then
    echo "ASYNCFLOW_SLOTS=$ASYNCFLOW_SLOTS: a number of devices from 1 on is expected" >&2
    exit 2
fi

hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || {
    echo "scontrol cannot name the nodes of SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST (the lines above say why);" >&2
    echo "Slurm's commands must be in PATH on the nodes of the job, scontrol and srun" >&2
    exit 2
}
while read -r name; do echo "$name${ASYNCFLOW_SLOTS:+ slots=$ASYNCFLOW_SLOTS}"; done <<<"$names" >"$hosts"

# A step for each node beside the batch step, with all of its CPUs and memory; the agent comes as the last word.
launcher="srun --overlap --nodes=1 --ntasks=1 --nodelist={host} --cpus-per-task=${SLURM_CPUS_ON_NODE:-1} --mem=0"
launcher+=" --cpu-bind=none --unbuffered --export=ALL ${ASYNCFLOW_SRUN:-} bash -c"
bash "$root/scripts/launch_qwen_grpo.sh" --hosts "$hosts" --launcher "$launcher" "$@" &
launch=$!
trap 'kill -TERM "$launch" 2>/dev/null || true' TERM INT
status=0
wait "$launch" || status=$?
# A signal ends the first wait, not the launch.
while kill -0 "$launch" 2>/dev/null; do
    status=0
    wait "$launch" || status=$?
done
exit "$status"
