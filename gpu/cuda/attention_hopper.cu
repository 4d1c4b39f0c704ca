/*
 * Launches attention_hopper.cuh by head size. Rows, tiles and blocks per processor are those that were fastest of the ones that fit on an H200
 * (docs/performance.md); where the build is not for one (sm_90a), nobody calls this.
 */
#include "attention_hopper.cuh"
#include "attention_internal.h"

#if defined SPW_EMULATED || defined SPW_SM_90A
const bool spw__cuda_hopper_built = true;

template <class E>
void
spw__cuda_attention_forward_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    if (args.D <= 64 && args.Dv <= 64)
        LAUNCH(q, dim3(spw__cuda_blocks(args.T, 64), (unsigned)args.Hq, (unsigned)B), WARPGROUP,
               (hopper_shared_bytes<64, 1, 64, 1>()), (attention_forward_hopper_kernel<E, 64, 1, 64, 4>), args);
    else
        LAUNCH(q, dim3(spw__cuda_blocks(args.T, 128), (unsigned)args.Hq, (unsigned)B), 2 * WARPGROUP,
               (hopper_shared_bytes<128, 2, 64, 1>()), (attention_forward_hopper_kernel<E, 128, 2, 64, 2>), args);
}

template <class E>
void
spw__cuda_attention_dq_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    dim3 grid(spw__cuda_blocks(args.T, 64), (unsigned)args.Hq, (unsigned)B);
    if (args.D <= 64 && args.Dv <= 64)
        LAUNCH(q, grid, WARPGROUP, (hopper_shared_bytes<64, 1, 64, 2>()), (attention_dq_hopper_kernel<E, 64, 1, 64, 4>),
               args);
    else
        LAUNCH(q, grid, WARPGROUP, (hopper_shared_bytes<128, 1, 64, 2>()),
               (attention_dq_hopper_kernel<E, 128, 1, 64, 2>), args);
}

template <class E>
void
spw__cuda_attention_dkv_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B, uint64_t Hk)
{
    dim3 grid(spw__cuda_blocks(args.T, 64), (unsigned)Hk, (unsigned)B);
    if (args.D <= 64 && args.Dv <= 64)
        LAUNCH(q, grid, WARPGROUP, (hopper_shared_bytes<64, 1, 64, 2>() + hopper_row_bytes<64>()),
               (attention_dkv_hopper_kernel<E, 64, 1, 64, 3>), args);
    else
        LAUNCH(q, grid, WARPGROUP, (hopper_shared_bytes<128, 1, 64, 2>() + hopper_row_bytes<64>()),
               (attention_dkv_hopper_kernel<E, 128, 1, 64, 2>), args);
}
#else
const bool spw__cuda_hopper_built = false;

template <class E>
void
spw__cuda_attention_forward_hopper(cuda_queue *, const attention_args<E> &, uint64_t)
{
}

template <class E>
void
spw__cuda_attention_dq_hopper(cuda_queue *, const attention_args<E> &, uint64_t)
{
}

template <class E>
void
spw__cuda_attention_dkv_hopper(cuda_queue *, const attention_args<E> &, uint64_t, uint64_t)
{
}
#endif

#define FOR(E)                                                                                                         \
    template void spw__cuda_attention_forward_hopper<E>(cuda_queue * q, const attention_args<E> &args, uint64_t B);    \
    template void spw__cuda_attention_dq_hopper<E>(cuda_queue * q, const attention_args<E> &args, uint64_t B);         \
    template void spw__cuda_attention_dkv_hopper<E>(cuda_queue * q, const attention_args<E> &args, uint64_t B,         \
                                                    uint64_t Hk);
FOR(bf16)
FOR(f16)
