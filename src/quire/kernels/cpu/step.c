/* Kernels of a small step on a CPU, without the overhead of calls to torch.

   The machine's C compiler builds this file on first use (see build.py). It uses the vector extensions that GCC and
   Clang share, so one source serves every processor. The OpenMP runtime that torch has loaded runs the threads;
   `start` takes its entry points. Every row is computed separately and in a fixed order, so
   results depend neither on the other rows nor on the number of threads. */

#include "weights.h"

void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
int (*thread_number)(void);
int (*thread_count)(void);

void start(void *gomp_parallel, void *omp_get_thread_num, void *omp_get_num_threads) {
    parallel = gomp_parallel;
    thread_number = omp_get_thread_num;
    thread_count = omp_get_num_threads;
}

/* ------------------------------------------------------------------------------------------ norm, activation */

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

/* ----------------------------------------------------------------------------------------------- products */

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

__attribute__((noinline)) void block_of_halves(const Weight *w, int64_t b, const float *x, int rows, vec acc[8][4]) {
    block_of(w, b, x, rows, acc, 1);
}

__attribute__((noinline)) void block_of_floats(const Weight *w, int64_t b, const float *x, int rows, vec acc[8][4]) {
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
    SIZE(Weight), FIELD(Weight, packed), FIELD(Weight, bias), FIELD(Weight, norm), FIELD(Weight, inputs),
    FIELD(Weight, padded), FIELD(Weight, outputs), FIELD(Weight, vectors), FIELD(Weight, half), FIELD(Weight, kind),
    SIZE(Rows), FIELD(Rows, x), FIELD(Rows, residual), FIELD(Rows, norm), FIELD(Rows, sum), FIELD(Rows, y),
    FIELD(Rows, rows), FIELD(Rows, width), FIELD(Rows, scale), FIELD(Rows, half), FIELD(Rows, kind),
    FIELD(Rows, failed),
    SIZE(Product), FIELD(Product, weight), FIELD(Product, x), FIELD(Product, residual), FIELD(Product, add),
    FIELD(Product, sum), FIELD(Product, y), FIELD(Product, rows), FIELD(Product, failed),
    SIZE(Call), FIELD(Call, function), FIELD(Call, arguments),
    {NULL, 0},
};
