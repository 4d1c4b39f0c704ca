/*
 * Rows of spillway bench attention: linear attention by the gated delta rule at the shapes of real models, forward and backward.
 *
 * Operations are the formula's: 6 Dk Dv for each row and head (what the state gives for the key, what is written, what the query reads), and 12
 * for its backward.
 */
#include "bench_device.h"
#include <math.h>

/* Of arrays: a and b one behind the other, their gradients likewise; log_a and dt_bias. */
enum { QKV, AB, PARAMS, OUT, DELTA, DOUT, DQKV, DAB, SCRATCH };

static const void *
behind(const device_bench *b, const void *array, uint64_t elems)
{
    return (const char *)array + elems * spw_dtype_bytes(b->type);
}

static spw_delta_inputs
inputs(const device_bench *b, const device_row *r)
{
    const spw_delta_shape *s = &r->rule;
    return (spw_delta_inputs){.qkv = r->a[QKV],
                              .a = r->a[AB],
                              .b = behind(b, r->a[AB], s->B * s->T * s->Hv),
                              .log_a = r->a[PARAMS],
                              .dt_bias = behind(b, r->a[PARAMS], s->Hv)};
}

static void
forward(device_bench *b, const device_row *r)
{
    spw_delta_inputs in = inputs(b, r);
    spw_gpu_delta(b->queue, r->a[OUT], r->a[DELTA], &in, &r->rule);
}

static void
backward(device_bench *b, const device_row *r)
{
    spw_delta_inputs in = inputs(b, r);
    void *db = (void *)(uintptr_t)behind(b, r->a[DAB], r->rule.B * r->rule.T * r->rule.Hv);
    spw_gpu_delta_backward(b->queue, r->a[DQKV], r->a[DAB], db, NULL, NULL, NULL, r->a[DOUT], r->a[DELTA],
                           r->a[SCRATCH], &in, &r->rule);
}

static double
length_at(const device_bench *b, uint64_t from, uint64_t n)
{
    double sum = 1e-6;
    for (uint64_t i = 0; i < n; i++)
        sum += pattern_at(b, from + i, 0) * pattern_at(b, from + i, 0);
    return sqrt(sum);
}

/* One row of the last sequence's last head, in fp64: its state goes on, and out (Dv) is what the row reads. */
static void
step(const device_bench *b, const spw_delta_shape *s, uint64_t row, double *state, double *out)
{
    uint64_t width = 2 * s->Hk * s->Dk + s->Hv * s->Dv, h = s->Hv - 1, at = row * s->Hv + h;
    uint64_t q = row * width + (s->Hk - 1) * s->Dk, k = q + s->Hk * s->Dk, v = (row + 1) * width - s->Dv;
    double q_length = length_at(b, q, s->Dk) * sqrt((double)s->Dk), k_length = length_at(b, k, s->Dk);
    double beta = 1 / (1 + exp(-pattern_at(b, s->B * s->T * s->Hv + at, 0)));
    double decay = exp(-exp(pattern_at(b, h, 0)) * log1p(exp(pattern_at(b, at, 0) + pattern_at(b, s->Hv + h, 0))));
    for (uint64_t j = 0; j < s->Dv; j++) {
        double seen = 0;
        out[j] = 0;
        for (uint64_t i = 0; i < s->Dk; i++)
            seen += (state[i * s->Dv + j] *= decay) * pattern_at(b, k + i, 0) / k_length;
        for (uint64_t i = 0; i < s->Dk; i++) {
            state[i * s->Dv + j] += pattern_at(b, k + i, 0) / k_length * beta * (pattern_at(b, v + j, 0) - seen);
            out[j] += state[i * s->Dv + j] * pattern_at(b, q + i, 0) / q_length;
        }
    }
}

static void
check(device_bench *b, device_row *r)
{
    const spw_delta_shape *s = &r->rule;
    uint64_t first = (s->B - 1) * s->T, last = s->T - 1, sample = 0;
    double *state = spw_mem_zalloc((s->Dk + 1) * s->Dv * sizeof *state), *out = state + s->Dk * s->Dv;
    if (state == NULL) {
        (void)SPW_RAISE(&b->err, SPW_ENOMEM, "bench attention: a state");
        return;
    }
    for (uint64_t t = 0; t < s->T; t++) {
        step(b, s, first + t, state, out);
        for (; sample < BENCH_SAMPLES && sample * last / (BENCH_SAMPLES - 1) == t; sample++) {
            uint64_t j = sample * 13 % s->Dv;
            r->wrong += !cli_device_is_near(b, r->a[OUT], ((first + t + 1) * s->Hv - 1) * s->Dv + j, out[j], 0.02);
        }
    }
    spw_mem_free(state);
}

uint64_t
cli_bench_delta_rows(device_bench *b)
{
    static device_row rows[] = {
        {.name = "qwen3.5-2B delta", .rule = {.B = 4, .T = 2048, .Hk = 16, .Hv = 16, .Dk = 128, .Dv = 128}},
        {.name = "qwen3.5-9B delta", .rule = {.B = 2, .T = 4096, .Hk = 16, .Hv = 32, .Dk = 128, .Dv = 128}}};
    uint64_t wrong = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && b->err.status == SPW_OK; i++) {
        device_row *r = &rows[i];
        spw_delta_shape *s = &r->rule;
        uint32_t kept = b->array_count, bytes = spw_dtype_bytes(b->type);
        uint64_t M, width, out;
        double flops;
        if (spw_gpu_get_info(b->gpu)->host_addressable)
            s->B = 1, s->T /= 4;
        if (b->smoke)
            s->B = 1, s->T = 33, s->Hk = 1, s->Hv = 2;
        M = s->B * s->T;
        width = 2 * s->Hk * s->Dk + s->Hv * s->Dv;
        out = M * s->Hv * s->Dv;
        flops = 6.0 * (double)(out * s->Dk);
        r->shape = (spw_attention_shape){.B = s->B, .T = s->T, .Hq = s->Hv}; /* as the table shows it */
        r->a[QKV] = cli_device_take_filled(b, M * width, 0);
        r->a[AB] = cli_device_take_filled(b, 2 * M * s->Hv, 0);
        r->a[PARAMS] = cli_device_take_filled(b, 2 * s->Hv, 0);
        r->a[OUT] = cli_device_take(b, out * bytes);
        r->a[DELTA] = cli_device_take(b, out * sizeof(float));
        r->a[DOUT] = cli_device_take_filled(b, out, 5);
        r->a[DQKV] = cli_device_take(b, M * width * bytes);
        r->a[DAB] = cli_device_take(b, 2 * M * s->Hv * bytes);
        r->a[SCRATCH] = cli_device_take(b, spw_gpu_delta_scratch(s) * sizeof(float));
        wrong += cli_device_run_row(b, r, "forward", flops, forward, check);
        wrong += cli_device_run_row(b, r, "backward", 2 * flops, backward, NULL);
        cli_device_give_back(b, kept);
    }
    return wrong;
}
