"""A network as tables of integers, for kernels that work on all parameters in one launch.

A parameter in memory is a stack of matrices `(group, row, column)`, with units on rows and on columns: a linear or
convolution weight has its heads on rows and its tails on columns; a weight stored (in, out) the other way round; taps
lie on columns, or on rows where channels come last. The kernels read this from one record per parameter, and work on
the matrices chunk by chunk. What a record holds, and in what order, is written down here alone: C and Triton take their
indices from `LAYOUT`.

| table | rows | columns |
|---|---|---|
| params | parameters | `LAYOUT["RECORD"]` |
| chunks | programs of the two passes | parameter, group, first row, first column |
| folds | programs of the fold | `LAYOUT["FOLD"]`: edges is −1 for norms; address and slot of the parameter |
| units | rows of each parameter; columns | units; skeleton entries (the column of a row, the row of a column, or −1); \
row norms (the sum over row and column is an index; index 0 is a norm of 1) |
| free | inputs of parameters | offset of the free entry (−1 if none) |
| roots | roots | `LAYOUT["ROOT"]`: its part of the first list; parameter, offset, norm, group of in(r); of the second |
| lists | – | which sums lie behind each root; the units of each root |
| skeleton | in(u) of every unit, then out(u) | address (0 for ground), where the walk to ground goes on |
| reference | the same | what their values are divided by, float64 |
"""

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from gspace.optim.plan import Layer, Plan

LAYOUT = {
    "RECORD": (
        "weight slot offset groups rows columns lanes steps down across row_table column_table column_out "
        "column_stride row_out row_stride period swap flow normal group unit chunk_rows chunk_columns even"
    ).split(),
    "HYPER": "lr momentum nesterov decay sign".split(),  # of a parameter group, float64
    "HEADER": "grad buffer path_grad".split(),  # of a parameter, new at every step; the last two where values are shown
    "FOLD": "source count taps stride first end target edges fold_weight fold_slot".split(),
    "ROOT": "root_unit start length root_param root_offset root_norm root_group member members".split(),
    "ENTRY": "address following".split(),
}
RECORD = LAYOUT["RECORD"]
Record = dict[str, int]
# A program of the fold takes that many times more items if each is the sum of only a few.
FEW, MORE = 4, 16


class Tile(NamedTuple):
    """Work of one program: `loops` tiles of rows × width, side by side or one below the other.

    On a GPU `warps` threads of 32 share it, with at most `registers` each, or a third more with momentum: with more,
    too few programs would be on a processor to hide the latency of memory. One of the fold adds up `fold` sums.
    """

    rows: int = 16
    width: int = 128
    loops: int = 4
    warps: int = 4
    registers: int = 96
    fold: int = 32


class Tables(NamedTuple):
    params: Tensor
    chunks: Tensor
    folds: Tensor
    units: Tensor
    free: Tensor
    roots: Tensor
    lists: Tensor
    skeleton: Tensor
    reference: Tensor


class Matrix(NamedTuple):
    """A parameter as it lies in memory, `groups` matrices of `rows` × `columns`.

    Attributes:
        swap: Tails on rows and heads on columns.
        row_div: Rows per unit: the taps, if they lie on rows.
        column_div: Columns per unit.
    """

    groups: int
    rows: int
    columns: int
    swap: bool
    row_div: int
    column_div: int


def as_matrix(view: Tensor) -> Matrix | None:
    """The matrices that the view `(group, out, in, *taps)` of a parameter fills densely; None if it does not.

    Where several orders fit, the one with the longest rows: a bias is one row.
    """
    groups, out, into = view.shape[:3]
    taps, t = range(3, view.dim()), math.prod(view.shape[3:])
    orders = [
        (Matrix(groups, out, into * t, False, 1, t), (0, 1, 2, *taps)),
        (Matrix(groups, out * t, into, False, t, 1), (0, 1, *taps, 2)),
        (Matrix(groups, into, out * t, True, 1, t), (0, 2, 1, *taps)),
        (Matrix(groups, into * t, out, True, t, 1), (0, 2, *taps, 1)),
    ]
    longest = sorted(orders, key=lambda order: -order[0].columns)
    return next((matrix for matrix, order in longest if view.permute(order).is_contiguous()), None)


class Builder:
    """Fills the tables, parameter by parameter, and counts the `partials`, `sums` and `norms` there are to be."""

    def __init__(self, tile: Tile, units: int) -> None:
        self.tile, self.units = tile, units
        self.params: list[list[int]] = []
        self.chunks: list[tuple[int, int, int, int]] = []
        self.index: list[Tensor] = []
        self.free: list[Tensor] = []
        self.folds: list[list[int]] = []
        self.tails: list[Tensor] = []
        self.owners: list[tuple[int, int, int, int]] = []  # of skeleton entries: how many, parameter, address, bytes
        self.entries: list[tuple[Tensor, Tensor, Tensor]] = []  # root, offset, norm
        self.slots = self.indices = self.partials = self.sums = 0
        self.norms = 1  # the first is 1

    def add_plain(self, parameter: Tensor, group: int) -> None:
        """A parameter that touches no unit, any dense tensor: rows as wide as a tile, and one with the rest."""
        width, n = self.tile.width, parameter.numel()
        common = {"weight": parameter.data_ptr(), "slot": self.slots, "group": group}
        for rows, columns, offset in ((n // width, width, 0), (1, n % width, n // width * width)):
            if rows * columns:
                shape = {"rows": rows, "columns": columns, "lanes": width, "offset": offset}
                self._add(common | shape, 1, parameter, across=False)
        self.slots += 1

    def add_layer(self, layer: Layer, weight: Tensor, group: int) -> None:
        e, matrix = layer.edges, as_matrix(layer.edges.view(weight))
        if matrix is None:
            raise ValueError(f"{e.name} is not dense in memory")
        head, tail = e.head.cpu().reshape(-1), e.tail.cpu().reshape(-1)
        norm_rows, norm_columns, norms = self._norm_places(matrix, e.normalized)
        root = layer.at.root.cpu()
        offset = torch.zeros_like(root)  # of skeleton entries from the first element, in memory
        for index, stride in zip(layer.entries, weight.stride(), strict=True):
            offset += index.cpu() * stride
        row, in_column = offset // matrix.columns, offset % matrix.columns
        column = row // matrix.rows * matrix.columns + in_column
        is_root = root > 0
        on_row = ~is_root if matrix.swap else is_root
        # Ids of heads follow those of tails: the kernels keep both kinds of factors in one vector.
        row_units, column_units = (tail, head + self.units) if matrix.swap else (head + self.units, tail)
        row_entry, column_entry = torch.full_like(norm_rows, -1), torch.full_like(norm_columns, -1)
        row_entry[row[on_row]] = in_column[on_row]
        column_entry[column[~on_row]] = row[~on_row] % matrix.rows
        row_table = self._put(row_units.repeat_interleave(matrix.row_div), row_entry, norm_rows)
        column_table = self._put(column_units.repeat_interleave(matrix.column_div), column_entry, norm_columns)
        period = matrix.column_div if e.normalized and not matrix.swap else 1
        record = {
            "weight": weight.data_ptr(),
            "slot": self.slots,
            "rows": matrix.rows,
            "columns": matrix.columns,
            "lanes": _multiple(self.tile.width, period),
            "period": period,
            "row_table": row_table,
            "column_table": column_table,
            "swap": matrix.swap,
            "flow": bool(tail.any()),
            "normal": e.normalized,
            "group": group,
            "unit": True,
        }
        # Sums along columns are kept in registers while tiles go down, sums along rows while they go across: that pays
        # where a row has a sum for every tap.
        k, record = self._add(record, matrix.groups, weight, across=period > 1)
        self.owners.append((len(offset), k, weight.data_ptr(), weight.element_size()))
        self.entries.append((root, offset, norm_rows[row] + norm_columns[column]))
        if e.normalized:
            self._fold(record, on_rows=not matrix.swap, items=norms, target=self.norms, edges=-1)
            self.norms += norms
        if record["flow"]:
            free = torch.full((len(tail),), -1)
            item = row // matrix.row_div if matrix.swap else column // matrix.column_div
            free[item[~is_root]] = offset[~is_root]
            self._fold(record, on_rows=matrix.swap, items=len(tail), target=self.sums, edges=self.sums)
            self.free.append(free)
            self.tails.append(tail)
            self.sums += len(tail)
        self.slots += 1

    def _add(self, given: Record, groups: int, parameter: Tensor, *, across: bool) -> tuple[int, Record]:
        """Cuts a parameter into chunks, reserves its partial sums and writes its record."""
        record = dict.fromkeys(RECORD, 0) | {"groups": groups, "period": 1} | given
        rows, columns, lanes = record["rows"], record["columns"], record["lanes"]
        # 16 bytes at a time, if every row and every tile begins at a multiple.
        even = all(x * parameter.element_size() % 16 == 0 for x in (columns, lanes, record["offset"]))
        fits = -(-columns // lanes) if across else -(-rows // self.tile.rows)
        steps = max(1, min(self.tile.loops, fits))
        chunk_rows, chunk_columns = self.tile.rows * (1 if across else steps), lanes * (steps if across else 1)
        down, over = -(-rows // chunk_rows), -(-columns // chunk_columns)
        row_width, column_width = groups * rows * record["period"], groups * columns
        record |= {
            "steps": steps,
            "across": across,
            "down": not across,
            "chunk_rows": chunk_rows,
            "chunk_columns": chunk_columns,
            "column_out": self.partials,
            "column_stride": column_width,
            "row_out": self.partials + down * column_width,
            "row_stride": row_width,
            "even": even,
        }
        swap, flow, normal = record["swap"], record["flow"], record["normal"]
        if record["unit"]:
            self.partials += down * column_width + (over * row_width if normal or (swap and flow) else 0)
        k = len(self.params)
        self.chunks += product((k,), range(groups), range(0, rows, chunk_rows), range(0, columns, chunk_columns))
        self.params.append([int(record[name]) for name in RECORD])
        return k, record

    def _norm_places(self, matrix: Matrix, normalized: bool) -> tuple[Tensor, Tensor, int]:
        """Where norms are: an index per row and one per column of the matrix, to be added; how many there are."""
        rows, columns = (torch.zeros(matrix.groups * n, dtype=torch.long) for n in (matrix.rows, matrix.columns))
        if not normalized:
            return rows, columns, 0
        if matrix.swap:
            return rows, self.norms + torch.arange(len(columns)), len(columns)
        period = matrix.column_div
        norms = torch.arange(self.norms, self.norms + len(rows) * period, period)
        return norms, torch.arange(len(columns)) % period, len(rows) * period

    def _fold(self, record: Record, *, on_rows: bool, items: int, target: int, edges: int) -> None:
        side, extent = ("row", "columns") if on_rows else ("column", "rows")
        parts = -(-record[extent] // record[f"chunk_{extent}"])
        source, stride = record[f"{side}_out"], record[f"{side}_stride"]
        taps = stride // items
        count = parts * taps
        size = self.tile.fold * (MORE if count <= FEW else 1)
        for first in range(0, items, size):
            span = (first, min(first + size, items))
            self.folds.append([source, count, taps, stride, *span, target, edges, record["weight"], record["slot"]])

    def _put(self, *vectors: Tensor) -> int:
        start = self.indices
        self.indices += sum(map(len, vectors))
        self.index += vectors
        return start

    def finish(self, plan: Plan, unit_group: Tensor) -> Tables:
        root = plan.root.cpu()
        nothing = torch.empty(0, dtype=torch.long)
        order, start, length = _by_root(root[torch.cat([nothing, *self.tails])], len(root))
        members, first, count = _by_root(root, len(root))
        many, k, address, size = torch.tensor(self.owners, dtype=torch.long).reshape(-1, 4).unbind(1)
        unit, offset, norm = (torch.cat([nothing, *some]) for some in zip(*self.entries, strict=True))
        k, address, size = (x.repeat_interleave(many) for x in (k, address, size))
        addresses = torch.cat([torch.zeros(1, dtype=torch.long), address + offset * size])
        found = torch.stack([unit, k, offset, norm], 1)[unit > 0]
        u, *where = found[found[:, 0].argsort()].unbind(1)
        roots = torch.stack([u, start[u], length[u], *where, unit_group[u], len(order) + first[u], count[u]], 1)
        return Tables(
            params=torch.tensor(self.params),
            chunks=torch.tensor(self.chunks, dtype=torch.int32).reshape(-1, 4),
            # The first program of the fold also decides whether the step is taken: there is always one.
            folds=torch.tensor(self.folds or [[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]),
            units=torch.cat([nothing, *self.index]).int(),
            free=torch.cat([nothing, *self.free]),
            roots=roots,
            lists=torch.cat([order, members]).int(),
            skeleton=torch.stack([addresses[plan.place.cpu()], plan.following.cpu()], 1),
            reference=plan.reference.cpu(),
        )


def _by_root(root: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places ordered by the root that each has, without ground's, and where those of each root start, and how many."""
    order = root.argsort(stable=True)
    order = order[root[order] > 0]
    length = torch.bincount(root[order], minlength=n)
    return order, length.cumsum(0) - length, length


def _multiple(width: int, period: int) -> int:
    """The most lanes of a tile that hold whole periods, a multiple of 4 where possible: 16-byte loads stay aligned."""
    wide = math.lcm(period, 4)
    return width // wide * wide or width // period * period
