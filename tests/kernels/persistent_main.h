// Runs the kernel of kernels/persistent/ on fibers: all blocks at once, as on a device.

static Step given;
static u32 given_strides[2];

static void fiber_main() {
    const Step& s = given;
    decode_step(
        s.layers, s.embedding, s.final_norm, s.head, s.ids, s.positions, s.kv_slots, s.slots, s.table, s.angles, s.mail,
        s.counters, s.hidden, s.logits, (int)s.table_row, (int)s.block_stride);
    running->ended = true;
    yield();
}

// Run one step; return 0, or the place at which a thread waits in vain.
extern "C" int run_step(
    const Layer* layers, const u16* embedding, const u16* final_norm, const u16* head, const i64* ids,
    const i64* positions, const i64* kv_slots, const i64* slots, const int* table, const u16* angles, u64* mail,
    u32* counters, u16* hidden, u16* logits, int table_row, int block_stride, u64 seed) {
    given = Step{layers, embedding, final_norm, head,   ids,    positions, kv_slots,  slots,
                 table,  angles,    mail,       counters, hidden, logits,    table_row, block_stride};
    failed = 0, turns = 0, random_state = seed;
    copies.clear();
    std::vector<HostBlock> blocks(BLOCKS);
    std::vector<Fiber> fibers(BLOCKS * THREADS);
    for (int b = 0; b < BLOCKS; b++) {
        blocks[b].shared.assign(SHARED + 128, (char)0xff);  // NaN where nothing is written
        blocks[b].warps.resize(THREADS / 32);
    }
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        fiber.block = i / THREADS, fiber.thread = i % THREADS, fiber.home = &blocks[fiber.block];
        fiber.stack.resize(STACK_BYTES);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, fiber_main, 0);
    }
    for (size_t left = fibers.size(); left && !failed;) {
        const u32 start = draw() % fibers.size();
        for (size_t i = 0; i < fibers.size(); i++) {
            running = &fibers[(start + i) % fibers.size()];
            if (running->ended) continue;
            turns++;
            swapcontext(&scheduler, &running->context);
            if (running->ended) left--;
            if (copies.size() && draw() % 64 == 0) finish_copy();
        }
    }
    return failed;
}
