import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.rules_data import evaluation_prompts, rules, training_prompts

MIX = "{task: sort4, size: 100}, {task: sort5, size: 60, weight: 2}"


def found(text="", *overrides):
    return [(level, keys[0], message) for level, keys, message in rules(parse_config(text, overrides))]


def test_the_defaults_say_nothing():
    assert found() == []


@pytest.mark.parametrize(
    ("text", "overrides", "level", "key", "said"),
    [
        (f"data: {{task: sort5, mix: [{MIX}]}}", [], "error", "data.mix", "so data.task would be ignored"),
        (f"data: {{options: {{a: 1}}, mix: [{MIX}]}}", [], "error", "data.mix", "so data.options would be ignored"),
        ("", ["data.system_prompt=be short"], "error", "data.system_prompt", "set data.chat to true"),
        ("", ["data.chat_template=no.jinja"], "error", "data.chat_template", "there is no file no.jinja"),
        ("", ["data.chat=true", "data.too_long=cut_right"], "warning", "data.too_long", "end of the chat template"),
        ("", ["data.task=file:none/*.csv"], "error", "data.task", "no file fits it"),
        ("data: {mix: [{task: 'file:none.csv'}]}", [], "error", "data.mix", "none.csv: no such file"),
        ("data: {validation: [{task: 'file:none.csv'}]}", [], "error", "data.validation", "none.csv: no such file"),
        (f"data: {{heldout: 150, mix: [{MIX}]}}", [], "error", "data.size", "10 training prompts < 32 groups"),
        (f"data: {{mix: [{MIX}]}}", ["data.heldout=160"], "error", "data.heldout", "160 held-out prompts of 160"),
        ("data: {validation: [{task: sort5, size: 9}]}", [], "warning", "evaluation.prompts", "only 9 prompts are in"),
    ],
)
def test_settings_that_do_not_fit_together_are_named(text, overrides, level, key, said):
    """B86"""
    assert [(entry[0], entry[1]) for entry in found(text, *overrides)][:1] == [(level, key)]
    assert said in found(text, *overrides)[0][2]


def test_prompts_are_counted_where_settings_tell_them():
    def data(text):
        return parse_config(f"data: {{{text}}}").data

    assert training_prompts(data("size: 500")) == 100
    assert training_prompts(data(f"heldout: 50, mix: [{MIX}]")) == 110
    assert training_prompts(data(f"mix: [{MIX}], validation: [{{task: sort4, size: 5}}]")) == 160
    assert training_prompts(data("mix: [{task: 'file:a.csv'}]")) is None
    assert evaluation_prompts(data("validation: [{task: 'file:a.csv'}]")) is None
    assert evaluation_prompts(data("heldout: 7")) == 7
