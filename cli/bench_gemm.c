/*
 * spillway bench gemm: what a device computes in products at the shapes of real models, forward and backward.
 *
 * Operations are what the formula needs, not what kernels repeat: 2 M N K for a product. Rows marked + do more in the same call: bias
 * and gelu, onto another array, back through a gelu; a loss is three products and all between them. Rows "each" are products of a
 * layer's experts, M rows unevenly over them, by one call, and "alone" the same by a call for each expert. Rows of fp8 find the scale of x
 * and encode it, and multiply its codes by the weights', whose are made before.
 */
#include "bench_device.h"
#include <math.h>

/* ---------------------------------------------------------------- products: x, dx (M, K), w, dw (N, K), y, dy (M, N) */

enum { X, W, Y, DY, DX, DW, GELU_IN, X_CODES, W_CODES, TARGETS = Y, LOSSES = DY, LOGITS = GELU_IN };

static void
forward_product(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    spw_gpu_linear(b->queue, a[Y], a[X], a[W], NULL, r->M, r->N, r->K, 0);
}

static void
backward_product(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_backward(b->queue, a[DX], a[DW], NULL, a[DY], a[X], a[W], r->M, r->N, r->K, 0);
}

/* Into a gelu, with a bias (the first row of dy). */
static void
gelu_product(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_gelu(b->queue, a[Y], a[GELU_IN], a[X], a[W], a[DY], r->M, r->N, r->K, 0);
}

/* Onto dy. */
static void
added_product(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_add(b->queue, a[Y], a[DY], a[X], a[W], NULL, r->M, r->N, r->K, 0);
}

/* As if x had come out of a gelu and were also what went in: the values are of no matter to dw, which nobody looks at. */
static void
backward_through_gelu(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_gelu_backward(b->queue, a[DX], a[DW], NULL, a[DY], a[X], a[X], a[W], r->M, r->N, r->K, 0);
}

/* Codes, and behind them their scale. */
static spw_fp8_matrix
code(device_bench *b, const device_row *r, int from, int to, uint64_t rows)
{
    uint8_t *codes = r->a[to];
    float *scale = (float *)(void *)(codes + rows * r->K);
    spw_gpu_fp8_scale(b->queue, scale, SPW_E4M3, r->a[from], rows * r->K);
    spw_gpu_fp8_encode(b->queue, codes, NULL, SPW_E4M3, scale, r->a[from], rows, r->K);
    return (spw_fp8_matrix){codes, scale, SPW_E4M3};
}

static void
fp8_product(device_bench *b, const device_row *r)
{
    spw_fp8_matrix w = {r->a[W_CODES], (const float *)(const void *)((const char *)r->a[W_CODES] + r->N * r->K),
                        SPW_E4M3};
    spw_gpu_fp8_product(
        b->queue,
        &(spw_fp8_product){.y = r->a[Y], .a = code(b, r, X, X_CODES, r->M), .b = w, .M = r->M, .N = r->N, .K = r->K});
}

static uint64_t
loss_rows(const device_bench *b, const device_row *r)
{
    return r->M < spw_gpu_get_info(b->gpu)->loss_rows ? r->M : spw_gpu_get_info(b->gpu)->loss_rows;
}

static void
whole_loss(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    spw_gpu_linear_cross_entropy(b->queue, a[LOSSES], a[DX], a[DW], a[X], a[W], a[TARGETS], NULL, a[LOGITS],
                                 loss_rows(b, r), r->M, r->N, r->K, 1.0f / (float)r->M, 0, SPW_OP_SET_DW);
}

/* ---------------------------------------------------------------- products of experts, whose weights lie one behind the other */

/* How many of the rows go to experts in front of this one: expert i has 1 to 4 shares. */
static uint64_t
rows_before(const device_row *r, uint64_t expert)
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
tell_each(const device_bench *b, const device_row *r, expert_arrays *a)
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
forward_each(device_bench *b, const device_row *r)
{
    expert_arrays a;
    spw_each e = tell_each(b, r, &a);
    spw_gpu_linear_each(b->queue, r->a[Y], r->a[X], &e, r->in_out ? SPW_OP_W_IN_OUT : 0);
}

static void
backward_each(device_bench *b, const device_row *r)
{
    expert_arrays a;
    spw_each e = tell_each(b, r, &a);
    spw_gpu_linear_each_backward(b->queue, r->a[DX], r->a[DY], r->a[X], &e, r->in_out ? SPW_OP_W_IN_OUT : 0);
}

static void
forward_alone(device_bench *b, const device_row *r)
{
    const uint64_t bytes = spw_dtype_bytes(b->type);
    expert_arrays a;
    (void)tell_each(b, r, &a);
    for (uint64_t i = 0, at = 0; i < r->experts; at = a.ends[i++])
        spw_gpu_linear(b->queue, (char *)r->a[Y] + at * r->N * bytes, (char *)r->a[X] + at * r->K * bytes, a.w[i], NULL,
                       a.ends[i] - at, r->N, r->K, r->in_out ? SPW_OP_W_IN_OUT : 0);
}

static void
backward_alone(device_bench *b, const device_row *r)
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
check_each(device_bench *b, device_row *r)
{
    const bool backward = r->work == backward_each || r->work == backward_alone;
    const uint64_t N = r->N, K = r->K, columns = backward ? K : N, depth = backward ? N : K;
    for (uint64_t s = 0; s < BENCH_SAMPLES; s++) {
        uint64_t i = (s * 7919 + 1) * (r->M * columns / BENCH_SAMPLES + 1) % (r->M * columns), m = i / columns, e = 0;
        double want = 0;
        while (m >= rows_before(r, e + 1))
            e++;
        for (uint64_t k = 0; k < depth; k++) {
            uint64_t n = backward ? k : i % columns, in = backward ? i % columns : k;
            want += (backward ? pattern_at(b, m * N + k, 5) : pattern_at(b, m * K + k, 0)) *
                    pattern_at(b, e * N * K + (r->in_out ? in * N + n : n * K + in), 77);
        }
        r->wrong += !cli_device_is_near(b, r->a[backward ? DX : Y], i, want, sqrt((double)depth) / 48);
    }
    for (uint64_t s = 0; s < BENCH_SAMPLES && backward; s++) {
        uint64_t e = s * 7919 % r->experts, n = s * 104729 % N, k = s * 1299709 % K, end = rows_before(r, e + 1);
        double want = 0;
        float got;
        for (uint64_t m = rows_before(r, e); m < end; m++)
            want += pattern_at(b, m * N + n, 5) * pattern_at(b, m * K + k, 0);
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

/* Elements of y = x w^T, or of dx = dy w, spread over all of it, with what the row does besides. */
static void
check_product(device_bench *b, device_row *r)
{
    void *const *a = r->a;
    bool backward = r->work == backward_product || r->work == backward_through_gelu;
    uint64_t columns = backward ? r->K : r->N, depth = backward ? r->N : r->K;
    for (uint64_t s = 0; s < BENCH_SAMPLES; s++) {
        uint64_t i = (s * 7919 + 1) * (r->M * columns / BENCH_SAMPLES + 1) % (r->M * columns), m = i / columns,
                 c = i % columns;
        double want = 0;
        for (uint64_t k = 0; k < depth; k++)
            want += backward ? pattern_at(b, m * r->N + k, 5) * pattern_at(b, k * r->K + c, 77)
                             : pattern_at(b, m * r->K + k, 0) * pattern_at(b, c * r->K + k, 77);
        if (r->work == added_product)
            want += pattern_at(b, i, 5);
        else if (r->work == gelu_product)
            want = gelu(want + pattern_at(b, c, 5), false);
        else if (r->work == backward_through_gelu)
            want *= gelu(pattern_at(b, i, 0), true);
        r->wrong += !cli_device_is_near(b, backward ? a[DX] : a[Y], i, want, sqrt((double)depth) / 48);
    }
}

/* The same of codes: three bits of mantissa are off by 0.03 in the mean, a wrong scale by half at least. */
static void
check_fp8(device_bench *b, device_row *r)
{
    for (uint64_t s = 0; s < BENCH_SAMPLES; s++) {
        uint64_t i = (s * 7919 + 1) * (r->M * r->N / BENCH_SAMPLES + 1) % (r->M * r->N);
        double want = 0, rms = sqrt((double)r->K) / 48;
        float got;
        for (uint64_t k = 0; k < r->K; k++)
            want += pattern_at(b, i / r->N * r->K + k, 0) * pattern_at(b, i % r->N * r->K + k, 77);
        spw_gpu_copy_d2h(b->queue, &got, SPW_F32, (const char *)r->a[Y] + i * spw_dtype_bytes(b->type), b->type, 1,
                         NULL);
        spw_gpu_queue_sync(b->queue);
        r->wrong += !(fabs((double)got - want) < 0.25 * rms);
    }
}

static int32_t
target_of(const device_row *r, uint64_t m)
{
    return (int32_t)(m * 7919 % r->N);
}

/* Losses of a few rows, in fp64. */
static void
check_loss(device_bench *b, device_row *r)
{
    enum { ROWS = 4 };
    for (uint64_t s = 0; s < ROWS; s++) {
        uint64_t m = s * (r->M - 1) / (ROWS - 1);
        double sum = 0, target = 0;
        float got;
        for (uint64_t v = 0; v < r->N; v++) {
            double logit = 0;
            for (uint64_t k = 0; k < r->K; k++)
                logit += pattern_at(b, m * r->K + k, 0) * pattern_at(b, v * r->K + k, 77);
            sum += exp(logit);
            target = (uint64_t)target_of(r, m) == v ? logit : target;
        }
        spw_gpu_read_bytes(b->queue, &got, (float *)r->a[LOSSES] + m, sizeof got);
        r->wrong += !(fabs((double)got - (log(sum) - target)) < 0.02 * (1 + fabs(target)));
    }
}

/* ---------------------------------------------------------------- the rows */

static void
take_product(device_bench *b, device_row *r)
{
    uint64_t elem = spw_dtype_bytes(b->type), weights = r->N * r->K * (r->experts > 0 ? r->experts : 1);
    r->a[X] = cli_device_take_filled(b, r->M * r->K, 0);
    r->a[W] = cli_device_take_filled(b, weights, 77);
    r->a[Y] = cli_device_take(b, r->M * r->N * elem);
    r->a[DY] = cli_device_take_filled(b, r->M * r->N, 5);
    r->a[DX] = cli_device_take(b, r->M * r->K * elem);
    r->a[DW] = cli_device_take(b, weights * sizeof(float));
    r->a[GELU_IN] = r->use == UP ? cli_device_take(b, r->M * r->N * elem) : NULL;
}

/* The same after what the row before left has gone: a call that wrote nothing would show it. */
static uint64_t
run_product(device_bench *b, device_row *r, const char *what, double flops, device_work work, device_check check)
{
    uint64_t elem = spw_dtype_bytes(b->type);
    if (b->err.status == SPW_OK) {
        spw_gpu_zero(b->queue, r->a[Y], r->M * r->N * elem);
        spw_gpu_zero(b->queue, r->a[DX], r->M * r->K * elem);
        spw_gpu_zero(b->queue, r->a[DW], r->N * r->K * (r->experts > 0 ? r->experts : 1) * sizeof(float));
    }
    return cli_device_run_row(b, r, what, flops, work, check);
}

/* A product of codes beside its plain one, of multiples of 16. */
static uint64_t
run_fp8(device_bench *b, const device_row *plain)
{
    uint64_t wrong, elem = spw_dtype_bytes(b->type);
    uint32_t kept = b->array_count;
    device_row r = *plain;
    r.M = spw_round_up(r.M, 16);
    r.N = spw_round_up(r.N, 16);
    r.K = spw_round_up(r.K, 16);
    r.a[X] = cli_device_take_filled(b, r.M * r.K, 0);
    r.a[W] = cli_device_take_filled(b, r.N * r.K, 77);
    r.a[Y] = cli_device_take(b, r.M * r.N * elem);
    r.a[X_CODES] = cli_device_take(b, r.M * r.K + sizeof(float));
    r.a[W_CODES] = cli_device_take(b, r.N * r.K + sizeof(float));
    if (b->err.status == SPW_OK)
        (void)code(b, &r, W, W_CODES, r.N);
    wrong = cli_device_run_row(b, &r, "fp8", 2.0 * (double)r.M * (double)r.N * (double)r.K, fp8_product, check_fp8);
    cli_device_give_back(b, kept);
    return wrong;
}

static void
take_loss(device_bench *b, device_row *r)
{
    uint64_t elem = spw_dtype_bytes(b->type);
    r->a[X] = cli_device_take_filled(b, r->M * r->K, 0);
    r->a[W] = cli_device_take_filled(b, r->N * r->K, 77);
    r->a[TARGETS] = cli_device_take(b, r->M * sizeof(int32_t));
    r->a[LOSSES] = cli_device_take(b, r->M * sizeof(float));
    r->a[DX] = cli_device_take(b, r->M * r->K * elem);
    r->a[DW] = cli_device_take(b, r->N * r->K * sizeof(float));
    r->a[LOGITS] = cli_device_take(b, loss_rows(b, r) * spw_gpu_logits_stride(r->N) * elem);
    for (uint64_t m = 0; m < r->M && b->err.status == SPW_OK; m++) {
        int32_t target = target_of(r, m);
        spw_gpu_write_bytes(b->queue, (int32_t *)r->a[TARGETS] + m, &target, sizeof target);
    }
}

/* The products of a model, each with what the engine has it do on its way out, and without. */
static uint64_t
run_products(device_bench *b)
{
    static device_row rows[] = {{.name = "gpt2-124M qkv", .N = 2304, .K = 768},
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
        device_row *r = &rows[i];
        uint32_t kept = b->array_count;
        double flops;
        r->M = b->smoke ? 24 : rows_each;
        r->N = b->smoke ? r->N / 64 + 1 : r->N;
        r->K = b->smoke ? r->K / 64 : r->K;
        flops = 2.0 * (double)r->M * (double)r->N * (double)r->K;
        if (r->use == HEAD) {
            take_loss(b, r);
            wrong += cli_device_run_row(b, r, "loss", 3 * flops, whole_loss, check_loss);
        } else {
            take_product(b, r);
            wrong += run_product(b, r, "forward", flops, forward_product, check_product);
            if (r->use == UP)
                wrong += run_product(b, r, "+gelu", flops, gelu_product, check_product);
            if (r->use == DOWN)
                wrong += run_product(b, r, "+onto", flops, added_product, check_product);
            wrong += run_product(b, r, "backward", 2 * flops, backward_product, check_product);
            if (r->use == DOWN)
                wrong += run_product(b, r, "+gelu'", 2 * flops, backward_through_gelu, check_product);
        }
        cli_device_give_back(b, kept);
        if (r->use != HEAD && spw_gpu_get_info(b->gpu)->fp8)
            wrong += run_fp8(b, r);
    }
    return wrong;
}

/* Layers of experts: in one call, and one by one. */
static uint64_t
run_experts(device_bench *b)
{
    static device_row rows[] = {{.name = "qwen3-30B gate", .N = 768, .K = 2048, .experts = 128},
                                {.name = "qwen3-30B down", .N = 2048, .K = 768, .experts = 128},
                                {.name = "gpt-oss-20B up", .N = 5760, .K = 2880, .experts = 32, .in_out = true}};
    const bool host = spw_gpu_get_info(b->gpu)->host_addressable;
    uint64_t wrong = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && b->err.status == SPW_OK; i++) {
        device_row *r = &rows[i];
        uint32_t kept = b->array_count;
        double flops;
        r->experts = host || b->smoke ? r->experts / 16 + 3 : r->experts;
        r->M = b->smoke ? 60 : host ? 1024 : 32768;
        r->N = b->smoke ? r->N / 64 + 1 : r->N;
        r->K = b->smoke ? r->K / 64 : r->K;
        flops = 2.0 * (double)r->M * (double)r->N * (double)r->K;
        take_product(b, r);
        wrong += run_product(b, r, "each", flops, forward_each, check_each);
        wrong += run_product(b, r, "alone", flops, forward_alone, check_each);
        wrong += run_product(b, r, "each'", 2 * flops, backward_each, check_each);
        wrong += run_product(b, r, "alone'", 2 * flops, backward_alone, check_each);
        cli_device_give_back(b, kept);
    }
    return wrong;
}

static uint64_t
run_gemm(device_bench *b)
{
    uint64_t wrong = run_products(b);
    return wrong + run_experts(b);
}

int
cli_bench_gemm(int argc, char **argv)
{
    return cli_device_run_bench("gemm", run_gemm, argc, argv);
}
