"""A whole run through the service interface, and beside it thousands of spoiled requests; then how fast it is.

The last line printed is one JSON object; README.md says what its keys mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from our_side import PASSIVE, ROOT, empty_folder, run_command

sys.path.insert(0, str(ROOT))  # the spoiled requests are those of the tests

import service_parts as parts
from service_run import Driven, drive

from mindspeed_asyncflow import Client

CONFIG = ROOT / "configs" / "qwen_tiny_cpu.yaml"
SETTINGS = {
    "service.prompts": "client",
    "service.rewards": "client",
    "rollout.engine": "reference",
    "evaluation.prompts": 64,
    "workflow.groups_per_step": 16,
    "service.tenant_mb": 256,
    "dock.arena_mb": 768,
    "service.linger_s": 120,
}
RUN_S = 1200.0


def served(out: Path, steps: int, requests: int, rounds: int) -> dict:
    """One server: idle, then a run and spoiled requests at once, then rows of a tenant."""
    tenants = out / "tenants"
    tokens = {name: f"the-token-of-{name}-0123456789" for name in ("owner", "guest", "intruder")}
    tenants.touch(mode=0o600)
    tenants.write_text("".join(f"{name}:{token}\n" for name, token in tokens.items()), encoding="utf-8")
    command = [sys.executable, "-m", "mindspeed_asyncflow", "serve", str(CONFIG), "--port", "0"]
    command += ["--tenants", str(tenants), "--run-folder", str(out / "run")]
    for key, value in SETTINGS.items():
        command += ["--set", f"{key}={value}"]
    with (out / "server.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=parts.environment(PASSIVE), stdout=log, stderr=log)
        try:
            url = parts.address(out / "server.log", server, 120.0)
            return _measured(url, tokens, server, out, steps, requests, rounds)
        finally:
            parts.end(server)


def _measured(url, tokens, server, out, steps, requests, rounds) -> dict:
    with Client(url, tokens["owner"]) as client:
        overhead_us = parts.overhead_us(client, 300)
        print(f"a call that does nothing: {overhead_us:.0f} us", flush=True)
        client.init_engines({"trainer.steps": steps}, timeout_s=RUN_S, progress=lambda p: print(f"  {p}", flush=True))
        spoiled = parts.Spoiled(url, tokens["owner"], tokens["intruder"], requests)
        thread = threading.Thread(target=spoiled.send)
        rates: list[float] = []

        def transfers() -> None:
            thread.join(RUN_S)
            with Client(url, tokens["guest"]) as guest:
                rates.append(parts.over_http(guest, rounds))
            rates.append(parts.direct(out / "run", rounds))

        thread.start()
        found = drive(url, tokens["owner"], client, steps, transfers)
        print(f"{spoiled.tried} spoiled requests: {dict(sorted(spoiled.statuses.items()))}", flush=True)
        summary = client.stop()
        code = server.wait(120.0)
    # Raises where the audit finds something.
    audit_s = run_command(
        [sys.executable, "-m", "mindspeed_asyncflow", "audit", str(out / "run")], out / "audit.log", {}, 300.0
    )
    print(f"audit passed in {audit_s:.1f} s; exit code {code}; {json.dumps(summary, default=str)[:300]}", flush=True)
    rows = steps * SETTINGS["workflow.groups_per_step"] * found.size
    whole = code == 0 and found.saved and (found.steps, found.rows) == (steps, rows)
    return figures(found, whole, spoiled, (rates[0], rates[1]), overhead_us)


def figures(found: Driven, whole: bool, spoiled: parts.Spoiled, rates: tuple[float, float], overhead_us: float) -> dict:
    """The last line. `whole`: the run came to its end, with every row trained and the audit passed."""
    over_http, direct = rates
    return {
        "verbs_run_ok": bool(whole and not spoiled.effects and found.rewards[-1] > found.rewards[0]),
        "bad_requests_tried": spoiled.tried,
        "server_errors": spoiled.errors,
        "experience_gb_per_s_over_dock": round(over_http / direct, 4),
        "experience_gb_per_s": round(over_http, 4),
        "dock_gb_per_s": round(direct, 4),
        "overhead_us_per_call": round(overhead_us, 1),
        "reward_first": round(found.rewards[0], 4),
        "reward_last": round(found.rewards[-1], 4),
        "steps": found.steps,
        "run_s": round(found.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 steps and 1,000 spoiled requests")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 40, quick 8)")
    parser.add_argument("--requests", type=int, help="spoiled requests (default: 10,000, quick 1,000)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each transfer is measured; medians are told")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "service")
    arguments = parser.parse_args()
    steps = arguments.steps or (8 if arguments.quick else 40)
    requests = arguments.requests or (1000 if arguments.quick else 10_000)
    out = empty_folder(arguments.out.resolve(), "service")
    began = time.perf_counter()
    result = served(out, steps, requests, arguments.rounds)
    result["wall_s"] = round(time.perf_counter() - began, 1)
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
    if not result["verbs_run_ok"] or result["server_errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
