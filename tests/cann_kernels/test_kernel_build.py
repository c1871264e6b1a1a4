"""The kernels go through the vendor's compiler for 910B and 910C; tiles that are too large do not."""

import pytest

pytestmark = pytest.mark.slow


def test_every_kernel_fits_each_target(built):
    assert built.status == 0
    found = {(row["kernel"], row["dtype"], row["target"]) for row in built.report}
    assert found == {(k, d, t) for k in ("stats", "gradient") for d in ("bf16", "fp32") for t in ("910b", "910c")}
    for row in built.report:
        assert row["passed"] and row["reason"] == "", row
        assert 0.2 < row["ub_share"] <= 0.9, row


def test_nothing_but_rows_tiles_and_tails_is_looped_over(built):
    """A loop more would be a tile operation that the compiler could not turn into vector instructions."""
    assert {row["loops"] for row in built.report} == {3}


def test_tiles_larger_than_the_buffer_fail_the_gate(build):
    large = build("--block", "32768")
    assert large.status == 1
    for row in large.report:
        assert not row["passed"] and "ub overflow" in row["reason"].lower(), row


def test_tiles_that_leave_no_margin_fail_the_gate(build):
    """The compiler accepts them, some only after it has given up an optimisation."""
    tight = build("--block", "8192", "--tail", "8192")
    assert tight.status == 1
    reasons = {row["kernel"]: row["reason"] for row in tight.report if row["dtype"] == "fp32"}
    assert "above 90%" in reasons["stats"]
    assert "overflow" in reasons["gradient"].lower()
