/*
 * The gated delta rule of the cpu device, row after row.
 *
 * The rule's columns are independent of each other, and, once delta is known, so are the state's rows, and likewise those of its
 * gradient once that of delta is (spw_gpu.h). So a pass is a walk through time over CPU_STATE_LANES of them, whose state stays in the
 * first cache, and each row of time reads and writes that state once:
 *   forward         lanes are columns: delta, out
 *   back through v  lanes are columns, backwards: gradients of delta
 *   reading         lanes are rows: gradients of queries, and of keys by what they read
 *   writing         lanes are rows, backwards: gradients of keys by what they wrote
 * and then a row's own gradients are put together, and the decays' carried from row to row.
 * Mamba-2's recurrence is the same walks, to which nothing is what the state gives for a row's keys. With a decay for each channel of the keys the
 * state's rows have their own, and so have the lanes that are rows; what is carried from row to row is each channel's.
 */
#include "cpu_internal.h"
#include <math.h>

typedef struct rule {
    const cpu_kernels *k;
    const float *qkv, *a, *b, *log_a, *dt_bias, *skip; /* spw_delta_inputs */
    const float *dout;
    float *out, *delta;
    float *ddelta, *dq, *dk_read, *dk_write; /* scratch */
    float *share, *written, *asked;          /* too: a number of each row and head */
    float *dbeta, *dskip_of;                 /* and these, of Mamba-2 alone */
    float *decays; /* of each row, head and channel, which takes the place of the numbers; NULL in forward */
    uint64_t head_first, heads; /* of values, that are taken now; scratch has these alone */
    float *dqkv, *da, *db, *dlog_a, *ddt_bias, *dskip;
    const spw_delta_cache *cache;
    spw_delta_shape s;
} rule;

static const float zeros[SPW_DELTA_DIM_MAX];

/* Queries and keys of a row as the rule takes them, and what they were multiplied by. */
typedef struct turn {
    float q[SPW_DELTA_DIM_MAX], k[SPW_DELTA_DIM_MAX], q_scale, k_scale;
    float decay, beta;
    float decays[SPW_DELTA_DIM_MAX],
        asked[SPW_DELTA_DIM_MAX]; /* with channels: theirs, and keys times these; decay is 1 */
} turn;

static uint64_t
width(const spw_delta_shape *s)
{
    return 2 * s->Hk * s->Dk + s->Hv * s->Dv;
}

/* Where in a row a value head's queries are, its keys, and its values. */
static uint64_t
queries_at(const spw_delta_shape *s, uint64_t h)
{
    return (s->mamba ? s->Hv * s->Dv + s->Hk * s->Dk : 0) + h / (s->Hv / s->Hk) * s->Dk;
}

static uint64_t
keys_at(const spw_delta_shape *s, uint64_t h)
{
    return (s->mamba ? s->Hv * s->Dv : s->Hk * s->Dk) + h / (s->Hv / s->Hk) * s->Dk;
}

static uint64_t
values_at(const spw_delta_shape *s, uint64_t h)
{
    return (s->mamba ? 0 : 2 * s->Hk * s->Dk) + h * s->Dv;
}

static const float *
values(const rule *r, uint64_t row, uint64_t h)
{
    return r->qkv + row * width(&r->s) + values_at(&r->s, h);
}

static float
softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

static float
sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static float
beta_most(const spw_delta_shape *s)
{
    return s->beta_most > 0 ? s->beta_most : 1.0f;
}

static float
gate_input(const rule *r, uint64_t row, uint64_t h)
{
    return r->a[row * r->s.Hv + h] + r->dt_bias[h];
}

/* What a row's decay is made of, and of Mamba-2 its beta too. A NaN stays one. */
static float
step_of(const rule *r, uint64_t row, uint64_t h)
{
    float step = softplus(gate_input(r, row, h));
    return step < r->s.step_least ? r->s.step_least : step;
}

static float
step_slope(const rule *r, uint64_t row, uint64_t h)
{
    float x = gate_input(r, row, h);
    return softplus(x) < r->s.step_least ? 0.0f : sigmoid(x);
}

static float
log_decay(const rule *r, uint64_t row, uint64_t h)
{
    return -expf(r->log_a[h]) * step_of(r, row, h);
}

static float
channel_input(const rule *r, uint64_t row, uint64_t h, uint64_t i)
{
    return r->a[(row * r->s.Hv + h) * r->s.Dk + i] + r->dt_bias[h * r->s.Dk + i];
}

static bool
is_first(const rule *r, uint64_t row)
{
    uint64_t t = row % r->s.T;
    return r->s.begins != NULL ? (uint64_t)r->s.begins[row] == t : t == 0;
}

/* Which of the rows and heads in scratch. */
static uint64_t
taken(const rule *r, uint64_t row, uint64_t h)
{
    return row * r->heads + h - r->head_first;
}

/* A row's decays of channels, 0 where nothing is carried into it. */
static void
channel_decays(const rule *r, uint64_t row, uint64_t h, float *decays)
{
    const uint64_t n = r->s.Dk;
    if (r->cache == NULL && is_first(r, row))
        memset(decays, 0, n * sizeof *decays);
    else
        r->k->decays(decays, r->a + (row * r->s.Hv + h) * n, r->dt_bias + h * n, expf(r->log_a[h]), n);
}

static float
of_length_one(const rule *r, float *y, const float *x, float factor)
{
    uint64_t n = r->s.Dk;
    float scale = factor / sqrtf(r->k->dot(x, x, n) + 1e-6f);
    for (uint64_t i = 0; i < n; i++)
        y[i] = x[i] * scale;
    return scale;
}

static void
take_channels(const rule *r, uint64_t row, uint64_t h, turn *t)
{
    const uint64_t n = r->s.Dk;
    if (r->decays != NULL)
        memcpy(t->decays, r->decays + taken(r, row, h) * n, n * sizeof *t->decays);
    else
        channel_decays(r, row, h, t->decays);
    for (uint64_t i = 0; i < n; i++)
        t->asked[i] = t->decays[i] * t->k[i];
    t->decay = 1.0f;
}

static void
take_turn(const rule *r, uint64_t row, uint64_t h, turn *t)
{
    const spw_delta_shape *s = &r->s;
    const float *x = r->qkv + row * width(s), *q = x + queries_at(s, h), *k = x + keys_at(s, h);
    if (!s->channels)
        t->decay = r->cache == NULL && is_first(r, row) ? 0.0f : expf(log_decay(r, row, h));
    if (s->mamba) {
        memcpy(t->q, q, s->Dk * sizeof *q);
        memcpy(t->k, k, s->Dk * sizeof *k);
        t->beta = step_of(r, row, h);
        return;
    }
    t->q_scale = of_length_one(r, t->q, q, 1.0f / sqrtf((float)s->Dk));
    t->k_scale = of_length_one(r, t->k, k, 1.0f);
    t->beta = beta_most(s) * sigmoid(r->b[row * s->Hv + h]);
    if (s->channels)
        take_channels(r, row, h, t);
}

/* What the state is asked for before a row writes: its keys, or nothing. */
static const float *
asks(const rule *r, const turn *t)
{
    return r->s.mamba ? zeros : r->s.channels ? t->asked : t->k;
}

/* The device's steps of a state, whose rows have a turn's decays, or one. */
static void
step_forward(const rule *r, float *state, const turn *t, const float *lanes, float *out, const float *z, float *next)
{
    if (r->s.channels)
        r->k->state_forward_by(state, r->s.Dk, t->decays, NULL, t->k, lanes, t->q, out, z, next);
    else
        r->k->state_forward(state, r->s.Dk, t->decay, t->k, lanes, t->q, out, z, next);
}

static void
step_backward(const rule *r, float *state, const turn *behind, const float *lanes, const turn *t, const float *lanes2,
              float *out)
{
    if (r->s.channels)
        r->k->state_backward_by(state, r->s.Dk, behind->decays, NULL, behind->k, lanes, t->q, lanes2, t->k, out);
    else
        r->k->state_backward(state, r->s.Dk, behind->decay, behind->k, lanes, t->q, lanes2, t->k, out);
}

/* Of a head's slice of lanes: which one a part is, and where it begins among so many elements. */
static uint64_t
part_of(const rule *r, uint64_t dim, uint32_t part_idx, uint64_t *b, uint64_t *h)
{
    uint64_t slices = (dim + CPU_STATE_LANES - 1) / CPU_STATE_LANES, head = part_idx / slices;
    *b = head / r->heads;
    *h = r->head_first + head % r->heads;
    return part_idx % slices * CPU_STATE_LANES;
}

static void
run_slices(spw_gpu_queue *q, const rule *r, uint64_t dim, spw_pool_fn fn)
{
    uint64_t slices = (dim + CPU_STATE_LANES - 1) / CPU_STATE_LANES;
    spw__cpu_run(q, (uint32_t)(r->s.B * r->heads * slices), fn, (void *)(uintptr_t)r);
}

/* n of lanes from x on; the others are 0. */
static void
lend(float *lanes, const float *x, uint64_t n)
{
    memset(lanes, 0, CPU_STATE_LANES * sizeof *lanes);
    memcpy(lanes, x, n * sizeof *lanes);
}

/* A slice's state in the cache, to or from lanes. */
static void
move_state(const rule *r, uint64_t b, uint64_t h, uint64_t first, uint64_t n, float *state, bool out)
{
    const spw_delta_shape *s = &r->s;
    float *kept = r->cache->state + ((uint64_t)r->cache->slots[b] * s->Hv + h) * s->Dk * s->Dv + first;
    for (uint64_t i = 0; i < s->Dk; i++)
        memcpy(out ? kept + i * s->Dv : state + i * CPU_STATE_LANES,
               out ? state + i * CPU_STATE_LANES : kept + i * s->Dv, n * sizeof *kept);
}

/* delta of a row's columns, of what the state, not yet decayed, gives for its keys. */
static void
correct(const rule *r, uint64_t row, uint64_t h, uint64_t first, uint64_t n, const turn *t, const float *seen,
        float *delta)
{
    const float *v = values(r, row, h) + first;
    memset(delta, 0, CPU_STATE_LANES * sizeof *delta);
    for (uint64_t j = 0; j < n; j++)
        delta[j] = t->beta * (v[j] - t->decay * seen[j]);
    if (r->delta != NULL)
        memcpy(r->delta + (row * r->s.Hv + h) * r->s.Dv + first, delta, n * sizeof *delta);
}

static void
forward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    const spw_delta_shape *s = &r->s;
    uint64_t b, h, first = part_of(r, s->Dv, part_idx, &b, &h), n = min_u64(CPU_STATE_LANES, s->Dv - first);
    float state[SPW_DELTA_DIM_MAX * CPU_STATE_LANES] = {0};
    float seen[CPU_STATE_LANES] = {0}, delta[CPU_STATE_LANES], out[CPU_STATE_LANES];
    turn turns[2];
    (void)worker_idx;
    take_turn(r, b * s->T, h, &turns[0]);
    if (r->cache != NULL && r->cache->starts[b] > 0) {
        move_state(r, b, h, first, n, state, false);
        r->k->state_forward(state, s->Dk, 1.0f, zeros, zeros, zeros, out, asks(r, &turns[0]), seen);
    }
    for (uint64_t i = 0; i < s->T; i++) {
        const turn *t = &turns[i % 2], *next = &turns[(i + 1) % 2];
        uint64_t row = b * s->T + i;
        if (i + 1 < s->T)
            take_turn(r, row + 1, h, &turns[(i + 1) % 2]);
        correct(r, row, h, first, n, t, seen, delta);
        step_forward(r, state, t, delta, out, i + 1 < s->T ? asks(r, next) : zeros, seen);
        if (s->mamba)
            r->k->axpy(out, r->skip[h], values(r, row, h) + first, n);
        memcpy(r->out + (row * s->Hv + h) * s->Dv + first, out, n * sizeof *out);
    }
    if (r->cache != NULL)
        move_state(r, b, h, first, n, state, true);
}

static void
run_forward(spw_gpu_queue *q, act *out, float *delta, const spw_delta_inputs *in, const spw_delta_cache *cache,
            const spw_delta_shape *shape)
{
    rule r = {.k = spw__cpu_kernels(q),
              .qkv = in->qkv,
              .a = in->a,
              .b = in->b,
              .log_a = in->log_a,
              .dt_bias = in->dt_bias,
              .skip = in->skip,
              .out = out,
              .delta = delta,
              .cache = cache,
              .heads = shape->Hv,
              .s = *shape};
    if (shape->T > 0)
        run_slices(q, &r, shape->Dv, forward_part);
}

void
spw__cpu_delta(spw_gpu_queue *q, act *out, float *delta, const spw_delta_inputs *in, const spw_delta_shape *shape)
{
    run_forward(q, out, delta, in, NULL, shape);
}

void
spw__cpu_delta_cached(spw_gpu_queue *q, act *out, const spw_delta_inputs *in, const spw_delta_cache *cache,
                      const spw_delta_shape *shape)
{
    run_forward(q, out, NULL, in, cache, shape);
}

/* Gradients of delta, of a slice of columns. */
static void
values_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    const spw_delta_shape *s = &r->s;
    uint64_t b, h, first = part_of(r, s->Dv, part_idx, &b, &h), n = min_u64(CPU_STATE_LANES, s->Dv - first);
    float state[SPW_DELTA_DIM_MAX * CPU_STATE_LANES] = {0};
    float dm[CPU_STATE_LANES] = {0}, dout[CPU_STATE_LANES], ddelta[CPU_STATE_LANES];
    turn turns[2] = {{.decay = 0}, {.decay = 0}};
    (void)worker_idx;
    for (uint64_t i = s->T; i-- > 0;) {
        turn *t = &turns[i % 2], *next = &turns[(i + 1) % 2];
        uint64_t row = b * s->T + i, at = (row * s->Hv + h) * s->Dv + first;
        take_turn(r, row, h, t);
        lend(dout, r->dout + at, n);
        step_backward(r, state, next, dm, t, dout, ddelta);
        memcpy(r->ddelta + taken(r, row, h) * s->Dv + first, ddelta, n * sizeof *ddelta);
        for (uint64_t j = 0; j < CPU_STATE_LANES; j++)
            dm[j] = s->mamba ? 0.0f : -t->beta * ddelta[j];
    }
}

/* A row's delta. buffer: of Mamba-2, of which none is kept. */
static const float *
delta_of(const rule *r, uint64_t row, uint64_t h, const turn *t, float *buffer)
{
    const float *v = values(r, row, h);
    if (!r->s.mamba)
        return r->delta + (row * r->s.Hv + h) * r->s.Dv;
    for (uint64_t j = 0; j < r->s.Dv; j++)
        buffer[j] = t->beta * v[j];
    return buffer;
}

/* dm of a row: what the sum over the state's rows has for a gradient. Of Mamba-2 it stays 0. */
static void
read_gradients(const rule *r, uint64_t row, uint64_t h, float beta, float *dm)
{
    const float *ddelta = r->ddelta + taken(r, row, h) * r->s.Dv;
    for (uint64_t j = 0; !r->s.mamba && j < r->s.Dv; j++)
        dm[j] = -beta * ddelta[j];
}

/* The same steps where the state's rows are lanes, from the first on. */
static void
lines_forward(const rule *r, float *state, const turn *t, uint64_t first, uint64_t n, const float *x,
              const float *lanes, const float *y, float *out, const float *z, float *next)
{
    float decays[CPU_STATE_LANES];
    if (!r->s.channels) {
        r->k->state_forward(state, r->s.Dv, t->decay, x, lanes, y, out, z, next);
        return;
    }
    lend(decays, t->decays + first, n);
    r->k->state_forward_by(state, r->s.Dv, NULL, decays, x, lanes, y, out, z, next);
}

/* behind: decays of the row behind this one, as lanes if there are channels, or one. */
static void
lines_backward(const rule *r, float *state, const float *behind, const float *x, const float *lanes, const float *x2,
               const float *lanes2, const float *y, float *out)
{
    if (r->s.channels)
        r->k->state_backward_by(state, r->s.Dv, NULL, behind, x, lanes, x2, lanes2, y, out);
    else
        r->k->state_backward(state, r->s.Dv, behind[0], x, lanes, x2, lanes2, y, out);
}

/* Gradients of queries, and of keys by what they have read, of a slice of the state's rows. */
static void
reading_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    const spw_delta_shape *s = &r->s;
    uint64_t b, h, first = part_of(r, s->Dk, part_idx, &b, &h), n = min_u64(CPU_STATE_LANES, s->Dk - first);
    float state[SPW_DELTA_DIM_MAX * CPU_STATE_LANES] = {0}, dm[SPW_DELTA_DIM_MAX] = {0}, own[SPW_DELTA_DIM_MAX];
    float k[CPU_STATE_LANES], dq[CPU_STATE_LANES], read[CPU_STATE_LANES] = {0};
    turn turns[2];
    (void)worker_idx;
    take_turn(r, b * s->T, h, &turns[0]);
    for (uint64_t i = 0; i < s->T; i++) {
        turn *t = &turns[i % 2], *next = &turns[(i + 1) % 2];
        uint64_t row = b * s->T + i, at = taken(r, row, h) * s->Dk + first, v = (row * s->Hv + h) * s->Dv;
        for (uint64_t j = 0; !s->mamba && j < n; j++)
            r->dk_read[at + j] = (s->channels ? t->decays[first + j] : t->decay) * read[j];
        if (i + 1 < s->T) {
            take_turn(r, row + 1, h, next);
            read_gradients(r, row + 1, h, next->beta, dm);
        }
        lend(k, t->k + first, n);
        lines_forward(r, state, t, first, n, delta_of(r, row, h, t, own), k, r->dout + v, dq, i + 1 < s->T ? dm : zeros,
                      read);
        memcpy(r->dq + at, dq, n * sizeof *dq);
    }
}

/* Gradients of keys by what they have written, of a slice of the state's rows. */
static void
writing_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    const spw_delta_shape *s = &r->s;
    uint64_t b, h, first = part_of(r, s->Dk, part_idx, &b, &h), n = min_u64(CPU_STATE_LANES, s->Dk - first);
    float state[SPW_DELTA_DIM_MAX * CPU_STATE_LANES] = {0}, dm[SPW_DELTA_DIM_MAX] = {0};
    float k[CPU_STATE_LANES] = {0}, q[CPU_STATE_LANES], written[CPU_STATE_LANES], own[SPW_DELTA_DIM_MAX];
    float decays[CPU_STATE_LANES] = {0};
    turn t;
    (void)worker_idx;
    for (uint64_t i = s->T; i-- > 0;) {
        uint64_t row = b * s->T + i, at = taken(r, row, h) * s->Dk + first, v = (row * s->Hv + h) * s->Dv;
        take_turn(r, row, h, &t);
        lend(q, t.q + first, n);
        lines_backward(r, state, decays, dm, k, r->dout + v, q, delta_of(r, row, h, &t, own), written);
        memcpy(r->dk_write + at, written, n * sizeof *written);
        lend(k, t.k + first, n);
        read_gradients(r, row, h, t.beta, dm);
        if (s->channels)
            lend(decays, t.decays + first, n);
        else
            decays[0] = t.decay;
    }
}

/* dx of x / |x| times a factor, of the gradient of that: the part along x has no effect. */
static void
lengthwise(const rule *r, float *dx, const float *dy, const float *y, float scale, float factor)
{
    uint64_t n = r->s.Dk;
    float along = r->k->dot(y, dy, n) / (factor * factor);
    for (uint64_t i = 0; i < n; i++)
        dx[i] = scale * (dy[i] - y[i] * along);
}

static float
length(const rule *r, const float *x)
{
    return sqrtf(r->k->dot(x, x, r->s.Dv));
}

/* The same with channels, whose numbers take the place of the gradients that they are made of. */
static void
channels_of_row(const rule *r, uint64_t row, uint64_t h, const turn *t, float *dv)
{
    const spw_delta_shape *s = &r->s;
    uint64_t head = row * s->Hv + h, number = taken(r, row, h), at = number * s->Dk;
    const float *ddelta = r->ddelta + number * s->Dv, *delta = r->delta + head * s->Dv;
    const float wrote = length(r, delta), asked = length(r, r->dout + head * s->Dv), read = t->beta * length(r, ddelta);
    float *dq = r->dq + at, *dk_write = r->dk_write + at, *dk_read = r->dk_read + at;
    for (uint64_t i = 0; i < s->Dk; i++) {
        dq[i] = t->q[i] * dq[i] + t->k[i] * (dk_read[i] - dk_write[i]);
        dk_write[i] = fabsf(t->k[i]) * wrote;
        dk_read[i] = fabsf(t->q[i]) * asked + fabsf(t->k[i]) * read;
    }
    for (uint64_t j = 0; j < s->Dv; j++)
        dv[j] = t->beta * ddelta[j];
    r->db[head] = (1.0f - t->beta / beta_most(s)) * r->k->dot(ddelta, delta, s->Dv);
}

/* What a head's row has of gamma's gradient, and of beta's; its values' gradient. */
static void
head_of_row(const rule *r, uint64_t row, uint64_t h, const turn *t, float *dv)
{
    const spw_delta_shape *s = &r->s;
    uint64_t head = row * s->Hv + h, number = taken(r, row, h), at = number * s->Dk;
    const float *ddelta = r->ddelta + number * s->Dv, *dout = r->dout + head * s->Dv, *v = values(r, row, h);
    float own[SPW_DELTA_DIM_MAX];
    const float *delta = delta_of(r, row, h, t, own);
    if (s->channels) {
        channels_of_row(r, row, h, t, dv);
        return;
    }
    r->share[number] = r->k->dot(t->q, r->dq + at, s->Dk) - r->k->dot(t->k, r->dk_write + at, s->Dk);
    r->written[number] = length(r, delta);
    r->asked[number] = sqrtf(r->k->dot(t->q, t->q, s->Dk)) * length(r, dout);
    for (uint64_t j = 0; j < s->Dv; j++)
        dv[j] = t->beta * ddelta[j];
    if (!s->mamba) {
        r->share[number] += r->k->dot(t->k, r->dk_read + at, s->Dk);
        r->db[head] = (1.0f - t->beta / beta_most(s)) * r->k->dot(ddelta, delta, s->Dv);
        return;
    }
    r->written[number] *= sqrtf(r->k->dot(t->k, t->k, s->Dk));
    r->dbeta[number] = r->k->dot(ddelta, v, s->Dv);
    r->dskip_of[number] = r->k->dot(dout, v, s->Dv);
    r->k->axpy(dv, r->skip[h], dout, s->Dv);
}

/* A row's own gradients: of its values, of b, and of the queries and keys that its heads share. */
static void
row_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    const spw_delta_shape *s = &r->s;
    uint64_t row = part_idx, group = s->Hv / s->Hk;
    float *dx = r->dqkv + row * width(s), dq[SPW_DELTA_DIM_MAX], dk[SPW_DELTA_DIM_MAX];
    turn t;
    (void)worker_idx;
    for (uint64_t h = r->head_first; h < r->head_first + r->heads; h++) {
        uint64_t at = taken(r, row, h) * s->Dk;
        if (h % group == 0) {
            memset(dq, 0, sizeof dq);
            memset(dk, 0, sizeof dk);
        }
        take_turn(r, row, h, &t);
        r->k->axpy(dq, 1.0f, r->dq + at, s->Dk);
        if (!s->mamba)
            r->k->axpy(dk, 1.0f, r->dk_read + at, s->Dk);
        r->k->axpy(dk, 1.0f, r->dk_write + at, s->Dk);
        head_of_row(r, row, h, &t, dx + values_at(s, h));
        if (h % group < group - 1)
            continue;
        if (s->mamba) {
            memcpy(dx + queries_at(s, h), dq, s->Dk * sizeof *dq);
            memcpy(dx + keys_at(s, h), dk, s->Dk * sizeof *dk);
            continue;
        }
        lengthwise(r, dx + queries_at(s, h), dq, t.q, t.q_scale, 1.0f / sqrtf((float)s->Dk));
        lengthwise(r, dx + keys_at(s, h), dk, t.k, t.k_scale, 1.0f);
    }
}

/* What the gradient of a row's decay cannot exceed by the length of the state, in place of what the row writes to that. */
static void
bound_states(const rule *r, uint64_t h)
{
    const spw_delta_shape *s = &r->s;
    float state = 0;
    for (uint64_t row = 0; row < s->B * s->T; row++) {
        uint64_t at = taken(r, row, h);
        float before = is_first(r, row) ? 0.0f : expf(log_decay(r, row, h)) * state;
        state = before + r->written[at];
        r->written[at] = before;
    }
}

/* x within its bound; fmaxf() and fminf() would lose a NaN of either. */
static float
within(float x, float most)
{
    float cut = fmaxf(-most, fminf(most, x));
    return x == x && most == most ? cut : NAN;
}

/* A head's decays, backwards. */
static void
decay_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    const spw_delta_shape *s = &r->s;
    uint64_t h = r->head_first + part_idx;
    double sum_a = 0, sum_log = 0, sum_skip = 0;
    float carried = 0, gradient = 0;
    (void)worker_idx;
    bound_states(r, h);
    for (uint64_t row = s->B * s->T; row-- > 0;) {
        uint64_t at = row * s->Hv + h, number = taken(r, row, h);
        float log = log_decay(r, row, h);
        gradient += r->asked[number];
        carried = within(carried + r->share[number], gradient * r->written[number]);
        gradient = is_first(r, row) ? 0.0f : gradient * expf(log);
        r->da[at] = carried * -expf(r->log_a[h]) * step_slope(r, row, h);
        if (s->mamba) {
            r->da[at] += r->dbeta[number] * step_slope(r, row, h);
            sum_skip += (double)r->dskip_of[number];
        }
        sum_a += (double)r->da[at];
        sum_log += (double)carried * (double)log;
    }
    if (r->ddt_bias != NULL)
        r->ddt_bias[h] += (float)sum_a;
    if (r->dlog_a != NULL)
        r->dlog_a[h] += (float)sum_log;
    if (r->dskip != NULL)
        r->dskip[h] += (float)sum_skip;
}

/* A row of a channel of a head, backwards: the gradient of ln gamma, of which a's is made. */
typedef struct channel {
    float carried, gradient;
    double sum_a, sum_log;
} channel;

static void
channel_back(const rule *r, uint64_t row, uint64_t h, uint64_t i, float rate, channel *c)
{
    const uint64_t at = taken(r, row, h) * r->s.Dk + i, of = (row * r->s.Hv + h) * r->s.Dk + i;
    const float x = channel_input(r, row, h, i);
    c->gradient += r->dk_read[at];
    c->carried = within(c->carried + r->dq[at], c->gradient * r->dk_write[at]);
    c->gradient *= r->decays[at];
    r->da[of] = c->carried * rate * sigmoid(x);
    c->sum_a += (double)r->da[of];
    c->sum_log += (double)c->carried * (double)(rate * softplus(x));
}

/* The decays of a head's channels, backwards. */
static void
channels_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    const spw_delta_shape *s = &r->s;
    const uint64_t h = r->head_first + part_idx, rows = s->B * s->T;
    const float rate = -expf(r->log_a[h]);
    channel channels[SPW_DELTA_DIM_MAX] = {{0}};
    float states[SPW_DELTA_DIM_MAX] = {0};
    double sum_log = 0;
    (void)worker_idx;
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t i = 0; i < s->Dk; i++) { /* as bound_states() does */
            const uint64_t at = taken(r, row, h) * s->Dk + i;
            const float before = r->decays[at] == 0.0f ? 0.0f : r->decays[at] * states[i];
            states[i] = before + r->dk_write[at];
            r->dk_write[at] = before;
        }
    for (uint64_t row = rows; row-- > 0;)
        for (uint64_t i = 0; i < s->Dk; i++)
            channel_back(r, row, h, i, rate, &channels[i]);
    for (uint64_t i = 0; i < s->Dk; i++) {
        if (r->ddt_bias != NULL)
            r->ddt_bias[h * s->Dk + i] += (float)channels[i].sum_a;
        sum_log += channels[i].sum_log;
    }
    if (r->dlog_a != NULL)
        r->dlog_a[h] += (float)sum_log;
}

/* Decays of all rows, once for what follows. */
static void
decays_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rule *r = ctx;
    (void)worker_idx;
    for (uint64_t h = r->head_first; h < r->head_first + r->heads; h++)
        channel_decays(r, part_idx, h, r->decays + taken(r, part_idx, h) * r->s.Dk);
}

void
spw__cpu_delta_backward(spw_gpu_queue *q, act *dqkv, act *da, act *db, float *dlog_a, float *ddt_bias, float *dskip,
                        const act *dout, const float *delta, float *scratch, const spw_delta_inputs *in,
                        const spw_delta_shape *shape)
{
    const uint64_t group = shape->Hv / shape->Hk, heads = shape->B * shape->T * shape->heads_each * group;
    float *numbers = scratch + heads * (shape->Dv + (shape->mamba ? 2 : 3) * shape->Dk);
    rule r = {.k = spw__cpu_kernels(q),
              .qkv = in->qkv,
              .a = in->a,
              .b = in->b,
              .log_a = in->log_a,
              .dt_bias = in->dt_bias,
              .skip = in->skip,
              .dout = dout,
              .delta = (float *)(uintptr_t)delta,
              .ddelta = scratch,
              .dq = scratch + heads * shape->Dv,
              .dk_write = scratch + heads * (shape->Dv + shape->Dk),
              .dk_read = scratch + heads * (shape->Dv + 2 * shape->Dk), /* not of Mamba-2, nor what follows of others */
              .share = numbers,
              .written = numbers + heads,
              .asked = numbers + 2 * heads,
              .dbeta = numbers + 3 * heads,
              .dskip_of = numbers + 4 * heads,
              .decays = shape->channels ? numbers : NULL,
              .dqkv = dqkv,
              .da = da,
              .db = db,
              .dlog_a = dlog_a,
              .ddt_bias = ddt_bias,
              .dskip = dskip,
              .s = *shape};
    for (uint64_t head = 0; head < shape->Hk; head += shape->heads_each) {
        r.head_first = head * group;
        r.heads = min_u64(shape->heads_each, shape->Hk - head) * group;
        if (shape->channels)
            spw__cpu_run(q, (uint32_t)(shape->B * shape->T), decays_part, &r);
        run_slices(q, &r, shape->Dv, values_part);
        run_slices(q, &r, shape->Dk, reading_part);
        run_slices(q, &r, shape->Dk, writing_part);
        spw__cpu_run(q, (uint32_t)(shape->B * shape->T), row_part, &r);
        spw__cpu_run(q, (uint32_t)r.heads, shape->channels ? channels_part : decay_part, &r);
    }
}
