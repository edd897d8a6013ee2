// `consume` for codes of 4 and 8 bits: W is converted in registers, from which the matrix units take it.
//
// A byte of W holds the code of one column, or those of two, HALF columns apart (matmul/packed.py, `reorder_nibbles`). A
// tile of W is 128 bytes of a row, for which there are two or four tiles of x. A thread holds rows lane / 4 and lane / 4 + 8
// of its warp's 16, and two neighbouring bytes of each 8: those that the matrix units expect of it.
//
// The matrix units are never idle between tiles: while they multiply, a warpgroup converts the next columns.

constexpr u32 TOGETHER = OUTS == 128 ? 4 : 2;  // instructions whose numbers are converted at once: 4 registers each

#if FP16
#define TYPE "f16x2"
#else
#define TYPE "bf16x2"
#endif

#if FORMAT == INT4

#if FP16
#define MAGIC "0x64006400"  // 1024, in whose last bits a code is
#define MAGIC_NUMBER 1024
#else
#define MAGIC "0x43004300"  // 128
#define MAGIC_NUMBER 128
#endif

struct GroupOfRow {
    u32 shift, scale;  // each twice in a word
};

// The group of a row in the columns of a tile of x.
DEVICE GroupOfRow group_of(const Arguments& a, const Ring& w, u32 part, u32 row) {
    const u32 place = (64 * (part / 2) / HALF * 2 + part % 2) * OUTS + row;
    const u32 scale = load_16(w.scales() + 2 * place);
    const float shift = float(MAGIC_NUMBER + (a.w_zero ? load_8(w.scales() + SCALE_BYTES + place) : 8));
    return {pack(shift, shift), scale | scale << 16};
}

// The numbers of two codes, of which each is in the lowest 4 bits of a half of `word`.
DEVICE u32 numbers_of(u32 word, const GroupOfRow& group) {
    u32 result;
    asm("{\n.reg .b32 t;\nlop3.b32 t, %1, 0x000f000f, " MAGIC ", 0xEA;\nsub.rn." TYPE " t, t, %2;\nmul.rn." TYPE " %0, t, %3;\n}"
        : "=r"(result)
        : "r"(word), "r"(group.shift), "r"(group.scale));
    return result;
}

#else

struct GroupOfRow {};  // the scale of a row is applied to its sums

DEVICE GroupOfRow group_of(const Arguments&, const Ring&, u32, u32) { return {}; }

// The numbers of two codes, of which each is in the lowest 8 bits of a half of `word`.
DEVICE u32 numbers_of(u32 word, const GroupOfRow&) {
    u32 result;
#if FP16  // 1024 + 128 + code
    asm("{\n.reg .b32 t;\nlop3.b32 t, %1, 0x00ff00ff, 0x64806480, 0x6A;\nsub.rn.f16x2 %0, t, %2;\n}"
        : "=r"(result)
        : "r"(word), "r"(0x64806480u));
#else  // 128 + the lower seven bits, less 128 or 256
    asm("{\n.reg .b32 t, s;\nlop3.b32 t, %1, 0x007f007f, 0x43004300, 0xEA;\n"
        "lop3.b32 s, %1, 0x00800080, 0x43004300, 0xEA;\nsub.rn.bf16x2 %0, t, s;\n}"
        : "=r"(result)
        : "r"(word));
#endif
    return result;
}

#endif

// Two bytes, each in a half of a word.
DEVICE u32 spread(u32 bytes) { return __byte_perm(bytes, 0, 0x4140); }

DEVICE void consume(float (&sums)[SUMS], const Arguments& a, Ring w, Ring x, u32 begin, u32 end) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    u32 keep = 0, x_before = 0;
    for (u32 step = begin; step < end; ++step) {
        wait_for(w.when_full(), w.phase);
        u32 bytes[2][8];  // of each row, two in the halves of a word
#pragma unroll
        for (u32 part = 0; part < X_PER_W; ++part) {
            const u32 piece = FORMAT == INT4 ? part / 2 : part, upper = FORMAT == INT4 ? part % 2 * 4 : 0;
            const GroupOfRow groups[2] = {group_of(a, w, part, row), group_of(a, w, part, row + 8)};
            if (upper == 0)
#pragma unroll
                for (u32 i = 0; i < 16; ++i) {
                    const u32 chunk = (4 * piece + i / 4) ^ (lane / 4);
                    bytes[i % 2][i / 2] = spread(load_16(w.tile() + (row + i % 2 * 8) * 128 + chunk * 16 + i / 2 % 2 * 8 + lane % 4 * 2));
                }
            wait_for(x.when_full(), x.phase);
#pragma unroll
            for (u32 first = 0; first < 4; first += TOGETHER) {
                u32 numbers[TOGETHER][4];
#pragma unroll
                for (u32 i = 0; i < 4 * TOGETHER; ++i) {
                    const u32 r = i % 2;
                    numbers[i / 4][i % 4] = numbers_of(bytes[r][2 * first + i / 2] >> upper, groups[r]);
                }
                begin_products();
#pragma unroll
                for (u32 i = 0; i < TOGETHER; ++i, keep = 1)
                    multiply(sums, numbers[i], tile_descriptor(x.tile()) + 2 * (first + i), keep);
                end_products();
                wait_for_products<1>();
                if (first == 0 && x_before) release(x_before, lane);
            }
            x_before = x.when_empty();
            x.advance();
        }
        release(w.when_empty(), lane);
        w.advance();
    }
    wait_for_products<0>();
    // The rings are not filled again.
}
