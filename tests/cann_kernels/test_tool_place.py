"""Missing compilers are a reason to skip on a laptop, and a failure where scripts/test.sh has promised them."""

import pytest
from tool_place import ROOT, TOOLS_ENV, tools_python


def test_missing_tools_skip_unless_promised(tmp_path, monkeypatch):
    monkeypatch.delenv(TOOLS_ENV, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"scripts/kernel_tools\.sh"):
        tools_python(tmp_path)
    monkeypatch.setenv(TOOLS_ENV, str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="no complete environment"):
        tools_python()


def test_a_finished_environment_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv(TOOLS_ENV, str(tmp_path))
    (tmp_path / "stamp").touch()
    assert tools_python() == tmp_path / "bin" / "python"


def test_the_test_script_promises_them_in_full_runs():
    script = (ROOT / "scripts/test.sh").read_text()
    assert f"export {TOOLS_ENV}=" in script and "kernel_tools.sh" in script
