// Sizes, mailboxes, the ring of weight tiles.
//
// Set by the host (schedule.py): HIDDEN, HEADS, KV_HEADS, DIM, INTER, LAYERS, VOCAB (0: no head), ROWS, BLOCK_SIZE,
// QK_NORM, QKV_BIAS, EPS, SCALE, BLOCKS, WARPS, PIECES, SLOTS, GROUP_ROWS, CHUNKS_HELD, TOGETHER,
// SPLITS, SHARED.

enum Kind { QKV, OUT, GATE_UP, DOWN, HEAD };

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int at_most(int a, int b) { return a < b ? a : b; }

constexpr int QKV_ROWS = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int ATTENDED = HEADS * DIM;
constexpr int TILE = 8;                     // rows of a weight that are multiplied together
constexpr int CHUNK = WARPS * PIECES * 32;  // columns of a tile in one slot of the ring
constexpr int ROW_BYTES = CHUNK * 2 + 64;  // 64 bytes apart, neighbouring rows use different banks
constexpr int SLOT_BYTES = TILE * ROW_BYTES;
constexpr int SETS = ceil_div(CHUNKS_HELD * PIECES * ROWS, 8);  // of four registers, for the input that a warp holds
constexpr int GROUP = GROUP_ROWS / ROWS > 1 ? GROUP_ROWS / ROWS : 1;  // tiles that are summed over warps together
constexpr int SUMS = GROUP * ROWS * TILE;   // results of such a group

constexpr int columns(Kind kind) { return kind == OUT ? ATTENDED : kind == DOWN ? INTER : HIDDEN; }
constexpr int tiles(Kind kind) {
    return kind == QKV       ? QKV_ROWS / TILE
           : kind == GATE_UP ? 2 * INTER / TILE
           : kind == HEAD    ? VOCAB / TILE
                             : HIDDEN / TILE;
}

// Tiles that a warp multiplies at once, so that their steps overlap.
constexpr int together(Kind kind) {
    const int own = ceil_div(tiles(kind), BLOCKS), most = at_most(TOGETHER, GROUP);
    return own ? ceil_div(own, ceil_div(own, most)) : 1;
}

struct Layer {
    const u16 *qkv, *out, *gate_up, *down;  // weights [rows, columns]
    const u16 *input_norm, *mlp_norm;       // [HIDDEN]
    const u16* head_norms;                  // [HEADS + KV_HEADS, DIM]
    const u16* bias;                        // [QKV_ROWS]
    u16 *keys, *values;                     // [block, KV_HEADS, BLOCK_SIZE, DIM]
};

struct Step {
    const Layer* layers;
    const u16* embedding;   // [VOCAB, HIDDEN]
    const u16* final_norm;  // [HIDDEN]
    const u16* head;        // [VOCAB, HIDDEN]
    const i64 *ids, *positions, *kv_slots, *slots;  // [ROWS]
    const int* table;       // block table [slots, table_row]
    const u16* angles;      // cos | sin, [positions, DIM]
    u64* mail;
    u32* counters;          // launches so far; blocks that have ended in this one
    u16* hidden;            // [ROWS, HIDDEN], written
    u16* logits;            // [ROWS, VOCAB], written
    i64 table_row, block_stride;
#if TRACE
    u64* trace;  // [BLOCKS, LAYERS + 1, 16]: times of events
#endif
};

// ---------------------------------------------------------------------------------------------- mailboxes
//
// A mailbox holds the results of a stage, two bf16 or one fp32 in a 64-bit word whose upper half is a tag. Readers poll
// the word itself, so there is no fence, no counter and no second trip to memory. Tags differ between layers and steps.

constexpr int SHARE = ceil_div(HEADS / KV_HEADS, 4);             // parts of the query heads of a KV head
constexpr int QUERIES = ceil_div(HEADS / KV_HEADS, SHARE);       // query heads of an attention task
constexpr int TASKS = ROWS * KV_HEADS * SHARE * SPLITS;
constexpr int PARTIAL = QUERIES * DIM + 2 * QUERIES;             // words that a task leaves for the merge

constexpr int STREAM_BOX = 0;                                    // input of a layer
constexpr int QKV_BOX = STREAM_BOX + ROWS * HIDDEN / 2;
constexpr int ATTENDED_BOX = QKV_BOX + ROWS * QKV_ROWS / 2;
constexpr int MIDDLE_BOX = ATTENDED_BOX + ROWS * ATTENDED / 2;   // stream between attention and MLP
constexpr int GATED_BOX = MIDDLE_BOX + ROWS * HIDDEN / 2;
constexpr int PARTIAL_BOX = GATED_BOX + ROWS * INTER / 2;
constexpr int MAIL_WORDS = PARTIAL_BOX + TASKS * PARTIAL;

DEVICE float low_half(u32 word) { return as_float(word << 16); }
DEVICE float high_half(u32 word) { return as_float(word & 0xffff0000u); }
DEVICE float from_bf16(u16 x) { return as_float((u32)x << 16); }
DEVICE float rounded(float x) { return low_half(pack_bf16(x, x)); }
DEVICE u64 tagged(u32 content, u32 tag) { return (u64)tag << 32 | content; }
DEVICE bool has_tag(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }

// Wait for N times four words, each of eight bf16. `at` gives their places, or a null pointer for none.
template <int N, class At>
DEVICE void receive_all(Vec4 (&parts)[N], At at, u32 tag, int place) {
    Spin spin;
    while (true) {
        u64 words[N][4];
#pragma unroll
        for (int i = 0; i < N; i++)
            if (const u64* from = at(i)) {
                load_words(from, words[i][0], words[i][1]);
                load_words(from + 2, words[i][2], words[i][3]);
            }
        bool complete = true;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (at(i)) {
                for (int j = 0; j < 4; j++) complete &= has_tag(words[i][j], tag);
                parts[i] = Vec4{(u32)words[i][0], (u32)words[i][1], (u32)words[i][2], (u32)words[i][3]};
            }
        if (complete) return;
        spin.wait(place);
    }
}

DEVICE Vec4 receive(const u64* at, u32 tag, int place) {
    Vec4 parts[1];
    receive_all<1>(parts, [&](int) { return at; }, tag, place);
    return parts[0];
}

// ---------------------------------------------------------------------------------------------- shared memory

struct Block {
    char* ring;        // SLOTS slots of weight tiles
    u64 *full, *empty; // [SLOTS]
    float* attended;   // [WARPS, QUERIES, DIM]: of the warps of an attention task
    float* stats;      // [WARPS, QUERIES, 2]: top score, sum of exponentials
    float* sums;       // [2, WARPS, SUMS]: of the warps of a product
    float* squares;    // [2, WARPS, ROWS]
    float* stream;     // residual stream of the rows of weights that this block multiplies
    Layer* layers;     // [LAYERS]
    Step* step;        // in shared memory, because registers are scarce
};

constexpr int OWN_TILES = ceil_div(HIDDEN / TILE, BLOCKS);
constexpr int FULL_AT = SLOTS * SLOT_BYTES;
constexpr int ATTENDED_AT = FULL_AT + ceil_div(2 * SLOTS * 8, 128) * 128;
constexpr int STATS_AT = ATTENDED_AT + WARPS * QUERIES * DIM * 4;
constexpr int SUMS_AT = STATS_AT + WARPS * QUERIES * 2 * 4;
constexpr int SQUARES_AT = SUMS_AT + 2 * WARPS * SUMS * 4;
constexpr int STREAM_AT = SQUARES_AT + 2 * WARPS * ROWS * 4;
constexpr int LAYERS_AT = STREAM_AT + OWN_TILES * ROWS * TILE * 4;
constexpr int STEP_AT = LAYERS_AT + LAYERS * 80;
constexpr int SHARED_BYTES = STEP_AT + 160;
static_assert(sizeof(Layer) == 80 && sizeof(Step) <= 160, "as schedule.py counts");
static_assert(SLOTS >= TOGETHER, "a warp waits for as many slots at once");
static_assert(SHARED_BYTES <= SHARED, "schedule.py counts shared memory differently");

DEVICE Block shared_parts() {
    char* base = shared_memory();
    Block block;
    block.ring = base;
    block.full = (u64*)(base + FULL_AT);
    block.empty = block.full + SLOTS;
    block.attended = (float*)(base + ATTENDED_AT);
    block.stats = (float*)(base + STATS_AT);
    block.sums = (float*)(base + SUMS_AT);
    block.squares = (float*)(base + SQUARES_AT);
    block.stream = (float*)(base + STREAM_AT);
    block.layers = (Layer*)(base + LAYERS_AT);
    block.step = (Step*)(base + STEP_AT);
    return block;
}

// ---------------------------------------------------------------------------------------------- ring of weight tiles

struct Place {  // of a producer or consumer in the ring
    int slot = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// Tiles are dealt to blocks in turn; all products with HIDDEN rows give a block the same rows.
DEVICE int own_tiles(Kind kind, int block) { return ceil_div(tiles(kind) - block, BLOCKS); }

// Row `lane` of a tile. Of gate and up, a tile has the same four rows.
DEVICE i64 tile_row(Kind kind, int tile, int lane) {
    if (kind != GATE_UP) return (i64)tile * TILE + lane;
    return (i64)tile * 4 + (lane < 4 ? lane : INTER + lane - 4);
}

// Send this block's tiles of a weight through the ring, in the order in which `multiply` takes them.
template <Kind KIND>
DEVICE void produce(const u16* weight, const Block& block, Place& place, int number, int lane, u64 policy) {
    constexpr int K = columns(KIND), CHUNKS = ceil_div(K, CHUNK);
    const int count = own_tiles(KIND, number);
#pragma unroll 1
    for (int group = 0; group < count; group += GROUP)
#pragma unroll 1
        for (int held = 0; held < CHUNKS; held += CHUNKS_HELD)
#pragma unroll 1
            for (int first = group; first < at_most(group + GROUP, count); first += together(KIND))
#pragma unroll 1
                for (int chunk = held; chunk < at_most(held + CHUNKS_HELD, CHUNKS); chunk++)
#pragma unroll 1
                    for (int i = first; i < at_most(first + together(KIND), at_most(group + GROUP, count)); i++) {
                        const u32 bytes = at_most(CHUNK, K - chunk * CHUNK) * 2;
                        barrier_wait(&block.empty[place.slot], place.parity ^ 1, 1);
                        if (lane == 0) barrier_expect(&block.full[place.slot], TILE * bytes);
                        sync_warp();
                        if (lane < TILE)
                            copy_in_background(
                                block.ring + place.slot * SLOT_BYTES + lane * ROW_BYTES,
                                weight + tile_row(KIND, number + i * BLOCKS, lane) * K + chunk * CHUNK, bytes,
                                &block.full[place.slot], policy);
                        place.advance();
                    }
}
