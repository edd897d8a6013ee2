/* Threads, vectors and the norm of a row, for the C files beside this one.

   Elements are fp32, or bf16 if `half` is set; all arithmetic is fp32. A function with a parameter `half` is inlined
   twice, once for each dtype. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float vec __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

enum { LANES = 16, AHEAD = 2048 /* bytes: the prefetch distance */ };
enum { NONE, SILU, GELU, GELU_TANH, RELU };

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline, unused)) /* compiled once instead of at every use, which halves the build time */
#define UNROLL _Pragma("GCC unroll 8")
#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ------------------------------------------------------------------------------------------------ threads */

/* Entry points of the OpenMP runtime. step.c defines them, and `start` sets them. */
extern void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
extern int (*thread_number)(void);
extern int (*thread_count)(void);

/* Return scratch memory of the calling thread, which is kept between calls, or NULL if memory ran out. */
INLINE float *scratch(size_t floats) {
    static __thread float *memory;
    static __thread size_t size;
    if (floats > size) {
        free(memory);
        size = (floats + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, size * sizeof(float));
        if (!memory) size = 0;
    }
    return memory;
}

/* Run `part` in `threads` threads (0: all of them). Return nonzero if one of them ran out of memory. */
INLINE int run(void (*part)(void *), void *job, unsigned threads, int32_t *failed) {
    *failed = 0;
    parallel(part, job, threads, 0);
    return *failed;
}

/* Compute this thread's share [from, to) of `n` items. */
INLINE void my_part(int64_t n, int64_t *from, int64_t *to) {
    int64_t me = thread_number(), all = thread_count();
    *from = n * me / all;
    *to = n * (me + 1) / all;
}

/* ------------------------------------------------------------------------------------------------ vectors */

INLINE vec select_(bits where, vec a, vec b) { return (vec)((where & (bits)a) | (~where & (bits)b)); }
INLINE vec larger(vec a, vec b) { return select_((bits)(a < b), b, a); } /* keeps a NaN in a */

INLINE float sum_of(vec v) {
    vec8 eight[2];
    memcpy(eight, &v, 64);
    eight[0] += eight[1];
    vec4 four[2];
    memcpy(four, eight, 32);
    four[0] += four[1];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

/* Copy the first n of 16 elements of `size` bytes. The separate case makes a full vector one instruction. */
INLINE void copy(void *to, const void *from, int64_t n, int size) {
    if (n >= LANES) memcpy(to, from, LANES * size);
    else memcpy(to, from, n * size);
}

INLINE const void *at(const void *p, int64_t i, int half) { return (const char *)p + i * (half ? 2 : 4); }

/* Load the first n of 16 elements, and 0 for the rest. */
INLINE vec load(const void *p, int64_t i, int64_t n, int half) {
    if (half) {
        halves h = {0};
        copy(&h, at(p, i, 1), n, 2);
        return (vec)(__builtin_convertvector(h, bits) << 16);
    }
    vec v = {0};
    copy(&v, at(p, i, 0), n, 4);
    return v;
}

/* Round to the nearest bf16, ties to even. The result is in the upper half of each lane. */
INLINE bits rounded_bits(vec v) {
    bits b = (bits)v, nan = (bits)(v != v);
    return ((b + 0x7fff + (b >> 16 & 1)) & ~nan) | (nan & 0x7fc00000);
}

INLINE vec rounded(vec v, int half) { return half ? (vec)(rounded_bits(v) & 0xffff0000) : v; }

INLINE void store(void *p, int64_t i, int64_t n, vec v, int half) {
    if (half) {
        halves h = __builtin_convertvector(rounded_bits(v) >> 16, halves);
        copy((void *)at(p, i, 1), &h, n, 2);
    } else {
        copy((void *)at(p, i, 0), &v, n, 4);
    }
}

/* Compute e^x for x up to 88, with a relative error of 2e-7 (Cephes' expf). */
INLINE vec exp_of(vec x) {
    x = larger(x, (vec){0} - 87.3f);
    vec n = x * 1.44269504f + 12582912.f; /* adding 2^23 + 2^22 rounds to an integer */
    bits exponent = ((bits)n - 0x4b400000 + 127) << 23;
    n -= 12582912.f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.f) * (vec)exponent;
}

INLINE vec sigmoid(vec x) { return 1.f / (1.f + exp_of(select_((bits)(x < -87.f), (vec){0} + 87.f, -x))); }

INLINE vec activate(vec x, int kind) {
    if (kind == SILU) return x * sigmoid(x);
    if (kind == GELU_TANH) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    if (kind == RELU) return larger(x, (vec){0});
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.f + erff(x[i] * 0.70710678f)); /* GELU */
    return x;
}

/* ------------------------------------------------------------------------------------------------ one row */

/* An RMS norm or, with a bias, a LayerNorm. `half` is the dtype of its weights, which may differ from the model's. */
typedef struct {
    const void *weight, *bias;
    float eps;
    int32_t half;
} Norm;

/* Write the rounded x + residual to `sum` if that is not NULL, and its rounded norm to `out`. */
APART void norm_row(const void *x, const void *residual, const Norm *norm, int64_t first_weight, int64_t width,
                     void *sum, float *out, int half) {
    vec sums = {0}, squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t n = width - i;
        vec v = load(x, i, n, half);
        if (residual) v = rounded(v + load(residual, i, n, half), half);
        if (sum) store(sum, i, n, v, half);
        sums += v;
        squares += v * v;
        store(out, i, n, v, 0);
    }
    float mean = 0;
    if (norm->bias) {
        mean = sum_of(sums) / width;
        squares = (vec){0};
        for (int64_t i = 0; i < width; i++) out[i] -= mean;
        for (int64_t i = 0; i < width; i += LANES) squares += load(out, i, width - i, 0) * load(out, i, width - i, 0);
    }
    float scale = 1.f / sqrtf(sum_of(squares) / width + norm->eps);
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t n = width - i;
        vec v = load(out, i, n, 0) * scale * load(norm->weight, first_weight + i, n, norm->half);
        if (norm->bias) v += load(norm->bias, i, n, norm->half);
        store(out, i, n, rounded(v, half), 0);
    }
}

/* ------------------------------------------------------------------------------------------------- layout */

typedef struct {
    const char *name; /* of a structure, or structure.field; NULL ends the list */
    int64_t bytes;    /* its size, or the field's offset */
} Layout;

#define SIZE(S) {#S, sizeof(S)}
#define FIELD(S, F) {#S "." #F, offsetof(S, F)}
