"""Lower every kernel, judge it for each target, and make it runnable here.

    .cache/kernel-tools/bin/python -m cann_kernels.build FOLDER [--block N] [--tail N]

Writes `<kernel>_<dtype>.ll` (LLVM IR for this processor) and `report.json` into FOLDER: for each kernel, logits type
and target whether the gate passed, why not, the share of UB and loops. The exit status is 1 when one did not pass.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from cann_kernels import gate, lowering, vocabulary, x86

TARGETS = {"910b": "Ascend910B3", "910c": "Ascend910_9382"}


def build(folder: Path, block: int, tail: int) -> list[dict]:
    """The rows of report.json."""
    rows = []
    for name, kernel in lowering.KERNELS.items():
        for dtype in lowering.DTYPES:
            path = folder / f"{name}_{dtype}.mlir"
            path.write_text(lowering.to_linalg(kernel, dtype, block, tail))
            for short, target in TARGETS.items():
                verdict = gate.judge(path, target, folder / f"{path.stem}_{short}")
                rows.append({"kernel": name, "dtype": dtype, "target": short, **asdict(verdict)})
            path.with_suffix(".ll").write_text(x86.to_llvm(path))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cann_kernels.build")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block", type=int, default=vocabulary.BLOCK, help="logits in a tile, a power of two")
    parser.add_argument("--tail", type=int, default=vocabulary.TAIL, help="logits in a tile of the ragged end")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = build(args.folder, args.block, args.tail)
    (args.folder / "report.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        share = "no plan" if row["ub_share"] is None else f"{row['ub_share']:.1%} of UB"
        print(row["kernel"], row["dtype"], row["target"], share, row["reason"] or "passed", sep="  ")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
