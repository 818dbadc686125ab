"""The first half of a step as Triton kernels: coordinates and sums of w·g (`observe` of `step.py`), for all parameters.

What they read is written down in `tables.py`: one record per parameter, which lies in memory as a stack of matrices
`(group, row, column)` with units on rows and columns, and a list of chunks. A chunk is what one program works on: some
tiles of ROWS × WIDTH, side by side or one below the other.

    walk_pass    skeleton weights → Ĩ and Õ, up to 16 steps of each walk to ground at a time, and 1/Ĩ, 1/Õ
    flow_pass    column sums of w·g (or row sums), row norms before BatchNorm, as partial sums of each chunk
    fold_pass    partial sums → one sum per input of each parameter, and one norm per row and tap

With EARLY a kernel lets the next one begin while it still runs; that one reads its tables and then waits for the rest
(`gdc_wait`: programmatic dependent launch, for GPUs of compute capability 9 and above).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gspace.optim.fast.tables import FEW, LAYOUT, MORE


def indices(table: str, names: str) -> list[tl.constexpr]:
    """Where these fields stand in a row of a table, and how many it has."""
    fields = LAYOUT[table]
    return [tl.constexpr(fields.index(name)) for name in names.split()] + [tl.constexpr(len(fields))]


(
    WEIGHT, SLOT, OFFSET, GROUPS, R, C, LANES, STEPS, DOWN, ACROSS, ROW_TABLE, COLUMN_TABLE, COLUMN_OUT, COLUMN_STRIDE,
    ROW_OUT, ROW_STRIDE, PERIOD, SWAP, FLOW, NORMAL, GROUP, UNIT, CHUNK_ROWS, CHUNK_COLUMNS, EVEN, FIELDS,
) = indices("RECORD", " ".join(LAYOUT["RECORD"]))  # fmt: skip
LR, MOMENTUM, NESTEROV, DECAY, SIGN, HYPER = indices("HYPER", "lr momentum nesterov decay sign")
SOURCE, COUNT, TAP, STRIDE, FIRST, END, TARGET, EDGES, FOLD_WEIGHT, FOLD_SLOT, FOLD = indices(
    "FOLD", "source count taps stride first end target edges fold_weight fold_slot"
)
ADDRESS, ENTRY = indices("ENTRY", "address")
SHALLOW, WIDER = tl.constexpr(FEW), tl.constexpr(MORE)
PENDING, SKIP, SKIPPED = (tl.constexpr(i) for i in range(3))


@triton.jit
def field(record, FIELD: tl.constexpr):
    return tl.load(record + FIELD).to(tl.int32)


@triton.jit
def even(x, BY: tl.constexpr):
    """x, known to the compiler as a multiple of BY: that is how it comes to load 16 bytes at once."""
    return x // BY * BY


@triton.jit
def address_of(address, offset, WIDE: tl.constexpr, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    if WIDE:
        return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + even(offset, VECTOR)
    return address.to(tl.pointer_type(DTYPE)) + offset


@triton.jit
def units_of(record, rows, columns):
    """Rows and columns with units. A parameter outside every unit has no tables: unit 0, whose factors are 1."""
    unit = tl.load(record + UNIT) != 0
    return tl.where(unit, rows, 0), tl.where(unit, columns, 0)


@triton.jit
def walk_pass(
    ancestors, skeleton, reference, before, after, factors, count,
    GATHER: tl.constexpr, STRIDES: tl.constexpr, LAST: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr, UNITS: tl.constexpr, EARLY: tl.constexpr,
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
    for k in tl.static_range(STRIDES):  # unrolled: one load need not wait for another's
        at = tl.load(ancestors + k * count + u, mask=exists, other=0)
        if GATHER:
            address = tl.load(skeleton + at * ENTRY + ADDRESS, mask=exists, other=0)
            there = address != 0
            w = tl.load(address.to(tl.pointer_type(DTYPE)), mask=there, other=1.0).to(tl.float64)
            product *= w / tl.load(reference + at, mask=there, other=1.0)
        else:
            product *= tl.load(before + at, mask=exists, other=1.0)
    tl.store(after + u, product, mask=exists)
    if LAST:
        tl.store(factors + u, 1 / product.to(ACC), mask=exists)


@triton.jit
def _flow(
    record, grad, partial, flags, group, row0, column0,
    WIDE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    rows, columns, lanes = field(record, R), field(record, C), field(record, LANES)
    down, across, steps = field(record, DOWN), field(record, ACROSS), field(record, STEPS)
    if WIDE:
        columns, lanes, column0 = even(columns, VECTOR), even(lanes, VECTOR), even(column0, VECTOR)
    swap = tl.load(record + SWAP) != 0
    sums, squares = tl.load(record + FLOW), tl.load(record + NORMAL)
    on_columns = tl.where(swap, squares, sums) != 0
    on_rows = tl.where(swap, sums, squares) != 0
    g_address = tl.load(grad)
    # What is not needed, or not there, is not read.
    w_rows, g_rows = tl.where(on_columns | on_rows, rows, 0), tl.where(g_address != 0, rows, 0)
    start = tl.load(record + OFFSET) + (group * rows + row0).to(tl.int64) * columns + column0
    w_base = address_of(tl.load(record + WEIGHT), start, WIDE, DTYPE, VECTOR)
    g_base = address_of(g_address, start, WIDE, DTYPE, VECTOR)

    lane, line = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    # Tiles go down, or across where a row has a sum for each of several taps: sums along the way are kept in registers.
    kept = tl.zeros([ROWS, WIDTH], ACC)
    row_check, column_check = tl.zeros([ROWS], ACC), tl.zeros([WIDTH], ACC)
    rows_out, columns_out = tl.where(on_rows, rows, 0), tl.where(on_columns, columns, 0)
    to_columns = partial + tl.load(record + COLUMN_OUT) + group * columns
    to_columns += (row0 // field(record, CHUNK_ROWS)) * tl.load(record + COLUMN_STRIDE)
    to_rows = (
        partial + tl.load(record + ROW_OUT) + (column0 // field(record, CHUNK_COLUMNS)) * tl.load(record + ROW_STRIDE)
    )
    for i in range(steps):
        row = row0 + i * down * ROWS + line
        column = column0 + i * across * lanes + lane
        offset = (i * down * ROWS + line)[:, None] * columns + (i * across * lanes + lane)[None, :]
        there = (lane < lanes) & (column < columns)
        w = tl.load(w_base + offset, mask=(row < w_rows)[:, None] & there[None, :], other=0.0).to(ACC)
        g = tl.load(g_base + offset, mask=(row < g_rows)[:, None] & there[None, :], other=0.0).to(ACC)
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
        period = field(record, PERIOD)
        for tap in range(period):
            total = tl.sum(tl.where((lane % period == tap)[None, :], kept, 0.0), 1)
            tl.store(to_rows + (group * rows + row) * period + tap, total, mask=row < rows_out)
            row_check += total
    # A sum of w·g is finite only if every g is, also where w is 0 or was not read.
    row_bad = tl.where(tl.abs(row_check) < float("inf"), 0, 1)
    column_bad = tl.where(tl.abs(column_check) < float("inf"), 0, 1)
    found = tl.maximum(tl.max(column_bad, 0), tl.max(row_bad, 0))
    tl.atomic_max(flags + PENDING, found, mask=found > 0)


@triton.jit
def flow_pass(
    chunks, records, grads, partial, flags,
    WIDE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Partial sums over one chunk: of w·g, and of the squares of rows before a BatchNorm.

    WIDE: addresses are multiples of 16 bytes.
    """
    if EARLY:
        gdc_launch_dependents()
    chunk = chunks + tl.program_id(0) * 4
    record = records + tl.load(chunk) * FIELDS
    grad = grads + tl.load(record + SLOT)
    group, row0, column0 = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if tl.load(record + EVEN) != 0:
        _flow(record, grad, partial, flags, group, row0, column0, WIDE, DTYPE, ACC, ROWS, WIDTH)
    else:
        _flow(record, grad, partial, flags, group, row0, column0, False, DTYPE, ACC, ROWS, WIDTH)
    if EARLY:  # what follows this pass may count on the one before it, too
        gdc_wait()


@triton.jit
def _fold(
    fold, grads, partial, norms, free, sums,
    DTYPE: tl.constexpr, ACC: tl.constexpr, DEPTH: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    source, count, taps = tl.load(fold + SOURCE), field(fold, COUNT), field(fold, TAP)
    stride, item, end = field(fold, STRIDE), field(fold, FIRST) + tl.arange(0, ITEMS), field(fold, END)
    target, edges = tl.load(fold + TARGET), tl.load(fold + EDGES)
    # Nothing of this depends on the sums: asked for first, it comes while they are read.
    exists = item < tl.where(edges < 0, 0, end)
    offset = tl.load(free + edges + item, mask=exists, other=-1)
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
        tl.store(sums + target + item, result - w * g, mask=exists)


@triton.jit
def fold_pass(
    folds, grads, hyper, rates, partial, norms, free, sums, flags, groups,
    DTYPE: tl.constexpr, ACC: tl.constexpr, DEPTH: tl.constexpr, ITEMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of each item; from the sum over a unit's out-edges its free edge is taken away.

    The first program also fetches learning rates and decays that lie on the device.
    """
    fold = folds + tl.program_id(0) * FOLD
    shallow = tl.load(fold + COUNT) <= SHALLOW
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if shallow:
        _fold(fold, grads, partial, norms, free, sums, DTYPE, ACC, SHALLOW, ITEMS * WIDER)
    else:
        _fold(fold, grads, partial, norms, free, sums, DTYPE, ACC, DEPTH, ITEMS)
    if tl.program_id(0) == 0:
        found = tl.load(flags + PENDING)
        tl.debug_barrier()  # every warp has read it before one of them clears it
        tl.store(flags + SKIP, found)
        tl.store(flags + SKIPPED, tl.load(flags + SKIPPED) + found)
        tl.store(flags + PENDING, 0)
        for group in range(groups):
            _fetch(rates + 2 * group, hyper + group * HYPER + LR)
            _fetch(rates + 2 * group + 1, hyper + group * HYPER + DECAY)


@triton.jit
def _fetch(address, target):
    where = tl.load(address)
    if where > 0:
        tl.store(target, tl.load(where.to(tl.pointer_type(tl.float32))).to(tl.float64))
