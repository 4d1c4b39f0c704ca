/*
 * Attention of spw_gpu.h on cuda: shapes become the kernels' arguments, the compute type chooses between tensor cores and
 * fp32. Scores never leave a block.
 */
#include "attention_f32.cuh"
#include "attention_backward.cuh"
#include "attention_internal.h"
#include "chunks.cuh"
#include "rows.cuh"

/* What forward and backward share. */
template <class E>
static attention_args<E>
args_of(const spw_attention_shape *s, const void *q, const void *key, const void *value)
{
    attention_args<E> args;
    memset(&args, 0, sizeof args);
    args.q = (const E *)q;
    args.key = (const E *)key;
    args.value = (const E *)value;
    args.T = s->T;
    args.q_stride = s->q_stride;
    args.kv_stride = s->kv_stride;
    args.window = s->window;
    args.begins = s->begins;
    args.ends = s->ends;
    args.sinks = (const E *)s->sinks;
    args.chosen = s->chosen;
    args.words = s->chosen_words;
    args.front = s->front;
    args.front_each = s->front_each;
    args.front_rows = s->front_rows;
    args.Hq = (int)s->Hq;
    args.Hk = (int)s->Hk;
    args.D = (int)s->D;
    args.Dv = (int)s->Dv;
    args.v_stride = s->v_stride;
    args.q_head = args.k_head = s->qk_head;
    args.v_head = s->v_head;
    args.group = (int)(s->Hq / s->Hk);
    args.scale = s->scale;
    args.cap = s->cap;
    args.wide = s->D % 8 == 0 && s->q_stride % 8 == 0 && s->kv_stride % 8 == 0 && s->Dv % 8 == 0 &&
                s->v_stride % 8 == 0 && s->qk_head % 8 == 0 && s->v_head % 8 == 0 && spw__cuda_aligned(q, key, value);
    return args;
}

static bool
head_fits(cuda_queue *q, const spw_attention_shape *s)
{
    SPW_ASSERT(s->D <= HEAD_MAX);
    return s->D <= HEAD_MAX ||
           spw__cuda_ok(q->gpu, cudaErrorInvalidValue, "attention with heads of more than 512 elements");
}

template <bool CAP, int TILE>
static void
forward_f32(cuda_queue *q, const attention_args<float> &args, uint64_t B)
{
    LAUNCH(q, dim3(spw__cuda_blocks(args.T, TILE), (unsigned)args.Hq, (unsigned)B), F32_THREADS,
           f32_shared_bytes<TILE>(3, args.D), (attention_f32_forward_kernel<CAP, TILE>), args);
}

static void
launch_forward(cuda_queue *q, const attention_args<float> &args, uint64_t B)
{
    if (args.cap > 0 && args.D <= 256)
        forward_f32<true, 16>(q, args, B);
    else if (args.cap > 0)
        forward_f32<true, 8>(q, args, B);
    else if (args.D <= 256)
        forward_f32<false, 16>(q, args, B);
    else
        forward_f32<false, 8>(q, args, B);
}

/*
 * Whether Hopper's products are faster: not where most of a tile would be zeros, nor for heads that its kernels' sums do not have the
 * registers for (attention_wide.cuh).
 */
template <class E>
static bool
by_hopper(cuda_queue *q, const attention_args<E> &args)
{
    bool mostly_zeros = args.D <= 32 || (args.D > 128 && args.D <= 192 && args.Dv <= 128);
    return q->gpu->hopper && args.wide && args.cap <= 0 && args.chosen == NULL && args.front == 0 && args.D <= 256 &&
           !mostly_zeros;
}

template <class E>
static void
launch_forward(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    if (by_hopper(q, args))
        spw__cuda_attention_forward_hopper(q, args, B);
    else if (args.D > 256 || args.front > 0)
        spw__cuda_attention_forward_wide(q, args, B);
    else
        spw__cuda_attention_forward(q, args, B);
}

template <class E>
static void
forward(cuda_queue *q, void *out, float *lse, const void *query, const void *key, const void *value,
        const spw_attention_cache *cache, const spw_attention_shape *s)
{
    attention_args<E> args = args_of<E>(s, query, key, value);
    args.out = (E *)out;
    args.lse = lse;
    args.wide = args.wide && spw__cuda_aligned(out);
    if (cache != NULL) {
        args.k_head = s->D;
        args.capacity = s->front + cache->capacity;
        args.slots = cache->slots;
        args.starts = cache->starts;
    }
    launch_forward(q, args, s->B);
}

void
spw__cuda_attention(spw_gpu_queue *queue, act *out, float *lse, const act *query, const act *key, const act *value,
                    const spw_attention_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B > 0 && s->T > 0 && head_fits(q, s))
        BY_TYPE(q, forward<T>(q, out, lse, query, key, value, NULL, s));
}

/* Heads of B T rows to their places in the cache. */
template <class E>
static void
put(cuda_queue *q, E *cache, const E *rows, const spw_attention_cache *where, const spw_attention_shape *s,
    uint64_t stride, uint64_t head, uint64_t width)
{
    LAUNCH(q, (unsigned)(s->B * s->T), 128, 0, (put_rows_kernel<E>), cache + s->front * s->Hk * width, rows,
           where->slots, where->starts, s->front + where->capacity, s->T, stride, s->Hk, head, width);
}

void
spw__cuda_attention_cached(spw_gpu_queue *queue, act *out, const act *query, const act *new_key, const act *new_value,
                           const spw_attention_cache *cache, const spw_attention_shape *shape)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    spw_attention_shape s = *shape;
    if (s.B == 0 || s.T == 0 || !head_fits(q, &s))
        return;
    BY_TYPE(q, put<T>(q, (T *)cache->key, (const T *)new_key, cache, &s, s.kv_stride, s.qk_head, s.D));
    if (cache->value != cache->key)
        BY_TYPE(q, put<T>(q, (T *)cache->value, (const T *)new_value, cache, &s, s.v_stride, s.v_head, s.Dv));
    s.kv_stride = s.Hk * s.D;
    s.v_stride = s.Hk * s.Dv;
    s.v_head = s.Dv;
    BY_TYPE(q, forward<T>(q, out, NULL, query, cache->key, cache->value, cache, &s));
}

void
spw__cuda_chunks(spw_gpu_queue *queue, int32_t *to_begins, int32_t *to_ends, const int32_t *begins, const int32_t *ends,
                 const int32_t *starts, uint64_t B, uint64_t T, uint64_t chunk)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (B > 0 && T > 0)
        LAUNCH(q, spw__cuda_blocks(B * T, 256), 256, 0, (chunks_kernel), to_begins, to_ends, begins, ends, starts,
               B * T, T, chunk);
}

template <class E>
static attention_args<E>
backward_args(cuda_queue *q, const spw_attention_shape *s, act *dq, act *dk, act *dv, const act *dout, const act *out,
              const float *lse, const act *query, const act *key, const act *value, float *delta)
{
    attention_args<E> args = args_of<E>(s, query, key, value);
    uint64_t pairs = s->B * s->T * s->Hq;
    unsigned lanes = 1;
    while (lanes * 8 < s->Dv && lanes < 32)
        lanes *= 2;
    args.dout = (const E *)dout;
    args.dq = (E *)dq;
    args.dk = (E *)dk;
    args.dv = (E *)dv;
    args.lse = (float *)lse; /* read only */
    args.delta = delta;
    args.wide = args.wide && spw__cuda_aligned(dout, dq, dk, dv);
    LAUNCH(q, spw__cuda_blocks(pairs * lanes, 128), 128, 0, (attention_delta_kernel<E>), delta, (const E *)dout,
           (const E *)out, pairs, s->T, s->Hq, s->Dv, lanes, s->Dv % 8 == 0 && spw__cuda_aligned(dout, out));
    return args;
}

template <bool CAP, int TILE>
static void
backward_f32(cuda_queue *q, const attention_args<float> &args, const spw_attention_shape *s)
{
    LAUNCH(q, dim3(spw__cuda_blocks(s->T, TILE), (unsigned)s->Hq, (unsigned)s->B), F32_THREADS,
           f32_shared_bytes<TILE>(4, args.D), (attention_f32_dq_kernel<CAP, TILE>), args);
    LAUNCH(q, dim3(spw__cuda_blocks(s->front + s->T, TILE), (unsigned)s->Hk, (unsigned)s->B), F32_THREADS,
           f32_shared_bytes<TILE>(4, args.D), (attention_f32_dkv_kernel<CAP, TILE>), args);
}

static void
launch_backward(cuda_queue *q, const attention_args<float> &args, const spw_attention_shape *s)
{
    if (args.cap > 0 && args.D <= 256)
        backward_f32<true, 16>(q, args, s);
    else if (args.cap > 0)
        backward_f32<true, 8>(q, args, s);
    else if (args.D <= 256)
        backward_f32<false, 16>(q, args, s);
    else
        backward_f32<false, 8>(q, args, s);
}

template <class E>
static void
launch_backward(cuda_queue *q, const attention_args<E> &args, const spw_attention_shape *s)
{
    if (by_hopper(q, args)) {
        spw__cuda_attention_dq_hopper(q, args, s->B);
        spw__cuda_attention_dkv_hopper(q, args, s->B, s->Hk);
    } else if (args.D > 256 || args.front > 0) {
        spw__cuda_attention_backward_wide(q, args, s->B);
    } else {
        spw__cuda_attention_dq(q, args, s->B);
        spw__cuda_attention_dkv(q, args, s->B, s->Hk);
    }
}

void
spw__cuda_attention_backward(spw_gpu_queue *queue, act *dquery, act *dkey, act *dvalue, float *dsinks, const act *dout,
                             const act *out, const float *lse, const act *query, const act *key, const act *value,
                             const spw_attention_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    float *delta;
    if (s->B == 0 || s->T == 0 || !head_fits(q, s) ||
        (delta = (float *)spw__cuda_scratch(q, s->B * s->Hq * s->T * sizeof *delta)) == NULL)
        return;
    BY_TYPE(q, launch_backward(
                   q, backward_args<T>(q, s, dquery, dkey, dvalue, dout, out, lse, query, key, value, delta), s));
    if (dsinks != NULL)
        BY_TYPE(q, LAUNCH(q, (unsigned)s->Hq, 512, 0, (attention_sinks_kernel<T>), dsinks, (const T *)s->sinks, lse,
                          delta, s->B, s->T));
}
