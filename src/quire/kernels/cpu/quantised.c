/* Products with weights of 4 or 8 bits on a CPU.

   A weight is packed once, as blocks of 16 outputs: [outputs / 16, inputs / 4, 16, 4] bytes, or nibbles of which a
   line of 64 bytes holds inputs 0-3 (low) and 4-7 (high). Codes are unsigned; `zero` is the code of 0. The inputs are
   rounded to 8 bits, with one scale per row if the weight has one scale per output, and otherwise one per `unit`
   inputs. The integer sums are exact, and they are scaled and summed in fp32 in a fixed order. */

#include "weights.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512F__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

typedef int32_t ints __attribute__((vector_size(64)));

/* Codes of 4 bits stand for themselves, or for twice a 4-bit float (e2m1) plus 12. */
enum { PLAIN, E2M1 };

typedef struct {
    const CodedWeight *weight;
    const void *x, *residual, *add;
    void *sum, *y;
    void *rounded; /* [rows to a multiple of 16, row_bytes]: x in 8 bits for many rows; NULL for few rows */
    int64_t rows;
    int32_t failed;
} CodedProduct;

/* ------------------------------------------------------------------------------------------------ vectors */

INLINE float half_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    float value; /* fp16's exponent has another bias, which a product by 2^112 corrects, for subnormals as well */
    memcpy(&value, &rest, 4);
    value *= 0x1p112f;
    uint32_t b;
    memcpy(&b, &value, 4);
    b |= sign;
    memcpy(&value, &b, 4);
    return value;
}

INLINE vec load_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = half_float(p[i]);
    return v;
#endif
}

/* Add the products of four unsigned bytes of each lane of w and the four signed bytes of x. */
INLINE ints dot4(ints acc, bits w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    __m256i a[2], b[2];
    memcpy(a, &acc, 64);
    memcpy(b, &w, 64);
    __m256i even = _mm256_set1_epi32((x << 24 >> 24 & 0xffff) | (x << 8 >> 24 << 16));
    __m256i odd = _mm256_set1_epi32((x << 16 >> 24 & 0xffff) | (x >> 24 << 16)), low = _mm256_set1_epi32(0x00ff00ff);
    for (int i = 0; i < 2; i++) { /* in 16 bits, because sums of two bytes' products do not fit */
        a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_and_si256(b[i], low), even));
        a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(b[i], 8), low), odd));
    }
    memcpy(&acc, a, 64);
    return acc;
#else
    int8_t bytes[4];
    memcpy(bytes, &x, 4);
    for (int i = 0; i < 4; i++) acc += (ints)(w >> 8 * i & 255) * bytes[i];
    return acc;
#endif
}

static const uint8_t e2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

INLINE bits look_up(bits nibbles, int table) {
    if (table == PLAIN) return nibbles;
#if defined(__AVX512BW__)
    __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)e2m1));
    return (bits)_mm512_shuffle_epi8(values, (__m512i)nibbles);
#else
    uint8_t bytes[64];
    memcpy(bytes, &nibbles, 64);
    for (int i = 0; i < 64; i++) bytes[i] = e2m1[bytes[i]];
    memcpy(&nibbles, bytes, 64);
    return nibbles;
#endif
}

INLINE void store_bytes(int8_t *to, ints n) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)n));
#else
    typedef int8_t bytes __attribute__((vector_size(16)));
    bytes b = __builtin_convertvector(n, bytes);
    memcpy(to, &b, 16);
#endif
}

INLINE bits load_line(const uint8_t *p) {
    bits b;
    memcpy(&b, p, 64);
    __builtin_prefetch(p + AHEAD);
    return b;
}

/* ------------------------------------------------------------------------------------------ x in 8 bits */

/* A row of x in 8 bits is followed by a scale and a zero per unit: zero code times the sum of the unit's bytes. */
INLINE int64_t units_of(const CodedWeight *w) { return w->padded / w->unit; }
INLINE int64_t row_bytes(const CodedWeight *w) { return (w->padded + 8 * units_of(w) + 63) / 64 * 64; }
INLINE float *scales_of(const CodedWeight *w, const void *row) { return (float *)((char *)row + w->padded); }
INLINE int32_t *zeros_of(const CodedWeight *w, const void *row) { return (int32_t *)(scales_of(w, row) + units_of(w)); }

int64_t coded_row_bytes(const CodedWeight *w) { return row_bytes(w); }

/* Round x [padded] to multiples of its largest value / 127, per unit. A number that is not finite makes its unit NaN. */
__attribute__((noinline)) void round_row(const CodedWeight *w, const float *x, void *row) {
    int8_t *bytes = row;
    float *scales = scales_of(w, row);
    int32_t *zeros = zeros_of(w, row);
    for (int64_t u = 0; u < units_of(w); u++) {
        const float *mine = x + u * w->unit;
        vec most = {0}, bad = {0};
        for (int64_t i = 0; i < w->unit; i += LANES) {
            vec v = load(mine, i, LANES, 0);
            most = larger(most, (vec)((bits)v & 0x7fffffff));
            bad += v * 0.f;
        }
        float largest = 0;
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        float scale = largest / 127.f, inverse = largest > 0x1p-100f ? 127.f / largest : 0;
        ints sum = {0};
        for (int64_t i = 0; i < w->unit; i += LANES) {
            vec v = load(mine, i, LANES, 0) * inverse + 12582912.f; /* adding 2^23 + 2^22 rounds to an integer */
            ints n = (ints)v - 0x4b400000;
            store_bytes(bytes + u * w->unit + i, n);
            sum += n;
        }
        int32_t total = 0;
        for (int i = 0; i < LANES; i++) total += sum[i];
        scales[u] = scale + sum_of(bad);
        zeros[u] = total * w->zero;
    }
}

/* Norm row `row` of x (if there is a norm) and round it. `work` has room for the padded row in fp32. */
INLINE void prepare_row(CodedProduct *j, int64_t row, float *work, void *to, int writes_sum) {
    const CodedWeight *w = j->weight;
    int half = w->half;
    const void *source = at(j->x, row * w->inputs, half);
    memset(work + w->inputs / LANES * LANES, 0, (w->padded - w->inputs / LANES * LANES) * sizeof(float));
    if (w->norm) {
        const void *residual = j->residual ? at(j->residual, row * w->inputs, half) : NULL;
        void *sum = residual && writes_sum ? (void *)at(j->sum, row * w->inputs, half) : NULL;
        norm_row(source, residual, w->norm, 0, w->inputs, sum, work, half);
    } else {
        for (int64_t i = 0; i < w->inputs; i += LANES)
            store(work, i, w->inputs - i, load(source, i, w->inputs - i, half), 0);
    }
    round_row(w, work, to);
}

static void round_rows_part(void *p) {
    CodedProduct *j = p;
    int64_t from, to;
    my_part(j->rows, &from, &to);
    float *work = scratch(j->weight->padded + LANES);
    if (!work) { j->failed = 1; return; }
    for (int64_t row = from; row < to; row++)
        prepare_row(j, row, work, (char *)j->rounded + row * row_bytes(j->weight), 1);
}

/* --------------------------------------------------------------------------------------------- few rows */

/* Compute one block of outputs for R rows, with one scale per output and per row of x. */
INLINE void whole_dots(const CodedWeight *w, int64_t block, const char *x, int64_t stride, vec *out, int R) {
    const uint8_t *codes = w->codes + block * LANES * w->padded;
    ints acc[8][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = (ints){0} - *zeros_of(w, x + r * stride), acc[r][1] = (ints){0};
    for (int64_t k = 0; k < w->padded; k += 8, codes += 128) {
        bits first = load_line(codes), second = load_line(codes + 64);
        UNROLL for (int r = 0; r < R; r++) {
            int32_t four[2];
            memcpy(four, x + r * stride + k, 8);
            acc[r][0] = dot4(acc[r][0], first, four[0]);
            acc[r][1] = dot4(acc[r][1], second, four[1]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        out[r] = __builtin_convertvector(acc[r][0] + acc[r][1], vec) * *scales_of(w, x + r * stride);
}

/* Compute one block of outputs for R rows, with scales per group of inputs. */
INLINE void group_dots(const CodedWeight *w, int64_t block, const char *x, int64_t stride, vec *out, int R, int bits_,
                       int table) {
    int64_t groups = w->padded / w->group, units = w->group / w->unit, lines = w->unit / (bits_ == 4 ? 8 : 4);
    const uint8_t *codes = w->codes + block * LANES * w->padded * bits_ / 8;
    const uint16_t *scales = w->scales + block * LANES * groups;
    const uint16_t *offsets = w->offsets ? w->offsets + block * LANES * groups : NULL;
    vec total[8];
    UNROLL for (int r = 0; r < R; r++) total[r] = (vec){0};
    for (int64_t g = 0, u = 0; g < groups; g++) {
        vec scale = load_halves(scales + g * LANES), offset = {0};
        __builtin_prefetch(scales + g * LANES + 256);
        if (offsets) offset = load_halves(offsets + g * LANES);
        for (int64_t end = u + units; u < end; u++) {
            ints acc[8];
            UNROLL for (int r = 0; r < R; r++)
                acc[r] = (ints){0} - (offsets ? 0 : zeros_of(w, x + r * stride)[u]);
            const char *mine = x + u * w->unit;
            for (int64_t l = 0; l < lines; l++, codes += 64) {
                bits line = load_line(codes);
                if (bits_ == 4) {
                    bits low = look_up(line & 0x0f0f0f0f, table), high = look_up(line >> 4 & 0x0f0f0f0f, table);
                    UNROLL for (int r = 0; r < R; r++) {
                        int32_t four[2];
                        memcpy(four, mine + r * stride + 8 * l, 8);
                        acc[r] = dot4(dot4(acc[r], low, four[0]), high, four[1]);
                    }
                } else {
                    UNROLL for (int r = 0; r < R; r++) {
                        int32_t four;
                        memcpy(&four, mine + r * stride + 4 * l, 4);
                        acc[r] = dot4(acc[r], line, four);
                    }
                }
            }
            UNROLL for (int r = 0; r < R; r++) {
                float s = scales_of(w, x + r * stride)[u];
                vec sum = __builtin_convertvector(acc[r], vec) * s;
                if (offsets) sum = sum * scale - offset * (s * zeros_of(w, x + r * stride)[u]);
                else sum *= scale;
                total[r] += sum;
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) out[r] = total[r];
}

INLINE void dots_for(const CodedWeight *w, int64_t block, const char *x, int64_t stride, vec *out, int R) {
    if (!w->scales) whole_dots(w, block, x, stride, out, R);
    else if (w->bits == 8) group_dots(w, block, x, stride, out, R, 8, PLAIN);
    else if (w->table == PLAIN) group_dots(w, block, x, stride, out, R, 4, PLAIN);
    else group_dots(w, block, x, stride, out, R, 4, E2M1);
}

/* Round up to a power of two of rows, so that four variants suffice. x has room for the additional rows. */
APART void coded_dots(const CodedWeight *w, int64_t block, const char *x, int64_t stride, vec *out, int rows) {
    if (rows > 4) dots_for(w, block, x, stride, out, 8);
    else if (rows > 2) dots_for(w, block, x, stride, out, 4);
    else if (rows == 2) dots_for(w, block, x, stride, out, 2);
    else dots_for(w, block, x, stride, out, 1);
}

/* Return the sums times the outputs' factors, plus bias, rounded. */
INLINE vec finished(const CodedWeight *w, int64_t block, vec sum) {
    int64_t first = block * LANES;
    sum *= load(w->factors, first, LANES, 0);
    if (w->bias && first < w->outputs) sum += load(w->bias, first, w->outputs - first, w->half);
    return rounded(sum, w->half);
}

void coded_block(const CodedWeight *w, int64_t b, const char *x, int64_t stride, vec *out, int rows) {
    coded_dots(w, b, x, stride, out, rows);
    for (int r = 0; r < rows; r++) out[r] = finished(w, b, out[r]);
}

static void few_rows_part(void *p) {
    CodedProduct *j = p;
    const CodedWeight *w = j->weight;
    int64_t from, to, stride = row_bytes(w), width = w->kind ? w->outputs / 2 : w->outputs;
    int64_t blocks = (width + LANES - 1) / LANES;
    const char *x = j->rounded;
    if (!x) {
        int64_t room = (j->rows + 7) / 8 * 8 * stride;
        float *work = scratch(w->padded + LANES + room / 4);
        if (!work) { j->failed = 1; return; }
        char *mine = (char *)(work + w->padded + LANES);
        memset(mine + j->rows * stride, 0, room - j->rows * stride);
        for (int64_t row = 0; row < j->rows; row++)
            prepare_row(j, row, work, mine + row * stride, !thread_number());
        x = mine;
    }
    my_part(blocks, &from, &to);
    for (int64_t b = from; b < to; b++)
        for (int64_t row = 0; row < j->rows; row += 8) {
            int rows = MIN(j->rows - row, 8);
            vec y[8], up[8];
            coded_dots(w, b, x + row * stride, stride, y, rows);
            if (w->kind) coded_dots(w, b + blocks, x + row * stride, stride, up, rows);
            for (int r = 0; r < rows; r++) {
                int64_t first = b * LANES, place = (row + r) * width + first;
                vec result = finished(w, b, y[r]);
                if (w->kind)
                    result = rounded(activate(result, w->kind), w->half) * finished(w, b + blocks, up[r]);
                if (j->add) result += load(j->add, place, width - first, w->half);
                store(j->y, place, width - first, result, w->half);
            }
        }
}

/* y = x W^T + bias. If W has a norm, x is replaced by norm(x), or by norm(x + residual) with the sum written to `sum`.
   If W has an activation, y = act(gate) * up; its width must be a multiple of 16. `add` is added at the end. */
int coded_product(CodedProduct *j) { return run(few_rows_part, j, 0, &j->failed); }

/* -------------------------------------------------------------------------------------------- many rows */

#if HAS_TILES

/* A tile is 16 rows of 64 bytes. A line of a packed block is a row of a tile: 16 outputs of 4 bytes. */
static const struct __attribute__((packed)) {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static int allow_tiles(void) {
    static int allowed = -1; /* Linux lets a process use the tiles when it asks; 18 is their state */
    if (allowed < 0) allowed = !syscall(SYS_arch_prctl, 0x1023, 18);
    return allowed;
}

/* Multiply 32 rows by two blocks of outputs: sums [2][2][16 rows][16 outputs]. */
INLINE void int_tiles(const char *x, int64_t stride, const uint8_t *first, const uint8_t *second, int64_t padded,
                      int32_t *sums) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < padded; k += 64) {
        _tile_loadd(4, x + k, stride);
        _tile_loadd(5, x + 16 * stride + k, stride);
        _tile_loadd(6, first + 16 * k, 64);
        _tile_loadd(7, second + 16 * k, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64);
}

INLINE void bf16_tiles(const char *x, int64_t stride, const char *first, const char *second, int64_t padded,
                       float *sums) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < padded; k += 32) {
        _tile_loadd(4, x + 2 * k, stride);
        _tile_loadd(5, x + 16 * stride + 2 * k, stride);
        _tile_loadd(6, first + 32 * k, 64);
        _tile_loadd(7, second + 32 * k, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64);
}

/* Return the two numbers of each lane in bf16, `low` in the lower half. */
INLINE bits pairs_of(vec low, vec high) {
#if defined(__AVX512BF16__)
    bits order = {0}; /* words 0 to 15 are `low`, 16 to 31 `high` */
    for (int i = 0; i < LANES; i++) order[i] = i | (i + 16) << 16;
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    __m512i words;
    memcpy(&words, &both, 64);
    return (bits)_mm512_permutexvar_epi16((__m512i)order, words);
#else
    return rounded_bits(low) >> 16 | (rounded_bits(high) & 0xffff0000);
#endif
}

/* Unpack a block to bf16: lines of 16 outputs and 2 inputs, which are 32 bytes of x. */
APART void unpack_block(const CodedWeight *w, int64_t block, char *to) {
    int64_t groups = w->padded / w->group, step = w->bits == 4 ? 8 : 4;
    const uint8_t *codes = w->codes + block * LANES * w->padded * w->bits / 8;
    for (int64_t g = 0; g < groups; g++) {
        vec factor = load(w->factors, block * LANES, LANES, 0);
        vec scale = load_halves(w->scales + (block * groups + g) * LANES) * factor, offset = scale * (float)w->zero;
        if (w->offsets) offset = load_halves(w->offsets + (block * groups + g) * LANES) * factor * (float)w->zero;
        for (int64_t k = 0; k < w->group; k += step, codes += 64) {
            bits line = load_line(codes);
            for (int part = 0; part < step / 4; part++, to += 128) {
                bits four = w->bits == 8 ? line : look_up((part ? line >> 4 : line) & 0x0f0f0f0f, w->table);
                for (int pair = 0; pair < 2; pair++) {
                    vec low = __builtin_convertvector((ints)(four >> 16 * pair & 255), vec) * scale - offset;
                    vec high = __builtin_convertvector((ints)(four >> (16 * pair + 8) & 255), vec) * scale - offset;
                    bits both = pairs_of(low, high);
                    memcpy(to + 64 * pair, &both, 64);
                }
            }
        }
    }
}

static void round_to_bf16_part(void *p) {
    CodedProduct *j = p;
    const CodedWeight *w = j->weight;
    int64_t from, to;
    my_part(j->rows, &from, &to);
    for (int64_t row = from; row < to; row++) {
        char *mine = (char *)j->rounded + row * 2 * w->padded;
        memset(mine + 2 * w->inputs, 0, 2 * (w->padded - w->inputs));
        for (int64_t i = 0; i < w->inputs; i += LANES)
            store(mine, i, w->inputs - i, load(at(j->x, row * w->inputs, w->half), i, w->inputs - i, w->half), 1);
    }
}

/* Threads take pairs of blocks. Blocks stay in the second cache while all rows pass. */
static void many_rows_part(void *p) {
    CodedProduct *j = p;
    const CodedWeight *w = j->weight;
    int whole = !w->scales;
    int64_t from, to, stride = whole ? row_bytes(w) : 2 * w->padded, blocks = (w->outputs + LANES - 1) / LANES;
    char *unpacked = NULL;
    if (!whole && !(unpacked = (char *)scratch(2 * LANES * w->padded / 2))) { j->failed = 1; return; }
    _tile_loadconfig(&tiles);
    my_part((blocks + 1) / 2, &from, &to);
    for (int64_t pair = from; pair < to; pair++) {
        int64_t b[2] = {2 * pair, MIN(2 * pair + 1, blocks - 1)};
        const char *block[2];
        for (int i = 0; i < 2; i++) {
            block[i] = whole ? (const char *)w->codes + b[i] * LANES * w->padded : unpacked + i * 2 * LANES * w->padded;
            if (!whole) unpack_block(w, b[i], (char *)block[i]);
        }
        vec factor[2], bias[2] = {{0}, {0}};
        for (int i = 0; i < 2; i++) {
            int64_t first = b[i] * LANES;
            factor[i] = load(w->factors, first, LANES, 0);
            if (w->bias) bias[i] = load(w->bias, first, w->outputs - first, w->half);
        }
        for (int64_t row = 0; row < j->rows; row += 32) {
            __attribute__((aligned(64))) int32_t sums[1024];
            const char *x = (const char *)j->rounded + row * stride;
            if (whole) int_tiles(x, stride, (const uint8_t *)block[0], (const uint8_t *)block[1], w->padded, sums);
            else bf16_tiles(x, stride, block[0], block[1], w->padded, (float *)sums);
            for (int r = 0; r < MIN(32, j->rows - row); r++) {
                const char *mine = x + r * stride;
                ints zero = {0};
                vec scale = {0};
                if (whole) zero += *zeros_of(w, mine), scale += *scales_of(w, mine);
                for (int i = 0; i < 2; i++) {
                    ints n;
                    memcpy(&n, sums + (r / 16 * 2 + i) * 256 + r % 16 * LANES, 64);
                    int64_t first = b[i] * LANES;
                    vec result = (vec)n;
                    if (whole) result = __builtin_convertvector(n - zero, vec) * scale * factor[i];
                    store(j->y, (row + r) * w->outputs + first, w->outputs - first, result + bias[i], w->half);
                }
            }
        }
    }
    _tile_release();
}

#endif

/* Return whether many rows are computed on the tiles of the processor (AMX). With scales per group, the weight is
   unpacked to bf16 there and x rounded to bf16. The sums are not those of few rows then, so a model in fp32, whose
   tokens must not depend on the batch, does without. */
static int takes_tiles(const CodedWeight *w) {
#if HAS_TILES
    return (!w->scales || w->half) && allow_tiles();
#else
    return 0;
#endif
}

/* Return the bytes that `rounded` needs for a row of many_rows_product, with rows rounded up to 32. */
int64_t many_rows_bytes(const CodedWeight *w) { return takes_tiles(w) && w->scales ? 2 * w->padded : row_bytes(w); }

/* y = x W^T + bias for many rows. */
int many_rows_product(CodedProduct *j) {
#if HAS_TILES
    if (takes_tiles(j->weight)) {
        if (j->weight->scales) run(round_to_bf16_part, j, 0, &j->failed);
        else if (run(round_rows_part, j, 0, &j->failed)) return 1;
        return run(many_rows_part, j, 0, &j->failed);
    }
#endif
    return run(round_rows_part, j, 0, &j->failed) || run(few_rows_part, j, 0, &j->failed);
}

/* ops.py compares its structures with this list when it loads the library. */
const Layout coded_layout[] = {
    SIZE(CodedWeight), FIELD(CodedWeight, codes), FIELD(CodedWeight, scales), FIELD(CodedWeight, offsets),
    FIELD(CodedWeight, factors), FIELD(CodedWeight, bias), FIELD(CodedWeight, norm), FIELD(CodedWeight, inputs),
    FIELD(CodedWeight, padded), FIELD(CodedWeight, outputs), FIELD(CodedWeight, group), FIELD(CodedWeight, unit),
    FIELD(CodedWeight, bits), FIELD(CodedWeight, table), FIELD(CodedWeight, zero), FIELD(CodedWeight, half),
    FIELD(CodedWeight, kind),
    SIZE(CodedProduct), FIELD(CodedProduct, weight), FIELD(CodedProduct, x), FIELD(CodedProduct, residual),
    FIELD(CodedProduct, add), FIELD(CodedProduct, sum), FIELD(CodedProduct, y), FIELD(CodedProduct, rounded),
    FIELD(CodedProduct, rows), FIELD(CodedProduct, failed),
    {NULL, 0},
};
