// The parts of a block of rows.cu: what it is given, its rings in shared memory, and the threads that fill them.

constexpr u32 WARPGROUPS = OUTS / 64;   // warpgroups that multiply, each 64 rows of W
constexpr u32 CONSUMERS = 128 * WARPGROUPS;
constexpr u32 W_BYTES = OUTS * 128;       // of a step: 128 bytes of each row of W
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 X_PER_W = FORMAT == INT4 ? 4 : FORMAT == INT8 ? 2 : 1;  // tiles of x for a tile of W
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
    const void* w_scale;  // FP8, INT8: float [outputs of W]; INT4: bf16 or fp16 [groups, outputs of W]
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

// The columns of x in the order in which a tile of W needs them: of its bytes, the lower halves and then the upper ones.
DEVICE u32 column_of_x(u32 step, u32 part) {
    const u32 place = FORMAT == INT4 && HALF == 128 ? part / 2 + part % 2 * 2 : part;
    return (step * X_PER_W + place) * X_COLUMNS;
}

DEVICE void fetch_x(const TensorMap* map, Ring ring, u32 row, u32 begin, u32 end) {
    wait_for_previous_kernel();
    for (u32 step = begin; step < end; ++step)
        for (u32 part = 0; part < X_PER_W; ++part, ring.advance()) {
            wait_for(ring.when_empty(), ring.phase ^ 1);
            expect_bytes(ring.when_full(), X_BYTES);
            fetch(ring.tile(), map, column_of_x(step, part), row, ring.when_full());
        }
}
