// `consume` for 4-bit codes: W is converted in registers, from which the matrix units take it.
//
// A byte of W holds the codes of two columns, HALF columns apart (matmul/packed.py, `reorder_nibbles`). A tile of W is
// 128 bytes of a row: 256 columns, for which there are four tiles of x. A thread holds rows lane / 4 and lane / 4 + 8 of
// its warp's 16, and of each 64 bytes those from 16 * (lane % 4) on. Where the matrix units expect other columns of it,
// x has its columns in that order (rows.py, `lane_order`).

#if FP16
#define MAGIC "0x64006400"  // 1024, in whose last bits a code is
#define MAGIC_NUMBER 1024
#define TYPE "f16x2"
#else
#define MAGIC "0x43004300"  // 128
#define MAGIC_NUMBER 128
#define TYPE "bf16x2"
#endif

// The numbers of two codes, of which each is in the lowest 4 bits of a half of `word`.
DEVICE u32 numbers_of(u32 word, u32 shift, u32 scale) {
    u32 result;
    asm("{\n.reg .b32 t;\nlop3.b32 t, %1, 0x000f000f, " MAGIC ", 0xEA;\nsub.rn." TYPE " t, t, %2;\nmul.rn." TYPE " %0, t, %3;\n}"
        : "=r"(result)
        : "r"(word), "r"(shift), "r"(scale));
    return result;
}

struct GroupOfRow {
    u32 shift, scale;  // each twice in a word
};

DEVICE GroupOfRow group_of(u32 scale, u32 zero) {
    const float shift = float(MAGIC_NUMBER + zero);
    return {pack(shift, shift), scale | scale << 16};
}

DEVICE void consume(float (&sums)[SUMS], const Arguments& a, Ring w, Ring x, u32 tile, u32 begin, u32 end) {
    const u32 warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 row = warp * 16 + lane / 4;
    for (u32 step = begin; step < end; ++step) {
        wait_for(w.when_full(), w.phase);
        GroupOfRow groups[RUNS][2][2];  // of each run of 2 * HALF columns, half of the bytes and row
#pragma unroll
        for (u32 run = 0; run < RUNS; ++run)
#pragma unroll
            for (u32 high = 0; high < 2; ++high)
#pragma unroll
                for (u32 r = 0; r < 2; ++r) {
                    const u32 place = (run * 2 + high) * OUTS + warpgroup * 64 + row + 8 * r;
                    const u32 zero = a.w_zero ? load_8(w.scales() + SCALE_BYTES + place) : 8;
                    groups[run][high][r] = group_of(load_16(w.scales() + 2 * place), zero);
                }
        u32 words[2][2][4];  // of each 64 bytes and row
#pragma unroll
        for (u32 q = 0; q < 2; ++q)
#pragma unroll
            for (u32 r = 0; r < 2; ++r)
                load_words(words[q][r], w.tile() + (warpgroup * 64 + row + 8 * r) * 128 +
                                            (((4 * q + lane % 4) ^ (lane / 4)) * 16));
        u64 tiles[X_PER_W];
        u32 empty[X_PER_W];
#pragma unroll
        for (u32 i = 0; i < X_PER_W; ++i) {
            wait_for(x.when_full(), x.phase);
            tiles[i] = tile_descriptor(x.tile()), empty[i] = x.when_empty();
            x.advance();
        }
#pragma unroll
        for (u32 q = 0; q < 2; ++q)
#pragma unroll
            for (u32 t = 0; t < 4; ++t) {
                const u32 run = 64 * q / HALF;
                u32 numbers[2][4];
#pragma unroll
                for (u32 high = 0; high < 2; ++high)
#pragma unroll
                    for (u32 k = 0; k < 2; ++k)
#pragma unroll
                        for (u32 r = 0; r < 2; ++r) {
                            const GroupOfRow& g = groups[run][high][r];
                            numbers[high][2 * k + r] = numbers_of(words[q][r][t] >> (8 * k + 4 * high), g.shift, g.scale);
                        }
                begin_products();
#pragma unroll
                for (u32 high = 0; high < 2; ++high) {
                    const u32 column = run * 2 * HALF + high * HALF + 64 * q % HALF;
                    multiply(sums, numbers[high], tiles[column / 64] + 2 * t, step > begin || q + t + high > 0);
                }
                end_products();
                wait_for_products<1>();
            }
        wait_for_products<0>();
        release(w.when_empty(), lane);
        w.advance();
#pragma unroll
        for (u32 i = 0; i < X_PER_W; ++i) release(empty[i], lane);
    }
}
