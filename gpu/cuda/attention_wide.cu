/*
 * Launches attention_wide.cuh: heads of more than 256 elements, and any with keys in front of a sequence's, those of fewer than 512 computed with zeros behind.
 */
#include "attention_wide.cuh"
#include "attention_internal.h"

static_assert((int)WIDE_HEAD == (int)HEAD_MAX, "the widest");
static_assert((int)WIDE_TILE == (int)SPW_FRONT_TILE, "no tile has both kinds of keys of a cache");

template <class E, bool CAP, bool FEW = false, bool FRONT = false>
static void
forward(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    LAUNCH(q, dim3(spw__cuda_blocks(args.T, 64), (unsigned)args.Hq, (unsigned)B), WIDE_THREADS, wide_shared_bytes(),
           (attention_wide_forward_kernel<E, CAP, FEW, FRONT>), args);
}

template <class E, bool CAP, bool FEW = false, bool FRONT = false>
static void
backward(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    LAUNCH(q, dim3(spw__cuda_blocks(args.T, WIDE_TILE), (unsigned)args.Hq, (unsigned)B), WIDE_THREADS,
           wide_shared_bytes(), (attention_wide_dq_kernel<E, CAP, FEW, FRONT>), args);
    LAUNCH(q, dim3(spw__cuda_blocks(args.front + args.T, WIDE_TILE), (unsigned)args.Hk, (unsigned)B), WIDE_THREADS,
           wide_shared_bytes(), (attention_wide_dkv_kernel<E, CAP, FEW, FRONT>), args);
}

template <class E>
void
spw__cuda_attention_forward_wide(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    if (args.front > 0 && args.chosen != NULL)
        forward<E, false, true, true>(q, args, B);
    else if (args.front > 0)
        forward<E, false, false, true>(q, args, B);
    else if (args.chosen != NULL)
        forward<E, false, true>(q, args, B);
    else if (args.cap > 0)
        forward<E, true>(q, args, B);
    else
        forward<E, false>(q, args, B);
}

template <class E>
void
spw__cuda_attention_backward_wide(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    if (args.front > 0 && args.chosen != NULL)
        backward<E, false, true, true>(q, args, B);
    else if (args.front > 0)
        backward<E, false, false, true>(q, args, B);
    else if (args.chosen != NULL)
        backward<E, false, true>(q, args, B);
    else if (args.cap > 0)
        backward<E, true>(q, args, B);
    else
        backward<E, false>(q, args, B);
}

#define FOR(E)                                                                                                         \
    template void spw__cuda_attention_forward_wide<E>(cuda_queue * q, const attention_args<E> &args, uint64_t B);      \
    template void spw__cuda_attention_backward_wide<E>(cuda_queue * q, const attention_args<E> &args, uint64_t B);
FOR(bf16)
FOR(f16)
