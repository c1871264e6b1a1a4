"""What bootstrap.sh asks: is the torch that pip would take a CPU build, is everything in place, does it load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata

# They load CUDA or mismatched native code: with any of them present `import transformers` or vLLM on CPU breaks.
FORBIDDEN = ("torchvision", "torchaudio", "torchcodec", "triton")

# What the processes of a run import: loaded once in two processes, which also compiles these modules and no others.
LOADED = (
    ("vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2", "xgrammar"),
    ("ray", "megatron.core.models.gpt", "megatron.core.dist_checkpointing", "mbridge", "transformers.models.qwen2"),
)


def is_cpu_torch(report_file: str) -> bool:
    """`report_file`: what `pip install --dry-run --report` would do. A CUDA build asks for NVIDIA's libraries."""
    with open(report_file, encoding="utf-8") as file:
        installs = json.load(file)["install"]
    torch = [item["metadata"] for item in installs if item["metadata"]["name"].lower() == "torch"]
    wanted = " ".join(torch[0].get("requires_dist", [])) if torch else "nvidia"
    return not re.search(r"\b(nvidia|cuda|triton|rocm)", wanted)


def problems(requirement_files: list[str]) -> list[str]:
    """Pinned distributions that are missing or have another version, and forbidden ones that are present."""
    from packaging.requirements import Requirement

    found = []
    for name in FORBIDDEN:
        if any(True for _ in metadata.distributions(name=name)):
            found.append(f"{name} is installed and must not be")
    for path in requirement_files:
        with open(path, encoding="utf-8") as file:
            lines = [line.split(" \\")[0].strip() for line in file if "==" in line and not line.startswith(("#", " "))]
        for requirement in map(Requirement, lines):
            if requirement.marker and not requirement.marker.evaluate():
                continue
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                found.append(f"{requirement.name} is missing")
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{requirement.name} is {version}, wanted {requirement.specifier}")
    return found


def load() -> list[str]:
    """Import everything; the last line of what each failing process says."""
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    runs = [
        subprocess.Popen([sys.executable, "-c", code, *names], env=environment, stderr=subprocess.PIPE, text=True)
        for names in LOADED
    ]
    messages = [run.communicate()[1] for run in runs]
    return [text.strip().splitlines()[-1] for text, run in zip(messages, runs) if run.returncode]


def main(arguments: list[str]) -> int:
    verb, *files = arguments
    if verb == "cpu-torch":
        return 0 if is_cpu_torch(files[0]) else 1
    found = load() if verb == "load" else problems(files)
    for problem in found:
        print(f"[set-up] {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
