/*
 * Launches of the gated delta rule of spw_gpu.h, by the size of a head's keys where lines of the state are columns and by that of its values
 * where they are rows.
 */
#include "cuda_internal.h"
#include "delta_backward.cuh"

template <class E>
static delta_args<E>
args_of(const spw_delta_inputs *in, const spw_delta_shape *s)
{
    delta_args<E> args;
    memset(&args, 0, sizeof args);
    args.qkv = (const E *)in->qkv;
    args.a = (const E *)in->a;
    args.b = (const E *)in->b;
    args.log_a = (const E *)in->log_a;
    args.dt_bias = (const E *)in->dt_bias;
    args.skip = (const E *)in->skip;
    args.begins = s->begins;
    args.T = s->T;
    args.M = s->B * s->T;
    args.stride = 2 * s->Hk * s->Dk + s->Hv * s->Dv;
    args.Hk = (unsigned)s->Hk;
    args.Hv = (unsigned)s->Hv;
    args.Dk = (unsigned)s->Dk;
    args.Dv = (unsigned)s->Dv;
    args.group = (unsigned)(s->Hv / s->Hk);
    args.heads = (unsigned)s->Hv;
    args.shrink = 1.0f / sqrtf((float)s->Dk);
    args.step_least = s->step_least;
    args.beta_most = s->beta_most > 0 ? s->beta_most : 1.0f;
    args.wide = spw__cuda_aligned(in->qkv) &&
                (!s->channels || spw__cuda_aligned(in->a, in->dt_bias)); /* rows begin at eights */
    return args;
}

/* A block for so many lines of each head that is taken, of each sequence. */
template <class E>
static dim3
blocks_of(uint64_t lines, unsigned per_block, const delta_args<E> &args, const spw_delta_shape *s)
{
    return dim3(spw__cuda_blocks(lines, per_block), args.heads, (unsigned)s->B);
}

template <int DIM, int RULE, class E>
static void
forward(cuda_queue *q, const delta_args<E> &args, const spw_delta_shape *s)
{
    LAUNCH(q, blocks_of(s->Dv, line_of<DIM>::LINES, args, s), DELTA_THREADS, 0, (delta_kernel<E, DIM, RULE>), args);
}

template <int RULE, class E>
static void
forward_by_keys(cuda_queue *q, const delta_args<E> &args, const spw_delta_shape *s)
{
    if (s->Dk <= 64)
        forward<64, RULE>(q, args, s);
    else if (s->Dk <= 128)
        forward<128, RULE>(q, args, s);
    else
        forward<256, RULE>(q, args, s);
}

template <class E>
static void
launch_forward(cuda_queue *q, act *out, float *delta, const spw_delta_inputs *in, const spw_delta_cache *cache,
               const spw_delta_shape *s)
{
    delta_args<E> args = args_of<E>(in, s);
    args.out = (E *)out;
    args.delta = delta;
    if (cache != NULL) {
        args.state = cache->state;
        args.slots = cache->slots;
        args.starts = cache->starts;
    }
    if (s->mamba)
        forward_by_keys<MAMBA>(q, args, s);
    else if (s->channels)
        forward_by_keys<CHANNELS>(q, args, s);
    else
        forward_by_keys<DELTA>(q, args, s);
}

void
spw__cuda_delta(spw_gpu_queue *queue, act *out, float *delta, const spw_delta_inputs *in, const spw_delta_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T > 0)
        BY_TYPE(q, launch_forward<T>(q, out, delta, in, NULL, s));
}

void
spw__cuda_delta_cached(spw_gpu_queue *queue, act *out, const spw_delta_inputs *in, const spw_delta_cache *cache,
                       const spw_delta_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T > 0)
        BY_TYPE(q, launch_forward<T>(q, out, NULL, in, cache, s));
}

template <int DIM, int RULE, class E>
static void
by_columns(cuda_queue *q, const delta_args<E> &args, const spw_delta_shape *s)
{
    LAUNCH(q, blocks_of(s->Dv, line_of<DIM>::LINES, args, s), DELTA_THREADS, 0, (delta_columns_kernel<E, DIM, RULE>),
           args);
}

template <int DIM, int RULE, class E>
static void
by_rows(cuda_queue *q, const delta_args<E> &args, const spw_delta_shape *s)
{
    dim3 grid = blocks_of(s->Dk, line_of<DIM>::LINES, args, s);
    grid.x *= 2;
    LAUNCH(q, grid, DELTA_THREADS, 0, (delta_rows_kernel<E, DIM, RULE>), args);
}

/* Where the parts of scratch lie, and of the queue's own: factors, gates and sums of sequences, which are returned. */
template <class E>
static float *
divide_scratch(cuda_queue *q, delta_args<E> *args, float *scratch, const spw_delta_shape *s)
{
    const uint64_t heads = args->M * s->heads_each * args->group, keys = heads * s->Dk;
    const uint64_t sums = s->B * s->Hv * (s->channels ? 1 + s->Dk : 3);
    float *own = (float *)spw__cuda_scratch(q, (2 * args->M * (s->Hv + s->Hk) + sums) * sizeof *own);
    args->ddelta = scratch;
    args->dq = args->ddelta + heads * s->Dv;
    args->written = args->dq + keys;
    args->read = args->written + keys; /* not of Mamba-2, and the last two of it alone */
    args->share = args->written + (s->mamba ? 1 : 2) * keys;
    args->decays = args->share; /* with channels there are no such numbers */
    args->written_length = args->share + heads;
    args->asked = args->written_length + heads;
    args->dbeta = args->asked + heads;
    args->dskip = args->dbeta + heads;
    args->gates = (float2 *)own;
    args->factors = own + 2 * args->M * s->Hv;
    return own != NULL ? args->factors + 2 * args->M * s->Hk : NULL;
}

/* What is carried from row to row, into sums of sequences. */
template <int RULE, class E>
static void
carry(cuda_queue *q, const delta_args<E> &args, const spw_delta_shape *s, float *sums)
{
    const uint64_t heads = s->B * s->Hv;
    if constexpr (RULE == CHANNELS)
        LAUNCH(q, dim3(args.heads, (unsigned)s->B), ((unsigned)s->Dk + 31) / 32 * 32, 0, (delta_channels_kernel<E>),
               args, sums, sums + heads);
    else
        LAUNCH(q, dim3(args.heads, (unsigned)s->B), DECAY_THREADS, 0, (delta_decay_kernel<E, RULE>), args, sums,
               sums + heads, sums + 2 * heads);
}

/* The heads that args takes. lanes: of a vector of keys. */
template <int RULE, class E>
static void
some_heads(cuda_queue *q, const delta_args<E> &args, const spw_delta_shape *s, float *sums, unsigned lanes)
{
    if constexpr (RULE == CHANNELS)
        LAUNCH(q, spw__cuda_blocks(args.M * args.heads * (s->Dk / 8), 128), 128, 0, (delta_decays_kernel<E>), args);
    if (s->Dk <= 64)
        by_columns<64, RULE>(q, args, s);
    else if (s->Dk <= 128)
        by_columns<128, RULE>(q, args, s);
    else
        by_columns<256, RULE>(q, args, s);
    if (s->Dv <= 64)
        by_rows<64, RULE>(q, args, s);
    else if (s->Dv <= 128)
        by_rows<128, RULE>(q, args, s);
    else
        by_rows<256, RULE>(q, args, s);
    LAUNCH(q, spw__cuda_blocks(args.M * (args.heads / args.group) * lanes, 128), 128, 0, (delta_heads_kernel<E, RULE>),
           args, lanes);
    carry<RULE>(q, args, s, sums);
}

template <int RULE, class E>
static void
launch_backward(cuda_queue *q, delta_args<E> args, const spw_delta_shape *s, float *sums, float *dlog_a,
                float *ddt_bias, float *dskip)
{
    const unsigned lanes = s->Dk <= 64 ? 8 : s->Dk <= 128 ? 16 : 32;
    const uint64_t vectors = 2 * args.M * s->Hk * lanes, gates = args.M * s->Hv;
    LAUNCH(q, spw__cuda_blocks(vectors > gates ? vectors : gates, 256), 256, 0, (delta_prepare_kernel<E, RULE>), args,
           lanes);
    for (uint64_t head = 0; head < s->Hk; head += s->heads_each) {
        args.head = (unsigned)head * args.group;
        args.heads = (unsigned)(s->Hk - head < s->heads_each ? s->Hk - head : s->heads_each) * args.group;
        some_heads<RULE>(q, args, s, sums, lanes);
    }
    if (RULE == CHANNELS && dlog_a != NULL)
        spw__cuda_add_slices(q, dlog_a, sums, NULL, NULL, s->Hv, s->B);
    if (RULE == CHANNELS && ddt_bias != NULL)
        spw__cuda_add_slices(q, ddt_bias, sums + s->B * s->Hv, NULL, NULL, s->Hv * s->Dk, s->B);
    if (RULE != CHANNELS && (dlog_a != NULL || ddt_bias != NULL))
        spw__cuda_add_slices(q, dlog_a, sums, ddt_bias, sums + s->B * s->Hv, s->Hv, s->B);
    if (RULE == MAMBA && dskip != NULL)
        spw__cuda_add_slices(q, dskip, sums + 2 * s->B * s->Hv, NULL, NULL, s->Hv, s->B);
}

template <class E>
static void
backward(cuda_queue *q, act *dqkv, act *da, act *db, float *dlog_a, float *ddt_bias, float *dskip, const act *dout,
         const float *delta, float *scratch, const spw_delta_inputs *in, const spw_delta_shape *s)
{
    delta_args<E> args = args_of<E>(in, s);
    float *sums = divide_scratch(q, &args, scratch, s);
    args.dqkv = (E *)dqkv;
    args.da = (E *)da;
    args.db = (E *)db;
    args.dout = (const E *)dout;
    args.delta = (float *)delta; /* read only */
    args.wide = args.wide && spw__cuda_aligned(dqkv, dout, delta, scratch);
    if (sums != NULL && s->mamba)
        launch_backward<MAMBA>(q, args, s, sums, dlog_a, ddt_bias, dskip);
    else if (sums != NULL && s->channels)
        launch_backward<CHANNELS>(q, args, s, sums, dlog_a, ddt_bias, dskip);
    else if (sums != NULL)
        launch_backward<DELTA>(q, args, s, sums, dlog_a, ddt_bias, dskip);
}

void
spw__cuda_delta_backward(spw_gpu_queue *queue, act *dqkv, act *da, act *db, float *dlog_a, float *ddt_bias,
                         float *dskip, const act *dout, const float *delta, float *scratch, const spw_delta_inputs *in,
                         const spw_delta_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B * s->T > 0)
        BY_TYPE(q, backward<T>(q, dqkv, da, db, dlog_a, ddt_bias, dskip, dout, delta, scratch, in, s));
}
