/*
 * Every operation of the cpu device against naive loops in double, and every backward against central differences of those
 * loops, element by element; with the kernels of every instruction set of this CPU, 1, 2 and 5 threads giving the same bits.
 */
#include "lib_parity.h"
#include "quant.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { INPUTS_MAX = 4, N_MAX = 20000 };

/* An operation under test: `in` are its inputs, `out` one output; sizes in n and out_n. */
typedef struct subject {
    const char *name;
    int inputs;
    uint64_t n[INPUTS_MAX], out_n;
    uint64_t d[8]; /* dimensions, as the operation reads them */
    unsigned flags;
    void (*reference)(const struct subject *s, double *const *in, double *out);
    void (*forward)(const struct subject *s, spw_gpu_queue *q, float *const *in, float *out);
    /* writes (or adds to) grads[i] of input i; grads[i] NULL: not wanted */
    void (*backward)(const struct subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
                     float *const *grads);
} subject;

static float saved[2][N_MAX]; /* what forward leaves for backward */
static int32_t ids[N_MAX];

static float
draw(uint64_t *state)
{
    uint32_t r[4];
    spw_philox(99, 7, (*state)++, r);
    return 2.0f * spw_uniform_f32(r[0]) - 1.0f;
}

static double
weighted(const subject *s, double *const *in, const float *weights, double *scratch)
{
    double sum = 0;
    s->reference(s, in, scratch);
    for (uint64_t i = 0; i < s->out_n; i++)
        sum += scratch[i] * (double)weights[i];
    return sum;
}

/* Forward against the reference, backward against differences, and the same bits for 1, 2 and 5 threads. */
static void
examine(const subject *s)
{
    float *in[INPUTS_MAX], *grads[INPUTS_MAX], *first_grads[INPUTS_MAX], *out = malloc(N_MAX * 4),
                                                                         *first = malloc(N_MAX * 4);
    float *dout = malloc(N_MAX * 4);
    double *wide[INPUTS_MAX], *want = malloc(N_MAX * 8), *scratch = malloc(N_MAX * 8);
    uint64_t state = s->d[0] * 31 + s->d[1] * 7 + s->flags;
    assert_true(out && first && dout && want && scratch && s->out_n <= N_MAX);
    for (int k = 0; k < s->inputs; k++) {
        in[k] = malloc(s->n[k] * 4);
        grads[k] = malloc(s->n[k] * 4);
        first_grads[k] = malloc(s->n[k] * 4);
        wide[k] = malloc(s->n[k] * 8);
        assert_true(in[k] && grads[k] && first_grads[k] && wide[k]);
        for (uint64_t i = 0; i < s->n[k]; i++)
            wide[k][i] = (double)(in[k][i] = draw(&state));
    }
    for (uint64_t i = 0; i < s->out_n; i++)
        dout[i] = draw(&state);
    s->reference(s, wide, want);
    for (uint32_t threads = 1; threads <= 5; threads += threads == 1 ? 1 : 3) {
        spw_gpu *gpu = NULL;
        spw_gpu_queue *q = NULL;
        assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads}, NULL), SPW_OK);
        assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        s->forward(s, q, in, out);
        for (uint64_t i = 0; i < s->out_n; i++) {
            if (!(fabs((double)out[i] - want[i]) <= 2e-5 * (1 + fabs(want[i]))))
                fail_msg("%s: output %llu is %.9g, the reference has %.9g", s->name, (unsigned long long)i,
                         (double)out[i], want[i]);
        }
        for (int k = 0; k < s->inputs; k++)
            memset(grads[k], 0, s->n[k] * 4);
        if (s->backward != NULL)
            s->backward(s, q, in, out, dout, grads);
        if (threads == 1) {
            memcpy(first, out, s->out_n * 4);
            for (int k = 0; k < s->inputs; k++)
                memcpy(first_grads[k], grads[k], s->n[k] * 4);
        }
        assert_memory_equal(first, out, s->out_n * 4);
        for (int k = 0; k < s->inputs; k++)
            assert_memory_equal(first_grads[k], grads[k], s->n[k] * 4);
        spw_gpu_queue_destroy(q);
        spw_gpu_close(gpu);
    }
    for (int k = 0; k < s->inputs && s->backward != NULL; k++) {
        uint64_t stride = s->n[k] / 60 + 1;
        for (uint64_t i = 0; i < s->n[k]; i += stride) {
            double x = wide[k][i], h = 1e-5, up, down, slope;
            wide[k][i] = x + h;
            up = weighted(s, wide, dout, scratch);
            wide[k][i] = x - h;
            down = weighted(s, wide, dout, scratch);
            wide[k][i] = x;
            slope = (up - down) / (2 * h);
            if (!(fabs((double)grads[k][i] - slope) <= 1e-4 * (1 + fabs(slope))))
                fail_msg("%s: gradient %llu of input %d is %.9g, differences give %.9g", s->name, (unsigned long long)i,
                         k, (double)grads[k][i], slope);
        }
    }
    for (int k = 0; k < s->inputs; k++) {
        free(in[k]);
        free(grads[k]);
        free(first_grads[k]);
        free(wide[k]);
    }
    free(out);
    free(first);
    free(dout);
    free(want);
    free(scratch);
}

/* ---------------------------------------------------------------- linear: d = M, N, K */

static void
linear_ref(const subject *s, double *const *in, double *out)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    for (uint64_t m = 0; m < M; m++)
        for (uint64_t n = 0; n < N; n++) {
            double sum = in[2][n];
            for (uint64_t k = 0; k < K; k++)
                sum += in[0][m * K + k] * in[1][s->flags & SPW_OP_W_IN_OUT ? k * N + n : n * K + k];
            out[m * N + n] = sum;
        }
}

static void
linear_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_linear(q, out, in[0], in[1], in[2], s->d[0], s->d[1], s->d[2], s->flags);
}

static void
linear_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
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
            examine(&(subject){
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
linear_add_ref(const subject *s, double *const *in, double *out)
{
    linear_ref(s, in, out);
    for (uint64_t i = 0; i < s->out_n; i++)
        out[i] += in[3][i];
}

/* Onto another array without and with a bias, which is taken off again, and in place. */
static void
linear_add_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    spw_gpu_linear_add(q, saved[0], in[3], in[0], in[1], NULL, M, N, K, s->flags);
    spw_gpu_linear_add(q, saved[1], in[3], in[0], in[1], in[2], M, N, K, s->flags);
    for (uint64_t i = 0; i < s->out_n; i++)
        assert_true(fabsf(saved[1][i] - saved[0][i] - in[2][i % N]) < 1e-4f);
    memcpy(out, in[3], s->out_n * sizeof *out);
    if (s->flags & SPW_OP_BY_ROW)
        spw_gpu_linear_add(q, out, in[3], in[0], in[1], in[2], M, N, K, s->flags);
    else
        spw_gpu_linear_add(q, out, out, in[0], in[1], in[2], M, N, K, s->flags);
    assert_memory_equal(out, saved[1], s->out_n * sizeof *out);
}

static void
linear_gelu_ref(const subject *s, double *const *in, double *out)
{
    linear_ref(s, in, out);
    for (uint64_t i = 0; i < s->out_n; i++)
        out[i] = gelu_of(out[i]);
}

static void
linear_gelu_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_linear_gelu(q, out, saved[0], in[0], in[1], in[2], s->d[0], s->d[1], s->d[2], s->flags);
}

static void
linear_gelu_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
                float *const *g)
{
    spw_gpu_gelu_backward(q, saved[1], dout, saved[0], s->out_n, 0);
    linear_bwd(s, q, in, out, saved[1], g);
}

/* Of a gelu: in[0] is what goes into it. */
static void
gelu_linear_ref(const subject *s, double *const *in, double *out)
{
    static double x[N_MAX];
    double *after[INPUTS_MAX] = {x, in[1], in[2]};
    for (uint64_t i = 0; i < s->n[0]; i++)
        x[i] = gelu_of(in[0][i]);
    linear_ref(s, after, out);
}

static void
gelu_linear_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gelu(q, saved[0], in[0], s->n[0]);
    spw_gpu_linear(q, out, saved[0], in[1], in[2], s->d[0], s->d[1], s->d[2], s->flags);
}

static void
gelu_linear_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
                float *const *g)
{
    (void)out;
    spw_gpu_linear_gelu_backward(q, g[0], g[1], g[2], dout, saved[0], in[0], in[1], s->d[0], s->d[1], s->d[2],
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
            subject add = {"linear, added", 4,   {M * K, N * K, N, n}, n, {M, N, K}, flags, linear_add_ref,
                           linear_add_fwd,  NULL};
            subject into = {"linear, gelu",
                            3,
                            {M * K, N * K, N},
                            n,
                            {M, N, K},
                            flags,
                            linear_gelu_ref,
                            linear_gelu_fwd,
                            f & 2 ? NULL : linear_gelu_bwd};
            subject back = {"gelu, linear",
                            3,
                            {M * K, N * K, N},
                            n,
                            {M, N, K},
                            flags,
                            gelu_linear_ref,
                            gelu_linear_fwd,
                            f & 2 ? NULL : gelu_linear_bwd};
            examine(&add);
            examine(&into);
            examine(&back);
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
            if (M * K < N_MAX && N * K < N_MAX && (f & 2) == 0)
                examine(&(subject){
                    "linear by row", 3, {M * K, N * K, N}, M * N, {M, N, K}, flags, linear_ref, linear_fwd, NULL});
            for (uint64_t k = 0; k < M * K; k++)
                x[k] = draw(&seed);
            for (uint64_t k = 0; k < N * K; k++)
                w[k] = draw(&seed);
            for (uint64_t k = 0; k < N; k++)
                b[k] = draw(&seed);
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
gelu_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++) {
        out[i] = gelu_of(4 * in[0][i]);
    }
}

static void
stretch(float *to, const float *from, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        to[i] = 4 * from[i];
}

static void
gelu_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    stretch(saved[0], in[0], s->d[0]);
    spw_gpu_gelu(q, out, saved[0], s->d[0]);
}

static void
gelu_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)in;
    (void)out;
    spw_gpu_gelu_backward(q, g[0], dout, saved[0], s->d[0], s->flags);
    stretch(g[0], g[0], s->d[0]);
}

static void
silu_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = in[0][i] / (1 + exp(-in[0][i])) * in[1][i];
}

static void
silu_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gate_mul(q, SPW_GATE_SILU, out, in[0], in[1], 1, s->d[0], s->d[0]);
}

static void
silu_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)out;
    spw_gpu_gate_mul_backward(q, SPW_GATE_SILU, g[0], g[1], dout, in[0], in[1], 1, s->d[0], s->d[0], s->flags);
}

/* d = M, C: halves of one array, whose rows have two columns more. */
static void
packed_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0, M = s->d[0], C = s->d[1]; i < M * C; i++) {
        const double *at = in[0] + i / C * (2 * C + 2) + i % C;
        out[i] = at[0] / (1 + exp(-at[0])) * at[C];
    }
}

static void
packed_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gate_mul(q, SPW_GATE_SILU, out, in[0], in[0] + s->d[1], s->d[0], s->d[1], 2 * s->d[1] + 2);
}

static void
packed_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    uint64_t M = s->d[0], C = s->d[1], stride = 2 * C + 2;
    (void)out;
    spw_gpu_gate_mul_backward(q, SPW_GATE_SILU, g[0], g[0] + C, dout, in[0], in[0] + C, M, C, stride, s->flags);
}

/* d = M, C: pairs in rows of two columns more, drawn so wide that some are cut off. */
static float wide_pairs[2 * N_MAX + 64], wide_grads[2 * N_MAX + 64];

static void
clamped_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0, M = s->d[0], C = s->d[1]; i < M * C; i++) {
        const double *at = in[0] + i / C * (2 * C + 2) + i % C * 2;
        double gate = fmin(12 * at[0], 7), up = fmax(fmin(12 * at[1], 7), -7);
        out[i] = (up + 1) * gate / (1 + exp(-1.702 * gate)) / 16;
    }
}

static void
clamped_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    for (uint64_t i = 0; i < s->n[0]; i++)
        wide_pairs[i] = 12 * in[0][i];
    spw_gpu_gate_mul(q, SPW_GATE_CLAMPED, out, wide_pairs, NULL, s->d[0], s->d[1], 2 * s->d[1] + 2);
    for (uint64_t i = 0; i < s->out_n; i++)
        out[i] /= 16;
}

static void
clamped_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
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
gelu_mul_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] =
            0.5 * in[0][i] * (1 + tanh(sqrt(2 / acos(-1.0)) * (in[0][i] + 0.044715 * pow(in[0][i], 3)))) * in[1][i];
}

static void
gelu_mul_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_gate_mul(q, SPW_GATE_GELU, out, in[0], in[1], 1, s->d[0], s->d[0]);
}

static void
gelu_mul_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)out;
    spw_gpu_gate_mul_backward(q, SPW_GATE_GELU, g[0], g[1], dout, in[0], in[1], 1, s->d[0], s->d[0], s->flags);
}

static void
add_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = in[0][i] + in[1][i];
}

static void
add_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add(q, out, in[0], in[1], s->d[0]);
}

static void
add_scaled_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = in[0][i] + 0.375 * in[1][i];
}

static void
add_scaled_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add_scaled(q, out, in[0], in[1], 0.375f, s->d[0]);
}

/* Onto nothing, and onto itself. */
static void
scaled_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0]; i++)
        out[i] = 0.75 * in[0][i];
}

static void
scaled_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
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
        examine(&(subject){"gelu", 1, {n}, n, {n}, 0, gelu_ref, gelu_fwd, gelu_bwd});
        examine(&(subject){"gelu, added", 1, {n}, n, {n}, SPW_OP_ACC_DX, gelu_ref, gelu_fwd, gelu_bwd});
        examine(&(subject){"silu_mul", 2, {n, n}, n, {n}, 0, silu_ref, silu_fwd, silu_bwd});
        examine(&(subject){
            "silu_mul, added", 2, {n, n}, n, {n}, SPW_OP_ACC_DX | SPW_OP_ACC_DX2, silu_ref, silu_fwd, silu_bwd});
        for (unsigned f = 0; f < 2; f++) {
            uint64_t M = n > 1000 ? 7 : 3, C = n > 1000 ? n / 7 : n;
            examine(&(subject){f ? "silu_mul, packed, added" : "silu_mul, packed",
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
            examine(&(subject){f ? "clamped, added" : "clamped",
                               1,
                               {M * (2 * C + 2)},
                               M * C,
                               {M, C},
                               f ? SPW_OP_ACC_DX : 0,
                               clamped_ref,
                               clamped_fwd,
                               clamped_bwd});
        }
        examine(&(subject){"gelu_mul", 2, {n, n}, n, {n}, 0, gelu_mul_ref, gelu_mul_fwd, gelu_mul_bwd});
        examine(&(subject){"gelu_mul, added",
                           2,
                           {n, n},
                           n,
                           {n},
                           SPW_OP_ACC_DX | SPW_OP_ACC_DX2,
                           gelu_mul_ref,
                           gelu_mul_fwd,
                           gelu_mul_bwd});
        examine(&(subject){"add", 2, {n, n}, n, {n}, 0, add_ref, add_fwd, NULL});
        examine(&(subject){"add_scaled", 2, {n, n}, n, {n}, 0, add_scaled_ref, add_scaled_fwd, NULL});
        examine(&(subject){"add_scaled, in place", 1, {n}, n, {n}, 0, scaled_ref, scaled_fwd, NULL});
    }
}

/* ---------------------------------------------------------------- norms: d = M, C, offset (rmsnorm) */

static void
layernorm_ref(const subject *s, double *const *in, double *out)
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
layernorm_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_layernorm(q, out, saved[0], saved[1], in[0], in[1], in[2], s->d[0], s->d[1], 0.01f);
}

static void
layernorm_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
              float *const *g)
{
    (void)out;
    spw_gpu_layernorm_backward(q, g[0], s->flags & SPW_OP_ACC_DX ? g[0] : NULL, g[1], g[2], dout, in[0], in[1],
                               saved[0], saved[1], s->d[0], s->d[1]);
}

static void
rmsnorm_ref(const subject *s, double *const *in, double *out)
{
    uint64_t C = s->d[1];
    for (uint64_t m = 0; m < s->d[0]; m++) {
        double sum = 0;
        for (uint64_t c = 0; c < C; c++)
            sum += in[0][m * C + c] * in[0][m * C + c] / (double)C;
        for (uint64_t c = 0; c < C; c++)
            out[m * C + c] = in[0][m * C + c] / sqrt(sum + 0.01) * ((double)s->d[2] + in[1][c]);
    }
}

static void
rmsnorm_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_rmsnorm(q, out, saved[1], in[0], in[1], (float)s->d[2], s->d[0], s->d[1], 0.01f);
}

static void
rmsnorm_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)out;
    spw_gpu_rmsnorm_backward(q, g[0], s->flags & SPW_OP_ACC_DX ? g[0] : NULL, g[1], dout, in[0], in[1], (float)s->d[2],
                             saved[1], s->d[0], s->d[1]);
}

/* d = M, C */
static void
gated_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0] * s->d[1]; i++)
        out[i] = in[0][i] + in[1][i] / (1 + exp(-in[2][i / s->d[1]]));
}

static void
gated_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_add_gated(q, out, in[0], in[1], in[2], s->d[0], s->d[1]);
}

static void
gated_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)out;
    memcpy(g[0], dout, s->d[0] * s->d[1] * sizeof *dout);
    spw_gpu_add_gated_backward(q, g[1], g[2], dout, in[1], in[2], s->d[0], s->d[1]);
}

/* LayerNorm, RMSNorm and a sum by gates over rows shorter than the lanes, odd, and cut into several parts. */
static void
test_norms(void **state)
{
    static const uint64_t sizes[][2] = {{1, 1}, {1, 8}, {5, 3}, {7, 33}, {3, 200}, {400, 45}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t M = sizes[i][0], C = sizes[i][1];
        examine(&(subject){"add_gated", 3, {M * C, M * C, M}, M * C, {M, C}, 0, gated_ref, gated_fwd, gated_bwd});
        for (unsigned f = 0; f <= SPW_OP_ACC_DX; f += SPW_OP_ACC_DX) {
            examine(&(subject){
                "layernorm", 3, {M * C, C, C}, M * C, {M, C}, f, layernorm_ref, layernorm_fwd, layernorm_bwd});
            for (uint64_t offset = 0; offset < 2; offset++)
                examine(&(subject){
                    "rmsnorm", 2, {M * C, C}, M * C, {M, C, offset}, f, rmsnorm_ref, rmsnorm_fwd, rmsnorm_bwd});
        }
    }
}

/* ------------------------------------------- attention: d = B, T, Hq, Hk, D, window, length of documents or 0; packed */

typedef struct heads {
    const int32_t *begins, *ends; /* in ids */
    uint64_t B, T, Hq, Hk, D, window, q_stride, kv_stride, k_at, v_at;
    const float *sinks;
} heads;

static heads
heads_of(const subject *s)
{
    heads h = {NULL, NULL, s->d[0], s->d[1], s->d[2], s->d[3], s->d[4], s->d[5], 0, 0, 0, 0, NULL};
    if (s->d[6] > 0) {
        assert_true(2 * h.B * h.T <= N_MAX);
        parity_documents(h.B, h.T, s->d[6], ids, ids + h.B * h.T);
        h.begins = ids;
        h.ends = ids + h.B * h.T;
    }
    h.q_stride = (h.Hq + 2 * h.Hk) * h.D; /* one packed input: q, then k, then v in each row */
    h.kv_stride = h.q_stride;
    h.k_at = h.Hq * h.D;
    h.v_at = (h.Hq + h.Hk) * h.D;
    return h;
}

static void
attention_ref(const subject *s, double *const *in, double *out)
{
    heads h = heads_of(s);
    double scale = 1 / sqrt((double)h.D), *p = malloc(h.T * sizeof *p);
    assert_non_null(p);
    for (uint64_t b = 0; b < h.B; b++)
        for (uint64_t head = 0; head < h.Hq; head++)
            for (uint64_t t = 0; t < h.T; t++) {
                const double *q = in[0] + (b * h.T + t) * h.q_stride + head * h.D;
                uint64_t hk = head / (h.Hq / h.Hk);
                double sum = s->inputs > 1 ? exp(in[1][head]) : 0, *o = out + (b * h.T + t) * h.Hq * h.D + head * h.D;
                uint64_t first = h.window > 0 && t + 1 > h.window ? t + 1 - h.window : 0;
                if (h.begins != NULL && (uint64_t)h.begins[b * h.T + t] > first)
                    first = (uint64_t)h.begins[b * h.T + t];
                for (uint64_t u = first; u <= t; u++) {
                    const double *k = in[0] + (b * h.T + u) * h.kv_stride + h.k_at + hk * h.D;
                    double dot = 0;
                    for (uint64_t d = 0; d < h.D; d++)
                        dot += q[d] * k[d];
                    sum += p[u] = exp(dot * scale);
                }
                for (uint64_t d = 0; d < h.D; d++) {
                    o[d] = 0;
                    for (uint64_t u = first; u <= t; u++)
                        o[d] += p[u] / sum * in[0][(b * h.T + u) * h.kv_stride + h.v_at + hk * h.D + d];
                }
            }
    free(p);
}

static spw_attention_shape
shape_of(const heads *h)
{
    return (spw_attention_shape){h->B,      h->T,        h->Hq,        h->Hk,
                                 h->D,      h->q_stride, h->kv_stride, 1 / sqrtf((float)h->D),
                                 h->window, h->begins,   h->ends,      h->sinks};
}

static void
attention_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    heads h = heads_of(s);
    spw_attention_shape shape;
    h.sinks = s->inputs > 1 ? in[1] : NULL;
    shape = shape_of(&h);
    spw_gpu_attention(q, out, saved[0], in[0], in[0] + h.k_at, in[0] + h.v_at, &shape);
}

static void
attention_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
              float *const *g)
{
    heads h = heads_of(s);
    spw_attention_shape shape;
    h.sinks = s->inputs > 1 ? in[1] : NULL;
    shape = shape_of(&h);
    spw_gpu_attention_backward(q, g[0], g[0] + h.k_at, g[0] + h.v_at, s->inputs > 1 ? g[1] : NULL, dout, out, saved[0],
                               in[0], in[0] + h.k_at, in[0] + h.v_at, &shape);
}

/*
 * Causal attention on packed qkv: one token, tiles cut off and several tiles, plain and grouped heads, odd head sizes,
 * windows of one key, inside a tile, across tiles, and one that leaves tiles unread; documents, inside tiles and over several.
 */
static void
test_attention(void **state)
{
    static const uint64_t sizes[][7] = {
        {1, 1, 1, 1, 8, 0},     {2, 7, 2, 2, 8, 0},       {1, 65, 2, 1, 20, 0},     {2, 33, 6, 2, 4, 0},
        {1, 150, 2, 1, 8, 0},   {1, 200, 1, 1, 4, 0},     {1, 40, 2, 1, 4, 1},      {2, 33, 4, 2, 6, 5},
        {1, 150, 2, 2, 8, 149}, {1, 200, 2, 1, 4, 100},   {1, 300, 1, 1, 4, 37},    {1, 290, 1, 1, 4, 129},
        {2, 40, 2, 1, 4, 0, 1}, {1, 150, 2, 1, 8, 0, 12}, {1, 290, 2, 2, 4, 0, 90}, {1, 200, 1, 1, 4, 21, 40}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t rows = sizes[i][0] * sizes[i][1], Hq = sizes[i][2], Hk = sizes[i][3], D = sizes[i][4];
        examine(&(subject){"attention",
                           1,
                           {rows * (Hq + 2 * Hk) * D},
                           rows * Hq * D,
                           {sizes[i][0], sizes[i][1], Hq, Hk, D, sizes[i][5], sizes[i][6]},
                           0,
                           attention_ref,
                           attention_fwd,
                           attention_bwd});
    }
}

/* With a logit of each head that no key has: one row, windows, documents, groups; its gradient is a sum over all rows. */
static void
test_attention_sinks(void **state)
{
    static const uint64_t sizes[][7] = {{1, 1, 1, 1, 8, 0},    {2, 33, 6, 2, 4, 0},       {1, 150, 2, 1, 8, 0},
                                        {1, 200, 2, 1, 4, 37}, {1, 150, 4, 1, 8, 21, 12}, {2, 290, 1, 1, 4, 0, 90}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t rows = sizes[i][0] * sizes[i][1], Hq = sizes[i][2], Hk = sizes[i][3], D = sizes[i][4];
        examine(&(subject){"attention with sinks",
                           2,
                           {rows * (Hq + 2 * Hk) * D, Hq},
                           rows * Hq * D,
                           {sizes[i][0], sizes[i][1], Hq, Hk, D, sizes[i][5], sizes[i][6]},
                           0,
                           attention_ref,
                           attention_fwd,
                           attention_bwd});
    }
}

/* A sink far above or below the scores takes all of the weight, or none. */
static void
test_attention_far_sinks(void **state)
{
    static const float sinks[3] = {2000.0f, -2000.0f, 0.0f}, x[9] = {1, 1, 1, 1, 1, 1, 3, 3, 3};
    float out[3], lse[3];
    spw_attention_shape shape = {
        .B = 1, .T = 1, .Hq = 3, .Hk = 3, .D = 1, .q_stride = 9, .kv_stride = 9, .scale = 1, .sinks = sinks};
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    spw_gpu_attention(q, out, lse, x, x + 3, x + 6, &shape);
    assert_true(out[0] == 0 && lse[0] == 2000);
    assert_true(out[1] == 3 && lse[1] == 1);
    assert_true(out[2] > 2 && out[2] < 3 && lse[2] > 1);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* One sequence of T tokens in pieces, in the slot of a cache; the others hold NaN. Row t of out. */
static void
attend_in_pieces(spw_gpu_queue *q, const heads *h, const float *packed, uint64_t piece, int32_t slot, float *out)
{
    uint64_t capacity = h->T + 3, elems = 3 * capacity * h->Hk * h->D;
    float *key = malloc(elems * 4), *value = malloc(elems * 4);
    assert_true(key != NULL && value != NULL);
    for (uint64_t i = 0; i < elems; i++)
        key[i] = value[i] = NAN;
    for (uint64_t t = 0; t < h->T; t += piece) {
        spw_attention_shape shape = shape_of(h);
        int32_t start = (int32_t)t;
        spw_attention_cache cache = {key, value, capacity, &slot, &start};
        const float *in = packed + t * h->q_stride;
        shape.T = h->T - t < piece ? h->T - t : piece;
        spw_gpu_attention_cached(q, out + t * h->Hq * h->D, in, in + h->k_at, in + h->v_at, &cache, &shape);
    }
    free(key);
    free(value);
}

/*
 * With a cache, whole sequences have the bits of attention without one, pieces and single tokens are within rounding of it; and
 * one token each of several sequences of different lengths has the bits of each alone.
 */
static void
test_attention_cached(void **state)
{
    static const uint64_t sizes[][6] = {{1, 1, 1, 1, 8, 0},    {1, 7, 2, 2, 8, 0},    {1, 65, 2, 1, 20, 0},
                                        {1, 150, 4, 2, 8, 0},  {1, 300, 2, 1, 4, 0},  {1, 40, 2, 1, 4, 1},
                                        {1, 200, 2, 1, 4, 37}, {1, 290, 1, 1, 4, 129}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        subject s = {.d = {sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4], sizes[i][5]}};
        heads h = heads_of(&s);
        spw_attention_shape shape;
        uint64_t n = h.T * h.Hq * h.D, seed = i;
        float *packed = malloc(h.T * h.q_stride * 4), *want = malloc(n * 4), *got = malloc(n * 4), *one = malloc(n * 4);
        spw_gpu *gpu = NULL;
        spw_gpu_queue *q = NULL;
        assert_true(packed && want && got && one);
        for (uint64_t k = 0; k < h.T * h.q_stride; k++)
            packed[k] = draw(&seed);
        h.sinks = i % 2 == 1 ? packed : NULL;
        shape = shape_of(&h);
        assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
        assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        spw_gpu_attention(q, want, saved[0], packed, packed + h.k_at, packed + h.v_at, &shape);
        attend_in_pieces(q, &h, packed, h.T, 1, got);
        assert_memory_equal(want, got, n * 4);
        for (uint64_t piece = 1; piece < h.T; piece = piece * 3 + 1) {
            attend_in_pieces(q, &h, packed, piece, 2, got);
            for (uint64_t k = 0; k < n; k++) {
                if (!(fabs((double)got[k] - (double)want[k]) <= 2e-5))
                    fail_msg("attention of %llu in pieces of %llu: element %llu is %.9g, at once it is %.9g",
                             (unsigned long long)h.T, (unsigned long long)piece, (unsigned long long)k, (double)got[k],
                             (double)want[k]);
            }
        }
        /* Three sequences that are beginnings of this one, the last token of each. */
        if (h.T >= 7) {
            uint64_t at[3] = {h.T - 1, 0, h.T / 2}, width = h.Hk * h.D;
            int32_t slots[3] = {1, 2, 0}, starts[3];
            float *key = malloc(3 * h.T * width * 4), *value = malloc(3 * h.T * width * 4),
                  *rows = malloc(3 * h.q_stride * 4);
            spw_attention_cache cache = {key, value, h.T, slots, starts};
            assert_true(key && value && rows);
            for (int k = 0; k < 3; k++) {
                starts[k] = (int32_t)at[k];
                memcpy(rows + (uint64_t)k * h.q_stride, packed + at[k] * h.q_stride, h.q_stride * 4);
                for (uint64_t t = 0; t < at[k]; t++) {
                    uint64_t to = ((uint64_t)slots[k] * h.T + t) * width;
                    memcpy(key + to, packed + t * h.q_stride + h.k_at, width * 4);
                    memcpy(value + to, packed + t * h.q_stride + h.v_at, width * 4);
                }
            }
            shape.B = 3;
            shape.T = 1;
            spw_gpu_attention_cached(q, got, rows, rows + h.k_at, rows + h.v_at, &cache, &shape);
            attend_in_pieces(q, &h, packed, 1, 0, one);
            for (int k = 0; k < 3; k++)
                assert_memory_equal(got + (uint64_t)k * h.Hq * h.D, one + at[k] * h.Hq * h.D, h.Hq * h.D * 4);
            free(key);
            free(value);
            free(rows);
        }
        spw_gpu_queue_destroy(q);
        spw_gpu_close(gpu);
        free(packed);
        free(want);
        free(got);
        free(one);
    }
}

/* Rope at given positions is rope of those rows of a sequence. */
static void
test_rope_at(void **state)
{
    enum { H = 3, D = 6, LAST = 9 };
    float table[(LAST + 1) * D], x[(LAST + 1) * H * D], some[3 * H * D];
    static const int32_t places[3] = {7, 0, LAST};
    uint64_t seed = 1;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    for (int i = 0; i < (LAST + 1) * D; i++)
        table[i] = draw(&seed);
    for (int i = 0; i < (LAST + 1) * H * D; i++)
        x[i] = draw(&seed);
    for (int k = 0; k < 3; k++)
        memcpy(some + k * H * D, x + places[k] * H * D, H * D * 4);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    spw_gpu_rope(q, x, H * D, table, LAST + 1, LAST + 1, H, D, 1);
    spw_gpu_rope_at(q, some, H * D, table, places, 3, H, D);
    for (int k = 0; k < 3; k++)
        assert_memory_equal(some + k * H * D, x + places[k] * H * D, H * D * 4);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* ---------------------------------------------------------------- head and loss: d = M, V, C, rows per chunk */

static void
loss_ref(const subject *s, double *const *in, double *out)
{
    uint64_t V = s->d[1], C = s->d[2];
    for (uint64_t m = 0; m < s->d[0]; m++) {
        double sum = 0, at_target = 0;
        for (uint64_t v = 0; v < V; v++) {
            double x = 0;
            for (uint64_t c = 0; c < C; c++)
                x += in[0][m * C + c] * in[1][v * C + c];
            sum += exp(x);
            if ((int32_t)v == ids[m])
                at_target = x;
        }
        out[m] = ids[m] < 0 ? 0 : log(sum) - at_target;
    }
}

static void
loss_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_linear_cross_entropy(q, out, NULL, NULL, in[0], in[1], ids, saved[0], s->d[3], s->d[0], s->d[1], s->d[2], 1,
                                 0);
}

/* Each row's loss weighs the same here, so the weights of the check are applied by running row by row. */
static void
loss_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    float loss;
    (void)out;
    for (uint64_t m = 0; m < s->d[0]; m++)
        spw_gpu_linear_cross_entropy(q, &loss, g[0] + m * s->d[2], g[1], in[0] + m * s->d[2], in[1], ids + m, saved[0],
                                     1, 1, s->d[1], s->d[2], dout[m], s->flags);
}

/* Linear head and cross-entropy: chunks that divide the rows and that do not, rows without a target. */
static void
test_loss(void **state)
{
    static const uint64_t sizes[][4] = {{1, 2, 1, 1}, {5, 61, 16, 2}, {9, 17, 33, 4}, {40, 100, 24, 40}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const uint64_t *d = sizes[i];
        for (uint64_t m = 0; m < d[0]; m++)
            ids[m] = m % 4 == 3 ? -1 : (int32_t)(m * 5 % d[1]);
        examine(&(subject){
            "loss", 2, {d[0] * d[2], d[1] * d[2]}, d[0], {d[0], d[1], d[2], d[3]}, 0, loss_ref, loss_fwd, loss_bwd});
        examine(&(subject){"loss, added",
                           2,
                           {d[0] * d[2], d[1] * d[2]},
                           d[0],
                           {d[0], d[1], d[2], d[3]},
                           SPW_OP_ACC_DX,
                           loss_ref,
                           loss_fwd,
                           loss_bwd});
    }
}

/* ---------------------------------------------------------------- embedding and rope: d = M, V, C / M, T, H, D */

static void
embedding_ref(const subject *s, double *const *in, double *out)
{
    for (uint64_t i = 0; i < s->d[0] * s->d[2]; i++)
        out[i] = in[0][(uint64_t)ids[i / s->d[2]] * s->d[2] + i % s->d[2]];
}

static void
embedding_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    spw_gpu_embedding(q, out, ids, in[0], s->d[0], s->d[1], s->d[2], false);
}

static void
embedding_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
              float *const *g)
{
    (void)in;
    (void)out;
    spw_gpu_embedding_backward(q, g[0], dout, ids, s->d[0], s->d[1], s->d[2]);
}

static void
rope_ref(const subject *s, double *const *in, double *out)
{
    uint64_t T = s->d[1], H = s->d[2], D = s->d[3];
    for (uint64_t i = 0; i < s->d[0] * H; i++)
        for (uint64_t j = 0; j < D / 2; j++) {
            double c = (double)saved[1][(i / H % T) * D + j], n = (double)saved[1][(i / H % T) * D + D / 2 + j];
            out[i * D + j] = in[0][i * D + j] * c - in[0][i * D + j + D / 2] * n;
            out[i * D + j + D / 2] = in[0][i * D + j + D / 2] * c + in[0][i * D + j] * n;
        }
}

static void
rope_fwd(const subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    memcpy(out, in[0], s->out_n * 4);
    spw_gpu_rope(q, out, s->d[2] * s->d[3], saved[1], s->d[0], s->d[1], s->d[2], s->d[3], 1);
}

static void
rope_bwd(const subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    (void)in;
    (void)out;
    memcpy(g[0], dout, s->out_n * 4);
    spw_gpu_rope(q, g[0], s->d[2] * s->d[3], saved[1], s->d[0], s->d[1], s->d[2], s->d[3], -1);
}

/* Embedding with repeated ids and with the add form; rotary embedding and its inverse. */
static void
test_embedding_and_rope(void **state)
{
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    float table[20], y[12], want[12];
    (void)state;
    for (uint64_t m = 0; m < 50; m++)
        ids[m] = (int32_t)(m * m % 7);
    examine(
        &(subject){"embedding", 1, {7 * 130}, 50 * 130, {50, 7, 130}, 0, embedding_ref, embedding_fwd, embedding_bwd});
    for (uint64_t i = 0; i < 11 * 12; i++) {
        saved[1][i] = (float)(i % 12 < 6 ? cos((double)i) : sin((double)i - 6));
    }
    examine(&(subject){"rope", 1, {22 * 3 * 12}, 22 * 3 * 12, {22, 11, 3, 12}, 0, rope_ref, rope_fwd, rope_bwd});
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int i = 0; i < 20; i++)
        table[i] = (float)i;
    for (int i = 0; i < 12; i++) {
        y[i] = 100;
        want[i] = 100 + table[(uint64_t)ids[i / 4] * 4 % 20 + (uint64_t)i % 4];
    }
    spw_gpu_embedding(q, y, ids, table, 3, 5, 4, true);
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
    uint64_t kept = 0, bad = 0;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int i = 0; i < N; i++)
        x[i] = (float)(i % 13 - 6);
    for (int i = 0; i < N; i++)
        x[i] = x[i] == 0 ? 1 : x[i];
    spw_gpu_dropout(q, y, x, N, 0.25f, 42, 1);
    spw_gpu_dropout(q, again, x, N, 0.25f, 42, 1);
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
    x[77] = NAN;
    x[9999] = -INFINITY;
    spw_gpu_count_nonfinite(q, &bad, x, N);
    assert_int_equal(bad, 2);
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
    spw_gpu_gelu(q, y, x, C);
    assert_true(isnan(y[21]));
    spw_gpu_gate_mul(q, SPW_GATE_SILU, y, x, w, 1, C, C);
    assert_true(isnan(y[21]));
    spw_gpu_gate_mul(q, SPW_GATE_GELU, y, x, w, 1, C, C);
    assert_true(isnan(y[21]));
    spw_gpu_gate_mul(q, SPW_GATE_CLAMPED, y, x, NULL, 1, C / 2, C);
    assert_true(isnan(y[10]));
    spw_gpu_layernorm(q, y, &mean, &rstd, x, g, b, 1, C, 1e-5f);
    assert_true(isnan(y[0]));
    spw_gpu_rmsnorm(q, y, &rstd, x, g, 0, 1, C, 1e-5f);
    assert_true(isnan(y[0]));
    spw_gpu_linear(q, y, x, w, NULL, 1, V, C, 0);
    assert_true(isnan(y[0]));
    spw_gpu_linear_cross_entropy(q, &loss, NULL, NULL, x, w, &target, logits, 1, 1, V, C, 1, 0);
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
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda:x"}, &err), SPW_EINVAL);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "tpu"}, &err), SPW_EINVAL);
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
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_sinks),
        cmocka_unit_test(test_attention_far_sinks),
        cmocka_unit_test(test_attention_cached),
        cmocka_unit_test(test_rope_at),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_embedding_and_rope),
        cmocka_unit_test(test_dropout_and_sums),
        cmocka_unit_test(test_nan_spreads),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_queues),
        cmocka_unit_test(test_pieces),
    };
    const char *given = getenv("SPW_ISA");
    int failed = 0;
    for (int isa = 0; isa <= (int)spw_cpu_isa_native(); isa++) {
        if (given != NULL && strcmp(given, spw_isa_name((spw_isa)isa)) != 0)
            continue;
        setenv("SPW_ISA", spw_isa_name((spw_isa)isa), 1);
        failed += cmocka_run_group_tests_name(spw_isa_name((spw_isa)isa), tests, NULL, NULL);
    }
    return failed;
}
