// What the kernel needs of the device: types, bf16, tagged words, asynchronous copies, matrix units.
// tests/kernels/persistent_host.h replaces this file to run the kernel on a CPU.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define CONSTANT __constant__ const
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)

// A thread that waits longer than this ends the kernel with an error. A step takes milliseconds.
#define MAX_WAIT_NS 10000000000ull

extern __shared__ __align__(128) char dynamic_shared[];
DEVICE char* shared_memory() { return dynamic_shared; }

__device__ __noinline__ void stuck(int place) {
    printf("quire decode step: block %d thread %d waited too long at %d\n", blockIdx.x, threadIdx.x, place);
    __trap();
}

DEVICE u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

DEVICE u32 clock_cycles() {
    u32 t;
    asm volatile("mov.u32 %0, %clock;" : "=r"(t));
    return t;
}

struct Spin {
    u32 count = 0;
    u64 start = 0;
    DEVICE void wait(int place) {
        if (++count % 256) return;
        const u64 now = nanoseconds();
        if (start == 0) start = now;
        if (now - start > MAX_WAIT_NS) stuck(place);
    }
};

struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

struct alignas(8) Pair {
    u32 x, y;
};

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }

// Two bf16 in a word; rounds to nearest even.
DEVICE u32 pack_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Two fp16 in a word.
DEVICE u32 pack_half(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Four e4m3 numbers as fp16, exactly.
DEVICE Pair unpack_fp8(u32 word) {
    Pair x;
    asm("{\n.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(x.x), "=r"(x.y)
        : "r"(word));
    return x;
}

DEVICE u32 warp_most(u32 x) { return __reduce_max_sync(0xffffffffu, x); }

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float divide(float x, float y) { return __fdividef(x, y); }  // within two units of the last place
DEVICE float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle_from(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 shuffle_word(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 exchange_word(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle_down(float x, int by) { return __shfl_down_sync(0xffffffffu, x, by); }
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Weights and entries of the KV cache: read once.
DEVICE Vec4 load_once(const void* at) {
    Vec4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

DEVICE Pair load_pair(const void* at) {
    Pair v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}

DEVICE u32 load_word32(const void* at) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// Two neighbouring words of a mailbox. Each is valid by itself.
DEVICE void load_words(const u64* at, u64& a, u64& b) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
}

DEVICE u64 load_word(const u64* at) {
    u64 a;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(at) : "memory");
    return a;
}

DEVICE void store_word(u64* at, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

DEVICE u32 load_counter(const u32* at) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

DEVICE u32 add_counter(u32* at, u32 x) { return atomicAdd(at, x); }

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

DEVICE void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

DEVICE void barriers_visible() { asm volatile("fence.proxy.async;" ::: "memory"); }

DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

DEVICE bool barrier_passed(u64* barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return passed;
}

DEVICE void barrier_wait(u64* barrier, u32 parity, int place) {
    Spin spin;
    while (!barrier_passed(barrier, parity)) spin.wait(place);
}

// Weights are read once in a step, so the L2 cache evicts them first: mailboxes and norms stay in it.
DEVICE u64 read_once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copy `bytes` (a multiple of 16) to shared memory in the background. Arrival is counted by `barrier`.
DEVICE void copy_in_background(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// Bring `bytes` (a multiple of 16) into the L2 cache in the background.
DEVICE void prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. Of 8 columns of a row, lane i holds columns 0, 1, 4, 5 as row i / 4 of `a`, and
// columns 2, 3, 6, 7 as row i / 4 + 8; and those of one of both as column i / 4 of `b`. Numbers are fp16 (HALF) or bf16.
template <bool HALF = false>
DEVICE void multiply_add(float (&c)[4], const Vec4& a, u32 b0, u32 b1) {
#define MULTIPLY_ADD(TYPE)                                                                                          \
    asm volatile(                                                                                                   \
        "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                                                                                         \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                            \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1))
    if constexpr (HALF)
        MULTIPLY_ADD("f16");
    else
        MULTIPLY_ADD("bf16");
#undef MULTIPLY_ADD
}
