"""Lets a CUDA build of torch load for work on the CPU where NVIDIA's libraries are not installed (gigabytes, unused).

    python scripts/absent_libraries.py SITE_PACKAGES

Builds, beside torch's own libraries, one small library for each that is missing. Its functions only answer "no device".
For a second test environment where the package index has no CPU build; nothing that computes comes from here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# Libraries of NVIDIA, and the first letters of their functions.
MISSING = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+$")
FUNCTION = re.compile(r"(__cuda|cu|nv|nccl)\w+$")
NO_DEVICE = 100  # cudaErrorNoDevice
# What torch asks also where it computes on the CPU.
ANSWERED = {
    "cudaStreamIsCapturing": "int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int error) { return "no device"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int error) { return "no device"; }',
}


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted(torch: Path) -> dict[str, set[str]]:
    """Missing library -> functions that torch asks of this library; under "" those it takes from any."""
    libraries, functions = set(), defaultdict(set)
    for file in [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]:
        libraries |= set(re.findall(r"NEEDED.*\[(.+)\]", said("readelf", "-d", str(file))))
        for line in said("nm", "-D", "--undefined-only", str(file)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if FUNCTION.match(name):
                functions[version.lstrip("@")].add(name)
    found = {name: set() for name in libraries if MISSING.match(name) and not (torch / "lib" / name).exists()}
    for version, names in functions.items():
        owner = "" if not version else version if version in found else _called(version, found)
        found.setdefault(owner, set()).update((f"{name}@{version}" if owner else name) for name in names)
    return found


def _called(version: str, libraries: dict[str, set[str]]) -> str:
    """The library whose symbol version is not its file name."""
    return next(name for name in libraries if name.startswith(f"lib{version.lower()}"))


def build(folder: Path, library: str, functions: set[str], shared: set[str]) -> None:
    names = {f.partition("@")[0] for f in functions}
    source = f"#define F(name) int name(void) {{ return {NO_DEVICE}; }}\n"
    source += "".join(f"{ANSWERED.get(name, f'F({name})')}\n" for name in sorted(names | shared))
    by_version = defaultdict(list)
    for function in sorted(functions):
        name, _, version = function.partition("@")
        by_version[version].append(name)
    script = "".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in by_version.items())
    options = [f"-Wl,-soname,{library}"]
    with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
        if script:
            file.write(script)
            file.flush()
            options.append(f"-Wl,--version-script={file.name}")
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", "-x", "c", "-", "-o", str(folder / library)]
        subprocess.run([*command, *options], input=source, text=True, check=True)


def main(site: str) -> None:
    torch = Path(site) / "torch"
    found = wanted(torch)
    shared = found.pop("", set())
    for library, functions in found.items():
        build(torch / "lib", library, functions, shared)
    print(f"{len(found)} libraries of NVIDIA stand in for absent ones in {torch / 'lib'}")


if __name__ == "__main__":
    main(sys.argv[1])
