"""10,000 spoiled requests: none is the server's fault, none ends it, and none that is refused changes anything."""

import asyncio
import collections
import json
import socket

import pytest

from mindspeed_asyncflow.service.verbs import Prompt
from mindspeed_asyncflow.web.app import make_app
from mindspeed_asyncflow.web.client import Client
from mindspeed_asyncflow.web.security import Tenants
from mindspeed_asyncflow.web.server import Listening, offered
from tests.web.fakes import GUEST, OWNER, FakeVerbs
from tests.web.malformed import NASTY, RIGHT, requests

TOKENS = {OWNER: "the-token-of-the-owner", GUEST: "the-token-of-a-guest"}


async def asked(app, method, path, headers, body, token, query=b""):
    """Status and content of one request, without a socket."""
    told = {"content-length": str(len(body)), "authorization": f"Bearer {token}"} | headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in told.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    sent, parts = [], [body]

    async def receive():
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await asyncio.sleep(3600)

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(bytes(message.get("body", b"")) for message in sent[1:])


async def begun():
    """A run with a claim of the owner's and rows of a guest's."""
    fake = FakeVerbs(patience_s=0.0)
    async for _ in fake.init_engines(OWNER, {}):
        pass
    await fake.put_prompts_data(OWNER, [Prompt("ab")] * 4, False)
    await fake.put_prompts_data(GUEST, [Prompt("cd")], False)
    await fake.get_experience_data(OWNER, "reward", ["prompt"], 1, 0)
    fake.calls.clear()
    return fake


class Present:
    """The fake of now."""

    def __init__(self, fake):
        self.fake = fake

    def __getattr__(self, name):
        return getattr(self.fake, name)


async def tried(chosen):
    """(request, status, content, whether anything changed) of each. A run that changed is put away for a new one."""
    verbs = Present(await begun())
    app = make_app(verbs, Tenants(TOKENS))
    found = []
    for number, request in enumerate(chosen):
        before, token = verbs.state(), TOKENS[(OWNER, GUEST)[number % 2]]
        status, content = await asked(app, request.method, request.path, request.headers, request.body, token)
        found.append((request, status, content, verbs.state() != before))
        if found[-1][-1]:
            verbs.fake = await begun()
    return found


def refused_well(found):
    for request, status, content, changed in found:
        assert status < 500, (request, content)
        if status >= 400:
            assert not changed, request
            told = json.loads(content)["error"]
            assert set(told) == {"code", "message"} and told["message"] and len(told["message"]) < 2000, request
        else:
            assert not request.hopeless, (request, status, content)


def test_right_requests_are_taken():
    """Else refusing all of them would say nothing."""

    async def all_of_them():
        told = {}
        for verb, document in RIGHT.items():
            app = make_app(await begun() if verb != "init_engines" else FakeVerbs(), Tenants(TOKENS))
            body, kind = json.dumps(document).encode(), {"content-type": "application/json"}
            status, content = await asked(app, "POST", f"/api/{verb}", kind, body, TOKENS[OWNER])
            told[verb] = (status, content)
        return told

    told = asyncio.run(all_of_them())
    waits = told.pop("weight_sync_notify")
    assert waits[0] == 408 and b"version 1 was not made" in waits[1]
    assert {verb: status for verb, (status, _) in told.items()} == dict.fromkeys(told, 200), told


def test_spoiled_requests_do_no_harm():
    found = asyncio.run(tried(requests(7, 600)))
    refused_well(found)
    kinds = collections.Counter(request.kind for request, status, *_ in found if status >= 400)
    assert len(kinds) == 14


@pytest.mark.slow
def test_ten_thousand_spoiled_requests_do_no_harm():
    refused_well(asyncio.run(tried(requests(0, 10_000))))


@pytest.mark.parametrize("name", ["since", "timeout_s"])
def test_spoiled_queries_are_refused(name):
    async def all_of_them():
        app = make_app(await begun(), Tenants(TOKENS))
        values = [str(value).encode("utf-8", "replace") for value in NASTY if not isinstance(value, int)]
        for value in [*values, b"%00", b"%ff%fe", b"1&since=x", b"-1", b"9" * 5000, b"nan", b"inf"]:
            query = f"{name}=".encode() + value.replace(b"%s", b"s").replace(b" ", b"+")
            status, _ = await asked(app, "GET", "/api/metrics", {}, b"", TOKENS[GUEST], query)
            assert 400 <= status < 500, value

    asyncio.run(all_of_them())


RAW = [
    b"",
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,  # TLS to a plain port
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /api/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 1e9\r\n\r\n",
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 999999999999\r\n\r\n",
    b"GET /api/metrics HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


def test_what_is_no_request_at_all_ends_a_connection_and_nothing_else():
    fake = FakeVerbs()
    before = fake.state()
    with offered(fake, Tenants(TOKENS), Listening(port=0)) as url:
        host, port = url.removeprefix("http://").split(":")
        for raw in RAW:
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                sock.settimeout(10)
                try:
                    sock.sendall(raw)
                    sock.shutdown(socket.SHUT_WR)
                    answer = sock.recv(1 << 16)
                except ConnectionError:  # it was refused before all of it was sent
                    answer = b""
                assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.1 2")), (raw[:80], answer)
        with Client(url, TOKENS[OWNER]) as client:
            assert client.status()["state"] == "waiting"
    assert fake.state() == before
