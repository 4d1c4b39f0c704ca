/*
 * Launches attention_forward.cuh by head size. Rows per warp and keys per tile are as large as registers (sums of 64 MT x D in
 * fp32) and 99 KiB of shared memory, the least of all architectures, allow. Heads between two sizes are computed with zeros behind.
 */
#include "attention_forward.cuh"
#include "attention_internal.h"

template <class E, int DP, int VP, int STEP, int MT, int BN, bool CAP = false, bool FEW = false>
static void
forward(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    dim3 grid(spw__cuda_blocks(args.T, 64 * MT), (unsigned)args.Hq, (unsigned)B);
    LAUNCH(q, grid, ATTENTION_THREADS, (forward_shared_bytes<DP, VP, MT, BN>()),
           (attention_forward_kernel<E, DP, VP, STEP, MT, BN, CAP, FEW>), args);
}

template <class E>
void
spw__cuda_attention_forward(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    if (args.chosen != NULL && args.D <= 192 && args.Dv <= 128)
        forward<E, 192, 128, 96, 2, 64, false, true>(q, args, B);
    else if (args.chosen != NULL)
        forward<E, 256, 256, 64, 1, 32, false, true>(q, args, B);
    else if (args.cap > 0 && args.D <= 64)
        forward<E, 64, 64, 32, 2, 64, true>(q, args, B);
    else if (args.cap > 0 && args.D <= 128)
        forward<E, 128, 128, 32, 2, 64, true>(q, args, B);
    else if (args.cap > 0)
        forward<E, 256, 256, 64, 1, 32, true>(q, args, B);
    else if (args.D <= 32)
        forward<E, 32, 32, 32, 2, 64>(q, args, B);
    else if (args.D <= 64)
        forward<E, 64, 64, 64, 2, 64>(q, args, B);
    else if (args.D <= 96)
        forward<E, 128, 128, 32, 2, 64>(q, args, B);
    else if (args.D <= 128)
        forward<E, 128, 128, 128, 2, 64>(q, args, B);
    else if (args.D <= 192 && args.Dv <= 128)
        forward<E, 192, 128, 96, 2, 64>(q, args, B); /* steps of 64 spill 220 bytes of a thread on sm_90, these 20 */
    else
        forward<E, 256, 256, 64, 1, 32>(q, args, B);
}

template void spw__cuda_attention_forward<bf16>(cuda_queue *q, const attention_args<bf16> &args, uint64_t B);
template void spw__cuda_attention_forward<f16>(cuda_queue *q, const attention_args<f16> &args, uint64_t B);
