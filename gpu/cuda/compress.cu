/* Launches compress.cuh; the bias' gradient is a sum over what a sequence's windows have, which lie as rows where it is one document. */
#include "compress.cuh"
#include "cuda_internal.h"

template <class E>
static compress_args<E>
args_of(const spw_compress_shape *s, const act *kv, const act *gate, const act *bias)
{
    compress_args<E> args;
    memset(&args, 0, sizeof args);
    args.kv = (const E *)kv;
    args.gate = (const E *)gate;
    args.bias = (const E *)bias;
    args.T = s->T;
    args.D = s->D;
    args.windows = s->T / s->rate;
    args.rate = (unsigned)s->rate;
    args.parts = s->overlaps ? 2 : 1;
    args.begins = s->begins;
    args.firsts = s->firsts;
    return args;
}

template <class E>
static void
forward(cuda_queue *q, act *y, const act *kv, const act *gate, const act *bias, const spw_compress_shape *s)
{
    compress_args<E> args = args_of<E>(s, kv, gate, bias);
    args.y = (E *)y;
    LAUNCH(q, dim3(spw__cuda_blocks(s->D, COMPRESS_THREADS), (unsigned)args.windows, (unsigned)s->B), COMPRESS_THREADS,
           0, (compress_kernel<E>), args);
}

void
spw__cuda_compress(spw_gpu_queue *queue, act *y, const act *kv, const act *gate, const act *bias,
                   const spw_compress_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * (s->T / s->rate) * s->D > 0)
        BY_TYPE(q, forward<T>(q, y, kv, gate, bias, s));
}

template <class E>
static void
backward(cuda_queue *q, act *dkv, act *dgate, const act *dy, const act *kv, const act *gate, const act *bias,
         const spw_compress_shape *s)
{
    compress_args<E> args = args_of<E>(s, kv, gate, bias);
    args.dy = (const E *)dy;
    args.dkv = (E *)dkv;
    args.dgate = (E *)dgate;
    LAUNCH(q, dim3(spw__cuda_blocks(s->D, COMPRESS_THREADS), (unsigned)args.windows + 1, (unsigned)s->B),
           COMPRESS_THREADS, 0, (compress_backward_kernel<E>), args);
}

template <class E>
static void
sum_bias(cuda_queue *q, float *dbias, act *dgate, const spw_compress_shape *s)
{
    compress_args<E> args = args_of<E>(s, NULL, NULL, NULL);
    args.dgate = (E *)dgate;
    LAUNCH(q, dim3(spw__cuda_blocks(args.parts * s->D, COMPRESS_THREADS), args.rate), COMPRESS_THREADS, 0,
           (compress_bias_kernel<E>), dbias, args, s->B);
}

void
spw__cuda_compress_backward(spw_gpu_queue *queue, act *dkv, act *dgate, float *dbias, const act *dy, const act *kv,
                            const act *gate, const act *bias, const spw_compress_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t width = (s->overlaps ? 2 : 1) * s->D, row_bytes = width * spw_dtype_bytes(q->gpu->info.compute_dtype);
    if (s->B * s->T * s->D == 0)
        return;
    for (int k = 0; k < 2 && s->firsts != NULL; k++)
        spw__cuda_zero(queue, k == 0 ? dkv : dgate, s->B * s->T * row_bytes);
    BY_TYPE(q, backward<T>(q, dkv, dgate, dy, kv, gate, bias, s));
    if (dbias != NULL && s->firsts != NULL) {
        BY_TYPE(q, sum_bias<T>(q, dbias, dgate, s));
        return;
    }
    for (uint64_t b = 0; dbias != NULL && b < s->B; b++)
        spw__cuda_column_sums(q, dbias, NULL, (const char *)dgate + b * s->T * row_bytes, NULL, NULL, NULL,
                              s->T / s->rate, s->rate * width, s->rate * width);
}

void
spw__cuda_windows(spw_gpu_queue *queue, int32_t *firsts, const int32_t *begins, const int32_t *starts, uint64_t B,
                  uint64_t T, uint64_t rate)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    const uint64_t windows = starts != NULL ? (T + rate - 1) / rate : T / rate, count = B * windows;
    if (count > 0)
        LAUNCH(q, spw__cuda_blocks(count, COMPRESS_THREADS), COMPRESS_THREADS, 0, (windows_kernel), firsts, begins,
               starts, count, windows, T, rate);
}

/* What both that follow are given. */
template <class E>
static compress_args<E>
cached_args(const spw_compress_shape *s, const spw_window_cache *cache, const act *kv, const act *gate, const act *bias)
{
    compress_args<E> args = args_of<E>(s, kv, gate, bias);
    args.windows = (s->T + s->rate - 1) / s->rate;
    args.old_kv = (const E *)cache->kv;
    args.old_gate = (const E *)cache->gate;
    args.slots = cache->slots;
    args.starts = cache->starts;
    return args;
}

template <class E>
static void
forward_cached(cuda_queue *q, act *y, const act *kv, const act *gate, const act *bias, const spw_window_cache *cache,
               const spw_compress_shape *s)
{
    compress_args<E> args = cached_args<E>(s, cache, kv, gate, bias);
    const uint64_t ring = args.parts * s->rate, kept = s->T < ring ? s->T : ring;
    args.y = (E *)y;
    LAUNCH(q, dim3(spw__cuda_blocks(s->D, COMPRESS_THREADS), (unsigned)args.windows, (unsigned)s->B), COMPRESS_THREADS,
           0, (compress_kernel<E>), args);
    LAUNCH(q, dim3(spw__cuda_blocks(args.parts * s->D, COMPRESS_THREADS), (unsigned)kept, (unsigned)s->B),
           COMPRESS_THREADS, 0, (compress_keep_kernel<E>), (E *)cache->kv, (E *)cache->gate, args, s->T - kept);
}

void
spw__cuda_compress_cached(spw_gpu_queue *queue, act *y, const act *kv, const act *gate, const act *bias,
                          const spw_window_cache *cache, const spw_compress_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T * s->D > 0)
        BY_TYPE(q, forward_cached<T>(q, y, kv, gate, bias, cache, s));
}

template <class E>
static void
keep(cuda_queue *q, act *keys, uint64_t capacity, const act *y, const spw_window_cache *cache,
     const spw_compress_shape *s)
{
    const compress_args<E> args = cached_args<E>(s, cache, NULL, NULL, NULL);
    LAUNCH(q, dim3(spw__cuda_blocks(s->D, COMPRESS_THREADS), (unsigned)args.windows, (unsigned)s->B), COMPRESS_THREADS,
           0, (keep_windows_kernel<E>), (E *)keys, capacity, (const E *)y, args);
}

void
spw__cuda_keep_windows(spw_gpu_queue *queue, act *keys, uint64_t capacity, const act *y, const spw_window_cache *cache,
                       const spw_compress_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T * s->D > 0)
        BY_TYPE(q, keep<T>(q, keys, capacity, y, cache, s));
}
