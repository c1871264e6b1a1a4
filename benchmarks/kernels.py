"""The vocabulary operator of cann_kernels/: how exact, how much memory, how fast; does it fit into an NPU's buffer?

    python benchmarks/kernels.py [--rows N] [--platform auto|cpu|npu]

Run it with the Python of .venv. It installs the kernel compilers if they are missing. Where an NPU is found, the
kernels run on it too, and time and memory there are printed. The last line printed is one JSON object; README.md says
what its keys mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where the package is not installed

import torch

from cann_kernels import exactly
from cann_kernels.host import host_kernels
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import kernels
from mindspeed_asyncflow.platforms.base import current
from mindspeed_asyncflow.platforms.npu import device_count
from mindspeed_asyncflow.platforms.vocabulary import logprob_and_entropy, rebased, vocabulary_stats

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 151_936
DTYPES = (torch.bfloat16, torch.float32)
TEMPERATURE = 0.7
ENTROPY_WEIGHT = 0.01  # so that both results have a gradient
TIMED = 3  # runs, of which the fastest counts
BUILD_S = 300

Run = Callable[[torch.Tensor, torch.Tensor], None]


def build(folder: Path) -> list[dict[str, Any]]:
    """The report of cann_kernels.build, with compilers that are installed first where they are missing."""
    if subprocess.run(["bash", str(ROOT / "scripts/kernel_tools.sh")], check=False, timeout=1000).returncode:
        sys.exit("the kernel compilers could not be installed (the lines above say why)")
    python = Path(os.environ.get("ASYNCFLOW_KERNEL_TOOLS") or ROOT / ".cache/kernel-tools") / "bin/python"
    subprocess.run([python, "-m", "cann_kernels.build", folder], cwd=ROOT, check=False, timeout=BUILD_S)
    return json.loads((folder / "report.json").read_text())


def logits_of(rows: int, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, VOCABULARY, generator=generator).mul_(scale).to(dtype)
    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    targets[0] = logits[0].argmax()
    return logits, targets


def errors(device: torch.device) -> tuple[float, float]:
    """Largest (log-probability, entropy) error against float64 over types, logit scales and one or four shards."""
    worst = [0.0, 0.0]
    for dtype in DTYPES:
        for scale in (1.0, 3.0, 8.0, 30.0):
            logits, targets = logits_of(4, scale, dtype)
            wanted = exactly.in_float64(logits, targets, TEMPERATURE)
            for shards in (1, 4):
                parts = [part.to(device) for part in exactly.cut(logits, shards)]
                found = exactly.over_shards(parts, targets.to(device), TEMPERATURE, VOCABULARY)
                for i in range(2):
                    worst[i] = max(worst[i], float((found[i].cpu() - wanted[i]).abs().max()))
    return worst[0], worst[1]


def with_torch(logits: torch.Tensor, targets: torch.Tensor) -> None:
    """Forward and backward of fp32 log-softmax and entropy."""
    logprobs = (logits.float() / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    (logprobs.gather(1, targets.unsqueeze(1)).sum() + ENTROPY_WEIGHT * entropy.sum()).backward()


def with_operator(logits: torch.Tensor, targets: torch.Tensor) -> None:
    stats = vocabulary_stats(logits, targets, temperature=TEMPERATURE)
    sums = rebased(stats, stats.top, TEMPERATURE)
    logprob, entropy = logprob_and_entropy(sums, stats.top, TEMPERATURE)
    (logprob.sum() + ENTROPY_WEIGHT * entropy.sum()).backward()


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def cost_on_cpu(run: Run, logits: torch.Tensor, targets: torch.Tensor) -> tuple[int, float]:
    """(bytes by which the resident set grew at most, CPU seconds of the fastest run)"""
    run(logits[:2].detach().requires_grad_(), targets[:2])  # first calls load code
    peaks, seconds = [], []
    for _ in range(TIMED):
        logits.grad = None
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before, started = status_bytes("VmRSS"), time.process_time()
        run(logits, targets)
        seconds.append(time.process_time() - started)
        peaks.append(status_bytes("VmHWM") - before)
    logits.grad = None
    return max(peaks), min(seconds)


def compared_on_cpu(rows: int) -> tuple[float, float]:
    """(peak bytes, CPU time) of the operator over torch, each for the type of logits where it is larger."""
    memory, times = [], []
    for dtype in DTYPES:
        logits, targets = logits_of(rows, 3.0, dtype)
        logits.requires_grad_()
        (peak, seconds), (their_peak, their_seconds) = (
            cost_on_cpu(run, logits, targets) for run in (with_operator, with_torch)
        )
        print(
            f"{dtype!s:15} {rows} x {VOCABULARY}: operator {peak / 2**20:.0f} MiB, {seconds:.2f} s;"
            f" torch {their_peak / 2**20:.0f} MiB, {their_seconds:.2f} s"
        )
        memory.append(peak / their_peak)
        times.append(seconds / their_seconds)
    return max(memory), max(times)


def measured_on_npu(platform: Any, rows: int) -> dict[str, Any]:
    """Errors, milliseconds and peak bytes of operator and torch on this process's NPU, for bf16 logits."""
    device = platform.device()
    library = getattr(torch, device.type)
    logits, targets = (x.to(device) for x in logits_of(rows, 3.0, torch.bfloat16))
    logits.requires_grad_()
    found: dict[str, Any] = dict(zip(("max_abs_logprob_error", "max_abs_entropy_error"), errors(device)))
    for name, run in (("operator", with_operator), ("torch", with_torch)):
        spent = []
        for _ in range(TIMED + 1):  # the first one compiles
            logits.grad = None
            library.reset_peak_memory_stats()
            before = platform.memory_bytes()[0]
            platform.synchronize()
            started = time.perf_counter()
            run(logits, targets)
            platform.synchronize()
            spent.append(time.perf_counter() - started)
            found[f"{name}_peak_bytes"] = platform.memory_bytes()[1] - before
        found[f"{name}_ms"] = 1e3 * min(spent[1:])
    return {**found, "rows": rows, "paths": kernels.path_calls()}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows from 1 on")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=positive, default=256, help="rows of logits for memory and time")
    parser.add_argument("--platform", choices=("auto", "cpu", "npu"), default="auto")
    args = parser.parse_args()
    try:
        platform = current(args.platform)
    except PlatformError as error:
        parser.error(str(error))
    if platform.name == "npu" and not device_count():
        parser.error("there is no NPU here that torch_npu can use: leave --platform npu and ASYNCFLOW_PLATFORM out")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        report = build(Path(name))
        lowered = host_kernels(Path(name))
        chosen = kernels.vocabulary_path
        kernels.vocabulary_path = lambda logits, operator: getattr(lowered, operator)
        of_kernels = errors(torch.device("cpu"))
        kernels.vocabulary_path = chosen
    of_torch = errors(torch.device("cpu"))
    print(f"log-probability and entropy errors: lowered kernels {of_kernels}, torch {of_torch}")
    memory, seconds = compared_on_cpu(args.rows)
    on_npu = measured_on_npu(platform, args.rows) if platform.name == "npu" else None
    if on_npu:
        print("on the NPU:", on_npu)
    shares = {target: [row["ub_share"] for row in report if row["target"] == target] for target in ("910b", "910c")}
    result = {
        "max_abs_logprob_error": max(of_kernels[0], of_torch[0]),
        "max_abs_entropy_error": max(of_kernels[1], of_torch[1]),
        "peak_bytes_over_torch": round(memory, 3),
        "ub_share_910b": round(max(shares["910b"]), 3),
        "ub_share_910c": round(max(shares["910c"]), 3),
        "cpu_time_over_torch": round(seconds, 3),
        "gate_passed": all(row["passed"] for row in report),
        "npu": on_npu,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
