"""The script that records released libraries: what it reads, and what it leaves alone without a clone."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ascend.contract import calls, signatures

ROOT = Path(__file__).parents[3]
USES = """
import torch
from mindspeed.part import switch
switch(1)
torch.npu.synchronize()
torch.npu.gone()
"""
WHEEL = {
    "__init__": "from . import npu\n",
    "version": f"git_version = '{'a' * 40}'\n",
    "npu": "def synchronize(device=None): ...\n",
}


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("refresh_contracts", ROOT / "scripts/refresh_contracts.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "refresh_contracts", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


def test_the_script_refreshes_the_releases_that_are_recorded(script):
    refreshed = {(source.library, source.version) for source in (*script.WHEELS, *script.REVISIONS)}
    assert refreshed == {(release.library, release.version) for release in signatures.load()}


@pytest.fixture
def sources(script, tmp_path, monkeypatch):
    """A wheel that was downloaded before, a clone, and a folder for records."""
    wheel = tmp_path / "downloads" / "torch-npu-1.0" / "torch_npu-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for day, (name, text) in enumerate(WHEEL.items(), 1):
            archive.writestr(zipfile.ZipInfo(f"torch_npu/{name}.py", (2026, 8, day, 0, 0, 0)), text)
    clone = tmp_path / "clone"
    (clone / "mindspeed").mkdir(parents=True)
    (clone / "mindspeed" / "__init__.py").write_text("")
    (clone / "mindspeed" / "part.py").write_text("def switch(on): ...\n")
    git = ["git", "-C", str(clone), "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(script, "WHEELS", (script.Wheel("torch_npu", "torch-npu", "1.0"),))
    monkeypatch.setattr(script, "REVISIONS", (script.Revision("mindspeed", "branch", "main"),))
    monkeypatch.setattr(script.signatures, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(script.calls, "collect", lambda root: calls.read({"ours.py": USES}))
    return tmp_path


def test_wheels_and_clones_are_recorded_with_date_and_commit(script, sources, monkeypatch, capsys):
    arguments = ["--mindspeed", str(sources / "clone"), "--downloads", str(sources / "downloads")]
    monkeypatch.setattr(sys, "argv", ["refresh_contracts.py", *arguments])
    assert script.main() == 0
    mindspeed, torch_npu = signatures.load(sources / "records")
    assert (torch_npu.date, torch_npu.commit) == ("2026-08-03", "a" * 40)
    assert torch_npu.symbols == {"torch_npu.npu.gone": None, "torch_npu.npu.synchronize": ["(device=...)"]}
    assert mindspeed.symbols == {"mindspeed.part.switch": ["(on)"]} and len(mindspeed.commit) == 40
    assert "torch_npu 1.0: 2 symbols, absent: torch_npu.npu.gone" in capsys.readouterr().out


def test_without_a_clone_its_records_stay_as_they_are(script, sources, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["refresh_contracts.py", "--downloads", str(sources / "downloads")])
    assert script.main() == 0
    assert [release.library for release in signatures.load(sources / "records")] == ["torch_npu"]
    assert "left as it is: mindspeed branch; it is read with --mindspeed CLONE" in capsys.readouterr().out


def test_a_clone_without_the_revision_is_named(script, sources, monkeypatch):
    monkeypatch.setattr(script, "REVISIONS", (script.Revision("mindspeed", "branch", "no_such_tag"),))
    arguments = ["--mindspeed", str(sources / "clone"), "--downloads", str(sources / "downloads")]
    monkeypatch.setattr(sys, "argv", ["refresh_contracts.py", *arguments])
    with pytest.raises(FileNotFoundError, match="clone: no_such_tag:mindspeed cannot be read"):
        script.main()
