// y = x W^T for 17 to 256 rows of x on Hopper's matrix units: bound by reading W, or by the matrix rate.
//
// A matrix instruction takes 64 outputs and all rows of x, so that few rows waste nothing: it computes y^T = W x^T. Two
// threads send tiles of W and of x through rings in shared memory (TMA), and two or four warpgroups multiply. The tiles of
// W that fill its ring first are requested before the kernel waits for the one that computes x.
//
// The blocks of a cluster compute parts of the inputs of the same outputs. Each of them then sums a part of the
// rows, which it reads from the shared memory of the others.
//
// In shared memory: tiles of W, tiles of x, barriers, scales.
//
// Defined by rows.py: ROWS (of x, padded), OUTS, W_STAGES, X_STAGES, FORMAT, HALF and GROUP (of 4-bit codes),
// FP16, GATED, KIND, and `multiply`, the matrix instruction.

constexpr u32 WARPGROUPS = OUTS / 64;   // warpgroups that multiply, each 64 rows of W
constexpr u32 CONSUMERS = 128 * WARPGROUPS;
constexpr u32 W_BYTES = OUTS * 128;       // of a step: 128 bytes of each row of W
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 X_PER_W = FORMAT == INT4 ? 4 : 1;  // tiles of x for a tile of W
constexpr u32 X_COLUMNS = FORMAT == FP8 ? 128 : 64;
constexpr u32 W_COLUMNS = FORMAT == BITS16 ? 64 : 128;  // elements of the map of W
constexpr u32 SUMS = ROWS / 2;            // of a thread
constexpr u32 RUNS = 128 / HALF;          // of 2 * HALF columns in a tile of W, with 4-bit codes
constexpr u32 SCALE_BYTES = FORMAT == INT4 ? RUNS * 2 * OUTS * 2 : 0;  // of a tile of W; zeros follow, half as many bytes
constexpr u64 READ_ONCE = 0x12F0000000000000ull;  // cache policy: evict first

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Arguments {
    u16* y;
    const u16* bias;      // [outputs of W], or null
    const u16* residual;  // like y, or null
    const void* w_scale;  // FP8: float [outputs of W]; INT4: bf16 or fp16 [groups, outputs of W]
    const u8* w_zero;     // INT4: [groups, outputs of W], or null
    const float* x_scale; // FP8: [rows]
    u32 rows;
    u32 outputs;          // columns of y
    u32 steps;            // 128 bytes of a row of W each
    u32 groups;
};

// A ring of tiles in shared memory, with a barrier for each tile that is full and for each that is empty.
struct Ring {
    u32 tiles, full, empty, beside, bytes, stages, slot, phase;
    DEVICE Ring(u32 tiles, u32 barriers, u32 beside, u32 bytes, u32 stages)
        : tiles(tiles), full(barriers), empty(barriers + 8 * stages), beside(beside), bytes(bytes), stages(stages), slot(0),
          phase(0) {}
    DEVICE u32 tile() const { return tiles + slot * bytes; }
    DEVICE u32 when_full() const { return full + 8 * slot; }
    DEVICE u32 when_empty() const { return empty + 8 * slot; }
    DEVICE u32 scales() const { return beside + slot * (SCALE_BYTES + SCALE_BYTES / 2); }
    DEVICE void advance() {
        if (++slot == stages) slot = 0, phase ^= 1;
    }
};

// The row of W at which the 64 rows of a warpgroup begin. With gates, half of the warpgroups have the values.
DEVICE u32 first_row(u32 tile, u32 warpgroup, u32 outputs) {
    if (!GATED) return tile * OUTS + warpgroup * 64;
    return warpgroup / (WARPGROUPS / 2) * outputs + tile * (OUTS / 2) + warpgroup % (WARPGROUPS / 2) * 64;
}

// The scales and zeros of the groups of a tile of W.
DEVICE void fetch_groups(const Arguments& a, const Ring& ring, u32 tile, u32 step) {
    const u32 rows_of_w = GATED ? 2 * a.outputs : a.outputs;
    for (u32 run = 0; run < 2 * RUNS; ++run) {
        const u32 group = min(GROUP ? (step * 256 + run * HALF) / max(GROUP, 1) : 0, a.groups - 1);
        for (u32 i = 0; i < WARPGROUPS; ++i) {
            u32 row = first_row(tile, i, a.outputs);
            if (row >= rows_of_w) row = 0;  // not written
            const u64 from = u64(group) * rows_of_w + row;
            const u32 place = run * OUTS + i * 64;
            fetch_bytes(ring.scales() + 2 * place, (const u16*)a.w_scale + from, 128, ring.when_full());
            if (a.w_zero) fetch_bytes(ring.scales() + SCALE_BYTES + place, a.w_zero + from, 64, ring.when_full());
        }
    }
}

DEVICE void fetch_w(const TensorMap* map, const Arguments& a, Ring ring, u32 tile, u32 begin, u32 end) {
    const u32 bytes = W_BYTES + SCALE_BYTES + (FORMAT == INT4 && a.w_zero ? SCALE_BYTES / 2 : 0);
    for (u32 step = begin; step < end; ++step, ring.advance()) {
        wait_for(ring.when_empty(), ring.phase ^ 1);
        expect_bytes(ring.when_full(), bytes);
        for (u32 i = 0; i < WARPGROUPS; ++i)
            fetch_once(ring.tile() + i * 64 * 128, map, step * W_COLUMNS, first_row(tile, i, a.outputs), ring.when_full(),
                       READ_ONCE);
        if (FORMAT == INT4) fetch_groups(a, ring, tile, step);
    }
}

DEVICE void fetch_x(const TensorMap* map, Ring ring, u32 begin, u32 end) {
    wait_for_previous_kernel();
    for (u32 step = begin * X_PER_W; step < end * X_PER_W; ++step, ring.advance()) {
        wait_for(ring.when_empty(), ring.phase ^ 1);
        expect_bytes(ring.when_full(), X_BYTES);
        fetch(ring.tile(), map, step * X_COLUMNS, 0, ring.when_full());
    }
}

#if FORMAT != INT4

DEVICE void consume(float (&sums)[SUMS], const Arguments& a, Ring w, Ring x, u32 tile, u32 begin, u32 end) {
    const u32 warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    u32 w_before = 0, x_before = 0;
    for (u32 step = begin; step < end; ++step) {
        wait_for(w.when_full(), w.phase);
        wait_for(x.when_full(), x.phase);
        begin_products();
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            multiply(sums, tile_descriptor(w.tile() + warpgroup * 64 * 128) + 2 * i, tile_descriptor(x.tile()) + 2 * i,
                     step > begin || i > 0);
        end_products();
        if (step > begin) {
            wait_for_products<1>();
            release(w_before, lane);
            release(x_before, lane);
        }
        w_before = w.when_empty(), x_before = x.when_empty();
        w.advance(), x.advance();
    }
    wait_for_products<0>();
    // The rings are not filled again.
}

#endif

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

// Returns the words of two neighbouring outputs, and of those 8 behind, for row 8 j + lane / 4 of x.
DEVICE void scaled(Sums s, const Arguments& a, u32 row, bool real, u32 j, u32 lane, u32 (&words)[2]) {
    if (FORMAT == FP8 && real) {
        const float* scale = (const float*)a.w_scale;
        const u32 m = 8 * j + lane % 4 * 2;
        const float x0 = m < a.rows ? a.x_scale[m] : 0, x1 = m + 1 < a.rows ? a.x_scale[m + 1] : 0;
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
DEVICE void finish(const Arguments& a, u32 parts, u32 tile, u32 part) {
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
        scaled(summed(parts, place), a, row, row < rows_of_w, j, lane, words);
        if (GATED)
            scaled(summed(parts, place + VALUES), a, row + a.outputs, row + a.outputs < rows_of_w, j, lane, values);
        const u32 m = 8 * j + lane / 4;
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
    const u32 split = blocks_in_cluster(), part = rank_in_cluster(), tile = blockIdx.x / split;
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
        if (threadIdx.x == CONSUMERS + 32) fetch_x(&x_map, x, begin, end);
        __syncwarp();
        sync_cluster();
    } else {
        take_registers();
        wait_for_previous_kernel();
        float sums[SUMS];
        consume(sums, a, w, x, tile, begin, end);
        sync_consumers();  // nobody reads the rings any more
#pragma unroll
        for (u32 j = 0; j < ROWS / 8; ++j) store_sums(base + (j * CONSUMERS + threadIdx.x) * 16, &sums[4 * j]);
        sync_cluster();  // all parts are there
        finish(a, base, tile, part);
    }
    sync_cluster();  // others may still read this block's memory
}
