// Sizes, mailboxes, and what a block has in shared memory.
//
// Set by the host (schedule.py): HIDDEN, HEADS, KV_HEADS, DIM, INTER, LAYERS, VOCAB (0: no head), ROWS, BLOCK_SIZE,
// QK_NORM, QKV_BIAS, EPS, SCALE, FORMAT, BLOCKS, WARPS, PIECES, SLOTS, PACE,
// GROUP (tiles that are summed over warps together), COPIES, SPLITS, SHARED.

enum Kind { QKV, OUT, GATE_UP, DOWN, HEAD };
enum Format { BF16, FP8_ROWS, FP8_BLOCKS, INT4 };  // of the layers' weights, FP8 by what a scale belongs to; the head has bf16

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

constexpr int QKV_ROWS = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int ATTENDED = HEADS * DIM;
constexpr int TILE = 8;                           // rows of a weight that are multiplied together
constexpr int CHUNK_BYTES = WARPS * PIECES * 64;  // of a row of a tile in one slot of the ring
constexpr int ROW_BYTES = CHUNK_BYTES + 64;       // 64 bytes apart, neighbouring rows use different banks
constexpr int SCALES_AT = TILE * ROW_BYTES;       // of INT4, behind the rows of a slot
constexpr int SLOT_BYTES = SCALES_AT + (FORMAT == INT4 ? TILE * CHUNK_BYTES / 16 : 0);
constexpr int SCALE_BLOCK = 128;                  // rows and columns of a block with one scale
constexpr int SUMS = GROUP * at_least(ROWS, 4) * TILE;  // sums of a warp in a group of tiles

struct Layer {
    const char* weights[4];                 // by `Kind`, [rows, columns]
    const u16 *input_norm, *mlp_norm;       // [HIDDEN]
    const u16* head_norms;                  // [HEADS + KV_HEADS, DIM]
    const u16* bias;                        // [QKV_ROWS]
    u16 *keys, *values;                     // [block, KV_HEADS, BLOCK_SIZE, DIM]
    const float* scales[4];                 // of FP8: [rows], or [rows / 128, columns / 128] of blocks; of INT4: scales.py
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
    u64* trace;  // [BLOCKS, LAYERS + 1, WARPS, 64]: times of events in nanoseconds
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

// Every block reads the whole input of a product. The lines of a mailbox are in few slices of the L2 cache, which would
// answer all blocks one after the other: blocks share the work of reading COPIES of them.
DEVICE int own_copy(int block) { return block % COPIES * MAIL_WORDS; }

constexpr int BITS = FORMAT == BF16 ? 16 : FORMAT == INT4 ? 4 : 8;  // of a number of a layer's weight

struct Product {
    int columns, bits, chunks, tiles;
    int apart, step;           // tiles between the first ones of two blocks, and between two of a block
    int input, output, width;  // mailboxes, columns of the results
    bool normed;               // whether the input passes an RMS norm
    float part;                // of a column in the mean of a row
};

constexpr int row_bytes(int columns, int bits) { return columns * bits / 8; }
constexpr int chunks(int columns, int bits) { return ceil_div(row_bytes(columns, bits), CHUNK_BYTES); }
constexpr int share(int tiles) { return ceil_div(tiles, BLOCKS); }

CONSTANT Product PRODUCTS[5] = {
    {HIDDEN, BITS, chunks(HIDDEN, BITS), QKV_ROWS / TILE, share(QKV_ROWS / TILE), 1,
     STREAM_BOX, QKV_BOX, QKV_ROWS, true, 1.0f / HIDDEN},
    {ATTENDED, BITS, chunks(ATTENDED, BITS), HIDDEN / TILE, share(HIDDEN / TILE), 1,
     ATTENDED_BOX, MIDDLE_BOX, HIDDEN, false, 1.0f / ATTENDED},
    {HIDDEN, BITS, chunks(HIDDEN, BITS), 2 * INTER / TILE, share(2 * INTER / TILE), 1,
     MIDDLE_BOX, GATED_BOX, INTER, true, 1.0f / HIDDEN},
    {INTER, BITS, chunks(INTER, BITS), HIDDEN / TILE, share(HIDDEN / TILE), 1,
     GATED_BOX, STREAM_BOX, HIDDEN, false, 1.0f / INTER},
    {HIDDEN, 16, chunks(HIDDEN, 16), VOCAB / TILE, 1, BLOCKS, STREAM_BOX, 0, VOCAB, true, 1.0f / HIDDEN},
};
// Columns of an input, rounded up to whole slots.
constexpr int padded(int columns, int bits) { return chunks(columns, bits) * CHUNK_BYTES * 8 / bits; }
constexpr int MOST_COLUMNS = at_least(
    at_least(padded(HIDDEN, BITS), padded(HIDDEN, 16)), at_least(padded(ATTENDED, BITS), padded(INTER, BITS)));

DEVICE float low_half(u32 word) { return as_float(word << 16); }
DEVICE float high_half(u32 word) { return as_float(word & 0xffff0000u); }
DEVICE float from_bf16(u16 x) { return as_float((u32)x << 16); }
DEVICE float rounded(float x) { return low_half(pack_bf16(x, x)); }
DEVICE u64 tagged(u32 content, u32 tag) { return (u64)tag << 32 | content; }
DEVICE bool has_tag(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }

// Send a word to the readers of one mailbox, or of all its copies.
DEVICE void send(const Step& step, i64 at, u64 word, bool to_all) {
#pragma unroll
    for (int i = 0; i < COPIES; i++)
        if (i == 0 || to_all) store_word(step.mail + i * MAIL_WORDS + at, word);
}

// Whether words that have arrived are not read again: reads of wide inputs delay each other. With narrow ones, it costs more
// registers than there are.
constexpr bool READS_ONCE = INTER >= 8192;

// Wait for N times two words, each of two bf16. `at` gives their places, or a null pointer for none.
template <int N, class At>
DEVICE void receive(u32 (&parts)[N][2], At at, u32 tag, int place) {
    Spin spin;
    u32 missing = 0;
    if (READS_ONCE)
#pragma unroll
        for (int i = 0; i < N; i++) missing |= at(i) ? 1u << i : 0u;
    for (bool complete = false; !complete; spin.wait(place)) {
        u64 words[N][2];
#pragma unroll
        for (int i = 0; i < N; i++)
            if (READS_ONCE ? missing >> i & 1 : at(i) != nullptr) load_words(at(i), words[i][0], words[i][1]);
        complete = true;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (READS_ONCE ? missing >> i & 1 : at(i) != nullptr) {
                const bool arrived = has_tag(words[i][0], tag) & has_tag(words[i][1], tag);
                parts[i][0] = (u32)words[i][0], parts[i][1] = (u32)words[i][1];
                if (READS_ONCE && arrived) missing &= ~(1u << i);
                complete &= arrived;
            }
    }
}

// Wait for N single words.
template <int N, class At>
DEVICE void receive_words(u32 (&parts)[N], At at, u32 tag, int place) {
    Spin spin;
    while (true) {
        u64 words[N];
#pragma unroll
        for (int i = 0; i < N; i++) words[i] = load_word(at(i));
        bool complete = true;
#pragma unroll
        for (int i = 0; i < N; i++) complete &= has_tag(words[i], tag), parts[i] = (u32)words[i];
        if (complete) return;
        spin.wait(place);
    }
}

// ---------------------------------------------------------------------------------------------- shared memory

struct Block {
    char* ring;        // SLOTS slots of weight tiles
    u64 *full, *empty; // [SLOTS]
    Pair* inputs;      // [WARPS, fragments, 32]: of products
    float* group_sums; // [WARPS, fragments]: sums of the inputs of groups with a scale, for INT4
    u16* heads;        // [QUERIES + 2, DIM]: queries, new key, new value of an attention task
    float* attended;   // [WARPS, QUERIES, DIM]: of the warps of an attention task
    float* stats;      // [WARPS, QUERIES, 2]: top score, sum of exponentials
    float* sums;       // [2, WARPS, SUMS]: of the warps of a product, in the same memory as the former two
    float* squares;    // [2, WARPS, ROWS]
    float* stream;     // residual stream of the rows of weights that this block multiplies
    Layer* layers;     // [LAYERS]
    Step* step;        // in shared memory, because registers are scarce
};

constexpr int OWN_TILES = ceil_div(HIDDEN / TILE, BLOCKS);
constexpr int FULL_AT = SLOTS * SLOT_BYTES;
constexpr int INPUTS_AT = FULL_AT + ceil_div(2 * SLOTS * 8, 128) * 128;
constexpr int INPUT_BYTES = MOST_COLUMNS * ROWS * 2;
constexpr int GROUP_SUMS_AT = INPUTS_AT + INPUT_BYTES;
constexpr int HEADS_AT = GROUP_SUMS_AT + (FORMAT == INT4 ? INPUT_BYTES / 64 : 0);
constexpr int ATTENDED_AT = HEADS_AT + (QUERIES + 2) * DIM * 2;
constexpr int STATS_AT = ATTENDED_AT + WARPS * QUERIES * DIM * 4;
constexpr int SUMS_AT = ATTENDED_AT;
constexpr int SQUARES_AT = SUMS_AT + 2 * WARPS * SUMS * 4;
constexpr int STREAM_AT = at_least(STATS_AT + WARPS * QUERIES * 2 * 4, SQUARES_AT + 2 * WARPS * ROWS * 4);
constexpr int LAYERS_AT = STREAM_AT + OWN_TILES * ROWS * TILE * 4;
constexpr int STEP_AT = LAYERS_AT + LAYERS * 112;
constexpr int SHARED_BYTES = STEP_AT + 160;
static_assert(sizeof(Layer) == 112 && sizeof(Step) <= 160, "as schedule.py counts");
static_assert(SHARED_BYTES <= SHARED, "schedule.py counts shared memory differently");

DEVICE Block shared_parts() {
    char* base = shared_memory();
    Block block;
    block.ring = base;
    block.full = (u64*)(base + FULL_AT);
    block.empty = block.full + SLOTS;
    block.inputs = (Pair*)(base + INPUTS_AT);
    block.group_sums = (float*)(base + GROUP_SUMS_AT);
    block.heads = (u16*)(base + HEADS_AT);
    block.attended = (float*)(base + ATTENDED_AT);
    block.stats = (float*)(base + STATS_AT);
    block.sums = (float*)(base + SUMS_AT);
    block.squares = (float*)(base + SQUARES_AT);
    block.stream = (float*)(base + STREAM_AT);
    block.layers = (Layer*)(base + LAYERS_AT);
    block.step = (Step*)(base + STEP_AT);
    return block;
}
