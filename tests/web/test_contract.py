"""Every verb over a real socket, by both clients: what goes in comes out, and what is refused is told as it was."""

import asyncio
import inspect
import threading

import numpy as np
import pytest

from mindspeed_asyncflow.errors import DeadlineExceeded, PlatformError, ServiceError
from mindspeed_asyncflow.service.verbs import Experience, Prompt, Trajectory, TrajectoryGroup, Verbs
from mindspeed_asyncflow.web.client import AsyncClient, Client
from mindspeed_asyncflow.web.security import Tenants
from mindspeed_asyncflow.web.server import Listening, offered
from tests.web.fakes import GUEST, OWNER, FakeVerbs

TOKENS = {OWNER: "the-token-of-the-owner", GUEST: "the-token-of-a-guest"}


@pytest.fixture
def fake():
    return FakeVerbs()


@pytest.fixture
def url(fake):
    with offered(fake, Tenants(TOKENS), Listening(port=0)) as address:
        yield address


class Both:
    """Calls of a client, sync or async, as plain calls."""

    def __init__(self, kind, url, tenant=OWNER):
        self._client = kind(url, TOKENS[tenant])
        self._loop = asyncio.new_event_loop() if kind is AsyncClient else None

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def call(*arguments, **named):
            found = method(*arguments, **named)
            if inspect.isawaitable(found):
                return self._loop.run_until_complete(found)
            if inspect.isasyncgen(found):
                return self._loop.run_until_complete(_listed(found))
            return list(found) if inspect.isgenerator(found) else found

        return call

    def end(self):
        self.close()
        if self._loop is not None:
            self._loop.close()


async def _listed(stream):
    return [item async for item in stream]


@pytest.fixture(params=[Client, AsyncClient])
def client(request, url):
    both = Both(request.param, url)
    yield both
    both.end()


def test_a_whole_run_is_driven_from_outside(client, fake):
    phases = []
    ready = client.init_engines({"trainer.steps": 1}, progress=phases.append)
    assert ready["ready"] and [phase["phase"] for phase in phases[:-1]] == ["starting Ray", "loading model"]
    prompts = ["ab", Prompt(np.array([5, 6], np.int32), truth="56"), [{"role": "user", "content": "c"}]]
    assert client.put_prompts_data(prompts, last=True)["accepted"] == 3
    batch = client.get_experience_data("reward", ["response_ids", "rollout_logprobs", "finish", "truth"], groups=3)
    assert [row.tolist() for row in batch.columns["response_ids"][:4]] == [[98, 97], [98, 97], [6, 5], [6, 5]]
    assert batch.columns["rollout_logprobs"][0].dtype == np.float32 and batch.columns["finish"].dtype == np.uint8
    assert batch.columns["truth"] == ["", "", "56", "56", "", ""] and batch.members.tolist() == [0, 1] * 3
    written = client.put_experience_data(batch.claim, batch.rows, {"rewards": [1, 0.5, float("nan"), 1, 1, 1]})
    assert written == {"written": 6}
    assert client.weight_sync_notify(1)["version"] == 1
    assert [record["step"] for record in client.metrics()] == [0]
    assert client.status()["version"] == 1
    assert client.evaluate()["score"] == 0.5
    assert client.checkpoint()["step"] == 1
    assert client.export()["version"] == 1
    assert client.stop() == {"steps": 1, "now": False}
    assert fake.overrides == {"trainer.steps": 1}
    rewards = [row["rewards"] for row in fake._stores[OWNER].rows.values()]
    assert rewards[:2] == [1, 0.5] and np.isnan(rewards[2])


def test_trajectories_arrive_as_they_were(client, fake):
    client.init_engines()
    answers = [
        Trajectory(np.array([3, 4], np.int32), np.array([-0.25, -1.5], np.float32), 2, np.array([1, 0], np.uint8)),
        Trajectory(np.array([5], np.int32), np.array([-0.5], np.float32), 1, finished=False),
    ]
    group = TrajectoryGroup(Prompt("q", "a", {"k": [1]}), answers, rewards=np.array([1, 0.5]))
    told = []
    put = fake.put_trajectories

    async def put_trajectories(tenant, groups):
        told.extend(groups)
        return await put(tenant, groups)

    fake.put_trajectories = put_trajectories
    assert client.put_trajectories([group, group])["accepted"] == 2
    got = told[1]
    assert got.prompt == Prompt("q", "a", {"k": [1]}) and got.advantages is None
    assert got.rewards.tolist() == [1, 0.5] and got.rewards.dtype == np.float32
    first, second = got.answers
    assert first.response_ids.tolist() == [3, 4] and first.response_ids.dtype == np.int32
    assert first.rollout_logprobs.tolist() == [-0.25, -1.5] and first.response_mask.tolist() == [1, 0]
    assert (first.version, first.finished, second.finished, second.response_mask) == (2, True, False, None)


def test_large_arrays_cross_in_pieces(client, fake):
    client.init_engines()
    client.put_prompts_data(["ab"])
    batch = client.get_experience_data("reward", ["response_ids"])
    sent = [np.arange(700_000, dtype=np.float32), np.arange(3, dtype=np.float32)]
    told = {}

    async def put_experience_data(tenant, claim, rows, columns):
        told.update(columns)
        return {"written": len(rows)}

    async def get_experience_data(*_):
        return Experience(1, batch.rows, batch.groups, batch.members, told)

    fake.put_experience_data, fake.get_experience_data = put_experience_data, get_experience_data
    client.put_experience_data(batch.claim, batch.rows, {"values": sent})
    got = client.get_experience_data("reward", ["values"]).columns["values"]
    for values in (told["values"], got):
        assert [row.tobytes() for row in values] == [row.tobytes() for row in sent]


def test_a_failure_within_a_stream_keeps_its_status(client, fake):
    async def init_engines(tenant, overrides):
        yield {"phase": "loading"}
        await asyncio.sleep(0.05)
        raise ServiceError(422, "settings", "the model does not fit")

    fake.init_engines = init_engines
    with pytest.raises(ServiceError, match="does not fit") as refused:
        client.init_engines()
    assert (refused.value.status, refused.value.code) == (422, "settings")


def test_a_run_that_has_ended_is_not_ready(client, fake):
    async def init_engines(tenant, overrides):
        yield {"ready": False, "state": "ended"}

    fake.init_engines = init_engines
    with pytest.raises(ServiceError, match="it is ended"):
        client.init_engines()


def test_a_broken_stream_of_metrics_goes_on_where_it_was(url, fake, monkeypatch):
    monkeypatch.setattr("mindspeed_asyncflow.web.client.PAUSES_S", (0.01,) * 3)
    asked = []

    async def metrics(tenant, since):
        asked.append(since)
        yield {"step": since}
        if since < 2:
            raise asyncio.CancelledError  # as when the server goes away: no last line
        yield {"step": since + 1}

    fake.metrics = metrics
    with Client(url, TOKENS[OWNER]) as client:
        assert [record["step"] for record in client.metrics()] == [0, 1, 2, 3]
    assert asked == [0, 1, 2]


def test_nothing_in_time_is_an_empty_claim(client):
    client.init_engines()
    batch = client.get_experience_data(timeout_s=0.05)
    assert isinstance(batch, Experience) and batch.claim == 0 and len(batch.rows) == 0


def test_refusals_keep_status_code_and_words(client):
    with pytest.raises(ServiceError, match="call init_engines") as refused:
        client.put_prompts_data(["a"])
    assert (refused.value.status, refused.value.code) == (409, "not_started")
    with pytest.raises(ServiceError, match=r"data\.path"):
        client.init_engines({"data.path": "/etc/passwd"})
    client.init_engines()
    with pytest.raises(ServiceError, match="has a run already") as refused:
        client.init_engines()
    assert refused.value.status == 409
    with pytest.raises(DeadlineExceeded, match="version 9 was not made"):
        client.weight_sync_notify(9, timeout_s=0.05)
    with pytest.raises(ServiceError, match=r"timeout_s: .*less than or equal to 3600"):
        client.evaluate(timeout_s=1e9)


def test_the_rows_of_tenants_do_not_see_each_other(client, url, fake):
    client.init_engines()
    client.put_prompts_data(["ab"])
    claimed = client.get_experience_data()
    guest = Both(Client, url, GUEST)
    try:
        for refused in (
            lambda: guest.put_experience_data(claimed.claim, claimed.rows, {"rewards": [1.0, 1.0]}),
            guest.metrics,
            guest.stop,
            guest.checkpoint,
        ):
            before = fake.state()
            with pytest.raises(ServiceError) as error:
                refused()
            assert error.value.status == 404 and fake.state() == before
        assert guest.get_experience_data("rollout", ["prompt"], timeout_s=0).claim == 0
        guest.put_prompts_data(["xyz"])
        mine = guest.get_experience_data("rollout", ["prompt"])
        assert mine.columns["prompt"] == ["xyz", "xyz"]
        assert client.get_experience_data(columns=["prompt"], timeout_s=0).claim == 0
        with pytest.raises(ServiceError) as error:
            client.put_experience_data(mine.claim + 7, mine.rows, {"rewards": [1.0, 1.0]})
        assert error.value.status == 404
    finally:
        guest.end()


def test_a_wait_ends_when_its_caller_goes_away(fake, url):
    """Nobody would get the claim that it ends with."""
    waiting, ended = threading.Event(), threading.Event()

    async def get_experience_data(*_):
        waiting.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    fake.get_experience_data = get_experience_data

    async def leave():
        async with AsyncClient(url, TOKENS[OWNER]) as client:
            call = asyncio.ensure_future(client.get_experience_data(timeout_s=60))
            await asyncio.to_thread(waiting.wait, 10)
            call.cancel()

    asyncio.run(leave())
    assert ended.wait(10)


def test_a_fault_of_the_server_is_told_in_one_word(client, fake, caplog):
    async def status(tenant):
        raise RuntimeError("a secret of the inside")

    fake.status = status
    with pytest.raises(ServiceError, match="its log says more") as refused:
        client.status()
    assert refused.value.status == 500 and "secret" not in str(refused.value)


def test_without_a_server_the_message_names_the_address(monkeypatch):
    monkeypatch.setattr("mindspeed_asyncflow.web.client.PAUSES_S", (0.01,))
    with Client("http://127.0.0.1:9") as client, pytest.raises(PlatformError, match=r"127\.0\.0\.1:9.*asyncflow serve"):
        client.status()


def test_the_clients_have_every_verb_that_is_offered():
    verbs = {name for name in vars(Verbs) if not name.startswith("_")} - {"complete", "tokenizer", "model"}
    for kind in (Client, AsyncClient):
        assert verbs <= {name for name in dir(kind) if not name.startswith("_")}
