"""Every mistake in a settings file is answered, all together, with the nearest right key."""

import pytest

from mindspeed_asyncflow.config import Config, dump_resolved, keys, load_config, parse_config
from mindspeed_asyncflow.config.keys import all_paths
from mindspeed_asyncflow.config.load import changed_paths, with_absolute_paths
from mindspeed_asyncflow.errors import ConfigError


def mistakes(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("learning_rate: 1e-4", "trainer.lr"),
        ("trainer: {learning_rate: 1e-4}", "trainer.lr"),
        ("algorithm: {kl_coeff: 0.1}", "algorithm.kl_coef"),
        ("batch_size: 8", "workflow.groups_per_step"),
        ("rollout: {n: 8}", "algorithm.group_size"),
        ("rollout_n: 8", "algorithm.group_size"),
        ("trainer: {group_size: 8}", "algorithm.group_size"),
        ("workflow: {maxlag: 1}", "workflow.max_lag"),
        ("trainer: {tensor_parallel_size: 2}", "trainer.tensor_parallel"),
        ("rollout: {tensor_parallel_size: 2}", "rollout.tensor_parallel"),
        ("rolout: {replicas: 2}", "rollout"),
        ("Trainer: {lr: 1}", "trainer"),
        ("lr: 1", "trainer.lr"),
        ("trainer: {learningrate: 1e-4}", "trainer.lr"),
        ("rollout: {temp: 1}", "rollout.temperature"),
        ("trainer: {warmup: 3}", "trainer.lr_warmup_steps"),
        ("workflow: {lag: 3}", "workflow.max_lag"),
    ],
)
def test_unknown_or_misplaced_key_names_the_nearest_right_one(text, meant):
    """B95"""
    assert mistakes(text).rstrip().endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    "text", ["foo: 1", "dock: {foo: 1}", "data: {bar: 1}", "trainer: {gpus: 2}", "reward: {fn: x}"]
)
def test_a_key_that_is_like_no_other_is_not_guessed_at(text):
    message = mistakes(text)
    assert "is not a setting; " in message and "did you mean" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "run: name:x",
            "line 1: run = 'name:x': must hold keys, such as {name: ...}; is a space missing after the colon?",
        ),
        ("trainer:\n  lr:1e-4", "trainer = 'lr:1e-4': must hold keys, such as {"),
        (
            "trainer:\n  lr:1e-4\n  steps: 3",
            "line 3: not valid YAML: mapping values are not allowed here; a key needs a space",
        ),
        ("trainer: {mindspeed: 'a:1'}", "is a space missing"),
        ("data: {mix: ['a:b']}", "data.mix[0] = 'a:b': must hold keys, such as {key: ...}; is a space missing"),
    ],
)
def test_a_missing_space_after_a_colon_is_named(text, said):
    assert said in mistakes(text)


def test_a_section_that_is_a_number_is_not_told_about_colons():
    assert mistakes("trainer: 3").endswith("trainer = 3: must hold keys, such as {engine: ...}")


@pytest.mark.parametrize("path", all_paths())
def test_every_key_is_refused_when_mistyped_and_when_at_the_wrong_level(path):
    """B95: no key is dropped in silence."""
    *sections, leaf = path.split(".")
    mistyped = f"{leaf}x: 1"
    for section in reversed(sections):
        mistyped = f"{section}: {{{mistyped}}}"
    assert f"did you mean {path}?" in mistakes(mistyped)
    wrong = "= 1: must hold keys, such as {" if leaf in keys.sections() else "is not a setting"
    assert f"line 1: {leaf} {wrong}" in mistakes(f"{leaf}: 1")
    assert f"{path}x is not a setting" in mistakes("", f"{path}x=1")


def test_all_mistakes_are_reported_together_with_line_and_value():
    message = mistakes("trainer:\n  lr: fast\n  stepps: 3\nrollout:\n  replicas: 0\n", "workflow.max_lag=-1")
    assert "4 mistakes" in message
    assert "line 2: trainer.lr = 'fast': must be a valid number" in message
    assert "line 3: trainer.stepps is not a setting; did you mean trainer.steps?" in message
    assert "line 5: rollout.replicas = 0" in message
    assert "--set workflow.max_lag=-1: workflow.max_lag = -1" in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("algorithm.group_size", "true"),
        ("algorithm.group_size", "1.5"),
        ("algorithm.group_size", "'8'"),
        ("trainer.recompute", "1"),
        ("trainer.recompute", "'False'"),
        ("trainer.lr", "'1e-6'"),
        ("workflow.groups_per_step", "-8"),
        ("trainer.betas", "[0.9]"),
        ("trainer.lr", ".nan"),
        ("trainer.lr", ".inf"),
        ("trainer.lr", "null"),
        ("rollout.engine", "my engine"),
        ("data.task", "2026"),
        ("trainer", "3"),
        ("run.name", "../x"),
    ],
)
def test_wrong_type_or_value_names_the_key(setting, value):
    """B95"""
    assert setting in mistakes("", f"{setting}={value}").partition(": ")[2]


def test_exponent_without_a_dot_is_a_number():
    config = parse_config("trainer: {lr: 1e-6, grad_clip: 2E3}", ["algorithm.advantage_eps=5e-7"])
    assert (config.trainer.lr, config.trainer.grad_clip, config.algorithm.advantage_eps) == (1e-6, 2e3, 5e-7)


def test_off_is_a_word_where_it_is_a_choice_and_false_elsewhere():
    config = parse_config("{correction: {weight: off}, trainer: {mindspeed: {moe_overlap: off}, recompute: off}}")
    assert (config.correction.weight, config.trainer.mindspeed.moe_overlap) == ("off", "off")
    assert config.trainer.recompute is False
    assert parse_config("", ["correction.reject=off"]).correction.reject == "off"
    assert "correction.weight = True" in mistakes("correction: {weight: on}")


def test_duplicate_keys_are_refused_with_both_lines():
    message = mistakes("trainer:\n  lr: 1e-4\n  steps: 2\n  lr: 1e-5\n")
    assert "line 4: trainer.lr is given twice, first on line 2" in message


def test_overrides_win_over_the_file_and_the_last_one_wins():
    config = parse_config(
        "trainer: {steps: 3}",
        ["trainer.steps=4", "trainer.steps=5", "data.options.digits=1", "trainer.betas=[0.8, 0.9]"],
    )
    assert config.trainer.steps == 5
    assert config.data.options == {"digits": 1}
    assert config.trainer.betas == (0.8, 0.9)


@pytest.mark.parametrize("override", ["trainer.lr", "=3", ".lr=3", "trainer.=3", "trainer.lr.x=3"])
def test_malformed_override_is_refused(override):
    assert override in mistakes("trainer: {lr: 1e-4}", override)


@pytest.mark.parametrize("text", ["- a\n", "trainer: [", "trainer: !!python/object:os.system {}", "a: &x [*x]", "7"])
def test_text_that_is_no_settings_mapping_is_refused(text):
    mistakes(text)


def test_the_settings_that_differ_from_the_defaults_make_the_same_configuration():
    text = "{data: {options: {digits: 3}, mix: [{task: sorting}]}, trainer: {mindspeed: {moe_overlap: allgather}}}"
    config = parse_config(text, ["trainer.lr=3e-7"])
    changed = changed_paths(config)
    assert changed == ["data.options", "data.mix", "trainer.lr", "trainer.mindspeed.moe_overlap"]
    assert parse_config(dump_resolved(config, changed)) == config
    assert changed_paths(parse_config("", [f"trainer.steps={Config().trainer.steps}"])) == []


def test_missing_file_names_the_file(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(tmp_path / "nothing.yaml")


def test_empty_sections_and_empty_files_mean_the_defaults():
    assert parse_config("") == parse_config("trainer:\n") == Config()


def test_resolved_dump_reads_back_equal_and_describes_every_key():
    config = parse_config(
        "data: {task: 'file:a: b.jsonl', options: {ops: ['+', '-'], end: \"a\\nb\"}}", ["trainer.lr=1e-6"]
    )
    text = dump_resolved(config)
    assert parse_config(text) == config
    settings = [line for line in text.splitlines() if not line.endswith(":")]
    assert all(line.startswith("  ") and "  # " in line for line in settings)
    assert len(settings) == len(all_paths())


def test_the_settings_of_a_run_find_its_model_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generated = with_absolute_paths(parse_config(""))
    assert generated.model.cache == str(tmp_path / ".cache" / "models")
    assert generated.model.source == "builtin:tiny_qwen2"
    given = with_absolute_paths(parse_config("", ["model.source=models/qwen", "model.cache=/somewhere"]))
    assert (given.model.source, given.model.cache) == (str(tmp_path / "models" / "qwen"), "/somewhere")
    assert parse_config(dump_resolved(given)) == given


def test_the_settings_of_a_run_find_its_data_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mixed = "data: {mix: [{task: 'file:a/*.csv', weight: 2}, {task: sort4}], validation: [{task: 'file:/b'}]}"
    data = with_absolute_paths(parse_config(mixed, ["data.chat_template=chat.jinja"])).data
    assert [source.task for source in data.mix] == [f"file:{tmp_path}/a/*.csv", "sort4"] and data.mix[0].weight == 2
    assert data.validation[0].task == "file:/b" and data.chat_template == str(tmp_path / "chat.jinja")
    assert with_absolute_paths(parse_config("data: {task: 'file:x.json'}")).data.task == f"file:{tmp_path}/x.json"
