"""Names of a user's engines, and what is said of a class that is none."""

import itertools

import pytest

from mindspeed_asyncflow.cli.preflight import inspect
from mindspeed_asyncflow.config.load import parse_config
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.engines import registry
from mindspeed_asyncflow.engines.base import RolloutEngine, TrainEngine
from mindspeed_asyncflow.engines.registry import ROLLOUT, TRAINER
from mindspeed_asyncflow.errors import ConfigError

BOX = Machine(2, 0, 24 << 30, 24 << 30, 12 << 30, 50 << 30)
NUMBERS = itertools.count()
TRAIN_METHODS = """
    def __init__(self, setup, **options): self.layout = None
    def forward_backward(self, micro_batches): ...
    def optim_step(self, denominator): ...
    def logprobs(self, micro_batches, temperature=None): ...
    def shards(self): ...
    def begin_save(self, folder): ...
    def finish_save(self): ...
    def load_checkpoint(self, folder): ...
    def close(self): ...
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user, importable for the time of the test; its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_engines_{next(NUMBERS)}"  # a module is imported once in a process

    def write(text):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return name

    return write


def said(side, *settings):
    """What the check of the class says; empty: it is an engine."""
    try:
        registry.check(side, parse_config("", settings))
    except ConfigError as error:
        return str(error)
    return ""


def trainer(module, text, *settings):
    name = module(text)
    return said(TRAINER, f"trainer.engine={name}:Mine", *settings)


def test_a_class_with_all_methods_is_an_engine(module):
    assert trainer(module, f"class Mine:{TRAIN_METHODS}") == ""


@pytest.mark.parametrize("side", [TRAINER, ROLLOUT], ids=["trainer", "rollout"])
def test_every_method_that_is_missing_is_named_with_its_parameters(module, side):
    name = module("class Mine:\n    def __init__(self, setup): ...\n")
    lines = said(side, f"{side.name}.engine={name}:Mine").splitlines()
    members = registry._members(TrainEngine if side is TRAINER else RolloutEngine)
    assert [line.split()[1].partition("(")[0] for line in lines if line.startswith("  no ")] == list(members)
    assert "  no optim_step(denominator)" in lines or "  no generate(requests, timeout_s, stream=None)" in lines


def test_the_error_shows_an_engine_in_two_lines(module):
    text = trainer(module, "class Mine: ...")
    assert text.splitlines()[-2:] == TRAINER.example.splitlines() and "engine: my_engines:Train" in text


def test_methods_of_the_protocol_itself_do_nothing_and_count_as_missing(module):
    text = trainer(
        module,
        "from mindspeed_asyncflow.engines.base import TrainEngine\n"
        "class Mine(TrainEngine):\n    def __init__(self, setup): ...\n    def close(self): ...\n",
    )
    assert "no optim_step(denominator)" in text and "no layout" in text and "no close" not in text


@pytest.mark.parametrize(
    ("line", "instead", "named"),
    [
        ("optim_step(self, denominator)", "optim_step(self)", "optim_step() does not fit optim_step(denominator)"),
        ("optim_step(self, denominator)", "optim_step(self, denominator, rate)", "missing a required argument: 'rate'"),
        (
            "micro_batches, temperature=None)",
            "micro_batches)",
            "logprobs(micro_batches) does not fit logprobs(micro_batches, temperature=None)",
        ),
        ("load_checkpoint(self, folder)", "load_checkpoint(self, path)", "does not fit load_checkpoint(folder)"),
        ("self.layout = None", "pass", "no layout (a property, or set in __init__)"),
        ("def finish_save", "async def finish_save", "must not be async"),
        ("def close(self): ...", "close = 3", "no close"),
        ("self, setup, **options", "self", "cannot be made with (setup)"),
    ],
)
def test_parameters_that_a_run_could_not_call_are_named(module, line, instead, named):
    assert line in TRAIN_METHODS
    text = trainer(module, f"class Mine:{TRAIN_METHODS.replace(line, instead)}")
    assert named in text and text.count("\n") == 4  # nothing else is wrong


def test_more_parameters_with_defaults_fit_and_so_do_static_methods(module):
    more = TRAIN_METHODS.replace("denominator)", "denominator, rate=None)")
    more = more.replace("def close(self)", "@staticmethod\n    def close()")
    assert trainer(module, f"class Mine:{more}") == ""


def test_options_reach_the_constructor_or_are_refused_by_name(module):
    text = f"class Mine:{TRAIN_METHODS.replace('**options', 'rank_of_lora=8')}"
    assert trainer(module, text, "trainer.engine_options={rank_of_lora: 4}") == ""
    assert "(setup, depth=...)" in trainer(module, text, "trainer.engine_options={depth: 4}")


def test_an_engine_refuses_settings_by_itself(module):
    own = (
        "    @staticmethod\n    def check(config):\n"
        "        from mindspeed_asyncflow.errors import ConfigError\n"
        "        raise ConfigError(f'trainer.tensor_parallel: {config.trainer.tensor_parallel}, not for me')\n"
    )
    text = trainer(module, f"class Mine:{TRAIN_METHODS}{own}", "trainer.tensor_parallel=2")
    assert text == "trainer.tensor_parallel: 2, not for me"


def test_a_device_that_is_lent_needs_train_state_of_the_trainer(module):
    text = trainer(module, f"class Mine:{TRAIN_METHODS}", "workflow.lend=true")
    assert "no train_state()" in text


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("no_such_module_here:Mine", "No module named 'no_such_module_here'"),
        ("json:Mine", "module 'json' has no attribute 'Mine'"),
        ("json:dumps", "is no class but <function dumps"),
        ("sglang", "sglang is unknown; there are vllm, reference, simulated"),
        ("referense", "did you mean reference?"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_there_is(name, named):
    text = said(ROLLOUT, f"rollout.engine={name}")
    assert text.startswith("rollout.engine: ") and named in text and ROLLOUT.example in text


def test_an_error_inside_the_users_module_is_shown(module):
    name = module("raise ValueError('half a file')")
    assert "ValueError: half a file" in said(ROLLOUT, f"rollout.engine={name}:Mine")


def test_an_installed_package_registers_engines_by_entry_points(module, tmp_path):
    name = module(f"class Mine:{TRAIN_METHODS}")
    info = tmp_path / "own_engines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-engines\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{TRAINER.group}]\nours = {name}:Mine\n", encoding="utf-8")
    assert registry.find_class(TRAINER, "ours").__name__ == "Mine"
    assert "there are megatron, ours," in said(TRAINER, "trainer.engine=our")
    with pytest.raises(ConfigError, match="unknown"):
        registry.find_class(ROLLOUT, "ours")  # the groups are two


def test_the_check_of_a_run_finds_an_engine_that_is_none():
    found = inspect(parse_config("", ["rollout.engine=reference", "trainer.engine=json:JSONDecoder"]), BOX)
    (finding,) = [f for f in found if f.level == "error"]
    assert finding.keys == ("trainer.engine",) and "no shards()" in str(finding)


def test_an_engine_in_another_python_is_looked_at_when_it_starts():
    settings = ["rollout.engine=elsewhere:Mine", "placement.rollout_python=/usr/bin/python3"]
    found = [f for f in inspect(parse_config("", settings), BOX) if f.keys[0] == "rollout.engine"]
    assert [f.level for f in found] == ["warning"]


def test_an_engine_that_cannot_sleep_is_refused_where_it_would_have_to(module):
    from mindspeed_asyncflow.config.schema import RolloutConfig
    from mindspeed_asyncflow.engines.setup import RolloutSetup
    from mindspeed_asyncflow.platforms.base import current

    methods = [n for n in registry._members(RolloutEngine) if n not in ("capabilities", "version")]
    name = module(
        "from mindspeed_asyncflow.engines.base import EngineCaps\n"
        "class Mine:\n    version = 0\n    def __init__(self, setup): ...\n"
        "    def capabilities(self): return EngineCaps('mine', (), (), ('relay',), False)\n"
        + "".join(f"    def {method}(self): ...\n" for method in methods)
    )
    rollout = RolloutConfig(engine=f"{name}:Mine")
    common = ("folder", rollout, "float32", 16, 0, (), current("cpu"))
    assert registry.build_rollout(RolloutSetup(*common)).version == 0
    with pytest.raises(ConfigError, match=r"sleep at level 2, and \w+:Mine has no level"):
        registry.build_rollout(RolloutSetup(*common, sleeps=True))
