/*
 * Launches of the short convolution of spw_gpu.h: four taps, which models have, in kernels of their own.
 */
#include "conv.cuh"
#include "cuda_internal.h"

template <class E>
static conv_args<E>
args_of(const spw_conv_shape *s, const act *x, const act *w)
{
    conv_args<E> args;
    memset(&args, 0, sizeof args);
    args.x = (const E *)x;
    args.w = (const E *)w;
    args.bias = (const E *)s->bias;
    args.begins = s->begins;
    args.ends = s->ends;
    args.T = s->T;
    args.C = s->C;
    args.stride = s->stride;
    args.M = s->B * s->T;
    args.K = (unsigned)s->K;
    args.plain = s->plain;
    args.wide = s->C % CONV_CHANNELS == 0 && s->stride % CONV_CHANNELS == 0 && spw__cuda_aligned(x);
    return args;
}

static unsigned
channel_blocks(uint64_t C)
{
    return spw__cuda_blocks(C, CONV_THREADS * CONV_CHANNELS);
}

template <class E, int TAPS, bool WIDE>
static void
conv(cuda_queue *q, const conv_args<E> &args, uint64_t B)
{
    LAUNCH(q, dim3(channel_blocks(args.C), spw__cuda_blocks(args.T, CONV_ROWS), (unsigned)B), CONV_THREADS, 0,
           (conv_kernel<E, TAPS, WIDE>), args);
}

template <class E>
static void
launch_conv(cuda_queue *q, act *y, const act *x, const act *w, const spw_delta_cache *cache, const spw_conv_shape *s)
{
    conv_args<E> args = args_of<E>(s, x, w);
    args.y = (E *)y;
    args.wide = args.wide && spw__cuda_aligned(y);
    if (cache != NULL) {
        args.before = (E *)cache->before;
        args.slots = cache->slots;
        args.starts = cache->starts;
        args.wide = args.wide && spw__cuda_aligned(cache->before);
    }
    if (s->K == 4 && args.wide)
        conv<E, 4, true>(q, args, s->B);
    else if (args.wide)
        conv<E, SPW_TAPS_MAX, true>(q, args, s->B);
    else
        conv<E, SPW_TAPS_MAX, false>(q, args, s->B);
    if (cache != NULL && s->T > CONV_ROWS && s->K > 1) /* blocks of the same launch still read what was kept */
        LAUNCH(q, dim3(spw__cuda_blocks(s->C, 256), (unsigned)s->K - 1, (unsigned)s->B), 256, 0, (conv_keep_kernel<E>),
               args.before, args.x, args.slots, s->T, s->C, s->stride, s->K - 1);
}

void
spw__cuda_conv(spw_gpu_queue *queue, act *y, const act *x, const act *w, const spw_conv_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T * s->C > 0)
        BY_TYPE(q, launch_conv<T>(q, y, x, w, NULL, s));
}

void
spw__cuda_conv_cached(spw_gpu_queue *queue, act *y, const act *x, const act *w, const spw_delta_cache *cache,
                      const spw_conv_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T * s->C > 0)
        BY_TYPE(q, launch_conv<T>(q, y, x, w, cache, s));
}

/*
 * Rows of a piece: what it leaves of dw, 4 K bytes a channel, is little beside its rows, and all pieces together leave 16 MiB at most, or what
 * 64 of them do.
 */
static uint64_t
rows_per_piece(uint64_t M, uint64_t C, uint64_t K)
{
    const uint64_t fit = (4 << 20) / (C * K), pieces = fit > 64 ? fit : 64, rows = (M + pieces - 1) / pieces;
    return rows > 64 ? rows : 64;
}

template <class E, int TAPS, bool WIDE>
static void
conv_backward(cuda_queue *q, const conv_args<E> &args, unsigned pieces)
{
    LAUNCH(q, dim3(channel_blocks(args.C), pieces), CONV_THREADS, 0, (conv_backward_kernel<E, TAPS, WIDE>), args);
}

template <class E>
static void
launch_backward(cuda_queue *q, act *dx, float *dw, float *dbias, const act *dy, const act *x, const act *w,
                const spw_conv_shape *s, unsigned flags)
{
    conv_args<E> args = args_of<E>(s, x, w);
    args.rows = rows_per_piece(args.M, s->C, s->K);
    const unsigned pieces = spw__cuda_blocks(args.M, args.rows);
    args.dx = (E *)dx;
    args.dy = (const E *)dy;
    args.add = (flags & SPW_OP_ACC_DX) != 0;
    args.wide = args.wide && spw__cuda_aligned(dx, dy);
    if (dw != NULL || dbias != NULL) {
        float *sums = (float *)spw__cuda_scratch(q, pieces * s->C * (s->K + 1) * sizeof *dw);
        if (sums == NULL)
            return;
        args.partial = dw != NULL ? sums : NULL;
        args.partial_bias = dbias != NULL ? sums + pieces * s->C * s->K : NULL;
    }
    if (s->K == 4 && args.wide)
        conv_backward<E, 4, true>(q, args, pieces);
    else if (args.wide)
        conv_backward<E, SPW_TAPS_MAX, true>(q, args, pieces);
    else
        conv_backward<E, SPW_TAPS_MAX, false>(q, args, pieces);
    if (dw != NULL)
        spw__cuda_add_slices(q, dw, args.partial, NULL, NULL, s->C * s->K, pieces);
    if (dbias != NULL)
        spw__cuda_add_slices(q, dbias, args.partial_bias, NULL, NULL, s->C, pieces);
}

void
spw__cuda_conv_backward(spw_gpu_queue *queue, act *dx, float *dw, float *dbias, const act *dy, const act *x,
                        const act *w, const spw_conv_shape *s, unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T * s->C > 0 && (dx != NULL || dw != NULL || dbias != NULL))
        BY_TYPE(q, launch_backward<T>(q, dx, dw, dbias, dy, x, w, s, flags));
}
