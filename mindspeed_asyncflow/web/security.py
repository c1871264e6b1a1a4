"""Who may call: tokens, the files they lie in, and what an address that others can reach needs."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from mindspeed_asyncflow.errors import ConfigError, ServiceError

OWNER = "owner"
SHORTEST_TOKEN = 16
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_TOKEN = re.compile(r"[!-~]+")  # what a header can carry
_LOCAL_HOSTS = {"localhost", "127.0.0.1", "[::1]"}


class Tenants:
    """Tokens to tenants. Of a token only its digest is kept, and every one is compared, in constant time."""

    def __init__(self, tokens: Mapping[str, str] | None, host: str = "localhost") -> None:
        """`tokens`: tenant -> token; None: whoever reaches the server is the owner, if it names `host`, on which the
        server listens, or another name of this machine."""
        self._hosts = _LOCAL_HOSTS | {f"[{host}]" if ":" in host else host}
        self._digests = None if tokens is None else {name: _digest(token) for name, token in tokens.items()}

    def admit(self, headers: Mapping[bytes, bytes]) -> str:
        """The tenant of a request with these headers. Raises `ServiceError` 401 or 403."""
        if self._digests is None:
            return _local(headers, self._hosts)
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        found = [name for name, known in self._digests.items() if hmac.compare_digest(known, digest)]
        if kind.lower() != b"bearer" or not found:
            raise ServiceError(401, "unauthorized", "this needs the header `Authorization: Bearer TOKEN`")
        return found[0]


def _local(headers: Mapping[bytes, bytes], hosts: set[str]) -> str:
    """Without a token, a page in a browser of this machine must not be able to call: it names its origin, or a host
    name of its own that it lets point to here."""
    host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1"))
    if host not in hosts or b"origin" in headers:
        raise ServiceError(403, "not_local", "a server without a token answers programs on its own machine only")
    return OWNER


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def read_tenants(path: Path) -> dict[str, str]:
    """Lines `name:token` of a file that only its owner can read; empty lines and those that begin with # are left out.

    Raises `ConfigError` that names the line, and never shows a token.
    """
    tokens: dict[str, str] = {}
    for number, line in enumerate(_private(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, token = line.strip().partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise ConfigError(f"{path}:{number}: a line is name:token, the name of a-z, 0-9, - and _")
        if name in tokens:
            raise ConfigError(f"{path}:{number}: tenant {name!r} was there before")
        tokens[name] = _checked(token.strip(), f"{path}:{number}")
    if not tokens:
        raise ConfigError(f"{path} has no line name:token")
    if len(set(tokens.values())) < len(tokens):
        raise ConfigError(f"{path}: two tenants have the same token")
    return tokens


def owner_token(path: Path) -> tuple[str, bool]:
    """The token in the file, and whether it is new: one is made where there is no file, which only its owner can read.

    Raises `ConfigError`.
    """
    if path.is_symlink() or path.exists():
        return _checked(_private(path).strip(), str(path)), False
    token = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _safe_folder(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(f"the token cannot be written to {path} ({error}); give --token-file") from error
    return token, True


def _private(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
                raise ConfigError(f"{path} can be read by others (mode {mode:o}); run: chmod 600 {path}")
            if found.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{path} belongs to user {found.st_uid}, who knows the tokens in it: make your own")
            _safe_folder(path)
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokens cannot be read: {error}") from error


def _safe_folder(path: Path) -> None:
    """Raises `ConfigError` where others could put a file of theirs in the place of this one."""
    folder = path.resolve().parent
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(f"{folder}, where the token is, can be written by everybody; run: chmod o-w {folder}")


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST_TOKEN or not _TOKEN.fullmatch(token):
        raise ConfigError(f"{where}: a token has at least {SHORTEST_TOKEN} characters, no spaces and only ASCII")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
