"""What a client sends again, and what it must not: a call that may have been carried out."""

import asyncio
import socket
import threading

import pytest

from mindspeed_asyncflow.errors import ConfigError, ServiceError, Unanswered
from mindspeed_asyncflow.web.client import AsyncClient, Client

JSON = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


def told(status, body):
    return JSON % (status, len(body), body)


REFUSED = {status: told(status, b'{"error":{"code":"busy","message":"full"}}') for status in (429, 503)}
DONE = told(200, b'{"ok":1}')
BROKEN = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{"


@pytest.fixture
def server(monkeypatch):
    """serve(answers) -> (address, requests that came): one connection for each answer."""
    monkeypatch.setattr("mindspeed_asyncflow.web.client.PAUSES_S", (0.01, 0.01, 0.01))
    listening = socket.create_server(("127.0.0.1", 0))
    came = []

    def serve(answers):
        def work():
            for answer in answers:
                try:
                    connection, _ = listening.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    came.append(connection.recv(1 << 16).split(b"\r\n")[0].decode())
                    connection.sendall(answer)

        threading.Thread(target=work, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}", came

    yield serve
    listening.close()


@pytest.mark.parametrize("status", [429, 503])
def test_what_was_refused_for_now_is_sent_again(server, status):
    url, came = server([REFUSED[status], REFUSED[status], DONE])
    with Client(url) as client:
        assert client.put_prompts_data(["a"]) == {"ok": 1}
    assert came == ["POST /api/put_prompts_data HTTP/1.1"] * 3


def test_the_last_refusal_is_told(server):
    url, came = server([REFUSED[429]] * 4)
    with Client(url) as client, pytest.raises(ServiceError, match="full") as refused:
        client.put_prompts_data(["a"])
    assert refused.value.status == 429 and len(came) == 4


@pytest.mark.parametrize("answer", [b"", BROKEN])
def test_a_call_that_may_have_been_carried_out_is_not_sent_again(server, answer):
    url, came = server([answer, DONE])
    with Client(url) as client, pytest.raises(Unanswered, match="may have been carried out"):
        client.put_prompts_data(["a"])
    assert len(came) == 1


@pytest.mark.parametrize("answer", [b"", BROKEN])
def test_a_call_that_changes_nothing_is_sent_again(server, answer):
    url, came = server([answer, answer, DONE])
    with Client(url) as client:
        assert client.status() == {"ok": 1}
    assert len(came) == 3


@pytest.mark.parametrize("status", [429, 503])
def test_a_stream_that_was_refused_for_now_is_begun_again(server, status):
    lines = b'{"ready":true}\n{"end":true}\n'
    url, came = server([REFUSED[status], told(200, lines), REFUSED[status], told(200, lines)])
    with Client(url) as client:
        assert client.init_engines() == {"ready": True}

    async def main():
        async with AsyncClient(url) as client:
            assert await client.init_engines() == {"ready": True}

    asyncio.run(main())
    assert came == ["POST /api/init_engines HTTP/1.1"] * 4


def test_a_stream_waits_for_a_server_that_does_not_listen_yet(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    listening, lines = [], b'{"step":4}\n{"end":true}\n'

    def serve():
        connection, _ = listening[0].accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(told(200, lines))

    def pause(seconds):
        if not listening:
            listening.append(socket.create_server(address))
            threading.Thread(target=serve, daemon=True).start()

    monkeypatch.setattr("mindspeed_asyncflow.web.client.time.sleep", pause)
    with Client(f"http://127.0.0.1:{address[1]}") as client:
        assert list(client.metrics()) == [{"step": 4}]
    listening[0].close()


def test_a_stream_that_has_begun_is_not_repeated(server):
    refused = b'{"step":4}\n{"error":{"status":503,"code":"recovering","message":"x"}}\n'
    url, came = server([told(200, refused), DONE])
    with Client(url) as client, pytest.raises(ServiceError, match="x"):
        list(client.metrics())
    assert len(came) == 1


def test_an_answer_that_is_not_of_this_service_is_shown(server):
    url, _ = server([b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 6\r\n\r\n<html>"])
    with Client(url) as client, pytest.raises(ServiceError, match=r"not from this service.*<html>"):
        client.stop()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="no address"):
        Client(url)
