/*
 * A mixture of experts on the cpu device: routing, rows to their experts and back, their layers, which are products of slices, and what
 * an expert of all rows adds.
 */
#include "cpu_internal.h"
#include <math.h>

typedef struct moe_args {
    const cpu_kernels *k;
    const spw_routing *r;
    const spw_routing_rule *rule;
    const float *logits, *x, *dy, *onto;
    float *y, *dweights;
    uint64_t C, grain;
    float balance;
    bool weighted, add, down;
} moe_args;

static uint64_t
slice(const moe_args *g, uint32_t part_idx, uint64_t *first)
{
    return cpu_slice(g->r->M, g->grain, part_idx, first);
}

static void
run(spw_gpu_queue *q, moe_args *g, uint64_t cols, spw_pool_fn fn)
{
    g->k = spw__cpu_kernels(q);
    g->grain = cpu_row_grain(cols);
    spw__cpu_run(q, cpu_slices(g->r->M, g->grain), fn, g);
}

static bool
above(float a, float b)
{
    return a > b || (isnan(a) && !isnan(b));
}

/* The k largest so far stay sorted; an expert does not pass an equal one, which is a lower one. */
static void
choose_best(int32_t *choices, const float *logits, uint64_t E, uint64_t k)
{
    for (uint64_t e = 0; e < E; e++) {
        uint64_t j = e < k ? e : k;
        for (; j > 0 && above(logits[e], logits[choices[j - 1]]); j--)
            if (j < k)
                choices[j] = choices[j - 1];
        if (j < k)
            choices[j] = (int32_t)e;
    }
}

/* The same, lower experts first. */
static void
choose(int32_t *choices, const float *logits, uint64_t E, uint64_t k)
{
    choose_best(choices, logits, E, k);
    for (uint64_t i = 1; i < k; i++) {
        const int32_t expert = choices[i];
        uint64_t j = i;
        for (; j > 0 && choices[j - 1] > expert; j--)
            choices[j] = choices[j - 1];
        choices[j] = expert;
    }
}

static float
sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static float
softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

/* The probability of an expert that has one by itself. */
static float
alone(const spw_routing_rule *rule, float logit)
{
    return rule->root ? sqrtf(softplus(logit)) : sigmoid(logit);
}

/* Its slope over it; of the root 1/2 at the lower end, where both are lost. */
static float
slope_of(const spw_routing_rule *rule, float logit)
{
    if (!rule->root)
        return 1 - sigmoid(logit);
    return logit < -15 ? 0.5f : sigmoid(logit) / (2 * softplus(logit));
}

/* The choices of a token, lower experts first. */
static void
look_up(const moe_args *g, uint64_t m, int32_t *choices)
{
    const spw_routing *r = g->r;
    const float *terms = (const float *)g->rule->table + (uint64_t)g->rule->tokens[m] * r->k * SPW_TERMS;
    for (uint64_t i = 0; i < r->k; i++) {
        int32_t expert = (int32_t)sum_of_terms(terms + i * SPW_TERMS);
        uint64_t j = i;
        expert = expert < 0 ? 0 : expert < (int32_t)r->E ? expert : (int32_t)r->E - 1;
        for (; j > 0 && choices[j - 1] > expert; j--)
            choices[j] = choices[j - 1];
        choices[j] = expert;
    }
}

/* The sum of a group's best two, or its best one. */
static float
worth(const float *keys, uint64_t n, bool of_two)
{
    int32_t best[2] = {0, 0};
    choose_best(best, keys, n, n > 1 ? 2 : 1);
    return of_two && n > 1 ? keys[best[0]] + keys[best[1]] : keys[best[0]];
}

/* Experts of groups that are not among the best can no longer be chosen. */
static void
leave_groups(const spw_routing_rule *rule, float *keys, uint64_t E)
{
    float worths[SPW_EXPERTS_MAX];
    int32_t best[SPW_EXPERTS_MAX];
    uint64_t each = E / rule->groups;
    bool stays[SPW_EXPERTS_MAX] = {false};
    for (uint64_t g = 0; g < rule->groups; g++)
        worths[g] = worth(keys + g * each, each, rule->sigmoid);
    choose_best(best, worths, rule->groups, rule->group_choices);
    for (uint64_t i = 0; i < rule->group_choices; i++)
        stays[best[i]] = true;
    for (uint64_t e = 0; e < E; e++)
        keys[e] = stays[e / each] ? keys[e] : -INFINITY;
}

static float
largest(const float *logits, uint64_t E)
{
    float max = logits[0];
    for (uint64_t e = 1; e < E; e++)
        max = above(logits[e], max) ? logits[e] : max;
    return max;
}

/* What choices go by: the logits themselves, or room with what the rule makes of them. */
static const float *
keys_of(const moe_args *g, const float *logits, float *room)
{
    const spw_routing_rule *rule = g->rule;
    const float *bias = rule->bias;
    uint64_t E = g->r->E;
    float sum = 1;
    if (!rule->sigmoid && bias == NULL && rule->groups == 0)
        return logits;
    if (!rule->sigmoid && bias != NULL)
        sum = g->k->exp_sum(room, logits, largest(logits, E), E);
    for (uint64_t e = 0; e < E; e++) {
        room[e] = rule->sigmoid ? alone(rule, logits[e]) : bias != NULL ? room[e] / sum : logits[e];
        if (bias != NULL)
            room[e] += sum_of_terms(bias + SPW_TERMS * e);
    }
    if (rule->groups > 0)
        leave_groups(rule, room, E);
    return room;
}

/* What a weight of an expert is multiplied by. */
static float
factor_of(const spw_routing_rule *rule, int32_t expert)
{
    const float *factors = rule->factors;
    return factors != NULL ? factors[expert] : 1.0f;
}

static void
route_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    const spw_routing *r = g->r;
    const spw_routing_rule *rule = g->rule;
    uint64_t first, n = slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + n; m++) {
        const float *logits = g->logits + m * r->E;
        int32_t *choices = r->choices + m * r->k;
        float *w = r->weights + m * r->k, sum = 0, max, room[SPW_EXPERTS_MAX];
        if (rule->table != NULL)
            look_up(g, m, choices);
        else
            choose(choices, keys_of(g, logits, room), r->E, r->k);
        max = largest(logits, r->E);
        for (uint64_t j = 0; j < r->k; j++)
            sum += w[j] = rule->sigmoid ? alone(rule, logits[choices[j]]) : expf(logits[choices[j]] - max);
        if (!rule->sum_to_one)
            sum = rule->sigmoid ? 1 : g->k->exp_sum(room, logits, max, r->E);
        else if (rule->sigmoid || rule->bias != NULL)
            sum += rule->least > 0 ? rule->least : SPW_WEIGHTS_LEAST;
        for (uint64_t j = 0; j < r->k; j++)
            w[j] = w[j] / sum * rule->scale;
        for (uint64_t j = 0; j < r->k && rule->factors != NULL; j++) {
            r->shares[m * r->k + j] = w[j];
            w[j] *= factor_of(rule, choices[j]);
        }
    }
}

void
spw__cpu_route(spw_gpu_queue *q, const spw_routing *r, const act *logits, const spw_routing_rule *rule)
{
    int32_t next[SPW_EXPERTS_MAX] = {0}, end = 0;
    SPW_ASSERT(r->k > 0 && r->k <= SPW_CHOICES_MAX && r->k <= r->E && r->E <= SPW_EXPERTS_MAX);
    SPW_ASSERT(rule->groups == 0 || (r->E % rule->groups == 0 && rule->group_choices <= rule->groups &&
                                     r->k <= rule->group_choices * (r->E / rule->groups)));
    run(q, &(moe_args){.r = r, .logits = logits, .rule = rule}, r->E * 4, route_part);
    for (uint64_t i = 0; i < r->M * r->k; i++)
        next[r->choices[i]]++;
    for (uint64_t e = 0; e < r->E; e++) {
        int32_t count = next[e];
        next[e] = end;
        end += count;
        r->ends[e] = end;
    }
    for (uint64_t i = 0; i < r->M * r->k; i++) {
        int32_t place = next[r->choices[i]]++;
        r->places[i] = place;
        r->pairs[place] = (int32_t)i;
    }
}

/*
 * d[e] += p[e] (c[e] - sum of p c), with p over the sum of all experts' and c balance times an expert's pairs; of a sigmoid or a root times its slope
 * over it.
 */
static void
add_balance(const moe_args *g, float *d, const float *logits)
{
    const spw_routing *r = g->r;
    float p[SPW_EXPERTS_MAX], c[SPW_EXPERTS_MAX], mean = 0, sum = 0;
    if (!g->rule->sigmoid)
        sum = g->k->exp_sum(p, logits, largest(logits, r->E), r->E);
    for (uint64_t e = 0; g->rule->sigmoid && e < r->E; e++)
        sum += p[e] = alone(g->rule, logits[e]);
    g->k->scale(p, 1.0f / sum, r->E);
    for (uint64_t e = 0; e < r->E; e++) {
        c[e] = g->balance * (float)(r->ends[e] - (e > 0 ? r->ends[e - 1] : 0));
        mean += p[e] * c[e];
    }
    for (uint64_t e = 0; e < r->E; e++)
        d[e] += p[e] * (c[e] - mean) * (g->rule->sigmoid ? slope_of(g->rule, logits[e]) : 1);
}

/*
 * Of a softmax, over the chosen ones or over all, times scale: dlogits[e] = w[e] (dw[e] - sum of w dw / scale), with w over the same ones
 * and dw 0 for those that are not chosen. Of a sigmoid or a root only the chosen ones have a gradient: w[e] times its slope over it times (dw[e] - that sum, if weights
 * are divided by theirs). With factors w is what it was before them, and dw is multiplied by its expert's.
 */
static void
route_backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    const spw_routing *r = g->r;
    const spw_routing_rule *rule = g->rule;
    uint64_t first, n = slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + n; m++) {
        const float *logits = g->logits + m * r->E, *w = (rule->factors != NULL ? r->shares : r->weights) + m * r->k;
        const int32_t *choices = r->choices + m * r->k;
        float *y = g->y + m * r->E, dw[SPW_CHOICES_MAX], mean = 0, d[SPW_EXPERTS_MAX] = {0};
        for (uint64_t j = 0; j < r->k; j++)
            dw[j] = g->dweights[m * r->k + j] * factor_of(rule, choices[j]);
        for (uint64_t j = 0; j < r->k && (rule->sum_to_one || !rule->sigmoid); j++)
            mean += w[j] * dw[j];
        if (!rule->sum_to_one && !rule->sigmoid)
            g->k->scale(d, -mean / g->k->exp_sum(d, logits, largest(logits, r->E), r->E), r->E);
        for (uint64_t j = 0; j < r->k; j++)
            d[choices[j]] =
                (j > 0 && choices[j - 1] == choices[j] ? d[choices[j]] : 0) +
                w[j] * (dw[j] - mean / rule->scale) * (rule->sigmoid ? slope_of(rule, logits[choices[j]]) : 1);
        if (g->balance != 0)
            add_balance(g, d, logits);
        for (uint64_t e = 0; e < r->E; e++)
            y[e] = g->add ? y[e] + d[e] : d[e];
    }
}

void
spw__cpu_route_backward(spw_gpu_queue *q, act *dlogits, const float *dweights, const act *logits, const spw_routing *r,
                        const spw_routing_rule *rule, float balance, unsigned flags)
{
    run(q,
        &(moe_args){.r = r,
                    .logits = logits,
                    .y = dlogits,
                    .dweights = (float *)(uintptr_t)dweights,
                    .rule = rule,
                    .balance = balance,
                    .add = flags & SPW_OP_ACC_DX},
        r->E * 4, route_backward_part);
}

/* A part is an expert. */
static void
factors_backward_part(void *ctx, uint32_t expert, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    const spw_routing *r = g->r;
    float sum = 0;
    (void)worker_idx;
    for (int32_t i = expert > 0 ? r->ends[expert - 1] : 0; i < r->ends[expert]; i++)
        sum += g->dweights[r->pairs[i]] * r->shares[r->pairs[i]];
    g->y[expert] += sum;
}

void
spw__cpu_factors_backward(spw_gpu_queue *q, float *dfactors, const float *dweights, const spw_routing *r)
{
    moe_args g = {.r = r, .y = dfactors, .dweights = (float *)(uintptr_t)dweights};
    spw__cpu_run(q, (uint32_t)r->E, factors_backward_part, &g);
}

static void
dispatch_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    const spw_routing *r = g->r;
    uint64_t first, n = slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t i = first * r->k; i < (first + n) * r->k; i++)
        memcpy(g->y + i * g->C, g->x + (uint64_t)r->pairs[i] / r->k * g->C, g->C * sizeof *g->y);
}

void
spw__cpu_dispatch(spw_gpu_queue *q, act *y, const act *x, const spw_routing *r, uint64_t C)
{
    run(q, &(moe_args){.r = r, .y = y, .x = x, .C = C}, C * r->k, dispatch_part);
}

enum { COMBINE_COLS = 512 };

/* Columns [c, c + n) of a row. */
static void
combine_cols(const moe_args *g, uint64_t m, uint64_t c, uint64_t n)
{
    const spw_routing *r = g->r;
    float sum[COMBINE_COLS] = {0};
    if (g->onto != NULL && !g->down)
        memcpy(sum, g->onto + m * g->C + c, n * sizeof *sum);
    for (uint64_t i = 0; i < r->k; i++) {
        const uint64_t pair = m * r->k + (g->down ? r->k - 1 - i : i);
        g->k->axpy(sum, g->weighted ? r->weights[pair] : 1.0f, g->x + (uint64_t)r->places[pair] * g->C + c, n);
    }
    if (g->onto != NULL && g->down)
        g->k->axpy(sum, 1.0f, g->onto + m * g->C + c, n);
    memcpy(g->y + m * g->C + c, sum, n * sizeof *sum);
}

static void
combine_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    uint64_t first, n = slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + n; m++) {
        for (uint64_t c = 0; c < g->C; c += COMBINE_COLS)
            combine_cols(g, m, c, g->C - c < COMBINE_COLS ? g->C - c : COMBINE_COLS);
    }
}

void
spw__cpu_combine(spw_gpu_queue *q, act *y, const act *onto, const act *x, const spw_routing *r, bool weighted,
                 bool down, uint64_t C)
{
    run(q, &(moe_args){.r = r, .y = y, .onto = onto, .x = x, .weighted = weighted, .down = down, .C = C}, C * r->k,
        combine_part);
}

static void
combine_backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    const spw_routing *r = g->r;
    uint64_t first, n = slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + n; m++) {
        const float *dy = g->dy + m * g->C;
        for (uint64_t i = m * r->k; i < (m + 1) * r->k; i++) {
            uint64_t at = (uint64_t)r->places[i] * g->C;
            if (g->dweights != NULL)
                g->dweights[i] = g->k->dot(dy, g->x + at, g->C);
            if (g->y == NULL)
                continue;
            memcpy(g->y + at, dy, g->C * sizeof *dy);
            g->k->scale(g->y + at, r->weights[i], g->C);
        }
    }
}

void
spw__cpu_combine_backward(spw_gpu_queue *q, act *dx, float *dweights, const act *dy, const act *x, const spw_routing *r,
                          uint64_t C)
{
    run(q, &(moe_args){.r = r, .y = dx, .dweights = dweights, .dy = dy, .x = x, .C = C}, C * r->k,
        combine_backward_part);
}

/* ---------------------------------------------------------------- some places, whose rows lie by themselves */

typedef struct piece_args {
    const cpu_kernels *k;
    const spw_routing *r;
    const float *x, *dy;
    float *y, *dweights;
    uint64_t first, rows, C, grain;
    bool weighted, down;
} piece_args;

static void
run_piece(spw_gpu_queue *q, piece_args *g, spw_pool_fn fn)
{
    g->k = spw__cpu_kernels(q);
    g->grain = cpu_row_grain(g->C);
    spw__cpu_run(q, cpu_slices(g->rows, g->grain), fn, g);
}

/* Rows [first, the result) of a part. */
static uint64_t
piece_slice(const piece_args *g, uint32_t part_idx, uint64_t *first)
{
    const uint64_t n = cpu_slice(g->rows, g->grain, part_idx, first);
    return *first + n;
}

static void
dispatch_piece_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const piece_args *g = ctx;
    uint64_t first, end = piece_slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t i = first; i < end; i++)
        memcpy(g->y + i * g->C, g->x + (uint64_t)g->r->pairs[g->first + i] / g->r->k * g->C, g->C * sizeof *g->y);
}

void
spw__cpu_dispatch_piece(spw_gpu_queue *q, act *y, const act *x, const spw_routing *r, uint64_t first, uint64_t rows,
                        uint64_t C)
{
    run_piece(q, &(piece_args){.r = r, .y = y, .x = x, .first = first, .rows = rows, .C = C}, dispatch_piece_part);
}

/* The choices of row m whose places are among these: [*from, the result). */
static uint64_t
choices_here(const piece_args *g, uint64_t m, uint64_t *from)
{
    const int32_t *places = g->r->places + m * g->r->k;
    uint64_t first = 0, end;
    while ((uint64_t)places[first] < g->first)
        first++;
    for (end = first; end < g->r->k && (uint64_t)places[end] < g->first + g->rows; end++)
        continue;
    *from = first;
    return end;
}

/* A row of the sums belongs to the lowest of its places here: no two parts add to one. */
static void
combine_piece_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const piece_args *g = ctx;
    const spw_routing *r = g->r;
    uint64_t first, end = piece_slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t i = first; i < end; i++) {
        const uint64_t m = (uint64_t)r->pairs[g->first + i] / r->k;
        uint64_t from, past = choices_here(g, m, &from);
        if ((uint64_t)r->places[m * r->k + from] != g->first + i)
            continue;
        for (uint64_t c = 0; c < past - from; c++) {
            const uint64_t pair = m * r->k + (g->down ? past - 1 - c : from + c);
            g->k->axpy(g->y + m * g->C, g->weighted ? r->weights[pair] : 1.0f,
                       g->x + ((uint64_t)r->places[pair] - g->first) * g->C, g->C);
        }
    }
}

void
spw__cpu_combine_piece(spw_gpu_queue *q, float *sum, const act *x, const spw_routing *r, bool weighted, bool down,
                       uint64_t first, uint64_t rows, uint64_t C)
{
    run_piece(q,
              &(piece_args){
                  .r = r, .y = sum, .x = x, .weighted = weighted, .down = down, .first = first, .rows = rows, .C = C},
              combine_piece_part);
}

static void
close_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const piece_args *g = ctx;
    uint64_t first, end = piece_slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t i = first * g->C; i < end * g->C; i++)
        g->y[i] = g->x[i] + (g->dy != NULL ? g->dy[i] : 0);
}

void
spw__cpu_close_sums(spw_gpu_queue *q, act *y, const float *sums, const act *onto, uint64_t M, uint64_t C)
{
    run_piece(q, &(piece_args){.y = y, .x = sums, .dy = onto, .rows = M, .C = C}, close_part);
}

static void
combine_backward_piece_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const piece_args *g = ctx;
    const spw_routing *r = g->r;
    uint64_t first, end = piece_slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t i = first; i < end; i++) {
        uint64_t pair = (uint64_t)r->pairs[g->first + i];
        const float *dy = g->dy + pair / r->k * g->C;
        if (g->dweights != NULL)
            g->dweights[pair] = g->k->dot(dy, g->x + i * g->C, g->C);
        if (g->y == NULL)
            continue;
        memcpy(g->y + i * g->C, dy, g->C * sizeof *dy);
        g->k->scale(g->y + i * g->C, r->weights[pair], g->C);
    }
}

void
spw__cpu_combine_backward_piece(spw_gpu_queue *q, act *dx, float *dweights, const act *dy, const act *x,
                                const spw_routing *r, uint64_t first, uint64_t rows, uint64_t C)
{
    run_piece(
        q, &(piece_args){.r = r, .y = dx, .dweights = dweights, .dy = dy, .x = x, .first = first, .rows = rows, .C = C},
        combine_backward_piece_part);
}

/* ---------------------------------------------------------------- their layers: a processor gains nothing by all at once */

void
spw__cpu_linear_each(spw_gpu_queue *q, act *y, const act *x, const spw_each *e, unsigned flags)
{
    spw__each_alone(q, y, x, e, sizeof(float), flags);
}

void
spw__cpu_linear_each_backward(spw_gpu_queue *q, act *dx, const act *dy, const act *x, const spw_each *e, unsigned flags)
{
    spw__each_backward_alone(q, dx, dy, x, e, sizeof(float), flags);
}

/* ---------------------------------------------------------------- an expert of all rows; r has M alone, logits are the gate */

static void
add_gated_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    uint64_t first, n = slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + n; m++) {
        float *y = g->y + m * g->C;
        if (g->onto != g->y)
            memcpy(y, g->onto + m * g->C, g->C * sizeof *y);
        g->k->axpy(y, sigmoid(g->logits[m]), g->x + m * g->C, g->C);
    }
}

void
spw__cpu_add_gated(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *gate, uint64_t M, uint64_t C)
{
    run(q, &(moe_args){.r = &(spw_routing){.M = M}, .y = y, .onto = onto, .x = x, .logits = gate, .C = C}, C,
        add_gated_part);
}

static void
add_gated_backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const moe_args *g = ctx;
    uint64_t first, n = slice(g, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + n; m++) {
        const float *dy = g->dy + m * g->C;
        float s = sigmoid(g->logits[m]);
        g->dweights[m] = s * (1.0f - s) * g->k->dot(dy, g->x + m * g->C, g->C);
        memcpy(g->y + m * g->C, dy, g->C * sizeof *dy);
        g->k->scale(g->y + m * g->C, s, g->C);
    }
}

void
spw__cpu_add_gated_backward(spw_gpu_queue *q, act *dx, act *dgate, const act *dy, const act *x, const act *gate,
                            uint64_t M, uint64_t C)
{
    run(q,
        &(moe_args){.r = &(spw_routing){.M = M}, .y = dx, .dweights = dgate, .dy = dy, .x = x, .logits = gate, .C = C},
        C, add_gated_backward_part);
}
