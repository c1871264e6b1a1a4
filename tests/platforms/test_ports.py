"""Ports that stay taken from choosing to using."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.ports import hold_port


def test_eight_engines_at_once_never_share_a_port_twenty_times():
    """B92: all start together, the default port is busy."""
    with hold_port() as busy:
        for _ in range(20):
            with ThreadPoolExecutor(8) as pool:
                held = list(pool.map(lambda _: hold_port(busy.port, attempts=200), range(8)))
            try:
                ports = [h.port for h in held]
                assert len(set(ports)) == 8 and busy.port not in ports
            finally:
                for h in held:
                    h.close()


def test_a_busy_fixed_port_names_the_knob():
    """B92"""
    with hold_port() as busy, pytest.raises(PlatformError, match=rf"{busy.port}.*set dock.port"):
        hold_port(busy.port, knob="dock.port")


def test_a_held_port_cannot_be_bound_by_others_and_is_free_after():
    held = hold_port()
    with pytest.raises(PlatformError):
        hold_port(held.port)
    held.close()
    with hold_port(held.port) as again:
        assert again.port == held.port


def test_a_detached_socket_listens_on():
    held = hold_port()
    server = socket.socket(fileno=held.detach())
    with server, socket.create_connection((held.host, held.port), timeout=5) as client:
        peer, _ = server.accept()
        with peer:
            client.sendall(b"x")
            assert peer.recv(1) == b"x"
