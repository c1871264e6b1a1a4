import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mindspeed_asyncflow.config.intake import DataConfig, RewardConfig, ScorerConfig
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.http import Http
from mindspeed_asyncflow.rewards.pool import ScorerPool


@contextlib.contextmanager
def server(behave):
    """`behave(number, items)` gives (status, body) or what to do with the handler."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
            seen.append((items, dict(self.headers)))
            reply = behave(len(seen), items)
            if callable(reply):
                reply(self)
                return
            status, body = reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/score", seen
        serving.shutdown()


def scores(values):
    return 200, json.dumps({"scores": values}).encode()


def lengths(number, items):
    return scores([len(i["answer"]) for i in items])


def answers(*texts):
    return [Answer(t, "truth", True, "prompt", {"id": i}) for i, t in enumerate(texts)]


def test_answers_go_in_batches_and_scores_come_back_in_order(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with server(lengths) as (url, seen):
        found = Http(url, batch=2, token_file=str(token)).score_batch(answers("a", "bbb", "cc"))
    assert found == [1, 3, 2] and [len(items) for items, _ in seen] == [2, 1]
    assert seen[0][0][1] == {"prompt": "prompt", "answer": "bbb", "truth": "truth", "fields": {"id": 1}}
    assert seen[0][1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(status):
    with server(lambda n, items: (status, b"busy") if n < 3 else lengths(n, items)) as (url, seen):
        assert Http(url).score_batch(answers("aa")) == [2]
        assert len(seen) == 3


def test_a_server_that_is_gone_is_replaced_by_the_next():
    with server(lengths) as (url, _):
        assert Http(["http://127.0.0.1:9/score", url]).score_batch(answers("aa")) == [2]


def test_a_null_is_an_abstention():
    with server(lambda n, items: scores([None, 0.5])) as (url, _):
        assert Http(url).score_batch(answers("a", "b")) == [None, 0.5]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((400, b"wrong"), "status 400: wrong"),
        ((200, b"not json"), "no {'scores'"),
        (scores([1.0]), "2 answers were sent"),
        (scores([1.0, "good"]), "neither a number"),
        (scores([1.0, True]), "neither a number"),
    ],
)
def test_a_wrong_reply_is_an_error_of_every_answer_and_is_not_tried_again(reply, said):
    with server(lambda n, items: reply) as (url, seen):
        found = Http(url).score_batch(answers("a", "b"))
        assert len(seen) == 1
    assert len(found) == 2 and all(isinstance(f, Exception) and said in str(f) for f in found)


def stall(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    for _ in range(40):
        with contextlib.suppress(OSError):
            handler.wfile.write(b" ")
            handler.wfile.flush()
        time.sleep(0.05)


def drip(handler):
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(40):
            handler.wfile.write(b"a")
            handler.wfile.flush()
            time.sleep(0.05)


def lie(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [1]}')
    handler.close_connection = True


@pytest.mark.parametrize(
    "reply", [stall, drip, lie, lambda handler: time.sleep(2)], ids=["stalls", "drips", "ends early", "silent"]
)
def test_a_server_that_stalls_or_lies_about_its_length_costs_the_deadline_and_no_more(reply):
    with server(lambda n, items: reply) as (url, _):
        began = time.monotonic()
        found = Http(url, deadline_s=0.4).score_batch(answers("a"))
        assert time.monotonic() - began < 1.0
    assert isinstance(found[0], TimeoutError) and "0.4 s" in str(found[0])


@pytest.mark.parametrize(
    "options",
    [{"urls": "ftp://x"}, {"urls": []}, {"urls": "http://x/", "deadline_s": 5.0}, {"urls": "http://x/", "batch": 65}],
)
def test_what_cannot_work_is_refused(options):
    with pytest.raises(ValueError, match="url"):
        Http(**options)


@pytest.mark.slow
def test_a_server_is_asked_once_for_each_answer_also_by_several_slow_processes():
    def slow(number, items):
        time.sleep(0.3)
        return lengths(number, items)

    with server(slow) as (url, seen):
        scorer = ScorerConfig(name="http", options={"urls": url})
        pool = ScorerPool(DataConfig(), RewardConfig(workers=2, scorers=[scorer]))
        try:
            before = [process.process.pid for process in pool._processes]
            assert [s.value for s in pool.score(answers(*["aa"] * 96))] == [2.0] * 96
            assert [process.process.pid for process in pool._processes] == before
        finally:
            pool.close()
    assert sum(len(items) for items, _ in seen) == 96
