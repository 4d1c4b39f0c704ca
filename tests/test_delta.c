/*
 * Linear attention of the cpu device: the short convolution, the gated delta rule and Mamba-2's recurrence against their definitions in double, row after row
 * with whole states, and their backward against central differences of those; with a cache, in pieces; with the kernels of every
 * instruction set of this CPU.
 */
#include "lib_ops.h"
#include "lib_parity.h"
#include "spw_nn.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Where documents of so many rows begin and end; 0: none. */
static bool
documents(uint64_t B, uint64_t T, uint64_t length, const int32_t **begins, const int32_t **ends)
{
    *begins = *ends = NULL;
    if (length == 0)
        return false;
    assert_true(2 * B * T <= OPS_N_MAX);
    parity_documents(B, T, length, ops_ids, ops_ids + B * T);
    *begins = ops_ids;
    *ends = ops_ids + B * T;
    return true;
}

/* ---------------------------------------------------------------- convolution: d = B, T, C, K, length of documents or 0, whether it is plain; in: x, w, perhaps a bias */

static spw_conv_shape
conv_shape(const ops_subject *s)
{
    spw_conv_shape shape = {.B = s->d[0], .T = s->d[1], .C = s->d[2], .K = s->d[3], .plain = s->d[5] > 0};
    documents(shape.B, shape.T, s->d[4], &shape.begins, &shape.ends);
    return shape;
}

static void
conv_ref(const ops_subject *s, double *const *in, double *out)
{
    spw_conv_shape h = conv_shape(s);
    for (uint64_t i = 0; i < h.B * h.T * h.C; i++) {
        uint64_t row = i / h.C, c = i % h.C, t = row % h.T;
        uint64_t first = h.begins != NULL ? (uint64_t)h.begins[row] : 0;
        double sum = s->inputs > 2 ? in[2][c] : 0;
        for (uint64_t j = 0; j < h.K; j++)
            if (t + j + 1 >= h.K + first)
                sum += in[1][c * h.K + j] * in[0][(row + j + 1 - h.K) * h.C + c];
        out[i] = h.plain ? sum : sum / (1 + exp(-sum));
    }
}

static void
conv_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_conv_shape h = conv_shape(s);
    h.bias = s->inputs > 2 ? in[2] : NULL;
    spw_gpu_conv(q, out, in[0], in[1], &h);
}

static void
conv_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    spw_conv_shape h = conv_shape(s);
    (void)out;
    h.bias = s->inputs > 2 ? in[2] : NULL;
    spw_gpu_conv_backward(q, g[0], g[1], h.bias != NULL ? g[2] : NULL, dout, in[0], in[1], &h, s->flags);
}

/* One row, fewer rows than taps, blocks of channels cut off, one tap and the most; documents of one row, of fewer than taps, of more. */
static void
test_conv(void **state)
{
    static const uint64_t sizes[][5] = {{1, 1, 1, 4},     {2, 3, 5, 4},     {1, 40, 130, 4},   {3, 17, 33, 2},
                                        {2, 9, 300, 8},   {1, 9, 7, 1},     {2, 20, 40, 4, 1}, {2, 21, 40, 4, 3},
                                        {1, 50, 9, 8, 7}, {2, 30, 5, 3, 11}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (unsigned way = 0; way < 6; way++) {
            uint64_t n = sizes[i][0] * sizes[i][1] * sizes[i][2];
            ops_examine(&(ops_subject){"convolution",
                                       2 + way / 2 % 2,
                                       {n, sizes[i][2] * sizes[i][3], sizes[i][2]},
                                       n,
                                       {sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4], way / 4},
                                       way % 2 ? SPW_OP_ACC_DX : 0,
                                       conv_ref,
                                       conv_fwd,
                                       conv_bwd});
        }
}

/* ---------------------------------------------- the rule: d = B, T, Hk, Hv, Dk, Dv, length of documents or 0, spread of log_a */

enum { CHANNELS = 2 }; /* among its flags, of which 1 means a beta of at most 2 */

static spw_delta_shape
rule_shape(const ops_subject *s)
{
    spw_delta_shape h = {.B = s->d[0], .T = s->d[1], .Hk = s->d[2], .Hv = s->d[3], .Dk = s->d[4], .Dv = s->d[5]};
    h.beta_most = s->flags & 1 ? 2 : 0;
    h.channels = s->flags & CHANNELS;
    documents(h.B, h.T, s->d[6], &h.begins, &h.ends);
    return h;
}

static uint64_t
row_width(const spw_delta_shape *h)
{
    return 2 * h->Hk * h->Dk + h->Hv * h->Dv;
}

static double
length_of(const double *x, uint64_t n)
{
    double sum = 1e-6;
    for (uint64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

/* Of a row's head, and with channels one of these. */
static double
decay_of(const ops_subject *s, const spw_delta_shape *h, double *const *in, uint64_t row, uint64_t head, uint64_t i)
{
    uint64_t of = h->channels ? head * h->Dk + i : head, all = h->channels ? h->Hv * h->Dk : h->Hv;
    return exp(-exp((double)s->d[7] * in[3][head]) * log1p(exp(in[1][row * all + of] + in[3][h->Hv + of])));
}

/* One head of one sequence; in: qkv, a, b, and log_a with dt_bias behind it. */
static void
rule_of_head(const ops_subject *s, const spw_delta_shape *h, double *const *in, uint64_t b, uint64_t head, double *out)
{
    double *state = calloc(h->Dk * h->Dv, sizeof *state), decays[SPW_DELTA_DIM_MAX];
    assert_non_null(state);
    for (uint64_t t = 0; t < h->T; t++) {
        uint64_t row = b * h->T + t, at = row * h->Hv + head;
        const double *q = in[0] + row * row_width(h) + head / (h->Hv / h->Hk) * h->Dk, *k = q + h->Hk * h->Dk;
        const double *v = in[0] + row * row_width(h) + 2 * h->Hk * h->Dk + head * h->Dv;
        double q_length = length_of(q, h->Dk) * sqrt((double)h->Dk), k_length = length_of(k, h->Dk);
        double beta = (h->beta_most > 0 ? (double)h->beta_most : 1) / (1 + exp(-in[2][at]));
        if (h->begins != NULL && (uint64_t)h->begins[row] == t)
            memset(state, 0, h->Dk * h->Dv * sizeof *state);
        for (uint64_t i = 0; i < h->Dk; i++)
            decays[i] = i == 0 || h->channels ? decay_of(s, h, in, row, head, i) : decays[0];
        for (uint64_t j = 0; j < h->Dv; j++) {
            double seen = 0, sum = 0;
            for (uint64_t i = 0; i < h->Dk; i++)
                seen += (state[i * h->Dv + j] *= decays[i]) * k[i] / k_length;
            for (uint64_t i = 0; i < h->Dk; i++) {
                state[i * h->Dv + j] += k[i] / k_length * beta * (v[j] - seen);
                sum += state[i * h->Dv + j] * q[i] / q_length;
            }
            out[at * h->Dv + j] = sum;
        }
    }
    free(state);
}

static void
rule_ref(const ops_subject *s, double *const *in, double *out)
{
    spw_delta_shape h = rule_shape(s);
    for (uint64_t i = 0; i < h.B * h.Hv; i++)
        rule_of_head(s, &h, in, i / h.Hv, i % h.Hv, out);
}

static float log_a[64];

static spw_delta_inputs
inputs_of(const ops_subject *s, const spw_delta_shape *h, float *const *in)
{
    for (uint64_t i = 0; i < h->Hv; i++)
        log_a[i] = (float)s->d[7] * in[3][i];
    return (spw_delta_inputs){.qkv = in[0], .a = in[1], .b = in[2], .log_a = log_a, .dt_bias = in[3] + h->Hv};
}

static void
rule_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_delta_shape h = rule_shape(s);
    spw_delta_inputs inputs = inputs_of(s, &h, in);
    spw_gpu_delta(q, out, ops_saved[0], &inputs, &h);
}

/* The caller frees it. */
static float *
spoiled_scratch(const spw_delta_shape *h)
{
    uint64_t n = spw_gpu_delta_scratch(h);
    float *out = malloc(n * sizeof *out);
    assert_non_null(out);
    for (uint64_t i = 0; i < n; i++)
        out[i] = NAN;
    return out;
}

static void
rule_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    spw_delta_shape h = rule_shape(s);
    spw_delta_inputs inputs = inputs_of(s, &h, in);
    float *scratch = spoiled_scratch(&h);
    (void)out;
    spw_gpu_delta_backward(q, g[0], g[1], g[2], g[3], g[3] + h.Hv, NULL, dout, ops_saved[0], scratch, &inputs, &h);
    for (uint64_t i = 0; i < h.Hv; i++)
        g[3][i] *= (float)s->d[7];
    free(scratch);
}

/*
 * One row, heads of their own and shared keys, slices cut off and several, states that are wider or higher; documents of one row and of some;
 * decays near one and near nothing.
 */
static const uint64_t sizes[][8] = {
    {1, 1, 1, 1, 8, 8, 0, 1},     {2, 7, 2, 2, 8, 16, 0, 1}, {1, 20, 1, 3, 16, 8, 0, 1},  {1, 33, 2, 4, 24, 40, 0, 2},
    {1, 12, 1, 1, 72, 8, 0, 1},   {2, 9, 1, 2, 8, 72, 0, 1}, {2, 9, 1, 2, 8, 8, 1, 1},    {2, 40, 2, 2, 8, 8, 7, 1},
    {1, 50, 1, 2, 16, 16, 13, 3}, {1, 60, 4, 4, 8, 8, 0, 6}, {1, 3, 1, 1, 256, 256, 0, 1}};

/* With channels decays are slower: of those that are fastest roundings of large sums are left, which a head's log_a adds up. */
static void
test_rule(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 2 * (sizeof sizes / sizeof sizes[0]); i++) {
        const uint64_t *d = sizes[i / 2];
        uint64_t rows = d[0] * d[1], Hk = d[2], Hv = d[3], Dk = d[4], Dv = d[5], decays = i % 2 == 1 ? Hv * Dk : Hv;
        ops_examine(&(ops_subject){i % 2 == 1 ? "delta rule with channels" : "gated delta rule",
                                   4,
                                   {rows * (2 * Hk * Dk + Hv * Dv), rows * decays, rows * Hv, Hv + decays},
                                   rows * Hv * Dv,
                                   {d[0], d[1], Hk, Hv, Dk, Dv, d[6], i % 2 == 1 && d[7] > 3 ? 3 : d[7]},
                                   i / 2 % 2 | (i % 2 == 1 ? CHANNELS : 0),
                                   rule_ref,
                                   rule_fwd,
                                   rule_bwd});
    }
}

static void
test_bounds(void **state)
{
    parity p = {0};
    (void)state;
    assert_int_equal(spw_gpu_open(&p.gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
    parity_delta_bounds(&p);
    spw_gpu_close(p.gpu);
}

static void
test_turns(void **state)
{
    parity p = {0};
    (void)state;
    assert_int_equal(spw_gpu_open(&p.gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
    parity_delta_turns(&p);
    spw_gpu_close(p.gpu);
}

/* ---------------------------------------------- Mamba-2: the same d; in: qkv, a, and log_a with dt_bias and skip behind it */

static spw_delta_shape
mamba_shape(const ops_subject *s)
{
    spw_delta_shape h = rule_shape(s);
    h.mamba = true;
    h.beta_most = 0;
    h.step_least = s->flags & 1 ? 0.5f : 0; /* of some steps more than they are */
    return h;
}

/* One head of one sequence. */
static void
mamba_of_head(const ops_subject *s, const spw_delta_shape *h, double *const *in, uint64_t b, uint64_t head, double *out)
{
    double *state = calloc(h->Dk * h->Dv, sizeof *state);
    assert_non_null(state);
    for (uint64_t t = 0; t < h->T; t++) {
        uint64_t row = b * h->T + t, at = row * h->Hv + head;
        const double *v = in[0] + row * row_width(h) + head * h->Dv;
        const double *k = in[0] + row * row_width(h) + h->Hv * h->Dv + head / (h->Hv / h->Hk) * h->Dk;
        const double *q = k + h->Hk * h->Dk;
        double dt = fmax(log1p(exp(in[1][at] + in[2][h->Hv + head])), (double)h->step_least);
        double decay = exp(-exp((double)s->d[7] * in[2][head]) * dt);
        if (h->begins != NULL && (uint64_t)h->begins[row] == t)
            memset(state, 0, h->Dk * h->Dv * sizeof *state);
        for (uint64_t j = 0; j < h->Dv; j++) {
            double sum = in[2][2 * h->Hv + head] * v[j];
            for (uint64_t i = 0; i < h->Dk; i++) {
                state[i * h->Dv + j] = decay * state[i * h->Dv + j] + k[i] * dt * v[j];
                sum += state[i * h->Dv + j] * q[i];
            }
            out[at * h->Dv + j] = sum;
        }
    }
    free(state);
}

static void
mamba_ref(const ops_subject *s, double *const *in, double *out)
{
    spw_delta_shape h = mamba_shape(s);
    for (uint64_t i = 0; i < h.B * h.Hv; i++)
        mamba_of_head(s, &h, in, i / h.Hv, i % h.Hv, out);
}

static spw_delta_inputs
mamba_inputs(const ops_subject *s, const spw_delta_shape *h, float *const *in)
{
    for (uint64_t i = 0; i < h->Hv; i++)
        log_a[i] = (float)s->d[7] * in[2][i];
    return (spw_delta_inputs){
        .qkv = in[0], .a = in[1], .log_a = log_a, .dt_bias = in[2] + h->Hv, .skip = in[2] + 2 * h->Hv};
}

static void
mamba_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_delta_shape h = mamba_shape(s);
    spw_delta_inputs inputs = mamba_inputs(s, &h, in);
    spw_gpu_delta(q, out, NULL, &inputs, &h);
}

static void
mamba_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
          float *const *g)
{
    spw_delta_shape h = mamba_shape(s);
    spw_delta_inputs inputs = mamba_inputs(s, &h, in);
    float *scratch = spoiled_scratch(&h);
    (void)out;
    spw_gpu_delta_backward(q, g[0], g[1], NULL, g[2], g[2] + h.Hv, g[2] + 2 * h.Hv, dout, NULL, scratch, &inputs, &h);
    for (uint64_t i = 0; i < h.Hv; i++)
        g[2][i] *= (float)s->d[7];
    free(scratch);
}

/* With a least step decays are of the first strength alone: faster ones leave little of large sums. */
static void
test_mamba(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * (sizeof sizes / sizeof sizes[0]); i++) {
        const uint64_t *d = sizes[i / 2];
        uint64_t rows = d[0] * d[1], Hk = d[2], Hv = d[3], Dk = d[4], Dv = d[5];
        ops_examine(&(ops_subject){"Mamba-2",
                                   3,
                                   {rows * (2 * Hk * Dk + Hv * Dv), rows * Hv, 3 * Hv},
                                   rows * Hv * Dv,
                                   {d[0], d[1], Hk, Hv, Dk, Dv, d[6], i % 2 == 1 ? 1 : d[7]},
                                   (unsigned)i % 2,
                                   mamba_ref,
                                   mamba_fwd,
                                   mamba_bwd});
    }
}

/* ---------------------------------------------------------------- with a cache */

typedef struct layer {
    spw_conv_shape conv;
    spw_delta_shape rule;
    float *x, *c, *out; /* inputs, what the convolution gives, and what the rule does: (T, ...) of one sequence */
    float *w, *a, *b, *log_a, *dt_bias, *skip;
} layer;

static float *
drawn(uint64_t n, uint64_t *seed)
{
    float *x = malloc(n * sizeof *x);
    assert_non_null(x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = ops_draw(seed);
    return x;
}

static spw_delta_inputs
layer_inputs(const layer *l, uint64_t row)
{
    return (spw_delta_inputs){.qkv = l->c + row * l->conv.C,
                              .a = l->a + row * l->rule.Hv * (l->rule.channels ? l->rule.Dk : 1),
                              .b = l->b + row * l->rule.Hv,
                              .log_a = l->log_a,
                              .dt_bias = l->dt_bias,
                              .skip = l->skip};
}

/* Rows [t, t + count) of the sequence. */
static void
go_on(spw_gpu_queue *q, layer *l, const spw_delta_cache *cache, uint64_t t, uint64_t count)
{
    spw_conv_shape conv = l->conv;
    spw_delta_shape rule = l->rule;
    spw_delta_inputs in = layer_inputs(l, t);
    conv.T = rule.T = count;
    spw_gpu_conv_cached(q, l->c + t * conv.C, l->x + t * conv.C, l->w, cache, &conv);
    spw_gpu_delta_cached(q, l->out + t * rule.Hv * rule.Dv, &in, cache, &rule);
}

/* In pieces of every size a sequence has the bits that it has at once, in a slot that another one has used; its neighbors stay. */
static void
examine_cached(bool mamba, bool channels)
{
    enum { T = 23, SLOTS = 3 };
    uint64_t seed = 5, kept, states;
    layer l = {.conv = {.B = 1, .T = T, .C = 56, .K = 4},
               .rule = {.B = 1, .T = T, .Hk = 1, .Hv = 2, .Dk = 8, .Dv = 16, .mamba = mamba, .channels = channels}};
    spw_delta_inputs in;
    spw_delta_cache cache = {0};
    float *want, *first;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    int32_t slot = 1, start = 0;
    l.conv.C = row_width(&l.rule);
    l.x = drawn(T * l.conv.C, &seed);
    l.c = drawn(T * l.conv.C, &seed);
    l.out = drawn(T * 32, &seed);
    l.w = drawn(l.conv.C * 4, &seed);
    l.a = drawn(T * 16, &seed);
    l.b = drawn(T * 2, &seed);
    l.log_a = drawn(2, &seed);
    l.dt_bias = drawn(16, &seed);
    l.skip = drawn(2, &seed);
    l.conv.bias = mamba ? l.x : NULL;
    kept = 3 * l.conv.C;
    states = 2 * 8 * 16;
    cache = (spw_delta_cache){drawn(SLOTS * states, &seed), drawn(SLOTS * kept, &seed), &slot, &start};
    first = malloc(SLOTS * states * 4);
    want = malloc(T * 32 * 4);
    assert_true(first != NULL && want != NULL);
    memcpy(first, cache.state, SLOTS * states * 4);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    in = layer_inputs(&l, 0);
    spw_gpu_conv(q, l.c, l.x, l.w, &l.conv);
    spw_gpu_delta(q, l.out, NULL, &in, &l.rule);
    memcpy(want, l.out, T * 32 * 4);
    for (uint64_t piece = 1; piece <= T; piece++) {
        for (uint64_t t = 0, n; t < T; t += n) {
            n = T - t < piece ? T - t : piece;
            start = (int32_t)t;
            go_on(q, &l, &cache, t, n);
        }
        assert_memory_equal(want, l.out, T * 32 * 4);
    }
    assert_memory_equal(first, cache.state, states * 4);
    assert_memory_equal(first + 2 * states, cache.state + 2 * states, states * 4);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
    free(first);
    free(want);
    free(cache.state);
    free(cache.before);
    free(l.x);
    free(l.c);
    free(l.out);
    free(l.w);
    free(l.a);
    free(l.b);
    free(l.log_a);
    free(l.dt_bias);
    free(l.skip);
}

static void
test_cached(void **state)
{
    (void)state;
    examine_cached(false, false);
    examine_cached(true, false);
    examine_cached(false, true);
}

/* ---------------------------------------------------------------- on the tape */

/* More rows than backward takes at a time: the gradients of all sequences at once. */
static void
test_sequences(void **state)
{
    enum { B = 3, T = 2050, ROWS = B * T, WIDTH = 32, HEADS = 2, ARENA = 32 << 20 };
    spw_delta_shape shape = {.B = B, .T = T, .Hk = 1, .Hv = HEADS, .Dk = 8, .Dv = 8};
    uint64_t seed = 3, n = spw_gpu_delta_scratch(&shape);
    float *x = drawn(ROWS * WIDTH, &seed), *a = drawn(ROWS * HEADS, &seed), *b = drawn(ROWS * HEADS, &seed);
    float *dout = drawn(ROWS * HEADS * 8, &seed), *params = drawn(2 * HEADS, &seed), *scratch = drawn(n, &seed);
    float *out = drawn(ROWS * HEADS * 8, &seed), *delta = drawn(ROWS * HEADS * 8, &seed);
    float *dx = drawn(ROWS * WIDTH, &seed), *da = drawn(ROWS * HEADS, &seed), *db = drawn(ROWS * HEADS, &seed);
    float sums[2][2 * HEADS] = {{0}};
    char *arena = malloc(ARENA);
    spw_delta_inputs in = {x, a, b, params, params + HEADS, NULL};
    spw_tape *tape = NULL;
    spw_value *v[5], *y;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    assert_non_null(arena);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    assert_int_equal(spw_tape_create(&tape, q, spw_gpu_get_info(gpu), NULL), SPW_OK);
    spw_gpu_delta(q, out, delta, &in, &shape);
    spw_gpu_delta_backward(q, dx, da, db, sums[0], sums[0] + HEADS, NULL, dout, delta, scratch, &in, &shape);
    spw_tape_reset(tape, arena, ARENA, true);
    v[0] = spw_tape_input(tape, x, ROWS, WIDTH, true);
    v[1] = spw_tape_input(tape, a, ROWS, HEADS, true);
    v[2] = spw_tape_input(tape, b, ROWS, HEADS, true);
    v[3] = spw_tape_param(tape, params, sums[1], NULL, 1, HEADS);
    v[4] = spw_tape_param(tape, params + HEADS, sums[1] + HEADS, NULL, 1, HEADS);
    y = spw_nn_delta(tape, v[0], v[1], v[2], v[3], v[4], NULL, &shape);
    assert_non_null(y);
    assert_memory_equal(out, y->data, ROWS * HEADS * 8 * 4);
    y->grad = dout;
    spw_tape_backward(tape, y);
    assert_int_equal(spw_tape_check(tape, NULL), SPW_OK);
    assert_memory_equal(dx, v[0]->grad, ROWS * WIDTH * 4);
    assert_memory_equal(da, v[1]->grad, ROWS * HEADS * 4);
    assert_memory_equal(db, v[2]->grad, ROWS * HEADS * 4);
    for (int i = 0; i < 2 * HEADS; i++)
        assert_true(fabsf(sums[0][i] - sums[1][i]) <= 1e-4f * (1 + fabsf(sums[0][i])));
    spw_tape_destroy(tape);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
    float *const all[] = {x, a, b, dout, params, scratch, out, delta, dx, da, db};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    free(arena);
}

/* ---------------------------------------------------------------- a gate that is a sigmoid */

static void
gate_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = s->d[1] == SPW_GATE_PLAIN ? in[1][i] * in[0][i] : in[1][i] / (1 + exp(-in[0][i]));
}

static void
gate_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gate_mul(q, (spw_gate)s->d[1], out, in[0], in[1], 1, s->d[0], s->d[0]);
}

static void
gate_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)out;
    spw_gpu_gate_mul_backward(q, (spw_gate)s->d[1], g[0], g[1], dout, in[0], in[1], 1, s->d[0], s->d[0], s->flags);
}

static void
test_gates(void **state)
{
    static const uint64_t lengths[] = {1, 15, 17, 100, 9001};
    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        for (unsigned acc = 0; acc < 4; acc++)
            ops_examine(&(ops_subject){acc < 2 ? "sigmoid gate" : "plain gate",
                                       2,
                                       {lengths[i], lengths[i]},
                                       lengths[i],
                                       {lengths[i], acc < 2 ? SPW_GATE_SIGMOID : SPW_GATE_PLAIN},
                                       acc % 2 ? SPW_OP_ACC_DX | SPW_OP_ACC_DX2 : 0,
                                       gate_ref,
                                       gate_fwd,
                                       gate_bwd});
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conv),      cmocka_unit_test(test_rule),  cmocka_unit_test(test_cached),
        cmocka_unit_test(test_sequences), cmocka_unit_test(test_gates), cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_turns),     cmocka_unit_test(test_mamba),
    };
    return ops_run_tests(tests, sizeof tests / sizeof tests[0]);
}
