/* Packed weights, and the products with one block of their outputs, for the C files that multiply by several weights. */

#pragma once

#include "common.h"

/* A weight as oneDNN packs it: [outputs / block, padded inputs / v, block, v], v = 2 in bf16 and 1 in fp32. */
typedef struct {
    const void *packed;
    const void *bias; /* or NULL, as the norm */
    const Norm *norm;
    int64_t inputs, padded, outputs;
    int32_t vectors, half, kind; /* vectors: per block of outputs; kind: the activation of gate | up */
} Weight;

/* Compute block `b` of the outputs for at most 8 rows (4 if a block has more than two vectors), plus bias, rounded.
   x is fp32 [rows rounded up to a power of two, padded]. */
void block_of_halves(const Weight *w, int64_t b, const float *x, int rows, vec acc[8][4]);
void block_of_floats(const Weight *w, int64_t b, const float *x, int rows, vec acc[8][4]);

/* A weight of 4 or 8 bits; quantised.c describes it. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *offsets; /* fp16 [blocks, groups, 16], or NULL: one scale per output; no offsets */
    const float *factors;             /* [blocks * 16]: of each output's sum */
    const void *bias;                 /* or NULL, as the norm */
    const Norm *norm;
    int64_t inputs, padded, outputs, group, unit; /* padded inputs; inputs per scale of the weight, and of x */
    int32_t bits, table, zero, half, kind;        /* kind: the activation of gate | up */
} CodedWeight;

/* Return the bytes of a row of x in 8 bits. */
int64_t coded_row_bytes(const CodedWeight *w);

/* Round a row of x [padded] in fp32 to 8 bits. */
void round_row(const CodedWeight *w, const float *x, void *row);

/* Compute block `b` of 16 outputs for at most 8 rows of x in 8 bits, `stride` bytes apart, plus bias, rounded. There is
   room for the rows up to a power of two. */
void coded_block(const CodedWeight *w, int64_t b, const char *x, int64_t stride, vec *out, int rows);
