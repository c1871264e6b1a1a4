"""What callers hear before, during and after a run, and how calls cross from their event loop into the run's."""

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ClaimLost, ConfigError, DeadlineExceeded, DockFull, ServiceError, WorkerLost
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import serving
from mindspeed_asyncflow.service.api import RunApi, told
from mindspeed_asyncflow.service.experience import NOTHING
from mindspeed_asyncflow.service.outside import RUNNING, Outside
from mindspeed_asyncflow.service.owner import Owner


def code_of(work):
    with pytest.raises(ServiceError) as refused:
        asyncio.run(work)
    return refused.value.status, refused.value.code


@pytest.fixture
def running(tmp_path):
    """An api over a run that has a loop and nothing else."""
    api, ready = RunApi(Config()), threading.Event()
    api.begin("alice", {})
    outside = api.outside = Outside(api.config, RunFolder(tmp_path))

    async def run():
        outside.loop, outside.state, outside.end = asyncio.get_running_loop(), RUNNING, asyncio.Event()
        ready.set()
        await outside.end.wait()
        await outside.ends()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait(10)
    loop = outside.loop
    outside.finish = lambda: loop.call_soon_threadsafe(outside.end.set)
    yield api, outside
    with contextlib.suppress(RuntimeError):
        outside.finish()
    thread.join(10)


def test_before_the_run_calls_are_refused_and_the_status_says_why():
    api = RunApi(Config())
    assert asyncio.run(api.status("alice")) == {"state": "waiting"}
    for work in (api.checkpoint("alice", 1.0), api.stop("alice", False), api.put_prompts_data("alice", [], False)):
        assert code_of(work) == (409, "not_initialised")
    api.begin("alice", {"trainer.steps": 3})
    assert api.asked.is_set() and api.config.trainer.steps == 3
    assert asyncio.run(api.status("alice")) == {"state": "starting"}
    assert asyncio.run(api.status("bob")) == {"state": "no_run"}
    assert code_of(api.checkpoint("alice", 1.0)) == (503, "starting")
    assert code_of(api.checkpoint("bob", 1.0)) == (404, "no_run")


def test_settings_that_cannot_be_used_leave_the_server_waiting_for_better_ones():
    def check(config):
        if config.trainer.lr > 1:
            raise ConfigError("too fast")

    api = RunApi(Config(), check)
    for overrides in (
        {"run.folder": "elsewhere"},
        {"trainer.steps": 0},
        {"trainer.lr": "x: [1"},
        {"trainer.lr": 2.0},
        {"a": 1},
    ):
        with pytest.raises(ServiceError) as refused:
            api.begin("alice", overrides)
        assert (refused.value.status, refused.value.code) == (422, "settings")
        assert api.owner is None and not api.asked.is_set() and api.config == Config()
    api.begin("bob", {"trainer.lr": 0.5})
    api.begin("bob", {})
    with pytest.raises(ServiceError, match=r"other settings: .*0\.5"):
        api.begin("bob", {"trainer.lr": 0.1})
    with pytest.raises(ServiceError) as refused:
        api.begin("alice", {})
    assert refused.value.code == "engines_in_use" and "bob" not in str(refused.value)


def test_a_run_that_is_served_again_goes_on_for_nobody_but_whoever_began_it(tmp_path):
    folder = RunFolder(tmp_path)
    RunApi(Config(), folder=folder).begin("bob", {})  # a run of `asyncflow train`, or a new one, is anybody's
    api = RunApi(Config(), folder=folder)
    api.begin("alice", {})
    api.driven(SimpleNamespace(folder=folder, complete=""))
    again = RunApi(Config(), folder=folder)
    with pytest.raises(ServiceError) as refused:
        again.begin("bob", {})
    assert refused.value.code == "engines_in_use" and "alice" not in str(refused.value)
    assert again.owner is None and not again.asked.is_set()
    again.begin("alice", {})


def test_a_call_that_waits_as_the_run_ends_hears_that_it_has_ended(running):
    api, outside = running

    async def main():
        waiting = asyncio.ensure_future(api._in_run(outside, "alice", asyncio.sleep(60)))
        await asyncio.sleep(0.05)
        assert outside.presence.silent_s == 0
        outside.finish()
        return await waiting

    assert code_of(main()) == (409, "ended")
    assert code_of(api._in_run(outside, "alice", asyncio.sleep(0))) == (409, "ended")


def test_a_caller_that_goes_away_ends_its_call_and_what_it_had_got_is_given_back(running):
    api, outside = running
    ended, undone = threading.Event(), []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main():
        call = asyncio.ensure_future(api._in_run(outside, "alice", waits()))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() and ended.wait(5)

        async def gives():
            return 7

        async def undo(result):
            undone.append(result)

        call = asyncio.ensure_future(api._in_run(outside, "alice", gives(), undo))
        await asyncio.sleep(0)  # it has begun, and has not heard of its result
        threading.Event().wait(0.1)
        call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert undone == [7]


def test_what_a_call_gets_in_the_moment_in_which_it_is_given_up_is_given_back(running):
    api, outside = running
    begun, gone, undone = threading.Event(), threading.Event(), threading.Event()

    async def gives():
        begun.set()
        gone.wait(5)  # the run's loop hears of nothing before there is a result
        return 7

    async def undo(result):
        undone.set()

    async def main():
        call = asyncio.ensure_future(api._in_run(outside, "alice", gives(), undo))
        await asyncio.to_thread(begun.wait, 5)
        call.cancel()
        await asyncio.wait([call])
        gone.set()
        assert call.cancelled() and await asyncio.to_thread(undone.wait, 5)

    asyncio.run(main())


def test_nothing_has_every_column_that_was_asked_for(running, monkeypatch):
    async def get(*asked):
        return NOTHING

    monkeypatch.setattr(Owner, "get", get)
    found = asyncio.run(running[0].get_experience_data("alice", "reward", ["response", "truth"], 1, 1.0))
    assert found.claim == 0 and found.columns == {"response": [], "truth": []} and not len(found.rows)


def test_a_stop_that_waits_for_its_own_caller_says_so_and_counts_as_a_call_until_then(running):
    api, outside = running
    silent = []

    def unattended():
        silent.append(outside.presence.silent_s)
        return "3 groups wait" if len(silent) > 2 else ""

    outside.rewards = SimpleNamespace(unattended=unattended)
    assert code_of(api.stop("alice", False)) == (409, "waits_for_you")
    assert outside.stopping and silent == [0, 0, 0] and not api.stopped.is_set()


def test_others_do_not_keep_a_run_alive_whose_client_is_silent(running):
    api, outside = running

    async def main():
        call = asyncio.ensure_future(api._in_run(outside, "bob", asyncio.sleep(0.3)))
        await asyncio.sleep(0.1)
        silent_s = outside.presence.silent_s
        await call
        return silent_s

    assert asyncio.run(main()) > 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DeadlineExceeded("x"), 504),
        (DockFull("x"), 507),
        (ClaimLost("x"), 409),
        (WorkerLost("x"), 503),
        (ConfigError("x"), 422),
        (ServiceError(418, "teapot", "x"), 418),
    ],
)
def test_errors_of_the_run_have_the_status_that_says_what_to_do(error, status):
    assert told(error).status == status and str(told(error)) == "x"


def test_a_signal_ends_a_server_that_waits_for_its_client(monkeypatch):
    taken = []

    @contextlib.contextmanager
    def offer(api):
        def interrupt(limit_s):
            raise KeyboardInterrupt

        monkeypatch.setattr(api.asked, "wait", interrupt)
        yield
        taken.append("left")

    monkeypatch.setattr(serving, "_listen", lambda: None)
    assert serving.serve(Config(), offer=offer) == 130
