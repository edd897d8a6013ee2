// Products of a few rows with a weight, whose tiles come through the ring.
//
// A warp multiplies its columns of each slot with the matching part of the input, which it keeps in registers as the
// fragments of the matrix unit. Its sums are added to those of the other warps in shared memory. The factor of an RMS
// norm in front is the same for all columns, so it is applied to the sums: no warp waits for the whole input.

// The rows of a fragment that the input does not fill hold further columns: with one row of input, row i of the fragment
// has the columns of piece i, and is taken for that piece only. So a warp polls its whole input at once, and holds it in
// few registers.

constexpr int PER_SET = 8 / ROWS;  // pieces of the input in a set of four registers
constexpr int POLLED = 4;          // sets that are polled together

struct Consumer {
    int block, warp, lane;
    int row;      // of the input that this lane holds
    int part;     // piece of each set that it holds
    int quarter;  // of the piece's 32 columns
    int thread;
    Place place;
    int turn = 0;  // of the two buffers of sums
    u32 tag;
};

// Sum over the lanes that hold parts of the same row.
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    for (int mask = 4 * ROWS; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
}

#if TRACE
#define TRACE_AT(event)                                                                                      \
    if (self.thread == 0) step.trace[((i64)self.block * (LAYERS + 1) + layer) * 16 + (event)] = nanoseconds()
#else
#define TRACE_AT(event)
#endif

DEVICE u32 times(u32 x, u32 gain, float& squares) {
    const float a = low_half(x), b = high_half(x);
    squares += a * a + b * b;
    return pack_bf16(a * low_half(gain), b * high_half(gain));
}

// Load this warp's columns of the chunks from `held` on, and add up their squares.
template <Kind KIND>
DEVICE void load_inputs(
    u32 (&inputs)[SETS][4], const Step& step, const Consumer& self, int layer, const u16* gains, int held,
    float& squares) {
    constexpr int K = columns(KIND), CHUNKS = ceil_div(K, CHUNK);
    constexpr int USED = at_most(SETS, ceil_div(CHUNKS * PIECES, PER_SET));
    constexpr bool NORMED = KIND == QKV || KIND == GATE_UP || KIND == HEAD;
    constexpr int BOX =
        KIND == OUT ? ATTENDED_BOX : KIND == GATE_UP ? MIDDLE_BOX : KIND == DOWN ? GATED_BOX : STREAM_BOX;
    const u32 tag = KIND == QKV || KIND == HEAD ? self.tag - 1 : self.tag;  // sent in the layer before, or in this one
    const bool embeds = KIND == QKV && layer == 0;
#pragma unroll
    for (int first = 0; first < USED; first += POLLED) {
        constexpr int N = POLLED < USED ? POLLED : USED;
        Vec4 part[N], gain[N];
        int columns_of[N];
#pragma unroll
        for (int s = 0; s < N; s++) {
            const int piece = (first + s) * PER_SET + self.part, chunk = held + piece / PIECES;
            columns_of[s] = chunk * CHUNK + (self.warp * PIECES + piece % PIECES) * 32 + self.quarter * 8;
            if (first + s >= USED || piece / PIECES >= CHUNKS_HELD || columns_of[s] >= K) columns_of[s] = -1;
            part[s] = gain[s] = Vec4{0, 0, 0, 0};
            if (NORMED && columns_of[s] >= 0) gain[s] = load_once(gains + columns_of[s]);
        }
        if (embeds) {
            const u16* embedded = step.embedding + step.ids[self.row] * HIDDEN;
#pragma unroll
            for (int s = 0; s < N; s++)
                if (columns_of[s] >= 0) part[s] = load_once(embedded + columns_of[s]);
        } else {
            const u64* mail = step.mail + BOX + (i64)self.row * K / 2;
            receive_all<N>(part, [&](int s) { return columns_of[s] < 0 ? nullptr : mail + columns_of[s] / 2; }, tag, 10 + KIND);
        }
#pragma unroll
        for (int s = 0; s < N; s++) {
            if (first + s >= USED) break;
            u32* to = inputs[first + s];
            to[0] = part[s].x, to[1] = part[s].y, to[2] = part[s].z, to[3] = part[s].w;
            if (NORMED) {
                to[0] = times(to[0], gain[s].x, squares), to[1] = times(to[1], gain[s].y, squares);
                to[2] = times(to[2], gain[s].z, squares), to[3] = times(to[3], gain[s].w, squares);
            }
        }
    }
    sync_warp();
}

DEVICE float silu(float x) { return x / (1.0f + exp2_fast(-1.4426950408889634f * x)); }

// Finish result `i` of a group of tiles: `sum` is the product, `scale` the factor of the norm in front.
template <Kind KIND>
DEVICE void finish(
    const Step& step, const Block& block, const Consumer& self, int layer, int group, int i, bool valid, float sum,
    float scale) {
    const int column = i % TILE, row = i / TILE % ROWS, own = group + i / (TILE * ROWS);
    const int tile = self.block + own * BLOCKS;
    float value = sum * scale;
    if (KIND == GATE_UP) {
        const float up = rounded(shuffle_down(value, 4));
        value = rounded(silu(rounded(value))) * up;
        const float next = shuffle_down(value, 1);
        const int output = tile * 4 + column;
        if (valid && column < 4 && column % 2 == 0)
            store_word(step.mail + GATED_BOX + (row * INTER + output) / 2, tagged(pack_bf16(value, next), self.tag));
        return;
    }
    const int output = tile * TILE + column;
    if (KIND == QKV && QKV_BIAS && valid) value += from_bf16(block.layers[layer].bias[output]);
    if (KIND == OUT || KIND == DOWN) {
        float* stream = block.stream + (own * ROWS + row) * TILE + column;
        if (KIND == OUT && layer == 0 && valid)
            *stream = from_bf16(step.embedding[step.ids[row] * HIDDEN + output]);
        if (valid) *stream = value = rounded(rounded(value) + *stream);
    }
    const float next = shuffle_down(value, 1);
    if (!valid || column % 2) return;
    const u32 pair = pack_bf16(value, next);
    if (KIND == HEAD) {
        *(u32*)(step.logits + (i64)row * VOCAB + output) = pair;
        return;
    }
    constexpr int BOX = KIND == QKV ? QKV_BOX : KIND == OUT ? MIDDLE_BOX : STREAM_BOX;
    constexpr int WIDTH = KIND == QKV ? QKV_ROWS : HIDDEN;
    store_word(step.mail + BOX + (row * WIDTH + output) / 2, tagged(pair, self.tag));
}

// Multiply chunk `c` of the input with the next `count` slots, which hold neighbouring tiles. What is multiplied with
// slots beyond them is not used.
template <int T>
DEVICE void multiply_slots(
    float (&products)[T][4], const u32 (&inputs)[SETS][4], int c, int count, const Block& block,
    Consumer& self) {
    Vec4 weights[T][PIECES];
    const int first = self.place.slot;
#pragma unroll
    for (int u = 0; u < T; u++) {
        if (u < count) barrier_wait(&block.full[self.place.slot], self.place.parity, 2);
        const char* tile = block.ring + self.place.slot * SLOT_BYTES + self.lane / 4 * ROW_BYTES +
                           (self.warp * PIECES * 32 + self.quarter * 8) * 2;
#pragma unroll
        for (int p = 0; p < PIECES; p++) weights[u][p] = *(const Vec4*)(tile + 64 * p);
        if (u < count) self.place.advance();
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int piece = c * PIECES + p;
        const bool takes = PER_SET == 1 || self.part == piece % PER_SET;
        const u32* in = inputs[piece / PER_SET];
        const u32 a = takes ? in[0] : 0, b = takes ? in[1] : 0, d = takes ? in[2] : 0, e = takes ? in[3] : 0;
#pragma unroll
        for (int u = 0; u < T; u++) {
            multiply_add(products[u], a, b, weights[u][p].x, weights[u][p].y);
            multiply_add(products[u], d, e, weights[u][p].z, weights[u][p].w);
        }
    }
    sync_warp();
    if (self.lane < count) barrier_arrive(&block.empty[(first + self.lane) % SLOTS]);
}

// Add up the products over the lanes that hold parts of the same row, so that each lane ends with other sums, and write
// these as the warp's sums of tiles `first` to `first + count - 1` of a group.
template <int T>
DEVICE void add_up(float (&products)[T][4], float* sums, int first, int count, bool adds, const Consumer& self) {
    constexpr int N = T > 4 ? 16 : T > 2 ? 8 : 2 * T;  // a power of two
    float x[N] = {};
#pragma unroll
    for (int u = 0; u < T; u++) x[2 * u] = products[u][0], x[2 * u + 1] = products[u][1];
    int at = 0, left = N;
    bool writes = true;
#pragma unroll
    for (int mask = 16; mask >= 4 * ROWS; mask /= 2) {
        const bool upper = self.lane & mask;
        if (left == 1) {
            x[0] += shuffle_xor(x[0], mask);
            writes = writes && !upper;
            continue;
        }
        left /= 2;
        at += upper ? left : 0;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i >= left) break;
            const float kept = upper ? x[i + left] : x[i], sent = upper ? x[i] : x[i + left];
            x[i] = kept + shuffle_xor(sent, mask);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i >= left) break;
        const int u = (at + i) / 2;
        float* to = sums + ((first + u) * ROWS + self.row) * TILE + 2 * self.quarter + (at + i) % 2;
        if (u < count && writes) *to = x[i] + (adds ? *to : 0);
    }
}

// Multiply the input with this block's tiles of a weight, and send the results to the next stage's mailbox.
template <Kind KIND>
STAGE void multiply(Consumer& caller, int layer, const u16* gains) {
    const Block block = shared_parts();
    const Step& step = *block.step;
    Consumer self = caller;
    constexpr int K = columns(KIND), CHUNKS = ceil_div(K, CHUNK);
    constexpr bool NORMED = KIND == QKV || KIND == GATE_UP || KIND == HEAD;
    constexpr int T = together(KIND);
    constexpr bool SEVERAL = CHUNKS > CHUNKS_HELD;
    const int count = own_tiles(KIND, self.block);
    u32 inputs[SETS][4];
    float squares = 0;
#pragma unroll 1
    for (int group = 0; group < count; group += GROUP) {
        float* sums = block.sums + (self.turn * WARPS + self.warp) * SUMS;
        const int end = at_most(group + GROUP, count);
#pragma unroll 1
        for (int held = 0; held < CHUNKS; held += CHUNKS_HELD) {
            if (SEVERAL || group == 0) {
                if (held == 0) squares = 0;
                load_inputs<KIND>(inputs, step, self, layer, gains, held, squares);
                if (group == 0 && held == 0) { TRACE_AT(2 * KIND); }
            }
#pragma unroll 1
            for (int own = group; own < end; own += T) {
                const int count = at_most(T, end - own);
                float products[T][4] = {};
#pragma unroll
                for (int c = 0; c < CHUNKS_HELD; c++) {
                    if (held + c >= CHUNKS) break;
                    multiply_slots<T>(products, inputs, c, count, block, self);
                }
                add_up<T>(products, sums, own - group, count, held > 0, self);
            }
        }
        if (NORMED) {
            const float total = row_sum(squares);
            if (self.quarter == 0 && self.part == 0)
                block.squares[(self.turn * WARPS + self.warp) * ROWS + self.row] = total;
        }
        sync_consumers();
        const int results = (end - group) * ROWS * TILE;
#pragma unroll 1
        for (int base = self.warp * 32; base < results; base += CONSUMERS) {
            const int i = base + self.lane, row = i / TILE % ROWS;
            const bool valid = i < results;
            float sum = 0, total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                if (valid) sum += block.sums[(self.turn * WARPS + w) * SUMS + i];
                if (NORMED && valid) total += block.squares[(self.turn * WARPS + w) * ROWS + row];
            }
            const float scale = NORMED ? inverse_root(total / K + (float)EPS) : 1.0f;
            finish<KIND>(step, block, self, layer, group, i, valid, sum, scale);
        }
        self.turn ^= 1;
    }
    TRACE_AT(2 * KIND + 1);
    caller.place = self.place, caller.turn = self.turn;
}
