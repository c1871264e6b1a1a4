"""How full a planned module makes the unified buffer, read from its text."""

import pytest

from cann_kernels.gate import ub_share

TARGET = 'dlti.target_system_spec = <"NPU" : <#dlti.dl_entry<"UB_SIZE", 1572864 : i32>>>\n'
UB = "#hivm.address_space<ub>"


def module(*lines: str) -> str:
    return TARGET + "%c0_i64 = arith.constant 0 : i64\n%c98304_i64 = arith.constant 98304 : i64\n" + "\n".join(lines)


def test_the_highest_byte_of_any_buffer_counts():
    low = f"%1 = hivm.hir.pointer_cast(%c0_i64) : memref<4096xf32, {UB}>"
    high = f"%2 = hivm.hir.pointer_cast(%c98304_i64) : memref<2x4096xbf16, strided<[4096, 1]>, {UB}>"
    assert ub_share(module(low)) == 4096 * 4 / 196608
    assert ub_share(module(low, high)) == (98304 + 2 * 4096 * 2) / 196608


def test_every_copy_of_a_double_buffer_counts():
    both = f"%1 = hivm.hir.pointer_cast(%c0_i64, %c98304_i64) : memref<4096xf32, {UB}>"
    assert ub_share(module(both)) == (98304 + 4096 * 4) / 196608


def test_bits_are_rounded_up_to_bytes():
    assert ub_share(module(f"%1 = hivm.hir.pointer_cast(%c0_i64) : memref<9xi1, {UB}>")) == 2 / 196608


@pytest.mark.parametrize(
    "line, words",
    [
        (f"%1 = hivm.hir.pointer_cast(%7) : memref<8xf32, {UB}>", "no constant place"),
        (f"%1 = hivm.hir.pointer_cast(%c0_i64) : memref<8xf99, {UB}>", "unknown type f99"),
        ("%1 = hivm.hir.pointer_cast(%c0_i64) : memref<?xf32, #hivm.address_space<cbuf>>", "not understood"),
    ],
)
def test_a_buffer_that_cannot_be_read_is_no_pass(line, words):
    with pytest.raises(ValueError, match=words):
        ub_share(module(line))


def test_a_target_without_a_size_is_no_pass():
    with pytest.raises(ValueError, match="how large"):
        ub_share(f"%1 = hivm.hir.pointer_cast(%c0_i64) : memref<8xf32, {UB}>")
