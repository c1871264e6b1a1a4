"""An algorithm of one's own: prompts, rewards and advantages are this file's, all else does the server of the run.

    python examples/custom_algorithm.py                                      # starts a server on this machine (CPU)
    python examples/custom_algorithm.py --url http://host:8000 --token-file service.token

The model learns to sort four digits; an advantage is what an answer is better than its siblings (docs/service.md)."""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from mindspeed_asyncflow import Client
from mindspeed_asyncflow.errors import ServiceError

CONFIG = Path(__file__).parents[1] / "configs" / "qwen_tiny_cpu.yaml"
BY_US = ["service.prompts=client", "service.rewards=client", "rollout.engine=reference"]


@contextlib.contextmanager
def own_server(settings):  # its address and token file; it ends with the block
    token = Path(tempfile.mkdtemp()) / "token"
    command = [sys.executable, "-m", "mindspeed_asyncflow", "serve", str(CONFIG), "--port", "0", "--token-file", token]
    command += [part for setting in [*BY_US, *settings] for part in ("--set", setting)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = next((line.split()[2] for line in server.stdout if line.startswith("listening on ")), None)
    if url is None:
        raise SystemExit(f"the server has not started: it ended with {server.wait(60)}")
    threading.Thread(target=lambda: sys.stdout.writelines(server.stdout), daemon=True).start()
    try:
        yield url, token
        if server.wait(60):
            raise SystemExit(f"the server ended with {server.returncode}")
    finally:
        server.terminate()  # and its run, where nobody drives it any more


def reward(answer, truth):
    return sum(a == t for a, t in zip(answer, truth)) / len(truth) + float(answer == truth)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url")
    parser.add_argument("--token-file")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], help="further settings of the server that is started")
    asked, draw = parser.parse_args(), random.Random(0)
    given = contextlib.nullcontext((asked.url, asked.token_file))
    with given if asked.url else own_server(asked.set) as (url, token), Client(url, token_file=token) as client:
        run = client.init_engines({"trainer.steps": asked.steps})
        digits = ["".join(draw.choices("0123456789", k=4)) for _ in range(run["steps"] * run["groups_per_step"])]
        if not run["accepted"]:  # else the run goes on, and has them
            client.put_prompts_data([{"prompt": f"{d}>", "truth": "".join(sorted(d))} for d in digits], last=True)
        while True:
            try:
                batch = client.get_experience_data("reward", ["response", "truth"], groups=run["groups_per_step"])
                rewards = np.array([reward(*pair) for pair in zip(batch.columns["response"], batch.columns["truth"])])
                advantages = [r - rewards[batch.groups == g].mean() for r, g in zip(rewards, batch.groups)]
                if batch.claim:  # 0: no answer was there within a minute
                    client.put_experience_data(batch.claim, batch.rows, {"rewards": rewards, "advantages": advantages})
            except ServiceError as error:
                if error.code == "ended":  # the last prompts are trained
                    break
                if error.code != "unknown_claim":  # the trainer was started again: its groups come once more
                    raise
        ended = client.stop()
    found = ended["summary"] if not ended["error"] else sys.exit(ended["error"])
    print(f"reward {found['reward_first']:.2f} -> {found['reward_last']:.2f}, held-out {found['heldout_greedy']}")


if __name__ == "__main__":
    main()
