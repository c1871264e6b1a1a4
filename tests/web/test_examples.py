"""What docs/http.md shows works as it stands there."""

import re
from pathlib import Path

from mindspeed_asyncflow.config import load_config
from mindspeed_asyncflow.data.builtin_models import alphabet
from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.data.tokenizers import set_chat_template
from mindspeed_asyncflow.web import app, limits
from mindspeed_asyncflow.web.app import make_app
from mindspeed_asyncflow.web.security import OWNER, Tenants
from mindspeed_asyncflow.web.server import HEADER_BYTES, Listening, offered
from tests.web.fakes import FakeVerbs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
TOKEN = "the-token-of-the-owner"


def test_the_python_of_the_page_drives_a_run(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "service.token").write_text(TOKEN)
    fake = FakeVerbs()
    with offered(fake, Tenants({OWNER: TOKEN}), Listening(port=0)) as url:
        assert "http://127.0.0.1:8000" in code
        exec(code.replace("http://127.0.0.1:8000", url), {})
    assert [call for _, call in fake.calls] == [
        "init_engines", "put_prompts_data", "get_experience_data", "put_experience_data", "stop",
    ]  # fmt: skip
    assert "0 0.5" in capsys.readouterr().out


def test_the_paths_of_the_page_are_those_of_the_schema(monkeypatch):
    found = []
    monkeypatch.setattr(app, "page", lambda schema: found.append(schema) or "")
    make_app(FakeVerbs(), Tenants(None))
    paths = {path for path in found[0]["paths"] if path.startswith("/api/")}
    assert paths == {f"/api/{name}" for name in re.findall(r"/api/(\w+)", PAGE)}


def test_the_question_of_the_page_about_completions_fits_into_the_prompts_of_its_server():
    page = (ROOT / "docs" / "completions.md").read_text(encoding="utf-8")
    (question,) = re.findall(r'"content": "([^"]+)"', page)
    config_file, *settings = re.findall(r"asyncflow serve (\S+)|--set (\S+)", page.split("```python")[0])
    config = load_config(ROOT / config_file[0], [setting for _, setting in settings])
    tokenizer = make_char_tokenizer(alphabet(config.model.source.removeprefix("builtin:")))
    set_chat_template(tokenizer, str(ROOT / config.data.chat_template))
    words = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    assert config.data.chat and len(tokenizer(words)["input_ids"]) <= config.data.max_prompt_tokens


def test_the_limits_of_the_page_are_those_of_the_server():
    told = limits.Limits()
    for words in (
        f"{told.json_bytes >> 20} MiB, as",
        f"at the same time | {told.at_once} |",
        f"{told.headers}, {HEADER_BYTES >> 10} KiB together",
        f"body | {told.pause_s:.0f} s",
        f"slower than {told.body_rate / 1024:.0f} KiB/s | {told.body_s:.0f} s",
    ):
        assert words in PAGE, words
