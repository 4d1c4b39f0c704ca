/* Launches streams.cuh. */
#include "streams.cuh"
#include "cuda_internal.h"

template <class E>
static maps_args<E>
args_of(const act *mixes, const act *scale, const act *base, const spw_streams *s)
{
    maps_args<E> args;
    memset(&args, 0, sizeof args);
    args.mixes = (const E *)mixes;
    args.scale = (const E *)scale;
    args.base = (const E *)base;
    args.M = s->M;
    args.n = (unsigned)s->n;
    args.width = (unsigned)spw_stream_maps(s);
    args.rounds = (unsigned)s->rounds;
    args.head = s->head;
    args.eps = s->eps;
    return args;
}

template <class E>
static void
make_maps(cuda_queue *q, act *maps, const act *mixes, const act *scale, const act *base, const spw_streams *s)
{
    maps_args<E> args = args_of<E>(mixes, scale, base, s);
    args.maps = (E *)maps;
    LAUNCH(q, spw__cuda_blocks(s->M, MAPS_THREADS), MAPS_THREADS, 0, (maps_kernel<E>), args);
}

void
spw__cuda_stream_maps(spw_gpu_queue *queue, act *maps, const act *mixes, const act *scale, const act *base,
                      const spw_streams *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->M > 0)
        BY_TYPE(q, make_maps<T>(q, maps, mixes, scale, base, s));
}

template <class E>
static void
maps_backward(cuda_queue *q, act *dmixes, float *dscale, float *dbase, const act *dmaps, const act *mixes,
              const act *scale, const act *base, const spw_streams *s)
{
    maps_args<E> args = args_of<E>(mixes, scale, base, s);
    const bool trained = dscale != NULL || dbase != NULL;
    float *sums = NULL;
    args.dmaps = (const E *)dmaps;
    args.dmixes = (E *)dmixes;
    if (trained) {
        sums = (float *)spw__cuda_scratch(q, (s->M + 1) * args.width * sizeof *sums);
        if (sums == NULL)
            return;
        args.dz = sums + args.width;
    }
    LAUNCH(q, spw__cuda_blocks(s->M, MAPS_THREADS), MAPS_THREADS, 0, (maps_backward_kernel<E>), args);
    if (trained)
        LAUNCH(q, args.width, MAP_SUMS_THREADS, 0, (maps_sums_kernel<E>), args, dbase, sums);
    if (dscale != NULL)
        LAUNCH(q, 1, 32, 0, (maps_scale_kernel), dscale, sums, args.n, args.width);
}

void
spw__cuda_stream_maps_backward(spw_gpu_queue *queue, act *dmixes, float *dscale, float *dbase, const act *dmaps,
                               const act *mixes, const act *scale, const act *base, const spw_streams *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->M > 0)
        BY_TYPE(q, maps_backward<T>(q, dmixes, dscale, dbase, dmaps, mixes, scale, base, s));
}

template <class E>
static mix_args<E>
mix_of(const act *h, const act *x, const act *maps, const spw_streams *s)
{
    mix_args<E> args;
    memset(&args, 0, sizeof args);
    args.h = (const E *)h;
    args.x = (const E *)x;
    args.maps = (const E *)maps;
    args.C = s->C;
    args.n = (unsigned)s->n;
    args.width = (unsigned)spw_stream_maps(s);
    args.wide = s->C % 8 == 0 && spw__cuda_aligned(h, x);
    return args;
}

template <class E>
static void
mix(cuda_queue *q, act *y, const act *h, const act *x, const act *maps, const spw_streams *s)
{
    mix_args<E> args = mix_of<E>(h, x, maps, s);
    args.y = (E *)y;
    args.wide = args.wide && spw__cuda_aligned(y);
    for (uint64_t row = 0; row < s->M; row += 32768) { /* what a grid has room for in its second dimension */
        mix_args<E> part;
        uint64_t rows = s->M - row < 32768 ? s->M - row : 32768;
        memcpy(&part, &args, sizeof part); /* and what is between its members, which the emulation looks at */
        part.h = h != NULL ? args.h + row * s->C : NULL;
        part.x += row * s->n * s->C;
        part.maps += row * args.width;
        part.y += row * (h != NULL ? s->n : 1) * s->C;
        LAUNCH(q, dim3(spw__cuda_blocks(s->C, MIX_THREADS * 8), (unsigned)rows), MIX_THREADS, 0, (mix_kernel<E>), part);
    }
}

void
spw__cuda_mix(spw_gpu_queue *queue, act *y, const act *h, const act *x, const act *maps, const spw_streams *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->M * s->C > 0)
        BY_TYPE(q, mix<T>(q, y, h, x, maps, s));
}

template <class E>
static void
mix_backward(cuda_queue *q, act *dh, act *dx, act *dmaps, const act *dy, const act *h, const act *x, const act *maps,
             const spw_streams *s, bool add)
{
    mix_args<E> args = mix_of<E>(h, x, maps, s);
    args.dy = (const E *)dy;
    args.dh = (E *)dh;
    args.dx = (E *)dx;
    args.dmaps = (E *)dmaps;
    args.add = add;
    args.wide = args.wide && spw__cuda_aligned(dh, dx, dy);
    LAUNCH(q, (unsigned)s->M, MIX_THREADS, 0, (mix_backward_kernel<E>), args);
}

void
spw__cuda_mix_backward(spw_gpu_queue *queue, act *dh, act *dx, act *dmaps, const act *dy, const act *h, const act *x,
                       const act *maps, const spw_streams *s, unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->M * s->C > 0)
        BY_TYPE(q, mix_backward<T>(q, dh, dx, dmaps, dy, h, x, maps, s, (flags & SPW_OP_ACC_DX) != 0));
}
