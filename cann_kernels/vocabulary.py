"""Triton-Ascend source: sums over one rank's shard of the vocabulary, and the gradient of the logits.

Rows are dealt out over the vector cores (a persistent loop, so the grid is the number of cores). A row is read in
tiles; a tile is widened to fp32 in UB and nothing wide goes back to memory. README.md has tiles, memory and tolerances.
"""

import triton
import triton.language as tl

BLOCK = 4096  # logits in a tile
TAIL = 512  # in a tile of the ragged end, which has masks and therefore buffers of its own

ABSENT = tl.constexpr(-1e30)  # below every logit; finite, since 0 * (-inf) would be nan
NUMBERS = ["rows", "stride", "width", "first", "live", "inverse_temperature"]  # one binary serves all values


@triton.jit
def _fold(x, top, total, weighted, inverse_temperature):
    """Take a tile of fp32 logits into the running sums; the maximum is taken away before anything is multiplied."""
    new_top = tl.maximum(top, tl.max(x, 0))
    down = (top - new_top) * inverse_temperature
    keep = tl.exp(down)
    y = (x - new_top) * inverse_temperature
    e = tl.exp(y)
    new_total = keep * total + tl.sum(e, 0)
    new_weighted = keep * (weighted + down * total) + tl.sum(e * y, 0)
    return new_top, new_total, new_weighted


@triton.jit(do_not_specialize=[name for name in NUMBERS if name != "width"])
def vocabulary_stats(
    logits,  # [rows, >= live], rows `stride` apart
    targets,  # int32 [rows], ids of the full vocabulary
    tops,  # out, like the rest: fp32 [rows]: m = max x
    totals,  # sum exp(y) with y = (x - m) / T
    weighteds,  # sum exp(y) * y
    picked,  # x[target], 0 where another rank holds it
    rows,
    stride,
    first,  # id of column 0
    live,  # columns that are no padding
    inverse_temperature,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    columns, tail = tl.arange(0, BLOCK), tl.arange(0, TAIL)
    full = live // BLOCK * BLOCK
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + row.to(tl.int64) * stride
        top, total, weighted = ABSENT, 0.0, 0.0
        for start in range(0, full, BLOCK):
            x = tl.load(line + start + columns).to(tl.float32)
            top, total, weighted = _fold(x, top, total, weighted, inverse_temperature)
        for start in range(full, live, TAIL):  # only the ragged end pays for a mask
            inside = tail < live - start
            x = tl.load(line + start + tail, mask=inside, other=0.0).to(tl.float32)
            x = tl.where(inside, x, ABSENT)
            top, total, weighted = _fold(x, top, total, weighted, inverse_temperature)
        tl.store(tops + row, top)
        tl.store(totals + row, total)
        tl.store(weighteds + row, weighted)
        target = tl.load(targets + row) - first
        mine = (target >= 0) & (target < live)
        x = tl.load(line + tl.where(mine, target, 0)).to(tl.float32)
        tl.store(picked + row, tl.where(mine, x, 0.0))


@triton.jit
def _slope(x, hit, top, by_total, by_weighted, by_picked, inverse_temperature):
    y = (x - top) * inverse_temperature
    return tl.exp(y) * (by_total + by_weighted * y) + tl.where(hit, by_picked, 0.0)


@triton.jit(do_not_specialize=NUMBERS)
def vocabulary_gradient(
    logits,  # as in vocabulary_stats
    targets,
    tops,  # fp32 [rows], as vocabulary_stats gave them
    by_totals,  # fp32 [rows]: dL/d total, like the next two
    by_weighteds,
    by_picked,
    gradient,  # out: [rows, width] in the logits' type, rows `width` apart
    rows,
    stride,
    width,
    first,
    live,
    inverse_temperature,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    columns, tail = tl.arange(0, BLOCK), tl.arange(0, TAIL)
    full = live // BLOCK * BLOCK
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + row.to(tl.int64) * stride
        out = gradient + row.to(tl.int64) * width
        target = tl.load(targets + row) - first
        top = tl.load(tops + row)
        # d total / dx = e / T and d weighted / dx = e * (1 + y) / T
        by_weighted = tl.load(by_weighteds + row) * inverse_temperature
        by_total = tl.load(by_totals + row) * inverse_temperature + by_weighted
        by_target = tl.load(by_picked + row)
        for start in range(0, full, BLOCK):
            x = tl.load(line + start + columns).to(tl.float32)
            hit = columns == target - start
            slope = _slope(x, hit, top, by_total, by_weighted, by_target, inverse_temperature)
            tl.store(out + start + columns, slope.to(gradient.dtype.element_ty))
        for start in range(full, width, TAIL):  # the ragged end, and zeros for the padding
            inside = tail < live - start
            x = tl.load(line + start + tail, mask=inside, other=0.0).to(tl.float32)
            hit = tail == target - start
            slope = _slope(x, hit, top, by_total, by_weighted, by_target, inverse_temperature)
            slope = tl.where(inside, slope, 0.0)
            tl.store(out + start + tail, slope.to(gradient.dtype.element_ty), mask=tail < width - start)
