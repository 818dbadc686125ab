/* The passes of kernels.py for a CPU: same tables and chunks, REAL is float or double.
 *
 * Chunks are shared out among threads; no sum depends on how. See tables.py for the tables and kernels.py for the passes. */

#include <math.h>
#include <stdint.h>

/* Indices into records, headers and tables (WEIGHT, GRAD, LR ...) come in front of this file, from LAYOUT in tables.py, and with
 * them the number of columns of each (RECORD, HYPER, FOLD ...). */
enum { WIDEST = 8192, LONG = 2048, AHEAD = 32 };

typedef struct {
    const int64_t *params, *folds, *free, *roots, *skeleton; /* the order of TABLES and SCRATCH in native.py */
    const int32_t *chunks, *units, *lists;
    const double *reference;
    const int32_t *root, *order;
    REAL *partial, *norms, *sums, *factors, *root_grad, *coordinates, *ratio, *raw, *squares;
    double *products;
    int64_t n_chunks, n_folds, norm_folds, n_roots, n_units, slots;
    int64_t paper, normalized, spread, threads;
    double max_ratio, max_drift, max_norm; /* 0: none */
} Plan;

typedef struct {
    const int64_t *record;
    const REAL *g;
    REAL *w, *b;
    int fresh;
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
    k.fresh = h[FRESH * p->slots] != 0;
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

/* w ← m·shrink·w − step·scale·g for four rows, or one. */
static void move_four(REAL *restrict w, const REAL *restrict g, int64_t stride, int64_t n, const REAL *restrict shrink,
    const REAL *restrict scale, const REAL *m, const REAL *step)
{
    REAL *restrict w1 = w + stride, *restrict w2 = w1 + stride, *restrict w3 = w2 + stride;
    const REAL *restrict g1 = g + stride, *restrict g2 = g1 + stride, *restrict g3 = g2 + stride;
    const REAL m0 = m[0], m1 = m[1], m2 = m[2], m3 = m[3], s0 = step[0], s1 = step[1], s2 = step[2], s3 = step[3];
    for (int64_t j = 0; j < n; j++) {
        const REAL a = shrink[j], b = scale[j];
        w[j] = m0 * a * w[j] - s0 * b * g[j];
        w1[j] = m1 * a * w1[j] - s1 * b * g1[j];
        w2[j] = m2 * a * w2[j] - s2 * b * g2[j];
        w3[j] = m3 * a * w3[j] - s3 * b * g3[j];
    }
}

static void move_one(REAL *restrict w, const REAL *restrict g, int64_t n, const REAL *restrict shrink,
    const REAL *restrict scale, REAL m, REAL step)
{
    for (int64_t j = 0; j < n; j++) w[j] = m * shrink[j] * w[j] - step * scale[j] * g[j];
}

/* Row norms along one row of a chunk: at[j] indexes the columns. */
static const int32_t *norm_index(const Plan *p, const Chunk *k, int64_t row, int64_t *base)
{
    const int64_t *r = k->record;
    *base = p->units[r[ROW_TABLE] + 2 * r[GROUPS] * r[ROWS] + k->group * r[ROWS] + k->row0 + row];
    return p->units + r[COLUMN_TABLE] + 2 * r[GROUPS] * r[COLUMNS] + k->group * r[COLUMNS] + k->column0;
}

/* Partial sums of one chunk; whether they are finite, which they are only if every gradient is. */
static int flow(const Plan *p, const int64_t *header, int64_t i, int with_sums, int with_norms)
{
    Chunk k = chunk_at(p, header, i);
    const int64_t *r = k.record;
    const int swap = r[SWAP] != 0, sums = r[FLOW] && with_sums, squares = r[NORMAL] && with_norms;
    REAL *on_columns = (swap ? squares : sums)
        ? p->partial + r[COLUMN_OUT] + k.row0 / r[CHUNK_ROWS] * r[COLUMN_STRIDE] + k.group * r[COLUMNS] + k.column0 : 0;
    REAL *on_rows = (swap ? sums : squares)
        ? p->partial + r[ROW_OUT] + k.column0 / r[CHUNK_COLUMNS] * r[ROW_STRIDE] + (k.group * r[ROWS] + k.row0) * r[PERIOD] : 0;
    REAL check = 0;
    if (on_columns)
        for (int64_t j = 0; j < k.columns; j++) on_columns[j] = 0;
    for (int64_t a = 0; a < k.rows; a++) {
        const REAL *w = k.w + a * k.stride, *g = k.g ? k.g + a * k.stride : 0;
        if (on_columns && swap) {
            for (int64_t j = 0; j < k.columns; j++) on_columns[j] += w[j] * w[j];
        } else if (on_columns && g && with_sums && !with_norms && p->normalized) {
            int64_t base;
            const int32_t *at = norm_index(p, &k, a, &base);
            for (int64_t j = 0; j < k.columns; j++) on_columns[j] += w[j] * g[j] * p->norms[base + at[j]];
        } else if (on_columns && g && a == 0) {
            add_products(on_columns, w, g, k.stride, k.rows, k.columns);
        }
        if (on_rows && swap && g && with_sums && !with_norms && p->normalized) {
            int64_t base;
            const int32_t *at = norm_index(p, &k, a, &base);
            REAL s = 0;
#pragma omp simd reduction(+ : s)
            for (int64_t j = 0; j < k.columns; j++) s += w[j] * g[j] * p->norms[base + at[j]];
            on_rows[a] = s;
            check += s;
        } else if (on_rows && swap) {
            REAL s = 0;
            if (g) {
#pragma omp simd reduction(+ : s)
                for (int64_t j = 0; j < k.columns; j++) s += w[j] * g[j];
            }
            on_rows[a] = s;
            check += s;
        } else if (on_rows) {
            const int64_t period = r[PERIOD];
            REAL *s = on_rows + a * period;
            if (period == 1) {
                REAL total = 0;
#pragma omp simd reduction(+ : total)
                for (int64_t j = 0; j < k.columns; j++) total += w[j] * w[j];
                s[0] = total;
            } else {
                for (int64_t t = 0; t < period; t++) s[t] = 0;
                for (int64_t j = 0; j < k.columns; j += period)
                    for (int64_t t = 0; t < period; t++) s[t] += w[j + t] * w[j + t];
            }
        }
    }
    if (with_sums && k.g && !sums) check += sum_of(k.g, k.stride, k.rows, k.columns);
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
    for (int64_t item = first; item < end && edges >= 0; item++) fetch(w, g, p->free[(edges + item) * 2]);
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
            const int64_t *edge = p->free + (edges + item) * 2;
            const REAL s = edge[0] >= 0 && g ? w[edge[0]] * g[edge[0]] : 0;
            total[item] -= p->paper ? s * p->norms[edge[1]] : s;
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
        REAL behind = 0, norm = p->normalized ? p->norms[root[ROOT_NORM]] : 1;
        for (int64_t k = 0; k < root[LENGTH]; k++) behind += p->sums[p->lists[root[START] + k]];
        REAL s = g ? w[at] * g[at] : 0;
        if (p->paper) {
            s *= norm;
            norm = 1;
        }
        const REAL sign = (REAL)hyper[root[ROOT_GROUP] * HYPER + SIGN];
        p->root_grad[root[ROOT_UNIT]] = sign * (s - behind) / norm / (in[root[ROOT_UNIT]] * out[root[ROOT_UNIT]]);
    }
}

/* Momentum of a trained skeleton path lies at its entry in the buffer of the parameter; what an optimizer has made of its
 * change, if that is `given`, in the shown value. */
static void move(const Plan *p, const int64_t *header, const double *hyper, REAL shrink, int given)
{
    const REAL *in = p->coordinates, *out = in + p->n_units;
    for (int64_t i = 0; i < p->n_roots; i++) {
        const int64_t *root = p->roots + i * ROOT, u = root[ROOT_UNIT], slot = p->params[root[ROOT_PARAM] * RECORD + SLOT];
        const double *h = hyper + root[ROOT_GROUP] * HYPER;
        REAL *buffer = (REAL *)header[BUFFER * p->slots + slot];
        REAL value = in[u] * out[u], d = given ? -buffer[root[ROOT_OFFSET]] : p->root_grad[u] * shrink;
        if (buffer && h[MOMENTUM] != 0) {
            REAL *b = buffer + root[ROOT_OFFSET];
            *b = header[FRESH * p->slots + slot] ? d : (REAL)h[MOMENTUM] * *b + (REAL)(1 - h[DAMPENING]) * d;
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

/* v and ∂ℓ/∂v of one chunk, 0 at skeleton entries. */
static void show_chunk(const Plan *p, const int64_t *header, int64_t i)
{
    Chunk k = chunk_at(p, header, i);
    const int64_t *r = k.record, all_r = r[GROUPS] * r[ROWS], all_c = r[GROUPS] * r[COLUMNS];
    const int32_t *row_table = p->units + r[ROW_TABLE] + k.group * r[ROWS] + k.row0;
    const int32_t *column_table = p->units + r[COLUMN_TABLE] + k.group * r[COLUMNS] + k.column0;
    REAL *slope = (REAL *)header[PATH_GRAD * p->slots + r[SLOT]] + (k.w - (REAL *)r[WEIGHT]);
    for (int64_t first = 0; first < k.columns; first += WIDEST) {
        const int64_t width = k.columns - first < WIDEST ? k.columns - first : WIDEST;
        REAL v_c[WIDEST], i_c[WIDEST];
        for (int64_t j = 0; j < width; j++) {
            v_c[j] = p->coordinates[column_table[first + j]];
            i_c[j] = p->factors[column_table[first + j]];
        }
        for (int64_t a = 0; a < k.rows; a++) {
            const int64_t at = a * k.stride + first, id = row_table[a], entry = row_table[all_r + a] - k.column0 - first;
            const REAL *restrict w = k.w + at, *restrict g = k.g ? k.g + at : 0, v_r = p->coordinates[id], i_r = p->factors[id];
            REAL *restrict v = k.b + at, *restrict d = slope + at;
            for (int64_t j = 0; j < width; j++) v[j] = w[j] * (v_r * v_c[j]);
            if (g)
                for (int64_t j = 0; j < width; j++) d[j] = g[j] * (i_r * i_c[j]);
            else
                for (int64_t j = 0; j < width; j++) d[j] = 0;
            if (r[NORMAL]) {
                int64_t base;
                const int32_t *place = norm_index(p, &k, a, &base) + first;
                for (int64_t j = 0; j < width; j++) d[j] *= p->norms[base + place[j]];
            }
            if (entry >= 0 && entry < width) v[entry] = d[entry] = 0;
        }
        for (int64_t j = 0; j < width; j++) {
            const int64_t a = column_table[all_c + first + j] - k.row0;
            if (a >= 0 && a < k.rows) k.b[a * k.stride + first + j] = slope[a * k.stride + first + j] = 0;
        }
    }
}

enum { NORM, STEP, GIVE }; /* only the squares of ∂ℓ/∂v; a step of SGD; shown values given to weights */

static void update(const Plan *p, const int64_t *header, const double *hyper, int64_t i, int mode, int tame, REAL shrink)
{
    const int apply = mode != NORM;
    Chunk k = chunk_at(p, header, i);
    const int64_t *r = k.record;
    const double *h = hyper + r[GROUP] * HYPER;
    const REAL lr = (REAL)h[LR], momentum = (REAL)h[MOMENTUM], damped = (REAL)(1 - h[DAMPENING]), decay = (REAL)h[DECAY];
    const REAL sign = (REAL)h[SIGN] * (r[UNIT] ? shrink : 1);
    const int64_t n = p->n_units, all_r = r[GROUPS] * r[ROWS], all_c = r[GROUPS] * r[COLUMNS];
    const int32_t *row_table = p->units + r[ROW_TABLE] + k.group * r[ROWS] + k.row0;
    const int32_t *column_table = p->units + r[COLUMN_TABLE] + k.group * r[COLUMNS] + k.column0;
    double square = 0;
    p->squares[i] = 0;
    if (!r[UNIT] && (!k.g || !apply)) return;
    for (int64_t first = 0; first < k.columns; first += WIDEST) {
        const int64_t width = k.columns - first < WIDEST ? k.columns - first : WIDEST;
        REAL i_c[WIDEST], m_c[WIDEST], d[WIDEST], kept_c[WIDEST], kept_b[WIDEST], *const v_c = d;
        const int32_t *entry_c = column_table + all_c + first; /* row of the entry of each column, within the group */
        for (int64_t j = 0; j < width && r[UNIT]; j++) {
            const int64_t a = entry_c[j] - k.row0;
            if (a >= 0 && a < k.rows) fetch(k.w + first, 0, a * k.stride + j);
        }
        for (int64_t j = 0; j < width; j++) {
            const int32_t id = r[UNIT] ? column_table[first + j] : 0;
            i_c[j] = p->factors[id];
            m_c[j] = p->factors[2 * n + id];
        }
        for (int64_t j = 0; j < width && r[UNIT]; j++) {
            const int64_t a = entry_c[j] - k.row0;
            if (a >= 0 && a < k.rows) {
                kept_c[j] = k.w[a * k.stride + first + j];
                if (k.b) kept_b[j] = k.b[a * k.stride + first + j];
            }
        }
        const int simple = mode == STEP && tame && k.g && decay == 0 && momentum == 0 && !r[NORMAL];
        if (simple)
            for (int64_t j = 0; j < width; j++) d[j] = i_c[j] * i_c[j] * m_c[j];
        if (mode == GIVE)
            for (int64_t j = 0; j < width; j++) v_c[j] = p->coordinates[column_table[first + j]];
        for (int64_t a = 0; a < k.rows;) {
            /* Factors of long rows do not stay in the nearest cache: four rows share what is read of them. */
            const int64_t many = simple && width > LONG && a + 4 <= k.rows ? 4 : 1;
            REAL i_r[4], m_r[4], s_r[4], step[4], kept[4];
            int64_t entry[4];
            REAL *w = k.w + a * k.stride + first;
            const REAL *g = k.g ? k.g + a * k.stride + first : 0;
            for (int64_t b = 0; b < many; b++) {
                const int32_t id = r[UNIT] ? row_table[a + b] : 0;
                i_r[b] = p->factors[id];
                m_r[b] = p->factors[2 * n + id];
                s_r[b] = p->factors[4 * n + id];
                step[b] = lr * sign * i_r[b] * i_r[b] * m_r[b];
                /* The entry of a row: what it was before the row is written. */
                entry[b] = r[UNIT] ? row_table[all_r + a + b] - k.column0 - first : -1;
                kept[b] = entry[b] >= 0 && entry[b] < width ? w[b * k.stride + entry[b]] : 0;
            }
            if (many == 4) {
                move_four(w, g, k.stride, width, m_c, d, m_r, step);
            } else if (simple) {
                move_one(w, g, width, m_c, d, m_r[0], step[0]);
            } else if (mode == GIVE) {
                const REAL v_r = p->coordinates[row_table[a]], *restrict v = k.b + a * k.stride + first;
                for (int64_t j = 0; j < width; j++)
                    w[j] = (w[j] + (v[j] - w[j] * (v_r * v_c[j])) * (i_r[0] * i_c[j])) * (m_r[0] * m_c[j]);
            } else {
                for (int64_t j = 0; j < width; j++) d[j] = g ? sign * g[j] * (i_r[0] * i_c[j]) : 0;
                if (r[NORMAL]) {
                    int64_t base;
                    const int32_t *at = norm_index(p, &k, a, &base) + first;
                    for (int64_t j = 0; j < width; j++) d[j] *= p->norms[base + at[j]];
                }
                if (apply) {
                    if (decay != 0)
                        for (int64_t j = 0; j < width; j++) d[j] += decay * (w[j] / (i_r[0] * i_c[j]));
                    if (momentum != 0) {
                        REAL *restrict buffer = k.b + a * k.stride + first;
                        const int own = entry[0] >= 0 && entry[0] < width;
                        const REAL kept_here = own ? buffer[entry[0]] : 0;
                        if (k.fresh)
                            for (int64_t j = 0; j < width; j++) buffer[j] = d[j];
                        else
                            for (int64_t j = 0; j < width; j++) buffer[j] = momentum * buffer[j] + damped * d[j];
                        if (h[NESTEROV] != 0)
                            for (int64_t j = 0; j < width; j++) d[j] += momentum * buffer[j];
                        else
                            for (int64_t j = 0; j < width; j++) d[j] = buffer[j];
                        if (own) buffer[entry[0]] = kept_here;
                    }
                    for (int64_t j = 0; j < width; j++) w[j] = (w[j] - lr * d[j] * (i_r[0] * i_c[j])) * (m_r[0] * m_c[j]);
                } else {
                    if (entry[0] >= 0 && entry[0] < width) d[entry[0]] = 0;
                    for (int64_t j = 0; j < width; j++) square += entry_c[j] == k.row0 + a ? 0 : (double)d[j] * d[j];
                }
            }
            for (int64_t b = 0; b < many && apply; b++)
                if (entry[b] >= 0 && entry[b] < width) w[b * k.stride + entry[b]] = kept[b] * (s_r[b] * m_c[entry[b]]);
            a += many;
        }
        for (int64_t j = 0; j < width && apply && r[UNIT]; j++) {
            const int64_t a = entry_c[j] - k.row0;
            if (a >= 0 && a < k.rows) {
                k.w[a * k.stride + first + j] = kept_c[j] * (p->factors[2 * n + row_table[a]] * p->factors[4 * n + column_table[first + j]]);
                if (k.b) k.b[a * k.stride + first + j] = kept_b[j];
            }
        }
    }
    p->squares[i] = (REAL)square;
}

/* What is shown too needs no norms, or has them. */
static int flows(const Plan *p, const int64_t *header, int sums, int norms, int shown)
{
    int finite = 1;
#pragma omp parallel for schedule(static) reduction(& : finite) num_threads(p->threads) if (p->threads > 1)
    for (int64_t i = 0; i < p->n_chunks; i++) {
        finite &= flow(p, header, i, sums, norms);
        if (shown && (!norms || !p->params[p->chunks[4 * i] * RECORD + NORMAL])) show_chunk(p, header, i);
    }
    return finite;
}

static void folds(const Plan *p, const int64_t *header, int64_t first, int64_t end)
{
#pragma omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)
    for (int64_t i = first; i < end; i++) fold(p, header, i);
}

static void updates(const Plan *p, const int64_t *header, const double *hyper, int mode, int tame, REAL shrink)
{
#pragma omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)
    for (int64_t i = p->n_chunks - 1; i >= 0; i--) update(p, header, hyper, i, mode, tame, shrink); /* what was read last is cached */
}

/* Coordinates and root gradients. The result is 0 if a sum of w·g is not finite, -1 if a path has no value to divide by. */
static int observe(const Plan *p, const int64_t *header, const double *hyper, int shown)
{
    if (!measure(p)) return -1;
    if (shown || p->max_norm > 0)
        for (int64_t u = 0; u < 2 * p->n_units; u++) p->factors[u] = 1 / p->coordinates[u];
    if (p->paper) {
        flows(p, header, 0, 1, 0);
        folds(p, header, 0, p->norm_folds);
        if (!flows(p, header, 1, 0, shown)) return 0;
        folds(p, header, p->norm_folds, p->n_folds);
    } else {
        if (!flows(p, header, 1, 1, shown)) return 0;
        folds(p, header, 0, p->n_folds);
        for (int64_t i = 0; i < p->n_chunks && shown && p->normalized; i++)
            if (p->params[p->chunks[4 * i] * RECORD + NORMAL]) show_chunk(p, header, i);
    }
    gather(p, header, hyper);
    return 1;
}

/* One step; nothing moves unless the result is 1. */
int step(const Plan *p, const int64_t *header, const double *hyper)
{
    REAL shrink = 1;
    const int found = observe(p, header, hyper, 0);
    if (found != 1) return found;
    if (p->max_norm > 0) {
        double total = 0;
        updates(p, header, hyper, NORM, 0, 1);
        for (int64_t i = 0; i < p->n_chunks; i++) total += (double)p->squares[i];
        for (int64_t i = 0; i < p->n_roots; i++) {
            const double q = (double)p->root_grad[p->roots[i * ROOT]];
            total += q * q;
        }
        total = p->max_norm / (sqrt(total) + 1e-6);
        shrink = (REAL)(total < 1 ? total : 1);
    }
    move(p, header, hyper, shrink, 0);
    updates(p, header, hyper, STEP, factors(p), shrink);
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
    move(p, header, hyper, 1, 1);
    updates(p, header, hyper, GIVE, factors(p), 1);
    return 1;
}
