"""What BiShengIR makes of linalg IR for a target: does it fit into the unified buffer (UB), and is it all vectors?

Without CANN the compiler stops before `hivmc`, its last step, so its exit status says nothing. It has planned the
memory and placed the synchronisation by then, and that module is what is judged.
"""

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

UB_LIMIT = 0.9  # compiler versions plan differently
LAST_STEP = "External hivmc run fails"  # the only error that is none
TIMEOUT_S = 120
# What triton-ascend 3.2.0 passes on 910B and 910C.
OPTIONS = (
    "--enable-auto-multi-buffer=true",
    "--enable-auto-bind-sub-block=true",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}
_BUFFER = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\) : memref<((?:\d+x)*)(\w+)(?:, strided<[^>]*>)?, #hivm\.address_space<ub>>"
)


@dataclass(frozen=True)
class Verdict:
    """`reason` is empty when the kernel passed."""

    passed: bool
    reason: str
    ub_share: float | None  # of the target's unified buffer; None where the compiler gave no plan
    loops: int | None  # in the module: those of the source, if every tile operation became vector instructions


def tool(name: str) -> Path:
    """A program of the package ascendnpu-ir. Raises `RuntimeError` where it is not installed."""
    package = importlib.util.find_spec("ascendnpuir")
    if package is None or package.origin is None:
        raise RuntimeError("ascendnpu-ir is not installed here: run this with the Python of scripts/kernel_tools.sh")
    return Path(package.origin).parent / "bin" / name


def judge(linalg: Path, target: str, folder: Path) -> Verdict:
    """Compile `linalg` for `target`; temporary files go into the new folder `folder`."""
    folder.mkdir(parents=True)
    command = [str(tool("bishengir-compile")), str(linalg), f"--target={target}", *OPTIONS, f"--save-temps={folder}"]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.o")], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    log = done.stdout + done.stderr
    planned = folder / "module.hivm.opt.mlir"
    if "overflow" in log.lower():
        lines = [line for line in log.splitlines() if "overflow" in line.lower()]
        return Verdict(False, lines[-1].strip(), None, None)
    if not planned.exists() or (done.returncode != 0 and LAST_STEP not in log):
        return Verdict(False, f"the compiler gave no plan: {log.strip()[-500:]}", None, None)
    text = planned.read_text()
    share, loops = ub_share(text), len(re.findall(r"\bscf\.(?:for|while)\b", text))
    reason = "" if share <= UB_LIMIT else f"{share:.1%} of the unified buffer is above {UB_LIMIT:.0%}"
    return Verdict(not reason, reason, share, loops)


def ub_share(hivm: str) -> float:
    """Highest byte that any buffer of a planned module reaches, over the unified buffer of the module's target.

    Raises `ValueError` when a buffer has no constant place or a type that is not known, or the target no size.
    """
    size = re.search(r'"UB_SIZE", (\d+)', hivm)  # bits
    if size is None:
        raise ValueError("the planned module does not say how large the target's unified buffer is")
    constants = {name: int(value) for name, value in re.findall(r"(%\w+) = arith\.constant (-?\d+) : i64", hivm)}
    if hivm.count("hivm.hir.pointer_cast(") != len(_BUFFER.findall(hivm)):
        raise ValueError("the planned module has a buffer that is not understood")
    highest = 0
    for places, shape, dtype in _BUFFER.findall(hivm):
        bits = _BITS.get(dtype)
        if bits is None:
            raise ValueError(f"a buffer of the planned module has the unknown type {dtype}")
        for length in shape.rstrip("x").split("x"):
            bits *= int(length or 1)
        for place in places.split(","):
            if place.strip() not in constants:
                raise ValueError(f"the buffer at {place.strip()} has no constant place")
            highest = max(highest, constants[place.strip()] + -(-bits // 8))
    return highest / (int(size[1]) // 8)
