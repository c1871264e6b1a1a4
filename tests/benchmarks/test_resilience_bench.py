"""The benchmark of faults: its last line follows from what was measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import resilience as bench

PROMISED = {
    *("kills", "lost", "trained_twice", "law_violations", "leftover_processes", "resume_bit_exact", "resume_cuts"),
    *("in_flight_tokens_kept", "recovery_s_median", "checkpoint_pause_over_copy", "ledger_cost_share", "not_finished"),
}


def test_every_promised_figure_is_in_the_last_line_and_shares_are_over_all_tries():
    zero = dict.fromkeys(("lost", "trained_twice", "law_violations", "leftover_processes", "not_finished"), 0)
    chaos = {"kills": 4, "components": {"rollout": {"recovery_s_median": 3.5}}, **zero}
    found = bench.figures(chaos, {"share": 0.95, "cuts": 20}, [(100, 90), (300, 300)], 1.2, 0.004)
    assert found.keys() == PROMISED
    assert found["in_flight_tokens_kept"] == 0.975
    assert found["recovery_s_median"] == {"rollout": 3.5}


def test_a_run_is_cut_at_every_step_once_before_any_comes_again_and_the_seed_fixes_where():
    found = bench.cuts(16, 8, seed=3)
    assert found == bench.cuts(16, 8, seed=3) and len(found) == 16
    assert all(found.count(step) in (2, 3) for step in range(1, 8))
    assert sorted(set(bench.cuts(4, 8, seed=1))) == bench.cuts(4, 8, seed=1)
