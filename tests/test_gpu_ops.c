/*
 * Every operation of the cpu device but attention (test_gpu_attention) against naive loops in double, and every backward against
 * central differences of those loops, element by element; with the kernels of every instruction set of this CPU, 1, 2 and 5
 * threads giving the same bits.
 */
#include "lib_ops.h"
#include "lib_parity.h"
#include "quant.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- linear: d = M, N, K */

static void
linear_ref(const ops_subject *s, double *const *in, double *out)
{
    const uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    const bool in_out = (s->flags & SPW_OP_W_IN_OUT) != 0;
    const uint64_t each = in_out ? N : 1;
    for (uint64_t m = 0; m < M; m++)
        for (uint64_t n = 0; n < N; n++) {
            const double *x = in[0] + m * K, *w = in[1] + (in_out ? n : n * K);
            double sum = in[2][n];
            for (uint64_t k = 0; k < K; k++)
                sum += x[k] * w[k * each];
            out[m * N + n] = sum;
        }
}

static void
linear_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_linear(q, out, in[0], in[1], in[2], s->d[0], s->d[1], s->d[2], s->flags);
}

static void
linear_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
           float *const *g)
{
    (void)out;
    if (s->flags & SPW_OP_SET_DW)
        memset(g[1], 0xff, s->n[1] * sizeof(float)); /* not to be looked at */
    spw_gpu_linear_backward(q, g[0], g[1], g[2], dout, in[0], in[1], s->d[0], s->d[1], s->d[2], s->flags);
}

/* y = x w + b in both weight layouts, odd sizes and sizes that are cut, dx written and added to. */
static void
test_linear(void **state)
{
    static const uint64_t sizes[][3] = {{1, 1, 1}, {3, 7, 5}, {17, 33, 19}, {1, 130, 40}, {130, 3, 65}, {64, 70, 260}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (unsigned f = 0; f < 6; f++) {
            uint64_t M = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
            unsigned flags = (f & 1 ? SPW_OP_W_IN_OUT : 0) | (f & 2 ? SPW_OP_ACC_DX : 0) | (f & 4 ? SPW_OP_SET_DW : 0);
            ops_examine(&(ops_subject){
                "linear", 3, {M * K, N * K, N}, M * N, {M, N, K}, flags, linear_ref, linear_fwd, linear_bwd});
        }
    }
}

static double
gelu_of(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void
linear_add_ref(const ops_subject *s, double *const *in, double *out)
{
    linear_ref(s, in, out);
    for (uint64_t i = 0; i < s->out_n; i++)
        out[i] += in[3][i];
}

/* Onto another array without and with a bias, which is taken off again, and in place. */
static void
linear_add_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    spw_gpu_linear_add(q, ops_saved[0], in[3], in[0], in[1], NULL, M, N, K, s->flags);
    spw_gpu_linear_add(q, ops_saved[1], in[3], in[0], in[1], in[2], M, N, K, s->flags);
    for (uint64_t i = 0; i < s->out_n; i++)
        assert_true(fabsf(ops_saved[1][i] - ops_saved[0][i] - in[2][i % N]) < 1e-4f);
    memcpy(out, in[3], s->out_n * sizeof *out);
    if (s->flags & SPW_OP_BY_ROW)
        spw_gpu_linear_add(q, out, in[3], in[0], in[1], in[2], M, N, K, s->flags);
    else
        spw_gpu_linear_add(q, out, out, in[0], in[1], in[2], M, N, K, s->flags);
    assert_memory_equal(out, ops_saved[1], s->out_n * sizeof *out);
}

static void
linear_gelu_ref(const ops_subject *s, double *const *in, double *out)
{
    linear_ref(s, in, out);
    for (uint64_t i = 0; i < s->out_n; i++)
        out[i] = gelu_of(out[i]);
}

static void
linear_gelu_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_linear_gelu(q, out, ops_saved[0], in[0], in[1], in[2], s->d[0], s->d[1], s->d[2], s->flags);
}

static void
linear_gelu_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
                float *const *g)
{
    spw_gpu_curve_backward(q, SPW_CURVE_GELU, ops_saved[1], dout, ops_saved[0], s->out_n, 0);
    linear_bwd(s, q, in, out, ops_saved[1], g);
}

/* Of a gelu: in[0] is what goes into it. */
static void
gelu_linear_ref(const ops_subject *s, double *const *in, double *out)
{
    static double x[OPS_N_MAX];
    double *after[OPS_INPUTS_MAX] = {x, in[1], in[2]};
    for (uint64_t i = 0; i < s->n[0]; i++)
        x[i] = gelu_of(in[0][i]);
    linear_ref(s, after, out);
}

static void
gelu_linear_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_curve(q, SPW_CURVE_GELU, ops_saved[0], in[0], s->n[0]);
    spw_gpu_linear(q, out, ops_saved[0], in[1], in[2], s->d[0], s->d[1], s->d[2], s->flags);
}

static void
gelu_linear_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
                float *const *g)
{
    (void)out;
    spw_gpu_linear_gelu_backward(q, g[0], g[1], g[2], dout, ops_saved[0], in[0], in[1], s->d[0], s->d[1], s->d[2],
                                 s->flags);
}

/* What a linear layer does on the way: added onto another array, into a gelu, and back through one. */
static void
test_linear_and_more(void **state)
{
    static const uint64_t sizes[][3] = {{1, 1, 1}, {3, 7, 5}, {17, 33, 19}, {130, 3, 65}, {64, 70, 260}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t M = sizes[i][0], N = sizes[i][1], K = sizes[i][2], n = M * N;
        for (unsigned f = 0; f < 4; f++) {
            unsigned flags = (f & 1 ? SPW_OP_W_IN_OUT : 0) | (f & 2 ? SPW_OP_BY_ROW : 0);
            ops_subject add = {"linear, added", 4,   {M * K, N * K, N, n}, n, {M, N, K}, flags, linear_add_ref,
                               linear_add_fwd,  NULL};
            ops_subject into = {"linear, gelu",
                                3,
                                {M * K, N * K, N},
                                n,
                                {M, N, K},
                                flags,
                                linear_gelu_ref,
                                linear_gelu_fwd,
                                f & 2 ? NULL : linear_gelu_bwd};
            ops_subject back = {"gelu, linear",
                                3,
                                {M * K, N * K, N},
                                n,
                                {M, N, K},
                                flags,
                                gelu_linear_ref,
                                gelu_linear_fwd,
                                f & 2 ? NULL : gelu_linear_bwd};
            ops_examine(&add);
            ops_examine(&into);
            ops_examine(&back);
        }
    }
}

/* Row by row: right in both layouts, sizes beyond a stripe of columns and rest rows; a row alone has the bits it has among others. */
static void
test_linear_by_row(void **state)
{
    static const uint64_t sizes[][3] = {{1, 1, 1},    {3, 7, 5},      {4, 33, 19},   {5, 130, 40},
                                        {9, 3, 65},   {6, 70, 260},   {2, 1100, 6},  {7, 600, 33},
                                        {11, 40, 16}, {13, 2, 16500}, {4, 600, 1000}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (unsigned f = 0; f < 4; f++) {
            uint64_t M = sizes[i][0], N = sizes[i][1], K = sizes[i][2], seed = i;
            unsigned flags = SPW_OP_BY_ROW | (f & 1 ? SPW_OP_W_IN_OUT : 0);
            float *x = malloc(M * K * 4), *w = malloc(N * K * 4), *y = malloc(M * N * 4), b[1100], one[1100];
            spw_gpu *gpu = NULL;
            spw_gpu_queue *q = NULL;
            assert_true(x != NULL && w != NULL && y != NULL);
            if (M * K < OPS_N_MAX && N * K < OPS_N_MAX && (f & 2) == 0)
                ops_examine(&(ops_subject){
                    "linear by row", 3, {M * K, N * K, N}, M * N, {M, N, K}, flags, linear_ref, linear_fwd, NULL});
            for (uint64_t k = 0; k < M * K; k++)
                x[k] = ops_draw(&seed);
            for (uint64_t k = 0; k < N * K; k++)
                w[k] = ops_draw(&seed);
            for (uint64_t k = 0; k < N; k++)
                b[k] = ops_draw(&seed);
            assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 3}, NULL), SPW_OK);
            assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
            for (uint64_t rows = M; rows >= 1; rows--) { /* the last rows of so many */
                spw_gpu_linear(q, y, x + (M - rows) * K, w, f & 2 ? b : NULL, rows, N, K, flags);
                for (uint64_t m = 0; m < rows; m++) {
                    spw_gpu_linear(q, one, x + (M - rows + m) * K, w, f & 2 ? b : NULL, 1, N, K, flags);
                    assert_memory_equal(one, y + m * N, N * 4);
                }
            }
            spw_gpu_queue_destroy(q);
            spw_gpu_close(gpu);
            free(x);
            free(w);
            free(y);
        }
    }
}

/* ---------------------------------------------------------------- element-wise: d = n */

static void
gelu_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++) {
        out[i] = gelu_of(4 * in[0][i]);
    }
}

/* The other curves; the kind is d[1]. No input is so near 0 that differences would straddle it. */
static void
curve_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++) {
        double x = 4 * in[0][i];
        out[i] = s->d[1] == SPW_CURVE_RELU           ? fmax(x, 0)
                 : s->d[1] == SPW_CURVE_RELU_SQUARED ? fmax(x, 0) * fmax(x, 0)
                                                     : 0.5 * x * erfc(-x / sqrt(2));
    }
}

static void
stretch(float *to, const float *from, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        to[i] = 4 * from[i];
}

static void
gelu_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    stretch(ops_saved[0], in[0], s->d[0]);
    spw_gpu_curve(q, SPW_CURVE_GELU, out, ops_saved[0], s->d[0]);
}

static void
curve_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    stretch(ops_saved[0], in[0], s->d[0]);
    spw_gpu_curve(q, (spw_curve)s->d[1], out, ops_saved[0], s->d[0]);
}

static void
curve_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
          float *const *g)
{
    (void)in;
    (void)out;
    spw_gpu_curve_backward(q, (spw_curve)s->d[1], g[0], dout, ops_saved[0], s->d[0], s->flags);
    stretch(g[0], g[0], s->d[0]);
}

static void
gelu_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)in;
    (void)out;
    spw_gpu_curve_backward(q, SPW_CURVE_GELU, g[0], dout, ops_saved[0], s->d[0], s->flags);
    stretch(g[0], g[0], s->d[0]);
}

static void
silu_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = in[0][i] / (1 + exp(-in[0][i])) * in[1][i];
}

static void
silu_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gate_mul(q, SPW_GATE_SILU, out, in[0], in[1], 1, s->d[0], s->d[0]);
}

static void
silu_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)out;
    spw_gpu_gate_mul_backward(q, SPW_GATE_SILU, g[0], g[1], dout, in[0], in[1], 1, s->d[0], s->d[0], s->flags);
}

/* d = M, C: halves of one array, whose rows have two columns more. */
static void
packed_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0, M = s->d[0], C = s->d[1]; i < M * C; i++) {
        const double *at = in[0] + i / C * (2 * C + 2) + i % C;
        out[i] = at[0] / (1 + exp(-at[0])) * at[C];
    }
}

static void
packed_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gate_mul(q, SPW_GATE_SILU, out, in[0], in[0] + s->d[1], s->d[0], s->d[1], 2 * s->d[1] + 2);
}

static void
packed_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
           float *const *g)
{
    uint64_t M = s->d[0], C = s->d[1], stride = 2 * C + 2;
    (void)out;
    spw_gpu_gate_mul_backward(q, SPW_GATE_SILU, g[0], g[0] + C, dout, in[0], in[0] + C, M, C, stride, s->flags);
}

/* d = M, C: pairs in rows of two columns more, drawn so wide that some are cut off. */
static float wide_pairs[2 * OPS_N_MAX + 64], wide_grads[2 * OPS_N_MAX + 64];

static void
clamped_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0, M = s->d[0], C = s->d[1]; i < M * C; i++) {
        const double *at = in[0] + i / C * (2 * C + 2) + i % C * 2;
        double gate = fmin(12 * at[0], 7), up = fmax(fmin(12 * at[1], 7), -7);
        out[i] = (up + 1) * gate / (1 + exp(-1.702 * gate)) / 16;
    }
}

static void
clamped_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    for (uint64_t i = 0; i < s->n[0]; i++)
        wide_pairs[i] = 12 * in[0][i];
    spw_gpu_gate_mul(q, SPW_GATE_CLAMPED, out, wide_pairs, NULL, s->d[0], s->d[1], 2 * s->d[1] + 2);
    for (uint64_t i = 0; i < s->out_n; i++)
        out[i] /= 16;
}

static void
clamped_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
            float *const *g)
{
    (void)in;
    (void)out;
    memset(wide_grads, 0, sizeof wide_grads);
    spw_gpu_gate_mul_backward(q, SPW_GATE_CLAMPED, wide_grads, NULL, dout, wide_pairs, NULL, s->d[0], s->d[1],
                              2 * s->d[1] + 2, s->flags);
    for (uint64_t i = 0; i < s->n[0]; i++)
        g[0][i] = wide_grads[i] * 0.75f;
}

static void
gelu_mul_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] =
            0.5 * in[0][i] * (1 + tanh(sqrt(2 / acos(-1.0)) * (in[0][i] + 0.044715 * pow(in[0][i], 3)))) * in[1][i];
}

static void
gelu_mul_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gate_mul(q, SPW_GATE_GELU, out, in[0], in[1], 1, s->d[0], s->d[0]);
}

static void
gelu_mul_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
             float *const *g)
{
    (void)out;
    spw_gpu_gate_mul_backward(q, SPW_GATE_GELU, g[0], g[1], dout, in[0], in[1], 1, s->d[0], s->d[0], s->flags);
}

/* Drawn so wide that some are cut off, and the sum small again. */
static void
silu_clamped_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++) {
        double g = fmin(16 * in[0][i], 10), u = fmax(fmin(16 * in[1][i], 10), -10);
        out[i] = g / (1 + exp(-g)) * u / 64;
    }
}

static void
silu_clamped_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++) {
        wide_pairs[i] = 16 * in[0][i];
        wide_pairs[OPS_N_MAX + i] = 16 * in[1][i];
    }
    spw_gpu_gate_mul(q, SPW_GATE_SILU_CLAMPED, out, wide_pairs, wide_pairs + OPS_N_MAX, 1, s->d[0], s->d[0]);
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] /= 64;
}

static void
silu_clamped_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
                 float *const *g)
{
    (void)out;
    (void)in;
    for (uint64_t i = 0; i < s->d[0]; i++) {
        wide_grads[i] = 4 * g[0][i];
        wide_grads[OPS_N_MAX + i] = 4 * g[1][i];
    }
    spw_gpu_gate_mul_backward(q, SPW_GATE_SILU_CLAMPED, wide_grads, wide_grads + OPS_N_MAX, dout, wide_pairs,
                              wide_pairs + OPS_N_MAX, 1, s->d[0], s->d[0], s->flags);
    for (uint64_t i = 0; i < s->d[0]; i++) {
        g[0][i] = wide_grads[i] / 4;
        g[1][i] = wide_grads[OPS_N_MAX + i] / 4;
    }
}

static void
add_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = in[0][i] + in[1][i];
}

static void
add_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add(q, out, in[0], in[1], s->d[0]);
}

static void
add_scaled_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = in[0][i] + 0.375 * in[1][i];
}

static void
add_scaled_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add_scaled(q, out, in[0], in[1], 0.375f, s->d[0]);
}

static double
sum_of(const double *terms)
{
    return terms[0] + terms[1] + terms[2] + terms[3];
}

static void
add_scaled_by_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = (in[0][i] + in[1][i]) * sum_of(in[2]);
}

/* Between arrays and onto either: the same bits. */
static void
add_scaled_by_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    uint64_t bytes = s->d[0] * sizeof *out;
    for (int k = 0; k < 2; k++) {
        float *saved = memcpy(ops_saved[k], in[k], bytes);
        spw_gpu_add_scaled_by(q, saved, k == 0 ? saved : in[0], k == 1 ? saved : in[1], in[2], s->d[0]);
    }
    spw_gpu_add_scaled_by(q, out, in[0], in[1], in[2], s->d[0]);
    assert_memory_equal(out, ops_saved[0], bytes);
    assert_memory_equal(out, ops_saved[1], bytes);
}

static void
scaled_by_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = in[0][i] * sum_of(in[1]) * sum_of(in[1]);
}

/* Of one alone, and in place. */
static void
scaled_by_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add_scaled_by(q, out, in[0], NULL, in[1], s->d[0]);
    spw_gpu_add_scaled_by(q, out, out, NULL, in[1], s->d[0]);
}

static void
soft_cap_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = 0.4 * tanh(in[0][i] / 0.4);
}

/* Between arrays and in place. */
static void
soft_cap_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_soft_cap(q, ops_saved[0], in[0], 0.4f, s->d[0]);
    memcpy(out, in[0], s->d[0] * sizeof *out);
    spw_gpu_soft_cap(q, out, out, 0.4f, s->d[0]);
    assert_memory_equal(out, ops_saved[0], s->d[0] * sizeof *out);
}

/* Onto nothing, and onto itself. */
static void
scaled_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = 0.75 * in[0][i];
}

static void
scaled_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add_scaled(q, out, NULL, in[0], 0.5f, s->d[0]);
    spw_gpu_add_scaled(q, out, out, in[0], 0.25f, s->d[0]);
}

/* GELU, silu or gelu times up, sums: lengths around the lanes and across parts, gradients written and added to. */
static void
test_elementwise(void **state)
{
    static const uint64_t lengths[] = {1, 15, 16, 17, 100, 17001};
    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        uint64_t n = lengths[i];
        ops_examine(&(ops_subject){"gelu", 1, {n}, n, {n}, 0, gelu_ref, gelu_fwd, gelu_bwd});
        ops_examine(&(ops_subject){"gelu, added", 1, {n}, n, {n}, SPW_OP_ACC_DX, gelu_ref, gelu_fwd, gelu_bwd});
        for (uint64_t kind = SPW_CURVE_GELU_ERF; kind < SPW_CURVE_COUNT; kind++)
            for (unsigned f = 0; f <= SPW_OP_ACC_DX; f += SPW_OP_ACC_DX)
                ops_examine(&(ops_subject){"curve", 1, {n}, n, {n, kind}, f, curve_ref, curve_fwd, curve_bwd});
        ops_examine(&(ops_subject){"silu_mul", 2, {n, n}, n, {n}, 0, silu_ref, silu_fwd, silu_bwd});
        ops_examine(&(ops_subject){
            "silu_mul, added", 2, {n, n}, n, {n}, SPW_OP_ACC_DX | SPW_OP_ACC_DX2, silu_ref, silu_fwd, silu_bwd});
        for (unsigned f = 0; f < 2; f++) {
            uint64_t M = n > 1000 ? 7 : 3, C = n > 1000 ? n / 7 : n;
            ops_examine(&(ops_subject){f ? "silu_mul, packed, added" : "silu_mul, packed",
                                       1,
                                       {M * (2 * C + 2)},
                                       M * C,
                                       {M, C},
                                       f ? SPW_OP_ACC_DX | SPW_OP_ACC_DX2 : 0,
                                       packed_ref,
                                       packed_fwd,
                                       packed_bwd});
        }
        for (unsigned f = 0; f < 2; f++) {
            uint64_t M = n > 1000 ? 7 : 3, C = n > 1000 ? n / 7 : n;
            ops_examine(&(ops_subject){f ? "clamped, added" : "clamped",
                                       1,
                                       {M * (2 * C + 2)},
                                       M * C,
                                       {M, C},
                                       f ? SPW_OP_ACC_DX : 0,
                                       clamped_ref,
                                       clamped_fwd,
                                       clamped_bwd});
        }
        ops_examine(&(ops_subject){"gelu_mul", 2, {n, n}, n, {n}, 0, gelu_mul_ref, gelu_mul_fwd, gelu_mul_bwd});
        ops_examine(&(ops_subject){"gelu_mul, added",
                                   2,
                                   {n, n},
                                   n,
                                   {n},
                                   SPW_OP_ACC_DX | SPW_OP_ACC_DX2,
                                   gelu_mul_ref,
                                   gelu_mul_fwd,
                                   gelu_mul_bwd});
        for (unsigned f = 0; f < 2; f++)
            ops_examine(&(ops_subject){"silu_mul, clamped",
                                       2,
                                       {n, n},
                                       n,
                                       {n},
                                       f ? SPW_OP_ACC_DX | SPW_OP_ACC_DX2 : 0,
                                       silu_clamped_ref,
                                       silu_clamped_fwd,
                                       silu_clamped_bwd});
        ops_examine(&(ops_subject){"add", 2, {n, n}, n, {n}, 0, add_ref, add_fwd, NULL});
        ops_examine(&(ops_subject){"soft_cap", 1, {n}, n, {n}, 0, soft_cap_ref, soft_cap_fwd, NULL});
        ops_examine(&(ops_subject){"add_scaled", 2, {n, n}, n, {n}, 0, add_scaled_ref, add_scaled_fwd, NULL});
        ops_examine(&(ops_subject){
            "add_scaled_by", 3, {n, n, SPW_TERMS}, n, {n}, 0, add_scaled_by_ref, add_scaled_by_fwd, NULL});
        ops_examine(&(ops_subject){"scaled_by", 2, {n, SPW_TERMS}, n, {n}, 0, scaled_by_ref, scaled_by_fwd, NULL});
        ops_examine(&(ops_subject){"add_scaled, in place", 1, {n}, n, {n}, 0, scaled_ref, scaled_fwd, NULL});
    }
}

/* ---------------------------------------------------------------- norms: d = M, C, offset (rmsnorm) */

static void
layernorm_ref(const ops_subject *s, double *const *in, double *out)
{
    uint64_t C = s->d[1];
    for (uint64_t m = 0; m < s->d[0]; m++) {
        double mean = 0, var = 0;
        for (uint64_t c = 0; c < C; c++)
            mean += in[0][m * C + c] / (double)C;
        for (uint64_t c = 0; c < C; c++)
            var += (in[0][m * C + c] - mean) * (in[0][m * C + c] - mean) / (double)C;
        for (uint64_t c = 0; c < C; c++)
            out[m * C + c] = (in[0][m * C + c] - mean) / sqrt(var + 0.01) * in[1][c] + in[2][c];
    }
}

static void
layernorm_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_layernorm(q, out, ops_saved[0], ops_saved[1], in[0], in[1], in[2], s->d[0], s->d[1], 0.01f);
}

static void
layernorm_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
              float *const *g)
{
    (void)out;
    spw_gpu_layernorm_backward(q, g[0], s->flags & SPW_OP_ACC_DX ? g[0] : NULL, g[1], g[2], dout, in[0], in[1],
                               ops_saved[0], ops_saved[1], s->d[0], s->d[1]);
}

/* d = M, C, offset, groups of C columns in a row, each by weights of its own. */
static void
rmsnorm_ref(const ops_subject *s, double *const *in, double *out)
{
    uint64_t C = s->d[1], groups = s->d[3];
    for (uint64_t k = 0; k < s->d[0] * groups; k++) {
        double sum = 0;
        for (uint64_t c = k * C; c < (k + 1) * C; c++)
            sum += in[0][c] * in[0][c] / (double)C;
        for (uint64_t c = 0; c < C; c++)
            out[k * C + c] = in[0][k * C + c] / sqrt(sum + 0.01) * ((double)s->d[2] + in[1][k % groups * C + c]);
    }
}

static void
rmsnorm_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    uint64_t M = s->d[0], C = s->d[1];
    for (uint64_t k = 0; k < s->d[3]; k++)
        spw_gpu_rmsnorm(q, out + k * C, ops_saved[1] + k * M, in[0] + k * C, in[1] + k * C, (float)s->d[2], M, C,
                        s->d[3] * C, 0.01f);
}

static void
rmsnorm_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
            float *const *g)
{
    uint64_t M = s->d[0], C = s->d[1];
    (void)out;
    for (uint64_t k = 0; k < s->d[3]; k++) {
        float *dx = g[0] != NULL ? g[0] + k * C : NULL;
        spw_gpu_rmsnorm_backward(q, dx, s->flags & SPW_OP_ACC_DX ? dx : NULL, g[1] != NULL ? g[1] + k * C : NULL,
                                 dout + k * C, in[0] + k * C, in[1] + k * C, (float)s->d[2], ops_saved[1] + k * M, M, C,
                                 s->d[3] * C);
    }
}

/* d = M, C */
static void
gated_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0] * s->d[1]; i++)
        out[i] = in[0][i] + in[1][i] / (1 + exp(-in[2][i / s->d[1]]));
}

static void
gated_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add_gated(q, out, in[0], in[1], in[2], s->d[0], s->d[1]);
}

static void
gated_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
          float *const *g)
{
    (void)out;
    memcpy(g[0], dout, s->d[0] * s->d[1] * sizeof *dout);
    spw_gpu_add_gated_backward(q, g[1], g[2], dout, in[1], in[2], s->d[0], s->d[1]);
}

/* d = M, C */
static void
plain_norm_ref(const ops_subject *s, double *const *in, double *out)
{
    uint64_t C = s->d[1];
    for (uint64_t m = 0; m < s->d[0]; m++) {
        double sum = 0;
        for (uint64_t c = 0; c < C; c++)
            sum += in[0][m * C + c] * in[0][m * C + c] / (double)C;
        for (uint64_t c = 0; c < C; c++)
            out[m * C + c] = in[0][m * C + c] / sqrt(sum + 0.01);
    }
}

static void
plain_norm_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_rmsnorm(q, out, ops_saved[1], in[0], NULL, 1, s->d[0], s->d[1], s->d[1], 0.01f);
}

static void
plain_norm_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
               float *const *g)
{
    (void)out;
    spw_gpu_rmsnorm_backward(q, g[0], s->flags & SPW_OP_ACC_DX ? g[0] : NULL, NULL, dout, in[0], NULL, 1, ops_saved[1],
                             s->d[0], s->d[1], s->d[1]);
}

/* LayerNorm, RMSNorm and a sum by gates over rows shorter than the lanes, odd, and cut into several parts. */
static void
test_norms(void **state)
{
    static const uint64_t sizes[][2] = {{1, 1}, {1, 8}, {5, 3}, {7, 33}, {3, 200}, {400, 45}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t M = sizes[i][0], C = sizes[i][1];
        ops_examine(
            &(ops_subject){"add_gated", 3, {M * C, M * C, M}, M * C, {M, C}, 0, gated_ref, gated_fwd, gated_bwd});
        for (unsigned f = 0; f <= SPW_OP_ACC_DX; f += SPW_OP_ACC_DX) {
            ops_examine(&(ops_subject){
                "layernorm", 3, {M * C, C, C}, M * C, {M, C}, f, layernorm_ref, layernorm_fwd, layernorm_bwd});
            ops_examine(&(ops_subject){
                "rmsnorm, plain", 1, {M * C}, M * C, {M, C}, f, plain_norm_ref, plain_norm_fwd, plain_norm_bwd});
            for (uint64_t offset = 0; offset < 2; offset++)
                for (uint64_t n = 1; n < 4 && M * n * C <= OPS_N_MAX; n += 2)
                    ops_examine(&(ops_subject){"rmsnorm",
                                               2,
                                               {M * n * C, n * C},
                                               M * n * C,
                                               {M, C, offset, n},
                                               f,
                                               rmsnorm_ref,
                                               rmsnorm_fwd,
                                               rmsnorm_bwd});
        }
    }
}

/* Rope at given positions is rope of those rows of a sequence. */
static void
test_rope_at(void **state)
{
    enum { H = 3, D = 6, R = 4, LAST = 9 };
    float table[(LAST + 1) * R], x[(LAST + 1) * H * D], some[3 * H * D];
    static const int32_t places[3] = {7, 0, LAST};
    uint64_t seed = 1;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    for (int i = 0; i < (LAST + 1) * R; i++)
        table[i] = ops_draw(&seed);
    for (int i = 0; i < (LAST + 1) * H * D; i++)
        x[i] = ops_draw(&seed);
    for (int k = 0; k < 3; k++)
        memcpy(some + k * H * D, x + places[k] * H * D, H * D * 4);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int neighbors = 0; neighbors < 2; neighbors++) {
        spw_gpu_rope(q, x, H * D, table, NULL, LAST + 1, LAST + 1, H, D, R, neighbors, 1);
        spw_gpu_rope(q, some, H * D, table, places, 3, 1, H, D, R, neighbors, 1);
        for (int k = 0; k < 3; k++)
            assert_memory_equal(some + k * H * D, x + places[k] * H * D, H * D * 4);
    }
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* Heads to other places, one head to all, the sum of all; what lies between stays. */
static void
test_heads(void **state)
{
    enum { M = 5, H = 3, D = 6, FROM = H * D + 7, TO = H * (D + 2) + 3 };
    float x[M * FROM], y[M * TO], sum[M * (D + 1)];
    uint64_t seed = 3;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    for (int i = 0; i < M * FROM; i++)
        x[i] = ops_draw(&seed);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (uint64_t head = 0; head <= D; head += D) {
        for (int i = 0; i < M * TO; i++)
            y[i] = 77;
        spw_gpu_copy_heads(q, y, TO, D + 2, x, FROM, head, M, H, D);
        for (uint64_t r = 0; r < M; r++)
            for (uint64_t c = 0; c < TO; c++) {
                uint64_t h = c / (D + 2), d = c % (D + 2);
                float want = h < H && d < D ? x[r * FROM + h * head + d] : 77;
                assert_memory_equal(&y[r * TO + c], &want, sizeof want);
            }
    }
    for (int i = 0; i < M * (D + 1); i++)
        sum[i] = 77;
    spw_gpu_sum_heads(q, sum, D + 1, x, FROM, D, M, H, D);
    for (uint64_t r = 0; r < M; r++)
        for (uint64_t c = 0; c < D + 1; c++) {
            const float *from = x + r * FROM + c;
            float want = c < D ? from[0] + from[D] + from[2 * D] : 77;
            assert_memory_equal(&sum[r * (D + 1) + c], &want, sizeof want);
        }
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* ---------------------------------------------------------------- head and loss: d = M, V, C, rows per chunk, cap in quarters */

static void
loss_ref(const ops_subject *s, double *const *in, double *out)
{
    uint64_t V = s->d[1], C = s->d[2];
    for (uint64_t m = 0; m < s->d[0]; m++) {
        double sum = 0, at_target = 0;
        for (uint64_t v = 0; v < V; v++) {
            double x = 0;
            for (uint64_t c = 0; c < C; c++)
                x += in[0][m * C + c] * in[1][v * C + c];
            x = s->d[4] > 0 ? (double)s->d[4] / 4 * tanh(x / ((double)s->d[4] / 4)) : x;
            sum += exp(x);
            if ((int32_t)v == ops_ids[m])
                at_target = x;
        }
        out[m] = ops_ids[m] < 0 ? 0 : log(sum) - at_target;
    }
}

static void
loss_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_linear_cross_entropy(q, out, NULL, NULL, in[0], in[1], ops_ids, NULL, ops_saved[0], s->d[3], s->d[0],
                                 s->d[1], s->d[2], 1, (float)s->d[4] / 4, 0);
}

/* Each row's loss weighs the same here, so the weights of the check are applied by running row by row. */
static void
loss_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    float loss;
    (void)out;
    for (uint64_t m = 0; m < s->d[0]; m++)
        spw_gpu_linear_cross_entropy(q, &loss, g[0] + m * s->d[2], g[1], in[0] + m * s->d[2], in[1], ops_ids + m, NULL,
                                     ops_saved[0], 1, 1, s->d[1], s->d[2], dout[m], (float)s->d[4] / 4, s->flags);
}

/* Linear head and cross-entropy: chunks that divide the rows and that do not, rows without a target, logits with a cap. */
static void
test_loss(void **state)
{
    static const uint64_t sizes[][5] = {{1, 2, 1, 1},      {5, 61, 16, 2},    {9, 17, 33, 4},    {40, 100, 24, 40},
                                        {5, 61, 16, 2, 3}, {9, 17, 33, 4, 9}, {2, 1500, 8, 2, 4}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const uint64_t *d = sizes[i];
        for (uint64_t m = 0; m < d[0]; m++)
            ops_ids[m] = m % 4 == 3 ? -1 : (int32_t)(m * 5 % d[1]);
        ops_examine(&(ops_subject){"loss",
                                   2,
                                   {d[0] * d[2], d[1] * d[2]},
                                   d[0],
                                   {d[0], d[1], d[2], d[3], d[4]},
                                   0,
                                   loss_ref,
                                   loss_fwd,
                                   loss_bwd});
        ops_examine(&(ops_subject){"loss, added",
                                   2,
                                   {d[0] * d[2], d[1] * d[2]},
                                   d[0],
                                   {d[0], d[1], d[2], d[3], d[4]},
                                   SPW_OP_ACC_DX,
                                   loss_ref,
                                   loss_fwd,
                                   loss_bwd});
    }
}

/* ---------------------------------------------------------------- embedding and rope: d = M, V, C / M, T, H, D, R */

static void
embedding_ref(const ops_subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0] * s->d[2]; i++)
        out[i] = in[0][(uint64_t)ops_ids[i / s->d[2]] * s->d[2] + i % s->d[2]];
}

static void
embedding_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_embedding(q, out, ops_ids, in[0], 0, s->d[0], s->d[1], s->d[2], false);
}

static void
embedding_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
              float *const *g)
{
    (void)in;
    (void)out;
    spw_gpu_embedding_backward(q, g[0], dout, ops_ids, 0, s->d[0], s->d[1], s->d[2]);
}

static void
rope_ref(const ops_subject *s, double *const *in, double *out)
{
    uint64_t T = s->d[1], H = s->d[2], D = s->d[3], R = s->d[4];
    for (uint64_t i = 0; i < s->d[0] * H; i++) {
        const float *table = ops_saved[1] + i / H % T * R;
        for (uint64_t j = 0; j < R / 2; j++) {
            double c = (double)table[j], n = (double)table[R / 2 + j];
            uint64_t one = i * D + (s->d[5] ? 2 * j : j), other = s->d[5] ? one + 1 : one + R / 2;
            out[one] = in[0][one] * c - in[0][other] * n;
            out[other] = in[0][other] * c + in[0][one] * n;
        }
        for (uint64_t j = R; j < D; j++)
            out[i * D + j] = in[0][i * D + j];
    }
}

static void
rope_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    memcpy(out, in[0], s->out_n * 4);
    spw_gpu_rope(q, out, s->d[2] * s->d[3], ops_saved[1], NULL, s->d[0], s->d[1], s->d[2], s->d[3], s->d[4],
                 s->d[5] > 0, 1);
}

static void
rope_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)in;
    (void)out;
    memcpy(g[0], dout, s->out_n * 4);
    spw_gpu_rope(q, g[0], s->d[2] * s->d[3], ops_saved[1], NULL, s->d[0], s->d[1], s->d[2], s->d[3], s->d[4],
                 s->d[5] > 0, -1);
}

/* Embedding with repeated ops_ids and with the add form; rotary embedding and its inverse. */
static void
test_embedding_and_rope(void **state)
{
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    float table[20], y[12], want[12];
    (void)state;
    for (uint64_t m = 0; m < 50; m++)
        ops_ids[m] = (int32_t)(m * m % 7);
    ops_examine(&(ops_subject){
        "embedding", 1, {7 * 130}, 50 * 130, {50, 7, 130}, 0, embedding_ref, embedding_fwd, embedding_bwd});
    for (uint64_t i = 0; i < 11 * 12; i++) {
        ops_saved[1][i] = (float)(i % 12 < 6 ? cos((double)i) : sin((double)i - 6));
    }
    ops_examine(
        &(ops_subject){"rope", 1, {22 * 3 * 12}, 22 * 3 * 12, {22, 11, 3, 12, 12}, 0, rope_ref, rope_fwd, rope_bwd});
    ops_examine(&(ops_subject){
        "rope of a part", 1, {22 * 3 * 12}, 22 * 3 * 12, {22, 11, 3, 12, 6}, 0, rope_ref, rope_fwd, rope_bwd});
    ops_examine(&(ops_subject){
        "rope of neighbors", 1, {22 * 3 * 12}, 22 * 3 * 12, {22, 11, 3, 12, 8, 1}, 0, rope_ref, rope_fwd, rope_bwd});
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int i = 0; i < 20; i++)
        table[i] = (float)i;
    for (int i = 0; i < 12; i++) {
        y[i] = 100;
        want[i] = 100 + table[(uint64_t)ops_ids[i / 4] * 4 % 20 + (uint64_t)i % 4];
    }
    spw_gpu_embedding(q, y, ops_ids, table, 0, 3, 5, 4, true);
    assert_memory_equal(y, want, sizeof y);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* Dropout keeps about 1 - p, scales what it keeps, and is the same again for the same key; sums of squares are exact. */
static void
test_dropout_and_sums(void **state)
{
    enum { N = 10000 };
    static float x[N], y[N], again[N];
    static double partial[3];
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    uint64_t kept = 0;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int i = 0; i < N; i++)
        x[i] = (float)(i % 13 - 6);
    for (int i = 0; i < N; i++)
        x[i] = x[i] == 0 ? 1 : x[i];
    spw_gpu_dropout(q, y, x, N, 0.25f, 42, 1, 0);
    for (int at = 0, n; at < N; at += n) { /* by parts, as a whole */
        n = at == 0 ? 4001 : at + 2 < N ? 2 : N - at;
        spw_gpu_dropout(q, again + at, x + at, (uint64_t)n, 0.25f, 42, 1, (uint64_t)at);
    }
    assert_memory_equal(y, again, sizeof y);
    for (int i = 0; i < N; i++) {
        kept += y[i] != 0;
        assert_true(y[i] == 0 || fabsf(y[i] - x[i] / 0.75f) < 1e-5f);
    }
    assert_in_range(kept, 7300, 7700);
    spw_gpu_sumsq(q, partial, x, N);
    for (int p = 0; p < 3; p++) {
        double sum = 0;
        for (int i = 4096 * p; i < N && i < 4096 * (p + 1); i++)
            sum += (double)x[i] * (double)x[i];
        assert_true(partial[p] == sum); /* whole numbers: exact in any order */
    }
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* A NaN in the input is a NaN in the output: it must reach the loss and the norm. */
static void
test_nan_spreads(void **state)
{
    enum { C = 40, V = 50 };
    static float x[C], g[C], b[C], y[V], w[V * C], mean, rstd, loss, logits[64];
    static const int32_t target = 3;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int i = 0; i < V * C; i++)
        w[i] = 0.01f;
    x[21] = NAN;
    for (int kind = 0; kind < SPW_CURVE_COUNT; kind++) {
        y[21] = 0;
        spw_gpu_curve(q, (spw_curve)kind, y, x, C);
        assert_true(isnan(y[21]));
    }
    spw_gpu_gate_mul(q, SPW_GATE_SILU, y, x, w, 1, C, C);
    assert_true(isnan(y[21]));
    spw_gpu_gate_mul(q, SPW_GATE_GELU, y, x, w, 1, C, C);
    assert_true(isnan(y[21]));
    spw_gpu_soft_cap(q, y, x, 30, C);
    assert_true(isnan(y[21]));
    spw_gpu_gate_mul(q, SPW_GATE_CLAMPED, y, x, NULL, 1, C / 2, C);
    assert_true(isnan(y[10]));
    spw_gpu_layernorm(q, y, &mean, &rstd, x, g, b, 1, C, 1e-5f);
    assert_true(isnan(y[0]));
    spw_gpu_rmsnorm(q, y, &rstd, x, g, 0, 1, C, C, 1e-5f);
    assert_true(isnan(y[0]));
    spw_gpu_linear(q, y, x, w, NULL, 1, V, C, 0);
    assert_true(isnan(y[0]));
    spw_gpu_linear_cross_entropy(q, &loss, NULL, NULL, x, w, &target, NULL, logits, 1, 1, V, C, 1, 0, 0);
    assert_true(isnan(loss));
    spw_gpu_linear_cross_entropy(q, &loss, NULL, NULL, x, w, &target, NULL, logits, 1, 1, V, C, 1, 30, 0);
    assert_true(isnan(loss));
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* Memory: the limit is exact and the message has the numbers; live and peak count. Unknown and unbuilt devices are named. */
static void
test_device(void **state)
{
    spw_gpu *gpu = NULL;
    void *a = NULL, *b = NULL;
    spw_error err = {0};
    (void)state;
    setenv("SPW_CUDA_PLUGIN", "/nonexistent/plugin.so", 1);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda:1"}, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "device cuda:1: SPW_CUDA_PLUGIN does not open"));
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "auto"}, &err), SPW_OK);
    assert_string_equal(spw_gpu_get_info(gpu)->name, "cpu");
    spw_gpu_close(gpu);
    unsetenv("SPW_CUDA_PLUGIN");
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda:x"}, &err), SPW_ECONFIG);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "tpu"}, &err), SPW_ECONFIG);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .memory_bytes = 1 << 20}, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &a, 700000, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &b, 700000, &err), SPW_ENOMEM);
    assert_non_null(strstr(err.message, "700000"));
    assert_non_null(strstr(err.message, "1048576"));
    assert_int_equal(spw_gpu_bytes_live(gpu), 700416);
    spw_gpu_free(gpu, a);
    assert_int_equal(spw_gpu_alloc(gpu, &b, 1 << 20, &err), SPW_OK);
    assert_int_equal(spw_gpu_bytes_peak(gpu), 1 << 20);
    spw_gpu_free(gpu, b);
    assert_int_equal(spw_gpu_bytes_live(gpu), 0);
    spw_gpu_close(gpu);
}

static void
count_up(void *arg)
{
    __atomic_add_fetch((int *)arg, 1, __ATOMIC_SEQ_CST);
}

/* Copies convert and sum on their own threads; an event holds a second queue back until the first has passed it. */
static void
test_queues(void **state)
{
    enum { N = 9000 };
    static float x[N], back[N], wide[N];
    static uint16_t half[N];
    static double sums[3];
    spw_gpu *gpu = NULL;
    spw_gpu_queue *h2d = NULL, *d2h = NULL;
    spw_gpu_event *event = NULL;
    int noticed = 0;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&h2d, gpu, SPW_QUEUE_H2D, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&d2h, gpu, SPW_QUEUE_D2H, NULL), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&event, gpu, NULL), SPW_OK);
    for (int i = 0; i < N; i++)
        x[i] = (float)(i % 50 - 25) / 8; /* exact in bf16 and fp16 */
    for (int round = 0; round < 50; round++) {
        memset(wide, 0, sizeof wide);
        memset(back, 0, sizeof back);
        spw_convert(half, round % 2 ? SPW_BF16 : SPW_F16, x, SPW_F32, N);
        spw_gpu_copy_h2d(h2d, wide, SPW_F32, half, round % 2 ? SPW_BF16 : SPW_F16, N);
        spw_gpu_queue_notify(h2d, count_up, &noticed);
        spw_gpu_event_record(event, h2d);
        spw_gpu_event_wait(event, d2h);
        spw_gpu_copy_d2h(d2h, back, SPW_F32, wide, SPW_F32, N, sums);
        spw_gpu_queue_sync(d2h);
        assert_memory_equal(back, x, sizeof x);
        assert_int_equal(__atomic_load_n(&noticed, __ATOMIC_SEQ_CST), round + 1);
    }
    for (int p = 0; p < 3; p++) {
        double sum = 0;
        for (int i = 4096 * p; i < N && i < 4096 * (p + 1); i++)
            sum += (double)x[i] * (double)x[i];
        assert_true(sums[p] == sum);
    }
    spw_gpu_event_destroy(event);
    spw_gpu_queue_destroy(h2d);
    spw_gpu_queue_destroy(d2h);
    spw_gpu_close(gpu);
}

/*
 * What several threads copy, encode and decode piece by piece, on a copy queue or in the caller's thread with the device's, is
 * what one of them makes of all of it, and ends where it should.
 */
static void
test_pieces(void **state)
{
    enum { N = 3 * (1 << 17) + 4096 + 3 * 128, ODD = N - 51, SUMS = (N + 4095) / 4096 };
    static float x[N], decoded[N], wide[N + 1];
    static uint16_t want[N], got[N + 1];
    static unsigned char codes[2 * N], coded[2 * N + 1];
    static double sums[SUMS], first[SUMS];
    (void)state;
    for (uint64_t i = 0; i < N; i++)
        x[i] = (float)((int32_t)(i * 2654435761u) >> 8) * 0x1p-26f;
    spw_convert(want, SPW_BF16, x, SPW_F32, ODD);
    for (int k = 0; k < 12; k++) {
        static const uint32_t threads[] = {1, 2, 5};
        static const spw_gpu_queue_kind kinds[] = {SPW_QUEUE_COMPUTE, SPW_QUEUE_D2H};
        uint32_t bits = k < 6 ? 8 : 4;
        spw_quant form = bits == 8 ? SPW_QUANT_INT8 : SPW_QUANT_INT4;
        uint64_t bytes = spw__quant_bytes(form, N);
        spw_gpu *gpu = NULL;
        spw_gpu_queue *q = NULL;
        assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads[k % 3]}, NULL),
                         SPW_OK);
        assert_int_equal(spw_gpu_queue_create(&q, gpu, kinds[k / 3 % 2], NULL), SPW_OK);
        memset(got, 0xee, sizeof got);
        memset(wide, 0xee, sizeof wide);
        memset(coded, 0xee, sizeof coded);
        spw_gpu_copy_d2h(q, got, SPW_BF16, x, SPW_F32, ODD, sums);
        spw_gpu_encode(q, coded, bits, x, SPW_F32, N);
        spw_gpu_decode_h2d(q, wide, SPW_F32, coded, bits, N);
        spw_gpu_queue_sync(q);
        assert_memory_equal(got, want, ODD * 2);
        assert_int_equal(got[ODD], 0xeeee);
        if (k == 0)
            memcpy(first, sums, sizeof sums);
        assert_memory_equal(sums, first, sizeof sums);
        spw__quant_encode(codes, form, x, SPW_F32, N);
        spw__quant_decode(decoded, SPW_F32, codes, form, N);
        assert_memory_equal(coded, codes, bytes);
        assert_int_equal(coded[bytes], 0xee);
        assert_memory_equal(wide, decoded, N * 4);
        assert_int_equal(((unsigned char *)wide)[N * 4], 0xee);
        spw_gpu_queue_destroy(q);
        spw_gpu_close(gpu);
    }
}

/* The checks of every device. */
static void
test_experts(void **state)
{
    parity p = {0};
    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads += 2) {
        assert_int_equal(spw_gpu_open(&p.gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads}, NULL),
                         SPW_OK);
        parity_experts(&p);
        spw_gpu_close(p.gpu);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_and_more),
        cmocka_unit_test(test_linear_by_row),
        cmocka_unit_test(test_elementwise),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_rope_at),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_embedding_and_rope),
        cmocka_unit_test(test_dropout_and_sums),
        cmocka_unit_test(test_nan_spreads),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_queues),
        cmocka_unit_test(test_pieces),
    };
    return ops_run_tests(tests, sizeof tests / sizeof tests[0]);
}
