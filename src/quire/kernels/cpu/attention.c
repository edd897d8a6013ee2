/* Rotation of heads, and attention over blocks for rows of one token each.

   Keys and values are numbers of the model's dtype, or codes of 8 bits with a scale per head of a token (or of the
   layer), as attention/entries.py describes. Scales are applied to scores and to their exponentials. */

#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef int32_t ints __attribute__((vector_size(64)));
typedef int16_t shorts __attribute__((vector_size(64)));
typedef int8_t signed_codes32 __attribute__((vector_size(32)));
typedef uint8_t codes16 __attribute__((vector_size(16)));
typedef int8_t signed_codes16 __attribute__((vector_size(16)));

/* Forms of keys and values. Others than the first are codes. */
enum { NUMBERS, INT8, E4M3 };

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

typedef struct {
    const Norm *norms;  /* of each q and k head, [q heads + kv heads, dim]; or NULL */
    const void *table;  /* [positions, dim]: cos | sin */
    int64_t heads, kv_heads, dim, window; /* window 0: every key is visible */
    int64_t span;       /* distance between the two dimensions of a rotated pair */
    const float *sinks; /* [q heads]: a score without a key that joins the sum; or NULL */
    float scale, cap;                     /* cap 0: no cap */
    int32_t half, form, chunked; /* form: of keys and values; chunked: the first visible key is the last multiple of
                                    `window` */
} Heads;

typedef struct {
    const Heads *heads;
    void *qkv; /* [rows, (heads + 2 kv heads) * dim] */
    const int64_t *positions, *slots;
    const int32_t *lens, *tables; /* [rows], [owners, table_width] */
    const int64_t *owners; /* [rows]: the row of `tables` of each row */
    void *keys, *values, *out;    /* blocks [slots, kv heads, dim]; [rows, heads * dim] */
    float *key_scales, *value_scales; /* of codes, [slots, kv heads]; [kv heads] if scale_stride is 0; or NULL */
    int64_t rows, table_width, block_size, scale_stride, next;
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

/* -------------------------------------------------------------------------------------------------- codes */

INLINE const void *entry(const void *p, int64_t i, int half, int form) {
    return form == NUMBERS ? at(p, i, half) : (const char *)p + i;
}

INLINE vec number_of(codes16 codes, int form) {
    /* GCC 12 converts between vectors of other sizes element by element. */
#if defined(__AVX512F__)
    if (form == INT8) return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
    bits b = (bits)_mm512_cvtepu8_epi32((__m128i)codes);
#else
    if (form == INT8) return __builtin_convertvector(__builtin_convertvector((signed_codes16)codes, ints), vec);
    bits b = __builtin_convertvector(codes, bits);
#endif
    bits magnitude = b & 0x7f;
    vec small = __builtin_convertvector((ints)magnitude, vec) * 0x1p-9f; /* subnormal */
    vec v = select_((bits)(magnitude < 8), small, (vec)((magnitude << 20) + (120u << 23)));
    return (vec)((bits)v | (b & 0x80) << 24 | ((bits)(magnitude == 0x7f) & 0x7fc00000));
}

/* Load the first n of 16 entries from i on as numbers, without their scale. */
INLINE vec load_entries(const void *p, int64_t i, int64_t n, int half, int form) {
    if (form == NUMBERS) return load(p, i, n, half);
    codes16 codes = {0};
    copy(&codes, (const char *)p + i, n, 1);
    return number_of(codes, form);
}

INLINE codes16 code_of(vec v, int form) {
    float largest = form == INT8 ? 127.f : 448.f;
    v = select_((bits)(v > largest), (vec){0} + largest, v);
    v = select_((bits)(v < -largest), (vec){0} - largest, v);
    if (form == INT8) /* adding 2^23 + 2^22 rounds to an integer */
        return (codes16)__builtin_convertvector((bits)(v + 12582912.f) - 0x4b400000, codes16);
    bits magnitude = (bits)v & 0x7fffffff, nan = (bits)(v != v);
    bits normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    bits small = (bits)((vec)magnitude * 512.f + 12582912.f) - 0x4b400000;
    bits code = (bits)select_((bits)((vec)magnitude < 0x1p-6f), (vec)small, (vec)normal);
    code = (code & ~nan) | (nan & 0x7f);
    return __builtin_convertvector(code | ((bits)v >> 24 & 0x80), codes16);
}

/* Write the codes of a head x [dim] and, unless it is fixed, its scale: NaN for a head that is not finite. */
APART void write_codes(const float *x, int64_t dim, void *codes, float *scale, int fixed, int form) {
    vec most = {0}, bad = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec v = load(x, i, dim - i, 0);
        most = larger(most, (vec)((bits)v & 0x7fffffff));
        bad += v * 0.f;
    }
    float largest = 0, sick = sum_of(bad);
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    if (!fixed) *scale = largest * (form == INT8 ? 1 / 127.f : 1 / 448.f) + sick;
    float factor = *scale > 1e-30f ? 1.f / *scale : 0;
    for (int64_t i = 0; i < dim; i += LANES) {
        vec v = load(x, i, dim - i, 0);
        v = fixed ? v * factor + v * 0.f : sick == 0 ? v * factor : (vec){0};
        codes16 rounded_ = code_of(v, form);
        copy((char *)codes + i, &rounded_, dim - i, 1);
    }
}

/* Add the products of the pairs of a and b. */
INLINE ints dot2(ints acc, shorts a, shorts b) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return acc + (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    __m256i sum[2], x[2], y[2];
    memcpy(sum, &acc, 64);
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    for (int i = 0; i < 2; i++) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(x[i], y[i]));
    memcpy(&acc, sum, 64);
    return acc;
#else
    for (int i = 0; i < LANES; i++) acc[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return acc;
#endif
}

/* Round a query [wide] to 16 bits. Return its scale, which is NaN if the query is not finite. */
INLINE float round_query(const float *q, int64_t wide, int16_t *to) {
    vec most = {0}, bad = {0};
    for (int64_t i = 0; i < wide; i += LANES) {
        vec v = load(q, i, LANES, 0);
        most = larger(most, (vec)((bits)v & 0x7fffffff));
        bad += v * 0.f;
    }
    float largest = 0;
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    float sick = sum_of(bad), factor = largest > 0x1p-100f && sick == 0 ? 32767.f / largest : 0;
    for (int64_t i = 0; i < wide; i++) to[i] = (int16_t)lrintf(sick == 0 ? q[i] * factor : 0);
    return largest / 32767.f + sick;
}

/* ---------------------------------------------------------------------------------------------- attention */

/* A run is n consecutive tokens of a block, `token` entries apart, and the scales of its codes. */
typedef struct {
    const void *entries, *next; /* of this head, and of the first token of the next run */
    const float *scales;
    int64_t n, token, stride;
} Run;

/* Prefetch a head of token u in the next run. Runs are too far apart for the processor's own prefetcher. */
INLINE void ask_for(const Run *r, int64_t u, int64_t dim, int half, int form) {
    for (int64_t line = 0; line < dim * (form != NUMBERS ? 1 : half ? 2 : 4); line += 64)
        __builtin_prefetch((const char *)entry(r->next, u * r->token, half, form) + line);
}

/* Load the first n of 32 codes of 8 bits as 16-bit integers. */
INLINE shorts load_shorts(const void *p, int64_t n) {
    signed_codes32 codes = {0};
    if (n >= 2 * LANES) memcpy(&codes, p, 2 * LANES);
    else memcpy(&codes, p, n);
#if defined(__AVX512BW__)
    return (shorts)_mm512_cvtepi8_epi16((__m256i)codes);
#else
    return __builtin_convertvector(codes, shorts);
#endif
}

/* Return the sums of each of 16 vectors. */
INLINE vec sums_of(const ints *v) {
#if defined(__AVX512F__)
    __m512i eight[8], four[4], two[2];
    UNROLL for (int i = 0; i < 8; i++) {
        __m512i a = (__m512i)v[2 * i], b = (__m512i)v[2 * i + 1];
        eight[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m512i a = four[2 * i], b = four[2 * i + 1];
        two[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    __m512i low = _mm512_shuffle_i32x4(two[0], two[1], 0x88), high = _mm512_shuffle_i32x4(two[0], two[1], 0xdd);
    return (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(low, high));
#else
    vec sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_of(__builtin_convertvector(v[i], vec));
    return sums;
#endif
}

/* Load the scales of up to 16 tokens of a run. */
INLINE vec load_scales(const Run *r, int64_t u) {
    vec scales = {0};
    for (int64_t i = 0; i < MIN(r->n - u, LANES); i++) scales[i] = r->scales[(u + i) * r->stride];
    return scales;
}

/* Score a run for G query heads: scores[g][u] = q[g] . key[u] * scale. */
INLINE void score_run(const Run *r, const float *q, int64_t wide, int64_t dim, float scale, float *scores, int64_t room,
                      int G, int half, int form) {
    for (int64_t u = 0; u < r->n; u++) {
        const void *key = entry(r->entries, u * r->token, half, form);
        ask_for(r, u, dim, half, form);
        vec dot[4] = {{0}};
        for (int64_t i = 0; i < dim; i += LANES) {
            vec k = load_entries(key, i, dim - i, half, form);
            UNROLL for (int g = 0; g < G; g++) dot[g] += k * load(q, g * wide + i, LANES, 0);
        }
        float factor = form == NUMBERS ? scale : scale * r->scales[u * r->stride];
        UNROLL for (int g = 0; g < G; g++) scores[g * room + u] = sum_of(dot[g]) * factor;
    }
}

/* The same for INT8 and queries of 16 bits, which `factors` scale, 16 tokens at a time. */
INLINE void score_codes(const Run *r, const int16_t *q, const float *factors, int64_t wide, int64_t dim, float scale,
                        float *scores, int64_t room, int G) {
    for (int64_t u = 0; u < r->n; u += LANES) {
        int64_t tokens = MIN(r->n - u, LANES);
        ints sums[4][LANES];
        for (int64_t t = 0; t < tokens; t++) {
            const char *key = (const char *)r->entries + (u + t) * r->token;
            ask_for(r, u + t, dim, 0, INT8);
            ints sum[4] = {{0}};
            for (int64_t i = 0; i < dim; i += 2 * LANES) {
                shorts k = load_shorts(key + i, dim - i);
                UNROLL for (int g = 0; g < G; g++) {
                    shorts mine;
                    memcpy(&mine, q + g * wide + i, 64);
                    sum[g] = dot2(sum[g], k, mine);
                }
            }
            UNROLL for (int g = 0; g < G; g++) sums[g][t] = sum[g];
        }
        for (int64_t t = tokens; t < LANES; t++) UNROLL for (int g = 0; g < G; g++) sums[g][t] = (ints){0};
        vec scales = load_scales(r, u) * scale;
        UNROLL for (int g = 0; g < G; g++)
            store(scores, g * room + u, tokens, sums_of(sums[g]) * scales * factors[g], 0);
    }
}

#if defined(__AVX512BW__)
static const ints first_half = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
static const ints second_half = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
#endif

/* Add the values of a run: out[g] += sum over u of weights[g][u] * value[u]. Weights of codes are scaled in place. */
INLINE void add_run(const Run *r, float *weights, int64_t room, int64_t dim, float *out, int64_t wide, int G, int half,
                    int form) {
    for (int64_t u = 0; u < r->n; u++) {
        ask_for(r, u, dim, half, form);
        if (form != NUMBERS)
            UNROLL for (int g = 0; g < G; g++) weights[g * room + u] *= r->scales[u * r->stride];
    }
    for (int64_t i = 0; i < dim; i += LANES) {
        vec sum[4];
        UNROLL for (int g = 0; g < G; g++) sum[g] = load(out, g * wide + i, LANES, 0);
        for (int64_t u = 0; u < r->n; u++) {
            vec v = load_entries(r->entries, u * r->token + i, dim - i, half, form);
            UNROLL for (int g = 0; g < G; g++) sum[g] += v * weights[g * room + u];
        }
        UNROLL for (int g = 0; g < G; g++) store(out, g * wide + i, LANES, sum[g], 0);
    }
}

#if defined(__AVX512BW__)
/* The same for INT8, 16 tokens at a time. Their scaled weights are rounded to 16 bits, relative to the largest, and
   pairs of tokens are multiplied together. */
INLINE void add_codes(const Run *r, float *weights, int64_t room, int64_t dim, float *out, int64_t wide, int G) {
    for (int64_t u = 0; u < r->n; u += LANES) {
        int64_t tokens = MIN(r->n - u, LANES);
        int32_t pairs[4][LANES / 2];
        float factors[4];
        vec scales = load_scales(r, u);
        UNROLL for (int g = 0; g < G; g++) {
            vec w = load(weights, g * room + u, tokens, 0) * scales;
            float largest = _mm512_reduce_max_ps((__m512)w), bad = sum_of(w * 0.f);
            factors[g] = largest / 32767.f + bad;
            float factor = largest > 0x1p-100f && bad == 0 ? 32767.f / largest : 0;
            __m256i rounded_ = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)(w * factor)));
            memcpy(pairs[g], &rounded_, sizeof rounded_);
        }
        for (int64_t t = 0; t < tokens; t++) ask_for(r, u + t, dim, 0, INT8);
        for (int64_t i = 0; i < dim; i += 2 * LANES) {
            ints low[4] = {{0}}, high[4] = {{0}};
            for (int64_t t = 0; t < tokens; t += 2) {
                const char *first = (const char *)r->entries + (u + t) * r->token + i;
                __m512i a = (__m512i)load_shorts(first, dim - i), b = a; /* the weight of a missing token is 0 */
                if (t + 1 < tokens) b = (__m512i)load_shorts(first + r->token, dim - i);
                shorts even = (shorts)_mm512_unpacklo_epi16(a, b), odd = (shorts)_mm512_unpackhi_epi16(a, b);
                UNROLL for (int g = 0; g < G; g++) {
                    shorts w = (shorts)_mm512_set1_epi32(pairs[g][t / 2]);
                    low[g] = dot2(low[g], even, w);
                    high[g] = dot2(high[g], odd, w);
                }
            }
            UNROLL for (int g = 0; g < G; g++) { /* lanes of 4 numbers alternate between low and high */
                __m512i x = (__m512i)low[g], y = (__m512i)high[g];
                __m512i p = _mm512_permutex2var_epi32(x, (__m512i)first_half, y);
                __m512i q = _mm512_permutex2var_epi32(x, (__m512i)second_half, y);
                float *mine = out + g * wide + i;
                store(mine, 0, LANES, load(mine, 0, LANES, 0) + (vec)_mm512_cvtepi32_ps(p) * factors[g], 0);
                store(mine, LANES, LANES, load(mine, LANES, LANES, 0) + (vec)_mm512_cvtepi32_ps(q) * factors[g], 0);
            }
        }
    }
}
#endif

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

/* Heads are padded to the vectors of the largest step, 32 codes. */
INLINE int64_t wide_of(int64_t dim) { return (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

/* Write the row's new key and value of a kv head into its block. */
INLINE void write_entry(Attend *j, int64_t row, int64_t kv, const void *packed, const void *angle, float *work, int half,
                        int form) {
    const Heads *h = j->heads;
    int64_t dim = h->dim, number = h->heads + kv, mine = (j->slots[row] * h->kv_heads + kv) * dim;
    const void *value = at(packed, (number + h->kv_heads) * dim, half);
    void *key_place = (void *)entry(j->keys, mine, half, form), *value_place = (void *)entry(j->values, mine, half, form);
    if (form == NUMBERS) {
        turn_head(at(packed, number * dim, half), h->norms, number, angle, dim, h->span, work, key_place, half, half);
        memcpy(value_place, value, dim * (half ? 2 : 4));
        return;
    }
    float fresh[dim];
    int64_t scale = j->slots[row] * j->scale_stride + kv;
    turn_head(at(packed, number * dim, half), h->norms, number, angle, dim, h->span, work, fresh, half, 0);
    write_codes(fresh, dim, key_place, j->key_scales + scale, !j->scale_stride, form);
    for (int64_t i = 0; i < dim; i += LANES) store(fresh, i, dim - i, load(value, i, dim - i, half), 0);
    write_codes(fresh, dim, value_place, j->value_scales + scale, !j->scale_stride, form);
}

/* Write the row's new entries, then attend for kv heads [from, to) and their query heads. */
INLINE void attend_heads(Attend *j, int64_t row, int64_t from, int64_t to, float *work, int half, int form) {
    const Heads *h = j->heads;
    int64_t dim = h->dim, group = h->heads / h->kv_heads, wide = wide_of(dim);
    int64_t len = j->lens[row], first = h->window && len > h->window ? len - h->window : 0;
    if (first && h->chunked) first = (len - 1) / h->window * h->window;
    int64_t room = (len - first + LANES - 1) / LANES * LANES, token = h->kv_heads * dim, size = j->block_size;
    int64_t heads = (to - from) * group;
    float *totals = work + wide, *factors = totals + heads, *q = factors + heads, *out = q + heads * wide;
    float *scores = out + heads * wide;
    int16_t *q16 = (int16_t *)(scores + heads * room);
    const int32_t *blocks = j->tables + j->owners[row] * j->table_width;

    const void *packed = at(j->qkv, row * (h->heads + 2 * h->kv_heads) * dim, half);
    const void *angle = at(h->table, j->positions[row] * dim, half);
    memset(q, 0, 2 * heads * wide * sizeof(float));
    for (int64_t head = 0; head < heads; head++) {
        int64_t number = from * group + head;
        turn_head(at(packed, number * dim, half), h->norms, number, angle, dim, h->span, work, q + head * wide, half,
                  0);
        if (form == INT8) factors[head] = round_query(q + head * wide, wide, q16 + head * wide);
    }
    for (int64_t kv = from; kv < to; kv++) write_entry(j, row, kv, packed, angle, work, half, form);

/* Visit runs in memory order, and all heads of each run. g counts query heads; 4, 2 or 1 of them share a read. */
#define SLOT(T) (blocks[(T) / size] * size + (T) % size)
#define EACH_RUN(FUNCTION, POOL, SCALES)                                                                             \
    for (int64_t t = first, n; t < len; t += n) {                                                                    \
        n = MIN(size - t % size, len - t);                                                                           \
        int64_t slot = SLOT(t), next = SLOT(MIN(t + n, len - 1));                                                    \
        for (int64_t kv = from, g = 0; kv < to; kv++) {                                                              \
            Run r = {entry(POOL, slot * token + kv * dim, half, form), entry(POOL, next * token + kv * dim, half, form), \
                     SCALES + slot * j->scale_stride + kv, n, token, j->scale_stride};                               \
            int64_t end = (kv + 1 - from) * group;                                                                   \
            for (; g + 4 <= end; g += 4) FUNCTION(4);                                                                \
            for (; g + 2 <= end; g += 2) FUNCTION(2);                                                                \
            for (; g < end; g++) FUNCTION(1);                                                                        \
        }                                                                                                            \
    }
#define SCORE(G)                                                                                                     \
    score_run(&r, q + g * wide, wide, dim, h->scale, scores + g * room + t - first, room, G, half, form)
#define SCORE_CODES(G)                                                                                               \
    score_codes(&r, q16 + g * wide, factors + g, wide, dim, h->scale, scores + g * room + t - first, room, G)
#define ADD(G) add_run(&r, scores + g * room + t - first, room, dim, out + g * wide, wide, G, half, form)
#define ADD_CODES(G) add_codes(&r, scores + g * room + t - first, room, dim, out + g * wide, wide, G)
    if (form == INT8) EACH_RUN(SCORE_CODES, j->keys, j->key_scales)
    else EACH_RUN(SCORE, j->keys, j->key_scales)
    for (int64_t head = 0; head < heads; head++)
        totals[head] = soften(scores + head * room, len - first, h->cap,
                              h->sinks ? h->sinks[from * group + head] : -INFINITY);
#if defined(__AVX512BW__)
    if (form == INT8) EACH_RUN(ADD_CODES, j->values, j->value_scales)
    else EACH_RUN(ADD, j->values, j->value_scales)
#else
    EACH_RUN(ADD, j->values, j->value_scales)
#endif
#undef ADD_CODES
#undef ADD
#undef SCORE_CODES
#undef SCORE
#undef EACH_RUN
#undef SLOT
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < dim; i += LANES)
            store(j->out, (row * h->heads + from * group + head) * dim + i, dim - i,
                  load(out, head * wide + i, LANES, 0) / totals[head], half);
}

/* Threads take tasks in turn. A task is a row, or some heads of a row if there are too few rows for the threads. */
INLINE void attend_rows_as(Attend *j, int half, int form) {
    const Heads *h = j->heads;
    int64_t parts = j->rows < 2 * thread_count() ? MIN(thread_count(), h->kv_heads) : 1, task;
    int64_t most = (h->kv_heads + parts - 1) / parts * (h->heads / h->kv_heads), longest = 0;
    for (int64_t row = 0; row < j->rows; row++) longest = longest > j->lens[row] ? longest : j->lens[row];
    float *work = scratch(wide_of(h->dim) * (3 * most + 1) + most * (longest + LANES + 2));
    if (!work) { j->failed = 1; return; }
    while ((task = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->rows * parts) {
        int64_t part = task % parts;
        attend_heads(j, task / parts, h->kv_heads * part / parts, h->kv_heads * (part + 1) / parts, work, half,
                     form);
    }
}

static void attend_rows_part(void *p) {
    Attend *j = p;
    int half = j->heads->half, form = j->heads->form;
    if (half && form == NUMBERS) attend_rows_as(j, 1, NUMBERS);
    else if (half && form == INT8) attend_rows_as(j, 1, INT8);
    else if (half) attend_rows_as(j, 1, E4M3);
    else if (form == NUMBERS) attend_rows_as(j, 0, NUMBERS);
    else if (form == INT8) attend_rows_as(j, 0, INT8);
    else attend_rows_as(j, 0, E4M3);
}

/* Normalize, rotate, write to blocks and attend, for rows of one token each. Rows run in any order, so no row may
   attend over a key that another row writes. The scheduler never puts two such rows into one step. */
int attend_rows(Attend *j) {
    j->next = 0;
    return run(attend_rows_part, j, 0, &j->failed);
}

/* ops.py compares its structures with this list when it loads the library. */
const Layout attention_layout[] = {
    SIZE(Heads), FIELD(Heads, norms), FIELD(Heads, table), FIELD(Heads, heads), FIELD(Heads, kv_heads),
    FIELD(Heads, dim), FIELD(Heads, window), FIELD(Heads, span), FIELD(Heads, sinks), FIELD(Heads, scale), FIELD(Heads, cap), FIELD(Heads, half), FIELD(Heads, form), FIELD(Heads, chunked),
    SIZE(Attend), FIELD(Attend, heads), FIELD(Attend, qkv), FIELD(Attend, positions), FIELD(Attend, slots),
    FIELD(Attend, lens), FIELD(Attend, tables), FIELD(Attend, owners), FIELD(Attend, keys), FIELD(Attend, values), FIELD(Attend, out), FIELD(Attend, key_scales), FIELD(Attend, value_scales),
    FIELD(Attend, rows), FIELD(Attend, table_width), FIELD(Attend, block_size), FIELD(Attend, scale_stride), FIELD(Attend, next),
    FIELD(Attend, failed),
    {NULL, 0},
};
