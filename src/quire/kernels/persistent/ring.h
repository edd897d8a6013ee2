// How weights come: through a ring of slots in shared memory, which is filled as fast as memory delivers them, and not
// faster. Slots are filled PACE cycles apart, because mail waits behind weights that memory has not delivered yet.

struct Place {  // of a producer or consumer in the ring
    int slot = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// Stages with weights follow each other: four products for each layer, and the head.
constexpr int STAGES = 4 * LAYERS + (VOCAB > 0);

DEVICE Kind kind_of(int stage) { return stage == 4 * LAYERS ? HEAD : (Kind)(stage % 4); }

// A block has neighbouring tiles, because blocks that write to the same lines of a mailbox delay its readers. Logits go
// to no mailbox, and blocks read what lies together. All products with HIDDEN rows give a block the same rows.
DEVICE int own_tiles(const Product& product, int block) {
    const int left = product.tiles - block * product.apart;
    return product.step == 1 ? at_least(at_most(left, product.apart), 0) : ceil_div(left, BLOCKS);
}

DEVICE int tile_of(const Product& product, int block, int own) { return block * product.apart + own * product.step; }

// Row `lane` of a tile. Of gate and up, a tile has the same four rows.
DEVICE int tile_row(Kind kind, int tile, int lane) {
    if (kind != GATE_UP) return tile * TILE + lane;
    return tile * (TILE / 2) + (lane < TILE / 2 ? lane : INTER + lane - TILE / 2);
}

// Send this block's tiles of a weight through the ring, in the order in which `multiply` takes them. Each of TILE lanes
// copies a row, one after the other. `time` is when the slot before was filled. Scales of INT4 come with the rows: those
// of a tile are together, a word for each group of columns and row.
DEVICE void produce(
    Kind kind, const char* weight, const char* scales, const Block& block, Place& place, u32& time, int number, int lane,
    u64 policy) {
    const Product product = PRODUCTS[kind];
    const int length = row_bytes(product.columns, product.bits), count = own_tiles(product, number);
    const bool has_scales = FORMAT == INT4 && kind != HEAD;
#pragma unroll 1
    for (int own = 0; own < count; own++) {
        const int tile = tile_of(product, number, own);
        const char* row = weight + (i64)tile_row(kind, tile, lane % TILE) * length;
#pragma unroll 1
        for (int at = 0; at < length; at += CHUNK_BYTES) {
            const u32 bytes = at_most(CHUNK_BYTES, length - at), scale_bytes = has_scales ? TILE * bytes / 16 : 0;
            u64* full = &block.full[place.slot];
            barrier_wait(&block.empty[place.slot], place.parity ^ 1, 1);
            while (clock_cycles() - time < PACE) {}
            time = clock_cycles();
            if (lane == 0) barrier_expect(full, TILE * bytes + scale_bytes);
            sync_warp();
            char* slot = block.ring + place.slot * SLOT_BYTES;
            if (lane < TILE) copy_in_background(slot + lane * ROW_BYTES, row + at, bytes, full, policy);
            if (has_scales && lane == TILE)
                copy_in_background(
                    slot + SCALES_AT, scales + ((i64)tile * length + at) * TILE / 16, scale_bytes, full, policy);
            place.advance();
        }
    }
}
