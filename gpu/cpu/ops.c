/*
 * Row-wise and element-wise operations of the cpu device: each cuts its work by shape into parts for the pool.
 */
#include "cpu_internal.h"
#include <math.h>

/* One argument block serves all of them: pointers and sizes by role. */
typedef struct args {
    const cpu_kernels *k;
    void *out, *out2;
    float *fout, *fout2;
    const float *a, *b, *c, *d, *e;
    const int32_t *ids;
    uint64_t rows, cols, n, grain, T, H, D, R, stride;
    uint64_t head, a_stride, a_head; /* of heads of out, and of a */
    bool neighbors;
    float eps, offset, cap;
    int sign;
    spw_gate gate;
    spw_curve curve;
    unsigned flags;
    uint64_t key, counter, at;
    double *sums;
} args;

enum { ELEMENT_GRAIN = 16384, COL_GRAIN = 64 };

static uint64_t
slice(const args *g, uint64_t n, uint32_t part_idx, uint64_t *first)
{
    *first = part_idx * g->grain;
    return n - *first < g->grain ? n - *first : g->grain;
}

static void
run(spw_gpu_queue *q, args *g, uint64_t n, uint64_t grain, spw_pool_fn fn)
{
    g->k = spw__cpu_kernels(q);
    g->grain = grain > 0 ? grain : 1;
    spw__cpu_run(q, (uint32_t)((n + g->grain - 1) / g->grain), fn, g);
}

static uint64_t
row_grain(uint64_t cols)
{
    return cols >= ELEMENT_GRAIN ? 1 : ELEMENT_GRAIN / cols;
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
    run(q, &(args){.out = y, .a = a, .b = b, .n = n}, n, ELEMENT_GRAIN, add_part);
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
    run(q, &(args){.out = y, .a = a, .b = b, .eps = scale, .n = n}, n, ELEMENT_GRAIN, add_scaled_part);
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
    run(q, &(args){.out = y, .a = a, .b = b, .c = terms, .n = n}, n, ELEMENT_GRAIN, add_scaled_by_part);
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
    run(q, &(args){.out = y, .a = x, .cap = cap, .n = n}, n, ELEMENT_GRAIN, soft_cap_part);
}

void
spw__cpu_curve(spw_gpu_queue *q, spw_curve kind, act *y, const act *x, uint64_t n)
{
    run(q, &(args){.out = y, .a = x, .n = n, .curve = kind}, n, ELEMENT_GRAIN, curve_part);
}

void
spw__cpu_curve_backward(spw_gpu_queue *q, spw_curve kind, act *dx, const act *dy, const act *x, uint64_t n,
                        unsigned flags)
{
    run(q, &(args){.out = dx, .a = dy, .b = x, .n = n, .curve = kind, .flags = flags}, n, ELEMENT_GRAIN,
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
        M * C, ELEMENT_GRAIN, gate_part);
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
        M * C, ELEMENT_GRAIN, gate_backward_part);
}

ELEMENT_PART(dropout_part, g->k->dropout(at(g->out, i), g->a + i, n, g->eps, g->key, g->counter, g->at + i))

void
spw__cpu_dropout(spw_gpu_queue *q, act *y, const act *x, uint64_t n, float p, uint64_t key, uint64_t counter_hi,
                 uint64_t first)
{
    run(q, &(args){.out = y, .a = x, .n = n, .eps = p, .key = key, .counter = counter_hi, .at = first}, n,
        ELEMENT_GRAIN, dropout_part);
}

/* ---------------------------------------------------------------- linear */

static void
bias_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++)
        memcpy((float *)g->out + r * g->cols, g->a, g->cols * sizeof(float));
}

/* Column sums over a block of columns, rows in order. */
static void
column_sum_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->cols, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = 0; r < g->rows; r++)
        g->k->axpy(g->fout + first, 1.0f, g->a + r * g->cols + first, n);
}

/*
 * A few rows against weights that come from memory once: each part reads its weights in stripes and takes all rows to one
 * stripe. Every element is a dot product in one fixed order, unlike BLAS', which depends on the number of rows.
 */
enum { STRIPE = 512 };

static void
dots_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->n, part_idx, &first), N = g->n, K = g->cols;
    float *y = g->out, four[4];
    (void)worker_idx;
    for (uint64_t j = first; j < first + n; j++) {
        float bias = g->c != NULL ? g->c[j] : 0.0f;
        uint64_t m = 0;
        for (; m + 4 <= g->rows; m += 4) {
            g->k->dot4(four, g->a + m * K, K, g->b + j * K, K);
            for (int i = 0; i < 4; i++)
                y[(m + (uint64_t)i) * N + j] = four[i] + bias;
        }
        for (; m < g->rows; m++)
            y[m * N + j] = g->k->dot(g->a + m * K, g->b + j * K, K) + bias;
    }
}

static void
axpys_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->n, part_idx, &first), N = g->n, K = g->cols, k = 0;
    float *y = (float *)g->out + first;
    (void)worker_idx;
    for (uint64_t m = 0; m < g->rows; m++) {
        if (g->c != NULL)
            memcpy(y + m * N, g->c + first, n * sizeof *y);
        else
            memset(y + m * N, 0, n * sizeof *y);
    }
    for (; k + 4 <= K; k += 4)
        for (uint64_t m = 0; m < g->rows; m++)
            g->k->axpy4(y + m * N, g->a + m * K + k, g->b + k * N + first, N, n);
    for (; k < K; k++)
        for (uint64_t m = 0; m < g->rows; m++)
            g->k->axpy(y + m * N, g->a[m * K + k], g->b + k * N + first, n);
}

static void
linear_by_row(spw_gpu_queue *q, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N, uint64_t K,
              bool in_out)
{
    args g = {.out = y, .a = x, .b = w, .c = b, .rows = M, .n = N, .cols = K};
    run(q, &g, N, in_out ? STRIPE : row_grain(K), in_out ? axpys_part : dots_part);
}

void
spw__cpu_linear(spw_gpu_queue *q, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N, uint64_t K,
                unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT;
    if (flags & SPW_OP_BY_ROW) {
        linear_by_row(q, y, x, w, b, M, N, K, in_out);
        return;
    }
    if (b != NULL) /* the product is added to it: no second pass over y */
        run(q, &(args){.out = y, .a = b, .rows = M, .cols = N}, M, row_grain(N), bias_part);
    spw__cpu_gemm(q, false, !in_out, M, N, K, x, K, w, in_out ? N : K, b != NULL ? 1.0f : 0.0f, y, N);
}

void
spw__cpu_linear_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *w,
                         uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT;
    float before = flags & SPW_OP_SET_DW ? 0.0f : 1.0f;
    if (db != NULL)
        run(q, &(args){.fout = db, .a = dy, .rows = M, .cols = N}, N, COL_GRAIN, column_sum_part);
    if (dw != NULL && in_out)
        spw__cpu_gemm(q, true, false, K, N, M, x, K, dy, N, before, dw, N);
    else if (dw != NULL)
        spw__cpu_gemm(q, true, false, N, K, M, dy, N, x, K, before, dw, K);
    if (dx != NULL)
        spw__cpu_gemm(q, false, in_out, M, K, N, dy, N, w, in_out ? N : K, flags & SPW_OP_ACC_DX ? 1.0f : 0.0f, dx, K);
}

/* y = onto + b, b NULL: onto alone. */
static void
onto_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *y = (float *)g->out + r * g->cols;
        if (g->b != NULL)
            g->k->add(y, g->a + r * g->cols, g->b, g->cols);
        else
            memcpy(y, g->a + r * g->cols, g->cols * sizeof *y);
    }
}

void
spw__cpu_linear_add(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *w, const act *b, uint64_t M,
                    uint64_t N, uint64_t K, unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT;
    if (flags & SPW_OP_BY_ROW) {
        SPW_ASSERT(y != onto);
        linear_by_row(q, y, x, w, b, M, N, K, in_out);
        spw__cpu_add(q, y, onto, y, M * N);
        return;
    }
    if (b != NULL || y != onto)
        run(q, &(args){.out = y, .a = onto, .b = b, .rows = M, .cols = N}, M, row_grain(N), onto_part);
    spw__cpu_gemm(q, false, !in_out, M, N, K, x, K, w, in_out ? N : K, 1.0f, y, N);
}

void
spw__cpu_product(spw_gpu_queue *q, act *y, const act *onto, float by, const act *x, const act *w, float scale,
                 uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT, turned = flags & SPW_OP_X_IN_OUT;
    if (onto != NULL)
        run(q, &(args){.out = y, .a = onto, .rows = M, .cols = N}, M, row_grain(N), onto_part);
    spw__cpu_gemm_scaled(q, turned, !in_out, M, N, K, scale, x, turned ? M : K, w, in_out ? N : K,
                         onto != NULL ? by : 0.0f, y, N);
}

void
spw__cpu_linear_gelu(spw_gpu_queue *q, act *y, act *gelu_in, const act *x, const act *w, const act *b, uint64_t M,
                     uint64_t N, uint64_t K, unsigned flags)
{
    spw__cpu_linear(q, gelu_in, x, w, b, M, N, K, flags);
    spw__cpu_curve(q, SPW_CURVE_GELU, y, gelu_in, M * N);
}

void
spw__cpu_linear_gelu_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x,
                              const act *gelu_in, const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    SPW_ASSERT((flags & SPW_OP_ACC_DX) == 0);
    spw__cpu_linear_backward(q, dx, dw, db, dy, x, w, M, N, K, flags);
    if (dx != NULL)
        spw__cpu_curve_backward(q, SPW_CURVE_GELU, dx, dx, gelu_in, M * K, 0);
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
        row_grain(C), embedding_part);
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
    run(q, &(args){.fout = dtable, .a = dy, .ids = ids, .rows = M, .cols = C, .at = first, .n = V}, C, COL_GRAIN,
        embedding_backward_part);
}

/* ---------------------------------------------------------------- norms; without means they are rmsnorm */

static void
norm_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        uint64_t o = r * g->cols;
        if (g->fout != NULL)
            g->k->layernorm_row((float *)g->out + o, g->fout + r, g->fout2 + r, g->a + o, g->b, g->c, g->cols, g->eps);
        else
            g->k->rmsnorm_row((float *)g->out + o, g->fout2 + r, g->a + o, g->b, g->offset, g->cols, g->eps);
    }
}

void
spw__cpu_layernorm(spw_gpu_queue *q, act *y, float *mean, float *rstd, const act *x, const act *g, const act *b,
                   uint64_t M, uint64_t C, float eps)
{
    run(q, &(args){.out = y, .fout = mean, .fout2 = rstd, .a = x, .b = g, .c = b, .rows = M, .cols = C, .eps = eps}, M,
        row_grain(C), norm_part);
}

void
spw__cpu_rmsnorm(spw_gpu_queue *q, act *y, float *rstd, const act *x, const act *g, float offset, uint64_t M,
                 uint64_t C, float eps)
{
    run(q, &(args){.out = y, .fout2 = rstd, .a = x, .b = g, .offset = offset, .rows = M, .cols = C, .eps = eps}, M,
        row_grain(C), norm_part);
}

static void
norm_dx_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        uint64_t o = r * g->cols;
        const float *onto = at(g->out2, o);
        if (g->d != NULL)
            g->k->layernorm_dx_row((float *)g->out + o, onto, g->a + o, g->b + o, g->c, g->d[r], g->e[r], g->cols);
        else
            g->k->rmsnorm_dx_row((float *)g->out + o, onto, g->a + o, g->b + o, g->c, g->offset, g->e[r], g->cols);
    }
}

static void
norm_dg_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->cols, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = 0; r < g->rows; r++) {
        uint64_t o = r * g->cols + first;
        if (g->fout != NULL)
            g->k->norm_dg_row(g->fout + first, g->a + o, g->b + o, g->d != NULL ? g->d[r] : 0.0f, g->e[r], n);
        if (g->fout2 != NULL)
            g->k->axpy(g->fout2 + first, 1.0f, g->a + o, n);
    }
}

static void
norm_backward(spw_gpu_queue *q, args *g)
{
    if (g->fout != NULL || g->fout2 != NULL)
        run(q, g, g->cols, COL_GRAIN, norm_dg_part);
    if (g->out != NULL)
        run(q, g, g->rows, row_grain(g->cols), norm_dx_part);
}

void
spw__cpu_layernorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, float *db, const act *dy,
                            const act *x, const act *g, const float *mean, const float *rstd, uint64_t M, uint64_t C)
{
    norm_backward(q, &(args){.out = dx,
                             .out2 = (void *)onto,
                             .fout = dg,
                             .fout2 = db,
                             .a = dy,
                             .b = x,
                             .c = g,
                             .d = mean,
                             .e = rstd,
                             .rows = M,
                             .cols = C});
}

void
spw__cpu_rmsnorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, const act *dy, const act *x,
                          const act *g, float offset, const float *rstd, uint64_t M, uint64_t C)
{
    norm_backward(q, &(args){.out = dx,
                             .out2 = (void *)onto,
                             .fout = dg,
                             .a = dy,
                             .b = x,
                             .c = g,
                             .e = rstd,
                             .offset = offset,
                             .rows = M,
                             .cols = C});
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
        M, row_grain(H * D), rope_part);
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
        M, row_grain(H * D), copy_heads_part);
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
        M, row_grain(H * D), sum_heads_part);
}

/* ---------------------------------------------------------------- loss */

enum { PIECE = 1024 };

/* The sum of exp(x - max) of a row, which with a cap keeps its logits, for the slope; else the exponentials take their place. */
static float
exp_row(const args *g, float *row, float max)
{
    float part[PIECE], sum = 0;
    if (!(g->cap > 0))
        return g->k->exp_sum(row, row, max, g->cols);
    for (uint64_t c = 0, n; c < g->cols; c += n) {
        n = g->cols - c < PIECE ? g->cols - c : PIECE;
        sum += g->k->exp_sum(part, row + c, max, n);
    }
    return sum;
}

/* What the gradient of a row that has a target is multiplied by; g->b: weights, or NULL. */
static float
gradient_scale(const args *g, uint64_t r)
{
    return g->b != NULL ? g->eps * g->b[r] : g->eps;
}

/*
 * After exp_row(), in place the gradient scale * (softmax - one-hot), times the slope of the cap. sum: of the whole vocabulary; target: cols
 * or more where the row has none.
 */
static void
gradient_row(const args *g, float *row, float scale, uint64_t target, float max, float sum)
{
    float part[PIECE];
    if (!(g->cap > 0)) {
        g->k->scale(row, scale / sum, g->cols);
        if (target < g->cols)
            row[target] -= scale;
        return;
    }
    for (uint64_t c = 0, n; c < g->cols; c += n) {
        n = g->cols - c < PIECE ? g->cols - c : PIECE;
        g->k->exp_sum(part, row + c, max, n);
        g->k->scale(part, scale / sum, n);
        if (target >= c && target < c + n)
            part[target - c] -= scale;
        g->k->soft_cap_backward(part, row + c, 0, g->cap, n);
        memcpy(row + c, part, n * sizeof *part);
    }
}

/* One row of logits without their cap: the loss, and in place the gradient. */
static void
cross_entropy_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *row = (float *)g->out + r * g->cols, at_target, max, sum;
        int32_t target = g->ids[r];
        if (target < 0) {
            g->fout[r] = 0.0f;
            memset(row, 0, g->cols * sizeof(float));
            continue;
        }
        if (g->cap > 0)
            g->k->soft_cap(row, g->cap, g->cols);
        at_target = row[target];
        max = g->k->max(row, g->cols);
        sum = exp_row(g, row, max);
        g->fout[r] = logf(sum) + max - at_target;
        gradient_row(g, row, gradient_scale(g, r), (uint64_t)target, max, sum);
    }
}

void
spw__cpu_linear_cross_entropy(spw_gpu_queue *q, float *losses, act *dx, float *dw, const act *x, const act *w,
                              const int32_t *targets, const float *weights, act *logits, uint64_t rows_per_chunk,
                              uint64_t M, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    for (uint64_t first = 0; first < M; first += rows_per_chunk) {
        uint64_t m = M - first < rows_per_chunk ? M - first : rows_per_chunk;
        const float *xs = (const float *)x + first * C;
        spw__cpu_gemm(q, false, true, m, V, C, xs, C, w, C, 0.0f, logits, V);
        run(q,
            &(args){.out = logits,
                    .fout = losses + first,
                    .b = weights != NULL ? weights + first : NULL,
                    .ids = targets + first,
                    .rows = m,
                    .cols = V,
                    .eps = grad_scale,
                    .cap = cap},
            m, row_grain(V), cross_entropy_part);
        if (dx != NULL)
            spw__cpu_gemm(q, false, false, m, C, V, logits, V, w, C, flags & SPW_OP_ACC_DX ? 1.0f : 0.0f,
                          (float *)dx + first * C, C);
        if (dw != NULL)
            spw__cpu_gemm(q, true, false, V, C, m, logits, V, xs, C,
                          first == 0 && (flags & SPW_OP_SET_DW) ? 0.0f : 1.0f, dw, C);
    }
}

/* Logits [at, at + cols) of a row, without their cap, into its three sums. */
static void
head_see_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *row = (float *)g->out + r * g->cols, *so_far = g->fout + r * 3, max, sum;
        uint64_t target = (uint64_t)g->ids[r] - g->at;
        if (g->ids[r] < 0)
            continue;
        if (g->cap > 0)
            g->k->soft_cap(row, g->cap, g->cols);
        if (target < g->cols || g->at == 0)
            so_far[2] = target < g->cols ? row[target] : 0.0f;
        max = g->k->max(row, g->cols);
        sum = exp_row(g, row, max);
        if (g->at > 0) { /* a NaN is in one of the sums, whatever becomes of the greatest */
            float most = so_far[0] >= max ? so_far[0] : max;
            sum = so_far[1] * expf(so_far[0] - most) + sum * expf(max - most);
            max = most;
        }
        so_far[0] = max;
        so_far[1] = sum;
    }
}

void
spw__cpu_head_see(spw_gpu_queue *q, float *sums, const act *x, const act *w, const int32_t *targets, act *logits,
                  uint64_t rows_per_chunk, uint64_t M, uint64_t first, uint64_t V, uint64_t C, float cap)
{
    for (uint64_t at = 0; at < M; at += rows_per_chunk) {
        uint64_t m = M - at < rows_per_chunk ? M - at : rows_per_chunk;
        spw__cpu_gemm(q, false, true, m, V, C, (const float *)x + at * C, C, w, C, 0.0f, logits, V);
        run(q,
            &(args){.out = logits,
                    .fout = sums + at * 3,
                    .ids = targets + at,
                    .rows = m,
                    .cols = V,
                    .at = first,
                    .cap = cap},
            m, row_grain(V), head_see_part);
    }
}

void
spw__cpu_head_losses(spw_gpu_queue *q, float *losses, const float *sums, const int32_t *targets, uint64_t M)
{
    (void)q;
    for (uint64_t i = 0; i < M; i++)
        losses[i] = targets[i] < 0 ? 0.0f : logf(sums[i * 3 + 1]) + sums[i * 3] - sums[i * 3 + 2];
}

/* Logits [at, at + cols) of a row, without their cap, into their gradients. */
static void
head_gradient_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const args *g = ctx;
    uint64_t first, n = slice(g, g->rows, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *row = (float *)g->out + r * g->cols;
        const float *sums = g->a + r * 3;
        if (g->ids[r] < 0) {
            memset(row, 0, g->cols * sizeof(float));
            continue;
        }
        if (g->cap > 0)
            g->k->soft_cap(row, g->cap, g->cols);
        else
            (void)exp_row(g, row, sums[0]);
        gradient_row(g, row, gradient_scale(g, r), (uint64_t)g->ids[r] - g->at, sums[0], sums[1]);
    }
}

void
spw__cpu_head_backward(spw_gpu_queue *q, float *dx, float *dw, const act *x, const act *w, const int32_t *targets,
                       const float *weights, const float *sums, act *logits, uint64_t rows_per_chunk, uint64_t M,
                       uint64_t first, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    for (uint64_t at = 0; at < M; at += rows_per_chunk) {
        uint64_t m = M - at < rows_per_chunk ? M - at : rows_per_chunk;
        const float *xs = (const float *)x + at * C;
        spw__cpu_gemm(q, false, true, m, V, C, xs, C, w, C, 0.0f, logits, V);
        run(q,
            &(args){.out = logits,
                    .a = sums + at * 3,
                    .b = weights != NULL ? weights + at : NULL,
                    .ids = targets + at,
                    .rows = m,
                    .cols = V,
                    .at = first,
                    .eps = grad_scale,
                    .cap = cap},
            m, row_grain(V), head_gradient_part);
        if (dx != NULL)
            spw__cpu_gemm(q, false, false, m, C, V, logits, V, w, C, flags & SPW_OP_ACC_DX ? 1.0f : 0.0f, dx + at * C,
                          C);
        if (dw != NULL)
            spw__cpu_gemm(q, true, false, V, C, m, logits, V, xs, C, at == 0 && (flags & SPW_OP_SET_DW) ? 0.0f : 1.0f,
                          dw, C);
    }
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

void
spw__cpu_count_nonfinite(spw_gpu_queue *q, uint64_t *out, const float *x, uint64_t n)
{
    uint64_t count = 0;
    (void)q;
    for (uint64_t i = 0; i < n; i++)
        count += (spw_f32_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    *out = count;
}
