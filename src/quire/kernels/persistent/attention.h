// Attention of each row's new token over its blocks.
//
// A task is a row, a KV head (or some of its query heads), and a split of the row's older tokens. Each query is completed
// by one warp and shared. A warp then attends to eight tokens at a time: the matrix unit multiplies keys with queries as
// it multiplies tiles of weights with inputs (multiply.h), and each lane adds up some dimensions of the values. Partial
// results are merged over warps, and over the blocks of the other splits, each of which merges a share of the dimensions.

constexpr int KEY_PIECES = DIM / 32;   // of four lanes with 8 dimensions each
constexpr int OWN_DIMS = DIM / 32;     // of a value, that a lane holds
constexpr int AT_ONCE = 8;             // tokens of a warp
constexpr int STRIDE = WARPS * AT_ONCE;
constexpr bool LOADS_AHEAD = QUERIES <= 2;  // registers hold two turns' tokens
constexpr float LOWEST = -1e30f;
static_assert(QUERIES <= 4, "columns of the matrix unit");

struct Task {
    int row, kv_head, first_query, queries, split, group;  // group: of tasks that are merged

    DEVICE explicit Task(int number) {
        split = number % SPLITS, group = number / SPLITS;
        const int share = group % SHARE, rest = group / SHARE;
        kv_head = rest % KV_HEADS, row = rest / KV_HEADS;
        const int per_kv = HEADS / KV_HEADS;
        first_query = kv_head * per_kv + share * QUERIES;
        queries = at_most(QUERIES, per_kv - share * QUERIES);
    }
};

// The older tokens of a row that a task attends to, which are in the cache. Splits that are not `used` have none; the
// last used one attends to the new token, too.
struct Span {
    int older, used, begin, end;

    DEVICE Span(const Task& task, const Step& step) {
        older = (int)step.positions[task.row];
        const int per = at_least(ceil_div(ceil_div(older + 1, SPLITS), AT_ONCE) * AT_ONCE, STRIDE);
        used = older / per + 1;
        begin = at_most(older, task.split * per), end = at_most(older, task.split * per + per);
    }
};

// What a lane needs of a task in every layer: looked up once, because each lookup is a trip to the L2 cache.
struct Context {
    Span span;
    const int* blocks;   // of the row
    u32 place;           // of the lane's first token in the cache, in units of 8 elements
    int second;          // block of its token in the next turn
    u32 cosines[2];      // of the lane's dimensions of a query: two neighbours in either half
    u32 sines[2];

    DEVICE Context(const Task& task, const Step& step, const Consumer& self) : span(task, step) {
        blocks = step.table + step.slots[task.row] * step.table_row;
        const int token = span.begin + self.warp * AT_ONCE + self.lane / 4;
        place = place_of(task, step, block_of(token), token);
        second = block_of(token + STRIDE);
        const u16* angles = step.angles + (i64)span.older * DIM + self.lane % (DIM / 4) * 2;
        cosines[0] = load_word32(angles), sines[0] = load_word32(angles + DIM / 2);
    }

    // Beyond the task's tokens, the last of them counts: what is read there is not used, but must be finite.
    DEVICE int existing(int token) const { return at_least(at_most(token, span.end - 1), 0); }

    DEVICE int block_of(int token) const { return blocks[existing(token) / BLOCK_SIZE]; }

    // Return where a token is in the cache.
    DEVICE u32 place_of(const Task& task, const Step& step, int block, int token) const {
        const int within = task.kv_head * BLOCK_SIZE + existing(token) % BLOCK_SIZE;
        return (u32)((block * step.block_stride + within * DIM) / 8);
    }
};

// Two neighbouring dimensions in the first half of a head, and their partners in the second half.
struct Quad {
    float x[4];
};

DEVICE Quad unpack(u32 a, u32 b) {
    return Quad{{low_half(a), high_half(a), low_half(b), high_half(b)}};
}

DEVICE bool is_finite(float x) { return x - x == 0; }

DEVICE float warp_sum(float x) {
    for (int mask = 1; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
}

// Norm and rotate a head that a warp holds, rounding where kernels/rope.py does.
DEVICE void norm_and_rotate(Quad& h, const Quad& gain, const Context& context) {
    if (QK_NORM) {
        float squares = 0;
        for (int i = 0; i < 4; i++) squares += h.x[i] * h.x[i];
        const float scale = inverse_root(warp_sum(squares) / DIM + (float)EPS);
        for (int i = 0; i < 4; i++) h.x[i] = rounded(h.x[i] * scale * gain.x[i]);
    }
    const float cos[2] = {low_half(context.cosines[0]), high_half(context.cosines[0])};
    const float sin[2] = {low_half(context.sines[0]), high_half(context.sines[0])};
    for (int i = 0; i < 2; i++) {
        const float a = h.x[i], b = h.x[i + 2];
        h.x[i] = rounded(rounded(a * cos[i]) - b * sin[i]);
        h.x[i + 2] = rounded(rounded(b * cos[i]) + a * sin[i]);
    }
}

// Receive a query, complete and share it; or the new key and value, which go into the cache as well: a key that is not
// finite as NaN, its value with zeros (kernels/attention/kv_write.py says why).
DEVICE void share_head(
    const Step& step, const Block& block, const Consumer& self, const Layer& layer, const Task& task,
    const Context& context, int item) {
    const bool is_query = item < QUERIES, holds = self.lane < DIM / 4;
    const int at = self.lane * 2, head = is_query ? task.first_query + item : HEADS + task.kv_head;
    const u64* mail = step.mail + QKV_BOX + ((i64)task.row * QKV_ROWS + head * DIM) / 2 + self.lane;
    const u64* value_mail = mail + KV_HEADS * DIM / 2;
    u32 words[4] = {}, gains[2] = {};  // of the head, of the new value
    if (QK_NORM && holds) {
        const u16* gain = layer.head_norms + head * DIM + at;
        gains[0] = load_word32(gain), gains[1] = load_word32(gain + DIM / 2);
    }
    if (holds) {
        const u64* second = is_query ? mail : value_mail;
        receive_words<4>(words, [&](int i) { return (i < 2 ? mail : second) + i % 2 * (DIM / 4); }, self.tag, 16);
    }
    sync_warp();
    Quad x = unpack(words[0], words[1]);
    norm_and_rotate(x, unpack(gains[0], gains[1]), context);
    if (!is_query) {
        Quad value = unpack(words[2], words[3]);
        float sick = 0;
        for (int i = 0; i < 4; i++) {
            if (!is_finite(x.x[i]) || !is_finite(value.x[i])) sick = 1;
            if (!is_finite(value.x[i])) value.x[i] = 0;
        }
        if (any_lane(sick > 0))
            for (int i = 0; i < 4; i++) x.x[i] = as_float(0x7fc00000u);
        for (int i = 0; i < 2; i++) words[2 + i] = pack_bf16(value.x[2 * i], value.x[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) words[i] = pack_bf16(x.x[2 * i], x.x[2 * i + 1]);
    if (!holds) return;
    for (int i = 0; i < 2; i++) {
        *(u32*)(block.heads + item * DIM + i * (DIM / 2) + at) = words[i];
        if (!is_query) *(u32*)(block.heads + (QUERIES + 1) * DIM + i * (DIM / 2) + at) = words[2 + i];
    }
    const i64 slot = step.kv_slots[task.row];
    if (is_query || slot < 0 || task.first_query != task.kv_head * (HEADS / KV_HEADS)) return;
    const i64 to = slot / BLOCK_SIZE * step.block_stride + (task.kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM + at;
    for (int i = 0; i < 2; i++) {
        *(u32*)(layer.keys + to + i * (DIM / 2)) = words[i];
        *(u32*)(layer.values + to + i * (DIM / 2)) = words[2 + i];
    }
}

// Of an online softmax, in powers of 2. Sums of exponentials belong to the query that is the lane's number modulo 4.
struct State {
    float top = LOWEST, total = 0, values[QUERIES][OWN_DIMS] = {};
};

struct Tokens {  // eight: keys as the matrix unit takes them, some dimensions of each value
    Vec4 keys[KEY_PIECES];
    u32 values[AT_ONCE][OWN_DIMS / 2];

    DEVICE void load(const Layer& layer, u32 place, const Consumer& self) {
        const u16* key = layer.keys + (u64)place * 8 + self.quarter * 8;
#pragma unroll
        for (int p = 0; p < KEY_PIECES; p++) keys[p] = load_once(key + p * 32);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const u16* value = layer.values + (u64)shuffle_word(place, j * 4) * 8 + self.lane * OWN_DIMS;
            if constexpr (OWN_DIMS == 4) {
                const Pair pair = load_pair(value);
                values[j][0] = pair.x, values[j][1] = pair.y;
            } else {
                values[j][0] = load_word32(value);
            }
        }
    }
};

DEVICE float larger(float a, float b) { return a > b || !(a == a) ? a : b; }  // NaN if one is

DEVICE void attend_tokens(State& state, const Tokens& tokens, const u32 (&queries)[KEY_PIECES][2], bool valid) {
    float products[2][4] = {};
#pragma unroll
    for (int p = 0; p < KEY_PIECES; p++) multiply_add(products[p % 2], tokens.keys[p], queries[p][0], queries[p][1]);
    float score = (products[0][0] + products[1][0]) + (products[0][3] + products[1][3]);
    score = valid ? score * ((float)SCALE * 1.4426950408889634f) : LOWEST;
    float top = score;
    for (int mask = 4; mask < 32; mask *= 2) top = larger(shuffle_xor(top, mask), top);
    top = larger(top, state.top);
    const float old = exp2_fast(state.top - top), now = valid ? exp2_fast(score - top) : 0;
    state.top = top;
    state.total = state.total * old + now;  // of this lane's tokens
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        const float factor = shuffle_from(old, q);
        for (int i = 0; i < OWN_DIMS; i++) state.values[q][i] *= factor;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int q = 0; q < QUERIES; q++) {
            const float weight = shuffle_from(now, j * 4 + q);
#pragma unroll
            for (int i = 0; i < OWN_DIMS / 2; i++) {
                state.values[q][2 * i] += weight * low_half(tokens.values[j][i]);
                state.values[q][2 * i + 1] += weight * high_half(tokens.values[j][i]);
            }
        }
}

// Begin with the new token, whose key and value have been shared.
DEVICE void attend_new(State& state, const Block& block, const Consumer& self) {
    const int at = self.lane * OWN_DIMS;
    const u16 *key = block.heads + QUERIES * DIM + at, *value = key + DIM;
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        float score = 0;
        for (int i = 0; i < OWN_DIMS; i++) score += from_bf16(block.heads[q * DIM + at + i]) * from_bf16(key[i]);
        score = warp_sum(score) * ((float)SCALE * 1.4426950408889634f);
        if (self.quarter == q) state.top = score, state.total = self.lane < 4;
        for (int i = 0; i < OWN_DIMS; i++) state.values[q][i] = from_bf16(value[i]);
    }
}

DEVICE void send_attended(const Step& step, const Consumer& self, const Task& task, int output, u32 pair) {
    const int column = task.first_query * DIM + output;
    send(step, ATTENDED_BOX + (task.row * ATTENDED + column) / 2, tagged(pair, self.tag), true);
}

// Merge the states of the warps; send the result, or the words that the blocks of the other splits wait for.
DEVICE void merge_warps(
    const Step& step, const Block& block, const Consumer& self, const Task& task, int number, int i, bool alone) {
    const int query = i / DIM;
    const bool valid = i < task.queries * DIM;
    float top = LOWEST, total = 0, value = 0;
    if (valid) {
        Pair stats[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            stats[w] = *(const Pair*)(block.stats + (w * QUERIES + query) * 2);
            top = larger(as_float(stats[w].x), top);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float scale = exp2_fast(as_float(stats[w].x) - top);
            total += as_float(stats[w].y) * scale;
            value += block.attended[w * QUERIES * DIM + i] * scale;
        }
    }
    if (alone) {
        value = divide(value, total);
        const float next = shuffle_down(value, 1);
        if (valid && i % 2 == 0) send_attended(step, self, task, i, pack_bf16(value, next));
        return;
    }
    u64* words = step.mail + PARTIAL_BOX + (i64)number * PARTIAL;
    if (!valid) return;
    store_word(words + 2 * QUERIES + i, tagged(as_bits(value), self.tag));
    if (i % DIM == 0) {
        store_word(words + 2 * query, tagged(as_bits(top), self.tag));
        store_word(words + 2 * query + 1, tagged(as_bits(total), self.tag));
    }
}

// Merge this split's share of the outputs over the used splits: one thread for each output and split.
DEVICE void merge_splits(const Step& step, const Consumer& self, const Task& task, int used, int item) {
    const int other = item % SPLITS, i = task.split * (QUERIES * DIM / SPLITS) + item / SPLITS;
    const bool valid = i < task.queries * DIM;
    if (!any_lane(valid)) return;
    const u64* words = step.mail + PARTIAL_BOX + (i64)(task.group * SPLITS + other) * PARTIAL;
    float top = LOWEST, total = 0, value = 0;
    if (valid && other < used) {
        u64 a, b, c;
        Spin spin;
        while (true) {
            load_words(words + 2 * (i / DIM), a, b);
            c = load_word(words + 2 * QUERIES + i);
            if (has_tag(a, self.tag) && has_tag(b, self.tag) && has_tag(c, self.tag)) break;
            spin.wait(20);
        }
        top = as_float((u32)a), total = as_float((u32)b), value = as_float((u32)c);
    }
    sync_warp();
    float most = top;
    for (int mask = 1; mask < SPLITS; mask *= 2) most = larger(shuffle_xor(most, mask), most);
    const float scale = exp2_fast(top - most);
    total *= scale, value *= scale;
    for (int mask = 1; mask < SPLITS; mask *= 2) {
        total += shuffle_xor(total, mask);
        value += shuffle_xor(value, mask);
    }
    value = divide(value, total);
    const float next = shuffle_xor(value, SPLITS);
    if (valid && other == 0 && i % 2 == 0) send_attended(step, self, task, i, pack_bf16(value, next));
}

DEVICE void attend_task(
    const Step& step, const Block& block, const Consumer& self, int layer, const Context& context, int number) {
    TRACE_AT(0);
    const Layer& weights = block.layers[layer];
    const Task task(number);
    const Span& span = context.span;
    const bool is_last = task.split == span.used - 1;
    if (task.split < span.used) {
        // Older tokens do not depend on this layer, so they arrive while the queries are completed.
        Tokens tokens = {};
        if (span.begin < span.end) tokens.load(weights, context.place, self);
        TRACE_AT(1);
#pragma unroll 1
        for (int item = self.warp; item < QUERIES + is_last; item += WARPS)
            if (item == QUERIES || item < task.queries) share_head(step, block, self, weights, task, context, item);
        TRACE_AT(2);
        sync_consumers();
        TRACE_AT(3);
        u32 queries[KEY_PIECES][2];
        const int query = at_most(self.lane / 8, task.queries - 1);
#pragma unroll
        for (int p = 0; p < KEY_PIECES; p++) {
            const u16* from = block.heads + query * DIM + p * 32 + self.quarter * 8 + self.half * 2;
            queries[p][0] = *(const u32*)from, queries[p][1] = *(const u32*)(from + 4);
        }
        State state;
        if (is_last && self.warp == WARPS - 1) attend_new(state, block, self);
        int token = span.begin + self.warp * AT_ONCE + self.lane / 4;
        int block_ahead = context.second;
        for (int first = span.begin + self.warp * AT_ONCE; first < span.end; first += STRIDE) {
            const bool more = first + STRIDE < span.end;
            const u32 place = context.place_of(task, step, block_ahead, token + STRIDE);
            block_ahead = more ? context.block_of(token + 2 * STRIDE) : 0;
            Tokens next;
            if (LOADS_AHEAD && more) next.load(weights, place, self);
            attend_tokens(state, tokens, queries, token < span.end);
            if (more) {
                if (LOADS_AHEAD)
                    tokens = next;
                else
                    tokens.load(weights, place, self);
            }
            token += STRIDE;
        }
        for (int mask = 4; mask < 32; mask *= 2) state.total += shuffle_xor(state.total, mask);
#pragma unroll
        for (int q = 0; q < QUERIES; q++) {
            float* to = block.attended + (self.warp * QUERIES + q) * DIM + self.lane * OWN_DIMS;
            for (int i = 0; i < OWN_DIMS; i++) to[i] = state.values[q][i];
        }
        if (self.lane < QUERIES) {
            block.stats[(self.warp * QUERIES + self.lane) * 2] = state.top;
            block.stats[(self.warp * QUERIES + self.lane) * 2 + 1] = state.total;
        }
        TRACE_AT(4);
        sync_consumers();
        TRACE_AT(5);
    }
    constexpr int ITEMS = QUERIES * DIM;
    const bool alone = SPLITS == 1 || span.used == 1;
    if (task.split < span.used) {
        for (int i = self.thread; i < ITEMS; i += CONSUMERS) merge_warps(step, block, self, task, number, i, alone);
        sync_consumers();  // the next product's sums take the place of what has been merged
    }
    TRACE_AT(6);
    if (!alone)
        for (int i = self.thread; i < ITEMS; i += CONSUMERS) merge_splits(step, self, task, span.used, i);
    TRACE_AT(7);
}

DEVICE void attend(const Step& step, const Block& block, const Consumer& self, int layer, const Context& first) {
    if constexpr (TASKS <= BLOCKS) {
        if (self.block < TASKS) attend_task(step, block, self, layer, first, self.block);
    } else {
#pragma unroll 1
        for (int number = self.block; number < TASKS; number += BLOCKS)
            attend_task(step, block, self, layer, Context(Task(number), step, self), number);
    }
}
