"""`asyncflow serve`: a run that programs drive from outside, over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from mindspeed_asyncflow.cli import preflight, settings
from mindspeed_asyncflow.config import Config, checks
from mindspeed_asyncflow.errors import ConfigError, PlatformError

NAME = "serve"
HELP = "let programs drive a run over HTTP: prompts, rewards, weights, completions"
FAILED = "the run failed"  # what status 1 says
EXAMPLES = """  asyncflow serve configs/qwen_tiny_cpu.yaml
  asyncflow serve my.yaml --set service.prompts=client --set service.rewards=client
  asyncflow serve my.yaml --host 0.0.0.0 --port 8443 --tls-cert cert.pem --tls-key key.pem
  asyncflow serve my.yaml --tenants tenants.txt    # lines name:token, for several programs that do not see each other
  curl -H "Authorization: Bearer $(cat runs/service.token)" http://127.0.0.1:8000/api/status"""
TOKEN_FILE = "service.token"  # in run.folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, which only this machine reaches)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default: 8000)")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="the owner's token, made where there is no such file (default: service.token in run.folder)",
    )
    parser.add_argument("--tenants", metavar="FILE", type=Path, help="lines name:token, one for each tenant")
    parser.add_argument(
        "--no-token", action="store_true", help="let every program of this machine call; loopback addresses only"
    )
    parser.add_argument("--tls-cert", metavar="FILE", type=Path, help="certificate chain, PEM; answers by HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="its private key, PEM, not encrypted")
    parser.add_argument(
        "--run-folder", metavar="DIR", type=Path, help="a folder for the results, or that of an earlier run"
    )
    parser.add_argument(
        "--resume", metavar="auto|never|CHECKPOINT", default="auto", help="as for `asyncflow train` (default: auto)"
    )
    parser.add_argument("--start", action="store_true", help="begin the run at once, without init_engines")


def run(arguments: argparse.Namespace) -> int:
    config = settings.load(arguments)
    tokens = _tokens(arguments, config)
    warnings = [f"asyncflow: {warning}" for warning in checks.refuse_errors(preflight.inspect(config))]
    for warning in warnings:
        print(warning, file=sys.stderr)
    # Only now: they take seconds, and a mistake is answered at once.
    from mindspeed_asyncflow.service.serving import serve
    from mindspeed_asyncflow.service.verbs import Verbs
    from mindspeed_asyncflow.web.limits import Limits
    from mindspeed_asyncflow.web.security import Tenants
    from mindspeed_asyncflow.web.server import Listening, offered

    limits = Limits.of(config.service.max_body_mb)
    listening = Listening(arguments.host, arguments.port, arguments.tls_cert, arguments.tls_key, limits)
    listening.check()

    @contextlib.contextmanager
    def offer(verbs: Verbs) -> Iterator[None]:
        with contextlib.ExitStack() as until_the_end:
            try:
                address = until_the_end.enter_context(offered(verbs, Tenants(tokens, arguments.host), listening))
            except PlatformError as error:  # nothing was started: --host or --port has to be another one
                raise ConfigError(str(error)) from None
            print(f"listening on {address} (what it offers: {address}/docs)", flush=True)
            yield

    return serve(config, arguments.run_folder, warnings, arguments.resume, offer, arguments.start, _check)


def _check(config: Config) -> None:
    checks.refuse_errors(preflight.inspect(config))


def _tokens(arguments: argparse.Namespace, config: Config) -> dict[str, str] | None:
    """Tenant -> token; None: none is needed. Raises `ConfigError` for what would leave a door open."""
    from mindspeed_asyncflow.web.security import OWNER, is_loopback, owner_token, read_tenants

    local = is_loopback(arguments.host)
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: a port is from 0 to 65535")
    if arguments.no_token:
        if arguments.tenants or arguments.token_file:
            raise ConfigError("--no-token goes with neither --tenants nor --token-file")
        if not local:
            raise ConfigError(
                f"--host {arguments.host} can be reached from elsewhere: it needs a token, not --no-token"
            )
        return None
    if not local and not arguments.tls_cert:
        print(
            f"asyncflow: --host {arguments.host} without --tls-cert: tokens and data cross the network as they are",
            file=sys.stderr,
        )
    tokens = read_tenants(arguments.tenants) if arguments.tenants else {}
    if arguments.token_file or not arguments.tenants:
        path = arguments.token_file or Path(config.run.folder) / TOKEN_FILE
        token, new = owner_token(path)
        if tokens.get(OWNER, token) != token or token in [t for name, t in tokens.items() if name != OWNER]:
            raise ConfigError(f"{arguments.tenants} and {path} do not agree on the token of {OWNER!r}")
        tokens[OWNER] = token
        print(f"token of {OWNER}: {token} (shown once; it is in {path})" if new else f"token: {path}", flush=True)
    if arguments.start and OWNER not in tokens:
        raise ConfigError(
            f"--start begins the run of {OWNER!r}, for whom there is no token: add a line {OWNER}:TOKEN to "
            f"{arguments.tenants}, or give --token-file"
        )
    return tokens
