/* Linear layers of many experts at once beside the cpu device's, one by one; each expert's bits, whoever else is there; and transposes. */
#include "lib_subject.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

/* d = experts, N, K, rows (an index below), with bias, with frozen experts, onto what is there; a = x, w, b, y, dy, dx, dw, db */
enum { X, W, B, Y, DY, DX, DW, DB };

static uint64_t
rows_of(uint64_t which, uint64_t expert)
{
    static const uint64_t uneven[] = {5, 0, 70, 1, 130, 0, 17, 64}, many[] = {200, 129, 128}, few[] = {2, 0, 1, 0, 3};
    return which == 0 ? uneven[expert % 8] : which == 1 ? many[expert % 3] : which == 2 ? few[expert % 5] : 0;
}

typedef struct told {
    spw_each each;
    uint64_t ends[SPW_EXPERTS_MAX];
    const act *w[SPW_EXPERTS_MAX], *b[SPW_EXPERTS_MAX];
    float *dw[SPW_EXPERTS_MAX], *db[SPW_EXPERTS_MAX];
    bool set[SPW_EXPERTS_MAX];
} told;

static uint64_t
fill(told *t, const subject *s, void **p, uint64_t act_bytes)
{
    const uint64_t E = s->d[0], N = s->d[1], K = s->d[2];
    uint64_t rows = 0;
    t->each = (spw_each){.count = E,
                         .N = N,
                         .K = K,
                         .ends = t->ends,
                         .w = t->w,
                         .b = s->d[4] ? t->b : NULL,
                         .onto = s->d[6] ? p[Y] : NULL,
                         .dw = t->dw,
                         .db = s->d[4] ? t->db : NULL,
                         .set = t->set};
    for (uint64_t i = 0; i < E; i++) {
        const bool frozen = s->d[5] && i % 3 == 0;
        t->ends[i] = rows += rows_of(s->d[3], i);
        t->w[i] = (const char *)p[W] + i * N * K * act_bytes;
        t->b[i] = (const char *)p[B] + i * N * act_bytes;
        t->dw[i] = frozen ? NULL : (float *)p[DW] + i * N * K;
        t->db[i] = frozen ? NULL : (float *)p[DB] + i * N;
        t->set[i] = i % 2 == 1;
    }
    return rows;
}

static void
run_each(const subject *s, spw_gpu_queue *q, void **p)
{
    told t;
    (void)fill(&t, s, p, spw_dtype_bytes(subject_type()));
    spw_gpu_linear_each(q, p[Y], p[X], &t.each, s->flags);
    spw_gpu_linear_each_backward(q, p[DX], p[DY], p[X], &t.each, s->flags);
}

static subject
subject_of(uint64_t E, uint64_t N, uint64_t K, uint64_t which, bool bias, bool frozen, bool onto, unsigned flags)
{
    uint64_t rows = 0;
    for (uint64_t i = 0; i < E; i++)
        rows += rows_of(which, i);
    return (subject){.name = "linear, each",
                     .a = {{ACT, rows * K, 0, 0},
                           {ACT, E * N * K, 0, 0},
                           {ACT, E * N, 0, 0},
                           {onto ? ACT : ACT_OUT, rows * N, 0, 0},
                           {ACT, rows * N, 0, 0},
                           {flags & SPW_OP_ACC_DX ? ACT : ACT_OUT, rows * K, 0, 0},
                           {FP32, E * N * K, 0, 0},
                           {FP32, E * N, 0, 0}},
                     .d = {E, N, K, which, bias, frozen, onto},
                     .flags = flags,
                     .worst = SUBJECT_PRODUCT,
                     .run = run_each};
}

/* ---------------------------------------------------------------- bits */

enum { ARRAYS = DB + 1 };

static void
load(spw_gpu_queue *q, const subject *s, void **p)
{
    for (uint32_t k = 0; k < ARRAYS; k++) {
        const bool fp32 = s->a[k].kind == FP32;
        float *host = subject_need(s->a[k].n * 4);
        for (uint64_t i = 0, key = subject_key(23 + k); i < s->a[k].n; i++)
            host[i] = subject_number(key, i);
        spw_gpu_copy_h2d(q, p[k], fp32 ? SPW_F32 : subject_type(), host, SPW_F32, s->a[k].n);
        spw_gpu_queue_sync(q);
        free(host);
    }
}

/* What is written: y, dx, dw, db, as bytes one behind the other. */
static char *
results_of(spw_gpu_queue *q, const subject *s, void **p, uint64_t *bytes)
{
    static const uint32_t written[] = {Y, DX, DW, DB};
    char *all;
    *bytes = 0;
    for (uint32_t i = 0; i < 4; i++)
        *bytes += s->a[written[i]].n * 4;
    all = memset(subject_need(*bytes), 0, *bytes);
    for (uint64_t i = 0, at = 0; i < 4; at += s->a[written[i++]].n * 4)
        spw_gpu_read_bytes(q, all + at, p[written[i]],
                           s->a[written[i]].n * (i < 2 ? spw_dtype_bytes(subject_type()) : sizeof(float)));
    return all;
}

/* One expert at a time, and all: by the same calls. */
static void
check_bits(const parity *p, const subject *s)
{
    void *mem[ARRAYS] = {NULL};
    spw_gpu_queue *q = NULL;
    char *all, *alone;
    uint64_t bytes, first = 0, act_bytes;
    told t;
    subject_use(p->gpu);
    act_bytes = spw_dtype_bytes(subject_type());
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (uint32_t k = 0; k < ARRAYS; k++)
        assert_int_equal(spw_gpu_alloc(p->gpu, &mem[k], s->a[k].n * 4 + 256, NULL), SPW_OK);
    load(q, s, mem);
    run_each(s, q, mem);
    all = results_of(q, s, mem, &bytes);
    load(q, s, mem);
    (void)fill(&t, s, mem, act_bytes);
    for (uint64_t i = 0; i < s->d[0]; i++) {
        const uint64_t rows = rows_of(s->d[3], i), N = s->d[1], K = s->d[2];
        spw_each one = t.each;
        one.count = 1;
        one.ends = &rows;
        one.w += i;
        one.b = one.b != NULL ? one.b + i : NULL;
        one.onto = one.onto != NULL ? (const char *)one.onto + first * N * act_bytes : NULL;
        one.dw += i;
        one.db = one.db != NULL ? one.db + i : NULL;
        one.set += i;
        spw_gpu_linear_each(q, (char *)mem[Y] + first * N * act_bytes, (char *)mem[X] + first * K * act_bytes, &one,
                            s->flags);
        spw_gpu_linear_each_backward(q, (char *)mem[DX] + first * K * act_bytes,
                                     (char *)mem[DY] + first * N * act_bytes, (char *)mem[X] + first * K * act_bytes,
                                     &one, s->flags);
        first += rows;
    }
    alone = results_of(q, s, mem, &bytes);
    assert_memory_equal(all, alone, bytes);
    for (uint32_t k = 0; k < ARRAYS; k++)
        spw_gpu_free(p->gpu, mem[k]);
    spw_gpu_queue_destroy(q);
    free(all);
    free(alone);
}

/* d = M, N; a = x, its transpose, an array in fp32, and what its transpose is added to. */
static void
run_transpose(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_gpu_transpose(q, p[1], p[0], 0.75f, s->d[0], s->d[1]);
    spw_gpu_transpose_sum(q, p[3], p[2], -1.5f, s->d[0], s->d[1]);
}

static void
reference_transpose(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    (void)type;
    (void)way;
    (void)ints;
    for (uint64_t m = 0; m < s->d[0]; m++)
        for (uint64_t n = 0; n < s->d[1]; n++) {
            a[1][n * s->d[0] + m] = 0.75f * a[0][m * s->d[1] + n];
            a[3][n * s->d[0] + m] -= 1.5f * a[2][m * s->d[1] + n];
        }
}

void
parity_linear_each(const parity *p)
{
    static const uint64_t turned[][2] = {{1, 1}, {33, 7}, {64, 96}, {700, 5}, {3, 1030}, {0, 4}};
    enum { SMALL = 6 };
    static const struct {
        uint64_t E, N, K, which;
        bool bias, frozen;
    } cases[] = {{3, 8, 16, 0, true, false},       {8, 136, 72, 0, false, true},   {5, 7, 5, 0, true, true},
                 {3, 40, 136, 1, false, false},    {70, 24, 40, 2, true, false},   {2, 24, 8, 3, true, false},
                 {32, 768, 2048, 0, false, false}, {3, 5760, 2880, 1, true, true}, {128, 130, 66, 0, false, false}};
    for (size_t i = 0; i < sizeof turned / sizeof turned[0]; i++) {
        const uint64_t n = turned[i][0] * turned[i][1];
        subject_examine(p, &(subject){.name = "transpose",
                                      .a = {{ACT, n, 0, 0}, {ACT_OUT, n, 0, 0}, {FP32, n, 0, 0}, {FP32, n, 0, 0}},
                                      .d = {turned[i][0], turned[i][1]},
                                      .worst = {1e-7, 1e-7, 1e-7},
                                      .reference = reference_transpose,
                                      .ways = 1,
                                      .run = run_transpose});
    }
    for (size_t i = 0; i < (p->large ? sizeof cases / sizeof cases[0] : SMALL); i++)
        for (unsigned f = 0; f < 4; f += SANITIZED ? 3 : 1) {
            const unsigned flags = (f & 1 ? SPW_OP_W_IN_OUT : 0) | (f & 2 ? SPW_OP_ACC_DX : 0);
            subject s = subject_of(cases[i].E, cases[i].N, cases[i].K, cases[i].which, cases[i].bias, cases[i].frozen,
                                   (i + f) % 2 == 1, flags);
            if (i >= SMALL && f != (i == SMALL + 1 ? 3 : 0)) /* as these models have it: 50 million weights */
                continue;
            subject_examine(p, &s);
            if (i != SMALL + 1)
                check_bits(p, &s);
        }
}
