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
    const u64 policy = read_once_policy();
    prefetch_context(step, block.layers[0], number, lane);
#pragma unroll 1
    for (int i = 0; i < LAYERS; i++) {
        const Layer& layer = block.layers[i];
        produce<QKV>(layer.qkv, block, place, number, lane, policy);
        if (i + 1 < LAYERS) prefetch_context(step, block.layers[i + 1], number, lane);
        produce<OUT>(layer.out, block, place, number, lane, policy);
        produce<GATE_UP>(layer.gate_up, block, place, number, lane, policy);
        produce<DOWN>(layer.down, block, place, number, lane, policy);
    }
    if (VOCAB) produce<HEAD>(step.head, block, place, number, lane, policy);
}

// Write the normed result of the last layer: block r does row r.
DEVICE void write_hidden(const Step& step, const Block& block, Consumer& self) {
#pragma unroll 1
    for (int row = self.block; row < ROWS; row += BLOCKS) {
        float squares = 0;
#pragma unroll 1
        for (int at = self.thread * 8; at < HIDDEN; at += CONSUMERS * 8) {
            const Head x = unpack(receive(step.mail + STREAM_BOX + ((i64)row * HIDDEN + at) / 2, self.tag - 1, 30));
            for (int i = 0; i < 8; i++) squares += x.x[i] * x.x[i];
        }
        sync_warp();
        for (int mask = 1; mask < 32; mask *= 2) squares += shuffle_xor(squares, mask);
        sync_consumers();  // the sums of the last product have been read
        if (self.lane == 0) block.sums[self.warp] = squares;
        sync_consumers();
        float total = 0;
        for (int w = 0; w < WARPS; w++) total += block.sums[w];
        const float scale = inverse_root(total / HIDDEN + (float)EPS);
#pragma unroll 1
        for (int at = self.thread * 8; at < HIDDEN; at += CONSUMERS * 8) {
            Head x = unpack(receive(step.mail + STREAM_BOX + ((i64)row * HIDDEN + at) / 2, self.tag - 1, 31));
            const Head gain = unpack(load_once(step.final_norm + at));
            for (int i = 0; i < 8; i++) x.x[i] = x.x[i] * scale * gain.x[i];
            *(Vec4*)(step.hidden + (i64)row * HIDDEN + at) = packed(x);
        }
    }
}

DEVICE void consume_all(const Step& step, const Block& block, Consumer& self) {
    const Context context(Task(at_most(self.block, TASKS - 1)), step, self);
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++, self.tag++) {
        const Layer& weights = block.layers[layer];
        multiply<QKV>(self, layer, weights.input_norm);
        attend(self, layer, context);
        multiply<OUT>(self, layer, nullptr);
        multiply<GATE_UP>(self, layer, weights.mlp_norm);
        multiply<DOWN>(self, layer, nullptr);
    }
    if (VOCAB) multiply<HEAD>(self, LAYERS, step.final_norm);
    write_hidden(step, block, self);
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
    // Columns beyond the last one are multiplied with zeros, so they must be finite.
    for (int at = thread * 16; at < SLOTS * SLOT_BYTES; at += THREADS * 16) *(Vec4*)(block.ring + at) = Vec4{0, 0, 0, 0};
    barriers_visible();
    sync_block();
    if (thread >= CONSUMERS) {
        produce_all(step, block, number, thread % 32);
    } else {
        Consumer self;
        self.block = number, self.thread = thread, self.warp = thread / 32, self.lane = thread % 32;
        self.row = self.lane / 4 % ROWS, self.part = self.lane / 4 / ROWS, self.quarter = self.lane % 4;
        self.tag = launches * (LAYERS + 1) + 1;
        consume_all(step, block, self);
    }
    sync_block();
    if (thread == 0 && add_counter(counters + 1, 1) == BLOCKS - 1) {  // every block has read the number of launches
        counters[1] = 0;
        counters[0] = launches + 1;
    }
}
