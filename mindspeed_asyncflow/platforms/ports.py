"""TCP ports that nobody else can take between choosing and using them."""

from __future__ import annotations

import errno
import socket

from mindspeed_asyncflow.errors import PlatformError


class HeldPort:
    """A port that this process keeps bound and listening until it hands the socket over or closes it.

    Choosing a free port, closing it and binding it later is a race that several engines on one node lose; holding the
    listening socket is not. A server that accepts a listening file descriptor takes `detach()`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.host, self.port = sock.getsockname()[:2]

    def detach(self) -> int:
        """The listening file descriptor; the caller owns it from now on."""
        return self._socket.detach()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def hold_port(port: int = 0, *, host: str = "127.0.0.1", attempts: int = 1, knob: str = "port") -> HeldPort:
    """Bind and hold a TCP port.

    `port=0` takes any free one from the system. A fixed `port` is tried first, then the `attempts - 1` following
    numbers. Raises `PlatformError` naming `knob` when all of them are busy.
    """
    last: OSError | None = None
    for offset in range(max(1, attempts)):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((host, port + offset if port else 0))
            sock.listen(128)
            return HeldPort(sock)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise
            last = error
    tried = f"{port}" if attempts <= 1 else f"{port}..{port + attempts - 1}"
    raise PlatformError(
        f"port {tried} on {host} cannot be bound ({last}): set {knob} to a free port, or to 0 for any free one"
    )
