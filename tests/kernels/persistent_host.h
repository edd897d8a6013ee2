// The kernel of kernels/persistent/ on a CPU: replaces device.h. Every thread of every block is a fiber, and fibers take
// turns where a thread waits, in an order drawn from a seed. Copies in the background arrive some turns later.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define CONSTANT static const
#define KERNEL extern "C" void
#define __align__(x)
constexpr int STACK_BYTES = 64 << 10;
constexpr u64 MOST_TURNS = 400ull << 20;

struct Meeting {  // of threads at a barrier
    int arrived = 0;
    u32 times = 0;
};

struct Warp {
    Meeting meeting;
    float floats[32];
    u32 words[32][6];
};

struct HostBlock {
    std::vector<char> shared;
    std::vector<Warp> warps;
    Meeting all, consumers;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    HostBlock* home;
    int block, thread;
    bool ended = false;
};

struct Copy {
    void* to;
    const void* from;
    u32 bytes;
    u64* barrier;
};

static Fiber* running;
static ucontext_t scheduler;
static std::vector<Copy> copies;
static u64 turns, random_state;
static int failed;

struct Index {
    int x;
};
#define threadIdx (Index{running->thread})
#define blockIdx (Index{running->block})

static u32 draw() { return (random_state = random_state * 6364136223846793005ull + 1442695040888963407ull) >> 33; }
static void yield() { swapcontext(&running->context, &scheduler); }

inline char* shared_memory() {
    char* start = running->home->shared.data();
    return start + (128 - (u64)start % 128) % 128;
}

struct Spin {
    void wait(int place) {
        if (turns > MOST_TURNS) {
            if (!failed) fprintf(stderr, "block %d thread %d waits at %d\n", running->block, running->thread, place);
            failed = place;
        }
        yield();
    }
};


struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

struct alignas(8) Pair {
    u32 x, y;
};

inline float as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline u32 as_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline u32 round_bf16(float x) {
    const u32 bits = as_bits(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }

// fp16 of a number, rounded to nearest even, and back.
inline u32 round_half(float x) {
    const u32 sign = std::signbit(x) ? 0x8000 : 0;
    if (!(std::fabs(x) < 65520)) return sign | (x == x ? 0x7c00 : 0x7e00);
    const int exponent = std::fabs(x) < std::ldexp(1.0f, -14) ? -14 : std::ilogb(x);
    const int steps = (int)std::nearbyint(std::ldexp(std::fabs(x), 10 - exponent));
    return sign | (u32)(((exponent + 14) << 10) + steps);
}
inline float from_half(u32 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float x = exponent == 31 ? (fraction ? NAN : INFINITY)
                    : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                   : std::ldexp((float)fraction, -24);
    return bits & 0x8000 ? -x : x;
}
inline u32 pack_half(float low, float high) { return round_half(low) | round_half(high) << 16; }

inline float from_fp8(u32 bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float x = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
    return (bits & 127) == 127 ? NAN : bits & 128 ? -x : x;
}
inline Pair unpack_fp8(u32 word) {
    return Pair{pack_half(from_fp8(word & 255), from_fp8(word >> 8 & 255)),
                pack_half(from_fp8(word >> 16 & 255), from_fp8(word >> 24))};
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float divide(float x, float y) { return x / y; }
inline float inverse_root(float x) { return 1 / sqrtf(x); }

inline void meet(Meeting& meeting, int count) {
    const u32 times = meeting.times;
    if (++meeting.arrived == count) meeting.arrived = 0, meeting.times++;
    Spin spin;
    while (meeting.times == times && !failed) spin.wait(3);
}
inline Warp& own_warp() { return running->home->warps[running->thread / 32]; }
inline void sync_warp() { meet(own_warp().meeting, 32); }
inline void sync_block() { meet(running->home->all, THREADS); }
inline void sync_consumers() { meet(running->home->consumers, CONSUMERS); }

inline float exchange(float x, int from) {
    Warp& warp = own_warp();
    warp.floats[running->thread % 32] = x;
    sync_warp();
    const float y = warp.floats[from];
    sync_warp();
    return y;
}
inline float shuffle_xor(float x, int mask) { return exchange(x, running->thread % 32 ^ mask); }
inline float shuffle_from(float x, int lane) { return exchange(x, lane); }
inline u32 shuffle_word(u32 x, int lane) { return as_bits(exchange(as_float(x), lane)); }
inline u32 exchange_word(u32 x, int mask) { return shuffle_word(x, running->thread % 32 ^ mask); }
inline float shuffle_down(float x, int by) {
    const int from = running->thread % 32 + by;
    return exchange(x, from < 32 ? from : running->thread % 32);
}
inline u32 clock_cycles() {
    yield();
    return (u32)turns;
}
inline u32 warp_most(u32 x) {
    for (int mask = 1; mask < 32; mask *= 2) {
        const u32 other = exchange_word(x, mask);
        x = other > x ? other : x;
    }
    return x;
}
inline bool any_lane(bool x) {
    Warp& warp = own_warp();
    warp.floats[running->thread % 32] = x;
    sync_warp();
    bool any = false;
    for (float y : warp.floats) any |= y != 0;
    sync_warp();
    return any;
}

inline Vec4 load_once(const void* at) { return *(const Vec4*)at; }
inline Pair load_pair(const void* at) { return *(const Pair*)at; }
inline u32 load_word32(const void* at) { return *(const u32*)at; }
inline void load_words(const u64* at, u64& a, u64& b) { a = at[0], b = at[1]; }
inline u64 load_word(const u64* at) { return *at; }
inline void store_word(u64* at, u64 word) { *at = word; }
inline u32 load_counter(const u32* at) { return *at; }
inline u32 add_counter(u32* at, u32 x) {
    const u32 before = *at;
    *at += x;
    return before;
}

// Bits of a barrier: 0-15 missing arrivals, 16-31 arrivals of a phase, 32-62 missing bytes, 63 phase.
inline void settle(u64* barrier) {
    if ((*barrier & 0xffff) || (*barrier >> 32 & 0x7fffffff)) return;
    *barrier = (*barrier ^ 1ull << 63) | (*barrier >> 16 & 0xffff);
}
inline void barrier_init(u64* barrier, u32 count) { *barrier = count | (u64)count << 16; }
inline void barriers_visible() {}
inline void barrier_arrive(u64* barrier) {
    *barrier -= 1;
    settle(barrier);
}
inline void barrier_expect(u64* barrier, u32 bytes) {
    *barrier += (u64)bytes << 32;
    barrier_arrive(barrier);
}
inline bool barrier_passed(u64* barrier, u32 parity) {
    if (*barrier >> 63 != parity || failed) return true;
    Spin().wait(2);
    return false;
}
inline void barrier_wait(u64* barrier, u32 parity, int place) {
    Spin spin;
    while (*barrier >> 63 == parity && !failed) spin.wait(place);
}
inline u64 read_once_policy() { return 0; }
inline void prefetch(const void*, u32) {}
inline void copy_in_background(void* to, const void* from, u32 bytes, u64* barrier, u64) {
    copies.push_back({to, from, bytes, barrier});
}
static void finish_copy() {
    const u32 which = draw() % copies.size();
    const Copy copy = copies[which];
    copies[which] = copies.back(), copies.pop_back();
    memcpy(copy.to, copy.from, copy.bytes);
    *copy.barrier -= (u64)copy.bytes << 32;
    settle(copy.barrier);
}

template <bool HALF>
inline float half_of(u32 word, int which) {
    const u32 bits = which ? word >> 16 : word & 0xffffu;
    return HALF ? from_half(bits) : as_float(bits << 16);
}
template <bool HALF = false>
inline void multiply_add(float (&c)[4], const Vec4& a, u32 b0, u32 b1) {
    Warp& warp = own_warp();
    const int lane = running->thread % 32;
    const u32 own[6] = {a.x, a.y, a.z, a.w, b0, b1};
    memcpy(warp.words[lane], own, sizeof own);
    sync_warp();
    for (int i = 0; i < 2; i++)      // rows
        for (int j = 0; j < 2; j++)  // columns
            for (int t = 0; t < 4; t++)
                for (int half = 0; half < 4; half++)
                    c[2 * i + j] += half_of<HALF>(warp.words[lane / 4 * 4 + t][i + half / 2 * 2], half % 2) *
                                    half_of<HALF>(warp.words[(lane % 4 * 2 + j) * 4 + t][4 + half / 2], half % 2);
    sync_warp();
}
