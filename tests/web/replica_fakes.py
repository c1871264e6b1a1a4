"""A service interface whose replicas answer what the test says, served over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import numpy as np
import uvicorn

from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.verbs import CompletionPart, ServedModel
from mindspeed_asyncflow.web.app import make_app
from mindspeed_asyncflow.web.security import Tenants
from tests.web.fakes import OWNER, FakeVerbs

LETTERS = ["\n", "_", ".", *"abcdefghijklmnopqrstuvwxyz"]
TOKEN = "a-token-of-the-tests"
VERSION, LIMIT_S = 4, 30.0


class Replicas(FakeVerbs):
    """Every answer is `say` (a text, or a function of the request), then the token that ends it, in parts of `size`
    tokens; the log-probability of token i is -i/8. The first part is by VERSION, later ones by VERSION + 1."""

    def __init__(self):
        super().__init__(make_char_tokenizer(LETTERS))
        self.owner, self.running = OWNER, 0
        self.go_on = threading.Event()  # parts after the first one wait for it
        self.begin()

    def begin(self):
        """As new."""
        self.say, self.size = "an_answer", 2
        self.requests, self.fails_after = [], None  # parts
        self.go_on.set()

    def encode(self, text):
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    async def model(self, tenant):
        return ServedModel("policy", self._tokenizer, 64, (self._tokenizer.eos_token_id,), VERSION)

    async def complete(self, tenant, requests, timeout_s):
        (request,) = requests
        self.requests.append(request)
        self.running += 1
        try:
            said = self.say(request) if callable(self.say) else self.say
            ids = [*self.encode(said), self._tokenizer.eos_token_id]
            most = 64 - len(request.prompt_ids) if request.max_tokens is None else request.max_tokens
            reason = "stop" if len(ids) <= most else "length"
            ids = ids[:most]
            for number, at in enumerate(range(0, len(ids), self.size)):
                while number and not self.go_on.is_set():
                    await asyncio.sleep(0.005)
                if number == self.fails_after:
                    raise ServiceError(503, "engine_error", "a replica could not answer")
                part = np.array(ids[at : at + self.size], np.int32)
                logprobs = -np.arange(at, at + len(part)).astype(np.float32) / 8
                last = reason if at + self.size >= len(ids) else None
                yield CompletionPart(0, part, logprobs, VERSION + (number > 0), last)
                await asyncio.sleep(0)
        finally:
            self.running -= 1


@contextlib.contextmanager
def served(verbs):
    """The address of a server over these verbs."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        app = make_app(verbs, Tenants({OWNER: TOKEN}))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
