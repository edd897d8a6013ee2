// Products of a few rows with a weight, whose tiles come through the ring.
//
// A warp multiplies its columns of each slot with the matching part of the input, which it keeps in shared memory as
// fragments of the matrix unit. Its sums are added to those of the other warps in shared memory. The factor of an RMS
// norm in front is the same for all columns, so it is applied to the sums: no warp waits for the whole input.
//
// The unit multiplies a[16 x 16] with b[16 x 8]. Rows 0 to 7 of `a` are a tile's rows with one half of 32 columns, rows 8
// to 15 the same rows with the other half. Columns 2 i and 2 i + 1 of `b` are the halves of row i of the input,
// so the sum of a tile's row and row i is c[row][2 i] + c[row + 8][2 i + 1], which one lane holds. Columns that the rows
// do not fill hold further pieces of 32 columns: a fragment then serves several pieces, each with sums of its own.

constexpr int FRAGMENT_ROWS = at_most(ROWS, 4);
constexpr int FRAGMENTS = ROWS / FRAGMENT_ROWS;  // for the same columns
constexpr int PARTS = 4 / FRAGMENT_ROWS;         // pieces in a fragment
constexpr int CHUNK_FRAGMENTS = PIECES / PARTS * FRAGMENTS;
constexpr int MOST_FRAGMENTS = MOST_CHUNKS * CHUNK_FRAGMENTS;  // of an input
constexpr int POLLED = 8;                        // fragments that are polled together
static_assert(ROWS == FRAGMENTS * FRAGMENT_ROWS && 4 == PARTS * FRAGMENT_ROWS, "1, 2, 4 or 8 rows");
static_assert(PIECES % PARTS == 0, "a fragment serves one chunk");
static_assert(MOST_FRAGMENTS * 256 * WARPS == INPUT_BYTES, "as parts.h counts");

struct Consumer {
    int block, warp, lane, thread;
    int row, part;  // of a fragment, that this lane holds
    int half;       // of the 8 columns that four lanes hold
    int quarter;    // of a piece's 32 columns
    Place place;
    int turn = 0;   // of the two buffers of sums
    u32 tag;
};

// Sum over the lanes that hold parts of the same row.
DEVICE float row_sum(float x) {
    for (int mask = 1; mask < 8; mask *= 2) x += shuffle_xor(x, mask);
    for (int mask = 8 * FRAGMENT_ROWS; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
}

// Events: 0 to 7 in attention.h, 16 + 8 * kind + 0 to 5 here.
#if TRACE
#define TRACE_AT(event)                                                                                             \
    if (self.lane == 0)                                                                                             \
    step.trace[(((i64)self.block * (LAYERS + 1) + layer) * WARPS + self.warp) * 64 + (event)] = nanoseconds()
#else
#define TRACE_AT(event)
#endif

DEVICE u32 times(u32 x, u32 gain, float& squares) {
    const float a = low_half(x), b = high_half(x);
    squares += a * a + b * b;
    return pack_bf16(a * low_half(gain), b * high_half(gain));
}

DEVICE Pair load_gains(const u16* at) { return Pair{load_word32(at), load_word32(at + 4)}; }

// Load this warp's columns of the input into shared memory, as fragments; return the sums of their squares.
DEVICE void load_inputs(
    const Step& step, const Consumer& self, const Product& product, u32 tag, const u16* gains, Pair* inputs,
    float (&squares)[FRAGMENTS]) {
    constexpr int N = at_most(POLLED, MOST_FRAGMENTS);
    static_assert(N % FRAGMENTS == 0, "fragment i of each turn has the same rows");
    const u64* mail = step.mail + own_copy(self.block) + product.input;
    const int count = product.chunks * CHUNK_FRAGMENTS;
#pragma unroll 1
    for (int first = 0; first < count; first += N) {
        u32 part[N][2];
        Pair gain[N];
        const u64* from[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int fragment = (first + i) / FRAGMENTS, chunk = fragment / (PIECES / PARTS);
            const int piece = self.warp * PIECES + fragment % (PIECES / PARTS) * PARTS + self.part;
            const int column = chunk * CHUNK + piece * 32 + self.quarter * 8 + self.half * 4;
            const int row = self.row + (first + i) % FRAGMENTS * FRAGMENT_ROWS;
            const bool exists = first + i < count && column < product.columns;
            from[i] = exists ? mail + (row * product.columns + column) / 2 : nullptr;
            part[i][0] = part[i][1] = 0, gain[i] = Pair{0, 0};
            if (product.normed && exists) gain[i] = load_gains(gains + column / 8 * 8 + self.half * 2);
        }
        receive<N>(part, [&](int i) { return from[i]; }, tag, 10);
        sync_warp();
#pragma unroll
        for (int i = 0; i < N; i++) {
            // This lane has two words of the first or second half of 8 columns, and needs those that lie as `a` has them.
            const u32 other = exchange_word(self.half ? part[i][0] : part[i][1], 4);
            Pair x = self.half ? Pair{other, part[i][1]} : Pair{part[i][0], other};
            if (product.normed) {
                float& sum = squares[i % FRAGMENTS];
                x = Pair{times(x.x, gain[i].x, sum), times(x.y, gain[i].y, sum)};
            }
            if (first + i < count) inputs[(first + i) * 32 + self.lane] = x;
        }
    }
    sync_warp();
}

DEVICE float silu(float x) { return divide(x, 1.0f + exp2_fast(-1.4426950408889634f * x)); }

// Finish result `i` of a group of tiles: `sum` is the product, `scale` the factor of the norm in front.
DEVICE void finish(
    const Step& step, const Block& block, const Consumer& self, Kind kind, const Product& product, int layer, int group,
    int i, bool valid, float sum, float scale) {
    const int column = i % TILE, row = i / TILE % ROWS, own = group + i / (TILE * ROWS);
    const int tile = tile_of(product, self.block, own);
    float value = sum * scale;
    int output = tile * TILE + column;
    if (kind == GATE_UP) {
        const float up = rounded(shuffle_down(value, 4));
        value = rounded(silu(rounded(value))) * up;
        output = tile * (TILE / 2) + column;
        valid = valid && column < TILE / 2;
    } else if (kind == OUT || kind == DOWN) {
        float* stream = block.stream + (own * ROWS + row) * TILE + column;
        if (valid) *stream = value = rounded(rounded(value) + *stream);
    } else if (QKV_BIAS && kind == QKV && valid) {
        value += from_bf16(block.layers[layer].bias[output]);
    }
    const float next = shuffle_down(value, 1);
    if (!valid || column % 2) return;
    const u32 pair = pack_bf16(value, next);
    const i64 at = (i64)row * product.width + output;
    if (kind == HEAD)
        *(u32*)(step.logits + at) = pair;
    else
        send(step, product.output + at / 2, tagged(pair, self.tag), kind != QKV);
}

using Products = float[FRAGMENTS][PARTS][4];

// Multiply a chunk of the input with the next slot of the ring.
DEVICE void multiply_slot(Products& products, const Pair* inputs, const Block& block, Consumer& self) {
    const char* tile = block.ring + self.place.slot * SLOT_BYTES + self.lane / 4 * ROW_BYTES +
                       (self.warp * PIECES * 32 + self.quarter * 8) * 2;
    while (!barrier_passed(&block.full[self.place.slot], self.place.parity)) {}
    Vec4 weights[PIECES];
    Pair in[CHUNK_FRAGMENTS];
#pragma unroll
    for (int p = 0; p < PIECES; p++) weights[p] = *(const Vec4*)(tile + 64 * p);
#pragma unroll
    for (int i = 0; i < CHUNK_FRAGMENTS; i++) in[i] = inputs[i * 32];
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            const Pair x = in[p / PARTS * FRAGMENTS + f];
            multiply_add(products[f][p % PARTS], weights[p], x.x, x.y);
        }
    sync_warp();
    if (self.lane == 0) barrier_arrive(&block.empty[self.place.slot]);
    self.place.advance();
}

// Write a warp's sums of a tile: lane i has those of its row i / 4 with row and part i % 4 of the input.
DEVICE void write_tile(const Products& products, float* to, const Consumer& self) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const float of_part = products[f][i][0] + products[f][i][3];
            sum = i == self.quarter / FRAGMENT_ROWS ? of_part : sum;
        }
        to[f * 32] = sum;
    }
}

// Add up what four lanes have of a tile's row: the parts of row `row` of a fragment.
DEVICE float sum_of_parts(const Vec4& x, int row) {
    const float a = as_float(x.x), b = as_float(x.y), c = as_float(x.z), d = as_float(x.w);
    if (PARTS == 4) return (a + b) + (c + d);
    if (PARTS == 2) return row ? b + d : a + c;
    return row == 0 ? a : row == 1 ? b : row == 2 ? c : d;
}

// Multiply the input with this block's tiles of a weight, and send the results to the next stage's mailbox.
DEVICE void multiply(const Step& step, const Block& block, Consumer& self, Kind kind, int layer, const u16* gains) {
    const Product product = PRODUCTS[kind];
    const int count = own_tiles(product, self.block);
    TRACE_AT(16 + kind * 8);
    if (count == 0) return;
    Pair* inputs = block.inputs + self.warp * (MOST_FRAGMENTS * 32);
    float squares[FRAGMENTS] = {};
    load_inputs(step, self, product, kind == QKV || kind == HEAD ? self.tag - 1 : self.tag, gains, inputs, squares);
    TRACE_AT(17 + kind * 8);
#pragma unroll 1
    for (int group = 0; group < count; group += GROUP) {
        const int end = at_most(group + GROUP, count);
        float* sums = block.sums + (self.turn * WARPS + self.warp) * SUMS + self.lane;
#pragma unroll 1
        for (int tile = group; tile < end; tile++) {
            Products products = {};
#pragma unroll 1
            for (int chunk = 0; chunk < product.chunks; chunk++)
                multiply_slot(products, inputs + chunk * CHUNK_FRAGMENTS * 32 + self.lane, block, self);
            write_tile(products, sums, self);
            sums += FRAGMENTS * 32;
        }
        TRACE_AT(18 + kind * 8);
        if (product.normed) {
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                const float total = row_sum(squares[f]);
                if (self.quarter == 0 && self.half == 0 && self.part == 0)
                    block.squares[(self.turn * WARPS + self.warp) * ROWS + f * FRAGMENT_ROWS + self.row] = total;
            }
        }
        TRACE_AT(19 + kind * 8);
        sync_consumers();
        TRACE_AT(20 + kind * 8);
        const int results = (end - group) * ROWS * TILE;
#pragma unroll 1
        for (int base = self.warp * 32; base < results; base += CONSUMERS) {
            const int i = base + self.lane;
            const bool valid = i < results;
            const int column = i % TILE, row = i / TILE % ROWS, tile = valid ? i / (TILE * ROWS) : 0;
            const char* from = (const char*)(block.sums + self.turn * WARPS * SUMS + tile * FRAGMENTS * 32 +
                                             row / FRAGMENT_ROWS * 32 + column * 4);
            const float* norms = block.squares + self.turn * WARPS * ROWS + row;
            float value = 0, total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                value += sum_of_parts(*(const Vec4*)(from + w * SUMS * 4), row % FRAGMENT_ROWS);
                total += norms[w * ROWS];
            }
            const float scale = product.normed ? inverse_root(total * product.part + (float)EPS) : 1.0f;
            finish(step, block, self, kind, product, layer, group, i, valid, value, scale);
        }
        self.turn ^= 1;
    }
    TRACE_AT(21 + kind * 8);
}
