/*
 * spillway bench gemm and spillway bench attention: what a device computes at the shapes of real models, forward and backward.
 *
 * Operations are what the formulas need, not what kernels repeat: 2 M N K for a product, 4 of T^2 / 2 Hq D per sequence for causal
 * attention and 2.5 times that for its backward. Rows marked + do more in the same call: bias and gelu, onto another array, back
 * through a gelu; a loss is three products and all between them. Rows "each" are products of a layer's experts, M rows unevenly over them, by
 * one call, and "alone" the same by a call for each expert. Rows of fp8 find the scale of x and encode it, and multiply its codes by
 * the weights', whose are made before. The peak is the device's own where it is known (its clock at its highest, so
 * nothing reaches it); where not, a square product, measured in turn with every row. Samples of each result are checked
 * against sums in fp64; that is not in the timing.
 */
#include "cli.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { REPS_MAX = 200, REPS_MIN = 5, PATTERN = 1 << 16, ARRAYS = 10, SAMPLES = 48 };

typedef struct row {
    const char *name;
    void *a[9];       /* its arrays on the device */
    uint64_t M, N, K; /* gemm */
    enum { PLAIN, UP, DOWN, HEAD } use;
    uint64_t experts;            /* gemm: M rows over so many, and W and DW are theirs; 0: none */
    bool in_out;                 /* and so their weights lie */
    spw_attention_shape shape;   /* attention */
    const char *what;            /* "forward", "backward" */
    double flops, limit_flops_s; /* of one call; the peak or what the square product reached */
    uint64_t wrong;
    uint32_t reps;
    double seconds[REPS_MAX], p50;
} row;

typedef struct bench {
    const char *name; /* "gemm", "attention" */
    const char *device;
    spw_dtype dtype;
    double seconds;
    bool json, smoke;
    spw_gpu *gpu;
    spw_gpu_queue *queue;
    spw_dtype type; /* what the device computes in */
    float pattern[PATTERN];
    void *arrays[ARRAYS];
    uint32_t array_count;
    void *square[3]; /* the ceiling's product; NULL: the peak is known */
    uint64_t square_side;
    spw_error err; /* the first failure */
} bench;

/* ---------------------------------------------------------------- memory */

static void *
take(bench *b, uint64_t bytes)
{
    void *p = NULL;
    if (b->err.status == SPW_OK && spw_gpu_alloc(b->gpu, &p, bytes, &b->err) == SPW_OK)
        b->arrays[b->array_count++] = p;
    return p;
}

static void
give_back(bench *b, uint32_t from)
{
    while (b->array_count > from)
        spw_gpu_free(b->gpu, b->arrays[--b->array_count]);
}

/* Element i is pattern[(i + shift) % PATTERN] in the compute type, which holds it exactly. */
static void *
take_filled(bench *b, uint64_t elems, uint64_t shift)
{
    char *p = take(b, elems * spw_dtype_bytes(b->type));
    for (uint64_t at = 0, n; p != NULL && at < elems; at += n) {
        uint64_t from = (at + shift) % PATTERN;
        n = elems - at < PATTERN - from ? elems - at : PATTERN - from;
        spw_gpu_copy_h2d(b->queue, p + at * spw_dtype_bytes(b->type), b->type, b->pattern + from, SPW_F32, n);
    }
    return p;
}

static double
at(const bench *b, uint64_t i, uint64_t shift)
{
    return (double)b->pattern[(i + shift) % PATTERN];
}

static void
make_pattern(bench *b)
{
    for (uint64_t i = 0; i < PATTERN; i++) { /* random: zeros would draw less power than work does */
        uint32_t r[4];
        spw_philox(3, 0, i, r);
        b->pattern[i] = spw_bf16_to_f32(spw_f32_to_bf16((2.0f * spw_uniform_f32(r[0]) - 1.0f) / 4));
    }
}

/* Is one element of an array of the compute type what it should be, within its rounding and the sum's? */
static bool
is_near(bench *b, const void *array, uint64_t i, double want, double scale)
{
    static const double rounding[SPW_DTYPE_COUNT] = {2e-5, 8e-3, 1e-3};
    float got;
    spw_gpu_copy_d2h(b->queue, &got, SPW_F32, (const char *)array + i * spw_dtype_bytes(b->type), b->type, 1, NULL);
    spw_gpu_queue_sync(b->queue);
    return fabs((double)got - want) <= rounding[b->type] * (fabs(want) + scale);
}

/* ---------------------------------------------------------------- timing */

typedef void (*work_fn)(bench *b, const row *r);

static double
time_call(bench *b, work_fn fn, const row *r, uint32_t calls)
{
    uint64_t begin = spw_now_ns();
    for (uint32_t i = 0; i < calls; i++)
        fn(b, r);
    spw_gpu_queue_sync(b->queue);
    return (double)(spw_now_ns() - begin) * 1e-9 / calls;
}

static void
square_product(bench *b, const row *r)
{
    uint64_t n = b->square_side;
    (void)r;
    spw_gpu_linear(b->queue, b->square[2], b->square[0], b->square[1], NULL, n, n, n, 0);
}

/* Several calls per sample where one is short, as many as take a millisecond. */
static void
measure(bench *b, row *r, work_fn fn)
{
    static double ceiling[REPS_MAX];
    double n = (double)b->square_side, first;
    uint64_t end = spw_now_ns() + (b->smoke ? 0 : (uint64_t)(b->seconds * 1e9));
    uint32_t calls, reps_min = b->smoke ? 1 : REPS_MIN;
    (void)time_call(b, fn, r, 1); /* warm-up: algorithms are chosen, memory grows */
    first = time_call(b, fn, r, 1);
    calls = b->smoke || first >= 1e-3 ? 1 : (uint32_t)(1e-3 / first) + 1;
    for (r->reps = 0; r->reps < REPS_MAX && (r->reps < reps_min || spw_now_ns() < end); r->reps++) {
        if (b->square[0] != NULL)
            ceiling[r->reps] = time_call(b, square_product, NULL, 1);
        r->seconds[r->reps] = time_call(b, fn, r, calls);
    }
    r->p50 = cli_median(r->seconds, r->reps);
    r->limit_flops_s =
        b->square[0] != NULL ? 2 * n * n * n / cli_median(ceiling, r->reps) : spw_gpu_get_info(b->gpu)->peak_flops;
}

/* ---------------------------------------------------------------- products: x, dx (M, K), w, dw (N, K), y, dy (M, N) */

enum { X, W, Y, DY, DX, DW, GELU_IN, X_CODES, W_CODES, TARGETS = Y, LOSSES = DY, LOGITS = GELU_IN };

static void
forward_product(bench *b, const row *r)
{
    void *const *a = r->a;
    spw_gpu_linear(b->queue, a[Y], a[X], a[W], NULL, r->M, r->N, r->K, 0);
}

static void
backward_product(bench *b, const row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_backward(b->queue, a[DX], a[DW], NULL, a[DY], a[X], a[W], r->M, r->N, r->K, 0);
}

/* Into a gelu, with a bias (the first row of dy). */
static void
gelu_product(bench *b, const row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_gelu(b->queue, a[Y], a[GELU_IN], a[X], a[W], a[DY], r->M, r->N, r->K, 0);
}

/* Onto dy. */
static void
added_product(bench *b, const row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_add(b->queue, a[Y], a[DY], a[X], a[W], NULL, r->M, r->N, r->K, 0);
}

/* As if x had come out of a gelu and were also what went in: the values are of no matter to dw, which nobody looks at. */
static void
backward_through_gelu(bench *b, const row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_gelu_backward(b->queue, a[DX], a[DW], NULL, a[DY], a[X], a[X], a[W], r->M, r->N, r->K, 0);
}

/* Codes, and behind them their scale. */
static spw_fp8_matrix
code(bench *b, const row *r, int from, int to, uint64_t rows)
{
    uint8_t *codes = r->a[to];
    float *scale = (float *)(void *)(codes + rows * r->K);
    spw_gpu_fp8_scale(b->queue, scale, SPW_E4M3, r->a[from], rows * r->K);
    spw_gpu_fp8_encode(b->queue, codes, NULL, SPW_E4M3, scale, r->a[from], rows, r->K);
    return (spw_fp8_matrix){codes, scale, SPW_E4M3};
}

static void
fp8_product(bench *b, const row *r)
{
    spw_fp8_matrix w = {r->a[W_CODES], (const float *)(const void *)((const char *)r->a[W_CODES] + r->N * r->K),
                        SPW_E4M3};
    spw_gpu_fp8_product(
        b->queue,
        &(spw_fp8_product){.y = r->a[Y], .a = code(b, r, X, X_CODES, r->M), .b = w, .M = r->M, .N = r->N, .K = r->K});
}

static uint64_t
loss_rows(const bench *b, const row *r)
{
    return r->M < spw_gpu_get_info(b->gpu)->loss_rows ? r->M : spw_gpu_get_info(b->gpu)->loss_rows;
}

static void
whole_loss(bench *b, const row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_cross_entropy(b->queue, a[LOSSES], a[DX], a[DW], a[X], a[W], a[TARGETS], a[LOGITS], loss_rows(b, r),
                                 r->M, r->N, r->K, 1.0f / (float)r->M, 0, SPW_OP_SET_DW);
}

/* ---------------------------------------------------------------- products of experts, whose weights lie one behind the other */

/* How many of the rows go to experts in front of this one: expert i has 1 to 4 shares. */
static uint64_t
rows_before(const row *r, uint64_t expert)
{
    const uint64_t shares[] = {0, 1, 3, 6}, whole = r->experts / 4 * 10 + shares[r->experts % 4];
    return r->M * (expert / 4 * 10 + shares[expert % 4]) / whole;
}

typedef struct expert_arrays {
    uint64_t ends[SPW_EXPERTS_MAX];
    const void *w[SPW_EXPERTS_MAX];
    float *dw[SPW_EXPERTS_MAX];
    bool set[SPW_EXPERTS_MAX];
} expert_arrays;

static spw_each
tell_each(const bench *b, const row *r, expert_arrays *a)
{
    const uint64_t elems = r->N * r->K;
    for (uint64_t i = 0; i < r->experts; i++) {
        a->ends[i] = rows_before(r, i + 1);
        a->w[i] = (const char *)r->a[W] + i * elems * spw_dtype_bytes(b->type);
        a->dw[i] = (float *)r->a[DW] + i * elems;
        a->set[i] = true;
    }
    return (spw_each){
        .count = r->experts, .N = r->N, .K = r->K, .ends = a->ends, .w = a->w, .dw = a->dw, .set = a->set};
}

static void
forward_each(bench *b, const row *r)
{
    expert_arrays a;
    spw_each e = tell_each(b, r, &a);
    spw_gpu_linear_each(b->queue, r->a[Y], r->a[X], &e, r->in_out ? SPW_OP_W_IN_OUT : 0);
}

static void
backward_each(bench *b, const row *r)
{
    expert_arrays a;
    spw_each e = tell_each(b, r, &a);
    spw_gpu_linear_each_backward(b->queue, r->a[DX], r->a[DY], r->a[X], &e, r->in_out ? SPW_OP_W_IN_OUT : 0);
}

static void
forward_alone(bench *b, const row *r)
{
    const uint64_t bytes = spw_dtype_bytes(b->type);
    expert_arrays a;
    (void)tell_each(b, r, &a);
    for (uint64_t i = 0, at = 0; i < r->experts; at = a.ends[i++])
        spw_gpu_linear(b->queue, (char *)r->a[Y] + at * r->N * bytes, (char *)r->a[X] + at * r->K * bytes, a.w[i], NULL,
                       a.ends[i] - at, r->N, r->K, r->in_out ? SPW_OP_W_IN_OUT : 0);
}

static void
backward_alone(bench *b, const row *r)
{
    const uint64_t bytes = spw_dtype_bytes(b->type);
    expert_arrays a;
    (void)tell_each(b, r, &a);
    for (uint64_t i = 0, at = 0; i < r->experts; at = a.ends[i++])
        spw_gpu_linear_backward(b->queue, (char *)r->a[DX] + at * r->K * bytes, a.dw[i], NULL,
                                (char *)r->a[DY] + at * r->N * bytes, (char *)r->a[X] + at * r->K * bytes, a.w[i],
                                a.ends[i] - at, r->N, r->K, (r->in_out ? SPW_OP_W_IN_OUT : 0) | SPW_OP_SET_DW);
}

/* Elements of y or dx, and of dw. */
static void
check_each(bench *b, row *r, bool backward)
{
    const uint64_t N = r->N, K = r->K, columns = backward ? K : N, depth = backward ? N : K;
    for (uint64_t s = 0; s < SAMPLES; s++) {
        uint64_t i = (s * 7919 + 1) * (r->M * columns / SAMPLES + 1) % (r->M * columns), m = i / columns, e = 0;
        double want = 0;
        while (m >= rows_before(r, e + 1))
            e++;
        for (uint64_t k = 0; k < depth; k++) {
            uint64_t n = backward ? k : i % columns, in = backward ? i % columns : k;
            want += (backward ? at(b, m * N + k, 5) : at(b, m * K + k, 0)) *
                    at(b, e * N * K + (r->in_out ? in * N + n : n * K + in), 77);
        }
        r->wrong += !is_near(b, r->a[backward ? DX : Y], i, want, sqrt((double)depth) / 48);
    }
    for (uint64_t s = 0; s < SAMPLES && backward; s++) {
        uint64_t e = s * 7919 % r->experts, n = s * 104729 % N, k = s * 1299709 % K, end = rows_before(r, e + 1);
        double want = 0;
        float got;
        for (uint64_t m = rows_before(r, e); m < end; m++)
            want += at(b, m * N + n, 5) * at(b, m * K + k, 0);
        spw_gpu_read_bytes(b->queue, &got, (float *)r->a[DW] + e * N * K + (r->in_out ? k * N + n : n * K + k),
                           sizeof got);
        if (end > rows_before(r, e)) /* one that nobody chose is left as it was */
            r->wrong += !(fabs((double)got - want) <= 1e-4 * (fabs(want) + sqrt((double)end) / 48));
    }
}

static double
gelu(double x, bool slope)
{
    double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return slope ? 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
                 : 0.5 * x * (1 + t);
}

/* Elements of y = x w^T, or of dx = dy w, spread over all of it, with what fn does besides. */
static void
check_product(bench *b, row *r, work_fn fn)
{
    void *const *a = r->a;
    bool backward = fn == backward_product || fn == backward_through_gelu;
    uint64_t columns = backward ? r->K : r->N, depth = backward ? r->N : r->K;
    for (uint64_t s = 0; s < SAMPLES; s++) {
        uint64_t i = (s * 7919 + 1) * (r->M * columns / SAMPLES + 1) % (r->M * columns), m = i / columns,
                 c = i % columns;
        double want = 0;
        for (uint64_t k = 0; k < depth; k++)
            want += backward ? at(b, m * r->N + k, 5) * at(b, k * r->K + c, 77)
                             : at(b, m * r->K + k, 0) * at(b, c * r->K + k, 77);
        if (fn == added_product)
            want += at(b, i, 5);
        else if (fn == gelu_product)
            want = gelu(want + at(b, c, 5), false);
        else if (fn == backward_through_gelu)
            want *= gelu(at(b, i, 0), true);
        r->wrong += !is_near(b, backward ? a[DX] : a[Y], i, want, sqrt((double)depth) / 48);
    }
}

/* The same of codes: three bits of mantissa are off by 0.03 in the mean, a wrong scale by half at least. */
static void
check_fp8(bench *b, row *r)
{
    for (uint64_t s = 0; s < SAMPLES; s++) {
        uint64_t i = (s * 7919 + 1) * (r->M * r->N / SAMPLES + 1) % (r->M * r->N);
        double want = 0, rms = sqrt((double)r->K) / 48;
        float got;
        for (uint64_t k = 0; k < r->K; k++)
            want += at(b, i / r->N * r->K + k, 0) * at(b, i % r->N * r->K + k, 77);
        spw_gpu_copy_d2h(b->queue, &got, SPW_F32, (const char *)r->a[Y] + i * spw_dtype_bytes(b->type), b->type, 1,
                         NULL);
        spw_gpu_queue_sync(b->queue);
        r->wrong += !(fabs((double)got - want) < 0.25 * rms);
    }
}

static int32_t
target_of(const row *r, uint64_t m)
{
    return (int32_t)(m * 7919 % r->N);
}

/* Losses of a few rows, in fp64. */
static void
check_loss(bench *b, row *r)
{
    enum { ROWS = 4 };
    for (uint64_t s = 0; s < ROWS; s++) {
        uint64_t m = s * (r->M - 1) / (ROWS - 1);
        double sum = 0, target = 0;
        float got;
        for (uint64_t v = 0; v < r->N; v++) {
            double logit = 0;
            for (uint64_t k = 0; k < r->K; k++)
                logit += at(b, m * r->K + k, 0) * at(b, v * r->K + k, 77);
            sum += exp(logit);
            target = (uint64_t)target_of(r, m) == v ? logit : target;
        }
        spw_gpu_read_bytes(b->queue, &got, (float *)r->a[LOSSES] + m, sizeof got);
        r->wrong += !(fabs((double)got - (log(sum) - target)) < 0.02 * (1 + fabs(target)));
    }
}

/* ---------------------------------------------------------------- attention: packed rows of q, k and v */

enum { QKV, OUT, LSE, DOUT, DQKV };

static const void *
column(const bench *b, void *qkv, uint64_t elems)
{
    return (const char *)qkv + elems * spw_dtype_bytes(b->type);
}

static void
forward_attention(bench *b, const row *r)
{
    void *const *a = r->a;
    uint64_t k = r->shape.Hq * r->shape.D, v = k + r->shape.Hk * r->shape.D;
    spw_gpu_attention(b->queue, a[OUT], a[LSE], a[QKV], column(b, a[QKV], k), column(b, a[QKV], v), &r->shape);
}

static void
backward_attention(bench *b, const row *r)
{
    void *const *a = r->a;
    uint64_t k = r->shape.Hq * r->shape.D, v = k + r->shape.Hk * r->shape.D;
    spw_gpu_attention_backward(b->queue, a[DQKV], (void *)(uintptr_t)column(b, a[DQKV], k),
                               (void *)(uintptr_t)column(b, a[DQKV], v), NULL, a[DOUT], a[OUT], a[LSE], a[QKV],
                               column(b, a[QKV], k), column(b, a[QKV], v), &r->shape);
}

/* Elements of out: softmax over the keys before them, in fp64. */
static void
check_attention(bench *b, row *r)
{
    const spw_attention_shape *s = &r->shape;
    void *const *a = r->a;
    double *p = calloc(s->T, sizeof *p);
    for (uint64_t k = 0; p != NULL && k < SAMPLES; k++) {
        uint64_t rows = s->B * s->T, at_row = (k * 7919 + rows / 2) % rows, t = at_row % s->T, first = at_row - t;
        uint64_t h = k % s->Hq, d = k * 13 % s->D, hk = h / (s->Hq / s->Hk);
        uint64_t key = s->Hq * s->D + hk * s->D, value = key + s->Hk * s->D;
        double top = -INFINITY, sum = 0, want = 0;
        for (uint64_t u = 0; u <= t; u++) {
            p[u] = 0;
            for (uint64_t i = 0; i < s->D; i++)
                p[u] += at(b, at_row * s->q_stride + h * s->D + i, 0) * at(b, (first + u) * s->kv_stride + key + i, 0);
            p[u] *= (double)s->scale;
            top = fmax(top, p[u]);
        }
        for (uint64_t u = 0; u <= t; u++) {
            sum += exp(p[u] - top);
            want += exp(p[u] - top) * at(b, (first + u) * s->kv_stride + value + d, 0);
        }
        r->wrong += !is_near(b, a[OUT], at_row * s->Hq * s->D + h * s->D + d, want / sum, 0.25 / sqrt((double)t + 1));
    }
    r->wrong += p == NULL;
    free(p);
}

/* ---------------------------------------------------------------- reports */

static void
print_json(bench *b, json_t *object)
{
    if (object == NULL || json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6)) != 0)
        (void)SPW_RAISE(&b->err, SPW_EIO, "bench %s: writing JSON", b->name);
    json_decref(object);
    putchar('\n');
}

static void
print_header(bench *b)
{
    const spw_gpu_info *info = spw_gpu_get_info(b->gpu);
    bool products = strcmp(b->name, "gemm") == 0, known = b->square[0] == NULL;
    if (b->json) {
        print_json(b,
                   json_pack("{s:{s:s,s:i,s:s,s:s,s:s,s:s,s:s,s:s}}", "header", "bench", b->name, "schema", 1,
                             "version", SPW_VERSION, "device", info->name, "description", info->description, "compute",
                             spw_dtype_name(b->type), "build", cli_build_name(), "peak", known ? "device" : "square"));
        return;
    }
    printf("# bench %s  schema 1  spillway %s  device %s (%s)  build %s\n", b->name, SPW_VERSION, info->name,
           info->description, cli_build_name());
    if (known)
        printf("# peak: %.1f TFLOP/s of products in %s at the highest clock\n", info->peak_flops * 1e-12,
               spw_dtype_name(b->type));
    else
        printf("# peak: a product of %llu^3, in turn with each row\n", (unsigned long long)b->square_side);
    if (products && !info->fp8)
        printf("# no rows of fp8: they need compute capability 8.9, and bf16\n");
    printf(products
               ? "#   product                 M      N      K what       reps       p50   TFLOP/s  %%peak  #wrong\n"
               : "#   attention               B      T heads what       reps       p50   TFLOP/s  %%peak  #wrong\n");
    printf("#                                                             (us)\n");
}

static void
print_row(bench *b, const row *r)
{
    bool products = strcmp(b->name, "gemm") == 0;
    uint64_t d[3] = {products ? r->M : r->shape.B, products ? r->N : r->shape.T, products ? r->K : r->shape.Hq};
    double rate = r->flops / r->p50;
    if (b->json) {
        json_t *samples = json_array();
        for (uint32_t i = 0; i < r->reps; i++)
            json_array_append_new(samples, json_real(r->seconds[i] * 1e6)); /* a failure shows in json_pack */
        print_json(b, json_pack("{s:s,s:s,s:I,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:I,s:o}", "op", r->name, "what", r->what,
                                products ? "M" : "B", (json_int_t)d[0], products ? "N" : "T", (json_int_t)d[1],
                                products ? "K" : "heads", (json_int_t)d[2], "reps", (json_int_t)r->reps, "p50_us",
                                r->p50 * 1e6, "flop_s", rate, "peak_flop_s", r->limit_flops_s, "ratio_to_peak",
                                rate / r->limit_flops_s, "wrong", (json_int_t)r->wrong, "samples_us", samples));
        return;
    }
    printf("  %-20s %6llu %6llu %6llu %-8s %6u %9.1f %9.3f %6.0f %7llu\n", r->name, (unsigned long long)d[0],
           (unsigned long long)d[1], (unsigned long long)d[2], r->what, r->reps, r->p50 * 1e6, rate * 1e-12,
           100 * rate / r->limit_flops_s, (unsigned long long)r->wrong);
    fflush(stdout);
}

/* ---------------------------------------------------------------- the rows */

static uint64_t
run_row(bench *b, row *r, const char *what, double flops, work_fn fn)
{
    r->what = what;
    r->flops = flops;
    r->wrong = 0;
    if (b->err.status != SPW_OK)
        return 0;
    measure(b, r, fn);
    if (fn == forward_attention)
        check_attention(b, r);
    else if (r->experts > 0)
        check_each(b, r, fn == backward_each || fn == backward_alone);
    else if (fn == whole_loss)
        check_loss(b, r);
    else if (fn == fp8_product)
        check_fp8(b, r);
    else if (fn != backward_attention)
        check_product(b, r, fn);
    (void)spw_gpu_check(b->gpu, &b->err);
    if (b->err.status == SPW_OK)
        print_row(b, r);
    return r->wrong;
}

static void
take_product(bench *b, row *r)
{
    uint64_t elem = spw_dtype_bytes(b->type), weights = r->N * r->K * (r->experts > 0 ? r->experts : 1);
    r->a[X] = take_filled(b, r->M * r->K, 0);
    r->a[W] = take_filled(b, weights, 77);
    r->a[Y] = take(b, r->M * r->N * elem);
    r->a[DY] = take_filled(b, r->M * r->N, 5);
    r->a[DX] = take(b, r->M * r->K * elem);
    r->a[DW] = take(b, weights * sizeof(float));
    r->a[GELU_IN] = r->use == UP ? take(b, r->M * r->N * elem) : NULL;
    if (b->err.status == SPW_OK)
        spw_gpu_zero(b->queue, r->a[DW], weights * sizeof(float));
}

/* A product of codes beside its plain one, of multiples of 16. */
static uint64_t
run_fp8(bench *b, const row *plain)
{
    uint64_t wrong, elem = spw_dtype_bytes(b->type);
    uint32_t kept = b->array_count;
    row r = *plain;
    r.M = spw_round_up(r.M, 16);
    r.N = spw_round_up(r.N, 16);
    r.K = spw_round_up(r.K, 16);
    r.a[X] = take_filled(b, r.M * r.K, 0);
    r.a[W] = take_filled(b, r.N * r.K, 77);
    r.a[Y] = take(b, r.M * r.N * elem);
    r.a[X_CODES] = take(b, r.M * r.K + sizeof(float));
    r.a[W_CODES] = take(b, r.N * r.K + sizeof(float));
    if (b->err.status == SPW_OK)
        (void)code(b, &r, W, W_CODES, r.N);
    wrong = run_row(b, &r, "fp8", 2.0 * (double)r.M * (double)r.N * (double)r.K, fp8_product);
    give_back(b, kept);
    return wrong;
}

static void
take_loss(bench *b, row *r)
{
    uint64_t elem = spw_dtype_bytes(b->type);
    r->a[X] = take_filled(b, r->M * r->K, 0);
    r->a[W] = take_filled(b, r->N * r->K, 77);
    r->a[TARGETS] = take(b, r->M * sizeof(int32_t));
    r->a[LOSSES] = take(b, r->M * sizeof(float));
    r->a[DX] = take(b, r->M * r->K * elem);
    r->a[DW] = take(b, r->N * r->K * sizeof(float));
    r->a[LOGITS] = take(b, loss_rows(b, r) * spw_gpu_logits_stride(r->N) * elem);
    for (uint64_t m = 0; m < r->M && b->err.status == SPW_OK; m++) {
        int32_t target = target_of(r, m);
        spw_gpu_write_bytes(b->queue, (int32_t *)r->a[TARGETS] + m, &target, sizeof target);
    }
}

/* The products of a model, each with what the engine has it do on its way out, and without. */
static uint64_t
run_gemm(bench *b)
{
    static row rows[] = {{.name = "gpt2-124M qkv", .N = 2304, .K = 768},
                         {.name = "gpt2-124M up", .N = 3072, .K = 768, .use = UP},
                         {.name = "gpt2-124M down", .N = 768, .K = 3072, .use = DOWN},
                         {.name = "gpt2-124M head", .N = 50257, .K = 768, .use = HEAD},
                         {.name = "gpt2-1.5B up", .N = 6400, .K = 1600, .use = UP},
                         {.name = "gpt2-1.5B down", .N = 1600, .K = 6400, .use = DOWN},
                         {.name = "llama-1B gate", .N = 8192, .K = 2048},
                         {.name = "llama-8B gate", .N = 14336, .K = 4096},
                         {.name = "llama-8B down", .N = 4096, .K = 14336}};
    uint64_t wrong = 0, rows_each = spw_gpu_get_info(b->gpu)->host_addressable ? 256 : 8192;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && b->err.status == SPW_OK; i++) {
        row *r = &rows[i];
        uint32_t kept = b->array_count;
        double flops;
        r->M = b->smoke ? 24 : rows_each;
        r->N = b->smoke ? r->N / 64 + 1 : r->N;
        r->K = b->smoke ? r->K / 64 : r->K;
        flops = 2.0 * (double)r->M * (double)r->N * (double)r->K;
        if (r->use == HEAD) {
            take_loss(b, r);
            wrong += run_row(b, r, "loss", 3 * flops, whole_loss);
        } else {
            take_product(b, r);
            wrong += run_row(b, r, "forward", flops, forward_product);
            if (r->use == UP)
                wrong += run_row(b, r, "+gelu", flops, gelu_product);
            if (r->use == DOWN)
                wrong += run_row(b, r, "+onto", flops, added_product);
            wrong += run_row(b, r, "backward", 2 * flops, backward_product);
            if (r->use == DOWN)
                wrong += run_row(b, r, "+gelu'", 2 * flops, backward_through_gelu);
        }
        give_back(b, kept);
        if (r->use != HEAD && spw_gpu_get_info(b->gpu)->fp8)
            wrong += run_fp8(b, r);
    }
    return wrong;
}

/* Layers of experts: in one call, and one by one. */
static uint64_t
run_experts(bench *b)
{
    static row rows[] = {{.name = "qwen3-30B gate", .N = 768, .K = 2048, .experts = 128},
                         {.name = "qwen3-30B down", .N = 2048, .K = 768, .experts = 128},
                         {.name = "gpt-oss-20B up", .N = 5760, .K = 2880, .experts = 32, .in_out = true}};
    const bool host = spw_gpu_get_info(b->gpu)->host_addressable;
    uint64_t wrong = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && b->err.status == SPW_OK; i++) {
        row *r = &rows[i];
        uint32_t kept = b->array_count;
        double flops;
        r->experts = host || b->smoke ? r->experts / 16 + 3 : r->experts;
        r->M = b->smoke ? 60 : host ? 1024 : 32768;
        r->N = b->smoke ? r->N / 64 + 1 : r->N;
        r->K = b->smoke ? r->K / 64 : r->K;
        flops = 2.0 * (double)r->M * (double)r->N * (double)r->K;
        take_product(b, r);
        wrong += run_row(b, r, "each", flops, forward_each);
        wrong += run_row(b, r, "alone", flops, forward_alone);
        wrong += run_row(b, r, "each'", 2 * flops, backward_each);
        wrong += run_row(b, r, "alone'", 2 * flops, backward_alone);
        give_back(b, kept);
    }
    return wrong;
}

static uint64_t
run_attention(bench *b)
{
    static row rows[] = {{.name = "gpt2-124M", .shape = {.B = 16, .T = 1024, .Hq = 12, .Hk = 12, .D = 64}},
                         {.name = "gpt2-1.5B", .shape = {.B = 8, .T = 1024, .Hq = 25, .Hk = 25, .D = 64}},
                         {.name = "llama-1B", .shape = {.B = 4, .T = 2048, .Hq = 32, .Hk = 8, .D = 64}},
                         {.name = "llama-8B", .shape = {.B = 2, .T = 4096, .Hq = 32, .Hk = 8, .D = 128}},
                         {.name = "gemma-2B", .shape = {.B = 2, .T = 2048, .Hq = 8, .Hk = 1, .D = 256}}};
    uint64_t wrong = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && b->err.status == SPW_OK; i++) {
        row *r = &rows[i];
        spw_attention_shape *s = &r->shape;
        uint32_t kept = b->array_count, bytes = spw_dtype_bytes(b->type);
        double flops;
        if (spw_gpu_get_info(b->gpu)->host_addressable)
            s->B = 1, s->T /= 4;
        if (b->smoke)
            s->B = 1, s->T = 33, s->Hk = s->Hk > 1 ? 2 : 1, s->Hq = 2 * s->Hk;
        s->q_stride = s->kv_stride = (s->Hq + 2 * s->Hk) * s->D;
        s->scale = 1 / sqrtf((float)s->D);
        flops = 2.0 * (double)s->B * (double)s->T * (double)s->T * (double)(s->Hq * s->D);
        r->a[QKV] = take_filled(b, s->B * s->T * s->q_stride, 0);
        r->a[OUT] = take(b, s->B * s->T * s->Hq * s->D * bytes);
        r->a[LSE] = take(b, s->B * s->T * s->Hq * sizeof(float));
        r->a[DOUT] = take_filled(b, s->B * s->T * s->Hq * s->D, 5);
        r->a[DQKV] = take(b, s->B * s->T * s->q_stride * bytes);
        wrong += run_row(b, r, "forward", flops, forward_attention);
        wrong += run_row(b, r, "backward", 2.5 * flops, backward_attention);
        give_back(b, kept);
    }
    return wrong;
}

/* ---------------------------------------------------------------- the commands */

static void
bench_open(bench *b)
{
    spw_gpu_options options = {.name = b->device, .compute_dtype = b->dtype};
    make_pattern(b);
    if (spw_gpu_open(&b->gpu, &options, &b->err) != SPW_OK ||
        spw_gpu_queue_create(&b->queue, b->gpu, SPW_QUEUE_COMPUTE, &b->err) != SPW_OK)
        return;
    b->type = spw_gpu_get_info(b->gpu)->compute_dtype;
    if (spw_gpu_get_info(b->gpu)->peak_flops > 0)
        return;
    b->square_side = b->smoke ? 64 : 1024;
    b->square[0] = take_filled(b, b->square_side * b->square_side, 0);
    b->square[1] = take_filled(b, b->square_side * b->square_side, 77);
    b->square[2] = take(b, b->square_side * b->square_side * spw_dtype_bytes(b->type));
}

static void
bench_close(bench *b)
{
    if (b->gpu == NULL)
        return;
    if (b->queue != NULL)
        spw_gpu_queue_sync(b->queue);
    give_back(b, 0);
    spw_gpu_queue_destroy(b->queue);
    spw_gpu_close(b->gpu);
}

static int
parse_options(bench *b, const char *command, int argc, char **argv)
{
    static const char *const with_value[] = {"--device", "--compute", "--seconds", NULL};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        if (strcmp(name, "--json") == 0) {
            b->json = true;
            continue;
        }
        if (strcmp(name, "--smoke") == 0) {
            b->smoke = true;
            continue;
        }
        if ((value = cli_known_value(command, with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if (strcmp(name, "--device") == 0) {
            b->device = value;
        } else if (strcmp(name, "--compute") == 0) {
            int t = 0;
            while (t < SPW_DTYPE_COUNT && strcmp(value, spw_dtype_name((spw_dtype)t)) != 0)
                t++;
            if (t == SPW_DTYPE_COUNT)
                return cli_usage(command, "--compute %s: fp32, bf16 or fp16", value);
            b->dtype = (spw_dtype)t;
        } else {
            char *end;
            b->seconds = strtod(value, &end);
            if (end == value || *end != '\0' || !(b->seconds > 0) || b->seconds > 3600)
                return cli_usage(command, "--seconds %s is not a number above 0 and up to 3600", value);
        }
    }
    return EXIT_DONE;
}

int
cli_bench_device(int argc, char **argv)
{
    static bench b; /* large */
    bool products = strcmp(argv[0], "gemm") == 0;
    uint64_t wrong = 0;
    b = (bench){.name = products ? "gemm" : "attention", .device = "auto", .dtype = SPW_BF16, .seconds = 0.5};
    if (parse_options(&b, products ? "bench gemm" : "bench attention", argc, argv) != EXIT_DONE)
        return EXIT_USAGE;
    bench_open(&b);
    if (b.err.status == SPW_OK)
        print_header(&b);
    if (b.err.status == SPW_OK)
        wrong = products ? run_gemm(&b) + run_experts(&b) : run_attention(&b);
    bench_close(&b);
    if (b.err.status == SPW_OK && wrong > 0)
        (void)SPW_RAISE(&b.err, SPW_ECORRUPT, "bench %s: %llu samples of results are wrong", b.name,
                        (unsigned long long)wrong);
    return b.err.status == SPW_OK ? EXIT_DONE : cli_fail(&b.err);
}
