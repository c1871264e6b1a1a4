"""For every rank of every pair of layouts: what it holds after the transfer is the slice of the full tensor, bit for
bit. Sources are cut by mbridge, targets by plain chunks (`shards.py`). The benchmark runs all pairs."""

import pytest

from tests.reshard import matrix, matrix_ranks
from tests.reshard.ranks import Ranks

TRAITS = {
    *("apart", "dense", "tied over stages", "padded vocabulary", "kv heads < train TP", "kv heads < rollout TP"),
    *("TP up", "TP down", "PP uneven", "PP virtual", "DP replicas", "EP up", "EP down", "expert TP"),
    "latent attention",
}


@pytest.mark.slow
def test_the_matrix_has_sixty_pairs_and_every_trait_often():
    cases = matrix.all_cases()
    assert len(cases) >= 60
    assert len({str(case) for case in cases}) == len(cases)
    for trait in TRAITS:
        assert sum(trait in case.traits for case in cases) >= 10, trait
    assert {case.model for case in cases} == set(matrix.SMALL)


def test_the_default_run_shows_every_trait_and_every_model():
    chosen = matrix.representative(48)
    assert 48 <= len(chosen) <= 60
    assert set().union(*(case.traits for case in chosen)) == TRAITS
    assert {case.model for case in chosen} == set(matrix.SMALL)


@pytest.mark.slow
def test_generation_tensors_are_slices_of_the_full_tensors_and_go_back_to_the_trainer():
    """B70 (KV heads fewer than TP), B71 (vocabulary padding), B73 (uneven and virtual stages) among them."""
    chosen = matrix.representative(48)
    with Ranks(matrix.RANKS, matrix_ranks.MODULES) as ranks:
        found = ranks.run(matrix_ranks.check_cases, cases=chosen, timeout_s=120)
    for number, case in enumerate(chosen):
        seen = [rank[number] for rank in found if rank[number]]
        assert len(seen) == case.ranks
        assert sum(s["sent"] for s in seen) == sum(s["received"] for s in seen)
        assert [s["received"] for s in seen] == [s["needed"] for s in seen]  # what it lacks, once
