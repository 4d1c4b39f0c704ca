/*
 * Launches attention_hopper.cuh by head size. Rows, tiles and blocks per processor are for heads of up to 128 elements those that were fastest of the ones that fit
 * on an H200 (docs/performance.md); where the build is not for one (sm_90a), nobody calls this.
 */
#include "attention_hopper.cuh"
#include "attention_internal.h"

#if defined SPW_EMULATED || defined SPW_SM_90A
const bool spw__cuda_hopper_built = true;

template <class E, int DP, int WG, int BN, int BLOCKS>
static void
forward(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    LAUNCH(q, dim3(spw__cuda_blocks(args.T, 64 * WG), (unsigned)args.Hq, (unsigned)B), WG * WARPGROUP,
           (hopper_shared_bytes<DP, WG, BN, 1>()), (attention_forward_hopper_kernel<E, DP, WG, BN, BLOCKS>), args);
}

template <class E, int DP, int WG, int BN, int BLOCKS>
static void
make_dq(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    LAUNCH(q, dim3(spw__cuda_blocks(args.T, 64 * WG), (unsigned)args.Hq, (unsigned)B), WG * WARPGROUP,
           (hopper_shared_bytes<DP, WG, BN, 2>()), (attention_dq_hopper_kernel<E, DP, WG, BN, BLOCKS>), args);
}

template <class E, int DP, int WG, int BN, int BLOCKS, bool DK, bool DV>
static void
make_dkv(cuda_queue *q, const attention_args<E> &args, uint64_t B, uint64_t Hk)
{
    LAUNCH(q, dim3(spw__cuda_blocks(args.T, 64 * WG), (unsigned)Hk, (unsigned)B), WG * WARPGROUP,
           (hopper_shared_bytes<DP, WG, BN, 2>() + hopper_row_bytes<BN>()),
           (attention_dkv_hopper_kernel<E, DP, WG, BN, BLOCKS, DK, DV>), args);
}

template <class E>
void
spw__cuda_attention_forward_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    int D = args.D > args.Dv ? args.D : args.Dv;
    if (D <= 64)
        forward<E, 64, 1, 64, 4>(q, args, B);
    else if (D <= 128)
        forward<E, 128, 2, 64, 2>(q, args, B);
    else
        forward<E, 256, 2, 64, 1>(q, args, B);
}

template <class E>
void
spw__cuda_attention_dq_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    int D = args.D > args.Dv ? args.D : args.Dv;
    if (D <= 64)
        make_dq<E, 64, 1, 64, 4>(q, args, B);
    else if (D <= 128)
        make_dq<E, 128, 1, 64, 2>(q, args, B);
    else
        make_dq<E, 256, 2, 32, 1>(q, args, B);
}

template <class E>
void
spw__cuda_attention_dkv_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B, uint64_t Hk)
{
    int D = args.D > args.Dv ? args.D : args.Dv;
    if (D <= 64) {
        make_dkv<E, 64, 1, 64, 3, true, true>(q, args, B, Hk);
    } else if (D <= 128) {
        make_dkv<E, 128, 1, 64, 2, true, true>(q, args, B, Hk);
    } else {
        make_dkv<E, 256, 2, 32, 1, true, false>(q, args, B, Hk);
        make_dkv<E, 256, 2, 32, 1, false, true>(q, args, B, Hk);
    }
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
