"""The two passes of a step as Triton kernels: the mathematics of `step.py`, one launch each for all parameters.

What they read is written down in `tables.py`: one record per parameter, which lies in memory as a stack of matrices
`(group, row, column)` with units on rows and columns, and a list of chunks. A chunk is what one program works on: some
tiles of ROWS × WIDTH, side by side or one below the other.

    walk_pass    skeleton weights → the coordinates Ĩ and Õ, up to 16 steps of each walk to ground at a time
    flow_pass    column sums of w·g (or row sums), row norms before BatchNorm, as partial sums of each chunk
    fold_pass    partial sums → one sum per input of each parameter, and one norm per row and tap
    roots_pass   sums → ∂ℓ/∂v of the trained skeleton paths → momentum → path ratios
    units_pass   path ratios → the factors of every unit
    update_pass  weights and momentum buffers, skeleton entries included

With EARLY a kernel lets the next one begin while it still runs; that one reads its tables and then waits for the rest
(`gdc_wait`: programmatic dependent launch, for GPUs of compute capability 9 and above).

Six launches (one more where a walk is longer than 16, 256 … steps, two more with the paper's rule for BatchNorm; two
more, and some of torch's, with clipping); no sum depends on the order in which programs run; nothing is read back by
the host. A gradient that is not finite raises `flags[PENDING]` in `flow_pass`; the fold moves it to `flags[SKIP]`, and
nothing that outlives the step is written while that is set.
"""

from contextlib import suppress

import triton
import triton.language as tl

from gspace.optim.fast.tables import FEW, LAYOUT, MORE

with suppress(ImportError):  # before Triton 3.4, where no launch is EARLY
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def _indices(table: str, names: str) -> list[tl.constexpr]:
    """Where these fields stand in a row of a table, and how many it has."""
    fields = LAYOUT[table]
    return [tl.constexpr(fields.index(name)) for name in names.split()] + [tl.constexpr(len(fields))]


(
    WEIGHT, SLOT, OFFSET, GROUPS, R, C, LANES, STEPS, DOWN, ACROSS, ROW_TABLE, COLUMN_TABLE, COLUMN_OUT, COLUMN_STRIDE,
    ROW_OUT, ROW_STRIDE, PERIOD, SWAP, FLOW, NORMAL, GROUP, UNIT, CHUNK_ROWS, CHUNK_COLUMNS, EVEN, FIELDS,
) = _indices("RECORD", " ".join(LAYOUT["RECORD"]))  # fmt: skip
LR, MOMENTUM, DAMPENING, NESTEROV, DECAY, SIGN, HYPER = _indices("HYPER", "lr momentum dampening nesterov decay sign")
SOURCE, COUNT, TAP, STRIDE, FIRST, END, TARGET, EDGES, FOLD_WEIGHT, FOLD_SLOT, FOLD = _indices(
    "FOLD", "source count taps stride first end target edges fold_weight fold_slot"
)
ROOT_UNIT, START, LENGTH, ROOT_PARAM, ROOT_OFFSET, ROOT_NORM, ROOT_GROUP, ROOT = _indices(
    "ROOT", "root_unit start length root_param root_offset root_norm root_group"
)
ENTRY_PARAM, ENTRY_OFFSET, ENTRY = _indices("ENTRY", "entry_param entry_offset")
SLOTS = tl.constexpr(128)
SHALLOW, WIDER = tl.constexpr(FEW), tl.constexpr(MORE)
PENDING, SKIP, SKIPPED = (tl.constexpr(i) for i in range(3))


@triton.jit
def _field(record, FIELD: tl.constexpr):
    return tl.load(record + FIELD).to(tl.int32)


@triton.jit
def _even(x, BY: tl.constexpr):
    """x, known to the compiler as a multiple of BY: that is how it comes to load 16 bytes at once."""
    return x // BY * BY


@triton.jit
def _address(address, offset, WIDE: tl.constexpr, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    if WIDE:
        return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + _even(offset, VECTOR)
    return address.to(tl.pointer_type(DTYPE)) + offset


@triton.jit
def _units(record, rows, columns):
    """Rows and columns with units. A parameter outside every unit has no tables: unit 0, whose factors are 1."""
    unit = tl.load(record + UNIT) != 0
    return tl.where(unit, rows, 0), tl.where(unit, columns, 0)


@triton.jit
def _norm_places(record, index, group, row, column):
    """Where the norms of rows and of columns are; index 0 is a norm of 1."""
    rows, columns = _field(record, R), _field(record, C)
    unit_rows, unit_columns = _units(record, rows, columns)
    of_rows = index + tl.load(record + ROW_TABLE) + (2 * _field(record, GROUPS) + group) * rows
    of_columns = index + tl.load(record + COLUMN_TABLE) + (2 * _field(record, GROUPS) + group) * columns
    n_r = tl.load(of_rows + row, mask=row < unit_rows, other=0)
    return n_r, tl.load(of_columns + column, mask=column < unit_columns, other=0)


@triton.jit
def walk_pass(
    ancestors, skeleton, reference, records, before, after, count,
    GATHER: tl.constexpr, STRIDES: tl.constexpr,
    DTYPE: tl.constexpr, UNITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Products over the units that a walk meets, or over what each of them has collected before (without GATHER).

    `ancestors` are their numbers, `(STRIDES, 2·(H + 1))`; ground counts as 1. All in float64: ratios of weights to
    their references lie as far apart as scales do.
    """
    if EARLY:
        gdc_launch_dependents()
        if not GATHER:
            gdc_wait()
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    exists = u < count
    product = tl.full([UNITS], 1.0, tl.float64)
    for k in range(STRIDES):
        at = tl.load(ancestors + k * count + u, mask=exists, other=0)
        if GATHER:
            param = tl.load(skeleton + at * ENTRY + ENTRY_PARAM, mask=exists, other=-1)
            there = param >= 0
            offset = tl.load(skeleton + at * ENTRY + ENTRY_OFFSET, mask=there, other=0)
            address = tl.load(records + param * FIELDS + WEIGHT, mask=there, other=0)
            w = tl.load(address.to(tl.pointer_type(DTYPE)) + offset, mask=there, other=1.0).to(tl.float64)
            product *= w / tl.load(reference + at, mask=there, other=1.0)
        else:
            product *= tl.load(before + at, mask=exists, other=1.0)
    tl.store(after + u, product, mask=exists)


@triton.jit
def _flow(
    record, grad, index, norms, partial, flags, group, row0, column0,
    WIDE: tl.constexpr, SUMS: tl.constexpr, NORMS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    rows, columns, lanes = _field(record, R), _field(record, C), _field(record, LANES)
    down, across, steps = _field(record, DOWN), _field(record, ACROSS), _field(record, STEPS)
    if WIDE:
        columns, lanes, column0 = _even(columns, VECTOR), _even(lanes, VECTOR), _even(column0, VECTOR)
    swap = tl.load(record + SWAP) != 0
    sums = tl.load(record + FLOW) * (1 if SUMS else 0)
    squares = tl.load(record + NORMAL) * (1 if NORMS else 0)
    on_columns = tl.where(swap, squares, sums) != 0
    on_rows = tl.where(swap, sums, squares) != 0
    g_address = tl.load(grad)
    # What is not needed, or not there, is not read.
    w_rows, g_rows = tl.where(on_columns | on_rows, rows, 0), tl.where(g_address != 0, rows, 0)
    start = tl.load(record + OFFSET) + (group * rows + row0).to(tl.int64) * columns + column0
    w_base = _address(tl.load(record + WEIGHT), start, WIDE, DTYPE, VECTOR)
    g_base = _address(g_address, start, WIDE, DTYPE, VECTOR)

    lane, line = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    # Tiles go down, or across where a row has a sum for each of several taps: sums along the way are kept in registers.
    kept = tl.zeros([ROWS, WIDTH], ACC)
    row_check, column_check = tl.zeros([ROWS], ACC), tl.zeros([WIDTH], ACC)
    rows_out, columns_out = tl.where(on_rows, rows, 0), tl.where(on_columns, columns, 0)
    to_columns = partial + tl.load(record + COLUMN_OUT) + group * columns
    to_columns += (row0 // _field(record, CHUNK_ROWS)) * tl.load(record + COLUMN_STRIDE)
    to_rows = (
        partial + tl.load(record + ROW_OUT) + (column0 // _field(record, CHUNK_COLUMNS)) * tl.load(record + ROW_STRIDE)
    )
    for i in range(steps):
        row = row0 + i * down * ROWS + line
        column = column0 + i * across * lanes + lane
        offset = (i * down * ROWS + line)[:, None] * columns + (i * across * lanes + lane)[None, :]
        there = (lane < lanes) & (column < columns)
        w = tl.load(w_base + offset, mask=(row < w_rows)[:, None] & there[None, :], other=0.0).to(ACC)
        g = w
        if SUMS:
            g = tl.load(g_base + offset, mask=(row < g_rows)[:, None] & there[None, :], other=0.0).to(ACC)
            if not NORMS:
                n_r, n_c = _norm_places(record, index, group, row, column)
                g *= tl.load(norms + n_r)[:, None] * tl.load(norms + n_c)[None, :]
        by_column, by_row = w * tl.where(swap, w, g), w * tl.where(swap, g, w)
        if down != 0:
            kept += by_column
            if on_rows | swap:
                total = tl.sum(by_row, 1)
                tl.store(to_rows + group * rows + row, total, mask=row < rows_out)
                row_check += total
        else:
            kept += by_row
            if on_columns | (swap == 0):
                total = tl.sum(by_column, 0)
                tl.store(to_columns + column, total, mask=there & (column < columns_out))
                column_check += total
    if down != 0:
        total = tl.sum(kept, 0)
        tl.store(to_columns + column0 + lane, total, mask=(lane < lanes) & (column0 + lane < columns_out))
        column_check += total
    elif on_rows | swap:
        row = row0 + line
        period = _field(record, PERIOD)
        for tap in range(period):
            total = tl.sum(tl.where((lane % period == tap)[None, :], kept, 0.0), 1)
            tl.store(to_rows + (group * rows + row) * period + tap, total, mask=row < rows_out)
            row_check += total
    if SUMS:
        # A sum of w·g is finite only if every g is, also where w is 0 or was not read.
        row_bad = tl.where(tl.abs(row_check) < float("inf"), 0, 1)
        column_bad = tl.where(tl.abs(column_check) < float("inf"), 0, 1)
        found = tl.maximum(tl.max(column_bad, 0), tl.max(row_bad, 0))
        tl.atomic_max(flags + PENDING, found, mask=found > 0)


@triton.jit
def flow_pass(
    chunks, records, grads, index, norms, partial, flags,
    SUMS: tl.constexpr, NORMS: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Partial sums over one chunk.

    With SUMS and NORMS, both at once (the released rule: sums of w·g, norms apart). The paper's rule needs norms first
    (NORMS alone) and then multiplies each w·g by the norm of its row (SUMS alone). WIDE: addresses are multiples of 16
    bytes.
    """
    if EARLY:
        gdc_launch_dependents()
    chunk = chunks + tl.program_id(0) * 4
    record = records + tl.load(chunk) * FIELDS
    grad = grads + tl.load(record + SLOT)
    group, row0, column0 = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if EARLY and not (SUMS and NORMS):  # the paper's rule: behind another pass
        gdc_wait()
    if tl.load(record + EVEN) != 0:
        _flow(
            record, grad, index, norms, partial, flags, group, row0, column0,
            WIDE, SUMS, NORMS, DTYPE, ACC, ROWS, WIDTH,
        )  # fmt: skip
    else:
        _flow(
            record, grad, index, norms, partial, flags, group, row0, column0,
            False, SUMS, NORMS, DTYPE, ACC, ROWS, WIDTH,
        )  # fmt: skip
    if EARLY and NORMS:  # what follows this pass may count on the one before it, too
        gdc_wait()


@triton.jit
def _fold(
    fold, grads, partial, norms, free, sums,
    WEIGHTED: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, DEPTH: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    source, count, taps = tl.load(fold + SOURCE), _field(fold, COUNT), _field(fold, TAP)
    stride, item, end = _field(fold, STRIDE), _field(fold, FIRST) + tl.arange(0, ITEMS), _field(fold, END)
    target, edges = tl.load(fold + TARGET), tl.load(fold + EDGES)
    # Nothing of this depends on the sums: asked for first, it comes while they are read.
    exists = item < tl.where(edges < 0, 0, end)
    offset = tl.load(free + (edges + item) * 2, mask=exists, other=-1)
    g_address = tl.load(grads + tl.load(fold + FOLD_SLOT))
    g_least = tl.where(g_address != 0, 0, 2**62)
    w = tl.load(tl.load(fold + FOLD_WEIGHT).to(tl.pointer_type(DTYPE)) + offset, mask=offset >= 0, other=0.0).to(ACC)
    g = tl.load(g_address.to(tl.pointer_type(DTYPE)) + offset, mask=offset >= g_least, other=0.0).to(ACC)
    total = tl.zeros([DEPTH, ITEMS], ACC)
    for q in range(0, count, DEPTH):
        at = q + tl.arange(0, DEPTH)
        where = ((at // taps) * stride + at % taps)[:, None] + (item * taps)[None, :]
        total += tl.load(partial + source + where, mask=(at < count)[:, None] & (item < end)[None, :], other=0.0)
    result = tl.sum(total, 0)
    if edges < 0:
        tl.store(norms + target + item, tl.sqrt(result), mask=item < end)
    else:
        s = w * g
        if WEIGHTED:
            s *= tl.load(norms + tl.load(free + (edges + item) * 2 + 1, mask=exists, other=0))
        tl.store(sums + target + item, result - s, mask=exists)


@triton.jit
def fold_pass(
    folds, grads, hyper, rates, partial, norms, free, sums, flags, fresh, waiting, new, groups, buffers,
    LAST: tl.constexpr, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    DEPTH: tl.constexpr, ITEMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of each item; from the sum over a unit's out-edges its free edge is taken away.

    The first program also fetches learning rates and decays that lie on the device, and notes which momentum buffers
    are new: those that are `fresh`, and those `waiting` since a step that was not taken.
    """
    fold = folds + tl.program_id(0) * FOLD
    shallow = tl.load(fold + COUNT) <= SHALLOW
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if shallow:
        _fold(fold, grads, partial, norms, free, sums, WEIGHTED, DTYPE, ACC, SHALLOW, ITEMS * WIDER)
    else:
        _fold(fold, grads, partial, norms, free, sums, WEIGHTED, DTYPE, ACC, DEPTH, ITEMS)
    if LAST and tl.program_id(0) == 0:
        found = tl.load(flags + PENDING)
        tl.debug_barrier()  # every warp has read it before one of them clears it
        tl.store(flags + SKIP, found)
        tl.store(flags + SKIPPED, tl.load(flags + SKIPPED) + found)
        tl.store(flags + PENDING, 0)
        for first in range(0, buffers, SLOTS):
            slot = first + tl.arange(0, SLOTS)
            exists = slot < buffers
            is_fresh = tl.load(fresh + slot, mask=exists, other=0).to(tl.int32)
            is_new = tl.maximum(is_fresh, tl.load(waiting + slot, mask=exists, other=0))
            tl.store(new + slot, is_new, mask=exists)
            tl.store(waiting + slot, is_new * found, mask=exists)
        for group in range(groups):
            _fetch(rates + 2 * group, hyper + group * HYPER + LR)
            _fetch(rates + 2 * group + 1, hyper + group * HYPER + DECAY)


@triton.jit
def _fetch(address, target):
    where = tl.load(address)
    if where > 0:
        tl.store(target, tl.load(where.to(tl.pointer_type(tl.float32))).to(tl.float64))


@triton.jit
def roots_pass(
    roots, lists, records, grads, buffers, fresh, hyper, sums, norms, flags, coordinates, root_grad, shrink,
    ratio, raw, count, units,
    GATHER: tl.constexpr, MOVE: tl.constexpr, WEIGHTED: tl.constexpr, NORMS: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    MAX_RATIO: tl.constexpr, MAX_DRIFT: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr, ROOTS: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATHER: the inverse chain rule, q(r)/v. MOVE: momentum, path ratio, guards. Apart only when ∂ℓ/∂v is clipped.

    Momentum of a trained skeleton path lies at its entry in the buffer of the parameter. A guard of 0 is none.
    """
    at = tl.program_id(0) * ROOTS + tl.arange(0, ROOTS)
    exists = at < count
    root = roots + at * ROOT
    unit = tl.load(root + ROOT_UNIT, mask=exists, other=0)
    group = tl.load(root + ROOT_GROUP, mask=exists, other=0)
    record = records + tl.load(root + ROOT_PARAM, mask=exists, other=0) * FIELDS
    offset, slot = tl.load(root + ROOT_OFFSET, mask=exists, other=0), tl.load(record + SLOT)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(coordinates + unit, mask=exists, other=1.0).to(ACC)
    value *= tl.load(coordinates + units + unit, mask=exists, other=1.0).to(ACC)
    if GATHER:
        start = tl.load(root + START, mask=exists, other=0)
        length = tl.load(root + LENGTH, mask=exists, other=0).to(tl.int32)
        behind = tl.zeros([ROOTS, AT_ONCE], ACC)
        for k in range(0, tl.max(length, 0), AT_ONCE):
            step = k + tl.arange(0, AT_ONCE)
            there = step[None, :] < length[:, None]
            index = tl.load(lists + start[:, None] + step[None, :], mask=there, other=0)
            behind += tl.load(sums + index, mask=there, other=0.0)
        g_address = tl.load(grads + slot)
        w = tl.load(tl.load(record + WEIGHT).to(tl.pointer_type(DTYPE)) + offset, mask=exists, other=0.0).to(ACC)
        g = tl.load(g_address.to(tl.pointer_type(DTYPE)) + offset, mask=exists & (g_address != 0), other=0.0).to(ACC)
        s = w * g
        norm = tl.full([ROOTS], 1.0, ACC)
        if NORMS:
            norm = tl.load(norms + tl.load(root + ROOT_NORM, mask=exists, other=0))
        if WEIGHTED:
            s *= norm
            norm = tl.full([ROOTS], 1.0, ACC)
        sign = tl.load(hyper + group * HYPER + SIGN).to(ACC)
        d = sign * (s - tl.sum(behind, 1)) / norm / value
        tl.store(root_grad + unit, d, mask=exists)
    else:
        d = tl.load(root_grad + unit, mask=exists, other=0.0) * tl.load(shrink)
    if MOVE:
        go = at < tl.where(tl.load(flags + SKIP) == 0, count, 0)
        if HAS_MOMENTUM:
            momentum = tl.load(hyper + group * HYPER + MOMENTUM).to(ACC)
            damped = (1 - tl.load(hyper + group * HYPER + DAMPENING)).to(ACC)
            buffer = tl.load(buffers + slot).to(tl.pointer_type(DTYPE)) + offset
            old = tl.load(buffer, mask=exists & (momentum != 0), other=0.0).to(ACC)
            new = tl.where(tl.load(fresh + slot) != 0, d, momentum * old + damped * d).to(DTYPE)
            tl.store(buffer, new, mask=go & (momentum != 0))
            look = tl.where(tl.load(hyper + group * HYPER + NESTEROV) != 0, d + momentum * new.to(ACC), new.to(ACC))
            d = tl.where(momentum != 0, look, d)
        r = 1 - tl.load(hyper + group * HYPER + LR).to(ACC) * d / value
        tl.store(raw + unit, r, mask=go)
        if MAX_RATIO > 0:
            r = tl.where(r > MAX_RATIO, MAX_RATIO, tl.where(r < 1 / MAX_RATIO, 1 / MAX_RATIO, r))
        if MAX_DRIFT > 0:
            size = tl.abs(value)
            low = tl.where(size > 1 / MAX_DRIFT, 1 / MAX_DRIFT, size) / size
            high = tl.where(size < MAX_DRIFT, MAX_DRIFT, size) / size
            r = tl.where(r < low, low, r)
            r = tl.where(r > high, high, r)
        tl.store(ratio + unit, r, mask=go)


@triton.jit
def units_pass(
    root, ratio, coordinates, factors, count,
    SPREAD: tl.constexpr, ACC: tl.constexpr, UNITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Factors of each unit as tail and as head: what its gradients, weights and skeleton weights are multiplied by.

    `factors` is (3, 2, H + 1): 1/Ĩ and 1/Õ; m = 1/(R·c) and c, where c is the scale that spreads R, or 1; and R twice,
    for skeleton weights: a free one becomes w·m·m·R, in(r) too.
    """
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    exists = u < count
    place = tl.load(root + u, mask=exists, other=0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.load(ratio + place, mask=exists, other=1.0)
    c = tl.full([UNITS], 1.0, ACC)
    if SPREAD:
        c = tl.where(u > 0, 1 / tl.sqrt(tl.abs(r)), 1.0)
    into = tl.load(coordinates + u, mask=exists, other=1.0).to(ACC)
    out = tl.load(coordinates + count + u, mask=exists, other=1.0).to(ACC)
    tl.store(factors + u, 1 / into, mask=exists)
    tl.store(factors + count + u, 1 / out, mask=exists)
    tl.store(factors + 2 * count + u, 1 / (r * c), mask=exists)
    tl.store(factors + 3 * count + u, c, mask=exists)
    tl.store(factors + 4 * count + u, r, mask=exists)
    tl.store(factors + 5 * count + u, r, mask=exists)


@triton.jit
def _update(
    record, grad, buffer, is_new, values, index, factors, norms, shrink, group, row0, column0, units,
    WIDE: tl.constexpr, APPLY: tl.constexpr, CLIP: tl.constexpr, NORMS: tl.constexpr, TAPS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr, HAS_DECAY: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    rows, columns, lanes = _field(record, R), _field(record, C), _field(record, LANES)
    down, across, steps = _field(record, DOWN), _field(record, ACROSS), _field(record, STEPS)
    if WIDE:
        columns, lanes, column0 = _even(columns, VECTOR), _even(lanes, VECTOR), _even(column0, VECTOR)
    unit = tl.load(record + UNIT) != 0
    g_address = tl.load(grad)
    start = tl.load(record + OFFSET) + (group * rows + row0).to(tl.int64) * columns + column0
    w_base = _address(tl.load(record + WEIGHT), start, WIDE, DTYPE, VECTOR)
    g_base = _address(g_address, start, WIDE, DTYPE, VECTOR)
    b_base = _address(tl.load(buffer), start, WIDE, DTYPE, VECTOR)
    fresh = tl.load(is_new) != 0
    lr, momentum = tl.load(values + LR).to(ACC), tl.load(values + MOMENTUM).to(ACC)
    damped, nesterov = (1 - tl.load(values + DAMPENING)).to(ACC), tl.load(values + NESTEROV) != 0
    decay, sign = tl.load(values + DECAY).to(ACC), tl.load(values + SIGN).to(ACC)
    if CLIP:
        sign *= tl.where(unit, tl.load(shrink), 1.0)
    count_r, count_c = _field(record, GROUPS) * rows, _field(record, GROUPS) * columns
    row_table = index + tl.load(record + ROW_TABLE) + group * rows
    column_table = index + tl.load(record + COLUMN_TABLE) + group * columns
    unit_rows, unit_columns = _units(record, rows, columns)
    g_rows, b_rows = tl.where(g_address != 0, rows, 0), tl.where(momentum != 0, rows, 0)
    old_rows = tl.where(fresh, 0, b_rows)
    lane, line = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    square = tl.zeros([ROWS, WIDTH], ACC)
    for i in range(steps):
        row = row0 + i * down * ROWS + line
        column = column0 + i * across * lanes + lane
        offset = (i * down * ROWS + line)[:, None] * columns + (i * across * lanes + lane)[None, :]
        there = (lane < lanes) & (column < columns)
        w = tl.load(w_base + offset, mask=(row < rows)[:, None] & there[None, :], other=0.0).to(ACC)
        g = tl.load(g_base + offset, mask=(row < g_rows)[:, None] & there[None, :], other=0.0).to(ACC) * sign
        id_r = tl.load(row_table + row, mask=row < unit_rows, other=0)
        id_c = tl.load(column_table + column, mask=column < unit_columns, other=0)
        entry_r = tl.load(row_table + count_r + row, mask=row < unit_rows, other=-1)
        entry_c = tl.load(column_table + count_c + column, mask=column < unit_columns, other=-1)
        i_r, i_c = tl.load(factors + id_r), tl.load(factors + id_c)
        e_r, e_c = i_r, i_c
        if NORMS:
            n_r, n_c = _norm_places(record, index, group, row, column)
            if TAPS:  # rows with a norm for each tap: the sum of two places
                g *= tl.load(norms + n_r[:, None] + n_c[None, :])
            else:
                e_r, e_c = i_r * tl.load(norms + n_r), i_c * tl.load(norms + n_c)
        d = g * (e_r[:, None] * e_c[None, :])
        by_row, by_column = entry_r[:, None] == column[None, :], entry_c[None, :] == row[:, None]
        if APPLY:
            if HAS_DECAY:
                d += decay * (w * ((1 / i_r)[:, None] * (1 / i_c)[None, :]))
            if HAS_MOMENTUM:
                old = tl.load(b_base + offset, mask=(row < old_rows)[:, None] & there[None, :], other=0.0).to(ACC)
                new = tl.where(fresh, d, momentum * old + damped * d).to(DTYPE)
                # At entries of the skeleton lies the momentum of their paths, or 0.
                tl.store(b_base + offset, new, mask=(row < b_rows)[:, None] & there[None, :] & ~(by_row | by_column))
                # What is stored is what is used, in the precision of the buffer.
                d = tl.where(momentum != 0, tl.where(nesterov, d + momentum * new.to(ACC), new.to(ACC)), d)
            m_r, m_c = tl.load(factors + 2 * units + id_r), tl.load(factors + 2 * units + id_c)
            r_r, r_c = tl.load(factors + 4 * units + id_r), tl.load(factors + 4 * units + id_c)
            moved = w - d * ((lr * i_r)[:, None] * i_c[None, :])
            moved = tl.where(by_row, w * r_r[:, None], moved)
            moved = tl.where(by_column, w * r_c[None, :], moved) * (m_r[:, None] * m_c[None, :])
            tl.store(w_base + offset, moved.to(DTYPE), mask=(row < rows)[:, None] & there[None, :])
        else:
            square += tl.where(by_row | by_column, 0.0, tl.where(unit, d * d, 0.0))
    return tl.sum(tl.sum(square, 1), 0)


@triton.jit
def update_pass(
    chunks, records, grads, buffers, fresh, hyper, index, factors, norms, flags, shrink, squares, units,
    APPLY: tl.constexpr, CLIP: tl.constexpr, NORMS: tl.constexpr, TAPS: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    HAS_DECAY: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """w ← (w − lr·d·i)·m with i = 1/(Ĩ·Õ), d the direction of ∂ℓ/∂v = g·n·i; skeleton entries by their own factors.

    Without APPLY it writes nothing but the sum of (∂ℓ/∂v)² over the chunk. Chunks are taken from the last to the first:
    what `flow_pass` read last is still in the cache.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    chunk = chunks + program * 4
    record = records + tl.load(chunk) * FIELDS
    slot = tl.load(record + SLOT)
    values = hyper + tl.load(record + GROUP) * HYPER
    group, row0, column0 = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if EARLY:
        gdc_wait()
    # A parameter outside every unit and without a gradient is left alone, as torch does.
    if (tl.load(flags + SKIP) == 0) & ((tl.load(record + UNIT) != 0) | (tl.load(grads + slot) != 0)):
        if tl.load(record + EVEN) != 0:
            total = _update(
                record, grads + slot, buffers + slot, fresh + slot, values,
                index, factors, norms, shrink, group, row0, column0, units,
                WIDE, APPLY, CLIP, NORMS, TAPS, HAS_MOMENTUM, HAS_DECAY, DTYPE, ACC, ROWS, WIDTH,
            )  # fmt: skip
        else:
            total = _update(
                record, grads + slot, buffers + slot, fresh + slot, values,
                index, factors, norms, shrink, group, row0, column0, units,
                False, APPLY, CLIP, NORMS, TAPS, HAS_MOMENTUM, HAS_DECAY, DTYPE, ACC, ROWS, WIDTH,
            )  # fmt: skip
        if not APPLY:
            tl.store(squares + program, total)
