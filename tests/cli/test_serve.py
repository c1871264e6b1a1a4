"""`asyncflow serve` begins nothing that would leave a door open, and offers what it says it offers."""

import re
import socket
import stat
from pathlib import Path

import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.errors import PlatformError, ServiceError
from mindspeed_asyncflow.service import serving
from mindspeed_asyncflow.web.client import Client
from tests.web.fakes import FakeVerbs

CONFIG = str(Path(__file__).parents[2] / "configs" / "qwen_tiny_cpu.yaml")
SECRET = "a-token-of-thirty-characters-x"


@pytest.fixture
def called(monkeypatch, tmp_path):
    """serve(*options) -> (exit code, how serving.serve was called); `while_offered` runs inside with the address."""
    monkeypatch.chdir(tmp_path)
    seen = {}

    def call(*options, while_offered=lambda: None):
        def serve(config, run_folder, warnings, resume, offer, start, check):
            seen.update(config=config, run_folder=run_folder, resume=resume, start=start, check=check)
            with offer(FakeVerbs()):
                while_offered()
            return 7

        monkeypatch.setattr(serving, "serve", serve)
        return main(["serve", CONFIG, "--port", "0", *options]), seen

    return call


def address(text):
    return re.search(r"listening on (\S+)", text)[1]


def test_by_default_a_token_is_made_and_shown_once(called, capsys, tmp_path):
    told = {}

    def ask():
        told["first"] = capsys.readouterr().out
        url = address(told["first"])
        path = tmp_path / "runs" / "service.token"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text().strip() in told["first"]
        with Client(url, token_file=path) as client:
            assert client.status()["state"] == "waiting"
        with Client(url, "another-token") as stranger, pytest.raises(ServiceError) as refused:
            stranger.status()
        assert refused.value.status == 401 and url.startswith("http://127.0.0.1:")

    assert called(while_offered=ask)[0] == 7
    assert called()[0] == 7
    again = capsys.readouterr().out
    assert "service.token" in again and (tmp_path / "runs/service.token").read_text().strip() not in again


def test_a_port_that_is_taken_is_one_line_and_a_mistake_of_usage(called, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert called("--no-token", "--port", str(port))[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"asyncflow: cannot listen on 127.0.0.1 port {port}: ") and "give another --port" in line


def test_an_error_of_the_run_that_is_served_is_not_one_of_usage(called, capsys):
    def fail():
        raise PlatformError("the device is gone")

    assert called("--no-token", while_offered=fail)[0] == 1
    assert "PlatformError: the device is gone" in capsys.readouterr().err


def test_options_arrive(called, tmp_path):
    code, seen = called(
        "--start", "--resume", "never", "--run-folder", "r", "--set", "service.prompts=client", "--no-token"
    )
    assert code == 7 and seen["start"] and seen["resume"] == "never" and seen["run_folder"] == Path("r")
    assert seen["config"].service.prompts == "client"
    seen["check"](seen["config"])


def test_tenants_are_those_of_the_file(called, capsys, tmp_path):
    tenants = tmp_path / "tenants"
    tenants.touch(mode=0o600)
    tenants.write_text(f"owner:{SECRET}\nguest:{SECRET}2\n")

    def ask():
        url = address(capsys.readouterr().out)
        for token in (SECRET, SECRET + "2"):
            with Client(url, token) as client:
                assert client.status()["state"] == "waiting"

    assert called("--tenants", "tenants", while_offered=ask)[0] == 7
    assert not (tmp_path / "runs" / "service.token").exists()


def test_a_run_that_begins_at_once_has_an_owner_who_can_call(called, capsys, tmp_path):
    tenants = tmp_path / "tenants"
    tenants.touch(mode=0o600)
    tenants.write_text(f"guest:{SECRET}\n")
    code, seen = called("--tenants", "tenants", "--start")
    assert code == 2 and not seen and "a line owner:TOKEN to tenants, or give --token-file" in capsys.readouterr().err
    assert called("--tenants", "tenants", "--start", "--token-file", "mine")[0] == 7
    assert called("--tenants", "tenants")[0] == 7


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_without_a_token_programs_of_this_machine_call_by_the_address_listened_on(called, capsys, host):
    def ask():
        with Client(address(capsys.readouterr().out)) as client:
            assert client.status()["state"] == "waiting"

    assert called("--no-token", "--host", host, while_offered=ask)[0] == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0", "--no-token"), "needs a token"),
        (("--host", "192.168.0.1", "--no-token"), "needs a token"),
        (("--no-token", "--token-file", "x"), "goes with neither"),
        (("--tls-cert", "none.pem"), "--tls-key"),
        (("--tls-cert", "none.pem", "--tls-key", "none.pem"), "none.pem"),
        (("--tenants", "none"), "none"),
        (("--port", "70000"), "0 to 65535"),
        (("--set", "service.max_body_mb=0"), "max_body_mb"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_begins(called, capsys, options, words):
    code, seen = called(*options)
    assert code == 2 and not seen and words in capsys.readouterr().err


def test_an_address_for_others_has_a_token_and_a_warning(called, capsys):
    code, _ = called("--host", "0.0.0.0")
    told = capsys.readouterr()
    assert code == 7 and "token of owner" in told.out and "without --tls-cert" in told.err


def test_the_package_has_the_clients():
    import mindspeed_asyncflow

    assert mindspeed_asyncflow.Client is Client
    with pytest.raises(AttributeError, match="Cleint"):
        _ = mindspeed_asyncflow.Cleint
