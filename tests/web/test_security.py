"""Who is let in, what is refused before it is read, and the files that tokens lie in."""

import asyncio
import os
import socket
import ssl
import stat
import subprocess
import time

import httpx
import pytest

from mindspeed_asyncflow.errors import ConfigError, PlatformError, ServiceError
from mindspeed_asyncflow.web import server
from mindspeed_asyncflow.web.client import Client
from mindspeed_asyncflow.web.limits import Limits, Load
from mindspeed_asyncflow.web.security import OWNER, Tenants, is_loopback, owner_token, read_tenants
from mindspeed_asyncflow.web.server import Listening, offered
from tests.web.fakes import FakeVerbs

TOKEN = "a-token-of-thirty-characters-x"


def served(tenants=None, **listening):
    return offered(FakeVerbs(), tenants or Tenants({OWNER: TOKEN}), Listening(port=0, **listening))


@pytest.fixture(scope="module")
def url():
    with served(limits=Limits(body_bytes=4096, json_bytes=1024, at_once=2, pause_s=0.3)) as address:
        yield address


def raw(url, text, then=b"", pause_s=0.0):
    """The answer to bytes as they are, after which the server closes."""
    host, port = url.partition("//")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(text)
        time.sleep(pause_s)
        if then:
            sock.sendall(then)
        answer = b""
        while part := _received(sock):
            answer += part
        return answer.decode("latin-1")


def _received(sock):
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:  # what was not read of the request lies there still
        return b""


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN} {TOKEN}"},
    ],
)
def test_every_call_needs_the_token(url, headers):
    for path in ("/api/status", "/api/metrics", "/v1/models", "/nothing", "/docs/../api/status"):
        answer = httpx.get(url + path, headers=headers, trust_env=False)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "unauthorized"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.post(url + "/docs", headers=headers, trust_env=False).status_code == 401


def test_a_token_works_and_only_its_digest_is_kept(url):
    with Client(url, TOKEN) as client:
        assert client.status()["state"] == "waiting"
    assert TOKEN not in repr(vars(Tenants({OWNER: TOKEN})))


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "mindspeed_asyncflow.web.security.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )
    tenants = Tenants({OWNER: TOKEN, "second": TOKEN[::-1], "third": TOKEN.upper()})
    assert tenants.admit({b"authorization": f"Bearer {TOKEN}".encode()}) == OWNER
    assert len(compared) == 3 and {len(a) for pair in compared for a in pair} == {32}


def test_without_a_token_pages_of_a_browser_are_kept_out():
    with served(Tenants(None)) as url:
        ask = httpx.Client(base_url=url, trust_env=False)
        assert ask.get("/api/status").status_code == 200
        assert ask.get("/api/status", headers={"Host": "evil.example:8000"}).status_code == 403  # its name points here
        assert ask.get("/api/status", headers={"Origin": "http://evil.example"}).status_code == 403


def test_the_description_needs_nothing_from_elsewhere(url):
    page = httpx.get(url + "/docs", trust_env=False)
    assert page.status_code == 200 and "put_experience_data" in page.text
    assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text
    described = httpx.get(url + "/openapi.json", trust_env=False).json()
    assert described["paths"]["/api/put_prompts_data"]["post"]["summary"]
    for schema in described["components"]["schemas"].values():
        if schema.get("type") == "object" and "additionalProperties" in schema:
            assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("kind", "limit"), [("application/json", 1024), ("application/x-safetensors", 4096), ("text/plain", 1024)]
)
def test_a_large_body_is_refused_before_a_byte_of_it_is_sent(url, kind, limit):
    head = f"POST /api/stop HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {kind}\r\n"
    assert "413" in raw(url, f"{head}Content-Length: {limit + 1}\r\n\r\n".encode())[:20]


def test_a_body_without_a_length_is_refused_when_it_is_too_large(url):
    head = f"POST /api/stop HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"200\r\n" + b" " * 512 + b"\r\n" for _ in range(3))
    assert "413" in raw(url, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), chunks)[:20]


def test_who_has_no_token_cannot_make_the_server_wait_for_a_body(url):
    assert "401" in raw(url, b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")[:20]


def test_a_body_that_stops_coming_is_given_up(url):
    head = f"POST /api/stop HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    answer = raw(url, f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert "408" in answer[:20] and "slow_body" in answer


def test_bodies_of_one_tenant_shut_no_other_one_out():
    load = Load(Limits(held_bytes=100))
    with load.body("guest", 60, 100), load.body("owner", 60, 100):
        with pytest.raises(ServiceError, match="your bodies") as refused, load.body("guest", 60, 100):
            pass
        assert (refused.value.status, refused.value.code) == (429, "busy")
    with load.body("guest", 100, 100):
        pass


@pytest.mark.parametrize(("size", "messages"), [(1, 7), (1 << 20, 60), (2 << 20, 100)])
def test_a_body_that_comes_drop_by_drop_is_given_up(monkeypatch, size, messages):
    """Each message takes 9 s."""
    clock = {"now": 0.0}
    monkeypatch.setattr("mindspeed_asyncflow.web.limits.now", lambda: clock["now"])

    async def receive():
        clock["now"] += 9.0
        return {"type": "http.request", "body": bytes(size), "more_body": True}

    async def main():
        with Load(Limits()).body("guest", None, 1 << 30) as body:
            for count in range(100):
                try:
                    await body.next(receive)
                except ServiceError as error:
                    assert (error.status, error.code) == (408, "slow_body") and "slower than 128 KiB/s" in str(error)
                    return count
        return 100

    assert asyncio.run(main()) == messages


def test_many_headers_are_refused(url):
    headers = {f"x-{n}": "y" for n in range(70)} | {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.get(url + "/api/status", headers=headers, trust_env=False).status_code == 431


def test_calls_of_one_tenant_at_once_are_limited(url, monkeypatch):
    monkeypatch.setattr("mindspeed_asyncflow.web.client.PAUSES_S", ())
    monkeypatch.setattr("mindspeed_asyncflow.web.calls.BEAT_S", 0.1)  # in which it is seen that a listener has left
    with Client(url, TOKEN) as client:
        client.init_engines()
        host, port = url.partition("//")[2].split(":")
        ask = f"GET /api/metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        streams = [socket.create_connection((host, int(port))) for _ in range(2)]
        try:
            for stream in streams:
                stream.sendall(ask)
            busy = None
            for _ in range(200):
                try:
                    client.status()
                    time.sleep(0.02)
                except ServiceError as error:
                    busy = error
                    break
            assert busy is not None and (busy.status, busy.code) == (429, "busy")
        finally:
            for stream in streams:
                stream.close()
        for _ in range(500):  # both places are free again
            try:
                assert client.status()["state"] == "running"
                break
            except ServiceError:
                time.sleep(0.02)
        else:
            pytest.fail("the places of streams that were left are not free again")


def test_https_is_answered_to_who_trusts_the_certificate(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    with served(tls_cert=cert, tls_key=key) as url:
        assert url.startswith("https://")
        with Client(url, TOKEN, verify=str(cert)) as client:
            assert client.status()["state"] == "waiting"
        port = int(url.rpartition(":")[2])
        context = ssl.create_default_context(cafile=str(cert))
        with socket.create_connection(("127.0.0.1", port)) as plain, pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            assert secured.version() in ("TLSv1.2", "TLSv1.3")


def test_certificates_that_cannot_be_used_are_named(tmp_path):
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    for listening, words in (
        (Listening(tls_cert=bad), "--tls-key"),
        (Listening(tls_cert=bad, tls_key=bad), "bad.pem"),
        (Listening(tls_cert=tmp_path / "none", tls_key=bad), "none"),
    ):
        with pytest.raises(ConfigError, match=words):
            listening.check()


def test_an_encrypted_key_is_named_and_nobody_is_asked_for_its_password(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-passout", "pass:secret", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=x"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="encrypted"):
        Listening(tls_cert=cert, tls_key=key).check()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PlatformError, match=f"port {port}.*--port"):
            offered(FakeVerbs(), Tenants(None), Listening(port=port)).__enter__()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_socket_names_tcp(host):
    """asyncio sends at once on such sockets only; on others an answer waits until the client acknowledges its head."""
    with server._bound(host, 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_a_new_token_is_written_for_its_owner_only_and_found_again(tmp_path):
    path = tmp_path / "deep" / "token"
    old = os.umask(0)
    try:
        token, new = owner_token(path)
    finally:
        os.umask(old)
    assert new and stat.S_IMODE(path.stat().st_mode) == 0o600 and len(token) >= 40
    assert owner_token(path) == (token, False)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        owner_token(path)


def test_a_token_is_not_taken_from_a_place_where_others_may_have_put_it(tmp_path, monkeypatch):
    path = tmp_path / "token"
    owner_token(path)
    tmp_path.chmod(0o777)
    for look in (owner_token, read_tenants):
        with pytest.raises(ConfigError, match="chmod o-w"):
            look(path)
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="chmod o-w"):
        owner_token(link)
    with pytest.raises(ConfigError, match="chmod o-w"):
        owner_token(tmp_path / "new")
    tmp_path.chmod(0o1777)  # as /tmp: nobody replaces the file of another user
    assert owner_token(path)[1] is False
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((0o100600, 0, 0, 1, os.getuid() + 2, 0, 0, 0, 0, 0)))
    with pytest.raises(ConfigError, match="belongs to user"):
        owner_token(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line"),
        ("owner", "name:token"),
        ("Own er:" + TOKEN, "name:token"),
        ("../x:" + TOKEN, "name:token"),
        ("owner:short", "at least 16"),
        (f"owner:{TOKEN}\nowner:{TOKEN}y", "was there before"),
        (f"owner:{TOKEN}\nother:{TOKEN}", "the same token"),
        ("owner:tokén-of-many-characters", "only ASCII"),
    ],
)
def test_a_bad_file_of_tenants_is_refused_without_showing_a_token(tmp_path, text, words):
    path = tmp_path / "tenants"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        read_tenants(path)
    assert TOKEN not in str(refused.value)


def test_a_file_of_tenants_is_read(tmp_path):
    path = tmp_path / "tenants"
    path.touch(mode=0o600)
    path.write_text(f"# who\n\nowner:{TOKEN}\n second_one:{TOKEN}:with-colon \n")
    assert read_tenants(path) == {"owner": TOKEN, "second_one": f"{TOKEN}:with-colon"}


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("192.168.1.1", False), ("localhost.evil.example", False), ("", False),
])  # fmt: skip
def test_loopback_is_told_from_what_others_reach(host, loopback):
    assert is_loopback(host) is loopback
