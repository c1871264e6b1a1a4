"""Every known issue of rollout on vllm-ascend has a guard, and every guard a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
GUARDS, FAKES = "engines/vllm/test_guards.py", "ascend/rollout/test_fake_workers.py"
ARGUMENTS, SETTINGS, SENDER = (
    "engines/vllm/test_arguments.py",
    "config/test_ascend_rollout.py",
    "ascend/rollout/test_sender.py",
)
UPDATES, FAULTS = "engines/test_rollout_updates.py", "engines/test_update_faults.py"
OWN = (GUARDS, FAKES, ARGUMENTS, SENDER, SETTINGS)  # the others hold promises of every engine

# What goes wrong -> the tests of what stands against it.
ISSUES: dict[tuple[int, str], list[tuple[str, str]]] = {
    (1, "weights in FRACTAL_NZ layout lose precision or refuse an update"): [
        (GUARDS, "test_the_nz_layout_is_on_by_default"),
        (GUARDS, "test_kernel_layouts_that_updates_cannot_write_are_refused"),
        (ARGUMENTS, "test_the_nz_layout_is_off_in_the_options_as_well"),
        (SETTINGS, "test_options_that_give_wrong_weights_or_log_probabilities_are_refused"),
    ],
    (2, "waking turns expert weights a second time"): [
        (FAKES, "test_waking_leaves_expert_weights_as_they_were"),
        (FAKES, "test_without_putting_them_back_the_same_reload_breaks"),
    ],
    (3, "expert parameters without a loader, or in the kernels' layout, at a reload"): [
        (FAKES, "test_a_reload_after_a_sleep_without_weights_is_right"),
        (FAKES, "test_native_updates_reach_the_kernels_in_their_layout"),
        (FAULTS, "test_experts_that_the_engine_transposes_are_converted_once_per_update"),
    ],
    (4, "tables of expert parallelism lie in memory that sleep gave away"): [
        (GUARDS, "test_experts_spread_over_devices_do_not_sleep"),
        (SETTINGS, "test_options_that_give_wrong_weights_or_log_probabilities_are_refused"),
    ],
    (5, "a graph replays addresses of before an update"): [
        (GUARDS, "test_an_update_that_moves_what_a_graph_reads_is_an_error"),
        (FAKES, "test_weights_that_an_update_moves_are_named"),
    ],
    (6, "a graph fails after a native update"): [(GUARDS, "test_graphs_go_with_relay_updates_only")],
    (7, "expandable segments and the sleeping pool"): [
        (GUARDS, "test_expandable_segments_are_refused_with_sleep"),
        (GUARDS, "test_a_sleep_that_frees_nothing_is_an_error"),
    ],
    (8, "jobs of one node listen on HCCL's default ports"): [
        (GUARDS, "test_a_replica_without_ports_of_its_own_is_refused")
    ],
    (9, "ids beyond the tokenizer with log-probability -inf"): [
        ("engines/test_tickets.py", "test_tokens_that_no_policy_gives_are_refused"),
        ("engines/test_sampled_tokens.py", "test_an_answer_with_an_impossible_token_reaches_nobody"),
        (ARGUMENTS, "test_a_step_is_complete_when_it_returns"),
        ("engines/test_rollout_contract.py", "test_sampled_ids_stay_inside_the_vocabulary_with_finite_logprobs"),
    ],
    (10, "log-probabilities over a part of the vocabulary"): [
        (ARGUMENTS, "test_log_probabilities_come_from_the_whole_vocabulary"),
        (SETTINGS, "test_options_that_give_wrong_weights_or_log_probabilities_are_refused"),
    ],
    (11, "trainer and rollout disagree although all bytes arrived"): [
        ("workflow/test_weight_sync.py", "test_weights_that_are_not_the_published_ones_stop_the_run"),
        ("workflow/test_weight_sync.py", "test_a_nan_in_the_engine_is_not_taken_for_a_small_gap"),
    ],
    (12, "an update path pauses and never resumes"): [
        (UPDATES, "test_a_failure_while_loading_leaves_dirty_until_a_complete_update"),
        (UPDATES, "test_running_answers_continue_with_new_weights_and_know_the_cut"),
    ],
    (13, "the first token after a pause is lost"): [
        (ARGUMENTS, "test_a_step_is_complete_when_it_returns"),
        (UPDATES, "test_running_answers_continue_with_new_weights_and_know_the_cut"),
    ],
    (14, "an update while asleep"): [
        (UPDATES, "test_refused_moves_raise_and_change_nothing"),
        ("engines/test_device_memory.py", "test_weights_without_memory_are_never_loaded_into"),
    ],
    (15, "a pause returns before the device is idle"): [
        (FAKES, "test_an_update_begins_when_the_device_has_done_its_work"),
        (ARGUMENTS, "test_a_replica_is_one_engine_and_captures_no_routes"),
    ],
    (16, "a physical device number taken as a logical one"): [
        (GUARDS, "test_a_replica_with_fewer_visible_devices_than_workers_is_refused"),
        (GUARDS, "test_a_list_of_devices_out_of_order_is_refused"),
    ],
    (17, "a resumed answer taken for a prompt"): [
        (GUARDS, "test_the_second_model_runner_is_refused"),
        (
            "engines/vllm/test_environment.py",
            "test_an_npu_replica_gets_the_first_model_runner_and_its_own_hccl_buffers",
        ),
    ],
    (18, "routed experts of preempted answers are missing"): [
        (ARGUMENTS, "test_a_replica_is_one_engine_and_captures_no_routes")
    ],
    (19, "a weight larger than the bucket"): [
        (GUARDS, "test_a_weight_that_is_larger_than_a_bucket_is_named_with_its_size"),
        (SENDER, "test_a_weight_larger_than_an_npu_ipc_bucket_is_refused_before_anything_is_sent"),
        ("ascend/rollout/test_native_run.py", "test_a_broadcast_version_is_served_and_running_answers_know_the_cut"),
    ],
}


def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: str(issue[0]))
def test_the_guard_of_a_known_issue_has_tests_that_assert(issue: tuple[int, str]) -> None:
    for file, name in ISSUES[issue]:
        test = functions_of(file).get(name)
        assert test is not None, f"{file} has no {name}"
        raises = any(isinstance(n, ast.Attribute) and n.attr == "raises" for n in ast.walk(test))
        calls = [n.func for n in ast.walk(test) if isinstance(n, ast.Call)]
        helper = any(getattr(f, "attr", getattr(f, "id", "")).startswith("assert_") for f in calls)
        assert raises or helper or any(isinstance(n, ast.Assert) for n in ast.walk(test)), f"{name} asserts nothing"


def test_all_nineteen_are_here_and_their_guards_name_them() -> None:
    assert [number for number, _ in ISSUES] == list(range(1, 20))
    for (number, _), tests in ISSUES.items():
        said = " ".join(ast.get_docstring(functions_of(f)[name]) or "" for f, name in tests if f in OWN)
        assert not said or re.search(rf"[Kk]nown issues? [^.:;]*\b{number}\b", said), (number, said)
