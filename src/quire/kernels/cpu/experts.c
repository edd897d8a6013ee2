/* Mixture of experts on a CPU: the rule of the router, and the products of the chosen experts.

   The pairs of a token and one of its experts are sorted by expert, so the weight of an expert is read once for all of
   its tokens, and only the weights of chosen experts are read. Every pair is computed on its own, and the results of a
   token are added in the order of its choice, so results depend neither on the other tokens nor on the threads. */

#include "weights.h"

/* -------------------------------------------------------------------------------------------------- router */

enum { SOFTMAX, SIGMOID, SPARSEMIXER };

typedef struct {
    const float *logits, *correction; /* [rows, experts]; [experts] or NULL: added to the scores for the choice */
    int64_t *ids;                     /* [rows, top_k], as the weights */
    float *weights;
    int64_t rows, experts, top_k, groups, top_groups, summed; /* summed: largest scores that make a group's score */
    float scale, jitter;
    int32_t scores, renormalise, failed;
} Route;

INLINE int ranks_before(float a, float b) { return a > b || (a != a && b == b); } /* a NaN is the largest */

/* Return the index of the largest of n values, the first one of equal ones, and replace the value by -infinity. */
INLINE int64_t take_largest(float *values, int64_t n, float *value) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (ranks_before(values[i], values[best])) best = i;
    *value = values[best];
    values[best] = -INFINITY;
    return best;
}

static void close_groups(const Route *j, float *ranked, float *work) {
    int64_t size = j->experts / j->groups;
    float *scores = work, *left = work + j->groups, value;
    for (int64_t g = 0; g < j->groups; g++) {
        memcpy(left, ranked + g * size, size * sizeof(float));
        scores[g] = 0;
        for (int64_t i = 0; i < MIN(j->summed, size); i++) {
            take_largest(left, size, &value);
            scores[g] += value;
        }
    }
    int8_t *open = (int8_t *)left;
    memset(open, 0, j->groups);
    for (int64_t i = 0; i < j->top_groups; i++) open[take_largest(scores, j->groups, &value)] = 1;
    for (int64_t i = 0; i < j->experts; i++)
        if (!open[i / size]) ranked[i] = -INFINITY;
}

static void choose(const Route *j, int64_t row, float *scores, float *ranked, float *work) {
    const float *logits = j->logits + row * j->experts;
    int64_t *ids = j->ids + row * j->top_k;
    float *weights = j->weights + row * j->top_k, total = 0, ignored;
    if (j->scores == SIGMOID) {
        for (int64_t i = 0; i < j->experts; i++) scores[i] = 1. / (1. + exp(-(double)logits[i]));
    } else {
        double sum = 0;
        float most = logits[0];
        for (int64_t i = 1; i < j->experts; i++) most = ranks_before(logits[i], most) ? logits[i] : most;
        for (int64_t i = 0; i < j->experts; i++) sum += exp((double)logits[i] - most);
        for (int64_t i = 0; i < j->experts; i++) scores[i] = exp((double)logits[i] - most) / sum;
    }
    for (int64_t i = 0; i < j->experts; i++) ranked[i] = scores[i] + (j->correction ? j->correction[i] : 0);
    if (j->groups > 1) close_groups(j, ranked, work);
    for (int64_t k = 0; k < j->top_k; k++) {
        ids[k] = take_largest(ranked, j->experts, &ignored);
        weights[k] = scores[ids[k]];
        total += weights[k];
    }
    for (int64_t k = 0; k < j->top_k; k++) weights[k] = weights[k] / (j->renormalise ? total + 1e-20f : 1) * j->scale;
}

/* Choose one expert after the other; its weight is its softmax among the remaining ones that are close to it. */
static void choose_in_turn(const Route *j, int64_t row, float *left) {
    const float *logits = j->logits + row * j->experts;
    memcpy(left, logits, j->experts * sizeof(float));
    for (int64_t k = 0; k < j->top_k; k++) {
        float top;
        double sum = 1;
        int64_t best = take_largest(left, j->experts, &top);
        for (int64_t i = 0; i < j->experts; i++) {
            float size = fabsf(logits[i]) > top ? fabsf(logits[i]) : top;
            if (!((top - logits[i]) / size > 2 * j->jitter)) sum += exp((double)left[i] - top);
        }
        j->ids[row * j->top_k + k] = best;
        j->weights[row * j->top_k + k] = 1 / sum;
    }
}

static void route_part(void *p) {
    Route *j = p;
    int64_t from, to;
    my_part(j->rows, &from, &to);
    float *work = scratch(4 * j->experts);
    if (!work) { j->failed = 1; return; }
    for (int64_t row = from; row < to; row++)
        if (j->scores == SPARSEMIXER) choose_in_turn(j, row, work);
        else choose(j, row, work, work + j->experts, work + 2 * j->experts);
}

/* Choose the experts of each row, and their weights. layers/routing.py defines the rule. */
int route(Route *j) { return run(route_part, j, j->rows < 4, &j->failed); }

/* ------------------------------------------------------------------------------------------------- experts */

/* Activations that only experts have, besides those of common.h. */
enum { CLAMPED_SWIGLU = 8, RELU2 };

typedef struct {
    const void *up, *down;  /* [experts] of Weight, or of CodedWeight; up is gate | up if the experts have a gate */
    const void *x;          /* [rows, hidden] */
    const int64_t *ids;     /* [rows, top_k], as their shares */
    const float *shares;
    void *y;                /* [rows, hidden] */
    int64_t rows, top_k, experts, first; /* the experts held here are numbered from `first` */
    int32_t coded, half, kind, gated, failed;
} Experts;

/* What the threads share. A place is a row of the buffers; the places of an expert follow each other. */
typedef struct {
    Experts *job;
    int64_t *starts, *pair_of, *place_of; /* [experts + 1]; [places]: row * top_k + k; [pairs]: or -1 */
    char *x, *h;                          /* inputs of the two products, as these read them */
    float *up, *out;                      /* their results */
    int64_t hidden, width, x_bytes, h_bytes, up_stride, out_stride; /* of one place */
} Places;

INLINE const void *weight_at(const Experts *j, const void *weights, int64_t expert) {
    return j->coded ? (const void *)((const CodedWeight *)weights + expert) : (const void *)((const Weight *)weights + expert);
}

INLINE int64_t inputs_of(const Experts *j, const void *w) { return j->coded ? ((CodedWeight *)w)->inputs : ((Weight *)w)->inputs; }
INLINE int64_t padded_of(const Experts *j, const void *w) { return j->coded ? ((CodedWeight *)w)->padded : ((Weight *)w)->padded; }
INLINE int64_t outputs_of(const Experts *j, const void *w) { return j->coded ? ((CodedWeight *)w)->outputs : ((Weight *)w)->outputs; }
INLINE int64_t block_size(const Experts *j, const void *w) { return j->coded ? LANES : ((Weight *)w)->vectors * LANES; }
INLINE int64_t blocks_of(const Experts *j, const void *w) { return (outputs_of(j, w) + block_size(j, w) - 1) / block_size(j, w); }
INLINE int64_t place_bytes(const Experts *j, const void *w) { return j->coded ? coded_row_bytes(w) : padded_of(j, w) * 4; }

/* Finish an input in fp32 for the product: in place, or rounded to 8 bits. */
INLINE void finish_input(const Experts *j, const void *w, const float *values, char *to) {
    if (j->coded) round_row(w, values, to);
}

INLINE float *input_room(const Experts *j, const void *w, char *to) {
    float *room = j->coded ? scratch(padded_of(j, w) + LANES) : (float *)to;
    if (room) {
        int64_t whole = inputs_of(j, w) / LANES * LANES;
        memset(room + whole, 0, (padded_of(j, w) - whole) * sizeof(float));
    }
    return room;
}

static void gather_part(void *p) {
    Places *s = p;
    Experts *j = s->job;
    int64_t from, to;
    my_part(s->starts[j->experts], &from, &to);
    for (int64_t place = from; place < to; place++) {
        int64_t pair = s->pair_of[place];
        float *room = input_room(j, j->up, s->x + place * s->x_bytes);
        if (!room) { j->failed = 1; return; }
        const void *x = at(j->x, pair / j->top_k * s->hidden, j->half);
        for (int64_t i = 0; i < s->hidden; i += LANES)
            store(room, i, s->hidden - i, load(x, i, s->hidden - i, j->half), 0);
        finish_input(j, j->up, room, s->x + place * s->x_bytes);
    }
}

INLINE vec gate_with(vec gate, vec up, int kind, int half) {
    if (kind == CLAMPED_SWIGLU) {
        vec seven = (vec){0} + 7.f, one = (vec){0} + 1.f;
        gate = select_((bits)(gate > seven), seven, gate);
        up = select_((bits)(up > seven), seven, select_((bits)(up < -seven), -seven, up));
        return (up + one) * (gate * sigmoid(gate * 1.702f));
    }
    return rounded(activate(gate, kind), half) * up;
}

INLINE vec activate_one(vec v, int kind) {
    if (kind == RELU2) v = activate(v, RELU), v *= v;
    else v = activate(v, kind);
    return v;
}

static void gate_part(void *p) {
    Places *s = p;
    Experts *j = s->job;
    int64_t from, to;
    my_part(s->starts[j->experts], &from, &to);
    for (int64_t place = from; place < to; place++) {
        const float *gate = s->up + place * s->up_stride;
        float *room = input_room(j, j->down, s->h + place * s->h_bytes);
        if (!room) { j->failed = 1; return; }
        for (int64_t i = 0; i < s->width; i += LANES) {
            int64_t n = s->width - i;
            vec v = load(gate, i, n, 0);
            v = j->gated ? gate_with(v, load(gate, s->width + i, n, 0), j->kind, j->half) : activate_one(v, j->kind);
            store(room, i, n, rounded(v, j->half), 0);
        }
        finish_input(j, j->down, room, s->h + place * s->h_bytes);
    }
}

/* Compute block `b` of one expert for `rows` places. */
INLINE void expert_block(const Experts *j, const void *w, int64_t b, const char *x, int64_t x_bytes, float *y,
                         int64_t stride, int64_t rows) {
    int64_t tile = !j->coded && ((Weight *)w)->vectors > 2 ? 4 : 8, vectors = j->coded ? 1 : ((Weight *)w)->vectors;
    for (int64_t row = 0; row < rows; row += tile) {
        int count = MIN(rows - row, tile);
        vec out[8], plain[8][4];
        const char *mine = x + row * x_bytes;
        if (j->coded) coded_block(w, b, mine, x_bytes, out, count);
        else (j->half ? block_of_halves : block_of_floats)(w, b, (const float *)mine, count, plain);
        for (int r = 0; r < count; r++)
            for (int v = 0; v < vectors; v++)
                store(y, (row + r) * stride + (b * vectors + v) * LANES, LANES, j->coded ? out[r] : plain[r][v], 0);
    }
}

/* Threads take blocks of equal cost: reading a weight costs as much as computing some rows. */
INLINE void multiply(const Places *s, const void *weights, const char *x, int64_t x_bytes, float *y, int64_t stride) {
    const Experts *j = s->job;
    int64_t blocks = blocks_of(j, weights), total = 0, begin = 0, from, to;
    enum { READING = 8 };
    for (int64_t e = 0; e < j->experts; e++) {
        int64_t rows = s->starts[e + 1] - s->starts[e];
        if (rows) total += blocks * (rows + READING);
    }
    my_part(total, &from, &to);
    for (int64_t e = 0; e < j->experts && begin < to; e++) {
        int64_t start = s->starts[e], rows = s->starts[e + 1] - start, cost = rows + READING;
        if (!rows) continue;
        for (int64_t b = 0; b < blocks; b++, begin += cost)
            if (begin >= from && begin < to)
                expert_block(j, weight_at(j, weights, e), b, x + start * x_bytes, x_bytes, y + start * stride, stride, rows);
    }
}

static void up_part(void *p) {
    Places *s = p;
    multiply(s, s->job->up, s->x, s->x_bytes, s->up, s->up_stride);
}

static void down_part(void *p) {
    Places *s = p;
    multiply(s, s->job->down, s->h, s->h_bytes, s->out, s->out_stride);
}

static void sum_part(void *p) {
    Places *s = p;
    Experts *j = s->job;
    int64_t from, to;
    my_part(j->rows, &from, &to);
    for (int64_t row = from; row < to; row++)
        for (int64_t i = 0; i < s->hidden; i += LANES) {
            vec sum = {0};
            for (int64_t k = 0; k < j->top_k; k++) {
                int64_t pair = row * j->top_k + k, place = s->place_of[pair];
                if (place >= 0) sum += load(s->out, place * s->out_stride + i, LANES, 0) * j->shares[pair];
            }
            store(j->y, row * s->hidden + i, s->hidden - i, sum, j->half);
        }
}

/* Sort the pairs by expert. Pairs of experts that are held elsewhere get no place. */
static void sort_pairs(const Places *s) {
    const Experts *j = s->job;
    int64_t pairs = j->rows * j->top_k;
    memset(s->starts, 0, (j->experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < pairs; i++) {
        int64_t e = j->ids[i] - j->first;
        if (e >= 0 && e < j->experts) s->starts[e + 1]++;
    }
    for (int64_t e = 0; e < j->experts; e++) s->starts[e + 1] += s->starts[e];
    for (int64_t i = 0; i < pairs; i++) {
        int64_t e = j->ids[i] - j->first;
        int held = e >= 0 && e < j->experts;
        s->place_of[i] = held ? s->starts[e]++ : -1;
        if (held) s->pair_of[s->place_of[i]] = i;
    }
    for (int64_t e = j->experts; e > 0; e--) s->starts[e] = s->starts[e - 1]; /* they have moved to their ends */
    s->starts[0] = 0;
}

/* Return memory of the calling thread that all threads of a call share; it is kept between calls. */
static char *shared_memory(size_t bytes) {
    static __thread char *memory;
    static __thread size_t size;
    if (bytes > size) {
        free(memory);
        size = (bytes + 65535) / 65536 * 65536;
        memory = aligned_alloc(64, size);
        if (!memory) size = 0;
    }
    return memory;
}

INLINE char *take(char **memory, int64_t bytes) {
    char *mine = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return mine;
}

/* Divide the shared memory at `memory`, and return the end. With NULL, that is the number of bytes. */
static char *divide(Places *s, char *memory) {
    const Experts *j = s->job;
    int64_t pairs = j->rows * j->top_k, room = pairs + 8; /* products read rows up to a power of two */
    s->hidden = inputs_of(j, j->up);
    s->width = inputs_of(j, j->down);
    s->x_bytes = place_bytes(j, j->up);
    s->h_bytes = place_bytes(j, j->down);
    s->up_stride = blocks_of(j, j->up) * block_size(j, j->up);
    s->out_stride = blocks_of(j, j->down) * block_size(j, j->down);
    s->starts = (int64_t *)take(&memory, (j->experts + 1) * 8);
    s->pair_of = (int64_t *)take(&memory, pairs * 8);
    s->place_of = (int64_t *)take(&memory, pairs * 8);
    s->x = take(&memory, room * s->x_bytes);
    s->h = take(&memory, room * s->h_bytes);
    s->up = (float *)take(&memory, pairs * s->up_stride * 4);
    s->out = (float *)take(&memory, pairs * s->out_stride * 4);
    return memory;
}

/* y = the sum over each token's experts of share * down(act(gate(x)) * up(x)), or of share * down(act(up(x))). */
int experts(Experts *j) {
    Places s = {.job = j};
    char *memory = shared_memory((size_t)divide(&s, NULL));
    if (!memory) return j->failed = 1;
    divide(&s, memory);
    sort_pairs(&s);
    int64_t places = s.starts[j->experts];
    memset(s.x + places * s.x_bytes, 0, 8 * s.x_bytes); /* what is read behind the last row must be finite */
    memset(s.h + places * s.h_bytes, 0, 8 * s.h_bytes);
    return run(gather_part, &s, 0, &j->failed) || run(up_part, &s, 0, &j->failed) || run(gate_part, &s, 0, &j->failed)
        || run(down_part, &s, 0, &j->failed) || run(sum_part, &s, j->rows < 4, &j->failed);
}

/* ------------------------------------------------------------------------------------------------ neighbours */

typedef struct {
    const void *x, *shared, *gate; /* [rows, width]; gate [rows], or NULL */
    void *y;
    int64_t rows, width;
    int32_t half, failed;
} Shared;

static void add_shared_part(void *p) {
    Shared *j = p;
    int64_t from, to;
    my_part(j->rows, &from, &to);
    for (int64_t row = from; row < to; row++) {
        float share = 1;
        if (j->gate) {
            vec one = load(at(j->gate, row, j->half), 0, 1, j->half);
            share = rounded((vec){0} + (float)(1. / (1. + exp(-(double)one[0]))), j->half)[0];
        }
        for (int64_t i = 0; i < j->width; i += LANES) {
            int64_t first = row * j->width + i, n = j->width - i;
            vec shared = load(j->shared, first, n, j->half);
            if (j->gate) shared = rounded(shared * share, j->half);
            store(j->y, first, n, load(j->x, first, n, j->half) + shared, j->half);
        }
    }
}

/* y = x + shared, or x + sigmoid(gate) * shared. */
int add_shared(Shared *j) { return run(add_shared_part, j, j->rows < 4, &j->failed); }

/* y [rows] = x w, for one weight w [width] in `shared`. */
int dot_rows(Shared *j) {
    for (int64_t row = 0; row < j->rows; row++) {
        vec sums = {0};
        for (int64_t i = 0; i < j->width; i += LANES)
            sums += load(at(j->x, row * j->width, j->half), i, j->width - i, j->half) * load(j->shared, i, j->width - i, j->half);
        store(j->y, row, 1, (vec){0} + sum_of(sums), j->half);
    }
    return 0;
}

/* Convert x in bf16 to fp32. */
int widen(Shared *j) {
    for (int64_t i = 0, n = j->rows * j->width; i < n; i += LANES) store(j->y, i, n - i, load(j->x, i, n - i, 1), 0);
    return 0;
}

/* ------------------------------------------------------------------------------------------------- layout */

/* experts.py compares its structures with this list when it loads the library. */
const Layout experts_layout[] = {
    SIZE(Route), FIELD(Route, logits), FIELD(Route, correction), FIELD(Route, ids), FIELD(Route, weights),
    FIELD(Route, rows), FIELD(Route, experts), FIELD(Route, top_k), FIELD(Route, groups), FIELD(Route, top_groups),
    FIELD(Route, summed), FIELD(Route, scale), FIELD(Route, jitter), FIELD(Route, scores), FIELD(Route, renormalise),
    FIELD(Route, failed),
    SIZE(Experts), FIELD(Experts, up), FIELD(Experts, down), FIELD(Experts, x), FIELD(Experts, ids),
    FIELD(Experts, shares), FIELD(Experts, y), FIELD(Experts, rows), FIELD(Experts, top_k), FIELD(Experts, experts),
    FIELD(Experts, first), FIELD(Experts, coded), FIELD(Experts, half), FIELD(Experts, kind), FIELD(Experts, gated),
    FIELD(Experts, failed),
    SIZE(Shared), FIELD(Shared, x), FIELD(Shared, shared), FIELD(Shared, gate), FIELD(Shared, y), FIELD(Shared, rows),
    FIELD(Shared, width), FIELD(Shared, half), FIELD(Shared, failed),
    {NULL, 0},
};
