"""The completion calls, asked by OpenAI's own client over a real socket."""

import contextlib
import time

import openai
import pytest

from tests.web.replica_fakes import TOKEN, VERSION, Replicas, served

END = 2  # the token that ends an answer


@pytest.fixture(scope="module")
def server():
    verbs = Replicas()
    with served(verbs) as address, openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN, max_retries=0) as made:
        yield verbs, made


@pytest.fixture
def replicas(server):
    """As new."""
    verbs, _ = server
    verbs.begin()
    return verbs


@pytest.fixture
def client(server, replicas):
    return server[1]


def chat(client, **how):
    return client.chat.completions.create(
        **{"model": "policy", "messages": [{"role": "user", "content": "hello"}]} | how
    )


def text(client, **how):
    return client.completions.create(**{"model": "policy", "prompt": "go_on"} | how)


def until(what):
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def refused(kind, call, **how):
    with pytest.raises(kind) as error:
        call(**how)
    return error.value


def test_the_policy_is_listed_by_its_name(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len, model.version) == ("policy", "model", 64, VERSION)
    assert client.models.retrieve("policy").id == "policy"
    assert refused(openai.NotFoundError, client.models.retrieve, model="gpt").code == "model_not_found"
    assert refused(openai.NotFoundError, chat, client=client, model="gpt").code == "model_not_found"


def test_a_conversation_is_answered_as_the_chat_template_writes_it(client, replicas):
    answer = chat(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "an_answer", "stop")
    (asked,) = replicas.requests
    shown = replicas._tokenizer.decode(asked.prompt_ids)
    assert shown == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (
        answer.usage.prompt_tokens == len(asked.prompt_ids) and answer.usage.completion_tokens == len("an_answer") + 1
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and choice.logprobs is None
    assert (answer.version, choice.version, answer.system_fingerprint) == (VERSION, VERSION, f"version-{VERSION + 1}")


def test_what_the_run_sets_is_left_to_it_and_what_is_asked_for_goes_to_the_replicas(client, replicas):
    chat(client)
    left = replicas.requests[-1]
    assert (left.max_tokens, left.temperature, left.top_p, left.top_k, left.seed) == (None,) * 5
    extra = {"top_k": 3, "stop_token_ids": [9, 11]}
    chat(client, n=2, max_completion_tokens=7, temperature=0.5, top_p=0.9, seed=5, extra_body=extra, user="me")
    first, second = replicas.requests[-2:]
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (7, 0.5, 0.9, 3)
    assert first.stop_token_ids == (9, 11) and first.seed == 5 != second.seed and 0 <= second.seed < 2**63
    chat(client, max_tokens=4, seed=-1)
    assert replicas.requests[-1].max_tokens == 4 and 0 <= replicas.requests[-1].seed < 2**63


def test_texts_and_token_ids_one_and_several_are_gone_on_with(client, replicas):
    replicas.say = lambda request: replicas._tokenizer.decode(request.prompt_ids)[::-1]
    ids = replicas.encode
    for prompt, said in (
        ("go_on", ["no_og"]),
        (["a", "bc"], ["a", "cb"]),
        (ids("xy"), ["yx"]),
        ([ids("a"), [7]], None),
    ):
        answer = text(client, prompt=prompt, n=2, max_tokens=20)
        count = len(said or [0, 0])
        assert [c.index for c in answer.choices] == list(range(2 * count)) and answer.object == "text_completion"
        if said:
            assert [c.text for c in answer.choices] == [s for s in said for _ in range(2)]
    assert text(client, prompt=["ab", "c"], n=2).usage.prompt_tokens == 3
    assert text(client, prompt="go_on", echo=True).choices[0].text == "go_onno_og"
    assert text(client, prompt=ids("go"), echo=True).choices[0].text == "goog"


def test_log_probabilities_and_ids_of_every_sampled_token_are_told(client, replicas):
    want = [*replicas.encode("an_answer"), END]
    extra = {"return_token_ids": True}
    answer = chat(client, logprobs=True, extra_body=extra)
    (choice,) = answer.choices
    assert choice.token_ids == want and choice.prompt_token_ids == replicas.requests[-1].prompt_ids.tolist()
    told = choice.logprobs.content
    assert [t.token for t in told] == [*"an_answer", "<|im_end|>"]
    assert [t.logprob for t in told] == [-i / 8 for i in range(10)] and told[0].bytes == list(b"a")
    (choice,) = text(client, logprobs=0, max_tokens=3, extra_body=extra).choices
    assert choice.token_ids == want[:3] and choice.logprobs.tokens == ["a", "n", "_"]
    assert choice.logprobs.token_logprobs == [0, -1 / 8, -2 / 8] and choice.logprobs.text_offset == [0, 1, 2]
    assert choice.finish_reason == "length" and choice.prompt_token_ids == replicas.encode("go_on")


def test_a_stop_string_ends_an_answer_before_it_and_the_replica_is_told(client, replicas):
    replicas.say = "one._two._three"
    answer = chat(client, stop=["two", "thr"], extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("one._", "stop")
    assert choice.token_ids == replicas.encode("one._two") and answer.usage.completion_tokens == 8
    assert text(client, stop="th").choices[0].text == "one._two._"
    assert text(client, stop="never").choices[0].text == "one._two._three"
    replicas.go_on.clear()
    assert text(client, stop="n").choices[0].text == "o"  # it is in the first part: nothing more is waited for
    until(lambda: replicas.running == 0)


@pytest.mark.parametrize("how", [{}, {"logprobs": True, "n": 3}])
def test_a_stream_says_what_the_whole_answer_says(client, replicas, how):
    whole = chat(client, **how)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **how))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(c.object == "chat.completion.chunk" and c.id == chunks[0].id for c in chunks)
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.delta.content for c in mine) == choice.message.content
        assert mine[0].delta.role == "assistant" and {c.delta.role for c in mine[1:]} == {None}
        assert [c.finish_reason for c in mine if c.finish_reason] == [mine[-1].finish_reason] == ["stop"]
        if how:
            assert [t.logprob for c in mine for t in c.logprobs.content] == [t.logprob for t in choice.logprobs.content]


def test_a_streamed_text_comes_as_it_is_sampled_and_never_shows_the_beginning_of_a_stop_string(client, replicas):
    replicas.say, replicas.size = "abcdefxyz", 1
    replicas.go_on.clear()
    stream = text(client, stream=True, stop=["defq", "xyz"], extra_body={"return_token_ids": True})
    first = next(stream).choices[0]
    assert (first.text, first.token_ids, first.finish_reason) == ("a", replicas.encode("a"), None)
    replicas.go_on.set()
    rest = [c.choices[0] for c in stream]
    shown = [first.text, *(c.text for c in rest)]
    assert "".join(shown) == "abcdef" and "d" not in shown  # held back until it is known to go on in another way
    assert [i for c in [first, *rest] for i in c.token_ids] == replicas.encode("abcdefxyz")


def test_an_answer_ends_at_the_replica_when_its_client_goes(client, replicas):
    replicas.go_on.clear()
    stream = text(client, stream=True)
    next(stream)
    assert replicas.running == 1
    stream.close()
    until(lambda: replicas.running == 0)
    with pytest.raises(openai.APITimeoutError):
        text(client, timeout=0.3)
    until(lambda: len(replicas.requests) == 2 and replicas.running == 0)


def test_what_goes_wrong_is_told_as_that_client_expects_it(client, replicas):
    replicas.fails_after = 0
    error = refused(openai.InternalServerError, chat, client=client)
    assert (error.status_code, error.code, error.type) == (503, "engine_error", "server_error")
    assert refused(openai.InternalServerError, text, client=client, stream=True).code == "engine_error"
    replicas.fails_after = 1
    with pytest.raises(openai.APIError, match="could not answer"):
        list(text(client, stream=True))
    assert replicas.running == 0
    stranger = client.with_options(api_key="somebody-elses-token")
    assert refused(openai.AuthenticationError, chat, client=stranger).code == "unauthorized"


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"extra_body": {"best_off": 2}}, "best_off"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "Ä"}]}, "cannot encode"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ],
)
def test_what_is_not_done_is_refused_by_its_name_and_asked_of_nobody(client, replicas, wrong, said):
    error = refused(openai.BadRequestError, chat, client=client, **wrong)
    assert said in str(error) and error.type == "invalid_request_error" and not replicas.requests


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"logprobs": 2}, "logprobs"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 2}, "256"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_so_are_those_of_texts(client, replicas, wrong, said):
    error = refused(openai.BadRequestError, text, client=client, **wrong)
    assert said in str(error) and not replicas.requests


def test_fields_that_ask_for_nothing_are_taken(client):
    chat(client, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, tools=[], response_format={"type": "text"})
    chat(client, user="me", metadata={"a": "b"}, top_logprobs=0, logprobs=False, stop=None, tool_choice="none")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    tool = {"role": "tool", "tool_call_id": "c", "content": "a"}
    with contextlib.suppress(openai.BadRequestError):  # the template of the tests knows no such role
        chat(client, messages=[{"role": "user", "content": parts}, tool])
    assert text(client, best_of=1, suffix="").choices[0].text == "an_answer"
