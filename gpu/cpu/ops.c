/*
 * Row-wise and element-wise operations of the cpu device: each cuts its work by shape into parts for the pool.
 */
#include "cpu_internal.h"
#include <math.h>

/* One argument block serves all of them: pointers and sizes by role. */
typedef struct args {
    const cpu_kernels *k;
    void *out, *out2;
    float *fout;
    const float *a, *b, *c;
    const int32_t *ids;
    uint64_t rows, cols, n, grain, T, H, D, R, stride;
    uint64_t head, a_stride, a_head; /* of heads of out, and of a */
    bool neighbors;
    float eps, cap;
    int sign;
    spw_gate gate;
    spw_curve curve;
    unsigned flags;
    uint64_t key, counter, at;
    double *sums;
} args;

static uint64_t
slice(const args *g, uint64_t n, uint32_t part_idx, uint64_t *first)
{
    return cpu_slice(n, g->grain, part_idx, first);
}

static void
run(spw_gpu_queue *q, args *g, uint64_t n, uint64_t grain, spw_pool_fn fn)
{
    g->k = spw__cpu_kernels(q);
    g->grain = grain > 0 ? grain : 1;
    spw__cpu_run(q, cpu_slices(n, g->grain), fn, g);
}

void
spw__cpu_zero(spw_gpu_queue *q, void *p, uint64_t bytes)
{
    (void)q;
    memset(p, 0, bytes);
}

#define ELEMENT_PART(name, call)                                                                                       \
    static void name(void *ctx, uint32_t part_idx, uint32_t worker_idx)                                                \
    {                                                                                                                  \
        const args *g = ctx;                                                                                           \
        uint64_t i, n = slice(g, g->n, part_idx, &i);                                                                  \
        (void)worker_idx;                                                                                              \
        call;                                                                                                          \
    }

static float *
at(void *base, uint64_t i)
{
    return base == NULL ? NULL : (float *)base + i;
}

ELEMENT_PART(add_part, g->k->add(at(g->out, i), g->a + i, g->b + i, n))
ELEMENT_PART(curve_part, g->k->curve[g->curve](at(g->out, i), g->a + i, n))
ELEMENT_PART(curve_backward_part,
             g->k->curve_backward[g->curve](at(g->out, i), g->a + i, g->b + i, n, g->flags &SPW_OP_ACC_DX))

void
spw__cpu_add(spw_gpu_queue *q, act *y, const act *a, const act *b, uint64_t n)
{
    run(q, &(args){.out = y, .a = a, .b = b, .n = n}, n, CPU_ELEMENT_GRAIN, add_part);
}

static void
add_scaled_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->n, part_idx, &first);
    float *y = at(g->out, first);
    (void)worker_idx;
    if (g->b == g->out) {
        for (uint64_t i = 0; i < n; i++)
            y[i] *= g->eps;
        return;
    }
    if (g->a == NULL)
        memset(y, 0, n * sizeof *y);
    else if (g->a != g->out)
        memcpy(y, g->a + first, n * sizeof *y);
    g->k->axpy(y, g->eps, g->b + first, n);
}

void
spw__cpu_add_scaled(spw_gpu_queue *q, act *y, const act *a, const act *b, float scale, uint64_t n)
{
    run(q, &(args){.out = y, .a = a, .b = b, .eps = scale, .n = n}, n, CPU_ELEMENT_GRAIN, add_scaled_part);
}

static void
add_scaled_by_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->n, part_idx, &first);
    float *y = at(g->out, first);
    (void)worker_idx;
    if (g->b != NULL)
        g->k->add(y, g->a + first, g->b + first, n);
    else if (g->a != g->out)
        memcpy(y, g->a + first, n * sizeof *y);
    g->k->scale(y, sum_of_terms(g->c), n);
}

void
spw__cpu_add_scaled_by(spw_gpu_queue *q, act *y, const act *a, const act *b, const act *terms, uint64_t n)
{
    run(q, &(args){.out = y, .a = a, .b = b, .c = terms, .n = n}, n, CPU_ELEMENT_GRAIN, add_scaled_by_part);
}

static void
soft_cap_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->n, part_idx, &first);
    float *y = at(g->out, first);
    (void)worker_idx;
    if (g->a != g->out)
        memcpy(y, g->a + first, n * sizeof *y);
    g->k->soft_cap(y, g->cap, n);
}

void
spw__cpu_soft_cap(spw_gpu_queue *q, act *y, const act *x, float cap, uint64_t n)
{
    run(q, &(args){.out = y, .a = x, .cap = cap, .n = n}, n, CPU_ELEMENT_GRAIN, soft_cap_part);
}

void
spw__cpu_curve(spw_gpu_queue *q, spw_curve kind, act *y, const act *x, uint64_t n)
{
    run(q, &(args){.out = y, .a = x, .n = n, .curve = kind}, n, CPU_ELEMENT_GRAIN, curve_part);
}

void
spw__cpu_curve_backward(spw_gpu_queue *q, spw_curve kind, act *dx, const act *dy, const act *x, uint64_t n,
                        unsigned flags)
{
    run(q, &(args){.out = dx, .a = dy, .b = x, .n = n, .curve = kind, .flags = flags}, n, CPU_ELEMENT_GRAIN,
        curve_backward_part);
}

/* How many of n elements from the first on lie in one row; at: where they do when rows begin stride apart. */
static uint64_t
in_row(const args *g, uint64_t first, uint64_t n, uint64_t *at)
{
    uint64_t row = first / g->cols, col = first % g->cols;
    *at = row * g->stride + col * spw__gate_step(g->gate);
    return n < g->cols - col ? n : g->cols - col;
}

/* One stretch of a row at a time. */
static void
gate_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t i, from, count, n = slice(g, g->n, part_idx, &i);
    (void)worker_idx;
    for (; n > 0; i += count, n -= count) {
        count = in_row(g, i, n, &from);
        g->k->gate_mul[g->gate](at(g->out, i), g->a + from, g->b + from, count);
    }
}

static void
gate_backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t i, from, count, n = slice(g, g->n, part_idx, &i);
    (void)worker_idx;
    for (; n > 0; i += count, n -= count) {
        count = in_row(g, i, n, &from);
        g->k->gate_mul_backward[g->gate](at(g->out, from), at(g->out2, from), g->a + i, g->b + from, g->c + from, count,
                                         g->flags & SPW_OP_ACC_DX, g->flags & SPW_OP_ACC_DX2);
    }
}

void
spw__cpu_gate_mul(spw_gpu_queue *q, spw_gate kind, act *y, const act *gate, const act *up, uint64_t M, uint64_t C,
                  uint64_t stride)
{
    run(q,
        &(args){
            .gate = kind, .out = y, .a = gate, .b = up != NULL ? up : gate, .n = M * C, .cols = C, .stride = stride},
        M * C, CPU_ELEMENT_GRAIN, gate_part);
}

void
spw__cpu_gate_mul_backward(spw_gpu_queue *q, spw_gate kind, act *dgate, act *dup, const act *dy, const act *gate,
                           const act *up, uint64_t M, uint64_t C, uint64_t stride, unsigned flags)
{
    if (kind == SPW_GATE_CLAMPED && dgate == NULL)
        return;
    run(q,
        &(args){.gate = kind,
                .out = dgate,
                .out2 = dup,
                .a = dy,
                .b = gate,
                .c = up != NULL ? up : gate,
                .n = M * C,
                .cols = C,
                .stride = stride,
                .flags = flags},
        M * C, CPU_ELEMENT_GRAIN, gate_backward_part);
}

ELEMENT_PART(dropout_part, g->k->dropout(at(g->out, i), g->a + i, n, g->eps, g->key, g->counter, g->at + i))

void
spw__cpu_dropout(spw_gpu_queue *q, act *y, const act *x, uint64_t n, float p, uint64_t key, uint64_t counter_hi,
                 uint64_t first)
{
    run(q, &(args){.out = y, .a = x, .n = n, .eps = p, .key = key, .counter = counter_hi, .at = first}, n,
        CPU_ELEMENT_GRAIN, dropout_part);
}

/* ---------------------------------------------------------------- embedding */

static void
embedding_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *y = (float *)g->out + r * g->cols;
        uint64_t of_table = (uint64_t)g->ids[r] - g->at;
        const float *row = g->a + of_table * g->cols;
        if (of_table >= g->n)
            continue;
        if (g->flags)
            g->k->axpy(y, 1.0f, row, g->cols);
        else
            memcpy(y, row, g->cols * sizeof(float));
    }
}

void
spw__cpu_embedding(spw_gpu_queue *q, act *y, const int32_t *ids, const act *table, uint64_t first, uint64_t M,
                   uint64_t V, uint64_t C, bool add)
{
    run(q, &(args){.out = y, .a = table, .ids = ids, .rows = M, .cols = C, .at = first, .n = V, .flags = add}, M,
        cpu_row_grain(C), embedding_part);
}

/* Cut by columns, so that rows of equal ids meet in the order of M on one worker. */
static void
embedding_backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->cols, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = 0; r < g->rows; r++) {
        uint64_t of_table = (uint64_t)g->ids[r] - g->at;
        if (of_table < g->n)
            g->k->axpy(g->fout + of_table * g->cols + first, 1.0f, g->a + r * g->cols + first, n);
    }
}

void
spw__cpu_embedding_backward(spw_gpu_queue *q, float *dtable, const act *dy, const int32_t *ids, uint64_t first,
                            uint64_t M, uint64_t V, uint64_t C)
{
    run(q, &(args){.fout = dtable, .a = dy, .ids = ids, .rows = M, .cols = C, .at = first, .n = V}, C, CPU_COL_GRAIN,
        embedding_backward_part);
}

/* ---------------------------------------------------------------- rope and heads */

static void
rope_neighbors(float *x, const float *table, uint64_t half, float sign)
{
    for (uint64_t j = 0; j < half; j++) {
        float a = x[2 * j], b = x[2 * j + 1], c = table[j], s = sign * table[j + half];
        x[2 * j] = a * c - b * s;
        x[2 * j + 1] = b * c + a * s;
    }
}

static void
rope_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++)
        for (uint64_t h = 0; h < g->H; h++)
            (g->neighbors ? rope_neighbors : g->k->rope_row)(
                (float *)g->out + r * g->stride + h * g->D,
                g->a + (g->ids != NULL ? (uint64_t)g->ids[r] : r % g->T) * g->R, g->R / 2, (float)g->sign);
}

void
spw__cpu_rope(spw_gpu_queue *q, act *x, uint64_t stride, const float *cos_sin, const int32_t *places, uint64_t M,
              uint64_t T, uint64_t H, uint64_t D, uint64_t R, bool neighbors, int sign)
{
    run(q,
        &(args){.out = x,
                .a = cos_sin,
                .ids = places,
                .rows = M,
                .T = T,
                .H = H,
                .D = D,
                .R = R,
                .stride = stride,
                .neighbors = neighbors,
                .sign = sign},
        M, cpu_row_grain(H * D), rope_part);
}

static void
copy_heads_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++)
        for (uint64_t h = 0; h < g->H; h++)
            memcpy((float *)g->out + r * g->stride + h * g->head, g->a + r * g->a_stride + h * g->a_head,
                   g->D * sizeof(float));
}

void
spw__cpu_copy_heads(spw_gpu_queue *q, act *y, uint64_t y_stride, uint64_t y_head, const act *x, uint64_t x_stride,
                    uint64_t x_head, uint64_t M, uint64_t H, uint64_t D)
{
    run(q,
        &(args){.out = y,
                .stride = y_stride,
                .head = y_head,
                .a = x,
                .a_stride = x_stride,
                .a_head = x_head,
                .rows = M,
                .H = H,
                .D = D},
        M, cpu_row_grain(H * D), copy_heads_part);
}

static void
sum_heads_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *sum = (float *)g->out + r * g->stride;
        const float *x = g->a + r * g->a_stride;
        memcpy(sum, x, g->D * sizeof *sum);
        for (uint64_t h = 1; h < g->H; h++)
            for (uint64_t d = 0; d < g->D; d++)
                sum[d] += x[h * g->a_head + d];
    }
}

void
spw__cpu_sum_heads(spw_gpu_queue *q, act *y, uint64_t y_stride, const act *x, uint64_t x_stride, uint64_t x_head,
                   uint64_t M, uint64_t H, uint64_t D)
{
    SPW_ASSERT(H > 0);
    run(q,
        &(args){
            .out = y, .stride = y_stride, .a = x, .a_stride = x_stride, .a_head = x_head, .rows = M, .H = H, .D = D},
        M, cpu_row_grain(H * D), sum_heads_part);
}

/* ---------------------------------------------------------------- sums */

static void
sumsq_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->n, part_idx, &first);
    (void)worker_idx;
    g->sums[part_idx] = g->k->sumsq(g->a + first, n);
}

void
spw__cpu_sumsq(spw_gpu_queue *q, double *out, const float *x, uint64_t n)
{
    run(q, &(args){.a = x, .n = n, .sums = out}, n, 4096, sumsq_part);
}
