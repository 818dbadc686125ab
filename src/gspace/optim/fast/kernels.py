"""The second half of a step as Triton kernels: path ratios, and what they and the gradients make of the weights.

    roots_pass   sums → ∂ℓ/∂v of the trained skeleton paths → momentum → path ratios → the factors of every unit
    update_pass  weights and momentum buffers, skeleton entries included; or v and ∂ℓ/∂v for another optimizer (SHOW),
                 and what that has made of them given to weights (GIVE)

Five launches (one more where a walk is longer than 16, 256 … steps); no sum depends on the order in which programs run;
nothing is read back by the host. A gradient that is not finite raises `flags[PENDING]` in `flow_pass`; the fold moves
it to `flags[SKIP]`, and nothing that outlives the step is written while that is set.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gspace.optim.fast.flows import (
    ACROSS,
    COLUMN_TABLE,
    DECAY,
    DOWN,
    EVEN,
    FIELDS,
    GROUP,
    GROUPS,
    HYPER,
    LANES,
    LR,
    MOMENTUM,
    NESTEROV,
    OFFSET,
    ROW_TABLE,
    SIGN,
    SKIP,
    SLOT,
    STEPS,
    UNIT,
    WEIGHT,
    C,
    R,
    address_of,
    even,
    field,
    flow_pass,
    fold_pass,
    indices,
    units_of,
    walk_pass,
)
from gspace.optim.fast.tables import LAYOUT

__all__ = ["flow_pass", "fold_pass", "roots_pass", "update_pass", "walk_pass"]

ROOT_UNIT, START, LENGTH, ROOT_PARAM, ROOT_OFFSET, ROOT_NORM, ROOT_GROUP, MEMBER, MEMBERS, ROOT = indices(
    "ROOT", " ".join(LAYOUT["ROOT"])
)


@triton.jit
def norm_places(record, index, group, row, column):
    """Where the norms of rows and of columns are; index 0 is a norm of 1."""
    rows, columns = field(record, R), field(record, C)
    unit_rows, unit_columns = units_of(record, rows, columns)
    of_rows = index + tl.load(record + ROW_TABLE) + (2 * field(record, GROUPS) + group) * rows
    of_columns = index + tl.load(record + COLUMN_TABLE) + (2 * field(record, GROUPS) + group) * columns
    n_r = tl.load(of_rows + row, mask=row < unit_rows, other=0)
    return n_r, tl.load(of_columns + column, mask=column < unit_columns, other=0)


@triton.jit
def roots_pass(
    roots, lists, records, grads, buffers, hyper, sums, norms, flags, coordinates, root_grad,
    ratio, raw, factors, count, units,
    GATHER: tl.constexpr, MOVE: tl.constexpr, NORMS: tl.constexpr, SPREAD: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr, MAX_RATIO: tl.constexpr, MAX_DRIFT: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr, ROOTS: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATHER: the inverse chain rule, q(r)/v. MOVE: momentum, path ratio, guards, factors of all units of a root.

    Apart only when another optimizer moves v in between: its change is what is at the entry. Momentum of a trained
    skeleton path lies at its entry in the buffer of the parameter. A guard of 0 is none.

    `factors` is (3, 2, H + 1), for a unit as tail and as head: 1/Ĩ and 1/Õ, which `walk_pass` has written; m = 1/(R·c)
    and c, where c is the scale that spreads R, or 1; and R twice, for skeleton weights: a free one becomes w·m·m·R,
    in(r) too.
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
        sign = tl.load(hyper + group * HYPER + SIGN).to(ACC)
        d = sign * (w * g - tl.sum(behind, 1))
        if NORMS:
            d /= tl.load(norms + tl.load(root + ROOT_NORM, mask=exists, other=0))
        d /= value
        tl.store(root_grad + unit, d, mask=exists)
    else:
        d = -tl.load(tl.load(buffers + slot).to(tl.pointer_type(ACC)) + offset, mask=exists, other=0.0)
    if MOVE:
        go = at < (tl.where(tl.load(flags + SKIP) == 0, count, 0) if GATHER else count)
        if HAS_MOMENTUM:
            momentum = tl.load(hyper + group * HYPER + MOMENTUM).to(ACC)
            buffer = tl.load(buffers + slot).to(tl.pointer_type(DTYPE)) + offset
            old = tl.load(buffer, mask=exists & (momentum != 0), other=0.0).to(ACC)
            new = (momentum * old + d).to(DTYPE)
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
        c = tl.full([ROOTS], 1.0, ACC)
        if SPREAD:
            c = 1 / tl.sqrt(tl.abs(r))
        start = tl.load(root + MEMBER, mask=exists, other=0)
        length = tl.load(root + MEMBERS, mask=exists, other=0).to(tl.int32)
        nothing = tl.zeros([ROOTS, AT_ONCE], ACC)
        for k in range(0, tl.max(length, 0), AT_ONCE):
            step = k + tl.arange(0, AT_ONCE)
            there = step[None, :] < length[:, None]
            to = factors + 2 * units + tl.load(lists + start[:, None] + step[None, :], mask=there, other=0)
            tl.store(to, (1 / (r * c))[:, None] + nothing, mask=there)
            tl.store(to + units, c[:, None] + nothing, mask=there)
            tl.store(to + 2 * units, r[:, None] + nothing, mask=there)
            tl.store(to + 3 * units, r[:, None] + nothing, mask=there)


@triton.jit
def _update(
    record, grad, buffer, slope, values, index, factors, norms, root_grad, group, row0, column0, units,
    WIDE: tl.constexpr, SHOW: tl.constexpr, GIVE: tl.constexpr,
    NORMS: tl.constexpr, TAPS: tl.constexpr, HAS_MOMENTUM: tl.constexpr, HAS_DECAY: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    rows, columns, lanes = field(record, R), field(record, C), field(record, LANES)
    down, across, steps = field(record, DOWN), field(record, ACROSS), field(record, STEPS)
    if WIDE:
        columns, lanes, column0 = even(columns, VECTOR), even(lanes, VECTOR), even(column0, VECTOR)
    g_address = tl.load(grad)
    start = tl.load(record + OFFSET) + (group * rows + row0).to(tl.int64) * columns + column0
    w_base = address_of(tl.load(record + WEIGHT), start, WIDE, DTYPE, VECTOR)
    g_base = address_of(g_address, start, WIDE, DTYPE, VECTOR)
    BUFFER: tl.constexpr = ACC if SHOW or GIVE else DTYPE
    b_base = address_of(tl.load(buffer), start, WIDE, BUFFER, VECTOR)
    s_base = address_of(tl.load(slope), start, WIDE, ACC, VECTOR)  # where ∂ℓ/∂v goes, if it is shown
    lr, momentum = tl.load(values + LR).to(ACC), tl.load(values + MOMENTUM).to(ACC)
    nesterov = tl.load(values + NESTEROV) != 0
    decay, sign = tl.load(values + DECAY).to(ACC), tl.load(values + SIGN).to(ACC)
    count_r, count_c = field(record, GROUPS) * rows, field(record, GROUPS) * columns
    row_table = index + tl.load(record + ROW_TABLE) + group * rows
    column_table = index + tl.load(record + COLUMN_TABLE) + group * columns
    unit_rows, unit_columns = units_of(record, rows, columns)
    g_rows, b_rows = tl.where((g_address != 0) & (not GIVE), rows, 0), tl.where(momentum != 0, rows, 0)
    lane, line = tl.arange(0, WIDTH), tl.arange(0, ROWS)
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
        if NORMS and not GIVE:
            n_r, n_c = norm_places(record, index, group, row, column)
            if TAPS:  # rows with a norm for each tap: the sum of two places
                g *= tl.load(norms + n_r[:, None] + n_c[None, :])
            else:
                e_r, e_c = i_r * tl.load(norms + n_r), i_c * tl.load(norms + n_c)
        d = g * (e_r[:, None] * e_c[None, :])
        by_row, by_column = entry_r[:, None] == column[None, :], entry_c[None, :] == row[:, None]
        if HAS_DECAY or SHOW or GIVE:
            v = w * ((1 / i_r)[:, None] * (1 / i_c)[None, :])
        if SHOW:
            # Trained skeleton entries as changes: 0, and the gradient of their path. Heads alone have one.
            q_r = tl.load(root_grad + id_r - units, mask=id_r >= units, other=0.0)
            q_c = tl.load(root_grad + id_c - units, mask=id_c >= units, other=0.0)
            d = tl.where(by_row, q_r[:, None], tl.where(by_column, q_c[None, :], d))
            tl.store(b_base + offset, tl.where(by_row | by_column, 0.0, v), mask=(row < rows)[:, None] & there[None, :])
            tl.store(s_base + offset, d, mask=(row < rows)[:, None] & there[None, :])
        else:
            if HAS_DECAY:
                d += decay * v
            if GIVE:
                d = v - tl.load(b_base + offset, mask=(row < rows)[:, None] & there[None, :], other=0.0)
            if HAS_MOMENTUM:
                old = tl.load(b_base + offset, mask=(row < b_rows)[:, None] & there[None, :], other=0.0).to(ACC)
                new = (momentum * old + d).to(DTYPE)
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


@triton.jit
def update_pass(
    chunks, records, grads, buffers, slopes, hyper, index, factors, norms, flags, root_grad, units,
    SHOW: tl.constexpr, GIVE: tl.constexpr,
    NORMS: tl.constexpr, TAPS: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    HAS_DECAY: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """w ← (w − lr·d·i)·m with i = 1/(Ĩ·Õ), d the direction of ∂ℓ/∂v = g·n·i; skeleton entries by their own factors.

    SHOW: writes v into the buffers and ∂ℓ/∂v into the slopes. GIVE: w from what the buffers hold then. Chunks
    are taken from the last to the first: what `flow_pass` read last is still in the cache.
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
    if (SHOW or GIVE or (tl.load(flags + SKIP) == 0)) & ((tl.load(record + UNIT) != 0) | (tl.load(grads + slot) != 0)):
        if tl.load(record + EVEN) != 0:
            _update(
                record, grads + slot, buffers + slot, slopes + slot, values,
                index, factors, norms, root_grad, group, row0, column0, units,
                WIDE, SHOW, GIVE, NORMS, TAPS, HAS_MOMENTUM, HAS_DECAY, DTYPE, ACC, ROWS, WIDTH,
            )  # fmt: skip
        else:
            _update(
                record, grads + slot, buffers + slot, slopes + slot, values,
                index, factors, norms, root_grad, group, row0, column0, units,
                False, SHOW, GIVE, NORMS, TAPS, HAS_MOMENTUM, HAS_DECAY, DTYPE, ACC, ROWS, WIDTH,
            )  # fmt: skip
