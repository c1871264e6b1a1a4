"""A reward model behind HTTP. Only the standard library: scorer processes must be up in a fraction of a second."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from mindspeed_asyncflow.rewards.base import Answer

_AGAIN = (429, 500, 502, 503, 504)
_MOST_BYTES = 8 << 20  # of a reply
_FIRST_WAIT_S = 0.05


class Http:
    """Scores of a server: POST {"items": [{"prompt", "answer", "truth", "fields"}]} gives {"scores": [number or null]}.

    Answers go in batches of at most `batch`. A connection that fails and the statuses 429 and 5xx are tried again, each
    time after twice the wait, at the next of `urls`, until `deadline_s` for all (by default 0.8 of reward.timeout_s).
    `token_file` holds what is sent as a bearer token.
    """

    def __init__(
        self, urls: str | list[str], batch: int = 32, deadline_s: float | None = None, token_file: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # port: may raise
                raise ValueError(f"url {url!r} must be http://HOST[:PORT]/PATH or https://...")
        self.deadline_s = 0.8 * timeout_s if deadline_s is None else deadline_s
        if not self.urls or not 1 <= batch <= 64 or not 0 < self.deadline_s < timeout_s:
            raise ValueError(f"urls must not be empty, batch 1 to 64, deadline_s below reward.timeout_s {timeout_s:g}")
        self.batch = batch
        self.headers = {"Content-Type": "application/json"}
        if token_file is not None:
            with open(token_file, encoding="utf-8") as file:
                self.headers["Authorization"] = f"Bearer {file.read().strip()}"
        self._next = itertools.cycle(self.urls)

    def score_batch(self, answers: Sequence[Answer]) -> list[float | Exception | None]:
        ends = time.monotonic() + self.deadline_s
        found: list[float | Exception | None] = []
        for first in range(0, len(answers), self.batch):
            part = answers[first : first + self.batch]
            try:
                found += self._ask(part, ends)
            except Exception as error:  # boundary: of this batch nothing is known, and every answer says why
                found += [error] * len(part)
        return found

    def _ask(self, answers: Sequence[Answer], ends: float) -> list[float | Exception | None]:
        items = [{"prompt": a.prompt, "answer": a.text, "truth": a.truth, "fields": a.fields} for a in answers]
        body = json.dumps({"items": items}).encode()
        wait, last = _FIRST_WAIT_S, "nothing was tried"
        while (left := ends - time.monotonic()) > 0:
            url = next(self._next)
            try:
                status, reply = self._post(url, body, left)
            except (OSError, http.client.HTTPException) as error:
                last = f"{url}: {type(error).__name__}: {error}"
            else:
                if status == 200:
                    return _scores(url, reply, len(answers))
                last = f"{url}: status {status}: {reply[:200].decode('utf-8', 'replace')}"
                if status not in _AGAIN:
                    raise RuntimeError(last)
            time.sleep(min(wait, max(0.0, ends - time.monotonic())))
            wait *= 2
        raise TimeoutError(f"no scores within {self.deadline_s:g} s; last: {last}")

    def _post(self, url: str, body: bytes, left_s: float) -> tuple[int, bytes]:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=left_s)
        ends, watch = time.monotonic() + left_s, None
        try:
            connection.connect()
            # A socket's time-out starts anew with every byte, also inside the headers.
            watch = threading.Timer(ends - time.monotonic(), _hang_up, (connection.sock,))
            watch.daemon = True
            watch.start()
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", target, body, self.headers)
            response = connection.getresponse()
            reply = b""
            while data := response.read1(65536):
                reply += data
                if len(reply) > _MOST_BYTES:
                    raise http.client.HTTPException(f"a reply of more than {_MOST_BYTES >> 20} MiB")
            if time.monotonic() >= ends:
                raise TimeoutError("the reply does not end")
            if response.length:
                raise http.client.IncompleteRead(reply, response.length)
            return response.status, reply
        finally:
            if watch is not None:
                watch.cancel()
            connection.close()


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        sock.shutdown(socket.SHUT_RDWR)


def _scores(url: str, reply: bytes, count: int) -> list[float | Exception | None]:
    """Raises ValueError for anything but one number or null per answer."""
    try:
        scores = json.loads(reply)["scores"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{url}: the reply is no {{'scores': [...]}}: {error!r}") from error
    if not isinstance(scores, list) or len(scores) != count:
        raise ValueError(f"{url}: {count} answers were sent, the reply has {scores!r:.80}")
    if any(isinstance(s, bool) or not isinstance(s, int | float | None) for s in scores):
        raise ValueError(f"{url}: a score is neither a number nor null")
    return scores
