/* Run every function of step.c, attention.c and quantised.c (-DSTEP, -DATTENTION, -DQUANTISED: their paths) on
   pseudo-random numbers and print the results. Results of another processor must be equal up to rounding. "Threads" run one after the other.
   test_cpu_library.py runs this program. */

#include STEP
#include ATTENTION
#include QUANTISED
#include <stdio.h>

enum { THREADS = 3 };

static int thread;
static int number(void) { return thread; }
static int all_threads(void) { return THREADS; }
static void run_in_turn(void (*part)(void *), void *job, unsigned threads, unsigned flags) {
    (void)threads, (void)flags; /* if one thread was requested, the others find no work left, or repeat the same work */
    for (thread = 0; thread < THREADS; thread++) part(job);
    thread = 0;
}

static uint32_t state = 1;
static float number_in_range(void) { /* -1 to 1 */
    state = state * 1664525 + 1013904223;
    return (int32_t)state / 2147483648.f;
}

/* n numbers, in bf16 or fp32. */
static void *numbers(int64_t n, int half) {
    void *made = calloc(n + LANES, half ? 2 : 4);
    for (int64_t i = 0; i < n; i++) store(made, i, 1, (vec){0} + number_in_range(), half);
    return made;
}

static void print(const char *name, const void *y, int64_t n, int half) {
    printf("%s%s", name, half ? "/bf16" : "/fp32");
    for (int64_t i = 0; i < n; i++) printf(" %.6g", load(y, i, 1, half)[0]);
    printf("\n");
}

static void check_rows(int half) {
    enum { N = 5, WIDTH = 37 };
    Norm rms = {numbers(WIDTH, 0), NULL, 1e-6f, 0}, layer = {numbers(WIDTH, half), numbers(WIDTH, half), 1e-5f, half};
    void *x = numbers(2 * N * WIDTH, half), *residual = numbers(N * WIDTH, half);
    void *sum = numbers(N * WIDTH, half), *y = numbers(N * WIDTH, half);
    Rows job = {x, NULL, &rms, sum, y, N, WIDTH, 0, half, 0, 0};
    norm_rows(&job);
    print("rms", y, N * WIDTH, half);
    job.norm = &layer, job.residual = residual;
    norm_rows(&job);
    print("layer", y, N * WIDTH, half);
    print("sum", sum, N * WIDTH, half);
    for (job.kind = SILU; job.kind <= RELU; job.kind++) {
        gate_rows(&job);
        print("gate", y, N * WIDTH, half);
    }
    int64_t ids[N] = {4, 0, 2, 2, 1};
    Rows look = {x, ids, NULL, NULL, y, N, WIDTH, 1.5f, half, 0, 0};
    lookup_rows(&look);
    print("lookup", y, N * WIDTH, half);
}

static void check_attention(int half, int64_t dim, int64_t window, float cap) {
    enum { N = 3, Q = 6, KV = 2, PAGES = 9, SIZE = 4, LONG = 12 };
    Norm norms = {numbers((Q + KV) * dim, half), NULL, 1e-6f, half};
    Heads heads = {&norms, numbers(LONG * dim, half), Q, KV, dim, window, dim / 2, NULL, 0.3f, cap, half, NUMBERS};
    int64_t positions[N] = {0, 6, 11}, slots[N] = {32, 10, 23}, owners[N] = {0, 1, 2};
    int32_t lens[N] = {1, 7, 12}, tables[N * 3] = {8, 0, 0, 1, 2, 0, 3, 4, 5};
    void *qkv = numbers(N * (Q + 2 * KV) * dim, half), *out = numbers(N * Q * dim, half);
    void *keys = numbers(PAGES * SIZE * KV * dim, half), *values = numbers(PAGES * SIZE * KV * dim, half);
    Attend job = {&heads, qkv, positions, slots, lens, tables, owners, keys, values, out, NULL, NULL, N, 3, SIZE, KV,
                  0, 0};
    attend_rows(&job);
    print("attend", out, N * Q * dim, half);
    print("keys", keys, PAGES * SIZE * KV * dim, half);
    turn_rows(&job);
    print("turn", qkv, N * (Q + 2 * KV) * dim, half);
}

/* fixed: static scales. */
static void check_codes(int half, int64_t dim, int form, int fixed) {
    enum { N = 2, Q = 6, KV = 2, PAGES = 5, SIZE = 4, LONG = 12 };
    Heads heads = {NULL, numbers(LONG * dim, half), Q, KV, dim, 0, dim / 2, NULL, 0.3f, 0, half, form};
    int64_t positions[N] = {6, 11}, slots[N] = {6, 19}, owners[N] = {0, 1}, entries = PAGES * SIZE * KV;
    int32_t lens[N] = {7, 12}, tables[N * 3] = {0, 1, 0, 2, 3, 4};
    void *qkv = numbers(N * (Q + 2 * KV) * dim, half), *out = numbers(N * Q * dim, half);
    int8_t *keys = malloc(entries * dim), *values = malloc(entries * dim);
    for (int64_t i = 0; i < entries * dim; i++) keys[i] = 50 * number_in_range(), values[i] = 50 * number_in_range();
    float *scales[2] = {numbers(entries, 0), numbers(entries, 0)};
    for (int64_t i = 0; i < entries; i++) scales[0][i] = fabsf(scales[0][i]) / 50, scales[1][i] = fabsf(scales[1][i]) / 50;
    Attend job = {&heads, qkv, positions, slots, lens, tables, owners, keys, values, out, scales[0], scales[1], N, 3,
                  SIZE, fixed ? 0 : KV, 0, 0};
    attend_rows(&job);
    print("codes", out, N * Q * dim, half);
    print("scales", scales[1], entries, 0);
}

static void check_product(int half, int vectors, int rows, int kind) {
    int64_t inputs = 38, padded = 40, outputs = vectors * LANES * 4;
    Norm norm = {numbers(inputs, half), NULL, 1e-6f, half};
    Weight weight = {numbers(outputs * padded, half), numbers(outputs, half), &norm, inputs, padded, outputs, vectors,
                     half, kind};
    void *x = numbers(rows * inputs, half), *residual = numbers(rows * inputs, half);
    void *add = numbers(rows * outputs, half), *sum = numbers(rows * inputs, half), *y = numbers(rows * outputs, half);
    Product job = {&weight, x, residual, add, sum, y, rows, 0};
    Call call = {(int (*)(void *))product, &job};
    replay(&call, 1);
    print("product", y, rows * outputs / (kind ? 2 : 1), half);
}

static uint8_t *bytes(int64_t n) {
    uint8_t *made = aligned_alloc(64, n + 4096);
    for (int64_t i = 0; i < n; i++) state = state * 1664525 + 1013904223, made[i] = state >> 24;
    return made;
}

/* fp16 numbers from 1 to 2. */
static uint16_t *fp16(int64_t n) {
    uint16_t *made = (uint16_t *)bytes(2 * n);
    for (int64_t i = 0; i < n; i++) made[i] = (made[i] & 0x3ff) | 0x3c00;
    return made;
}

/* group 0: one scale per output. */
static void check_coded(int half, int bits_, int group, int table, int offsets, int rows, int kind) {
    int64_t inputs = 120, padded = 128, outputs = 64, groups = group ? padded / group : 1;
    Norm norm = {numbers(inputs, half), NULL, 1e-6f, half};
    int zero = offsets ? 1 : table == E2M1 ? 12 : 1 << (bits_ - 1);
    CodedWeight weight = {bytes(outputs * padded * bits_ / 8), group ? fp16(outputs * groups) : NULL,
                          offsets ? fp16(outputs * groups) : NULL, numbers(outputs, 0), numbers(outputs, half), &norm,
                          inputs, padded, outputs, group ? group : padded, group ? MIN(group, 32) : padded, bits_, table,
                          zero, half, kind};
    void *x = numbers(rows * inputs, half), *residual = numbers(rows * inputs, half);
    void *add = numbers(rows * outputs, half), *sum = numbers(rows * inputs, half), *y = numbers(rows * outputs, half);
    CodedProduct job = {&weight, x, residual, add, sum, y, NULL, rows, 0};
    coded_product(&job);
    print("coded", y, rows * outputs / (kind ? 2 : 1), half);
    if (group || kind) return;
    weight.norm = NULL, job.add = NULL, job.rounded = bytes(32 * many_rows_bytes(&weight));
    many_rows_product(&job);
    print("coded", y, rows * outputs, half);
}

int main(void) {
    start(run_in_turn, number, all_threads);
    for (int half = 0; half < 2; half++) {
        check_rows(half);
        check_attention(half, 16, 0, 0);
        check_attention(half, 24, 5, 3.f);
        check_codes(half, 16, INT8, 0);
        check_codes(half, 72, INT8, 0);
        check_codes(half, 24, E4M3, 0);
        check_codes(half, 24, E4M3, 1);
        for (int vectors = 1; vectors <= 4; vectors++)
            for (int rows = 1; rows <= 8; rows += rows < 3 ? 1 : 5) check_product(half, vectors, rows, rows == 2);
        for (int rows = 1; rows <= 9; rows += 4) {
            check_coded(half, 8, 0, PLAIN, 0, rows, 0);
            check_coded(half, 8, 16, PLAIN, 1, rows, SILU);
            check_coded(half, 4, 32, PLAIN, 0, rows, SILU);
            check_coded(half, 4, 64, PLAIN, 1, rows, 0);
            check_coded(half, 4, 32, E2M1, 0, rows, 0);
        }
    }
    return 0;
}
