/* The passes of kernels.py for a CPU: same tables and chunks, REAL is float or double.
 *
 * Chunks are shared out among threads; no sum depends on how. See tables.py for the tables and kernels.py for the passes. */

#include <math.h>

/* In front of this file come Plan, from PLAN in native.py, and from LAYOUT in tables.py indices into records, headers and tables
 * (WEIGHT, GRAD, LR ...) with the number of columns of each (RECORD, HYPER, FOLD ...). A bound of 0 is none. */
enum { WIDEST = 4096, AHEAD = 32 }; /* columns whose factors stay in the nearest cache; entries asked for ahead */

typedef struct {
    const int64_t *record;
    const REAL *g;
    REAL *w, *b;
    int64_t group, row0, rows, column0, columns, stride; /* this chunk, and the length of a row in memory */
} Chunk;

static Chunk chunk_at(const Plan *p, const int64_t *header, int64_t i)
{
    const int32_t *c = p->chunks + 4 * i;
    const int64_t *r = p->params + c[0] * RECORD, *h = header + r[SLOT];
    Chunk k = {.record = r, .group = c[1], .row0 = c[2], .column0 = c[3], .stride = r[COLUMNS]};
    int64_t start = r[OFFSET] + (k.group * r[ROWS] + k.row0) * r[COLUMNS] + k.column0;
    k.rows = r[ROWS] - k.row0 < r[CHUNK_ROWS] ? r[ROWS] - k.row0 : r[CHUNK_ROWS];
    k.columns = r[COLUMNS] - k.column0 < r[CHUNK_COLUMNS] ? r[COLUMNS] - k.column0 : r[CHUNK_COLUMNS];
    k.w = (REAL *)r[WEIGHT] + start;
    k.g = h[GRAD] ? (const REAL *)h[GRAD] + start : 0;
    k.b = h[BUFFER * p->slots] ? (REAL *)h[BUFFER * p->slots] + start : 0;
    return k;
}

/* s += Σ over rows of w·g, four rows at a time: s is read and written that much less often. */
static void add_products(REAL *restrict s, const REAL *restrict w, const REAL *restrict g, int64_t stride, int64_t rows, int64_t n)
{
    int64_t a = 0;
    for (; a + 4 <= rows; a += 4, w += 4 * stride, g += 4 * stride)
        for (int64_t j = 0; j < n; j++)
            s[j] += (w[j] * g[j] + w[j + stride] * g[j + stride])
                + (w[j + 2 * stride] * g[j + 2 * stride] + w[j + 3 * stride] * g[j + 3 * stride]);
    for (; a < rows; a++, w += stride, g += stride)
        for (int64_t j = 0; j < n; j++) s[j] += w[j] * g[j];
}

/* Sum over n numbers in each of some rows; rows that follow each other are one. */
static REAL sum_of(const REAL *x, int64_t stride, int64_t rows, int64_t n)
{
    REAL s = 0;
    if (n == stride) {
        n *= rows;
        rows = 1;
    }
    for (int64_t a = 0; a < rows; a++, x += stride) {
#pragma omp simd reduction(+ : s)
        for (int64_t j = 0; j < n; j++) s += x[j];
    }
    return s;
}

static REAL dot(const REAL *x, const REAL *y, int64_t n)
{
    REAL s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t j = 0; j < n; j++) s += x[j] * y[j];
    return s;
}

/* Partial sums of one chunk, of w·g and of squares before a BatchNorm; whether they are finite, which they are only if every
 * gradient is. */
static int flow(const Plan *p, const int64_t *header, int64_t i)
{
    const Chunk k = chunk_at(p, header, i);
    const int64_t *r = k.record, period = r[PERIOD];
    const int swap = r[SWAP] != 0;
    REAL *on_columns = r[swap ? NORMAL : FLOW]
        ? p->partial + r[COLUMN_OUT] + k.row0 / r[CHUNK_ROWS] * r[COLUMN_STRIDE] + k.group * r[COLUMNS] + k.column0 : 0;
    REAL *on_rows = r[swap ? FLOW : NORMAL]
        ? p->partial + r[ROW_OUT] + k.column0 / r[CHUNK_COLUMNS] * r[ROW_STRIDE] + (k.group * r[ROWS] + k.row0) * period : 0;
    REAL check = 0;
    for (int64_t j = 0; j < k.columns && on_columns; j++) on_columns[j] = 0;
    if (on_columns && !swap && k.g) add_products(on_columns, k.w, k.g, k.stride, k.rows, k.columns);
    for (int64_t a = 0; a < k.rows && (on_rows || swap); a++) {
        const REAL *w = k.w + a * k.stride;
        for (int64_t j = 0; j < k.columns && on_columns && swap; j++) on_columns[j] += w[j] * w[j];
        if (!on_rows) continue;
        REAL *s = on_rows + a * period;
        if (swap) {
            s[0] = k.g ? dot(w, k.g + a * k.stride, k.columns) : 0;
            check += s[0];
        } else if (period == 1) {
            s[0] = dot(w, w, k.columns);
        } else {
            for (int64_t t = 0; t < period; t++) s[t] = 0;
            for (int64_t j = 0; j < k.columns; j += period)
                for (int64_t t = 0; t < period; t++) s[t] += w[j + t] * w[j + t];
        }
    }
    if (k.g && !r[FLOW]) check += sum_of(k.g, k.stride, k.rows, k.columns);
    if (on_columns && !swap) check += sum_of(on_columns, k.columns, 1, k.columns);
    return isfinite(check);
}

/* Skeleton entries lie far apart in memory: asked for ahead, they come together. */
static void fetch(const REAL *w, const REAL *g, int64_t at)
{
    if (at >= 0) {
        __builtin_prefetch(w + at);
        if (g) __builtin_prefetch(g + at);
    }
}

static void fold(const Plan *p, const int64_t *header, int64_t i)
{
    const int64_t *f = p->folds + i * FOLD, count = f[COUNT], taps = f[TAPS], stride = f[STRIDE];
    const int64_t first = f[FIRST], end = f[END], edges = f[EDGES];
    const REAL *w = (const REAL *)f[FOLD_WEIGHT], *g = (const REAL *)header[f[FOLD_SLOT]];
    REAL *restrict total = (edges < 0 ? p->norms : p->sums) + f[TARGET];
    for (int64_t item = first; item < end && edges >= 0; item++) fetch(w, g, p->free[edges + item]);
    for (int64_t item = first; item < end; item++) total[item] = 0;
    for (int64_t q = 0; q < count; q += taps) {
        const REAL *restrict part = p->partial + f[SOURCE] + q / taps * stride;
        if (taps == 1)
            for (int64_t item = first; item < end; item++) total[item] += part[item];
        else
            for (int64_t item = first; item < end; item++)
                for (int64_t t = 0; t < taps; t++) total[item] += part[item * taps + t];
    }
    for (int64_t item = first; item < end; item++) {
        if (edges < 0) {
            total[item] = (REAL)sqrt((double)total[item]);
        } else {
            const int64_t edge = p->free[edges + item];
            total[item] -= edge >= 0 && g ? w[edge] * g[edge] : 0;
        }
    }
}

/* Ĩ and Õ: products of skeleton weights over their references along the walks to ground, nearest to ground first.
 * Returns whether no skeleton weight is 0. */
static int measure(const Plan *p)
{
    const int64_t n = 2 * p->n_units;
    int sound = 1;
    for (int64_t i = 0; i < n; i++) {
        const int64_t u = p->order[i], *e = p->skeleton + u * ENTRY;
        const REAL *w = (const REAL *)e[ADDRESS];
        for (int64_t k = i; i % AHEAD == 0 && k < i + AHEAD && k < n; k++)
            __builtin_prefetch((const void *)p->skeleton[p->order[k] * ENTRY + ADDRESS]);
        double x = 1;
        if (w) {
            x = (double)*w / p->reference[u] * p->products[e[FOLLOWING]];
            sound &= *w != 0;
        }
        p->products[u] = x;
        p->coordinates[u] = (REAL)x;
    }
    return sound;
}

static void gather(const Plan *p, const int64_t *header, const double *hyper)
{
    const REAL *in = p->coordinates, *out = in + p->n_units;
    for (int64_t i = 0; i < p->n_roots; i++) {
        const int64_t *root = p->roots + i * ROOT, *r = p->params + root[ROOT_PARAM] * RECORD, at = root[ROOT_OFFSET];
        const REAL *w = (const REAL *)r[WEIGHT], *g = (const REAL *)header[r[SLOT]];
        for (int64_t k = i; i % AHEAD == 0 && k < i + AHEAD && k < p->n_roots; k++) {
            const int64_t *next = p->roots + k * ROOT, *of = p->params + next[ROOT_PARAM] * RECORD;
            fetch((const REAL *)of[WEIGHT], (const REAL *)header[of[SLOT]], next[ROOT_OFFSET]);
        }
        const REAL norm = p->normalized ? p->norms[root[ROOT_NORM]] : 1, s = g ? w[at] * g[at] : 0;
        REAL behind = 0;
        for (int64_t k = 0; k < root[LENGTH]; k++) behind += p->sums[p->lists[root[START] + k]];
        const REAL sign = (REAL)hyper[root[ROOT_GROUP] * HYPER + SIGN];
        p->root_grad[root[ROOT_UNIT]] = sign * (s - behind) / norm / (in[root[ROOT_UNIT]] * out[root[ROOT_UNIT]]);
    }
}

/* Momentum of a trained skeleton path lies at its entry in the buffer of the parameter; what an optimizer has made of its
 * change, if that is `given`, in the shown value. */
static void move(const Plan *p, const int64_t *header, const double *hyper, int given)
{
    const REAL *in = p->coordinates, *out = in + p->n_units;
    for (int64_t i = 0; i < p->n_roots; i++) {
        const int64_t *root = p->roots + i * ROOT, u = root[ROOT_UNIT], slot = p->params[root[ROOT_PARAM] * RECORD + SLOT];
        const double *h = hyper + root[ROOT_GROUP] * HYPER;
        REAL *buffer = (REAL *)header[BUFFER * p->slots + slot];
        REAL value = in[u] * out[u], d = given ? -buffer[root[ROOT_OFFSET]] : p->root_grad[u];
        if (buffer && h[MOMENTUM] != 0) {
            REAL *b = buffer + root[ROOT_OFFSET];
            *b = (REAL)h[MOMENTUM] * *b + d;
            d = h[NESTEROV] != 0 ? d + (REAL)h[MOMENTUM] * *b : *b;
        }
        REAL r = 1 - (REAL)h[LR] * d / value;
        p->raw[u] = r;
        if (p->max_ratio > 0) {
            REAL top = (REAL)p->max_ratio, bottom = (REAL)(1 / p->max_ratio);
            r = r > top ? top : r < bottom ? bottom : r;
        }
        if (p->max_drift > 0) {
            REAL far = (REAL)p->max_drift, near = (REAL)(1 / p->max_drift), size = value < 0 ? -value : value;
            REAL low = (size > near ? near : size) / size, high = (size < far ? far : size) / size;
            r = r < low ? low : r;
            r = r > high ? high : r;
        }
        p->ratio[u] = r;
    }
}

/* Factors of each unit as tail and as head. Returns whether products of four factors, a row's and a column's squared, are far
 * from the limits of REAL. */
static int factors(const Plan *p)
{
    const int64_t n = p->n_units;
    const REAL *restrict in = p->coordinates, *restrict out = in + n;
    const REAL far = sizeof(REAL) == 4 ? (REAL)1e8 : (REAL)1e70, near = 1 / far;
    REAL *restrict f = p->factors, *restrict c = f + 3 * n, *restrict rc = f + 5 * n;
    int tame = 1;
    for (int64_t u = 0; u < n; u++) {
        rc[u] = p->ratio[p->root[u]];
        c[u] = 1;
    }
    if (p->spread)
        for (int64_t u = 1; u < n; u++) c[u] = (REAL)(1 / sqrt(fabs((double)rc[u])));
#pragma omp simd reduction(& : tame)
    for (int64_t u = 0; u < n; u++) {
        const REAL a = in[u] < 0 ? -in[u] : in[u], b = out[u] < 0 ? -out[u] : out[u];
        tame &= (a > near) & (a < far) & (b > near) & (b < far);
        f[u] = 1 / in[u];
        f[n + u] = 1 / out[u];
        rc[u] *= c[u];
        f[2 * n + u] = 1 / rc[u];
        f[4 * n + u] = 1 / c[u];
    }
    return tame;
}

/* ∂ℓ/∂v along a row of a chunk, n of its entries from the first on; skeleton entries have no meaning. */
static void slopes(const Plan *p, const Chunk *k, int64_t row, int64_t first, int64_t n, REAL sign, REAL i_r,
    const REAL *restrict i_c, REAL *restrict d)
{
    const int64_t *r = k->record;
    const REAL *restrict g = k->g ? k->g + row * k->stride + first : 0;
    for (int64_t j = 0; j < n; j++) d[j] = g ? sign * g[j] * (i_r * i_c[j]) : 0;
    if (r[NORMAL]) {
        const int64_t base = p->units[r[ROW_TABLE] + 2 * r[GROUPS] * r[ROWS] + k->group * r[ROWS] + k->row0 + row];
        const int32_t *at = p->units + r[COLUMN_TABLE] + 2 * r[GROUPS] * r[COLUMNS] + k->group * r[COLUMNS] + k->column0 + first;
        for (int64_t j = 0; j < n; j++) d[j] *= p->norms[base + at[j]];
    }
}

enum { SHOW, STEP, GIVE }; /* v and ∂ℓ/∂v for an optimizer, 0 at skeleton entries; a step of SGD; shown values given to weights */

static void update(const Plan *p, const int64_t *header, const double *hyper, int64_t i, int mode, int tame)
{
    const Chunk k = chunk_at(p, header, i);
    const int64_t *r = k.record, unit = r[UNIT];
    const double *h = hyper + r[GROUP] * HYPER;
    const REAL lr = (REAL)h[LR], momentum = (REAL)h[MOMENTUM], decay = (REAL)h[DECAY], sign = (REAL)h[SIGN];
    const int nesterov = h[NESTEROV] != 0;
    const int64_t n = p->n_units, all_r = r[GROUPS] * r[ROWS], all_c = r[GROUPS] * r[COLUMNS];
    const int32_t *row_table = p->units + r[ROW_TABLE] + k.group * r[ROWS] + k.row0;
    const int32_t *column_table = p->units + r[COLUMN_TABLE] + k.group * r[COLUMNS] + k.column0;
    const int simple = mode == STEP && tame && k.g && decay == 0 && momentum == 0 && !r[NORMAL];
    REAL *slope = mode == SHOW ? (REAL *)header[PATH_GRAD * p->slots + r[SLOT]] + (k.w - (REAL *)r[WEIGHT]) : 0;
    if (!unit && !k.g) return;
    for (int64_t first = 0; first < k.columns; first += WIDEST) {
        const int64_t width = k.columns - first < WIDEST ? k.columns - first : WIDEST;
        REAL i_c[WIDEST], m_c[WIDEST], d[WIDEST], kept_c[WIDEST], kept_b[WIDEST], *const v_c = d;
        const int32_t *entry_c = column_table + all_c + first; /* row of the entry of each column, within the group */
        for (int64_t j = 0; j < width && unit; j++) {
            const int64_t a = entry_c[j] - k.row0;
            if (a >= 0 && a < k.rows) fetch(k.w + first, 0, a * k.stride + j);
        }
        for (int64_t j = 0; j < width; j++) {
            const int32_t id = unit ? column_table[first + j] : 0;
            i_c[j] = p->factors[id];
            m_c[j] = p->factors[2 * n + id];
        }
        for (int64_t j = 0; j < width && unit; j++) {
            const int64_t a = entry_c[j] - k.row0, at = a * k.stride + first + j;
            if (a >= 0 && a < k.rows) {
                kept_c[j] = k.w[at];
                if (k.b) kept_b[j] = k.b[at];
            }
        }
        if (simple)
            for (int64_t j = 0; j < width; j++) d[j] = i_c[j] * i_c[j] * m_c[j];
        if (mode != STEP)
            for (int64_t j = 0; j < width; j++) v_c[j] = p->coordinates[column_table[first + j]];
        for (int64_t a = 0; a < k.rows; a++) {
            const int32_t id = unit ? row_table[a] : 0;
            const int64_t at = a * k.stride + first, place = unit ? row_table[all_r + a] - k.column0 - first : -1;
            const int64_t entry = place < width ? place : -1; /* of this row, or -1 */
            const REAL i_r = p->factors[id], m_r = p->factors[2 * n + id], v_r = p->coordinates[id];
            REAL *restrict w = k.w + at, *restrict b = k.b + at;
            const REAL kept = entry >= 0 ? w[entry] : 0, kept_here = entry >= 0 && k.b ? b[entry] : 0;
            if (simple) {
                const REAL *restrict g = k.g + at, step = lr * sign * i_r * i_r * m_r;
                for (int64_t j = 0; j < width; j++) w[j] = m_r * m_c[j] * w[j] - step * d[j] * g[j];
            } else if (mode == SHOW) {
                for (int64_t j = 0; j < width; j++) b[j] = w[j] * (v_r * v_c[j]);
                slopes(p, &k, a, first, width, sign, i_r, i_c, slope + at);
                if (entry >= 0) b[entry] = slope[at + entry] = 0;
            } else if (mode == GIVE) {
                for (int64_t j = 0; j < width; j++)
                    w[j] = (w[j] + (b[j] - w[j] * (v_r * v_c[j])) * (i_r * i_c[j])) * (m_r * m_c[j]);
            } else {
                slopes(p, &k, a, first, width, sign, i_r, i_c, d);
                if (decay != 0)
                    for (int64_t j = 0; j < width; j++) d[j] += decay * (w[j] / (i_r * i_c[j]));
                if (momentum != 0) {
                    for (int64_t j = 0; j < width; j++) b[j] = momentum * b[j] + d[j];
                    for (int64_t j = 0; j < width; j++) d[j] = nesterov ? d[j] + momentum * b[j] : b[j];
                    if (entry >= 0) b[entry] = kept_here;
                }
                for (int64_t j = 0; j < width; j++) w[j] = (w[j] - lr * d[j] * (i_r * i_c[j])) * (m_r * m_c[j]);
            }
            if (entry >= 0 && mode != SHOW) w[entry] = kept * (p->factors[4 * n + id] * m_c[entry]);
        }
        for (int64_t j = 0; j < width && unit; j++) {
            const int64_t a = entry_c[j] - k.row0, at = a * k.stride + first + j;
            if (a < 0 || a >= k.rows) continue;
            if (mode == SHOW) {
                k.b[at] = slope[at] = 0;
            } else {
                k.w[at] = kept_c[j] * (p->factors[2 * n + row_table[a]] * p->factors[4 * n + column_table[first + j]]);
                if (k.b) k.b[at] = kept_b[j];
            }
        }
    }
}

static void updates(const Plan *p, const int64_t *header, const double *hyper, int mode, int tame)
{
#pragma omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)
    for (int64_t i = p->n_chunks - 1; i >= 0; i--) update(p, header, hyper, i, mode, tame); /* what was read last is cached */
}

/* Coordinates and root gradients, and what is to be shown: at once, but for rows before a BatchNorm, which wait for their norms.
 * The result is 0 if a sum of w·g is not finite, -1 if a path has no value to divide by. */
static int observe(const Plan *p, const int64_t *header, const double *hyper, int shown)
{
    int finite = 1;
    if (!measure(p)) return -1;
    for (int64_t u = 0; u < 2 * p->n_units && shown; u++) p->factors[u] = 1 / p->coordinates[u];
#pragma omp parallel for schedule(static) reduction(& : finite) num_threads(p->threads) if (p->threads > 1)
    for (int64_t i = 0; i < p->n_chunks; i++) {
        finite &= flow(p, header, i);
        if (shown && !p->params[p->chunks[4 * i] * RECORD + NORMAL]) update(p, header, hyper, i, SHOW, 0);
    }
    if (!finite) return 0;
#pragma omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)
    for (int64_t i = 0; i < p->n_folds; i++) fold(p, header, i);
#pragma omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)
    for (int64_t i = 0; i < (shown && p->normalized ? p->n_chunks : 0); i++)
        if (p->params[p->chunks[4 * i] * RECORD + NORMAL]) update(p, header, hyper, i, SHOW, 0);
    gather(p, header, hyper);
    return 1;
}

/* One step; nothing moves unless the result is 1. */
int step(const Plan *p, const int64_t *header, const double *hyper)
{
    const int found = observe(p, header, hyper, 0);
    if (found != 1) return found;
    move(p, header, hyper, 0);
    updates(p, header, hyper, STEP, factors(p));
    return 1;
}

/* Writes v and ∂ℓ/∂v for an optimizer. Trained skeleton entries are shown as changes: 0, and the gradient of their path. */
int show(const Plan *p, const int64_t *header, const double *hyper)
{
    const int found = observe(p, header, hyper, 1);
    for (int64_t i = 0; i < p->n_roots; i++) {
        const int64_t *root = p->roots + i * ROOT, slot = p->params[root[ROOT_PARAM] * RECORD + SLOT];
        ((REAL *)header[PATH_GRAD * p->slots + slot])[root[ROOT_OFFSET]] = p->root_grad[root[ROOT_UNIT]];
    }
    return found;
}

/* Gives what it has made of v to the weights. */
int give(const Plan *p, const int64_t *header, const double *hyper)
{
    move(p, header, hyper, 1);
    updates(p, header, hyper, GIVE, factors(p));
    return 1;
}
