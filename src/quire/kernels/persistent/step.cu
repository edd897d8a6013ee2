// One decode step of a dense decoder in one launch: BLOCKS blocks, one for each multiprocessor, run all layers.
//
// The last warp of a block sends the block's weight tiles through a ring in shared memory, as fast as memory delivers
// them and as far ahead as the ring reaches. The other warps multiply. A stage begins when its inputs have arrived in a
// mailbox; no stage waits for all blocks to end the one before.

#if TRACE
#define TRACE_PARAMETER , u64* trace
#else
#define TRACE_PARAMETER
#endif

// Bring the keys and values that this block's tasks read in a layer into the L2 cache, a layer ahead: behind weights on
// their way, a read from memory would take microseconds.
DEVICE void prefetch_context(const Step& step, const Layer& layer, int number, int lane) {
#pragma unroll 1
    for (; number < TASKS; number += BLOCKS) {
        const Task task(number);
        const Span span(task, step);
        const int* blocks = step.table + step.slots[task.row] * step.table_row;
        const i64 head = (i64)task.kv_head * BLOCK_SIZE * DIM;
#pragma unroll 1
        for (int i = span.begin / BLOCK_SIZE + lane; i < ceil_div(span.end, BLOCK_SIZE); i += 32) {
            const i64 at = blocks[i] * step.block_stride + head;
            prefetch(layer.keys + at, BLOCK_SIZE * DIM * 2);
            prefetch(layer.values + at, BLOCK_SIZE * DIM * 2);
        }
    }
}

DEVICE void produce_all(const Step& step, const Block& block, int number, int lane) {
    Place place;
    u32 time = clock_cycles();
    const u64 policy = read_once_policy();
    prefetch_context(step, block.layers[0], number, lane);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        const Kind kind = kind_of(stage);
        const int layer = stage / 4;
        const bool is_head = kind == HEAD;
        const char* weight = is_head ? (const char*)step.head : block.layers[layer].weights[kind];
        const char* scales = is_head ? nullptr : (const char*)block.layers[layer].scales[kind];
        produce(kind, weight, scales, block, place, time, number, lane, policy);
        if (kind == QKV && layer + 1 < LAYERS) prefetch_context(step, block.layers[layer + 1], number, lane);
    }
}

// Begin the residual stream with embeddings: each block has the columns that it will add to.
DEVICE void embed(const Step& step, const Block& block, const Consumer& self) {
    const Product& product = PRODUCTS[OUT];
    const int pairs = own_tiles(product, self.block) * ROWS * TILE / 2;
#pragma unroll 1
    for (int i = self.thread; i < pairs; i += CONSUMERS) {
        const int at = i * 2, row = at / TILE % ROWS;
        const int column = tile_of(product, self.block, at / (TILE * ROWS)) * TILE + at % TILE;
        const u32 pair = load_word32(step.embedding + step.ids[row] * HIDDEN + column);
        block.stream[at] = low_half(pair), block.stream[at + 1] = high_half(pair);
        send(step, STREAM_BOX + (row * HIDDEN + column) / 2, tagged(pair, self.tag - 1), true);
    }
}

// Write the normed result of the last layer: block r does row r.
DEVICE void write_hidden(const Step& step, const Block& block, Consumer& self) {
#pragma unroll 1
    for (int row = self.block; row < ROWS; row += BLOCKS) {
        const u64* mail = step.mail + STREAM_BOX + (i64)row * HIDDEN / 2;
        float squares = 0;
#pragma unroll 1
        for (int at = self.thread * 2; at < HIDDEN; at += CONSUMERS * 2) {
            u32 x[1];
            receive_words<1>(x, [&](int) { return mail + at / 2; }, self.tag - 1, 30);
            squares += low_half(x[0]) * low_half(x[0]) + high_half(x[0]) * high_half(x[0]);
        }
        sync_warp();
        squares = warp_sum(squares);
        sync_consumers();  // the sums of the last product have been read
        if (self.lane == 0) block.sums[self.warp] = squares;
        sync_consumers();
        float total = 0;
        for (int w = 0; w < WARPS; w++) total += block.sums[w];
        const float scale = inverse_root(total / HIDDEN + (float)EPS);
#pragma unroll 1
        for (int at = self.thread * 2; at < HIDDEN; at += CONSUMERS * 2) {
            const u32 x = (u32)load_word(mail + at / 2), gain = load_word32(step.final_norm + at);
            const float low = low_half(x) * scale * low_half(gain), high = high_half(x) * scale * high_half(gain);
            *(u32*)(step.hidden + (i64)row * HIDDEN + at) = pack_bf16(low, high);
        }
    }
}

DEVICE void consume_all(const Step& step, const Block& block, Consumer& self) {
    const Context context(Task(at_most(self.block, TASKS - 1)), step, self);
    embed(step, block, self);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        const Kind kind = kind_of(stage);
        const int layer = stage / 4;
        const Layer& weights = block.layers[layer];
        if (kind == HEAD) write_hidden(step, block, self);
        if (kind == OUT) attend(step, block, self, layer, context);
        multiply(
            step, block, self, kind, layer,
            kind == QKV ? weights.input_norm : kind == GATE_UP ? weights.mlp_norm : step.final_norm);
        if (kind == DOWN) self.tag++;
    }
    if (VOCAB == 0) write_hidden(step, block, self);
}

KERNEL decode_step(
    const Layer* layers, const u16* embedding, const u16* final_norm, const u16* head, const i64* ids,
    const i64* positions, const i64* kv_slots, const i64* slots, const int* table, const u16* angles, u64* mail,
    u32* counters, u16* hidden, u16* logits, int table_row, int block_stride TRACE_PARAMETER) {
    const Block block = shared_parts();
    const int thread = threadIdx.x, number = blockIdx.x;
    Step& step = *block.step;
    if (thread == 0) {
        step = Step{layers, embedding, final_norm, head,   ids,    positions, kv_slots,  slots,
                    table,  angles,    mail,       counters, hidden, logits,    table_row, block_stride};
#if TRACE
        step.trace = trace;
#endif
        for (int i = 0; i < SLOTS; i++) barrier_init(&block.full[i], 1), barrier_init(&block.empty[i], WARPS);
    }
    const u32 launches = load_counter(counters);
    for (int i = thread; i < LAYERS * (int)sizeof(Layer) / 16; i += THREADS)
        ((Vec4*)block.layers)[i] = load_once((const Vec4*)layers + i);
    // Columns beyond the last one are multiplied with zeros, so they and their scales must be finite.
    if (row_bytes(HIDDEN, 16) % CHUNK_BYTES || row_bytes(HIDDEN, BITS) % CHUNK_BYTES ||
        row_bytes(ATTENDED, BITS) % CHUNK_BYTES || row_bytes(INTER, BITS) % CHUNK_BYTES)
        for (int at = thread * 16; at < SLOTS * SLOT_BYTES; at += THREADS * 16)
            *(Vec4*)(block.ring + at) = Vec4{0, 0, 0, 0};
    barriers_visible();
    sync_block();
    if (thread >= CONSUMERS) {
        produce_all(step, block, number, thread % 32);
        return;
    }
    Consumer self;
    self.block = number, self.thread = thread, self.warp = thread / 32, self.lane = thread % 32;
    self.row = self.lane / 8 % FRAGMENT_ROWS, self.part = self.lane / 8 / FRAGMENT_ROWS;
    self.half = self.lane / 4 % 2, self.quarter = self.lane % 4;
    self.tag = launches * (LAYERS + 1) + 2;  // embeddings are sent with the one before; 0 is in no word
    consume_all(step, block, self);
    if (thread == 0 && add_counter(counters + 1, 1) == BLOCKS - 1) {  // every block has read the number of launches
        counters[1] = 0;
        counters[0] = launches + 1;
    }
}
