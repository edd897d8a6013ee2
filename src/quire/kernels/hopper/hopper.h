// Hopper's instructions under names: barriers, asynchronous copies (TMA), matrix products of warpgroups, clusters.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
// Values of FORMAT: 16-bit numbers, e4m3, codes of 4 bits, signed integers of 8 bits.
#define BITS16 0
#define FP8 1
#define INT4 2
#define INT8 3

DEVICE u32 address_of(const void* shared) { return u32(__cvta_generic_to_shared(shared)); }

// ------------------------------------------------------------------------------ dependent launch

DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }

// ------------------------------------------------------------------------------ clusters

DEVICE u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE u32 blocks_in_cluster() {
    u32 count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}
DEVICE void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ------------------------------------------------------------------------------ barriers

DEVICE void init_barrier(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void expect_bytes(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void wait_for(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Arrives at a barrier, once for each warp.
DEVICE void release(u32 bar, u32 lane) {
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(OUTS * 2) : "memory"); }

// ------------------------------------------------------------------------------ copies

DEVICE void fetch_once(u32 to, const void* map, u32 column, u32 row, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(to),
        "l"(map), "r"(bar), "r"(column), "r"(row), "l"(policy)
        : "memory");
}
DEVICE void fetch(u32 to, const void* map, u32 column, u32 row, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(column), "r"(row)
        : "memory");
}
// Copies a multiple of 16 bytes.
DEVICE void fetch_bytes(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar)
                 : "memory");
}
DEVICE u32 load_8(u32 at) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
DEVICE u32 load_16(u32 at) {
    u32 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

// ------------------------------------------------------------------------------ matrix units

// A tile whose rows are 128 bytes, in the order that TMA writes with a swizzle of 128 bytes.
DEVICE u64 tile_descriptor(u32 at) { return u64(at >> 4 & 0x3FFF) | 1ull << 16 | u64(1024 >> 4) << 32 | 1ull << 62; }
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Registers per thread, moved from the warpgroup that fetches to those that multiply.
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OUTS == 128 ? 40 : 24)); }
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(OUTS == 128 ? 232 : 112)); }

// ------------------------------------------------------------------------------ numbers

#if FP16
DEVICE u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE float as_float16(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
#else
DEVICE u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE float as_float16(u16 bits) { return __uint_as_float(u32(bits) << 16); }
#endif
DEVICE float low(u32 word) { return as_float16(u16(word)); }
DEVICE float high(u32 word) { return as_float16(u16(word >> 16)); }
DEVICE u32 sum_of(u32 a, u32 b) { return pack(low(a) + low(b), high(a) + high(b)); }

// Transposes 8 x 8 numbers of 16 bits, of which each thread holds two neighbours of a row.
DEVICE u32 transposed(u32 word) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// ------------------------------------------------------------------------------ sums in shared memory

DEVICE void store_sums(u32 to, const float* v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
// Adds what the block `rank` of the cluster holds at this block's address `at`.
DEVICE void add_sums(float* sum, u32 at, u32 rank) {
    float v[4];
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(at), "r"(rank)
                 : "memory");
    for (u32 i = 0; i < 4; ++i) sum[i] += v[i];
}
