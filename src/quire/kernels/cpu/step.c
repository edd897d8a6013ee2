/* Kernels of a small step on a CPU, without the overhead of calls to torch.

   The machine's C compiler builds this file on first use (see build.py). It uses the vector extensions that GCC and
   Clang share, so one source serves every processor. The OpenMP runtime that torch has loaded runs the threads;
   `start` takes its entry points. Every row is computed separately and in a fixed order, so
   results depend neither on the other rows nor on the number of threads. */

#include "common.h"

void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
int (*thread_number)(void);
int (*thread_count)(void);

void start(void *gomp_parallel, void *omp_get_thread_num, void *omp_get_num_threads) {
    parallel = gomp_parallel;
    thread_number = omp_get_thread_num;
    thread_count = omp_get_num_threads;
}

/* Return the first or second dimension of rotated pair i. Those behind the rotated ones form pairs of halves, too. */
INLINE int64_t pair_at(int64_t i, int64_t middle, int64_t span, int second) {
    if (span == 1) return 2 * i + second;
    return i < span ? i + second * span : i + span + second * (middle - span);
}

/* Normalize (if `norm`) and rotate head `number`: (a, b) -> (a cos - b sin, b cos + a sin). angle: cos | sin. */
APART void turn_head(const void *head, const Norm *norm, int64_t number, const void *angle, int64_t dim, int64_t span,
                      float *work, void *out, int half, int out_half) {
    if (norm) {
        norm_row(head, NULL, norm, number * dim, dim, NULL, work, half);
    } else {
        for (int64_t i = 0; i < dim; i += LANES) store(work, i, dim - i, load(head, i, dim - i, half), 0);
    }
    int64_t middle = dim / 2;
    int halves = span == middle, to_half = halves && out_half;
    float pairs[halves ? 1 : dim];
    void *to = halves ? out : pairs;
    if (!halves) {
        for (int64_t i = 0; i < dim; i++) pairs[i] = work[pair_at(i % middle, middle, span, i >= middle)];
        memcpy(work, pairs, dim * sizeof(float));
    }
    for (int64_t i = 0; i < middle; i += LANES) {
        int64_t n = middle - i;
        vec a = load(work, i, n, 0), b = load(work, i + middle, n, 0);
        vec cos = load(angle, i, n, half), sin = load(angle, i + middle, n, half);
        store(to, i, n, rounded(rounded(a * cos, half) - b * sin, half), to_half);
        store(to, i + middle, n, rounded(rounded(b * cos, half) + a * sin, half), to_half);
    }
    if (!halves)
        for (int64_t i = 0; i < dim; i++)
            store(out, pair_at(i % middle, middle, span, i >= middle), 1, (vec){pairs[i]}, out_half);
}

/* -------------------------------------------------------------------------------- norm, activation, rotation */

typedef struct {
    const void *x, *residual;
    const Norm *norm;
    void *sum, *y;
    int64_t rows, width;
    float scale;
    int32_t half, kind, failed;
} Rows;

INLINE void norm_rows_as(Rows *j, int half) {
    int64_t from, to;
    my_part(j->rows, &from, &to);
    float *work = scratch(j->width);
    if (!work) { j->failed = 1; return; }
    for (int64_t row = from; row < to; row++) {
        int64_t first = row * j->width;
        norm_row(at(j->x, first, half), j->residual ? at(j->residual, first, half) : NULL, j->norm, 0, j->width,
                 j->residual ? (void *)at(j->sum, first, half) : NULL, work, half);
        for (int64_t i = 0; i < j->width; i += LANES)
            store(j->y, first + i, j->width - i, load(work, i, j->width - i, 0), half);
    }
}

static void norm_rows_part(void *p) {
    Rows *j = p;
    if (j->half) norm_rows_as(j, 1); else norm_rows_as(j, 0);
}

/* y [rows, width] = norm(x), or norm(x + residual) with the sum written to `sum`. */
int norm_rows(Rows *j) { return run(norm_rows_part, j, j->rows < 4, &j->failed); }

INLINE void gate_rows_as(Rows *j, int half, int kind) {
    int64_t from, to;
    my_part(j->rows, &from, &to);
    for (int64_t row = from; row < to; row++)
        for (int64_t i = 0; i < j->width; i += LANES) {
            int64_t n = j->width - i, gate = 2 * row * j->width + i;
            vec g = rounded(activate(load(j->x, gate, n, half), kind), half);
            store(j->y, row * j->width + i, n, g * load(j->x, gate + j->width, n, half), half);
        }
}

static void gate_rows_part(void *p) {
    Rows *j = p;
    if (j->half && j->kind == SILU) gate_rows_as(j, 1, SILU);
    else if (j->half) gate_rows_as(j, 1, j->kind);
    else gate_rows_as(j, 0, j->kind);
}

/* y [rows, width] = act(gate) * up of x = gate | up [rows, 2 width]. */
int gate_rows(Rows *j) { return run(gate_rows_part, j, j->rows < 4, &j->failed); }

INLINE void lookup_rows_as(Rows *j, int half) {
    const int64_t *ids = j->residual;
    for (int64_t row = 0; row < j->rows; row++)
        for (int64_t i = 0; i < j->width; i += LANES) {
            vec v = load(j->x, ids[row] * j->width + i, j->width - i, half);
            store(j->y, row * j->width + i, j->width - i, j->scale ? v * j->scale : v, half);
        }
}

/* y [rows, width] = rows of the table x at the int64 indices `residual`, times scale if that is not 0. */
int lookup_rows(Rows *j) {
    if (j->half) lookup_rows_as(j, 1); else lookup_rows_as(j, 0);
    return 0;
}

typedef struct {
    const Norm *norms;  /* of each q and k head, [q heads + kv heads, dim]; or NULL */
    const void *table;  /* [positions, dim]: cos | sin */
    int64_t heads, kv_heads, dim, window; /* window 0: every key is visible */
    int64_t span;       /* distance between the two dimensions of a rotated pair */
    const float *sinks; /* [q heads]: a score without a key that joins the sum; or NULL */
    float scale, cap;                     /* cap 0: no cap */
    int32_t half, chunked; /* chunked: the first visible key is the last multiple of `window` */
} Heads;

typedef struct {
    const Heads *heads;
    void *qkv; /* [rows, (heads + 2 kv heads) * dim] */
    const int64_t *positions, *slots;
    const int32_t *lens, *tables; /* [rows], [owners, table_width] */
    const int64_t *owners; /* [rows]: the row of `tables` of each row */
    void *keys, *values, *out;    /* blocks [slots, kv heads, dim]; [rows, heads * dim] */
    int64_t rows, table_width, block_size, next;
    int32_t failed;
} Attend;

INLINE void turn_rows_as(Attend *j, int half) {
    const Heads *h = j->heads;
    int64_t from, to, turned = h->heads + h->kv_heads, stride = (turned + h->kv_heads) * h->dim;
    my_part(j->rows, &from, &to);
    float *work = scratch(h->dim + LANES);
    if (!work) { j->failed = 1; return; }
    for (int64_t row = from; row < to; row++) {
        const void *angle = at(h->table, j->positions[row] * h->dim, half);
        for (int64_t head = 0; head < turned; head++) {
            void *place = (void *)at(j->qkv, row * stride + head * h->dim, half);
            turn_head(place, h->norms, head, angle, h->dim, h->span, work, place, half, half);
        }
    }
}

static void turn_rows_part(void *p) {
    Attend *j = p;
    if (j->heads->half) turn_rows_as(j, 1); else turn_rows_as(j, 0);
}

/* Normalize and rotate the q and k heads of packed rows, in place. */
int turn_rows(Attend *j) { return run(turn_rows_part, j, j->rows < 4, &j->failed); }

/* ---------------------------------------------------------------------------------------------- attention */

/* Prefetch a head of a token in the next run. Runs are too far apart for the processor's own prefetcher. */
INLINE void ask_for(const void *next, int64_t i, int64_t dim, int half) {
    for (int64_t line = 0; line < dim * (half ? 2 : 4); line += 64)
        __builtin_prefetch((const char *)at(next, i, half) + line);
}

/* Score a run (n consecutive tokens of a block) for G query heads: scores[g][u] = q[g] . key[u] * scale. */
INLINE void score_run(const void *keys, const void *next, int64_t token, int64_t n, const float *q, int64_t wide, int64_t dim, float scale,
                      float *scores, int64_t room, int G, int half) {
    for (int64_t u = 0; u < n; u++) {
        const void *key = at(keys, u * token, half);
        ask_for(next, u * token, dim, half);
        vec dot[4] = {{0}};
        for (int64_t i = 0; i < dim; i += LANES) {
            vec k = load(key, i, dim - i, half);
            UNROLL for (int g = 0; g < G; g++) dot[g] += k * load(q, g * wide + i, LANES, 0);
        }
        UNROLL for (int g = 0; g < G; g++) scores[g * room + u] = sum_of(dot[g]) * scale;
    }
}

/* Add the values of a run: out[g] += sum over u of weights[g][u] * value[u]. */
INLINE void add_run(const void *values, const void *next, int64_t token, int64_t n, const float *weights, int64_t room, int64_t dim,
                    float *out, int64_t wide, int G, int half) {
    for (int64_t u = 0; u < n; u++) ask_for(next, u * token, dim, half);
    for (int64_t i = 0; i < dim; i += LANES) {
        vec sum[4];
        UNROLL for (int g = 0; g < G; g++) sum[g] = load(out, g * wide + i, LANES, 0);
        for (int64_t u = 0; u < n; u++) {
            vec v = load(values, u * token + i, dim - i, half);
            UNROLL for (int g = 0; g < G; g++) sum[g] += v * weights[g * room + u];
        }
        UNROLL for (int g = 0; g < G; g++) store(out, g * wide + i, LANES, sum[g], 0);
    }
}

/* Replace scores[0, n) by e^(score - largest) and return their sum and that of the sink (-INFINITY: none). There is
   room for whole vectors. */
INLINE float soften(float *scores, int64_t n, float cap, float sink) {
    vec most = (vec){0} + sink, total = {0};
    for (int64_t t = n; t % LANES; t++) scores[t] = -INFINITY;
    if (cap)
        for (int64_t t = 0; t < n; t++) scores[t] = cap * tanhf(scores[t] / cap);
    for (int64_t t = 0; t < n; t += LANES) most = larger(most, load(scores, t, LANES, 0));
    float largest = most[0];
    for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    for (int64_t t = 0; t < n; t += LANES) {
        vec e = exp_of(load(scores, t, LANES, 0) - largest);
        store(scores, t, LANES, e, 0);
        total += e;
    }
    return sum_of(total) + (sink > -INFINITY ? expf(sink - largest) : 0);
}

/* Write the row's new key and value to its block, then attend for kv heads [from, to) and their query heads. */
INLINE void attend_heads(Attend *j, int64_t row, int64_t from, int64_t to, float *work, int half) {
    const Heads *h = j->heads;
    int64_t dim = h->dim, group = h->heads / h->kv_heads, wide = (dim + LANES - 1) / LANES * LANES;
    int64_t len = j->lens[row], first = h->window && len > h->window ? len - h->window : 0;
    if (first && h->chunked) first = (len - 1) / h->window * h->window;
    int64_t room = (len - first + LANES - 1) / LANES * LANES, token = h->kv_heads * dim, size = j->block_size;
    int64_t heads = (to - from) * group;
    float *totals = work + wide, *q = totals + heads, *out = q + heads * wide, *scores = out + heads * wide;
    const int32_t *blocks = j->tables + j->owners[row] * j->table_width;

    const void *packed = at(j->qkv, row * (h->heads + 2 * h->kv_heads) * dim, half);
    const void *angle = at(h->table, j->positions[row] * dim, half);
    memset(q, 0, 2 * heads * wide * sizeof(float));
    for (int64_t head = 0; head < heads; head++) {
        int64_t number = from * group + head;
        turn_head(at(packed, number * dim, half), h->norms, number, angle, dim, h->span, work, q + head * wide, half,
                  0);
    }
    for (int64_t kv = from; kv < to; kv++) {
        int64_t mine = j->slots[row] * token + kv * dim, number = h->heads + kv;
        turn_head(at(packed, number * dim, half), h->norms, number, angle, dim, h->span, work,
                  (void *)at(j->keys, mine, half), half, half);
        memcpy((void *)at(j->values, mine, half), at(packed, (number + h->kv_heads) * dim, half), dim * (half ? 2 : 4));
    }

/* Visit runs in memory order, and all heads of each run. g counts query heads; 4, 2 or 1 of them share a read. */
#define PLACE(POOL, T) at(POOL, (blocks[(T) / size] * size + (T) % size) * token + from * dim, half)
#define EACH_RUN(FUNCTION, POOL, ...)                                                                                \
    for (int64_t t = first, n; t < len; t += n) {                                                                    \
        n = MIN(size - t % size, len - t);                                                                           \
        const void *run = PLACE(POOL, t), *next = PLACE(POOL, MIN(t + n, len - 1));                                  \
        for (int64_t kv = 0, g = 0; kv < to - from; kv++) {                                                          \
            const void *own = at(run, kv * dim, half), *own_next = at(next, kv * dim, half);                         \
            int64_t end = (kv + 1) * group;                                                                          \
            for (; g + 4 <= end; g += 4) FUNCTION(own, own_next, token, n, __VA_ARGS__, 4, half);                    \
            for (; g + 2 <= end; g += 2) FUNCTION(own, own_next, token, n, __VA_ARGS__, 2, half);                    \
            for (; g < end; g++) FUNCTION(own, own_next, token, n, __VA_ARGS__, 1, half);                            \
        }                                                                                                            \
    }
    EACH_RUN(score_run, j->keys, q + g * wide, wide, dim, h->scale, scores + g * room + t - first, room)
    for (int64_t head = 0; head < heads; head++)
        totals[head] = soften(scores + head * room, len - first, h->cap,
                              h->sinks ? h->sinks[from * group + head] : -INFINITY);
    EACH_RUN(add_run, j->values, scores + g * room + t - first, room, dim, out + g * wide, wide)
#undef EACH_RUN
#undef PLACE
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < dim; i += LANES)
            store(j->out, (row * h->heads + from * group + head) * dim + i, dim - i,
                  load(out, head * wide + i, LANES, 0) / totals[head], half);
}

/* Threads take tasks in turn. A task is a row, or some heads of a row if there are too few rows for the threads. */
INLINE void attend_rows_as(Attend *j, int half) {
    const Heads *h = j->heads;
    int64_t parts = j->rows < 2 * thread_count() ? MIN(thread_count(), h->kv_heads) : 1, task;
    int64_t most = (h->kv_heads + parts - 1) / parts * (h->heads / h->kv_heads), longest = 0;
    for (int64_t row = 0; row < j->rows; row++) longest = longest > j->lens[row] ? longest : j->lens[row];
    float *work = scratch((h->dim + LANES) * (2 * most + 1) + most * (longest + LANES + 1));
    if (!work) { j->failed = 1; return; }
    while ((task = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->rows * parts) {
        int64_t part = task % parts;
        attend_heads(j, task / parts, h->kv_heads * part / parts, h->kv_heads * (part + 1) / parts, work, half);
    }
}

static void attend_rows_part(void *p) {
    Attend *j = p;
    if (j->heads->half) attend_rows_as(j, 1); else attend_rows_as(j, 0);
}

/* Normalize, rotate, write to blocks and attend, for rows of one token each. Rows run in any order, so no row may
   attend over a key that another row writes. The scheduler never puts two such rows into one step. */
int attend_rows(Attend *j) {
    j->next = 0;
    return run(attend_rows_part, j, 0, &j->failed);
}

/* ----------------------------------------------------------------------------------------------- products */

/* A weight as oneDNN packs it: [outputs / block, padded inputs / v, block, v], v = 2 in bf16 and 1 in fp32. */
typedef struct {
    const void *packed;
    const void *bias; /* or NULL, as the norm */
    const Norm *norm;
    int64_t inputs, padded, outputs;
    int32_t vectors, half, kind; /* vectors: per block of outputs; kind: the activation of gate | up */
} Weight;

typedef struct {
    const Weight *weight;
    const void *x, *residual, *add;
    void *sum, *y;
    int64_t rows;
    int32_t failed;
} Product;

/* Compute one block of outputs (V vectors) for R rows of x. */
INLINE void dots(const char *w, const float *x, int64_t padded, vec acc[8][4], int R, int V, int half) {
    vec a[8][4] = {{{0}}};
    for (int64_t k = 0; k < padded; k += half ? 2 : 1, w += 64 * V) {
        UNROLL for (int v = 0; v < V; v++) {
            bits b;
            memcpy(&b, w + 64 * v, 64);
            __builtin_prefetch(w + 64 * v + AHEAD);
            UNROLL for (int r = 0; r < R; r++) {
                const float *mine = x + r * padded + k;
                if (half) { /* a lane holds inputs k (lower half) and k + 1 (upper half) */
                    a[r][v] += (vec)(b << 16) * mine[0];
                    a[r][v] += (vec)(b & 0xffff0000) * mine[1];
                } else {
                    a[r][v] += (vec)b * mine[0];
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) acc[r][v] = a[r][v];
}

/* Round the rows up to a power of two, so that four variants suffice. x has room for the additional rows. */
INLINE void dots_of_rows(const char *w, const float *x, int64_t padded, vec acc[8][4], int rows, int V, int half) {
    if (rows > 4 && V <= 2) dots(w, x, padded, acc, 8, V, half);
    else if (rows > 2) dots(w, x, padded, acc, 4, V, half);
    else if (rows == 2) dots(w, x, padded, acc, 2, V, half);
    else dots(w, x, padded, acc, 1, V, half);
}

/* Compute block `b` of the outputs for `rows` rows, plus bias, rounded. */
INLINE void block_of(const Weight *w, int64_t b, const float *x, int rows, vec acc[8][4], int half) {
    const char *packed = (const char *)w->packed + b * w->vectors * LANES * w->padded * (half ? 2 : 4);
    if (w->vectors == 2) dots_of_rows(packed, x, w->padded, acc, rows, 2, half);
    else if (w->vectors == 4) dots_of_rows(packed, x, w->padded, acc, rows, 4, half);
    else if (w->vectors == 3) dots_of_rows(packed, x, w->padded, acc, rows, 3, half);
    else dots_of_rows(packed, x, w->padded, acc, rows, 1, half);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < w->vectors; v++) {
            int64_t first = (b * w->vectors + v) * LANES;
            if (w->bias && first < w->outputs) acc[r][v] += load(w->bias, first, w->outputs - first, half);
            acc[r][v] = rounded(acc[r][v], half);
        }
}

APART void block_of_halves(const Weight *w, int64_t b, const float *x, int rows, vec acc[8][4]) {
    block_of(w, b, x, rows, acc, 1);
}

APART void block_of_floats(const Weight *w, int64_t b, const float *x, int rows, vec acc[8][4]) {
    block_of(w, b, x, rows, acc, 0);
}

INLINE void product_as(Product *j, int half) {
    const Weight *w = j->weight;
    int64_t from, to, block = w->vectors * LANES;
    int64_t width = w->kind ? w->outputs / 2 : w->outputs, blocks = (width + block - 1) / block;
    int64_t tile = w->vectors <= 2 ? 8 : 4, room = (j->rows + 7) / 8 * 8 * w->padded;
    float *x = scratch(room);
    if (!x) { j->failed = 1; return; }
    memset(x, 0, room * sizeof(float));
    for (int64_t row = 0; row < j->rows; row++) {
        const void *source = at(j->x, row * w->inputs, half);
        float *mine = x + row * w->padded;
        if (w->norm) {
            const void *residual = j->residual ? at(j->residual, row * w->inputs, half) : NULL;
            void *sum = residual && !thread_number() ? (void *)at(j->sum, row * w->inputs, half) : NULL;
            norm_row(source, residual, w->norm, 0, w->inputs, sum, mine, half);
        } else {
            for (int64_t i = 0; i < w->inputs; i += LANES)
                store(mine, i, w->inputs - i, load(source, i, w->inputs - i, half), 0);
        }
    }
    my_part(blocks, &from, &to);
    for (int64_t b = from; b < to; b++)
        for (int64_t row = 0; row < j->rows; row += tile) {
            int rows = MIN(j->rows - row, tile);
            vec y[8][4], up[8][4];
            (half ? block_of_halves : block_of_floats)(w, b, x + row * w->padded, rows, y);
            if (w->kind) (half ? block_of_halves : block_of_floats)(w, b + blocks, x + row * w->padded, rows, up);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < w->vectors; v++) {
                    int64_t first = b * block + v * LANES, n = width - first, place = (row + r) * width + first;
                    if (n <= 0) break;
                    vec result = y[r][v];
                    if (w->kind) result = rounded(activate(result, w->kind), half) * up[r][v];
                    if (j->add) result += load(j->add, place, n, half);
                    store(j->y, place, n, result, half);
                }
        }
}

static void product_part(void *p) {
    Product *j = p;
    if (j->weight->half) product_as(j, 1); else product_as(j, 0);
}

/* y = x W^T + bias, for few rows.
   If W has a norm, x is replaced by norm(x), or by norm(x + residual) with the sum written to `sum`.
   If W has an activation, y = act(gate) * up; its width must be a multiple of the block. `add` is added at the end. */
int product(Product *j) { return run(product_part, j, 0, &j->failed); }

/* ------------------------------------------------------------------------------------------------- replay */

typedef struct {
    int (*function)(void *);
    void *arguments;
} Call;

/* Repeat captured calls. Return nonzero if one of them ran out of memory. */
int replay(const Call *calls, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (calls[i].function(calls[i].arguments)) return 1;
    return 0;
}

/* ------------------------------------------------------------------------------------------------- layout */

/* ops.py compares its structures with this list when it loads the library. */
const Layout layout[] = {
    SIZE(Norm), FIELD(Norm, weight), FIELD(Norm, bias), FIELD(Norm, eps), FIELD(Norm, half),
    SIZE(Heads), FIELD(Heads, norms), FIELD(Heads, table), FIELD(Heads, heads), FIELD(Heads, kv_heads),
    FIELD(Heads, dim), FIELD(Heads, window), FIELD(Heads, span), FIELD(Heads, sinks), FIELD(Heads, scale), FIELD(Heads, cap), FIELD(Heads, half), FIELD(Heads, chunked),
    SIZE(Weight), FIELD(Weight, packed), FIELD(Weight, bias), FIELD(Weight, norm), FIELD(Weight, inputs),
    FIELD(Weight, padded), FIELD(Weight, outputs), FIELD(Weight, vectors), FIELD(Weight, half), FIELD(Weight, kind),
    SIZE(Rows), FIELD(Rows, x), FIELD(Rows, residual), FIELD(Rows, norm), FIELD(Rows, sum), FIELD(Rows, y),
    FIELD(Rows, rows), FIELD(Rows, width), FIELD(Rows, scale), FIELD(Rows, half), FIELD(Rows, kind),
    FIELD(Rows, failed),
    SIZE(Attend), FIELD(Attend, heads), FIELD(Attend, qkv), FIELD(Attend, positions), FIELD(Attend, slots),
    FIELD(Attend, lens), FIELD(Attend, tables), FIELD(Attend, owners), FIELD(Attend, keys), FIELD(Attend, values), FIELD(Attend, out),
    FIELD(Attend, rows), FIELD(Attend, table_width), FIELD(Attend, block_size), FIELD(Attend, next),
    FIELD(Attend, failed),
    SIZE(Product), FIELD(Product, weight), FIELD(Product, x), FIELD(Product, residual), FIELD(Product, add),
    FIELD(Product, sum), FIELD(Product, y), FIELD(Product, rows), FIELD(Product, failed),
    SIZE(Call), FIELD(Call, function), FIELD(Call, arguments),
    {NULL, 0},
};
