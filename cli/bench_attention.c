/*
 * spillway bench attention: what a device computes in causal attention at the shapes of real models, forward and backward.
 *
 * Operations are what the formula needs, not what kernels repeat: 4 of T^2 / 2 Hq D per sequence, and 2.5 times that for its backward.
 */
#include "bench_device.h"
#include <math.h>

/* Of arrays; qkv are packed rows of q, k and v. */
enum { QKV, OUT, LSE, DOUT, DQKV };

static const void *
column(const device_bench *b, void *qkv, uint64_t elems)
{
    return (const char *)qkv + elems * spw_dtype_bytes(b->type);
}

static void
forward_attention(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    uint64_t k = r->shape.Hq * r->shape.D, v = k + r->shape.Hk * r->shape.D;
    spw_gpu_attention(b->queue, a[OUT], a[LSE], a[QKV], column(b, a[QKV], k), column(b, a[QKV], v), &r->shape);
}

static void
backward_attention(device_bench *b, const device_row *r)
{
    void *const *a = r->a;
    uint64_t k = r->shape.Hq * r->shape.D, v = k + r->shape.Hk * r->shape.D;
    spw_gpu_attention_backward(b->queue, a[DQKV], (void *)(uintptr_t)column(b, a[DQKV], k),
                               (void *)(uintptr_t)column(b, a[DQKV], v), NULL, a[DOUT], a[OUT], a[LSE], a[QKV],
                               column(b, a[QKV], k), column(b, a[QKV], v), &r->shape);
}

/* Elements of out: softmax over the keys before them, in fp64. */
static void
check_attention(device_bench *b, device_row *r)
{
    const spw_attention_shape *s = &r->shape;
    void *const *a = r->a;
    double *p = spw_mem_calloc(s->T, sizeof *p);
    for (uint64_t k = 0; p != NULL && k < BENCH_SAMPLES; k++) {
        uint64_t rows = s->B * s->T, at_row = (k * 7919 + rows / 2) % rows, t = at_row % s->T, first = at_row - t;
        uint64_t h = k % s->Hq, d = k * 13 % s->D, hk = h / (s->Hq / s->Hk);
        uint64_t key = s->Hq * s->D + hk * s->D, value = key + s->Hk * s->D;
        double top = -INFINITY, sum = 0, want = 0;
        for (uint64_t u = 0; u <= t; u++) {
            p[u] = 0;
            for (uint64_t i = 0; i < s->D; i++)
                p[u] += pattern_at(b, at_row * s->q_stride + h * s->D + i, 0) *
                        pattern_at(b, (first + u) * s->kv_stride + key + i, 0);
            p[u] *= (double)s->scale;
            top = fmax(top, p[u]);
        }
        for (uint64_t u = 0; u <= t; u++) {
            sum += exp(p[u] - top);
            want += exp(p[u] - top) * pattern_at(b, (first + u) * s->kv_stride + value + d, 0);
        }
        r->wrong += !cli_device_is_near(b, a[OUT], at_row * s->Hq * s->D + h * s->D + d, want / sum,
                                        0.25 / sqrt((double)t + 1));
    }
    if (p == NULL)
        (void)SPW_RAISE(&b->err, SPW_ENOMEM, "bench attention: scores of %llu keys", (unsigned long long)s->T);
    spw_mem_free(p);
}

static uint64_t
run_attention(device_bench *b)
{
    static device_row rows[] = {{.name = "gpt2-124M", .shape = {.B = 16, .T = 1024, .Hq = 12, .Hk = 12, .D = 64}},
                                {.name = "gpt2-1.5B", .shape = {.B = 8, .T = 1024, .Hq = 25, .Hk = 25, .D = 64}},
                                {.name = "llama-1B", .shape = {.B = 4, .T = 2048, .Hq = 32, .Hk = 8, .D = 64}},
                                {.name = "llama-8B", .shape = {.B = 2, .T = 4096, .Hq = 32, .Hk = 8, .D = 128}},
                                {.name = "gemma-2B", .shape = {.B = 2, .T = 2048, .Hq = 8, .Hk = 1, .D = 256}},
                                {.name = "gemma-4-31B", .shape = {.B = 1, .T = 4096, .Hq = 32, .Hk = 4, .D = 512}}};
    uint64_t wrong = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && b->err.status == SPW_OK; i++) {
        device_row *r = &rows[i];
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
        r->a[QKV] = cli_device_take_filled(b, s->B * s->T * s->q_stride, 0);
        r->a[OUT] = cli_device_take(b, s->B * s->T * s->Hq * s->D * bytes);
        r->a[LSE] = cli_device_take(b, s->B * s->T * s->Hq * sizeof(float));
        r->a[DOUT] = cli_device_take_filled(b, s->B * s->T * s->Hq * s->D, 5);
        r->a[DQKV] = cli_device_take(b, s->B * s->T * s->q_stride * bytes);
        wrong += cli_device_run_row(b, r, "forward", flops, forward_attention, check_attention);
        wrong += cli_device_run_row(b, r, "backward", 2.5 * flops, backward_attention, NULL);
        cli_device_give_back(b, kept);
    }
    return wrong + cli_bench_delta_rows(b);
}

int
cli_bench_attention(int argc, char **argv)
{
    return cli_device_run_bench("attention", run_attention, argc, argv);
}
