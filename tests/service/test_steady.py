"""A process that is stopped and goes on."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.slow

WAITS = """
import asyncio, sys
from mindspeed_asyncflow.service.steady import SteadyLoop

async def tick():
    while True:
        await asyncio.sleep(0.05)

async def main():
    ticking = asyncio.create_task(tick())
    print("waits", flush=True)
    line = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    try:
        print(await asyncio.wait_for(line, 2.0))
    except asyncio.TimeoutError:
        print("too late")

with asyncio.Runner(loop_factory=lambda: SteadyLoop(0.5)) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize(("stopped_s", "silent_s", "said"), [(3.0, 0.0, "here"), (0.0, 3.0, "too late")])
def test_a_deadline_leaves_out_the_time_in_which_the_process_was_stopped_and_nothing_else(stopped_s, silent_s, said):
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "waits\n"
    if stopped_s:
        process.send_signal(signal.SIGSTOP)
        time.sleep(stopped_s)
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        process.send_signal(signal.SIGCONT)
    time.sleep(silent_s)
    assert process.communicate("here\n", timeout=60)[0].split("\n")[0] == said
