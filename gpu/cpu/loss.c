/*
 * The loss of the cpu device: logits of some rows at a time and, in their place, their gradients; of a whole vocabulary, or of one of its
 * pieces, of which the first pass leaves three sums for each row (spw_gpu_head_see).
 */
#include "cpu_internal.h"
#include <math.h>

enum { PIECE = 1024 };

/* Rows of logits (rows, V) without their cap, and what is theirs. */
typedef struct loss_rows {
    const cpu_kernels *k;
    float *logits;
    const int32_t *targets;
    const float *weights;    /* or NULL */
    float *losses, *sums;    /* sums (rows, 3): greatest logit, sum of exponentials below it, logit of the target */
    uint64_t rows, V, first; /* first: of the vocabulary's, the piece's */
    float grad_scale, cap;
} loss_rows;

/* What they are made of, and gradients. */
typedef struct head {
    const float *x, *w; /* (M, C), (V, C) */
    float *dx, *dw;     /* or NULL */
    uint64_t M, C, rows_per_chunk;
    unsigned flags;
} head;

/* The sum of exp(x - max) of a row, which with a cap keeps its logits, for the slope; else the exponentials take their place. */
static float
exp_row(const loss_rows *l, float *row, float max)
{
    float part[PIECE], sum = 0;
    if (!(l->cap > 0))
        return l->k->exp_sum(row, row, max, l->V);
    for (uint64_t c = 0, n; c < l->V; c += n) {
        n = min_u64(l->V - c, PIECE);
        sum += l->k->exp_sum(part, row + c, max, n);
    }
    return sum;
}

/* What the gradient of a row that has a target is multiplied by. */
static float
gradient_scale(const loss_rows *l, uint64_t r)
{
    return l->weights != NULL ? l->grad_scale * l->weights[r] : l->grad_scale;
}

/*
 * After exp_row(), in place the gradient scale * (softmax - one-hot), times the slope of the cap. sum: of the whole vocabulary; target: V
 * or more where the row has none.
 */
static void
gradient_row(const loss_rows *l, float *row, float scale, uint64_t target, float max, float sum)
{
    float part[PIECE];
    if (!(l->cap > 0)) {
        l->k->scale(row, scale / sum, l->V);
        if (target < l->V)
            row[target] -= scale;
        return;
    }
    for (uint64_t c = 0, n; c < l->V; c += n) {
        n = min_u64(l->V - c, PIECE);
        l->k->exp_sum(part, row + c, max, n);
        l->k->scale(part, scale / sum, n);
        if (target >= c && target < c + n)
            part[target - c] -= scale;
        l->k->soft_cap_backward(part, row + c, 0, l->cap, n);
        memcpy(row + c, part, n * sizeof *part);
    }
}

/* The loss, and in place the gradient. */
static void
cross_entropy_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const loss_rows *l = ctx;
    uint64_t first, n = cpu_slice(l->rows, cpu_row_grain(l->V), part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *row = l->logits + r * l->V, at_target, max, sum;
        int32_t target = l->targets[r];
        if (target < 0) {
            l->losses[r] = 0.0f;
            memset(row, 0, l->V * sizeof(float));
            continue;
        }
        if (l->cap > 0)
            l->k->soft_cap(row, l->cap, l->V);
        at_target = row[target];
        max = l->k->max(row, l->V);
        sum = exp_row(l, row, max);
        l->losses[r] = logf(sum) + max - at_target;
        gradient_row(l, row, gradient_scale(l, r), (uint64_t)target, max, sum);
    }
}

/* A piece's, into the three sums. */
static void
see_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const loss_rows *l = ctx;
    uint64_t first, n = cpu_slice(l->rows, cpu_row_grain(l->V), part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *row = l->logits + r * l->V, *so_far = l->sums + r * 3, max, sum;
        uint64_t target = (uint64_t)l->targets[r] - l->first;
        if (l->targets[r] < 0)
            continue;
        if (l->cap > 0)
            l->k->soft_cap(row, l->cap, l->V);
        if (target < l->V || l->first == 0)
            so_far[2] = target < l->V ? row[target] : 0.0f;
        max = l->k->max(row, l->V);
        sum = exp_row(l, row, max);
        if (l->first > 0) { /* a NaN is in one of the sums, whatever becomes of the greatest */
            float most = so_far[0] >= max ? so_far[0] : max;
            sum = so_far[1] * expf(so_far[0] - most) + sum * expf(max - most);
            max = most;
        }
        so_far[0] = max;
        so_far[1] = sum;
    }
}

/* A piece's gradients, in place. */
static void
gradient_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const loss_rows *l = ctx;
    uint64_t first, n = cpu_slice(l->rows, cpu_row_grain(l->V), part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *row = l->logits + r * l->V;
        const float *sums = l->sums + r * 3;
        if (l->targets[r] < 0) {
            memset(row, 0, l->V * sizeof(float));
            continue;
        }
        if (l->cap > 0)
            l->k->soft_cap(row, l->cap, l->V);
        else
            (void)exp_row(l, row, sums[0]);
        gradient_row(l, row, gradient_scale(l, r), (uint64_t)l->targets[r] - l->first, sums[0], sums[1]);
    }
}

/* All rows, as many at a time as there is memory for: logits, what fn makes of them, and gradients of that. */
static void
in_chunks(spw_gpu_queue *q, const head *h, const loss_rows *all, spw_pool_fn fn)
{
    const uint64_t V = all->V, C = h->C;
    for (uint64_t at = 0, m; at < h->M; at += m) {
        loss_rows l = *all;
        m = min_u64(h->M - at, h->rows_per_chunk);
        l.k = spw__cpu_kernels(q);
        l.rows = m;
        l.targets += at;
        l.weights = all->weights != NULL ? all->weights + at : NULL;
        l.losses = all->losses != NULL ? all->losses + at : NULL;
        l.sums = all->sums != NULL ? all->sums + at * 3 : NULL;
        spw__cpu_gemm(q, false, true, m, V, C, h->x + at * C, C, h->w, C, 0.0f, l.logits, V);
        spw__cpu_run(q, cpu_slices(m, cpu_row_grain(V)), fn, &l);
        if (h->dx != NULL)
            spw__cpu_gemm(q, false, false, m, C, V, l.logits, V, h->w, C, h->flags & SPW_OP_ACC_DX ? 1.0f : 0.0f,
                          h->dx + at * C, C);
        if (h->dw != NULL)
            spw__cpu_gemm(q, true, false, V, C, m, l.logits, V, h->x + at * C, C,
                          at == 0 && (h->flags & SPW_OP_SET_DW) ? 0.0f : 1.0f, h->dw, C);
    }
}

void
spw__cpu_linear_cross_entropy(spw_gpu_queue *q, float *losses, act *dx, float *dw, const act *x, const act *w,
                              const int32_t *targets, const float *weights, act *logits, uint64_t rows_per_chunk,
                              uint64_t M, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    const head h = {
        .x = x, .w = w, .dx = dx, .dw = dw, .M = M, .C = C, .rows_per_chunk = rows_per_chunk, .flags = flags};
    in_chunks(q, &h,
              &(loss_rows){.logits = logits,
                           .targets = targets,
                           .weights = weights,
                           .losses = losses,
                           .V = V,
                           .grad_scale = grad_scale,
                           .cap = cap},
              cross_entropy_part);
}

void
spw__cpu_head_see(spw_gpu_queue *q, float *sums, const act *x, const act *w, const int32_t *targets, act *logits,
                  uint64_t rows_per_chunk, uint64_t M, uint64_t first, uint64_t V, uint64_t C, float cap)
{
    const head h = {.x = x, .w = w, .M = M, .C = C, .rows_per_chunk = rows_per_chunk};
    in_chunks(q, &h,
              &(loss_rows){.logits = logits, .targets = targets, .sums = sums, .V = V, .first = first, .cap = cap},
              see_part);
}

void
spw__cpu_head_losses(spw_gpu_queue *q, float *losses, const float *sums, const int32_t *targets, uint64_t M)
{
    (void)q;
    for (uint64_t i = 0; i < M; i++)
        losses[i] = targets[i] < 0 ? 0.0f : logf(sums[i * 3 + 1]) + sums[i * 3] - sums[i * 3 + 2];
}

void
spw__cpu_head_backward(spw_gpu_queue *q, float *dx, float *dw, const act *x, const act *w, const int32_t *targets,
                       const float *weights, const float *sums, act *logits, uint64_t rows_per_chunk, uint64_t M,
                       uint64_t first, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    const head h = {
        .x = x, .w = w, .dx = dx, .dw = dw, .M = M, .C = C, .rows_per_chunk = rows_per_chunk, .flags = flags};
    in_chunks(q, &h,
              &(loss_rows){.logits = logits,
                           .targets = targets,
                           .weights = weights,
                           .sums = (float *)(uintptr_t)sums,
                           .V = V,
                           .first = first,
                           .grad_scale = grad_scale,
                           .cap = cap},
              gradient_part);
}
