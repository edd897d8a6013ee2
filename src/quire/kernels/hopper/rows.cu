// y = x W^T for 17 to 256 rows of x on Hopper's matrix units: bound by reading W, or by the matrix rate.
//
// A matrix instruction takes 64 outputs and up to ROWS rows of x, so that few rows waste nothing: it computes y^T = W x^T.
// More rows are a second tile of rows, for which other blocks read W again, from the L2 cache. Two
// threads send tiles of W and of x through rings in shared memory (TMA), and two or four warpgroups multiply. The tiles of
// W that fill its ring first are requested before the kernel waits for the one that computes x.
//
// The blocks of a cluster compute parts of the inputs of the same outputs. Each of them then sums a part of the
// rows, which it reads from the shared memory of the others.
//
// In shared memory: tiles of W, tiles of x, barriers, scales.
//
// Defined by rows.py: ROWS (of a tile of x), OUTS, W_STAGES, X_STAGES, FORMAT, HALF and GROUP (of 4-bit codes),
// FP16, GATED, KIND, and `multiply`, the matrix instruction.

DEVICE float activate(float x) {
    if (KIND == 0) return __fdividef(x, 1.0f + __expf(-x));                    // silu
    if (KIND == 1) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));  // gelu
    if (KIND == 2) {                                                           // gelu_tanh
        const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
        return x * (1.0f - __fdividef(1.0f, 1.0f + __expf(2.0f * inner)));
    }
    return fmaxf(x, 0.0f);  // relu
}

// Sums of two outputs (row, row + 8 of W) for rows 8 j + lane % 4 * 2 of x and the next one.
struct Sums {
    float v[4];
};

// Returns the words of two neighbouring outputs, and of those 8 behind, for row m + lane / 4 of x.
DEVICE void scaled(Sums s, const Arguments& a, u32 row, bool real, u32 m, u32 lane, u32 (&words)[2]) {
    if ((FORMAT == FP8 || FORMAT == INT8) && real) {
        const float* scale = (const float*)a.w_scale;
        const u32 m0 = m + lane % 4 * 2, m1 = m0 + 1;
        const float x0 = FORMAT == INT8 ? 1 : m0 < a.rows ? a.x_scale[m0] : 0;
        const float x1 = FORMAT == INT8 ? 1 : m1 < a.rows ? a.x_scale[m1] : 0;
        s.v[0] *= x0 * scale[row], s.v[1] *= x1 * scale[row], s.v[2] *= x0 * scale[row + 8], s.v[3] *= x1 * scale[row + 8];
    }
    const float offset0 = a.bias && real ? as_float16(a.bias[row]) : 0.0f;
    const float offset1 = a.bias && real ? as_float16(a.bias[row + 8]) : 0.0f;
    words[0] = transposed(pack(s.v[0] + offset0, s.v[1] + offset0));
    words[1] = transposed(pack(s.v[2] + offset1, s.v[3] + offset1));
}

// Adds up the parts of the inputs, in their order.
DEVICE Sums summed(u32 parts, u32 place) {
    Sums s = {0, 0, 0, 0};
    for (u32 part = 0; part < blocks_in_cluster(); ++part) add_sums(s.v, parts + place * 16, part);
    return s;
}

// Writes the rows of x that are this block's share: scales, bias, activation, residual.
DEVICE void finish(const Arguments& a, u32 parts, u32 tile, u32 first_of_x, u32 part) {
    constexpr u32 J = ROWS / 8, VALUES = CONSUMERS / 2;  // with gates, the first thread that holds values
    const u32 thread = GATED ? threadIdx.x % VALUES : threadIdx.x;
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 split = blocks_in_cluster(), begin = J * part / split, end = J * (part + 1) / split;
    const u32 rows_of_w = GATED ? 2 * a.outputs : a.outputs;
    const u32 first = first_row(tile, thread / 128, a.outputs) + warp * 16;
    const u32 row = first + lane / 4, column = first + lane % 4 * 2;  // of W, and of y
    // With gates, the two halves of the warpgroups take turns: each reads gates and values.
    for (u32 j = begin + (GATED ? threadIdx.x / VALUES : 0); j < end; j += GATED ? 2 : 1) {
        const u32 place = j * CONSUMERS + thread;
        u32 words[2], values[2] = {0, 0};
        const u32 m0 = first_of_x + 8 * j, m = m0 + lane / 4;
        scaled(summed(parts, place), a, row, row < rows_of_w, m0, lane, words);
        if (GATED)
            scaled(summed(parts, place + VALUES), a, row + a.outputs, row + a.outputs < rows_of_w, m0, lane, values);
#pragma unroll
        for (u32 k = 0; k < 2; ++k) {
            if (GATED) {
                const u32 acted = pack(activate(low(words[k])), activate(high(words[k])));
                words[k] = pack(low(acted) * low(values[k]), high(acted) * high(values[k]));
            }
            const u64 at = u64(m) * a.outputs + column + 8 * k;
            if (m < a.rows && column + 8 * k < a.outputs) {
                if (a.residual) words[k] = sum_of(words[k], *(const u32*)(a.residual + at));
                *(u32*)(a.y + at) = words[k];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
rows_product(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Arguments a) {
    extern __shared__ char shared[];
    const u32 base = (address_of(shared) + 1023) & ~1023u;
    const u32 barriers = base + W_STAGES * W_BYTES + X_STAGES * X_BYTES;
    const u32 beside = barriers + 16 * (W_STAGES + X_STAGES);
    const Ring w(base, barriers, beside, W_BYTES, W_STAGES);
    const Ring x(base + W_STAGES * W_BYTES, barriers + 16 * W_STAGES, 0, X_BYTES, X_STAGES);
    const u32 split = blocks_in_cluster(), part = rank_in_cluster(), tiles_of_x = (a.rows + ROWS - 1) / ROWS;
    const u32 tile = blockIdx.x / split / tiles_of_x, first_of_x = blockIdx.x / split % tiles_of_x * ROWS;
    const u32 begin = a.steps * part / split, end = a.steps * (part + 1) / split;
    launch_next_kernel();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < W_STAGES; ++i) {
            init_barrier(w.full + 8 * i, 1);
            init_barrier(w.empty + 8 * i, CONSUMERS / 32);
        }
        for (u32 i = 0; i < X_STAGES; ++i) {
            init_barrier(x.full + 8 * i, 1);
            init_barrier(x.empty + 8 * i, CONSUMERS / 32);
        }
        publish_barriers();
    }
    sync_cluster();
    if (threadIdx.x >= CONSUMERS) {
        give_registers();
        if (threadIdx.x == CONSUMERS) fetch_w(&w_map, a, w, tile, begin, end);
        if (threadIdx.x == CONSUMERS + 32) fetch_x(&x_map, x, first_of_x, begin, end);
        __syncwarp();
        sync_cluster();
    } else {
        take_registers();
        wait_for_previous_kernel();
        float sums[SUMS];
        consume(sums, a, w, x, begin, end);
        sync_consumers();  // nobody reads the rings any more
#pragma unroll
        for (u32 j = 0; j < ROWS / 8; ++j) store_sums(base + (j * CONSUMERS + threadIdx.x) * 16, &sums[4 * j]);
        sync_cluster();  // all parts are there
        finish(a, base, tile, first_of_x, part);
    }
    sync_cluster();  // others may still read this block's memory
}
