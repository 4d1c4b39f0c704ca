/*
 * Causal attention in tiles with an online softmax: scores exist one tile at a time, on the stack of a worker. Forward
 * cuts over (sequence, query head, query tile); backward over (sequence, key/value head), where the group's query heads
 * add to dk and dv in a fixed order. Windows and documents skip tiles and shorten rows at their left end. With a cache the forward pass is
 * the same loop over another place's keys, whose tiles begin where those of a whole sequence do. Source: Dao et al. 2022,
 * FlashAttention, Algorithms 1 and 4.
 */
#include "cpu_internal.h"
#include <math.h>

enum { TILE_Q = 64, TILE_K = 128 };

typedef struct attention {
    const cpu_kernels *k;
    float *out, *lse, *dq, *dk, *dv, *dsinks;
    const float *q, *key, *value, *dout, *fwd_out, *fwd_lse;
    spw_attention_shape s;
    uint64_t k_head;                  /* from a head of keys to the next one */
    const spw_attention_cache *cache; /* forward: where keys and values are; NULL: beside the queries */
} attention;

/* The first key that the row at position t of sequence b reads. */
static uint64_t
first_key(const attention *a, uint64_t b, uint64_t t)
{
    const spw_attention_shape *s = &a->s;
    uint64_t row = a->cache != NULL ? t - (uint64_t)a->cache->starts[b] : t;
    uint64_t begin = s->begins != NULL ? (uint64_t)s->begins[b * s->T + row] : 0;
    uint64_t from = s->window > 0 && t + 1 > s->window ? t + 1 - s->window : 0;
    return from > begin ? from : begin;
}

/* The keys [lo, hi) of the tile at k0 that row t reads, relative to k0; none: lo == hi == 0. */
static uint64_t
seen_keys(const attention *a, uint64_t b, uint64_t t, uint64_t k0, uint64_t nk, uint64_t *lo)
{
    uint64_t hi = t < k0 ? 0 : min_u64(nk, t - k0 + 1), first = first_key(a, b, t);
    *lo = first > k0 ? min_u64(hi, first - k0) : 0;
    if (*lo == hi)
        hi = *lo = 0;
    return hi;
}

/* Where the keys in front of a sequence's own end that row t reads, and the first one. */
static uint64_t
front_of(const spw_attention_shape *s, uint64_t b, uint64_t t, uint64_t *first)
{
    uint64_t begin = s->front > 0 && s->begins != NULL ? (uint64_t)s->begins[b * s->T + t] : 0;
    *first = s->front > 0 ? begin / s->front_each : 0;
    return s->front > 0 ? min_u64(s->front, *first + (t + 1 - begin) / s->front_each) : 0;
}

/* Some keys that lie together: of the sequence, or of those in front of it, from the k0-th of them on. */
typedef struct span {
    bool front;
    uint64_t k0, nk;
} span;

/* The same of a span. */
static uint64_t
seen_of(const attention *a, uint64_t b, uint64_t t, const span *k, uint64_t *lo)
{
    uint64_t first, end = front_of(&a->s, b, t, &first);
    if (!k->front)
        return seen_keys(a, b, t, k->k0, k->nk, lo);
    end = end > k->k0 ? min_u64(k->nk, end - k->k0) : 0;
    *lo = first > k->k0 ? min_u64(end, first - k->k0) : 0;
    if (*lo == end)
        *lo = end = 0;
    return end;
}

/* Where the keys of sequence b lie, by rows, and those of a span. */
static uint64_t
keys_at(const attention *a, uint64_t b)
{
    const spw_attention_shape *s = &a->s;
    return a->cache != NULL ? (uint64_t)a->cache->slots[b] * (s->front + a->cache->capacity) : b * (s->front + s->T);
}

static uint64_t
span_at(const attention *a, uint64_t b, const span *k)
{
    return keys_at(a, b) + k->k0 + (k->front ? 0 : a->s.front);
}

/* The words of the row at position t of sequence b that begin with a span's first key, a multiple of 32; NULL: it reads what it may. */
static const uint32_t *
chosen_of(const attention *a, uint64_t b, uint64_t t, const span *k)
{
    const spw_attention_shape *s = &a->s;
    uint64_t row = a->cache != NULL ? t - (uint64_t)a->cache->starts[b] : t;
    if (s->chosen == NULL || k->front != (s->front > 0))
        return NULL;
    return s->chosen + (b * s->T + row) * s->chosen_words + k->k0 / 32;
}

static bool
is_chosen(const uint32_t *words, uint64_t i)
{
    return (words[i / 32] >> i % 32 & 1) != 0;
}

/* Puts those among x[lo] to x[hi - 1] that are chosen into few; how many. */
static uint64_t
take_chosen(float *few, const float *x, const uint32_t *words, uint64_t lo, uint64_t hi)
{
    uint64_t n = 0;
    for (uint64_t i = lo; i < hi; i++)
        if (is_chosen(words, i))
            few[n++] = x[i];
    return n;
}

/* And back, with zeros in place of the others. */
static void
put_chosen(float *x, const float *few, const uint32_t *words, uint64_t lo, uint64_t hi)
{
    for (uint64_t i = lo; i < hi; i++)
        x[i] = is_chosen(words, i) ? *few++ : 0.0f;
}

/*
 * Scores x (n) of one row become weights over its greatest so far, *max, and are added to *sum; what was summed before is to be multiplied by what
 * is returned. started: there is something before.
 */
static float
soften(const cpu_kernels *k, float *x, uint64_t n, bool started, float *max, float *sum)
{
    float m = k->max(x, n), shrink = 1.0f;
    if (!started) {
        *max = m;
        *sum = k->exp_sum(x, x, m, n);
        return shrink;
    }
    if (!(m <= *max)) { /* also when m is NaN, so that it spreads */
        k->exp_sum(&shrink, max, m, 1);
        *sum *= shrink;
        *max = m;
    }
    *sum += k->exp_sum(x, x, *max, n);
    return shrink;
}

/* log(exp(lse) + exp(sink)), where the head has one. */
static float
with_sink(const spw_attention_shape *s, uint64_t h, float lse)
{
    float sink = s->sinks != NULL ? ((const float *)s->sinks)[h] : 0.0f;
    return s->sinks == NULL ? lse : fmaxf(lse, sink) + log1pf(expf(-fabsf(lse - sink)));
}

/* A tile of queries of one head, and what its rows have summed so far. */
typedef struct query_tile {
    uint64_t b, h, p0, nq; /* p0: the first one's position */
    const float *q;
    float *out, max[TILE_Q], sum[TILE_Q];
    bool started[TILE_Q], any; /* any: out has been written */
} query_tile;

static void
forward_tile(const attention *a, query_tile *t, const span *k)
{
    const spw_attention_shape *s = &a->s;
    uint64_t out_stride = s->Hq * s->Dv, hk = t->h / (s->Hq / s->Hk), nk = k->nk, at = span_at(a, t->b, k);
    const float *key = a->key + at * s->kv_stride + hk * a->k_head;
    const float *value = a->value + at * s->v_stride + hk * s->v_head;
    float scores[TILE_Q * TILE_K];
    spw__cpu_gemm_here(false, true, t->nq, nk, s->D, s->scale, t->q, s->q_stride, key, s->kv_stride, 0.0f, scores,
                       TILE_K);
    for (uint64_t i = 0; i < t->nq; i++) {
        float *row = scores + i * TILE_K, few[TILE_K], shrink;
        uint64_t lo, hi = seen_of(a, t->b, t->p0 + i, k, &lo), n = hi - lo;
        const uint32_t *words = chosen_of(a, t->b, t->p0 + i, k);
        memset(row, 0, lo * sizeof(float));
        memset(row + hi, 0, (nk - hi) * sizeof(float));
        if (s->cap > 0 && hi > 0)
            a->k->soft_cap(row + lo, s->cap, n);
        if (words != NULL && (n = take_chosen(few, row, words, lo, hi)) == 0)
            memset(row, 0, hi * sizeof(float));
        if (n == 0)
            continue;
        shrink = soften(a->k, words != NULL ? few : row + lo, n, t->started[i], &t->max[i], &t->sum[i]);
        if (shrink != 1.0f)
            a->k->scale(t->out + i * out_stride, shrink, s->Dv);
        if (words != NULL)
            put_chosen(row, few, words, lo, hi);
        t->started[i] = true;
    }
    spw__cpu_gemm_here(false, false, t->nq, s->Dv, nk, 1.0f, scores, TILE_K, value, s->v_stride, t->any ? 1.0f : 0.0f,
                       t->out, out_stride);
    t->any = true;
}

static void
forward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const attention *a = ctx;
    const spw_attention_shape *s = &a->s;
    uint64_t tiles = (s->T + TILE_Q - 1) / TILE_Q, out_stride = s->Hq * s->Dv;
    uint64_t q0 = part_idx % tiles * TILE_Q, h = part_idx / tiles % s->Hq, b = part_idx / tiles / s->Hq;
    uint64_t before = a->cache != NULL ? (uint64_t)a->cache->starts[b] : 0; /* positions are counted from there */
    query_tile t = {.b = b, .h = h, .p0 = before + q0, .nq = min_u64(TILE_Q, s->T - q0)};
    uint64_t first, unused, end = t.p0 + t.nq, front = front_of(s, b, end - 1, &unused);
    (void)worker_idx;
    (void)front_of(s, b, t.p0, &first);
    t.q = a->q + (b * s->T + q0) * s->q_stride + h * s->qk_head;
    t.out = a->out + (b * s->T + q0) * out_stride + h * s->Dv;
    for (uint64_t k0 = first / TILE_K * TILE_K; k0 < front; k0 += TILE_K)
        forward_tile(a, &t, &(span){true, k0, min_u64(TILE_K, front - k0)});
    for (uint64_t k0 = first_key(a, b, t.p0) / TILE_K * TILE_K; k0 < end; k0 += TILE_K)
        forward_tile(a, &t, &(span){false, k0, min_u64(TILE_K, end - k0)}); /* later keys are seen by no row here */
    for (uint64_t i = 0; i < t.nq; i++) {
        float lse = t.max[i] + logf(t.sum[i]), all = with_sink(s, h, lse);
        a->k->scale(t.out + i * out_stride, s->sinks != NULL ? expf(lse - all) / t.sum[i] : 1.0f / t.sum[i], s->Dv);
        if (a->lse != NULL)
            a->lse[(b * s->Hq + h) * s->T + q0 + i] = all;
    }
}

void
spw__cpu_attention(spw_gpu_queue *queue, act *out, float *lse, const act *query, const act *key, const act *value,
                   const spw_attention_shape *shape)
{
    attention a = {.k = spw__cpu_kernels(queue),
                   .out = out,
                   .lse = lse,
                   .q = query,
                   .key = key,
                   .value = value,
                   .s = *shape,
                   .k_head = shape->qk_head};
    uint64_t tiles = (shape->T + TILE_Q - 1) / TILE_Q;
    spw__cpu_run(queue, (uint32_t)(shape->B * shape->Hq * tiles), forward_part, &a);
}

typedef struct put {
    float *cache;
    const float *rows;
    const spw_attention_cache *where;
    uint64_t T, stride, heads, head, width; /* head: from one to the next in rows; width: of one */
    uint64_t front;
} put;

static void
put_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const put *p = ctx;
    uint64_t at = (uint64_t)p->where->slots[part_idx] * (p->front + p->where->capacity) + p->front +
                  (uint64_t)p->where->starts[part_idx];
    (void)worker_idx;
    for (uint64_t t = 0; t < p->T; t++)
        for (uint64_t h = 0; h < p->heads; h++)
            memcpy(p->cache + ((at + t) * p->heads + h) * p->width,
                   p->rows + (part_idx * p->T + t) * p->stride + h * p->head, p->width * sizeof(float));
}

void
spw__cpu_attention_cached(spw_gpu_queue *queue, act *out, const act *query, const act *new_key, const act *new_value,
                          const spw_attention_cache *cache, const spw_attention_shape *shape)
{
    const spw_attention_shape *s = shape;
    uint64_t tiles = (s->T + TILE_Q - 1) / TILE_Q;
    put key = {cache->key, new_key, cache, s->T, s->kv_stride, s->Hk, s->qk_head, s->D, s->front};
    put value = {cache->value, new_value, cache, s->T, s->v_stride, s->Hk, s->v_head, s->Dv, s->front};
    attention a = {.k = spw__cpu_kernels(queue),
                   .out = out,
                   .q = query,
                   .key = cache->key,
                   .value = cache->value,
                   .s = *s,
                   .k_head = s->D,
                   .cache = cache};
    for (uint64_t b = 0; b < s->B; b++)
        SPW_ASSERT((uint64_t)cache->starts[b] + s->T <= cache->capacity);
    spw__cpu_run(queue, (uint32_t)s->B, put_part, &key);
    if (cache->value != cache->key)
        spw__cpu_run(queue, (uint32_t)s->B, put_part, &value);
    a.s.kv_stride = s->Hk * s->D;
    a.s.v_stride = s->Hk * s->Dv;
    a.s.v_head = s->Dv;
    spw__cpu_run(queue, (uint32_t)(s->B * s->Hq * tiles), forward_part, &a);
}

/* One query tile against one key tile. */
static void
backward_tile(const attention *a, uint64_t b, uint64_t h, uint64_t q0, const span *k)
{
    const spw_attention_shape *s = &a->s;
    uint64_t nq = min_u64(TILE_Q, s->T - q0), hk = h / (s->Hq / s->Hk), out_stride = s->Hq * s->Dv, nk = k->nk;
    uint64_t q_at = (b * s->T + q0) * s->q_stride + h * s->qk_head, row = span_at(a, b, k);
    uint64_t kv_at = row * s->kv_stride + hk * s->qk_head, v_at = row * s->v_stride + hk * s->v_head;
    uint64_t out_at = (b * s->T + q0) * out_stride + h * s->Dv;
    const float *lse = a->fwd_lse + (b * s->Hq + h) * s->T + q0;
    float p[TILE_Q * TILE_K], ds[TILE_Q * TILE_K];
    spw__cpu_gemm_here(false, true, nq, nk, s->D, s->scale, a->q + q_at, s->q_stride, a->key + kv_at, s->kv_stride,
                       0.0f, p, TILE_K);
    spw__cpu_gemm_here(false, true, nq, nk, s->Dv, 1.0f, a->dout + out_at, out_stride, a->value + v_at, s->v_stride,
                       0.0f, ds, TILE_K);
    for (uint64_t i = 0; i < nq; i++) {
        float *pr = p + i * TILE_K, *dr = ds + i * TILE_K;
        uint64_t lo, hi = seen_of(a, b, q0 + i, k, &lo);
        const uint32_t *words = chosen_of(a, b, q0 + i, k);
        float d = a->k->dot(a->dout + out_at + i * out_stride, a->fwd_out + out_at + i * out_stride, s->Dv);
        if (s->cap > 0) {
            a->k->soft_cap(pr + lo, s->cap, hi - lo);
            a->k->soft_cap_backward(dr + lo, pr + lo, d, s->cap, hi - lo);
            d = 0;
        }
        a->k->softmax_grad_row(pr + lo, dr + lo, pr + lo, dr + lo, lse[i], d, s->scale, hi - lo);
        memset(pr, 0, lo * sizeof(float));
        memset(dr, 0, lo * sizeof(float));
        memset(pr + hi, 0, (nk - hi) * sizeof(float));
        memset(dr + hi, 0, (nk - hi) * sizeof(float));
        for (uint64_t j = lo; words != NULL && j < hi; j++)
            if (!is_chosen(words, j))
                pr[j] = dr[j] = 0.0f;
    }
    spw__cpu_gemm_here(true, false, nk, s->Dv, nq, 1.0f, p, TILE_K, a->dout + out_at, out_stride, 1.0f, a->dv + v_at,
                       s->v_stride);
    spw__cpu_gemm_here(true, false, nk, s->D, nq, 1.0f, ds, TILE_K, a->q + q_at, s->q_stride, 1.0f, a->dk + kv_at,
                       s->kv_stride);
    spw__cpu_gemm_here(false, false, nq, s->D, nk, 1.0f, ds, TILE_K, a->key + kv_at, s->kv_stride, 1.0f, a->dq + q_at,
                       s->q_stride);
}

static void
backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const attention *a = ctx;
    const spw_attention_shape *s = &a->s;
    uint64_t hk = part_idx % s->Hk, b = part_idx / s->Hk, group = s->Hq / s->Hk;
    (void)worker_idx;
    for (uint64_t row = keys_at(a, b); row < keys_at(a, b + 1); row++) {
        memset(a->dk + row * s->kv_stride + hk * s->qk_head, 0, s->D * sizeof(float));
        memset(a->dv + row * s->v_stride + hk * s->v_head, 0, s->Dv * sizeof(float));
    }
    for (uint64_t t = 0; t < s->T; t++)
        for (uint64_t h = hk * group; h < (hk + 1) * group; h++)
            memset(a->dq + (b * s->T + t) * s->q_stride + h * s->qk_head, 0, s->D * sizeof(float));
    for (uint64_t k0 = 0; k0 < s->front; k0 += TILE_K) {
        const span k = {true, k0, min_u64(TILE_K, s->front - k0)};
        uint64_t last = min_u64((k0 + k.nk + 1) * s->front_each - 1, s->T) - 1; /* that the last key can stand for */
        uint64_t end = s->ends != NULL ? (uint64_t)s->ends[b * s->T + last] : s->T;
        for (uint64_t h = 0; h < s->Hq; h++)
            for (uint64_t q0 = ((k0 + 1) * s->front_each - 1) / TILE_Q * TILE_Q; q0 < end; q0 += TILE_Q)
                backward_tile(a, b, h, q0, &k);
    }
    for (uint64_t k0 = 0; k0 < s->T; k0 += TILE_K) {
        uint64_t nk = min_u64(TILE_K, s->T - k0);
        uint64_t end = s->window > 0 ? min_u64(s->T, k0 + nk - 1 + s->window) : s->T; /* of the rows that read these */
        if (s->ends != NULL)
            end = min_u64(end, (uint64_t)s->ends[b * s->T + k0 + nk - 1]);
        for (uint64_t h = hk * group; h < (hk + 1) * group; h++)
            for (uint64_t q0 = k0 / TILE_Q * TILE_Q; q0 < end; q0 += TILE_Q)
                backward_tile(a, b, h, q0, &(span){false, k0, nk});
    }
}

/* A head's sink: rows in order. */
static void
sink_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const attention *a = ctx;
    const spw_attention_shape *s = &a->s;
    uint64_t h = part_idx, stride = s->Hq * s->Dv;
    const float *lse = a->fwd_lse + h * s->T;
    float sink = ((const float *)s->sinks)[h], sum = 0.0f;
    (void)worker_idx;
    for (uint64_t row = 0; row < s->B * s->T; row++) {
        float d = a->k->dot(a->dout + row * stride + h * s->Dv, a->fwd_out + row * stride + h * s->Dv, s->Dv);
        sum += expf(sink - lse[row / s->T * s->Hq * s->T + row % s->T]) * d;
    }
    a->dsinks[h] -= sum;
}

void
spw__cpu_attention_backward(spw_gpu_queue *queue, act *dquery, act *dkey, act *dvalue, float *dsinks, const act *dout,
                            const act *out, const float *lse, const act *query, const act *key, const act *value,
                            const spw_attention_shape *shape)
{
    attention a = {.k = spw__cpu_kernels(queue),
                   .dq = dquery,
                   .dk = dkey,
                   .dv = dvalue,
                   .dsinks = dsinks,
                   .q = query,
                   .key = key,
                   .value = value,
                   .dout = dout,
                   .fwd_out = out,
                   .fwd_lse = lse,
                   .s = *shape};
    spw__cpu_run(queue, (uint32_t)(shape->B * shape->Hk), backward_part, &a);
    if (dsinks != NULL)
        spw__cpu_run(queue, (uint32_t)shape->Hq, sink_part, &a);
}

typedef struct chunks {
    int32_t *to_begins, *to_ends;
    const int32_t *begins, *ends, *starts;
    uint64_t T, chunk;
} chunks;

static void
chunks_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const chunks *c = ctx;
    uint64_t before = c->starts != NULL ? (uint64_t)c->starts[part_idx] : 0;
    (void)worker_idx;
    for (uint64_t t = 0, row = part_idx * c->T; t < c->T; t++, row++) {
        uint64_t document = c->begins != NULL ? (uint64_t)c->begins[row] : 0;
        uint64_t end = c->ends != NULL ? (uint64_t)c->ends[row] : c->T;
        uint64_t begin = document + (before + t - document) / c->chunk * c->chunk;
        c->to_begins[row] = (int32_t)begin;
        if (c->to_ends != NULL)
            c->to_ends[row] = (int32_t)min_u64(end, begin + c->chunk);
    }
}

void
spw__cpu_chunks(spw_gpu_queue *queue, int32_t *to_begins, int32_t *to_ends, const int32_t *begins, const int32_t *ends,
                const int32_t *starts, uint64_t B, uint64_t T, uint64_t chunk)
{
    spw__cpu_run(queue, (uint32_t)B, chunks_part, &(chunks){to_begins, to_ends, begins, ends, starts, T, chunk});
}
