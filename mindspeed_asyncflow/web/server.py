"""uvicorn in a thread of its own, on a socket that is bound before: who cannot listen learns it at once."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from mindspeed_asyncflow.errors import ConfigError, PlatformError
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.service.verbs import Verbs
from mindspeed_asyncflow.web.app import make_app
from mindspeed_asyncflow.web.limits import Limits
from mindspeed_asyncflow.web.security import Tenants

START_S, END_S = 20.0, 10.0
HEADER_BYTES = 32 << 10  # all headers of a request together
KEEP_ALIVE_S = 30
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how to listen. Port 0: any free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Raises `ConfigError` for certificates that cannot be used."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together: one is missing")
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(self.tls_cert, self.tls_key, password=_no_password)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--tls-cert {self.tls_cert} with --tls-key {self.tls_key}: {error}") from error

    def address(self, port: int) -> str:
        """With the port that was got."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{port}"


def _no_password() -> bytes:
    """For OpenSSL, which would ask at the terminal."""
    raise ConfigError("the key is encrypted; write it without a password: openssl pkey -in KEY -out NEW")


@contextlib.contextmanager
def offered(verbs: Verbs, tenants: Tenants, listening: Listening) -> Iterator[str]:
    """Offer `verbs` while inside; gives the address. On leaving, answers that are on their way have `END_S`.

    Raises `ConfigError` for certificates, `PlatformError` where the address cannot be had.
    """
    listening.check()
    bound = _bound(listening.host, listening.port)
    try:
        server = uvicorn.Server(_config(verbs, tenants, listening))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="web", daemon=True)
        thread.start()
        until = time.monotonic() + START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > until:
                raise PlatformError(f"the web server did not start on {listening.host}; the log says more")
            time.sleep(0.01)
        try:
            yield listening.address(bound.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(END_S)
            server.force_exit = True
            thread.join(END_S)
    finally:
        bound.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)  # asyncio answers without delay only where TCP is named
    except (OSError, OverflowError) as error:
        raise PlatformError(f"cannot listen on {host!r}: {error}; give another --host") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
        return bound
    except OSError as error:
        bound.close()
        raise PlatformError(f"cannot listen on {host} port {port}: {error}; give another --port, 0 for any") from error


def _config(verbs: Verbs, tenants: Tenants, listening: Listening) -> uvicorn.Config:
    _quiet()
    return uvicorn.Config(
        make_app(verbs, tenants, listening.limits),
        http="h11",  # the one that limits the bytes of headers
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(END_S / 2),
        ssl_certfile=listening.tls_cert,
        ssl_keyfile=None if listening.tls_key is None else str(listening.tls_key),
    )


class _Told(logging.Handler):
    """What uvicorn says goes into the run's log file; what fails in a call was told by then."""

    def emit(self, record: logging.LogRecord) -> None:
        get_logger("web").debug("%s", record.getMessage())


def _quiet() -> None:
    logger = logging.getLogger("uvicorn")
    logger.handlers, logger.propagate = [_Told()], False
