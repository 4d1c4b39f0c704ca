/*
 * Linear attention beside the cpu device and beside its definition in fp64; and beside itself, where spw_gpu_conv_cached() and
 * spw_gpu_delta_cached() promise equal bits.
 */
#include "lib_reference.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- convolution: d = B, T, C, K, documents' length or 0, which gradient is not wanted, whether a bias is behind w, whether it is plain */

/* Among a subject's flags: channels in two parts. */
enum { IN_PARTS = 1 << 20 };

/* The part's channels, in rows as long as all; where they begin. */
static uint64_t
take_part(const subject *s, uint64_t part, spw_conv_shape *shape)
{
    const uint64_t C = s->d[2], first = part * (C / 2);
    shape->C = part > 0 ? C - first : C / 2;
    shape->stride = C;
    return first;
}

static uint64_t
parts_of(const subject *s)
{
    return s->flags & IN_PARTS && s->d[2] > 1 ? 2 : 1;
}

static spw_conv_shape
conv_of(const subject *s)
{
    return (spw_conv_shape){.B = s->d[0], .T = s->d[1], .C = s->d[2], .K = s->d[3], .plain = s->d[7] > 0};
}

static void
run_conv(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_conv_shape shape = conv_of(s);
    shape.begins = s->d[4] > 0 ? p[6] : NULL;
    shape.ends = s->d[4] > 0 ? p[7] : NULL;
    for (uint64_t k = 0; k < parts_of(s); k++) {
        const uint64_t C = s->d[2], K = shape.K, at = parts_of(s) > 1 ? take_part(s, k, &shape) : 0;
        void *x = subject_elem(p[0], at), *w = subject_elem(p[1], at * K);
        shape.bias = s->d[6] > 0 ? subject_elem(p[1], C * K + at) : NULL;
        spw_gpu_conv(q, subject_elem(p[2], at), x, w, &shape);
        spw_gpu_conv_backward(q, s->d[5] == 1 ? NULL : subject_elem(p[4], at),
                              s->d[5] == 2 ? NULL : (float *)p[5] + at * K,
                              s->d[6] > 0 ? (float *)p[5] + C * K + at : NULL, subject_elem(p[3], at), x, w, &shape,
                              s->flags & ~(unsigned)IN_PARTS);
    }
}

static void
reference_of_conv(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    spw_conv_shape shape = conv_of(s);
    (void)type;
    (void)way;
    shape.begins = s->d[4] > 0 ? ints[6] : NULL;
    shape.ends = s->d[4] > 0 ? ints[7] : NULL;
    shape.bias = s->d[6] > 0 ? a[1] + shape.C * shape.K : NULL;
    reference_conv(&shape, a[2], s->d[5] == 1 ? NULL : a[4], s->d[5] == 2 ? NULL : a[5],
                   s->d[6] > 0 ? a[5] + shape.C * shape.K : NULL, a[3], a[0], a[1]);
}

static void
fill_conv_documents(const subject *s, float **host, int32_t **ints)
{
    (void)host;
    if (s->d[4] > 0)
        parity_documents(s->d[0], s->d[1], s->d[4], ints[6], ints[7]);
}

/* One row, fewer rows than taps, pairs and blocks of channels that are cut off, walks and pieces of several; taps in turn. */
void
parity_conv(const parity *p)
{
    static const uint64_t sizes[][5] = {
        {1, 1, 1, 4},        {2, 3, 5, 4},       {3, 2, 24, 4},          {1, 40, 130, 4},
        {3, 17, 33, 2},      {2, 9, 300, 8},     {1, 9, 7, 1},           {2, 20, 40, 4, 1},
        {2, 70, 41, 4, 3},   {1, 150, 9, 8, 7},  {2, 80, 6, 3, 30},      {5, 33, 18, 4},
        {2, 100, 24, 4, 40}, {2, 1000, 4096, 4}, {3, 999, 1000, 4, 200}, {1, 700, 515, 8, 50}};
    for (size_t i = 0; i < (p->large ? 16 : 13); i++)
        for (unsigned f = 0; f < 3; f++) {
            const uint64_t *d = sizes[i];
            uint64_t rows = d[0] * d[1], n = rows * d[2], biased = (i + f) % 2;
            subject_examine(
                p, &(subject){.name = "convolution",
                              .a = {{ACT, n, 0, 0},
                                    {ACT, d[2] * (d[3] + biased), 0, 0},
                                    {ACT_OUT, n, 0, 0},
                                    {ACT, n, 0, 0},
                                    {f == 1 ? ACT : ACT_OUT, n, 0, 0},
                                    {FP32, d[2] * (d[3] + biased), 0, 0},
                                    {INT, rows, 1, 0},
                                    {INT, rows, 1, 0}},
                              .d = {d[0], d[1], d[2], d[3], d[4], f == 2 ? 1 + i % 2 : 0, biased, (i + f) % 3 == 1},
                              .flags = (f == 1 ? SPW_OP_ACC_DX : 0) | ((i + f) % 4 == 3 ? IN_PARTS : 0),
                              .reference = n < 1000000 ? reference_of_conv : NULL,
                              .ways = 1,
                              .run = run_conv,
                              .prepare = fill_conv_documents});
        }
}

static void
run_conv_cached(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_conv_shape shape = conv_of(s);
    spw_delta_cache cache = {.before = p[3], .slots = p[4], .starts = p[5]};
    for (uint64_t k = 0; k < parts_of(s); k++) {
        const uint64_t at = parts_of(s) > 1 ? take_part(s, k, &shape) : 0;
        cache.before = subject_elem(p[3], at);
        shape.bias = subject_elem(p[1], s->d[2] * shape.K + at);
        spw_gpu_conv_cached(q, subject_elem(p[2], at), subject_elem(p[0], at), subject_elem(p[1], at * shape.K), &cache,
                            &shape);
    }
}

static void
reference_of_conv_cached(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    spw_conv_shape shape = conv_of(s);
    (void)type;
    (void)way;
    shape.bias = a[1] + shape.C * shape.K;
    reference_conv_cached(&shape, a[2], a[0], a[1], a[3], ints[4], ints[5]);
}

/* Slots in turn from the last; every other sequence begins, and what its slot has is NaN. */
static void
fill_slots(const subject *s, float *kept, uint64_t n, int32_t *slots, int32_t *starts)
{
    for (uint64_t b = 0; b < s->d[0]; b++) {
        slots[b] = (int32_t)(s->d[0] - b); /* one more than there are sequences */
        starts[b] = b % 2 == 0 ? 3 : 0;
        for (uint64_t i = 0; starts[b] == 0 && i < n; i++)
            kept[(uint64_t)slots[b] * n + i] = NAN;
    }
}

static void
fill_conv_cache(const subject *s, float **host, int32_t **ints)
{
    fill_slots(s, host[3], (s->d[3] - 1) * s->d[2], ints[4], ints[5]);
}

/* ---------------------------------------------------------------- the rule: d = B, T, Hk, Hv, Dk, Dv, documents' length or 0, which sum is not wanted; flags 1: Mamba-2's, 2: whose steps have a least, 4: the rule's beta is at most 2, 8: with channels */

/* Which rule arrays are for: numbers of its decays are a head's, or its channels'. */
enum rules { RULE, MAMBA, CHANNELS, RULES };

static spw_delta_shape
rule_of(const subject *s)
{
    return (spw_delta_shape){.B = s->d[0],
                             .T = s->d[1],
                             .Hk = s->d[2],
                             .Hv = s->d[3],
                             .Dk = s->d[4],
                             .Dv = s->d[5],
                             .mamba = s->flags & 1,
                             .step_least = s->flags & 2 ? 0.7f : 0,
                             .beta_most = s->flags & 4 ? 2 : 0,
                             .channels = s->flags & 8};
}

static enum rules
kind_of(const subject *s)
{
    return s->flags & 8 ? CHANNELS : s->flags & 1 ? MAMBA : RULE;
}

static uint64_t
decay_count(const uint64_t *d, enum rules kind)
{
    return kind == CHANNELS ? d[3] * d[4] : d[3];
}

static uint64_t
row_width(const uint64_t *d)
{
    return 2 * d[2] * d[4] + d[3] * d[5];
}

/* log_a (Hv), dt_bias (decays), skip (Hv). */
static uint64_t
own_count(const uint64_t *d, enum rules kind)
{
    return 2 * d[3] + decay_count(d, kind);
}

/* a (M,decays), b (M,Hv), and these, in one array. */
static uint64_t
gate_count(const uint64_t *d, enum rules kind)
{
    return d[0] * d[1] * (decay_count(d, kind) + d[3]) + own_count(d, kind);
}

static spw_delta_inputs
inputs_of(const uint64_t *d, enum rules kind, const void *qkv, void *gates)
{
    uint64_t b = d[0] * d[1] * decay_count(d, kind), n = b + d[0] * d[1] * d[3];
    return (spw_delta_inputs){.qkv = qkv,
                              .a = gates,
                              .b = subject_elem(gates, b),
                              .log_a = subject_elem(gates, n),
                              .dt_bias = subject_elem(gates, n + d[3]),
                              .skip = subject_elem(gates, n + d[3] + decay_count(d, kind))};
}

static void
run_delta(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_delta_shape shape = rule_of(s);
    spw_delta_inputs in = inputs_of(s->d, kind_of(s), p[0], p[1]);
    shape.begins = s->d[6] > 0 ? p[9] : NULL;
    shape.ends = s->d[6] > 0 ? p[10] : NULL;
    spw_gpu_delta(q, p[2], shape.mamba ? NULL : p[3], &in, &shape);
    spw_gpu_delta_backward(q, p[5], p[6], shape.mamba ? NULL : p[11], s->d[7] & 1 ? NULL : p[7],
                           s->d[7] & 2 ? NULL : (float *)p[7] + shape.Hv,
                           shape.mamba && s->d[7] == 0 ? (float *)p[7] + 2 * shape.Hv : NULL, p[4],
                           shape.mamba ? NULL : p[3], p[8], &in, &shape);
    if (shape.mamba) { /* nothing is written */
        spw_gpu_zero(q, p[3], s->a[3].n * 4);
        spw_gpu_zero(q, p[11], s->a[11].n * spw_dtype_bytes(subject_type()));
    }
    spw_gpu_zero(q, p[8], s->a[8].n * 4); /* scratch: nothing to compare */
}

static reference_delta_arrays
arrays_of(const subject *s, float **a)
{
    uint64_t decays = decay_count(s->d, kind_of(s)), b = s->d[0] * s->d[1] * decays,
             n = b + s->d[0] * s->d[1] * s->d[3];
    return (reference_delta_arrays){.qkv = a[0],
                                    .a = a[1],
                                    .b = a[1] + b,
                                    .log_a = a[1] + n,
                                    .dt_bias = a[1] + n + s->d[3],
                                    .skip = a[1] + n + s->d[3] + decays,
                                    .out = a[2]};
}

static void
reference_of_delta(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    spw_delta_shape shape = rule_of(s);
    reference_delta_arrays arrays = arrays_of(s, a);
    (void)type;
    (void)way;
    shape.begins = s->d[6] > 0 ? ints[9] : NULL;
    shape.ends = s->d[6] > 0 ? ints[10] : NULL;
    arrays.delta = a[3];
    arrays.dout = a[4];
    arrays.dqkv = a[5];
    arrays.da = a[6];
    arrays.db = a[11];
    arrays.dlog_a = s->d[7] & 1 ? NULL : a[7];
    arrays.ddt_bias = s->d[7] & 2 ? NULL : a[7] + shape.Hv;
    arrays.dskip = shape.mamba && s->d[7] == 0 ? a[7] + 2 * shape.Hv : NULL;
    reference_delta(&shape, &arrays);
    if (shape.mamba) {
        memset(a[3], 0, s->a[3].n * sizeof *a[3]);
        memset(a[11], 0, s->a[11].n * sizeof *a[11]);
    }
    memset(a[8], 0, s->a[8].n * sizeof *a[8]);
}

/* Slow decays, but fast ones of every third head: there the gradients' bounds count. */
static void
spread_decays(const subject *s, float *gates)
{
    uint64_t n = s->d[0] * s->d[1] * (decay_count(s->d, kind_of(s)) + s->d[3]);
    for (uint64_t i = 0; i < s->d[3]; i++)
        gates[n + i] *= (gates[n + i] > 0) == (i % 3 == 2) ? 4 : -4;
}

static void
fill_delta(const subject *s, float **host, int32_t **ints)
{
    spread_decays(s, host[1]);
    if (s->d[6] > 0)
        parity_documents(s->d[0], s->d[1], s->d[6], ints[9], ints[10]);
}

/* One row, heads of their own and in groups, lines that are cut off and blocks of several, blocks of rows; documents. */
static void
examine_delta(const parity *p, enum rules kind)
{
    static const char *const names[RULES] = {"gated delta rule", "Mamba-2", "delta rule with channels"};
    const bool mamba = kind == MAMBA;
    static const uint64_t sizes[][7] = {
        {1, 1, 1, 1, 8, 8},        {2, 7, 2, 2, 8, 16},           {1, 70, 1, 3, 16, 8},
        {1, 33, 2, 4, 24, 40},     {1, 12, 1, 1, 72, 8},          {2, 9, 1, 2, 8, 72},
        {2, 9, 1, 2, 8, 8, 1},     {2, 80, 2, 2, 8, 8, 7},        {1, 150, 1, 2, 16, 16, 13},
        {1, 200, 3, 3, 8, 8},      {1, 40, 1, 2, 128, 128},       {1, 19, 1, 1, 256, 256},
        {1, 21, 1, 2, 40, 136, 9}, {1, 21, 1, 1, 136, 40},        {1, 40, 1, 1, 64, 64, 60},
        {2, 1000, 4, 8, 128, 128}, {1, 2000, 2, 2, 64, 128, 300}, {3, 333, 1, 2, 256, 256, 100}};
    for (size_t i = 0; i < (p->large ? 18 : 15); i++) {
        const uint64_t *d = sizes[i];
        uint64_t rows = d[0] * d[1], n = rows * d[3], wide = rows * row_width(d), pieces = row_width(d) / 8;
        spw_delta_shape shape = {.B = d[0], .T = d[1], .Hk = d[2], .Hv = d[3], .Dk = d[4], .Dv = d[5], .mamba = mamba};
        const uint64_t decays = decay_count(d, kind);
        shape.channels = kind == CHANNELS;
        subject_examine(
            p, &(subject){
                   .name = names[kind],
                   .a = {{ACT, wide, 0, 0},
                         {ACT, gate_count(d, kind), 0, 0},
                         {ACT_OUT, n * d[5], 0, 0},
                         {FP32_OUT, n * d[5], 0, 0},
                         {ACT, n * d[5], 0, 0},
                         {ACT_OUT, wide, 0, 0},
                         {ACT_OUT, rows * decays, 0, 0},
                         {FP32, own_count(d, kind), 0, 0},
                         {FP32_OUT, spw_gpu_delta_scratch(&shape), 0, 0},
                         {INT, rows, 1, 0},
                         {INT, rows, 1, 0},
                         {ACT_OUT, n, 0, 0}},
                   .d = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], i % 4},
                   .row = {[2] = d[5], [3] = d[5], [5] = 8, [7] = kind == CHANNELS ? 0 : d[3]},
                   .heads =
                       {[2] = d[3], [3] = d[3], [5] = pieces <= HEADS_MAX ? pieces : 1, [7] = kind == CHANNELS ? 0 : 3},
                   .flags = (!mamba       ? i % 3 == 1 ? 4 : 0
                             : i % 3 == 1 ? 3
                                          : 1) |
                            (kind == CHANNELS ? 8 : 0),
                   .row_least = 1,
                   .more = {[6] = 16, [7] = 64}, /* of decays: what is left of larger sums */
                   .reference = rows * d[3] * d[4] * d[5] < 4000000 ? reference_of_delta : NULL,
                   .ways = 1,
                   .run = run_delta,
                   .prepare = fill_delta});
    }
}

void
parity_delta(const parity *p)
{
    for (unsigned kind = 0; kind < RULES; kind++)
        examine_delta(p, kind);
}

static void
run_delta_cached(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_delta_shape shape = rule_of(s);
    spw_delta_inputs in = inputs_of(s->d, kind_of(s), p[0], p[1]);
    spw_delta_cache cache = {.state = p[3], .slots = p[4], .starts = p[5]};
    spw_gpu_delta_cached(q, p[2], &in, &cache, &shape);
}

static void
reference_of_delta_cached(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    spw_delta_shape shape = rule_of(s);
    reference_delta_arrays arrays = arrays_of(s, a);
    (void)type;
    (void)way;
    reference_delta_cached(&shape, &arrays, a[3], ints[4], ints[5]);
}

static void
fill_states(const subject *s, float **host, int32_t **ints)
{
    spread_decays(s, host[1]);
    fill_slots(s, host[3], s->d[3] * s->d[4] * s->d[5], ints[4], ints[5]);
}

static void
examine_conv_cached(const parity *p)
{
    static const uint64_t sizes[][4] = {{1, 1, 1, 4},    {3, 1, 40, 4},    {3, 2, 41, 4}, {2, 3, 24, 8},
                                        {4, 5, 6, 2},    {3, 70, 24, 4},   {2, 33, 5, 8}, {2, 9, 8, 1},
                                        {8, 1, 8192, 4}, {2, 500, 1024, 4}};
    for (size_t i = 0; i < (p->large ? 10 : 8); i++) {
        const uint64_t *d = sizes[i];
        subject_examine(p, &(subject){.name = "convolution, cached",
                                      .a = {{ACT, d[0] * d[1] * d[2], 0, 0},
                                            {ACT, d[2] * (d[3] + 1), 0, 0},
                                            {ACT_OUT, d[0] * d[1] * d[2], 0, 0},
                                            {ACT, (d[0] + 1) * (d[3] - 1) * d[2], 0, 0},
                                            {INT, d[0], 1, 0},
                                            {INT, d[0], 1, 0}},
                                      .d = {[0] = d[0], d[1], d[2], d[3], [7] = i % 3 == 1},
                                      .flags = i % 4 > 1 ? IN_PARTS : 0,
                                      .reference = reference_of_conv_cached,
                                      .ways = 1,
                                      .run = run_conv_cached,
                                      .prepare = fill_conv_cache});
    }
}

void
parity_delta_cached(const parity *p)
{
    static const uint64_t sizes[][6] = {{1, 1, 1, 1, 8, 8},      {3, 1, 2, 4, 24, 40},  {2, 1, 1, 2, 128, 128},
                                        {3, 50, 1, 2, 16, 16},   {2, 20, 1, 1, 136, 8}, {1, 2, 1, 1, 256, 256},
                                        {8, 1, 16, 32, 128, 128}};
    static const char *const names[RULES] = {"gated delta rule, cached", "Mamba-2, cached",
                                             "delta rule with channels, cached"};
    examine_conv_cached(p);
    for (size_t i = 0; i < RULES * (p->large ? 7 : 6); i++) {
        const uint64_t *d = sizes[i / RULES], n = d[0] * d[1] * d[3];
        const enum rules kind = i % RULES;
        subject_examine(p, &(subject){.name = names[kind],
                                      .flags = kind == MAMBA ? 1 : i / RULES % 2 * 4 + (kind == CHANNELS ? 8 : 0),
                                      .a = {{ACT, d[0] * d[1] * row_width(d), 0, 0},
                                            {ACT, gate_count(d, kind), 0, 0},
                                            {ACT_OUT, n * d[5], 0, 0},
                                            {FP32, (d[0] + 1) * d[3] * d[4] * d[5], 0, 0},
                                            {INT, d[0], 1, 0},
                                            {INT, d[0], 1, 0}},
                                      .d = {d[0], d[1], d[2], d[3], d[4], d[5]},
                                      .row = {[2] = d[5]},
                                      .heads = {[2] = d[3]},
                                      .row_least = 1,
                                      .reference = reference_of_delta_cached,
                                      .ways = 1,
                                      .run = run_delta_cached,
                                      .prepare = fill_states});
    }
}

/* ---------------------------------------------------------------- promises about bits */

/* A layer's arrays on the device: one sequence of T rows, C channels and two caches' slots. */
typedef struct layer {
    spw_gpu *gpu;
    spw_gpu_queue *q;
    spw_conv_shape conv;
    spw_delta_shape rule;
    void *x, *w, *gates, *c, *out, *places;
    spw_delta_cache cache;
} layer;

enum { SLOT = 1, SLOTS = 2 };

static void *
on_device(layer *l, uint64_t n, unsigned turn, bool nan, spw_dtype type)
{
    float *host = subject_need(n * 4);
    void *p = NULL;
    for (uint64_t i = 0, key = subject_key(turn); i < n; i++)
        host[i] = nan ? NAN : subject_number(key, i);
    assert_int_equal(spw_gpu_alloc(l->gpu, &p, n * 4, NULL), SPW_OK);
    spw_gpu_copy_h2d(l->q, p, type, host, SPW_F32, n);
    spw_gpu_queue_sync(l->q);
    free(host);
    return p;
}

static void
open_layer(layer *l, spw_gpu *gpu, const uint64_t *d, enum rules kind)
{
    const bool mamba = kind == MAMBA;
    spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    const uint64_t T = d[1], C = row_width(d);
    *l = (layer){.gpu = gpu,
                 .conv = {.B = 1, .T = T, .C = C, .K = d[6]},
                 .rule = {.B = 1, .T = T, .Hk = d[2], .Hv = d[3], .Dk = d[4], .Dv = d[5], .mamba = mamba}};
    l->rule.channels = kind == CHANNELS;
    subject_use(gpu);
    assert_int_equal(spw_gpu_queue_create(&l->q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    l->x = on_device(l, T * C, 1, false, type);
    l->w = on_device(l, C * (l->conv.K + 1), 2, false, type);
    l->conv.bias = mamba ? subject_elem(l->w, C * l->conv.K) : NULL;
    l->gates = on_device(l, gate_count(d, kind), 3, false, type);
    l->c = on_device(l, T * C, 4, true, type);
    l->out = on_device(l, T * d[3] * d[5], 5, true, type);
    l->cache.state = on_device(l, SLOTS * d[3] * d[4] * d[5], 6, true, SPW_F32);
    l->cache.before = on_device(l, SLOTS * l->conv.K * C, 7, true, type);
    assert_int_equal(spw_gpu_alloc(gpu, &l->places, 8, NULL), SPW_OK);
    l->cache.slots = l->places;
    l->cache.starts = (const int32_t *)l->places + 1;
}

static void
close_layer(layer *l)
{
    void *all[] = {l->x, l->w, l->gates, l->c, l->out, l->places, l->cache.state, l->cache.before};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        spw_gpu_free(l->gpu, all[i]);
    spw_gpu_queue_destroy(l->q);
}

/* Rows [t, t + n): with the cache or, where they are all, without it. Outputs of all rows so far to the host. */
static void
go_on(layer *l, const uint64_t *d, uint64_t t, uint64_t n, bool cached, void *out)
{
    spw_conv_shape conv = l->conv;
    spw_delta_shape rule = l->rule;
    const enum rules kind = rule.channels ? CHANNELS : rule.mamba ? MAMBA : RULE;
    const uint64_t decays = decay_count(d, kind);
    spw_delta_inputs in = inputs_of(d, kind, subject_elem(l->c, t * conv.C), l->gates);
    int32_t place[2] = {SLOT, (int32_t)t};
    uint64_t values = rule.Hv * rule.Dv, bytes = spw_dtype_bytes(subject_type());
    void *x = subject_elem(l->x, t * conv.C), *c = subject_elem(l->c, t * conv.C);
    conv.T = rule.T = n;
    in.a = subject_elem(l->gates, t * decays);
    in.b = subject_elem(l->gates, l->rule.T * decays + t * rule.Hv);
    spw_gpu_write_bytes(l->q, l->places, place, sizeof place);
    if (cached) {
        spw_gpu_conv_cached(l->q, c, x, l->w, &l->cache, &conv);
        spw_gpu_delta_cached(l->q, subject_elem(l->out, t * values), &in, &l->cache, &rule);
    } else {
        spw_gpu_conv(l->q, c, x, l->w, &conv);
        spw_gpu_delta(l->q, l->out, NULL, &in, &rule);
    }
    spw_gpu_read_bytes(l->q, out, l->out, (t + n) * values * bytes);
}

/* A sequence through the caches in pieces of any size has the bits that it has at once and without them, and leaves the same behind. */
void
parity_delta_bits(const parity *p)
{
    static const uint64_t sizes[][7] = {{1, 70, 1, 2, 8, 16, 4},
                                        {1, 23, 2, 2, 24, 8, 8},
                                        {1, 20, 1, 1, 136, 40, 2},
                                        {1, 40, 1, 1, 128, 32, 4},
                                        {1, 700, 2, 4, 128, 128, 4}};
    for (size_t i = 0; i < RULES * (p->large ? 5 : 4); i++) {
        const uint64_t *d = sizes[i / RULES], T = d[1], values = d[3] * d[5], states = d[3] * d[4] * d[5] * 4;
        uint64_t bytes = spw_dtype_bytes(spw_gpu_get_info(p->gpu)->compute_dtype);
        char *want = subject_need(T * values * bytes), *got = subject_need(T * values * bytes);
        char *state = subject_need(states), *other = subject_need(states);
        layer l;
        open_layer(&l, p->gpu, d, i % RULES);
        go_on(&l, d, 0, T, false, want);
        for (uint64_t piece = T; piece > 0; piece = piece > 40 ? piece / 3 : piece > 4 ? piece / 2 : piece - 1) {
            for (uint64_t t = 0, n; t < T; t += n) {
                n = T - t < piece ? T - t : piece;
                go_on(&l, d, t, n, true, got);
            }
            assert_memory_equal(want, got, T * values * bytes);
            spw_gpu_read_bytes(l.q, piece == T ? state : other, (char *)l.cache.state + SLOT * states, states);
            assert_memory_equal(state, piece == T ? state : other, states);
        }
        close_layer(&l);
        free(want);
        free(got);
        free(state);
        free(other);
    }
}

/* ---------------------------------------------------------------- what bounds of decays' gradients cut off */

enum { FIRST = 250, BOUNDED = 550 }; /* rows of the first document, and of all */

/* One sequence of d[1] rows, of whose numbers the host has qkv, gates (as inputs_of() has them) and dout; with two documents, or one. */
typedef struct bounded {
    uint64_t d[6];
    enum rules kind;
    float *qkv, *gates, *dout, da[16 * BOUNDED], sums[18]; /* da (T,decays); dlog_a (Hv) and ddt_bias (decays) */
    bool documents;
} bounded;

/* Of zeros. */
static void
bounded_open(bounded *n, enum rules kind, uint64_t T, uint64_t heads)
{
    *n = (bounded){.d = {1, T, 1, heads, 8, 8}, .kind = kind};
    n->qkv = calloc(T * row_width(n->d), sizeof(float));
    n->gates = calloc(gate_count(n->d, kind), sizeof(float));
    n->dout = calloc(T * heads * 8, sizeof(float));
    assert_true(n->qkv != NULL && n->gates != NULL && n->dout != NULL);
}

static void
bounded_close(bounded *n)
{
    free(n->qkv);
    free(n->gates);
    free(n->dout);
}

static void
bounded_places(layer *l, const bounded *n, spw_delta_shape *shape)
{
    const uint64_t T = shape->T;
    int32_t places[2 * BOUNDED];
    assert_int_equal(spw_gpu_alloc(l->gpu, &l->places, 8 * T, NULL), SPW_OK);
    if (!n->documents)
        return;
    for (uint64_t t = 0; t < T; t++) {
        places[t] = t < FIRST ? 0 : FIRST;
        places[T + t] = t < FIRST ? FIRST : (int32_t)T;
    }
    spw_gpu_write_bytes(l->q, l->places, places, 8 * T);
    shape->begins = l->places;
    shape->ends = shape->begins + T;
}

static void
bounded_run(spw_gpu *gpu, bounded *n)
{
    enum { QKV, GATES, DOUT, OUT, DQKV, DAB, DELTA, SUMS, SCRATCH, COUNT };
    const uint64_t *d = n->d, T = d[1], heads = d[3], wide = T * row_width(d), out = T * heads * d[5];
    const uint64_t decays = decay_count(d, n->kind);
    const spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    spw_delta_shape shape = {
        .B = 1, .T = T, .Hk = 1, .Hv = heads, .Dk = d[4], .Dv = d[5], .channels = n->kind == CHANNELS};
    const uint64_t counts[COUNT] = {
        wide,           gate_count(d, n->kind),       out, out, wide, T * (decays + heads), out,
        heads + decays, spw_gpu_delta_scratch(&shape)};
    const float *host[] = {n->qkv, n->gates, n->dout};
    layer l = {.gpu = gpu};
    spw_delta_inputs in;
    void *p[COUNT];
    subject_use(gpu);
    assert_int_equal(spw_gpu_queue_create(&l.q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (unsigned k = 0; k < COUNT; k++)
        p[k] = on_device(&l, counts[k], k, true, k < DELTA ? type : SPW_F32);
    for (unsigned k = 0; k < 3; k++)
        spw_gpu_copy_h2d(l.q, p[k], type, host[k], SPW_F32, counts[k]);
    spw_gpu_zero(l.q, p[SUMS], (heads + decays) * sizeof(float));
    bounded_places(&l, n, &shape);
    in = inputs_of(d, n->kind, p[QKV], p[GATES]);
    spw_gpu_delta(l.q, p[OUT], p[DELTA], &in, &shape);
    spw_gpu_delta_backward(l.q, p[DQKV], p[DAB], subject_elem(p[DAB], T * decays), p[SUMS], (float *)p[SUMS] + heads,
                           NULL, p[DOUT], p[DELTA], p[SCRATCH], &in, &shape);
    spw_gpu_copy_d2h(l.q, n->da, SPW_F32, p[DAB], type, T * decays, NULL);
    spw_gpu_copy_d2h(l.q, n->sums, SPW_F32, p[SUMS], SPW_F32, heads + decays, NULL);
    spw_gpu_queue_sync(l.q);
    for (unsigned k = 0; k < COUNT; k++)
        spw_gpu_free(gpu, p[k]);
    spw_gpu_free(gpu, l.places);
    spw_gpu_queue_destroy(l.q);
}

/* Two heads, whose second forgets by log_a, at once if that is 8; `later`: how large the second document's gradients are. */
static void
run_forgetting(spw_gpu *gpu, bounded *n, enum rules kind, float log_a, float later)
{
    uint64_t of_log_a;
    bounded_open(n, kind, BOUNDED, 2);
    of_log_a = gate_count(n->d, kind) - own_count(n->d, kind);
    n->documents = true;
    for (uint64_t i = 0; i < BOUNDED * row_width(n->d); i++)
        n->qkv[i] = subject_number(subject_key(1), i);
    for (uint64_t i = 0; i < gate_count(n->d, kind); i++)
        n->gates[i] = subject_number(subject_key(2), i);
    n->gates[of_log_a] = -3;
    n->gates[of_log_a + 1] = log_a;
    for (uint64_t i = 0; i < BOUNDED * 2 * 8; i++)
        n->dout[i] = (i < FIRST * 2 * 8 ? 1 : later) * subject_number(subject_key(3), i);
    bounded_run(gpu, n);
    bounded_close(n);
}

/* A head that forgets nearly all at once: what is left of the gradient where its decay is less than 1e-15 is less than roundings leave of sums. */
static void
examine_fading(spw_gpu *gpu, enum rules kind)
{
    static bounded n;
    const uint64_t each = kind == CHANNELS ? 8 : 1, all = 2 * each, of_dt_bias = BOUNDED * (all + 2) + 2;
    const uint64_t key = subject_key(2);
    unsigned faded = 0;
    run_forgetting(gpu, &n, kind, 4, 1);
    for (uint64_t i = 0; i < BOUNDED * each; i++) {
        const uint64_t at = i / each * all + each + i % each, own = of_dt_bias + each + i % each;
        const double x = (double)subject_number(key, at) + (double)subject_number(key, own);
        if (-exp(4) * log1p(exp(x)) > log(1e-15))
            continue;
        assert_true(fabsf(n.da[at]) <= 1e-9f);
        faded++;
    }
    assert_true(faded > BOUNDED / 10);
}

/*
 * The first row writes in one direction what the last one reads, and no row between them does either: all gradients are at their bounds, with
 * channels those of the one that this direction is.
 */
static void
examine_tight_bounds(spw_gpu *gpu, enum rules kind)
{
    enum { T = BOUNDED };
    const double rate = exp(-6), kept = exp(-rate * log(2) * (T - 1)), want = -0.5 * kept / sqrt(8) * rate * 0.5;
    const uint64_t each = kind == CHANNELS ? 8 : 1;
    static bounded n;
    bounded_open(&n, kind, T, 1);
    for (uint64_t t = 0; t < T; t++)
        n.qkv[t * 24 + (t > 0 ? 9 : 8)] = 1; /* keys */
    n.qkv[16] = 1;
    n.qkv[(T - 1) * 24] = 1;
    n.dout[(T - 1) * 8] = 1;
    n.gates[(each + 1) * T] = -6;
    bounded_run(gpu, &n);
    assert_true(n.da[0] == 0);
    for (uint64_t t = 1; t < T; t++)
        assert_true(fabs((double)n.da[t * each] - want) <= 0.02 * -want);
    for (uint64_t i = 0; i < T * each; i++)
        assert_true(i % each == 0 || n.da[i] == 0);
    bounded_close(&n);
}

/* A value that is a NaN makes the gradients of the decays of its row and those before, though not their bounds, NaN. */
static void
examine_nan(spw_gpu *gpu)
{
    enum { T = BOUNDED };
    bounded n;
    bounded_open(&n, RULE, T, 1);
    for (uint64_t i = 0; i < T * row_width(n.d); i++)
        n.qkv[i] = subject_number(subject_key(1), i);
    for (uint64_t i = 0; i < T * 8; i++)
        n.dout[i] = subject_number(subject_key(3), i);
    n.qkv[T * row_width(n.d) - 1] = NAN;
    bounded_run(gpu, &n);
    assert_true(isnan(n.da[T - 1]) && isnan(n.da[0]) && isnan(n.sums[0]) && isnan(n.sums[1]));
    bounded_close(&n);
}

/* A head that forgets at once has no gradient of its decay, not even what roundings leave; and a document has the numbers that it has beside any other. */
static void
examine_forgetting(spw_gpu *gpu, enum rules kind)
{
    static bounded alone, beside;
    const uint64_t each = kind == CHANNELS ? 8 : 1; /* decays of a head */
    float norm = 0;
    run_forgetting(gpu, &alone, kind, 8, 0);
    run_forgetting(gpu, &beside, kind, 8, 4096);
    for (uint64_t i = 0; i < BOUNDED * each; i++) {
        const uint64_t at = i / each * 2 * each + i % each;
        assert_true(beside.da[at + each] == 0);
        norm += fabsf(alone.da[at]);
    }
    assert_true(beside.sums[1] == 0 && norm > 0);
    for (uint64_t i = 0; i < each; i++)
        assert_true(beside.sums[2 + each + i] == 0);
    for (uint64_t i = 0; i < FIRST * 2 * each; i++)
        assert_true(alone.da[i] == beside.da[i]); /* what is cut off to 0 has either sign */
}

void
parity_delta_bounds(const parity *p)
{
    examine_forgetting(p->gpu, RULE);
    examine_forgetting(p->gpu, CHANNELS);
    examine_fading(p->gpu, RULE);
    examine_fading(p->gpu, CHANNELS);
    examine_tight_bounds(p->gpu, RULE);
    examine_tight_bounds(p->gpu, CHANNELS);
    examine_nan(p->gpu);
}

/* ---------------------------------------------------------------- heads in turns */

enum { T_QKV, T_GATES, T_DOUT, T_OUT, T_DELTA, T_DQKV, T_DA, T_DB, T_SUMS, T_SCRATCH, T_COUNT };

static spw_delta_shape
turns_shape(const uint64_t *d, uint64_t heads_each, enum rules kind)
{
    return (spw_delta_shape){.B = d[0],
                             .T = d[1],
                             .Hk = d[2],
                             .Hv = d[3],
                             .Dk = d[4],
                             .Dv = d[5],
                             .heads_each = heads_each,
                             .mamba = kind == MAMBA,
                             .channels = kind == CHANNELS};
}

/* What backward gives with so many heads of keys at a time, one array behind the other; scratch begins as NaN. */
static char *
in_turns(spw_gpu *gpu, const uint64_t *d, uint64_t heads_each, enum rules kind, uint64_t *bytes)
{
    const bool mamba = kind == MAMBA;
    const uint64_t rows = d[0] * d[1], wide = rows * row_width(d), values = rows * d[3] * d[5], n = rows * d[3];
    const spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    const spw_delta_shape shape = turns_shape(d, heads_each, kind);
    const uint64_t da = rows * decay_count(d, kind), own = own_count(d, kind);
    const uint64_t counts[T_COUNT] = {wide, gate_count(d, kind),          values, values, values, wide, da, n,
                                      own,  spw_gpu_delta_scratch(&shape)};
    layer l = {.gpu = gpu};
    spw_delta_inputs in;
    void *p[T_COUNT];
    char *all = subject_need((wide + da + n + own) * 4);
    subject_use(gpu);
    assert_int_equal(spw_gpu_queue_create(&l.q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (unsigned k = 0; k < T_COUNT; k++)
        p[k] = on_device(&l, counts[k], k, k > T_DOUT && k != T_SUMS, k == T_DELTA || k >= T_SUMS ? SPW_F32 : type);
    in = inputs_of(d, kind, p[T_QKV], p[T_GATES]);
    spw_gpu_delta(l.q, p[T_OUT], mamba ? NULL : p[T_DELTA], &in, &shape);
    spw_gpu_delta_backward(l.q, p[T_DQKV], p[T_DA], mamba ? NULL : p[T_DB], p[T_SUMS], (float *)p[T_SUMS] + d[3],
                           (float *)p[T_SUMS] + 2 * d[3], p[T_DOUT], mamba ? NULL : p[T_DELTA], p[T_SCRATCH], &in,
                           &shape);
    *bytes = 0;
    for (unsigned k = T_DQKV; k <= T_SUMS; k++) {
        uint64_t size = counts[k] * (k == T_SUMS ? 4 : spw_dtype_bytes(type));
        spw_gpu_read_bytes(l.q, all + *bytes, p[k], size);
        *bytes += size;
    }
    for (unsigned k = 0; k < T_COUNT; k++)
        spw_gpu_free(gpu, p[k]);
    spw_gpu_queue_destroy(l.q);
    return all;
}

/* Backward has the bits of all heads at once when they come in turns, of which the last one may have fewer; and less scratch. */
void
parity_delta_turns(const parity *p)
{
    static const uint64_t sizes[][6] = {{2, 33, 3, 6, 16, 24}, {1, 150, 2, 2, 8, 8}, {1, 21, 5, 5, 40, 136}};
    for (size_t i = 0; i < RULES * (sizeof sizes / sizeof sizes[0]); i++) {
        const uint64_t *d = sizes[i / RULES];
        const enum rules kind = i % RULES;
        uint64_t bytes, same;
        char *want = in_turns(p->gpu, d, 0, kind, &bytes);
        spw_delta_shape shape = turns_shape(d, 0, kind);
        const uint64_t scratch = spw_gpu_delta_scratch(&shape);
        for (uint64_t each = 1; each < d[2]; each++) {
            char *got = in_turns(p->gpu, d, each, kind, &same);
            shape.heads_each = each;
            assert_int_equal(spw_gpu_delta_scratch(&shape) * d[2], scratch * each);
            assert_memory_equal(want, got, bytes);
            free(got);
        }
        free(want);
    }
}
