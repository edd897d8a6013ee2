// Attention of each row's new token over its blocks.
//
// A task is a row, a KV head (or some of its query heads), and a split of the row's older tokens. The lanes of a warp
// form teams that hold one head: DIM / 8 lanes with 8 dimensions each. A team attends to every so-manyth token of the
// split. Partial results are merged over teams, over warps, and over the blocks of the other splits, each of which
// merges a share of the dimensions.

constexpr int TEAM = DIM / 8;
constexpr int TEAMS = 32 / TEAM;          // in a warp
constexpr int AHEAD = 2;                  // tokens of a team that are loaded together
constexpr float LOWEST = -1e30f;

struct Head {
    float x[8];
};

DEVICE Head unpack(Vec4 v) {
    return Head{{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y), low_half(v.z), high_half(v.z),
                 low_half(v.w), high_half(v.w)}};
}

DEVICE Vec4 packed(const Head& h) {
    return Vec4{pack_bf16(h.x[0], h.x[1]), pack_bf16(h.x[2], h.x[3]), pack_bf16(h.x[4], h.x[5]),
                pack_bf16(h.x[6], h.x[7])};
}

template <class T>
DEVICE T team_sum(T x) {
    for (int mask = 1; mask < TEAM; mask *= 2) x += shuffle_xor(x, mask);
    return x;
}

// Norm and rotate a head that a team holds, rounding where kernels/rope.py does.
DEVICE void norm_and_rotate(Head& h, const Vec4& norm, const Vec4& cosines, const Vec4& sines, int member) {
    if (QK_NORM) {
        float squares = 0;
        for (int i = 0; i < 8; i++) squares += h.x[i] * h.x[i];
        const float scale = inverse_root(team_sum(squares) / DIM + (float)EPS);
        const Head gain = unpack(norm);
        for (int i = 0; i < 8; i++) h.x[i] = rounded(h.x[i] * scale * gain.x[i]);
    }
    const Head cos = unpack(cosines), sin = unpack(sines);
    for (int i = 0; i < 8; i++) {
        const float other = shuffle_xor(h.x[i], TEAM / 2);
        const float turned = member < TEAM / 2 ? -other : other;
        h.x[i] = rounded(rounded(h.x[i] * cos.x[i]) + turned * sin.x[i]);
    }
}

struct State {  // of an online softmax, in powers of 2
    float top, total, values[8];
};

DEVICE void attend_one(State& state, const Head& q, const Head& k, const Head& v, bool valid) {
    float score = 0;
    for (int i = 0; i < 8; i++) score += q.x[i] * k.x[i];
    score = team_sum(score);
    if (!valid) return;
    const float top = score > state.top || !(score == score) ? score : state.top;
    const float old = exp2_fast(state.top - top), now = exp2_fast(score - top);
    state.top = top;
    state.total = state.total * old + now;
    for (int i = 0; i < 8; i++) state.values[i] = state.values[i] * old + now * v.x[i];
}

DEVICE void merge_teams(State& state) {
    for (int mask = TEAM; mask < 32; mask *= 2) {
        const float other = shuffle_xor(state.top, mask), top = other > state.top ? other : state.top;
        const float scale = exp2_fast(state.top - top);
        state.top = top;
        state.total *= scale;
        state.total += shuffle_xor(state.total, mask);
        for (int i = 0; i < 8; i++) {
            state.values[i] *= scale;
            state.values[i] += shuffle_xor(state.values[i], mask);
        }
    }
}

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

struct Span {  // of the older tokens of a row, which are in the cache
    int older, begin, end;

    DEVICE Span(const Task& task, const Step& step) {
        older = (int)step.positions[task.row];
        const int per = ceil_div(older, SPLITS);
        begin = at_most(older, task.split * per), end = at_most(older, task.split * per + per);
    }
};

// What a lane needs of a task in every layer: looked up once, because each lookup is a trip to the L2 cache.
struct Context {
    int older, begin, end;
    u32 places[AHEAD];  // of the lane's first tokens in the cache, in units of 8 elements
    Vec4 cosines, sines;

    DEVICE Context(const Task& task, const Step& step, const Consumer& self) {
        const Span span(task, step);
        older = span.older, begin = span.begin, end = span.end;
        const int member = self.lane % TEAM;
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            places[j] = place(task, step, member, begin + self.warp * TEAMS + self.lane / TEAM + j * WARPS * TEAMS);
        const u16* angles = step.angles + (i64)older * DIM + member % (TEAM / 2) * 8;
        cosines = load_once(angles), sines = load_once(angles + DIM / 2);
    }

    // Return where a lane's part of a token is in the cache; 0 if the token is not in the task.
    DEVICE u32 place(const Task& task, const Step& step, int member, int token) const {
        if (token >= end) return 0;
        const int block = step.table[step.slots[task.row] * step.table_row + token / BLOCK_SIZE];
        const i64 at = block * step.block_stride + (task.kv_head * BLOCK_SIZE + token % BLOCK_SIZE) * DIM;
        return (u32)(at / 8) + member;
    }
};

DEVICE void send_attended(const Step& step, const Consumer& self, const Task& task, int output, u32 pair) {
    const int column = task.first_query * DIM + output;
    store_word(step.mail + ATTENDED_BOX + (task.row * ATTENDED + column) / 2, tagged(pair, self.tag));
}

// Merge the states of the warps; send the result, or the words that the blocks of the other splits wait for.
DEVICE void merge_warps(
    const Step& step, const Block& block, const Consumer& self, const Task& task, int number, int i) {
    const int query = i / DIM;
    const bool valid = i < task.queries * DIM;
    float top = LOWEST, total = 0, value = 0;
    if (valid) {
        for (int w = 0; w < WARPS; w++) {
            const float other = block.stats[(w * QUERIES + query) * 2];
            top = other > top || !(other == other) ? other : top;
        }
        for (int w = 0; w < WARPS; w++) {
            const float* stats = block.stats + (w * QUERIES + query) * 2;
            const float scale = exp2_fast(stats[0] - top);
            total += stats[1] * scale;
            value += block.attended[w * QUERIES * DIM + i] * scale;
        }
    }
    if (SPLITS == 1) {
        value /= total;
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

// Merge this split's share of the outputs over all splits: one thread for each output and split.
DEVICE void merge_splits(const Step& step, const Consumer& self, const Task& task, int item) {
    const int other = item % SPLITS, i = task.split * (QUERIES * DIM / SPLITS) + item / SPLITS;
    const bool valid = i < task.queries * DIM;
    if (!any_lane(valid)) return;
    const u64* words = step.mail + PARTIAL_BOX + (i64)(task.group * SPLITS + other) * PARTIAL;
    float top = LOWEST, total = 0, value = 0;
    if (valid) {
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
    for (int mask = 1; mask < SPLITS; mask *= 2) {
        const float next = shuffle_xor(most, mask);
        most = next > most || !(next == next) ? next : most;
    }
    const float scale = exp2_fast(top - most);
    total *= scale, value *= scale;
    for (int mask = 1; mask < SPLITS; mask *= 2) {
        total += shuffle_xor(total, mask);
        value += shuffle_xor(value, mask);
    }
    value /= total;
    const float next = shuffle_xor(value, SPLITS);
    if (valid && other == 0 && i % 2 == 0) send_attended(step, self, task, i, pack_bf16(value, next));
}

DEVICE bool is_finite(float x) { return x - x == 0; }

// Complete the new key and value, which start in the mailbox, and store them in the cache: a key that is not finite as
// NaN, its value with zeros (kernels/attention/kv_write.py says why).
DEVICE void take_new(
    Head& key, Head& value, const Step& step, const Layer& layer, const Task& task, bool stores, int member) {
    float sick = 0;
    for (int i = 0; i < 8; i++) {
        if (!is_finite(key.x[i]) || !is_finite(value.x[i])) sick = 1;
        if (!is_finite(value.x[i])) value.x[i] = 0;
    }
    if (team_sum(sick) > 0)
        for (int i = 0; i < 8; i++) key.x[i] = as_float(0x7fc00000u);
    const i64 slot = step.kv_slots[task.row];
    if (!stores || slot < 0) return;
    const i64 at =
        slot / BLOCK_SIZE * step.block_stride + (task.kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM + member * 8;
    *(Vec4*)(layer.keys + at) = packed(key);
    *(Vec4*)(layer.values + at) = packed(value);
}

DEVICE void attend_task(
    const Step& step, const Block& block, const Consumer& self, int layer, const Context& context, int number) {
    const Layer& weights = block.layers[layer];
    const Task task(number);
    const int member = self.lane % TEAM, team = self.warp * TEAMS + self.lane / TEAM;
    constexpr int STRIDE = WARPS * TEAMS;
    // Older tokens do not depend on this layer, so they arrive while the queries are computed.
    Vec4 keys[AHEAD], values[AHEAD];
    const auto load = [&](int j, u32 place) {
        keys[j] = load_once(weights.keys + (u64)place * 8);
        values[j] = load_once(weights.values + (u64)place * 8);
    };
#pragma unroll
    for (int j = 0; j < AHEAD; j++) load(j, context.places[j]);
    const Vec4 gain = QK_NORM ? load_once(weights.head_norms + task.first_query * DIM + member * 8) : Vec4{0, 0, 0, 0};

    const u64* mail = step.mail + QKV_BOX + (i64)task.row * QKV_ROWS / 2 + member * 4;
    Head queries[QUERIES];
    State states[QUERIES];
    Vec4 arrived[QUERIES];
    const auto head_of = [&](int q) { return task.first_query + (q < task.queries ? q : 0); };
    receive_all<QUERIES>(arrived, [&](int q) { return mail + head_of(q) * DIM / 2; }, self.tag, 16);
    sync_warp();
    TRACE_AT(11);
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        queries[q] = unpack(arrived[q]);
        norm_and_rotate(queries[q], gain, context.cosines, context.sines, member);
        for (int i = 0; i < 8; i++) queries[q].x[i] *= (float)SCALE * 1.4426950408889634f;
        states[q] = State{LOWEST, 0, {0, 0, 0, 0, 0, 0, 0, 0}};
    }
    if (task.split == SPLITS - 1 && self.warp == 0) {
        const int head = HEADS + task.kv_head;
        const Vec4 key_gain = QK_NORM ? load_once(weights.head_norms + head * DIM + member * 8) : gain;
        Vec4 both[2];
        receive_all<2>(both, [&](int i) { return mail + (head + i * KV_HEADS) * DIM / 2; }, self.tag, 17);
        Head key = unpack(both[0]), value = unpack(both[1]);
        sync_warp();
        norm_and_rotate(key, key_gain, context.cosines, context.sines, member);
        const bool is_first = team == 0;
        const bool stores = is_first && task.first_query == task.kv_head * (HEADS / KV_HEADS);
        take_new(key, value, step, weights, task, stores, member);
#pragma unroll
        for (int q = 0; q < QUERIES; q++) attend_one(states[q], queries[q], key, value, is_first);
    }
    // All teams of a warp take the same number of turns, because they sum scores together.
    int token = context.begin + team;
    for (int first = context.begin + self.warp * TEAMS; first < context.end; first += AHEAD * STRIDE) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const Head key = unpack(keys[j]), value = unpack(values[j]);
            const bool valid = token + j * STRIDE < context.end;
#pragma unroll
            for (int q = 0; q < QUERIES; q++) attend_one(states[q], queries[q], key, value, valid);
        }
        token += AHEAD * STRIDE;
        if (first + AHEAD * STRIDE >= context.end) break;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) load(j, context.place(task, step, member, token + j * STRIDE));
    }
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        merge_teams(states[q]);
        if (self.lane < TEAM) {
            float* to = block.attended + (self.warp * QUERIES + q) * DIM + member * 8;
            for (int i = 0; i < 8; i++) to[i] = states[q].values[i];
            if (member == 0) {
                block.stats[(self.warp * QUERIES + q) * 2] = states[q].top;
                block.stats[(self.warp * QUERIES + q) * 2 + 1] = states[q].total;
            }
        }
    }
    TRACE_AT(12);
    sync_consumers();
    constexpr int ITEMS = QUERIES * DIM;
    for (int i = self.thread; i < ITEMS; i += CONSUMERS) merge_warps(step, block, self, task, number, i);
    TRACE_AT(13);
    if (SPLITS > 1)
        for (int i = self.thread; i < ITEMS; i += CONSUMERS) merge_splits(step, self, task, i);
}

STAGE void attend(const Consumer& caller, int layer, const Context& given) {
    const Block block = shared_parts();
    const Step& step = *block.step;
    const Consumer self = caller;
    const Context first = given;
    if constexpr (TASKS <= BLOCKS) {
        if (self.block < TASKS) attend_task(step, block, self, layer, first, self.block);
    } else {
#pragma unroll 1
        for (int number = self.block; number < TASKS; number += BLOCKS) {
            attend_task(step, block, self, layer, Context(Task(number), step, self), number);
            sync_consumers();  // the task's states have been read
        }
    }
    TRACE_AT(10);
}
