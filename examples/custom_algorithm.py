"""An algorithm of one's own on the service interface: this file decides prompts, rewards and advantages; the server
samples answers, trains on them and keeps its replicas up to date.

    python examples/custom_algorithm.py                                      # starts a server on this machine (CPU)
    python examples/custom_algorithm.py --url http://host:8000 --token-file service.token

The model learns to sort four digits. A reward is the share of digits in their place, and a point for all of them; an
advantage is what an answer is better than its siblings (Dr. GRPO). docs/service.md explains the calls.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from mindspeed_asyncflow import Client

CONFIG = Path(__file__).parents[1] / "configs" / "qwen_tiny_cpu.yaml"
BY_US = ["service.prompts=client", "service.rewards=client", "rollout.engine=reference"]


@contextlib.contextmanager
def own_server(settings):
    """(address, token file) of a server that ends with the block."""
    command = [sys.executable, "-m", "mindspeed_asyncflow", "serve", str(CONFIG), "--port", "0"]
    command += [part for setting in [*BY_US, *settings] for part in ("--set", setting)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = {}
    for line in server.stdout:
        print(line, end="")
        if line.startswith("token"):
            said["token"] = line.split("it is in ")[-1].removeprefix("token: ").strip(" )\n")
        if line.startswith("listening on "):
            break
    threading.Thread(target=lambda: sys.stdout.writelines(server.stdout), daemon=True).start()
    try:
        yield line.split()[2], said["token"]
    finally:
        if server.wait(60):
            raise SystemExit(f"the server ended with {server.returncode}")


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
        for step in range(run["steps"] + run["max_lag"]):  # prompts for as many steps ahead as answers may be old
            if step < run["steps"]:
                digits = ["".join(draw.choices("0123456789", k=4)) for _ in range(run["groups_per_step"])]
                prompts = [{"prompt": f"{d}>", "truth": "".join(sorted(d))} for d in digits]
                client.put_prompts_data(prompts, last=step + 1 == run["steps"])
            left = run["groups_per_step"] if step >= run["max_lag"] else 0
            while left:
                batch = client.get_experience_data("reward", ["response", "truth"], groups=left)
                rewards = np.array([reward(*pair) for pair in zip(batch.columns["response"], batch.columns["truth"])])
                advantages = [r - rewards[batch.groups == g].mean() for r, g in zip(rewards, batch.groups)]
                client.put_experience_data(batch.claim, batch.rows, {"rewards": rewards, "advantages": advantages})
                left -= len(set(batch.groups.tolist()))
        found = client.stop()["summary"]
    print(f"reward {found['reward_first']:.2f} -> {found['reward_last']:.2f}, sorted {found['heldout_greedy']:.0%}")


if __name__ == "__main__":
    main()
