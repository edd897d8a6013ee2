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
//
// A lane reads 16 bytes of a weight's row: 8 columns of bf16, or 16 of FP8, which are two such pieces. One instruction
// makes two numbers of FP8 fp16, so inputs of such weights are fp16, too: a warp multiplies its part of each row by the
// power of two that brings the row's largest number below 2^15.
//
// Codes of INT4 need no conversion: the bits of a code are those of the fp16 number code * 2^-24, which is subnormal, and
// in the upper half of a byte those of code * 2^-20. The zero of a group is subtracted from its sum, times the sum of the
// group's inputs.

constexpr int FRAGMENT_ROWS = at_most(ROWS, 4);
constexpr int FRAGMENTS = ROWS / FRAGMENT_ROWS;  // for the same columns
constexpr int PARTS = 4 / FRAGMENT_ROWS;         // pieces in a fragment
constexpr int MOST_FRAGMENTS = MOST_COLUMNS * ROWS / (128 * WARPS);  // of a warp's part of an input
constexpr int GROUP_COLUMNS = 128, GROUP_STEPS = 4;  // of a group of INT4 with a scale, and its fragments for a row's part
constexpr float CODE_UNIT = 1.0f / (1 << 24);
constexpr u32 ZERO_MASK = 31;                    // of a word with a scale in fp32, whose lowest bits are the zero
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

// Return the binary logarithm of how many pieces a lane reads at once.
DEVICE int pieces_log(const Product& product) { return FORMAT == BF16 || product.bits == 16 ? 0 : FORMAT == INT4 ? 2 : 1; }

// Return how many fragments a warp has of the inputs of a slot.
DEVICE int slot_fragments(const Product& product) { return PIECES / PARTS * FRAGMENTS << pieces_log(product); }

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

// Return the larger of `most` and the magnitudes of two bf16, all as bits of fp32.
DEVICE int larger_bits(int most, u32 x) {
    return at_least(at_least(most, (int)(x << 16 & 0x7fff0000u)), (int)(x & 0x7fff0000u));
}

DEVICE u32 to_half(u32 x, float factor) { return pack_half(low_half(x) * factor, high_half(x) * factor); }

// Return the largest of the lanes that hold parts of the same row.
DEVICE int row_most(int x) {
    if constexpr (FRAGMENT_ROWS == 1) return (int)warp_most((u32)x);
    for (int mask = 1; mask < 8; mask *= 2) x = at_least(x, (int)exchange_word((u32)x, mask));
    for (int mask = 8 * FRAGMENT_ROWS; mask < 32; mask *= 2) x = at_least(x, (int)exchange_word((u32)x, mask));
    return x;
}

// Turn a warp's inputs from bf16 into fp16, and add up those of groups with a scale. A row that is not finite leaves the
// others as they are. This lane has seen no numbers beyond `most`. Sums are multiplied by `undo`, in the order in which
// lanes hold them (`write_tile`).
DEVICE void scale_inputs(
    Pair* inputs, float* group_sums, int count, const Consumer& self, const int (&most)[FRAGMENTS],
    float (&undo)[FRAGMENTS]) {
    constexpr int BIAS = 127, STEPS = FORMAT == INT4 ? GROUP_STEPS : 1;
    float factor[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        const int exponent = (row_most(most[f]) >> 23) - BIAS;
        const int power = at_most(14 - exponent, BIAS);  // of two
        factor[f] = as_float((u32)(power + BIAS) << 23);
        undo[f] = shuffle_from(as_float((u32)(BIAS - power) << 23), self.quarter % FRAGMENT_ROWS * 8);
        if (FORMAT == INT4) undo[f] *= 1 / CODE_UNIT;
    }
#pragma unroll 2
    for (int first = 0; first < count; first += FRAGMENTS * STEPS)
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            float sum = 0;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                Pair* at = inputs + (first + step * FRAGMENTS + f) * 32 + self.lane;
                const Pair x = *at;
                *at = Pair{to_half(x.x, factor[f]), to_half(x.y, factor[f])};
                if (FORMAT == INT4) sum += (low_half(x.x) + high_half(x.x)) + (low_half(x.y) + high_half(x.y));
            }
            if (FORMAT == INT4) {
                sum *= factor[f] * CODE_UNIT;
                for (int mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
                if (self.lane % 8 == 0) group_sums[(first / STEPS + f) * 4 + self.lane / 8] = sum;
            }
        }
    if (FORMAT == INT4) sync_warp();
}

// Return the first of the four columns of an input that this lane loads of a fragment.
DEVICE int input_column(const Consumer& self, int fragment, int log) {
    const int chunk = fragment / (PIECES / PARTS) >> log, within = fragment - (chunk * (PIECES / PARTS) << log);
    const int before = (chunk * WARPS + self.warp) * PIECES << log;  // pieces
    if (log == 2) {
        const int group = before / 4 + within / GROUP_STEPS * PARTS + self.part, step = within % GROUP_STEPS;
        return group * GROUP_COLUMNS + step / 2 * 64 + self.quarter * 16 + step % 2 * 8 + self.half * 4;
    }
    const int piece = within * PARTS + self.part, second = piece & log;
    return (before + piece - second) * 32 + (self.quarter << log) * 8 + second * 8 + self.half * 4;
}

// Load this warp's columns of the input into shared memory, as fragments, the sums of their squares, and by what products
// must be multiplied.
DEVICE void load_inputs(
    const Step& step, const Consumer& self, const Product& product, u32 tag, const u16* gains, Pair* inputs,
    float* group_sums, float (&squares)[FRAGMENTS], float (&undo)[FRAGMENTS]) {
    constexpr int N = at_most(POLLED, MOST_FRAGMENTS);
    static_assert(N % FRAGMENTS == 0, "fragment i of each turn has the same rows");
    const u64* mail = step.mail + own_copy(self.block) + product.input;
    const int count = product.chunks * slot_fragments(product);
    const int log = pieces_log(product);
    int most[FRAGMENTS] = {};
#pragma unroll 1
    for (int first = 0; first < count; first += N) {
        u32 part[N][2];
        Pair gain[N];
        const u64* from[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int column = input_column(self, (first + i) / FRAGMENTS, log);
            const int row = self.row + (first + i) % FRAGMENTS * FRAGMENT_ROWS;
            const bool exists = first + i < count && column < product.columns;
            from[i] = exists ? mail + (row * product.columns + column) / 2 : nullptr;
            part[i][0] = part[i][1] = 0, gain[i] = Pair{0, 0};
            if (product.normed && exists) gain[i] = load_pair(gains + column);
        }
        receive<N>(part, [&](int i) { return from[i]; }, tag, 10);
        sync_warp();
#pragma unroll
        for (int i = 0; i < N; i++) {
            Pair x = Pair{part[i][0], part[i][1]};
            if (product.normed) {
                float& sum = squares[i % FRAGMENTS];
                x = Pair{times(x.x, gain[i].x, sum), times(x.y, gain[i].y, sum)};
            }
            if (log) most[i % FRAGMENTS] = larger_bits(larger_bits(most[i % FRAGMENTS], x.x), x.y);
            if (FORMAT == INT4 && log) x = Pair{x.x & 0xffff | x.y << 16, x.x >> 16 | x.y & 0xffff0000u};
            // This lane has the first or second half of 8 columns, and needs those that lie as `a` has them.
            const u32 other = exchange_word(self.half ? x.x : x.y, 4);
            if (first + i < count) inputs[(first + i) * 32 + self.lane] = self.half ? Pair{other, x.y} : Pair{x.x, other};
        }
    }
    sync_warp();
    if (log) scale_inputs(inputs, group_sums, count, self, most, undo);
}

DEVICE float silu(float x) { return divide(x, 1.0f + exp2_fast(-1.4426950408889634f * x)); }

// Finish result `i` of a group of tiles: `sum` is the product, `scale` the factor of the norm in front and of the weight.
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

// Multiply-add piece `number` of a slot, in bf16 or fp16, whose fragments are `in`.
template <bool HALF>
DEVICE void multiply_piece(Products& products, const Vec4& weights, const Pair* in, int number) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        const Pair x = in[number / PARTS * FRAGMENTS + f];
        multiply_add<HALF>(products[f][number % PARTS], weights, x.x, x.y);
    }
}

// Multiply-add the two pieces of FP8 numbers that lanes read at once.
DEVICE void multiply_two_pieces(Products& products, const Vec4& read, const Pair* in, int number) {
    const Pair x = unpack_fp8(read.x), y = unpack_fp8(read.y), z = unpack_fp8(read.z), w = unpack_fp8(read.w);
    multiply_piece<true>(products, Vec4{x.x, x.y, y.x, y.y}, in, number);
    multiply_piece<true>(products, Vec4{z.x, z.y, w.x, w.y}, in, number + 1);
}

// Multiply a chunk of the input with the next slot of the ring, of numbers of `WIDTH` bytes.
// `scales` are a lane's of `BlockScales`.
template <int WIDTH>
DEVICE void multiply_slot(
    Products& products, const Pair* inputs, const Block& block, Consumer& self, int chunk, float scales) {
    constexpr int COUNT = PIECES / PARTS * FRAGMENTS * 2 / WIDTH;
    const char* tile = block.ring + self.place.slot * SLOT_BYTES + self.lane / 4 * ROW_BYTES;
    const char* own = tile + (self.warp * PIECES * 4 + self.quarter) * 16;
    while (!barrier_passed(&block.full[self.place.slot], self.place.parity)) {}
    Vec4 weights[PIECES];
    Pair in[COUNT];
#pragma unroll
    for (int p = 0; p < PIECES; p++) weights[p] = *(const Vec4*)(own + 64 * p);
#pragma unroll
    for (int i = 0; i < COUNT; i++) in[i] = inputs[i * 32];
    if constexpr (WIDTH == 2) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) multiply_piece<false>(products, weights[p], in, p);
    } else if constexpr (FORMAT == FP8_ROWS) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) multiply_two_pieces(products, weights[p], in, 2 * p);
    } else {
#pragma unroll
        for (int p = 0; p < PIECES; p += 2) {
            Products unscaled = {};
            multiply_two_pieces(unscaled, weights[p], in, 2 * p);
            multiply_two_pieces(unscaled, weights[p + 1], in, 2 * p + 2);
            const float scale = shuffle_from(scales, self.lane / 16 * 16 + chunk * (PIECES / 2) + p / 2);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
                for (int i = 0; i < PARTS; i++)
                    products[f][i][0] += scale * (unscaled[f][i][0] + unscaled[f][i][3]);
        }
    }
    sync_warp();
    if (self.lane == 0) barrier_arrive(&block.empty[self.place.slot]);
    self.place.advance();
}

// Multiply a chunk of the input with the next slot of the ring, of INT4. Of 128 bytes of a row, the lower halves are the
// codes of a group of columns, and the upper halves those of the next group.
DEVICE void multiply_codes(
    Products& products, const Pair* inputs, const float* group_sums, const Block& block, Consumer& self) {
    const char* slot = block.ring + self.place.slot * SLOT_BYTES;
    const char* own = slot + self.lane / 4 * ROW_BYTES + (self.warp * PIECES * 4 + self.quarter) * 16;
    const int part = self.quarter / FRAGMENT_ROWS;  // of the sums that count, which this lane holds
    const u32* scales = (const u32*)(slot + SCALES_AT) + (self.warp * PIECES + part) * TILE + self.lane / 4;
    while (!barrier_passed(&block.full[self.place.slot], self.place.parity)) {}
    Vec4 weights[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) weights[p] = *(const Vec4*)(own + 64 * p);
#pragma unroll
    for (int first = 0; first < PIECES; first += PARTS) {  // groups whose sums are in one fragment
        const u32 scale = scales[first * TILE];
        Products sums = {};
#pragma unroll
        for (int step = 0; step < GROUP_STEPS; step++)
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                const int group = first + i;
                const Vec4& read = weights[group / 2 * 2 + step / 2];
                const u32 a = step % 2 ? read.z : read.x, b = step % 2 ? read.w : read.y;
                const u32 mask = group % 2 ? 0x00f000f0u : 0x000f000fu;
                const Vec4 codes = {a & mask, a >> 8 & mask, b & mask, b >> 8 & mask};
#pragma unroll
                for (int f = 0; f < FRAGMENTS; f++) {
                    const Pair x = inputs[((first / PARTS * GROUP_STEPS + step) * FRAGMENTS + f) * 32];
                    multiply_add<true>(sums[f][i], codes, x.x, x.y);
                }
            }
        const float unit = (first + part) % 2 ? 0.0625f : 1.0f, zero = (float)(scale & ZERO_MASK);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < PARTS; i++) sum = i == part ? sums[f][i][0] + sums[f][i][3] : sum;
            sum = sum * unit - zero * group_sums[(first / PARTS * FRAGMENTS + f) * 4 + self.quarter];
#pragma unroll
            for (int i = 0; i < PARTS; i++) products[f][i][0] += as_float(scale & ~ZERO_MASK) * sum;
        }
    }
    sync_warp();
    if (self.lane == 0) barrier_arrive(&block.empty[self.place.slot]);
    self.place.advance();
}

// Write a warp's sums of a tile: lane i has those of its row i / 4 with row and part i % 4 of the input.
DEVICE void write_tile(
    const Products& products, const float (&undo)[FRAGMENTS], float* to, const Consumer& self) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const float of_part = products[f][i][0] + products[f][i][3];
            sum = i == self.quarter / FRAGMENT_ROWS ? of_part : sum;
        }
        to[f * 32] = FORMAT == BF16 ? sum : sum * undo[f];
    }
}

// Add up what four lanes have of a tile's row: the parts of row `row` of a fragment.
DEVICE float sum_of_parts(const Vec4& x, int row) {
    const float a = as_float(x.x), b = as_float(x.y), c = as_float(x.z), d = as_float(x.w);
    if (PARTS == 4) return (a + b) + (c + d);
    if (PARTS == 2) return row ? b + d : a + c;
    return row == 0 ? a : row == 1 ? b : row == 2 ? c : d;
}

// Load this lane's share of the scales of a tile of blocks: lanes below 16 have those of the tile's first half of rows
// and the warp's columns, in order, the others those of the second half.
DEVICE float load_block_scale(
    const Block& block, const Consumer& self, Kind kind, const Product& product, int layer, int own) {
    const int i = self.lane % 16, chunk = i / (PIECES / 2);
    const int column = (chunk * WARPS + self.warp) * (PIECES / 2) + i % (PIECES / 2);  // in blocks
    const int columns = product.columns / SCALE_BLOCK;
    if (FORMAT != FP8_BLOCKS || kind == HEAD || column >= columns) return 0;
    const int row = tile_row(kind, tile_of(product, self.block, own), self.lane / 16 * (TILE / 2)) / SCALE_BLOCK;
    return as_float(load_word32(block.layers[layer].scales[kind] + row * columns + column));
}

constexpr int RESULTS_EACH = ceil_div(GROUP * ROWS * TILE, CONSUMERS);  // of a group, that a thread finishes

// Load the scales of the rows whose results this thread finishes: early, because it is a trip to memory.
DEVICE void load_scales(
    float (&scales)[RESULTS_EACH], const Block& block, const Consumer& self, Kind kind, const Product& product,
    int layer, int group, int count) {
    const bool has_scales = FORMAT == FP8_ROWS && kind != HEAD;
#pragma unroll
    for (int n = 0; n < RESULTS_EACH; n++) {
        const int i = n * CONSUMERS + self.thread, own = group + i / (TILE * ROWS);
        scales[n] = 1;
        if (has_scales && own < count && i < GROUP * ROWS * TILE) {
            const int row = tile_row(kind, tile_of(product, self.block, own), i % TILE);
            scales[n] = as_float(load_word32(block.layers[layer].scales[kind] + row));
        }
    }
}

// Multiply the input with this block's tiles of a weight, and send the results to the next stage's mailbox.
DEVICE void multiply(const Step& step, const Block& block, Consumer& self, Kind kind, int layer, const u16* gains) {
    const Product product = PRODUCTS[kind];
    const int count = own_tiles(product, self.block);
    TRACE_AT(16 + kind * 8);
    if (count == 0) return;
    Pair* inputs = block.inputs + self.warp * (MOST_FRAGMENTS * 32);
    float* group_sums = block.group_sums + self.warp * MOST_FRAGMENTS;
    float squares[FRAGMENTS] = {}, scales[RESULTS_EACH], undo[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) undo[f] = 1;
    load_scales(scales, block, self, kind, product, layer, 0, count);
    float block_scale = load_block_scale(block, self, kind, product, layer, 0);
    const u32 tag = kind == QKV || kind == HEAD ? self.tag - 1 : self.tag;
    load_inputs(step, self, product, tag, gains, inputs, group_sums, squares, undo);
    TRACE_AT(17 + kind * 8);
#pragma unroll 1
    for (int group = 0; group < count; group += GROUP) {
        const int end = at_most(group + GROUP, count);
        float* sums = block.sums + (self.turn * WARPS + self.warp) * SUMS + self.lane;
#pragma unroll 1
        for (int tile = group; tile < end; tile++) {
            Products products = {};
            const float next_scale = load_block_scale(block, self, kind, product, layer, at_most(tile + 1, count - 1));
#pragma unroll 1
            for (int chunk = 0; chunk < product.chunks; chunk++) {
                const Pair* part = inputs + chunk * slot_fragments(product) * 32 + self.lane;
                if (FORMAT == BF16 || kind == HEAD)
                    multiply_slot<2>(products, part, block, self, chunk, block_scale);
                else if (FORMAT == INT4)
                    multiply_codes(products, part, group_sums + chunk * PIECES / PARTS * FRAGMENTS * 4, block, self);
                else
                    multiply_slot<1>(products, part, block, self, chunk, block_scale);
            }
            block_scale = next_scale;
            write_tile(products, undo, sums, self);
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
#pragma unroll
        for (int n = 0; n < RESULTS_EACH; n++) {
            const int base = n * CONSUMERS + self.warp * 32, i = base + self.lane;
            if (base >= results) break;
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
            const float norm = product.normed ? inverse_root(total * product.part + (float)EPS) : 1.0f;
            finish(step, block, self, kind, product, layer, group, i, valid, value, norm * scales[n]);
        }
        load_scales(scales, block, self, kind, product, layer, end, count);
        self.turn ^= 1;
    }
    TRACE_AT(21 + kind * 8);
}
