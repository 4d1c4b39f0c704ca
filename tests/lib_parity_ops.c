/* Products, element-wise operations, norms, embeddings and the loss beside the cpu device. */
#include "lib_reference.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- linear: d = M, N, K */

static void
run_linear(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    spw_gpu_linear(q, p[3], p[0], p[1], s->d[3] ? p[2] : NULL, M, N, K, s->flags);
    if ((s->flags & SPW_OP_BY_ROW) == 0)
        spw_gpu_linear_backward(q, p[5], p[6], p[7], p[4], p[0], p[1], M, N, K, s->flags);
}

static void
linear_of(const parity *p, uint64_t M, uint64_t N, uint64_t K, bool bias, unsigned flags)
{
    subject_examine(p, &(subject){.name = flags & SPW_OP_BY_ROW ? "linear by row" : "linear",
                                  .a = {{ACT, M * K, 0, 0},
                                        {ACT, N * K, 0, 0},
                                        {ACT, N, 0, 0},
                                        {ACT_OUT, M * N, 0, 0},
                                        {ACT, M * N, 0, 0},
                                        {flags & SPW_OP_ACC_DX ? ACT : ACT_OUT, M * K, 0, 0},
                                        {flags & SPW_OP_SET_DW ? FP32_OUT : FP32, N * K, 0, 0},
                                        {FP32, N, 0, 0}},
                                  .d = {M, N, K, bias},
                                  .flags = flags,
                                  .worst = SUBJECT_PRODUCT,
                                  .run = run_linear});
}

void
parity_linear(const parity *p)
{
    static const uint64_t sizes[][3] = {{1, 1, 1},    {3, 7, 5},      {17, 33, 19},   {70, 66, 40},     {130, 3, 65},
                                        {8, 136, 72}, {64, 192, 768}, {333, 250, 84}, {1000, 768, 3072}};
    for (size_t i = 0; i < (p->large ? sizeof sizes / sizeof sizes[0] : 6); i++)
        for (unsigned f = 0; f < 6; f += i < 6 ? 1 : 3)
            linear_of(p, sizes[i][0], sizes[i][1], sizes[i][2], f != 1,
                      (f & 1 ? SPW_OP_W_IN_OUT : 0) | (f & 2 ? SPW_OP_ACC_DX : 0) | (f & 4 ? SPW_OP_SET_DW : 0));
}

static void
run_linear_add(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    spw_gpu_linear_add(q, p[3], p[4], p[0], p[1], s->d[3] ? p[2] : NULL, M, N, K, s->flags);
    if ((s->flags & SPW_OP_BY_ROW) == 0)
        spw_gpu_linear_add(q, p[4], p[4], p[0], p[1], p[2], M, N, K, s->flags);
}

/* Through a gelu, and back through a second layer with the same weights the other way round. */
static void
run_linear_gelu(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    unsigned turned = (s->flags & ~SPW_OP_BY_ROW) ^ SPW_OP_W_IN_OUT;
    spw_gpu_linear_gelu(q, p[3], p[4], p[0], p[1], s->d[3] ? p[2] : NULL, M, N, K, s->flags);
    spw_gpu_linear_gelu_backward(q, p[5], p[6], p[7], p[0], p[3], p[4], p[1], M, K, N, turned);
}

/* Or else a gelu takes all to 0 or lets it through, and one logit gets all that a softmax has to give. */
static void
scale_weights(const subject *s, float **host, int32_t **ints)
{
    (void)ints;
    subject_scale(host[1], s->a[1].n, s->d[2]);
}

/* Where one number goes through it, on the side where no gradient vanishes. */
static void
scale_into_gelu(const subject *s, float **host, int32_t **ints)
{
    scale_weights(s, host, ints);
    for (int k = 0; k < 3 && s->d[0] * s->d[1] * s->d[2] == 1; k++)
        host[k][0] = fabsf(host[k][0]);
}

/* What a product does on its way out: onto another array, into a gelu, and back through one. */
void
parity_linear_and_more(const parity *p)
{
    static const uint64_t sizes[][3] = {{1, 1, 1},    {3, 7, 5},    {17, 33, 19},   {70, 66, 40},
                                        {130, 3, 65}, {8, 136, 72}, {333, 256, 84}, {1000, 3072, 768}};
    for (size_t i = 0; i < (p->large ? 8 : 6); i++)
        for (unsigned f = 0; f < 4; f += i < 6 ? 1 : 3) {
            uint64_t M = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
            unsigned flags = (f & 1 ? SPW_OP_W_IN_OUT : 0) | (f & 2 ? SPW_OP_BY_ROW : 0);
            subject_examine(p, &(subject){.name = "linear, added",
                                          .a = {{ACT, M * K, 0, 0},
                                                {ACT, N * K, 0, 0},
                                                {ACT, N, 0, 0},
                                                {ACT_OUT, M * N, 0, 0},
                                                {ACT, M * N, 0, 0}},
                                          .d = {M, N, K, f != 1},
                                          .flags = flags,
                                          /* By row the product is rounded before it is added. */
                                          .worst = {3e-6, f & 2 ? 3e-3 : 2e-5, f & 2 ? 4e-4 : 2e-5},
                                          .reference = M * N * K < 10000000 ? reference_linear_add : NULL,
                                          .ways = 2,
                                          .run = run_linear_add});
            subject_examine(p, &(subject){.name = "linear, gelu",
                                          .a = {{ACT, M * K, 0, 0},
                                                {ACT, N * K, 0, 0},
                                                {ACT, N, 0, 0},
                                                {ACT_OUT, M * N, 0, 0},
                                                {ACT_OUT, M * N, 0, 0},
                                                {ACT_OUT, M * N, 0, 0},
                                                {FP32, N * K, 0, 0},
                                                {FP32, K, 0, 0}},
                                          .d = {M, N, K, f != 1},
                                          .flags = flags,
                                          .worst = {3e-6, 4e-3, 5e-4}, /* what goes into the gelu, and its gradient */
                                          .reference = M * N * K < 10000000 ? reference_linear_gelu : NULL,
                                          .ways = 2,
                                          .run = run_linear_gelu,
                                          .prepare = scale_into_gelu});
        }
}

void
parity_linear_by_row(const parity *p)
{
    static const uint64_t sizes[][3] = {{1, 1, 1}, {3, 7, 5}, {4, 33, 19}, {5, 40, 264}, {9, 3, 65}, {11, 768, 3072}};
    for (size_t i = 0; i < (p->large ? 6 : 5); i++)
        for (unsigned f = 0; f < 2; f++) {
            uint64_t M = sizes[i][0], N = sizes[i][1], K = sizes[i][2], n = M * N;
            unsigned flags = SPW_OP_BY_ROW | (f & 1 ? SPW_OP_W_IN_OUT : 0);
            uint16_t *x = subject_need(M * K * 4), *w = subject_need(N * K * 4), *all = subject_need(n * 4),
                     *one = subject_need(n * 4);
            void *dx = NULL, *dw = NULL, *dy = NULL;
            uint32_t bytes = spw_dtype_bytes(spw_gpu_get_info(p->gpu)->compute_dtype);
            spw_gpu_queue *q = NULL;
            linear_of(p, M, N, K, f, flags);
            /* A row alone has the bits it has among others. */
            memset(x, 0x3c, M * K * 4);
            memset(w, 0x3d, N * K * 4);
            for (uint64_t k = 0; k < M * K * bytes / 2; k++)
                x[k] = (uint16_t)(0x3c00 + (k * 7919) % 777);
            for (uint64_t k = 0; k < N * K * bytes / 2; k++)
                w[k] = (uint16_t)(0xbc00 + (k * 104729) % 555);
            assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
            assert_int_equal(spw_gpu_alloc(p->gpu, &dx, M * K * 4, NULL), SPW_OK);
            assert_int_equal(spw_gpu_alloc(p->gpu, &dw, N * K * 4, NULL), SPW_OK);
            assert_int_equal(spw_gpu_alloc(p->gpu, &dy, n * 4, NULL), SPW_OK);
            spw_gpu_write_bytes(q, dx, x, M * K * bytes);
            spw_gpu_write_bytes(q, dw, w, N * K * bytes);
            spw_gpu_linear(q, dy, dx, dw, NULL, M, N, K, flags);
            spw_gpu_read_bytes(q, all, dy, n * bytes);
            for (uint64_t m = 0; m < M; m++)
                spw_gpu_linear(q, (char *)dy + m * N * bytes, (char *)dx + m * K * bytes, dw, NULL, 1, N, K, flags);
            spw_gpu_read_bytes(q, one, dy, n * bytes);
            assert_memory_equal(all, one, n * bytes);
            spw_gpu_free(p->gpu, dx);
            spw_gpu_free(p->gpu, dw);
            spw_gpu_free(p->gpu, dy);
            spw_gpu_queue_destroy(q);
            free(x);
            free(w);
            free(all);
            free(one);
        }
}

/* ---------------------------------------------------------------- element-wise: d = n */

/* d = n, kind */
static void
run_curve(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_curve(q, (spw_curve)s->d[1], p[1], p[0], s->d[0]);
    spw_gpu_curve_backward(q, (spw_curve)s->d[1], p[3], p[2], p[0], s->d[0], s->flags);
}

/* d = n, which gradient is not wanted, kind */
static void
run_gate(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t n = s->d[0];
    spw_gate kind = (spw_gate)s->d[2];
    spw_gpu_gate_mul(q, kind, p[2], p[0], p[1], 1, n, n);
    spw_gpu_gate_mul_backward(q, kind, s->d[1] == 1 ? NULL : p[4], s->d[1] == 2 ? NULL : p[5], p[3], p[0], p[1], 1, n,
                              n, s->flags);
}

/* d = M, C, stride: halves of one array, and of its gradient. */
static void
run_silu_packed(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1], stride = s->d[2];
    spw_gpu_gate_mul(q, SPW_GATE_SILU, p[1], p[0], subject_elem(p[0], C), M, C, stride);
    spw_gpu_gate_mul_backward(q, SPW_GATE_SILU, p[3], subject_elem(p[3], C), p[2], p[0], subject_elem(p[0], C), M, C,
                              stride, s->flags);
}

/* d = M, C, stride: pairs. */
static void
run_clamped(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1], stride = s->d[2];
    spw_gpu_gate_mul(q, SPW_GATE_CLAMPED, p[1], p[0], NULL, M, C, stride);
    spw_gpu_gate_mul_backward(q, SPW_GATE_CLAMPED, p[3], NULL, p[2], p[0], NULL, M, C, stride, s->flags);
}

/* Some pairs are cut off, on each side. */
static void
stretch(const subject *s, float **host, int32_t **ints)
{
    (void)ints;
    for (uint64_t i = 0; i < s->d[0] * s->d[2]; i++)
        host[0][i] *= 16;
}

static void
stretch_both(const subject *s, float **host, int32_t **ints)
{
    (void)ints;
    for (uint64_t i = 0; i < s->d[0]; i++) {
        host[0][i] *= 16;
        host[1][i] *= 16;
    }
}

static void
examine_packed(const parity *p)
{
    static const uint64_t sizes[][3] = {{1, 1, 2},   {3, 8, 16},     {5, 29, 58},  {4, 24, 56},
                                        {7, 40, 83}, {33, 264, 528}, {700, 7, 14}, {300, 8192, 16384}};
    for (size_t i = 0; i < (p->large ? 8 : 7); i++)
        for (unsigned f = 0; f < 2; f++) {
            uint64_t M = sizes[i][0], C = sizes[i][1], stride = sizes[i][2];
            subject_examine(p, &(subject){.name = "silu_mul, packed",
                                          .a = {{ACT, M * stride, 0, 0},
                                                {ACT_OUT, M * C, 0, 0},
                                                {ACT, M * C, 0, 0},
                                                {f || stride > 2 * C ? ACT : ACT_OUT, M * stride, 0, 0}},
                                          .d = {M, C, stride},
                                          .flags = f ? SPW_OP_ACC_DX | SPW_OP_ACC_DX2 : 0,
                                          .run = run_silu_packed});
            subject_examine(p, &(subject){.name = "clamped",
                                          .a = {{ACT, M * stride, 0, 0},
                                                {ACT_OUT, M * C, 0, 0},
                                                {ACT, M * C, 0, 0},
                                                {f || stride > 2 * C ? ACT : ACT_OUT, M * stride, 0, 0}},
                                          .d = {M, C, stride},
                                          .flags = f ? SPW_OP_ACC_DX : 0,
                                          .run = run_clamped,
                                          .prepare = stretch});
        }
}

/* Onto nothing, onto another, in place, and at an odd address; by a number, and by one that is there in terms. */
static void
run_add(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t n = s->d[0];
    spw_gpu_add(q, p[2], p[0], p[1], n);
    spw_gpu_add_scaled(q, p[3], NULL, p[1], 0.375f, n);
    spw_gpu_add_scaled(q, p[4], p[4], p[0], -0.75f, n);
    if (n > 1) {
        spw_gpu_copy_d2d(q, p[5], subject_type(), p[0], subject_type(), n, NULL);
        spw_gpu_add(q, subject_elem(p[5], 1), subject_elem(p[0], 1), p[1], n - 1);
    }
    spw_gpu_zero(q, p[6], n * 4);
    spw_gpu_add_scaled_by(q, p[8], p[0], p[1], p[7], n);
    spw_gpu_add_scaled_by(q, p[9], p[9], NULL, p[7], n);
}

static void
run_soft_cap(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_soft_cap(q, p[1], p[0], 0.4f, s->d[0]);
    spw_gpu_soft_cap(q, p[2], p[2], 30, s->d[0]);
}

static void
run_dropout(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_dropout(q, p[1], p[0], s->d[0], 0.25f, 42 + s->d[0], 3, s->d[1]);
}

void
parity_elements(const parity *p)
{
    examine_packed(p);
    static const char *const curves[SPW_CURVE_COUNT] = {"gelu", "gelu, exact", "relu", "relu, squared"};
    static const char *const gates[SPW_GATE_CLAMPED] = {"silu_mul", "gelu_mul", "sigmoid_mul", "silu_mul, clamped",
                                                        "plain_mul"};
    static const uint64_t lengths[] = {1, 15, 16, 17, 100, 2049, 4100, 1000003};
    for (size_t i = 0; i < (p->large ? 8 : 7); i++) {
        uint64_t n = lengths[i];
        for (unsigned f = 0; f < 4; f++) {
            subject_kind dx = f & 1 ? ACT : ACT_OUT, dx2 = f & 2 ? ACT : ACT_OUT;
            unsigned flags = (f & 1 ? SPW_OP_ACC_DX : 0) | (f & 2 ? SPW_OP_ACC_DX2 : 0);
            for (uint64_t kind = 0; f < 2 && kind < SPW_CURVE_COUNT; kind++)
                subject_examine(p, &(subject){.name = curves[kind],
                                              .a = {{ACT, n, 0, 0}, {ACT_OUT, n, 0, 0}, {ACT, n, 0, 0}, {dx, n, 0, 0}},
                                              .d = {n, kind},
                                              .flags = flags,
                                              .run = run_curve});
            for (uint64_t kind = SPW_GATE_SILU; kind < SPW_GATE_CLAMPED; kind++)
                subject_examine(p, &(subject){.name = gates[kind],
                                              .a = {{ACT, n, 0, 0},
                                                    {ACT, n, 0, 0},
                                                    {ACT_OUT, n, 0, 0},
                                                    {ACT, n, 0, 0},
                                                    {dx, n, 0, 0},
                                                    {dx2, n, 0, 0}},
                                              .d = {n, f == 0 ? i % 3 : 0, kind},
                                              .flags = flags,
                                              .run = run_gate,
                                              .prepare = kind == SPW_GATE_SILU_CLAMPED ? stretch_both : NULL});
        }
        for (uint64_t first = 0; first < 4; first++)
            subject_examine(p, &(subject){.name = "dropout",
                                          .a = {{ACT, n, 0, 0}, {ACT_OUT, n, 0, 0}},
                                          .d = {n, 3 * first},
                                          .run = run_dropout});
        subject_examine(p, &(subject){.name = "soft cap",
                                      .a = {{ACT, n, 0, 0}, {ACT_OUT, n, 0, 0}, {ACT, n, 0, 0}},
                                      .d = {n},
                                      .run = run_soft_cap});
        subject_examine(p, &(subject){.name = "add",
                                      .a = {{ACT, n, 0, 0},
                                            {ACT, n, 0, 0},
                                            {ACT_OUT, n, 0, 0},
                                            {ACT_OUT, n, 0, 0},
                                            {ACT, n, 0, 0},
                                            {ACT, n, 0, 0},
                                            {FP32, n, 0, 0},
                                            {ACT, SPW_TERMS, 0, 0},
                                            {ACT_OUT, n, 0, 0},
                                            {ACT, n, 0, 0}},
                                      .d = {n},
                                      .run = run_add});
    }
}

/* ---------------------------------------------------------------- norms: d = M, C, the array that dx is put onto (8: none), offset */

static void
run_layernorm(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1];
    float *mean = p[6], *rstd = mean + M, *dg = p[7], *db = dg + C;
    spw_gpu_layernorm(q, p[2], mean, rstd, p[0], p[1], p[5], M, C, 0.01f);
    spw_gpu_layernorm_backward(q, p[4], s->d[2] < 8 ? p[s->d[2]] : NULL, dg, db, p[3], p[0], p[1], mean, rstd, M, C);
}

static void
run_layernorm_unbiased(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1];
    float *mean = p[6], *rstd = mean + M;
    spw_gpu_layernorm(q, p[2], mean, rstd, p[0], p[1], NULL, M, C, 0.01f);
    spw_gpu_layernorm_backward(q, p[4], s->d[2] < 8 ? p[s->d[2]] : NULL, p[7], NULL, p[3], p[0], p[1], mean, rstd, M,
                               C);
}

static void
run_rmsnorm(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1];
    float *rstd = (float *)p[6] + M;
    spw_gpu_layernorm(q, p[2], p[6], rstd, p[0], p[1], p[5], M, C, 0.01f); /* fills what rmsnorm leaves */
    spw_gpu_rmsnorm(q, p[2], rstd, p[0], p[1], (float)s->d[3], M, C, C, 0.01f);
    spw_gpu_rmsnorm_backward(q, p[4], s->d[2] < 8 ? p[s->d[2]] : NULL, p[7], p[3], p[0], p[1], (float)s->d[3], rstd, M,
                             C, C);
}

/* Of each row's halves, by weights of their own. */
static void
run_half_norms(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1], half = C / 2;
    for (uint64_t k = 0; k < 2; k++) {
        uint64_t at = k * half;
        float *rstd = (float *)p[6] + k * M;
        void *x = subject_elem(p[0], at), *g = subject_elem(p[1], at);
        void *onto = s->d[2] < 8 ? subject_elem(p[s->d[2]], at) : NULL;
        spw_gpu_rmsnorm(q, subject_elem(p[2], at), rstd, x, g, (float)s->d[3], M, half, C, 0.01f);
        spw_gpu_rmsnorm_backward(q, subject_elem(p[4], at), onto, (float *)p[7] + at, subject_elem(p[3], at), x, g,
                                 (float)s->d[3], rstd, M, half, C);
    }
}

static void
run_plain_norm(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1];
    float *rstd = (float *)p[6] + M;
    spw_gpu_layernorm(q, p[2], p[6], rstd, p[0], p[1], p[5], M, C, 0.01f); /* likewise */
    spw_gpu_rmsnorm(q, p[2], rstd, p[0], NULL, 1, M, C, C, 0.01f);
    spw_gpu_rmsnorm_backward(q, p[4], s->d[2] < 8 ? p[s->d[2]] : NULL, NULL, p[3], p[0], NULL, 1, rstd, M, C, C);
}

/* d = M, C; onto another, and onto itself. */
static void
run_gated(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1];
    spw_gpu_add_gated(q, p[3], p[0], p[1], p[2], M, C);
    spw_gpu_add_gated_backward(q, p[4], p[5], p[0], p[1], p[2], M, C);
    spw_gpu_add_gated(q, p[6], p[6], p[1], p[2], M, C);
}

void
parity_norms(const parity *p)
{
    static const uint64_t sizes[][2] = {{1, 1},    {1, 8},    {5, 3},    {7, 33},   {3, 200},    {70, 45},
                                        {70, 264}, {6, 1030}, {4200, 9}, {90, 520}, {100, 8192}, {4100, 768}};
    for (size_t i = 0; i < (p->large ? 12 : 10); i++)
        for (unsigned f = 0; f < 15; f++) {
            static const uint64_t onto[] = {8, 4, 0}; /* nothing, dx, x */
            static const char *const names[] = {"layernorm", "rmsnorm", "rmsnorm, plain", "layernorm, unbiased",
                                                "rmsnorm, halves"};
            static void (*const runs[])(const subject *, spw_gpu_queue *, void **) = {
                run_layernorm, run_rmsnorm, run_plain_norm, run_layernorm_unbiased, run_half_norms};
            uint64_t M = sizes[i][0], C = sizes[i][1];
            if (f == 0)
                subject_examine(p, &(subject){.name = "add_gated",
                                              .a = {{ACT, M * C, 0, 0},
                                                    {ACT, M * C, 0, 0},
                                                    {ACT, M, 0, 0},
                                                    {ACT_OUT, M * C, 0, 0},
                                                    {ACT_OUT, M * C, 0, 0},
                                                    {ACT_OUT, M, 0, 0},
                                                    {ACT, M * C, 0, 0}},
                                              .d = {M, C},
                                              .run = run_gated});
            if (f % 5 == 4 && C % 2 != 0)
                continue;
            subject_examine(p, &(subject){.name = names[f % 5],
                                          .a = {{ACT, M * C, 0, 0},
                                                {ACT, C, 0, 0},
                                                {ACT_OUT, M * C, 0, 0},
                                                {ACT, M * C, 0, 0},
                                                {f / 5 == 1 ? ACT : ACT_OUT, M * C, 0, 0},
                                                {ACT, C, 0, 0},
                                                {FP32_OUT, 2 * M, 0, 0},
                                                {FP32, 2 * C, 0, 0}},
                                          .d = {M, C, onto[f / 5], i % 2},
                                          .run = runs[f % 5]});
        }
}

/* ---------------------------------------------------------------- embedding d = M, V, C; rope d = M, T, H, D, stride, forward, R,
 * neighbors; heads d = M, H, D */

static void
expect_same(spw_gpu_queue *q, const void *a, const void *b, uint64_t bytes)
{
    void *of_a = subject_need(bytes), *of_b = subject_need(bytes);
    spw_gpu_read_bytes(q, of_a, a, bytes);
    spw_gpu_read_bytes(q, of_b, b, bytes);
    assert_memory_equal(of_a, of_b, bytes);
    free(of_a);
    free(of_b);
}

/* As a whole and in three pieces of the table, the last one first: bit for bit the same. */
static void
run_embedding(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], V = s->d[1], C = s->d[2], ends[] = {0, (V + 3) / 4, (V + 1) / 2, V};
    spw_gpu_copy_d2d(q, p[5], subject_type(), p[2], subject_type(), M * C, NULL);
    spw_gpu_copy_d2d(q, p[6], SPW_F32, p[4], SPW_F32, V * C, NULL);
    spw_gpu_embedding(q, p[2], p[0], p[1], 0, M, V, C, s->d[3]);
    spw_gpu_embedding_backward(q, p[4], p[3], p[0], 0, M, V, C);
    for (int k = 2; k >= 0; k--) {
        uint64_t at = ends[k], n = ends[k + 1] - at;
        spw_gpu_embedding(q, p[5], p[0], subject_elem(p[1], at * C), at, M, n, C, s->d[3]);
        spw_gpu_embedding_backward(q, (float *)p[6] + at * C, p[3], p[0], at, M, n, C);
        if (k == 2 && V > 1) /* rows of the other pieces are as they were */
            spw_gpu_copy_d2d(q, p[7], subject_type(), p[5], subject_type(), M * C, NULL);
    }
    expect_same(q, p[2], p[5], M * C * spw_dtype_bytes(subject_type()));
    expect_same(q, p[4], p[6], V * C * sizeof(float));
}

static void
run_rope(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t *d = s->d;
    spw_gpu_rope(q, p[0], d[4], p[1], NULL, d[0], d[1], d[2], d[3], d[6], d[7], d[5] ? 1 : -1);
    spw_gpu_rope(q, p[2], d[4], p[1], p[3], d[0], 1, d[2], d[3], d[6], d[7], d[5] ? -1 : 1);
}

/* Heads with something behind each, to others; one head to all, behind those; and all to one, summed. */
static void
run_heads(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], H = s->d[1], D = s->d[2];
    spw_gpu_copy_heads(q, p[1], H * 2 * D, 2 * D, p[0], H * 3 * D, 3 * D, M, H, D);
    spw_gpu_copy_heads(q, subject_elem(p[1], D), H * 2 * D, 2 * D, p[0], H * 3 * D, 0, M, H, D);
    spw_gpu_sum_heads(q, p[2], D, p[0], H * 3 * D, 3 * D, M, H, D);
}

void
parity_embedding_and_rope(const parity *p)
{
    static const uint64_t tables[][3] = {{1, 1, 1}, {50, 7, 130}, {300, 40, 8}, {140, 2, 300}, {8192, 50257, 768}};
    static const uint64_t ropes[][6] = {
        {1, 1, 1, 2, 2, 2},     {22, 11, 3, 12, 40, 12}, {5, 9, 2, 64, 128, 48},        {50, 9, 3, 40, 128, 32},
        {30, 7, 2, 24, 51, 16}, {40, 8, 5, 24, 128, 8},  {2048, 1024, 12, 64, 2304, 64}};
    for (size_t i = 0; i < (p->large ? 5 : 4); i++)
        for (int add = i < 4 ? 0 : 1; add < 2; add++) {
            uint64_t M = tables[i][0], V = tables[i][1], C = tables[i][2];
            subject_examine(p, &(subject){.name = "embedding",
                                          .a = {{INT, M, V, 0},
                                                {ACT, V * C, 0, 0},
                                                {add ? ACT : ACT_OUT, M * C, 0, 0},
                                                {ACT, M * C, 0, 0},
                                                {FP32, V * C, 0, 0},
                                                {ACT_OUT, M * C, 0, 0},
                                                {FP32_OUT, V * C, 0, 0},
                                                {ACT_OUT, M * C, 0, 0}},
                                          .d = {M, V, C, (uint64_t)add},
                                          .run = run_embedding});
        }
    for (size_t i = 0; i < (p->large ? 7 : 6); i++)
        for (uint64_t k = 0; k < 4; k++) {
            const uint64_t *d = ropes[i];
            subject_examine(p, &(subject){.name = "rope",
                                          .a = {{ACT, d[0] * d[4], 0, 0},
                                                {FP32, d[1] * d[3], 0, 0},
                                                {ACT, d[0] * d[4], 0, 0},
                                                {INT, d[0], d[1], 0}},
                                          .d = {d[0], d[1], d[2], d[3], d[4], k % 2, d[5], k / 2},
                                          .run = run_rope});
        }
    for (size_t i = 0; i < (p->large ? 5 : 4); i++) {
        static const uint64_t heads[][3] = {{1, 1, 1}, {22, 3, 12}, {5, 9, 64}, {70, 4, 8}, {300, 128, 64}};
        const uint64_t *d = heads[i];
        subject_examine(p, &(subject){.name = "heads",
                                      .a = {{ACT, d[0] * d[1] * d[2] * 3, 0, 0},
                                            {ACT_OUT, d[0] * d[1] * d[2] * 2, 0, 0},
                                            {ACT_OUT, d[0] * d[2], 0, 0}},
                                      .d = {d[0], d[1], d[2]},
                                      .run = run_heads});
    }
}

/* ---------------------------------------------------------------- loss: as lib_reference.c has its d */

static void
run_loss(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t *d = s->d;
    spw_gpu_linear_cross_entropy(q, p[2], d[4] ? p[3] : NULL, d[5] ? p[4] : NULL, p[0], p[1], p[5],
                                 d[7] > 0 ? p[d[7]] : NULL, p[6], d[3], d[0], d[1], d[2], 64, (float)d[6] / 4,
                                 s->flags);
    spw_gpu_zero(q, p[6], d[3] * spw_gpu_logits_stride(d[1]) * 4); /* scratch: nothing to compare */
}

/* Five forms without a cap, five with one, and two of them with weights. */
enum { LOSS_FORMS = 12 };

/* Rows without a target weigh nothing that could be multiplied. */
static void
prepare_loss(const subject *s, float **host, int32_t **ints)
{
    scale_weights(s, host, ints);
    for (uint64_t m = 0; m < s->d[0] && s->d[7] > 0; m++)
        if (ints[5][m] < 0)
            host[s->d[7]][m] = NAN;
}

void
parity_loss(const parity *p)
{
    static const uint64_t sizes[][4] = {{1, 2, 1, 1},      {5, 61, 16, 2},  {9, 17, 33, 4},
                                        {40, 104, 24, 40}, {2, 1500, 8, 2}, {200, 50257, 768, 128}};
    for (size_t i = 0; i < (p->large ? 6 : 5); i++)
        for (unsigned f = 0; f < LOSS_FORMS; f++) {
            const uint64_t *d = sizes[i];
            bool weighted = f >= 10, capped = f >= 5 && f != 10;
            if (i == 5 && f != 0 && f != 2 && f != 3 && f != 9) /* both gradients; without one, without the other */
                continue;
            subject_examine(
                p, &(subject){.name = weighted ? "weighted loss"
                                      : capped ? "loss of capped logits"
                                               : "loss",
                              .a = {{ACT, d[0] * d[2], 0, 0},
                                    {ACT, d[1] * d[2], 0, 0},
                                    {FP32_OUT, d[0], 0, 0},
                                    {f % 5 & 1 || f % 5 == 2 ? ACT : ACT_OUT, d[0] * d[2], 0, 0},
                                    {f % 5 == 4 ? FP32_OUT : FP32, d[1] * d[2], 0, 0},
                                    {INT, d[0], d[1] + 1, -1},
                                    {FP32_OUT, d[3] * spw_gpu_logits_stride(d[1]), 0, 0},
                                    {weighted ? FP32 : NONE, d[0], 0, 0}},
                              .d = {d[0], d[1], d[2], d[3], f % 5 != 2, f % 5 != 3, capped ? 12 : 0, weighted ? 7 : 0},
                              .flags = (f % 5 & 1 ? SPW_OP_ACC_DX : 0) | (f % 5 == 4 ? SPW_OP_SET_DW : 0),
                              .row = {[3] = d[2], [4] = d[2]},
                              .worst = {8e-6, capped ? 7e-3 : 3.5e-3, capped ? 8e-4 : 4e-4}, /* logits */
                              .reference = i < 5 ? reference_loss : NULL,
                              .ways = 3,
                              .run = run_loss,
                              .prepare = prepare_loss});
        }
}

/* The same in pieces of d[8] rows of the head. */
static void
run_head(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t *d = s->d, M = d[0], V = d[1], C = d[2], piece = d[8];
    float cap = (float)d[6] / 4;
    for (uint64_t first = 0; first < V; first += piece)
        spw_gpu_head_see(q, p[7], p[0], subject_elem(p[1], first * C), p[5], p[6], d[3], M, first,
                         V - first < piece ? V - first : piece, C, cap);
    spw_gpu_head_losses(q, p[2], p[7], p[5], M);
    for (uint64_t first = 0; first < V; first += piece)
        spw_gpu_head_backward(q, d[4] ? p[3] : NULL, d[5] ? (float *)p[4] + first * C : NULL, p[0],
                              subject_elem(p[1], first * C), p[5], d[7] > 0 ? p[d[7]] : NULL, p[7], p[6], d[3], M,
                              first, V - first < piece ? V - first : piece, C, 64, cap,
                              s->flags | (first > 0 ? SPW_OP_ACC_DX : 0));
    spw_gpu_zero(q, p[6], s->a[6].n * 4); /* scratch: nothing to compare */
    spw_gpu_zero(q, p[7], M * 3 * 4);     /* losses and gradients are made of these */
}

static void
reference_head(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    reference_loss(s, type, way, a, ints);
    memset(a[7], 0, s->a[7].n * sizeof *a[7]);
}

void
parity_head(const parity *p)
{
    /* M, V, C, rows per chunk, rows of a piece */
    static const uint64_t sizes[][5] = {{1, 2, 1, 1, 1},       {5, 61, 16, 2, 61},           {9, 17, 33, 4, 5},
                                        {40, 104, 24, 40, 64}, {2, 1500, 8, 2, 700},         {70, 200, 40, 32, 67},
                                        {5, 256, 8, 2, 64},    {200, 50257, 768, 128, 16400}};
    for (size_t i = 0; i < (p->large ? 8 : 7); i++)
        for (unsigned f = 0; f < LOSS_FORMS; f++) {
            const uint64_t *d = sizes[i];
            bool weighted = f >= 10, capped = f >= 5 && f != 10;
            if (i == 7 && f != 0 && f != 2 && f != 3 && f != 9)
                continue;
            subject_examine(p, &(subject){.name = weighted ? "weighted head in pieces"
                                                  : capped ? "capped head in pieces"
                                                           : "head in pieces",
                                          .a = {{ACT, d[0] * d[2], 0, 0},
                                                {ACT, d[1] * d[2], 0, 0},
                                                {FP32_OUT, d[0], 0, 0},
                                                {f % 5 & 1 || f % 5 == 2 ? FP32 : FP32_OUT, d[0] * d[2], 0, 0},
                                                {f % 5 == 4 ? FP32_OUT : FP32, d[1] * d[2], 0, 0},
                                                {INT, d[0], d[1] + 1, -1},
                                                {FP32_OUT, d[3] * spw_gpu_logits_stride(d[4]), 0, 0},
                                                {FP32_OUT, d[0] * 3, 0, 0},
                                                {weighted ? FP32 : NONE, d[0], 0, 0}},
                                          .d = {d[0], d[1], d[2], d[3], f % 5 != 2, f % 5 != 3, capped ? 12 : 0,
                                                weighted ? 8 : 0, d[4]},
                                          .flags = (f % 5 & 1 ? SPW_OP_ACC_DX : 0) | (f % 5 == 4 ? SPW_OP_SET_DW : 0),
                                          .row = {[3] = d[2], [4] = d[2]},
                                          .worst = {8e-6, capped ? 7e-3 : 3.5e-3, capped ? 8e-4 : 4e-4}, /* logits */
                                          .reference = i < 7 ? reference_head : NULL,
                                          .ways = 1,
                                          .run = run_head,
                                          .prepare = prepare_loss});
        }
}

/* ---------------------------------------------------------------- NaN */

static void
run_nan(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t C = s->d[1];
    spw_gpu_curve(q, SPW_CURVE_GELU, p[2], p[0], C);
    spw_gpu_gate_mul(q, SPW_GATE_SILU, subject_elem(p[2], C), p[0], p[1], 1, C, C);
    spw_gpu_layernorm(q, subject_elem(p[2], 2 * C), p[4], (float *)p[4] + 1, p[0], p[1], p[1], 1, C, 1e-5f);
    spw_gpu_rmsnorm(q, subject_elem(p[2], 3 * C), (float *)p[4] + 2, p[0], p[1], 0, 1, C, C, 1e-5f);
    spw_gpu_linear(q, subject_elem(p[2], 4 * C), p[0], p[1], NULL, 1, C, C, 0);
    spw_gpu_linear_cross_entropy(q, (float *)p[4] + 3, NULL, NULL, p[0], p[1], p[3], NULL, p[5], 1, 1, C, C, 1, 0, 0);
    for (uint64_t k = 0; k < 2; k++) { /* in one of two pieces, the first or the last */
        float *sums = (float *)p[4] + 5;
        spw_gpu_head_see(q, sums, p[1], subject_elem(p[6], k * C * C), p[3], p[5], 1, 1, 0, C, C, k > 0 ? 30 : 0);
        spw_gpu_head_see(q, sums, p[1], subject_elem(p[6], (1 - k) * C * C), p[3], p[5], 1, 1, C, C, C, k > 0 ? 30 : 0);
        spw_gpu_head_losses(q, sums + 3 + k, sums, p[3], 1);
    }
    spw_gpu_zero(q, (float *)p[4] + 5, 3 * 4);
    spw_gpu_zero(q, p[5], spw_gpu_logits_stride(C) * 4);
    spw_gpu_attention(
        q, subject_elem(p[2], 5 * C), (float *)p[4] + 4, p[0], p[0], p[0],
        &(spw_attention_shape){.B = 1, .T = 1, .Hq = 1, .Hk = 1, .D = C, .q_stride = C, .kv_stride = C, .scale = 1});
    spw_gpu_gate_mul(q, SPW_GATE_SIGMOID, subject_elem(p[2], 6 * C), p[0], p[1], 1, C, C);
    spw_gpu_conv(q, subject_elem(p[2], 7 * C), p[0], p[1], &(spw_conv_shape){.B = 1, .T = C, .C = 1, .K = 4});
    spw_gpu_delta(q, subject_elem(p[2], 8 * C), NULL, &(spw_delta_inputs){p[0], p[1], p[1], p[1], p[1], NULL},
                  &(spw_delta_shape){.B = 1, .T = 1, .Hk = 1, .Hv = 1, .Dk = 8, .Dv = 24}); /* in one of its values */
}

static void
one_nan(const subject *s, float **host, int32_t **ints)
{
    (void)ints;
    host[0][21] = NAN;
    host[6][s->d[1] * 13 + 21] = NAN; /* one logit of many */
}

/* A NaN in the input is a NaN in the output: it must reach the loss and the norm. */
void
parity_nan_spreads(const parity *p)
{
    enum { C = 40 };
    subject_examine(p, &(subject){.name = "nan",
                                  .a = {{ACT, C, 0, 0},
                                        {ACT, C * C, 0, 0},
                                        {ACT_OUT, 9 * C, 0, 0},
                                        {INT, 1, C, 0},
                                        {FP32_OUT, 10, 0, 0},
                                        {FP32_OUT, spw_gpu_logits_stride(C), 0, 0},
                                        {ACT, 2 * C * C, 0, 0}},
                                  .d = {1, C},
                                  .run = run_nan,
                                  .prepare = one_nan});
}
