/*
 * The parity checks. A subject is an operation on arrays; it is run on both devices from the same numbers, which bf16 holds
 * exactly, and all arrays are compared afterwards, inputs too. Outputs begin as NaN, so that what is not written shows.
 */
#include "lib_parity.h"
#include "quant.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { ARRAYS_MAX = 8 };

typedef enum kind { NONE, ACT, ACT_OUT, FP32, FP32_OUT, INT } kind;

typedef struct array {
    kind kind;
    uint64_t n;
    uint64_t below; /* INT: values from least to below - 1 */
    int64_t least;
} array;

typedef struct subject {
    const char *name;
    array a[ARRAYS_MAX];
    uint64_t d[8];
    unsigned flags;
    double slack; /* times the tolerance; 0: 1 */
    void (*run)(const struct subject *s, spw_gpu_queue *q, void **p);
    void (*prepare)(const struct subject *s, float **host, int32_t **ints); /* NULL: as drawn */
} subject;

static spw_dtype elem_type; /* the compute type of the device that runs */
static uint32_t elem_bytes;

static uint64_t
count_of(const subject *s)
{
    uint64_t k = 0;
    while (k < ARRAYS_MAX && s->a[k].kind != NONE)
        k++;
    return k;
}

static void *
need(size_t bytes)
{
    void *p = malloc(bytes + 64);
    assert_non_null(p);
    return p;
}

static void
draw(const subject *s, float **host, int32_t **ints)
{
    for (uint64_t k = 0; k < count_of(s); k++) {
        const array *a = &s->a[k];
        host[k] = need(a->n * 4);
        ints[k] = need(a->n * 4);
        for (uint64_t i = 0; i < a->n; i++) {
            uint32_t r[4];
            spw_philox(17 + k, s->d[0] * 1000003 + s->d[1] * 101 + s->flags, i, r);
            host[k][i] = a->kind == ACT_OUT || a->kind == FP32_OUT
                             ? NAN
                             : spw_bf16_to_f32(spw_f32_to_bf16(2.0f * spw_uniform_f32(r[0]) - 1.0f));
            ints[k][i] = a->kind == INT ? (int32_t)((int64_t)(r[1] % a->below) + a->least) : 0;
        }
    }
    if (s->prepare != NULL)
        s->prepare(s, host, ints);
}

/* Runs s on gpu; results[k] gets all of array k as fp32. */
static void
apply(const subject *s, spw_gpu *gpu, float **host, int32_t **ints, float **results)
{
    spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    spw_gpu_queue *q = NULL, *in = NULL, *out = NULL;
    spw_gpu_event *there = NULL, *done = NULL;
    void *p[ARRAYS_MAX] = {NULL};
    spw_error err = {0};
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&in, gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&out, gpu, SPW_QUEUE_D2H, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&there, gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&done, gpu, &err), SPW_OK);
    for (uint64_t k = 0; k < count_of(s); k++) {
        const array *a = &s->a[k];
        assert_int_equal(spw_gpu_alloc(gpu, &p[k], a->n * 4 + 256, &err), SPW_OK);
        if (a->kind == INT)
            spw_gpu_write_bytes(in, p[k], ints[k], a->n * 4);
        else
            spw_gpu_copy_h2d(in, p[k], a->kind == FP32 || a->kind == FP32_OUT ? SPW_F32 : type, host[k], SPW_F32, a->n);
    }
    spw_gpu_event_record(there, in);
    spw_gpu_event_wait(there, q);
    elem_type = type;
    elem_bytes = spw_dtype_bytes(type);
    s->run(s, q, p);
    spw_gpu_event_record(done, q);
    spw_gpu_event_wait(done, out);
    for (uint64_t k = 0; k < count_of(s); k++) {
        const array *a = &s->a[k];
        if (a->kind == INT)
            memset(results[k], 0, a->n * 4);
        else
            spw_gpu_copy_d2h(out, results[k], SPW_F32, p[k], a->kind == FP32 || a->kind == FP32_OUT ? SPW_F32 : type,
                             a->n, NULL);
    }
    spw_gpu_queue_sync(out);
    if (spw_gpu_check(gpu, &err) != SPW_OK)
        fail_msg("%s: %s", s->name, err.message);
    for (uint64_t k = 0; k < count_of(s); k++)
        spw_gpu_free(gpu, p[k]);
    spw_gpu_event_destroy(there);
    spw_gpu_event_destroy(done);
    spw_gpu_queue_destroy(q);
    spw_gpu_queue_destroy(in);
    spw_gpu_queue_destroy(out);
}

static void
compare(const parity *p, const subject *s, const float *got, const float *want, uint64_t k)
{
    static const double rounding[SPW_DTYPE_COUNT] = {1e-5, 1e-2, 2e-3};
    double tolerance = rounding[spw_gpu_get_info(p->gpu)->compute_dtype] * (s->slack > 0 ? s->slack : 1), square = 0,
           scale;
    for (uint64_t i = 0; i < s->a[k].n; i++)
        square += isfinite(want[i]) ? (double)want[i] * (double)want[i] : 0;
    scale = sqrt(square / (double)(s->a[k].n > 0 ? s->a[k].n : 1));
    for (uint64_t i = 0; i < s->a[k].n; i++) {
        double w = (double)want[i], g = (double)got[i];
        if ((isnan(w) && isnan(g)) || w == g)
            continue;
        if (!(fabs(g - w) <= tolerance * (fabs(w) + scale)))
            fail_msg("%s (%llu, %llu, %llu, %llu, %llu, %llu; flags %u): array %llu, element %llu of %llu is %.9g, the "
                     "cpu device has %.9g (rms %.3g)",
                     s->name, (unsigned long long)s->d[0], (unsigned long long)s->d[1], (unsigned long long)s->d[2],
                     (unsigned long long)s->d[3], (unsigned long long)s->d[4], (unsigned long long)s->d[5], s->flags,
                     (unsigned long long)k, (unsigned long long)i, (unsigned long long)s->a[k].n, g, w, scale);
    }
}

static void
examine(const parity *p, const subject *s)
{
    static const char *const twice[] = {"", "", NULL};
    const char *const *orders = p->orders != NULL ? p->orders : twice;
    float *host[ARRAYS_MAX], *want[ARRAYS_MAX], *got[ARRAYS_MAX], *again[ARRAYS_MAX];
    int32_t *ints[ARRAYS_MAX];
    spw_gpu *cpu = NULL;
    draw(s, host, ints);
    for (uint64_t k = 0; k < count_of(s); k++) {
        want[k] = need(s->a[k].n * 4);
        got[k] = need(s->a[k].n * 4);
        again[k] = need(s->a[k].n * 4);
    }
    assert_int_equal(spw_gpu_open(&cpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    apply(s, cpu, host, ints, want);
    spw_gpu_close(cpu);
    for (int run = 0; orders[run] != NULL; run++) {
        setenv("SPW_EMULATE_ORDER", orders[run], 1);
        apply(s, p->gpu, host, ints, run == 0 ? got : again);
        for (uint64_t k = 0; k < count_of(s); k++) {
            if (run == 0)
                compare(p, s, got[k], want[k], k);
            else if (memcmp(got[k], again[k], s->a[k].n * 4) != 0)
                fail_msg("%s: array %llu has other bits in the run \"%s\"", s->name, (unsigned long long)k,
                         orders[run]);
        }
    }
    setenv("SPW_EMULATE_ORDER", "", 1);
    for (uint64_t k = 0; k < count_of(s); k++) {
        free(host[k]);
        free(ints[k]);
        free(want[k]);
        free(got[k]);
        free(again[k]);
    }
}

/* Element i of an array of the compute type of the device that runs. */
static void *
at_elem(void *p, uint64_t i)
{
    return (char *)p + i * elem_bytes;
}

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
    examine(p, &(subject){.name = flags & SPW_OP_BY_ROW ? "linear by row" : "linear",
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
                          .slack = 4,
                          .run = run_linear});
}

void
parity_linear(const parity *p)
{
    static const uint64_t sizes[][3] = {{1, 1, 1},    {3, 7, 5},      {17, 33, 19},   {70, 66, 40},     {130, 3, 65},
                                        {8, 136, 72}, {64, 192, 768}, {333, 250, 84}, {1000, 768, 3072}};
    for (size_t i = 0; i < (p->large ? sizeof sizes / sizeof sizes[0] : 6); i++)
        for (unsigned f = 0; f < 6; f++)
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

/* What a product does on its way out: onto another array, into a gelu, and back through one. */
void
parity_linear_and_more(const parity *p)
{
    static const uint64_t sizes[][3] = {{1, 1, 1},    {3, 7, 5},    {17, 33, 19},   {70, 66, 40},
                                        {130, 3, 65}, {8, 136, 72}, {333, 256, 84}, {1000, 3072, 768}};
    for (size_t i = 0; i < (p->large ? 8 : 6); i++)
        for (unsigned f = 0; f < 4; f++) {
            uint64_t M = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
            unsigned flags = (f & 1 ? SPW_OP_W_IN_OUT : 0) | (f & 2 ? SPW_OP_BY_ROW : 0);
            examine(p, &(subject){.name = "linear, added",
                                  .a = {{ACT, M * K, 0, 0},
                                        {ACT, N * K, 0, 0},
                                        {ACT, N, 0, 0},
                                        {ACT_OUT, M * N, 0, 0},
                                        {ACT, M * N, 0, 0}},
                                  .d = {M, N, K, f != 1},
                                  .flags = flags,
                                  .slack = 4,
                                  .run = run_linear_add});
            examine(p, &(subject){.name = "linear, gelu",
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
                                  .slack = 6,
                                  .run = run_linear_gelu});
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
            uint16_t *x = need(M * K * 4), *w = need(N * K * 4), *all = need(n * 4), *one = need(n * 4);
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

static void
run_gelu(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_gelu(q, p[1], p[0], s->d[0]);
    spw_gpu_gelu_backward(q, p[3], p[2], p[0], s->d[0], s->flags);
}

static void
run_silu(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_silu_mul(q, p[2], p[0], p[1], s->d[0]);
    spw_gpu_silu_mul_backward(q, s->d[1] == 1 ? NULL : p[4], s->d[1] == 2 ? NULL : p[5], p[3], p[0], p[1], s->d[0],
                              s->flags);
}

/* Onto nothing, onto another, in place, and at an odd address. */
static void
run_add(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t n = s->d[0];
    spw_gpu_add(q, p[2], p[0], p[1], n);
    spw_gpu_add_scaled(q, p[3], NULL, p[1], 0.375f, n);
    spw_gpu_add_scaled(q, p[4], p[4], p[0], -0.75f, n);
    if (n > 1) {
        spw_gpu_copy_d2d(q, p[5], elem_type, p[0], elem_type, n, NULL);
        spw_gpu_add(q, at_elem(p[5], 1), at_elem(p[0], 1), p[1], n - 1);
    }
    spw_gpu_zero(q, p[6], n * 4);
}

static void
run_dropout(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_dropout(q, p[1], p[0], s->d[0], 0.25f, 42 + s->d[0], 3);
}

void
parity_elements(const parity *p)
{
    static const uint64_t lengths[] = {1, 15, 16, 17, 100, 2049, 4100, 1000003};
    for (size_t i = 0; i < (p->large ? 8 : 7); i++) {
        uint64_t n = lengths[i];
        for (unsigned f = 0; f < 4; f++) {
            kind dx = f & 1 ? ACT : ACT_OUT, dx2 = f & 2 ? ACT : ACT_OUT;
            unsigned flags = (f & 1 ? SPW_OP_ACC_DX : 0) | (f & 2 ? SPW_OP_ACC_DX2 : 0);
            if (f < 2)
                examine(p, &(subject){.name = "gelu",
                                      .a = {{ACT, n, 0, 0}, {ACT_OUT, n, 0, 0}, {ACT, n, 0, 0}, {dx, n, 0, 0}},
                                      .d = {n},
                                      .flags = flags,
                                      .run = run_gelu});
            examine(p, &(subject){.name = "silu_mul",
                                  .a = {{ACT, n, 0, 0},
                                        {ACT, n, 0, 0},
                                        {ACT_OUT, n, 0, 0},
                                        {ACT, n, 0, 0},
                                        {dx, n, 0, 0},
                                        {dx2, n, 0, 0}},
                                  .d = {n, f == 0 ? i % 3 : 0},
                                  .flags = flags,
                                  .run = run_silu});
        }
        examine(p,
                &(subject){.name = "dropout", .a = {{ACT, n, 0, 0}, {ACT_OUT, n, 0, 0}}, .d = {n}, .run = run_dropout});
        examine(p, &(subject){.name = "add",
                              .a = {{ACT, n, 0, 0},
                                    {ACT, n, 0, 0},
                                    {ACT_OUT, n, 0, 0},
                                    {ACT_OUT, n, 0, 0},
                                    {ACT, n, 0, 0},
                                    {ACT, n, 0, 0},
                                    {FP32, n, 0, 0}},
                              .d = {n},
                              .run = run_add});
    }
}

/* ---------------------------------------------------------------- norms: d = M, C, the array that dx is put onto (8: none) */

static void
run_layernorm(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1];
    float *mean = p[6], *rstd = mean + M, *dg = p[7], *db = dg + C;
    spw_gpu_layernorm(q, p[2], mean, rstd, p[0], p[1], p[5], M, C, 0.01f);
    spw_gpu_layernorm_backward(q, p[4], s->d[2] < 8 ? p[s->d[2]] : NULL, dg, db, p[3], p[0], p[1], mean, rstd, M, C);
}

static void
run_rmsnorm(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], C = s->d[1];
    float *rstd = (float *)p[6] + M;
    spw_gpu_layernorm(q, p[2], p[6], rstd, p[0], p[1], p[5], M, C, 0.01f); /* fills what rmsnorm leaves */
    spw_gpu_rmsnorm(q, p[2], rstd, p[0], p[1], M, C, 0.01f);
    spw_gpu_rmsnorm_backward(q, p[4], s->d[2] < 8 ? p[s->d[2]] : NULL, p[7], p[3], p[0], p[1], rstd, M, C);
}

void
parity_norms(const parity *p)
{
    static const uint64_t sizes[][2] = {{1, 1},   {1, 8},    {5, 3},    {7, 33},     {3, 200},
                                        {70, 45}, {70, 264}, {6, 1030}, {100, 8192}, {4100, 768}};
    for (size_t i = 0; i < (p->large ? 10 : 8); i++)
        for (unsigned f = 0; f < 6; f++) {
            static const uint64_t onto[] = {8, 4, 0}; /* nothing, dx, x */
            uint64_t M = sizes[i][0], C = sizes[i][1];
            examine(p, &(subject){.name = f & 1 ? "rmsnorm" : "layernorm",
                                  .a = {{ACT, M * C, 0, 0},
                                        {ACT, C, 0, 0},
                                        {ACT_OUT, M * C, 0, 0},
                                        {ACT, M * C, 0, 0},
                                        {f / 2 == 1 ? ACT : ACT_OUT, M * C, 0, 0},
                                        {ACT, C, 0, 0},
                                        {FP32_OUT, 2 * M, 0, 0},
                                        {FP32, 2 * C, 0, 0}},
                                  .d = {M, C, onto[f / 2]},
                                  .slack = 4,
                                  .run = f & 1 ? run_rmsnorm : run_layernorm});
        }
}

/* ---------------------------------------------------------------- embedding d = M, V, C; rope d = M, T, H, D, stride */

static void
run_embedding(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_embedding(q, p[2], p[0], p[1], s->d[0], s->d[1], s->d[2], s->d[3]);
    spw_gpu_embedding_backward(q, p[4], p[3], p[0], s->d[0], s->d[1], s->d[2]);
}

static void
run_rope(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t *d = s->d;
    spw_gpu_rope(q, p[0], d[4], p[1], d[0], d[1], d[2], d[3], d[5] ? 1 : -1);
    spw_gpu_rope_at(q, p[2], d[4], p[1], p[3], d[0], d[2], d[3]);
}

void
parity_embedding_and_rope(const parity *p)
{
    static const uint64_t tables[][3] = {{1, 1, 1}, {50, 7, 130}, {300, 40, 8}, {140, 2, 300}, {8192, 50257, 768}};
    static const uint64_t ropes[][5] = {
        {1, 1, 1, 2, 2}, {22, 11, 3, 12, 40}, {5, 9, 2, 64, 128}, {2048, 1024, 12, 64, 2304}};
    for (size_t i = 0; i < (p->large ? 5 : 4); i++)
        for (int add = 0; add < 2; add++) {
            uint64_t M = tables[i][0], V = tables[i][1], C = tables[i][2];
            examine(p, &(subject){.name = "embedding",
                                  .a = {{INT, M, V, 0},
                                        {ACT, V * C, 0, 0},
                                        {add ? ACT : ACT_OUT, M * C, 0, 0},
                                        {ACT, M * C, 0, 0},
                                        {FP32, V * C, 0, 0}},
                                  .d = {M, V, C, (uint64_t)add},
                                  .run = run_embedding});
        }
    for (size_t i = 0; i < (p->large ? 4 : 3); i++)
        for (uint64_t forward = 0; forward < 2; forward++) {
            const uint64_t *d = ropes[i];
            examine(p, &(subject){.name = "rope",
                                  .a = {{ACT, d[0] * d[4], 0, 0},
                                        {FP32, d[1] * d[3], 0, 0},
                                        {ACT, d[0] * d[4], 0, 0},
                                        {INT, d[0], d[1], 0}},
                                  .d = {d[0], d[1], d[2], d[3], d[4], forward},
                                  .run = run_rope});
        }
}

/* ---------------------------------------------------------------- loss: d = M, V, C, rows per chunk, has dx, has dw */

static void
run_loss(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t *d = s->d;
    spw_gpu_linear_cross_entropy(q, p[2], d[4] ? p[3] : NULL, d[5] ? p[4] : NULL, p[0], p[1], p[5], p[6], d[3], d[0],
                                 d[1], d[2], 0.5f, s->flags);
    spw_gpu_zero(q, p[6], d[3] * spw_gpu_logits_stride(d[1]) * 4); /* scratch: nothing to compare */
}

void
parity_loss(const parity *p)
{
    static const uint64_t sizes[][4] = {{1, 2, 1, 1},      {5, 61, 16, 2},  {9, 17, 33, 4},
                                        {40, 104, 24, 40}, {2, 1500, 8, 2}, {600, 50257, 768, 256}};
    for (size_t i = 0; i < (p->large ? 6 : 5); i++)
        for (unsigned f = 0; f < 5; f++) {
            const uint64_t *d = sizes[i];
            examine(p, &(subject){.name = "loss",
                                  .a = {{ACT, d[0] * d[2], 0, 0},
                                        {ACT, d[1] * d[2], 0, 0},
                                        {FP32_OUT, d[0], 0, 0},
                                        {f & 1 || f == 2 ? ACT : ACT_OUT, d[0] * d[2], 0, 0},
                                        {f == 4 ? FP32_OUT : FP32, d[1] * d[2], 0, 0},
                                        {INT, d[0], d[1] + 1, -1},
                                        {FP32_OUT, d[3] * spw_gpu_logits_stride(d[1]), 0, 0}},
                                  .d = {d[0], d[1], d[2], d[3], f != 2, f != 3},
                                  .flags = (f & 1 ? SPW_OP_ACC_DX : 0) | (f == 4 ? SPW_OP_SET_DW : 0),
                                  .slack = 5,
                                  .run = run_loss});
        }
}

/* ---------------------------------------------------------------- attention: d = B, T, Hq, Hk, D, window; packed */

static spw_attention_shape
shape_of(const subject *s)
{
    const uint64_t *d = s->d;
    uint64_t stride = (d[2] + 2 * d[3]) * d[4];
    return (spw_attention_shape){d[0], d[1], d[2], d[3], d[4], stride, stride, 1 / sqrtf((float)d[4]), d[5]};
}

static void
run_attention(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_attention_shape shape = shape_of(s);
    uint64_t k = s->d[2] * s->d[4], v = k + s->d[3] * s->d[4];
    spw_gpu_attention(q, p[1], p[2], p[0], at_elem(p[0], k), at_elem(p[0], v), &shape);
    spw_gpu_attention_backward(q, p[4], at_elem(p[4], k), at_elem(p[4], v), p[3], p[1], p[2], p[0], at_elem(p[0], k),
                               at_elem(p[0], v), &shape);
}

static void
run_attention_cached(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_attention_shape shape = shape_of(s);
    uint64_t k = s->d[2] * s->d[4], v = k + s->d[3] * s->d[4];
    spw_attention_cache cache = {p[2], p[3], s->d[6], p[4], p[5]};
    spw_gpu_attention_cached(q, p[1], p[0], at_elem(p[0], k), at_elem(p[0], v), &cache, &shape);
}

/* Slots in turn from the last, starts all over the cache; what no row has written yet is NaN. */
static void
fill_cache(const subject *s, float **host, int32_t **ints)
{
    uint64_t B = s->d[0], T = s->d[1], width = s->d[3] * s->d[4], capacity = s->d[6];
    for (uint64_t b = 0; b < B; b++) {
        ints[4][b] = (int32_t)(B - 1 - b);
        ints[5][b] = (int32_t)(b == 0 ? capacity - T : (capacity - T) * b / (B + 1));
        for (uint64_t i = (uint64_t)ints[5][b] * width; i < capacity * width; i++)
            host[2][(uint64_t)ints[4][b] * capacity * width + i] =
                host[3][(uint64_t)ints[4][b] * capacity * width + i] = NAN;
    }
}

static const uint64_t attentions[][6] = {
    {1, 1, 1, 1, 8, 0},      {2, 7, 2, 2, 8, 0},      {1, 65, 2, 1, 24, 0},      {2, 33, 6, 2, 16, 0},
    {1, 150, 2, 1, 64, 0},   {1, 40, 2, 1, 8, 1},     {2, 33, 4, 2, 6, 5},       {1, 200, 2, 1, 32, 37},
    {1, 70, 1, 1, 128, 0},   {1, 45, 2, 1, 192, 0},   {1, 40, 1, 1, 256, 9},     {1, 33, 2, 2, 5, 0},
    {1, 130, 1, 1, 104, 0},  {1, 129, 1, 1, 40, 128}, {1, 90, 2, 1, 80, 33},     {2, 1024, 12, 12, 64, 0},
    {1, 1000, 8, 2, 128, 0}, {1, 700, 4, 1, 256, 0},  {1, 2048, 8, 2, 128, 300}, {3, 333, 4, 4, 80, 0},
    {1, 513, 3, 1, 96, 64},
};
enum { SMALL_ATTENTIONS = 15, ALL_ATTENTIONS = sizeof attentions / sizeof attentions[0] };

void
parity_attention(const parity *p)
{
    for (size_t i = 0; i < (p->large ? ALL_ATTENTIONS : SMALL_ATTENTIONS); i++) {
        const uint64_t *d = attentions[i];
        uint64_t rows = d[0] * d[1], packed = rows * (d[2] + 2 * d[3]) * d[4], n = rows * d[2] * d[4];
        examine(p, &(subject){.name = "attention",
                              .a = {{ACT, packed, 0, 0},
                                    {ACT_OUT, n, 0, 0},
                                    {FP32_OUT, rows * d[2], 0, 0},
                                    {ACT, n, 0, 0},
                                    {ACT_OUT, packed, 0, 0}},
                              .d = {d[0], d[1], d[2], d[3], d[4], d[5]},
                              .slack = 2,
                              .run = run_attention});
    }
}

void
parity_attention_cached(const parity *p)
{
    static const uint64_t sizes[][7] = {
        {1, 1, 1, 1, 8, 0, 1},     {3, 1, 4, 2, 16, 0, 90},  {2, 9, 2, 1, 24, 0, 70},  {3, 1, 2, 1, 8, 20, 150},
        {2, 70, 2, 2, 8, 33, 140}, {2, 5, 2, 1, 128, 0, 70}, {1, 3, 1, 1, 256, 0, 40}, {8, 1, 12, 12, 64, 0, 1024},
    };
    for (size_t i = 0; i < (p->large ? 8 : 7); i++) {
        const uint64_t *d = sizes[i];
        uint64_t rows = d[0] * d[1], width = d[3] * d[4];
        examine(p, &(subject){.name = "attention cached",
                              .a = {{ACT, rows * (d[2] + 2 * d[3]) * d[4], 0, 0},
                                    {ACT_OUT, rows * d[2] * d[4], 0, 0},
                                    {ACT, d[0] * d[6] * width, 0, 0},
                                    {ACT, d[0] * d[6] * width, 0, 0},
                                    {INT, d[0], 1, 0},
                                    {INT, d[0], 1, 0}},
                              .d = {d[0], d[1], d[2], d[3], d[4], d[5], d[6]},
                              .slack = 2,
                              .run = run_attention_cached,
                              .prepare = fill_cache});
    }
}

/* ---------------------------------------------------------------- promises about bits */

/* One sequence of T tokens in pieces, in the slot of a cache that begins as NaN; row t of out (host). */
static void
attend_in_pieces(spw_gpu *gpu, spw_gpu_queue *q, const subject *s, void *packed, uint64_t piece, void *out)
{
    spw_attention_shape shape = shape_of(s);
    uint64_t T = shape.T, width = shape.Hk * shape.D, capacity = T + 3, k = shape.Hq * shape.D, v = k + width;
    uint64_t cache_bytes = 3 * capacity * width * elem_bytes;
    unsigned char *nan = need(cache_bytes);
    void *key = NULL, *value = NULL, *places = NULL, *y = NULL;
    memset(nan, 0xff, cache_bytes);
    assert_int_equal(spw_gpu_alloc(gpu, &key, cache_bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &value, cache_bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &places, 8, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &y, T * k * elem_bytes, NULL), SPW_OK);
    spw_gpu_write_bytes(q, key, nan, cache_bytes);
    spw_gpu_write_bytes(q, value, nan, cache_bytes);
    for (uint64_t t = 0; t < T; t += piece) {
        int32_t place[2] = {2, (int32_t)t};
        spw_attention_cache cache = {key, value, capacity, places, (const int32_t *)places + 1};
        uint64_t at = t * shape.q_stride;
        spw_gpu_write_bytes(q, places, place, sizeof place);
        shape.T = T - t < piece ? T - t : piece;
        spw_gpu_attention_cached(q, at_elem(y, t * k), at_elem(packed, at), at_elem(packed, at + k),
                                 at_elem(packed, at + v), &cache, &shape);
    }
    spw_gpu_read_bytes(q, out, y, T * k * elem_bytes);
    spw_gpu_free(gpu, key);
    spw_gpu_free(gpu, value);
    spw_gpu_free(gpu, places);
    spw_gpu_free(gpu, y);
    free(nan);
}

/* The first t of T tokens alone: rows of out (host) and, behind them, their statistics (Hq, t). */
static void
attend_to_prefix(spw_gpu *gpu, spw_gpu_queue *q, spw_attention_shape shape, uint64_t t, void *packed, void *out)
{
    uint64_t k = shape.Hq * shape.D, v = k + shape.Hk * shape.D, y_bytes = t * k * elem_bytes;
    void *y = NULL, *lse = NULL;
    assert_int_equal(spw_gpu_alloc(gpu, &y, y_bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &lse, shape.Hq * t * 4, NULL), SPW_OK);
    shape.T = t;
    spw_gpu_attention(q, y, lse, packed, at_elem(packed, k), at_elem(packed, v), &shape);
    spw_gpu_read_bytes(q, out, y, y_bytes);
    spw_gpu_read_bytes(q, (char *)out + y_bytes, lse, shape.Hq * t * 4);
    spw_gpu_free(gpu, y);
    spw_gpu_free(gpu, lse);
}

/*
 * A whole sequence through the cache has the bits of attention without one; so have its pieces, as a row's tiles are its own; and so
 * has its beginning without what follows, statistics included, where an unread tile that changes a sum by one rounding shows.
 */
void
parity_attention_bits(const parity *p)
{
    static const uint64_t sizes[][6] = {{1, 7, 2, 2, 8, 0},    {1, 65, 2, 1, 24, 0},    {1, 150, 2, 1, 8, 0},
                                        {1, 140, 2, 1, 8, 37}, {1, 1000, 4, 2, 128, 0}, {1, 700, 2, 2, 64, 300}};
    for (size_t i = 0; i < (p->large ? 6 : 4); i++) {
        subject s = {.d = {sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4], sizes[i][5]}};
        spw_attention_shape shape = shape_of(&s);
        uint64_t elems = shape.T * shape.q_stride, k = shape.Hq * shape.D, n = shape.T * k;
        uint64_t lse_bytes = shape.Hq * shape.T * 4;
        float *host = need(elems * 4);
        char *want = need(n * 4 + lse_bytes), *got = need(n * 4 + lse_bytes);
        spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
        void *packed = NULL;
        spw_gpu_queue *q = NULL;
        elem_bytes = spw_dtype_bytes(type);
        for (uint64_t e = 0; e < elems; e++) {
            uint32_t r[4];
            spw_philox(5, i, e, r);
            host[e] = 2.0f * spw_uniform_f32(r[0]) - 1.0f;
        }
        assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        assert_int_equal(spw_gpu_alloc(p->gpu, &packed, elems * elem_bytes, NULL), SPW_OK);
        spw_gpu_copy_h2d(q, packed, type, host, SPW_F32, elems);
        attend_to_prefix(p->gpu, q, shape, shape.T, packed, want);
        for (uint64_t piece = shape.T; piece > 0; piece = piece > 40 ? piece / 3 : piece > 7 ? 5 : 0) {
            attend_in_pieces(p->gpu, q, &s, packed, piece, got);
            assert_memory_equal(want, got, n * elem_bytes);
        }
        for (uint64_t t = shape.T; t > 0; t = t > 4 ? t / 3 : t - 1) {
            attend_to_prefix(p->gpu, q, shape, t, packed, got);
            assert_memory_equal(want, got, t * k * elem_bytes);
            for (uint64_t h = 0; h < shape.Hq; h++)
                assert_memory_equal(want + n * elem_bytes + h * shape.T * 4, got + t * k * elem_bytes + h * t * 4,
                                    t * 4);
        }
        spw_gpu_free(p->gpu, packed);
        spw_gpu_queue_destroy(q);
        free(host);
        free(want);
        free(got);
    }
}

/* ---------------------------------------------------------------- copies, queues, memory */

/*
 * Codes have the host's bytes, and decode to its numbers from both sides of the link. A block of zeros, one with an infinity, a
 * denormal number.
 */
static void
codes_and_numbers(const parity *p, uint64_t n, uint32_t bits, spw_dtype type)
{
    spw_quant form = bits == 8 ? SPW_QUANT_INT8 : SPW_QUANT_INT4;
    uint64_t bytes = spw__quant_bytes(form, n), width = spw_dtype_bytes(type);
    spw_region x, numbers, codes, want, got;
    void *there = NULL, *device = NULL;
    spw_gpu_queue *q = NULL;
    spw_error err = {0};
    assert_int_equal(spw_region_map(&x, n * 4, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&numbers, n * width, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&codes, bytes, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&want, n * width, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&got, n * width, 0, &err), SPW_OK);
    for (uint64_t e = 0; e < n; e++)
        ((float *)x.base)[e] = e / 128 == 2 ? 0.0f : (float)((int32_t)(e * 2654435761u) >> 8) * 0x1p-26f;
    if (n > 1000) {
        ((float *)x.base)[600] = -1.0f / 0.0f;
        ((float *)x.base)[1000] = 1e-40f;
    }
    spw_convert(numbers.base, type, x.base, SPW_F32, n);
    spw__quant_encode(codes.base, form, numbers.base, type, n);
    spw__quant_decode(want.base, type, codes.base, form, n);
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &there, bytes, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &device, n * width, &err), SPW_OK);
    spw_gpu_copy_h2d(q, device, type, numbers.base, type, n);
    spw_gpu_encode(q, there, bits, device, type, n);
    spw_gpu_copy_d2h(q, got.base, SPW_F32, there, SPW_F32, bytes / 4, NULL);
    spw_gpu_queue_sync(q);
    assert_memory_equal(got.base, codes.base, bytes);
    for (int k = 0; k < 2; k++) {
        spw_gpu_zero(q, device, n * width);
        if (k == 0)
            spw_gpu_decode(q, device, type, there, bits, n);
        else
            spw_gpu_decode_h2d(q, device, type, codes.base, bits, n);
        spw_gpu_queue_sync(q);
        spw_gpu_copy_d2h(q, got.base, type, device, type, n, NULL);
        spw_gpu_queue_sync(q);
        if (n > 1000) /* NaN has many forms */
            memcpy((char *)got.base + 512 * width, (char *)want.base + 512 * width, 128 * width);
        assert_memory_equal(got.base, want.base, n * width);
    }
    spw_gpu_queue_destroy(q);
    spw_gpu_free(p->gpu, there);
    spw_gpu_free(p->gpu, device);
    spw_region_unmap(&x);
    spw_region_unmap(&numbers);
    spw_region_unmap(&codes);
    spw_region_unmap(&want);
    spw_region_unmap(&got);
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
}

void
parity_codes(const parity *p)
{
    static const uint64_t lengths[] = {128, 4096, 69632, 4194304 + 4096, 67108864 + 4096};
    for (int i = 0; i < (p->large ? 5 : 4); i++)
        for (int k = 0; k < 6; k++) /* the last is longer than a piece of the device's staging */
            codes_and_numbers(p, lengths[i], k % 2 ? 4 : 8, (spw_dtype)(k / 2));
}

/* Every conversion in every direction has the bits of spw_convert(), sums those of the cpu device; pinned and pageable. */
void
parity_copies(const parity *p)
{
    static const uint64_t lengths[] = {1, 7, 4096, 4097, 70001, 2100017, 40000003};
    for (size_t i = 0; i < (p->large ? 7 : 6); i++)
        for (int pair = 0; pair < (i < 5 ? 9 : 2); pair++) { /* the long ones: fp32 to fp32 and to bf16 */
            spw_dtype a = (spw_dtype)(pair / 3), b = (spw_dtype)(pair % 3);
            uint64_t n = lengths[i], sums = (n + 4095) / 4096;
            spw_region x, y, want;
            double *got_sums = need(sums * 8), *want_sums = need(sums * 8), *more = need(sums * 8);
            void *da = NULL, *db = NULL;
            spw_gpu *cpu = NULL;
            spw_gpu_queue *in = NULL, *out = NULL, *plain = NULL;
            spw_error err = {0};
            assert_int_equal(spw_region_map(&x, n * 4, 0, &err), SPW_OK);
            assert_int_equal(spw_region_map(&y, n * 4, 0, &err), SPW_OK);
            assert_int_equal(spw_region_map(&want, n * 4, 0, &err), SPW_OK);
            if (i % 2 == 0) {
                assert_int_equal(spw_gpu_pin_host(p->gpu, x.base, x.bytes, &err), SPW_OK);
                assert_int_equal(spw_gpu_pin_host(p->gpu, y.base, y.bytes, &err), SPW_OK);
            }
            for (uint64_t e = 0; e < n; e++) { /* all sorts of exponents, infinities too, few NaN-like patterns */
                uint32_t r = (uint32_t)(e * 2654435761u) ^ (uint32_t)(e >> 7);
                float f = spw_bits_f32((r & 0x83ffffffu) + 0x3a000000u);
                if (a == SPW_F32)
                    ((float *)x.base)[e] = e % 1000 == 7 ? INFINITY : f;
                else
                    ((uint16_t *)x.base)[e] = a == SPW_BF16 ? spw_f32_to_bf16(f) : spw_f32_to_f16(f);
            }
            assert_int_equal(spw_gpu_open(&cpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
            assert_int_equal(spw_gpu_queue_create(&plain, cpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
            spw_gpu_copy_d2h(plain, want.base, b, x.base, a, n, want_sums);
            spw_gpu_queue_destroy(plain);
            spw_gpu_close(cpu);
            assert_int_equal(spw_gpu_queue_create(&in, p->gpu, SPW_QUEUE_H2D, &err), SPW_OK);
            assert_int_equal(spw_gpu_queue_create(&out, p->gpu, SPW_QUEUE_D2H, &err), SPW_OK);
            assert_int_equal(spw_gpu_alloc(p->gpu, &da, n * 4, &err), SPW_OK);
            assert_int_equal(spw_gpu_alloc(p->gpu, &db, n * 4, &err), SPW_OK);
            spw_gpu_copy_h2d(in, da, a, x.base, a, n); /* as it is, converted on the way back */
            spw_gpu_queue_sync(in);
            spw_gpu_copy_d2h(out, y.base, b, da, a, n, got_sums);
            spw_gpu_queue_sync(out);
            assert_memory_equal(want.base, y.base, n * spw_dtype_bytes(b));
            assert_memory_equal(want_sums, got_sums, sums * 8);
            memset(y.base, 0, y.bytes);
            spw_gpu_copy_h2d(in, db, b, x.base, a, n); /* converted on the way there */
            spw_gpu_queue_sync(in);
            spw_gpu_copy_d2h(out, y.base, b, db, b, n, NULL);
            spw_gpu_queue_sync(out);
            assert_memory_equal(want.base, y.base, n * spw_dtype_bytes(b));
            memset(y.base, 0, y.bytes);
            spw_gpu_copy_d2d(out, db, b, da, a, n, more); /* converted there */
            spw_gpu_copy_d2h(out, y.base, b, db, b, n, NULL);
            if (b == SPW_F32)
                spw_gpu_sumsq(out, got_sums, db, n);
            spw_gpu_queue_sync(out);
            assert_memory_equal(want.base, y.base, n * spw_dtype_bytes(b));
            assert_memory_equal(want_sums, more, sums * 8);
            assert_memory_equal(want_sums, got_sums, sums * 8);
            if (b == SPW_F32) {
                uint64_t bad = 99, infinite = 0;
                for (uint64_t e = 0; e < n; e++)
                    infinite += !isfinite(((float *)want.base)[e]);
                spw_gpu_count_nonfinite(out, &bad, db, n);
                spw_gpu_queue_sync(out);
                assert_int_equal(bad, infinite);
            }
            if (spw_gpu_check(p->gpu, &err) != SPW_OK)
                fail_msg("copies: %s", err.message);
            spw_gpu_free(p->gpu, da);
            spw_gpu_free(p->gpu, db);
            spw_gpu_queue_destroy(in);
            spw_gpu_queue_destroy(out);
            if (i % 2 == 0) {
                spw_gpu_unpin_host(p->gpu, x.base);
                spw_gpu_unpin_host(p->gpu, y.base);
            }
            spw_region_unmap(&x);
            spw_region_unmap(&y);
            spw_region_unmap(&want);
            free(got_sums);
            free(want_sums);
            free(more);
        }
}

static void
count_up(void *arg)
{
    __atomic_add_fetch((int *)arg, 1, __ATOMIC_SEQ_CST);
}

/* Rounds through three queues, ordered by events alone; every callback comes, and has come when its queue is synchronised. */
void
parity_queues(const parity *p)
{
    enum { N = 20000, ROUNDS = 150 };
    float *x = need(N * 4), *back = need(N * 4);
    void *a = NULL, *b = NULL;
    spw_gpu_queue *in = NULL, *q = NULL, *out = NULL;
    spw_gpu_event *there = NULL, *made = NULL, *left = NULL;
    spw_error err = {0};
    int noticed = 0;
    assert_int_equal(spw_gpu_queue_create(&in, p->gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&out, p->gpu, SPW_QUEUE_D2H, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&there, p->gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&made, p->gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&left, p->gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &a, N * 4, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &b, N * 4, &err), SPW_OK);
    spw_gpu_event_sync(left); /* never recorded: nothing to wait for */
    for (int round = 0; round < ROUNDS; round++) {
        spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
        for (int i = 0; i < N; i++)
            x[i] = (float)((i + round) % 64);
        spw_gpu_event_wait(left, in);
        spw_gpu_copy_h2d(in, a, type, x, SPW_F32, N);
        spw_gpu_event_record(there, in);
        spw_gpu_queue_notify(in, count_up, &noticed);
        spw_gpu_event_wait(there, q);
        spw_gpu_event_wait(left, q);
        spw_gpu_add(q, b, a, a, N);
        spw_gpu_event_record(made, q);
        spw_gpu_event_wait(made, out);
        spw_gpu_copy_d2h(out, back, SPW_F32, b, type, N, NULL);
        spw_gpu_queue_notify(out, count_up, &noticed);
        spw_gpu_event_record(left, out);
        spw_gpu_event_sync(left);
        for (int i = 0; i < N; i++)
            if (back[i] != 2 * x[i])
                fail_msg("round %d, element %d: %g", round, i, (double)back[i]);
    }
    spw_gpu_queue_sync(in);
    spw_gpu_queue_sync(out);
    assert_int_equal(__atomic_load_n(&noticed, __ATOMIC_SEQ_CST), 2 * ROUNDS);
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
    spw_gpu_free(p->gpu, a);
    spw_gpu_free(p->gpu, b);
    spw_gpu_event_destroy(there);
    spw_gpu_event_destroy(made);
    spw_gpu_event_destroy(left);
    spw_gpu_queue_destroy(in);
    spw_gpu_queue_destroy(q);
    spw_gpu_queue_destroy(out);
    free(x);
    free(back);
}

typedef struct spans {
    uint64_t count, tags, begin_ns, end_ns, wrong, early;
} spans;

enum { SPAN_SLACK_NS = 2000000 }; /* of two clocks, and of who is late to look */

static void
take_span(void *arg, const char *name, uint64_t tag, uint64_t begin_ns, uint64_t end_ns)
{
    spans *s = arg;
    s->wrong += strcmp(name, "work") != 0 || tag != s->count || end_ns < begin_ns;
    s->early += begin_ns + SPAN_SLACK_NS < s->end_ns;
    s->begin_ns = s->count == 0 ? begin_ns : s->begin_ns;
    s->end_ns = end_ns;
    s->tags += tag;
    s->count++;
}

/* True if the spans of a queue lie one after another within the time in which they were submitted and waited for. */
static bool
spans_fit(const parity *p, spw_gpu_queue_kind queue_kind)
{
    enum { COUNT = 600, N = 1 << 16 };
    spans s = {0};
    void *a = NULL;
    spw_gpu_queue *q = NULL;
    spw_error err = {0};
    uint64_t begin = spw_now_ns(), end;
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, queue_kind, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &a, N, &err), SPW_OK);
    for (uint64_t i = 0; i < COUNT; i++) { /* more than are under way at a time */
        spw_gpu_span_begin(q, "work");
        spw_gpu_zero(q, a, N);
        spw_gpu_span_end(q, i, take_span, &s);
    }
    spw_gpu_queue_sync(q);
    end = spw_now_ns();
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
    assert_int_equal(s.count, COUNT);
    assert_int_equal(s.wrong, 0);
    spw_gpu_free(p->gpu, a);
    spw_gpu_queue_destroy(q);
    return s.early == 0 && s.begin_ns + SPAN_SLACK_NS >= begin && s.end_ns <= end + SPAN_SLACK_NS &&
           s.end_ns > s.begin_ns;
}

/*
 * Spans come in order, each ends after it begins, and their times are the host's. Who looks at both clocks may be kept from
 * it in between by a busy machine; then another queue, which begins anew, has to do better.
 */
void
parity_spans(const parity *p)
{
    for (spw_gpu_queue_kind k = SPW_QUEUE_COMPUTE; k <= SPW_QUEUE_D2H; k++) {
        bool fit = false;
        for (int try = 0; try < 20 && !fit; try++)
            fit = spans_fit(p, k);
        assert_true(fit);
    }
}

/* The limit is exact, the message has the numbers, live and peak count. */
void
parity_memory(const parity *p)
{
    spw_gpu *gpu = NULL;
    void *a = NULL, *b = NULL;
    spw_error err = {0};
    spw_gpu_options options = {.name = spw_gpu_get_info(p->gpu)->name, .memory_bytes = 1 << 20};
    assert_int_equal(spw_gpu_open(&gpu, &options, &err), SPW_OK);
    assert_int_equal(spw_gpu_get_info(gpu)->memory_bytes, 1 << 20);
    assert_false(spw_gpu_get_info(gpu)->host_addressable);
    assert_int_equal(spw_gpu_alloc(gpu, &a, 700000, &err), SPW_OK);
    assert_int_equal((uintptr_t)a % 256, 0);
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
    err = (spw_error){0};
    options.name = "cuda:1000";
    assert_int_equal(spw_gpu_open(&gpu, &options, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "device cuda:1000: there "));
}

static void
run_nan(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t C = s->d[1];
    spw_gpu_gelu(q, p[2], p[0], C);
    spw_gpu_silu_mul(q, at_elem(p[2], C), p[0], p[1], C);
    spw_gpu_layernorm(q, at_elem(p[2], 2 * C), p[4], (float *)p[4] + 1, p[0], p[1], p[1], 1, C, 1e-5f);
    spw_gpu_rmsnorm(q, at_elem(p[2], 3 * C), (float *)p[4] + 2, p[0], p[1], 1, C, 1e-5f);
    spw_gpu_linear(q, at_elem(p[2], 4 * C), p[0], p[1], NULL, 1, C, C, 0);
    spw_gpu_linear_cross_entropy(q, (float *)p[4] + 3, NULL, NULL, p[0], p[1], p[3], p[5], 1, 1, C, C, 1, 0);
    spw_gpu_zero(q, p[5], spw_gpu_logits_stride(C) * 4);
    spw_gpu_attention(q, at_elem(p[2], 5 * C), (float *)p[4] + 4, p[0], p[0], p[0],
                      &(spw_attention_shape){1, 1, 1, 1, C, C, C, 1, 0});
}

static void
one_nan(const subject *s, float **host, int32_t **ints)
{
    (void)s;
    (void)ints;
    host[0][21] = NAN;
}

/* A NaN in the input is a NaN in the output: it must reach the loss and the norm. */
void
parity_nan_spreads(const parity *p)
{
    enum { C = 40 };
    examine(p, &(subject){.name = "nan",
                          .a = {{ACT, C, 0, 0},
                                {ACT, C * C, 0, 0},
                                {ACT_OUT, 6 * C, 0, 0},
                                {INT, 1, C, 0},
                                {FP32_OUT, 5, 0, 0},
                                {FP32_OUT, spw_gpu_logits_stride(C), 0, 0}},
                          .d = {1, C},
                          .run = run_nan,
                          .prepare = one_nan});
}

/* ---------------------------------------------------------------- all of them */

static parity *device; /* under test */

static void
test_linear(void **state)
{
    (void)state;
    parity_linear(device);
}

static void
test_linear_and_more(void **state)
{
    (void)state;
    parity_linear_and_more(device);
}

static void
test_linear_by_row(void **state)
{
    (void)state;
    parity_linear_by_row(device);
}

static void
test_elements(void **state)
{
    (void)state;
    parity_elements(device);
}

static void
test_norms(void **state)
{
    (void)state;
    parity_norms(device);
}

static void
test_embedding_and_rope(void **state)
{
    (void)state;
    parity_embedding_and_rope(device);
}

static void
test_loss(void **state)
{
    (void)state;
    parity_loss(device);
}

static void
test_attention(void **state)
{
    (void)state;
    parity_attention(device);
}

static void
test_attention_cached(void **state)
{
    (void)state;
    parity_attention_cached(device);
}

static void
test_attention_bits(void **state)
{
    (void)state;
    parity_attention_bits(device);
}

static void
test_copies(void **state)
{
    (void)state;
    parity_copies(device);
}

static void
test_codes(void **state)
{
    (void)state;
    parity_codes(device);
}

static void
test_queues(void **state)
{
    (void)state;
    parity_queues(device);
}

static void
test_memory(void **state)
{
    (void)state;
    parity_memory(device);
}

static void
test_spans(void **state)
{
    (void)state;
    parity_spans(device);
}

static void
test_update(void **state)
{
    (void)state;
    parity_update(device);
}

static void
test_experts(void **state)
{
    (void)state;
    parity_experts(device);
}

static void
test_nan_spreads(void **state)
{
    (void)state;
    parity_nan_spreads(device);
}

static const struct CMUnitTest all[] = {
    cmocka_unit_test(test_linear),
    cmocka_unit_test(test_linear_and_more),
    cmocka_unit_test(test_linear_by_row),
    cmocka_unit_test(test_elements),
    cmocka_unit_test(test_norms),
    cmocka_unit_test(test_embedding_and_rope),
    cmocka_unit_test(test_loss),
    cmocka_unit_test(test_attention),
    cmocka_unit_test(test_attention_cached),
    cmocka_unit_test(test_attention_bits),
    cmocka_unit_test(test_copies),
    cmocka_unit_test(test_codes),
    cmocka_unit_test(test_queues),
    cmocka_unit_test(test_memory),
    cmocka_unit_test(test_nan_spreads),
    cmocka_unit_test(test_experts),
    cmocka_unit_test(test_update),
    cmocka_unit_test(test_spans),
};

void
parity_list(void)
{
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        printf("%s\n", all[i].name);
}

int
parity_run_all(parity *p, const char *group)
{
    device = p;
    return cmocka_run_group_tests_name(group, all, NULL, NULL);
}

int
parity_run_products(parity *p, const char *group)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_and_more),
        cmocka_unit_test(test_loss),
    };
    device = p;
    return cmocka_run_group_tests_name(group, tests, NULL, NULL);
}
