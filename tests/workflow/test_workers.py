from mindspeed_asyncflow.workflow.workers import sample_seed


def test_every_sample_of_a_run_has_its_own_seed_whatever_replica_answers_it():
    """B83: the seed depends on run seed, prompt issue and member only; 4 x 20,000 samples never share one."""
    seeds = {sample_seed(run, group, member) for run in (0, 1) for group in range(5000) for member in range(8)}
    assert len(seeds) == 2 * 5000 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_neighbouring_samples_have_unrelated_seeds():
    a, b = sample_seed(7, 3, 0), sample_seed(7, 3, 1)
    assert bin(a ^ b).count("1") > 15
