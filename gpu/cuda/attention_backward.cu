/*
 * Launches attention_backward.cuh by head size, within the same limits as forward. Heads beyond 128 make dk and dv in two
 * kernels: the sums of both do not fit the registers. Two buffers for tiles where as many blocks run on a processor as with one: with
 * heads of up to 64 they would be one less where shared memory is 100 KiB.
 */
#include "attention_backward.cuh"
#include "attention_internal.h"

template <class E, int DP, int VP, int STEP, int MT, int BN, bool CAP = false, bool FEW = false>
static void
make_dq(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    dim3 grid(spw__cuda_blocks(args.T, 64 * MT), (unsigned)args.Hq, (unsigned)B);
    LAUNCH(q, grid, ATTENTION_THREADS, (backward_shared_bytes<DP, VP, MT, BN, 1>()),
           (attention_dq_kernel<E, DP, VP, STEP, MT, BN, CAP, FEW>), args);
}

template <class E, int DP, int VP, int STEP, int MT, int BN, int BUFFERS, bool DK, bool DV, bool CAP = false,
          bool FEW = false>
static void
make_dkv(cuda_queue *q, const attention_args<E> &args, uint64_t B, uint64_t Hk)
{
    dim3 grid(spw__cuda_blocks(args.T, 64 * MT), (unsigned)Hk, (unsigned)B);
    LAUNCH(q, grid, ATTENTION_THREADS, (backward_shared_bytes<DP, VP, MT, BN, BUFFERS>()),
           (attention_dkv_kernel<E, DP, VP, STEP, MT, BN, BUFFERS, DK, DV, CAP, FEW>), args);
}

template <class E>
void
spw__cuda_attention_dq(cuda_queue *q, const attention_args<E> &args, uint64_t B)
{
    if (args.chosen != NULL && args.D <= 192 && args.Dv <= 128)
        make_dq<E, 192, 128, 192, 1, 32, false, true>(q, args, B);
    else if (args.chosen != NULL)
        make_dq<E, 256, 256, 64, 1, 32, false, true>(q, args, B);
    else if (args.cap > 0 && args.D <= 64)
        make_dq<E, 64, 64, 32, 2, 32, true>(q, args, B);
    else if (args.cap > 0 && args.D <= 128)
        make_dq<E, 128, 128, 32, 1, 64, true>(q, args, B);
    else if (args.cap > 0)
        make_dq<E, 256, 256, 64, 1, 32, true>(q, args, B);
    else if (args.D <= 32)
        make_dq<E, 32, 32, 32, 2, 32>(q, args, B);
    else if (args.D <= 64)
        make_dq<E, 64, 64, 64, 2, 32>(q, args, B);
    else if (args.D <= 96)
        make_dq<E, 128, 128, 32, 1, 64>(q, args, B);
    else if (args.D <= 128)
        make_dq<E, 128, 128, 128, 1, 64>(q, args, B);
    else if (args.D <= 192 && args.Dv <= 128)
        make_dq<E, 192, 128, 192, 1, 32>(q, args, B);
    else
        make_dq<E, 256, 256, 64, 1, 32>(q, args, B);
}

template <class E>
void
spw__cuda_attention_dkv(cuda_queue *q, const attention_args<E> &args, uint64_t B, uint64_t Hk)
{
    if (args.chosen != NULL && args.D <= 192 && args.Dv <= 128) {
        make_dkv<E, 192, 128, 192, 1, 32, 2, true, true, false, true>(q, args, B, Hk);
    } else if (args.chosen != NULL) {
        make_dkv<E, 256, 256, 64, 1, 32, 1, true, false, false, true>(q, args, B, Hk);
        make_dkv<E, 256, 256, 64, 1, 32, 1, false, true, false, true>(q, args, B, Hk);
    } else if (args.cap > 0 && args.D <= 64) {
        make_dkv<E, 64, 64, 32, 2, 32, 1, true, true, true>(q, args, B, Hk);
    } else if (args.cap > 0 && args.D <= 128) {
        make_dkv<E, 128, 128, 32, 1, 32, 2, true, true, true>(q, args, B, Hk);
    } else if (args.cap > 0) {
        make_dkv<E, 256, 256, 64, 1, 32, 1, true, false, true>(q, args, B, Hk);
        make_dkv<E, 256, 256, 64, 1, 32, 1, false, true, true>(q, args, B, Hk);
    } else if (args.D <= 32) {
        make_dkv<E, 64, 64, 32, 2, 32, 1, true, true>(q, args, B, Hk);
    } else if (args.D <= 64) {
        make_dkv<E, 64, 64, 64, 2, 32, 1, true, true>(q, args, B, Hk);
    } else if (args.D <= 96) {
        make_dkv<E, 128, 128, 32, 1, 32, 2, true, true>(q, args, B, Hk);
    } else if (args.D <= 128) {
        make_dkv<E, 128, 128, 128, 1, 32, 2, true, true>(q, args, B, Hk);
    } else if (args.D <= 192 && args.Dv <= 128) {
        make_dkv<E, 192, 128, 192, 1, 32, 2, true, true>(q, args, B, Hk);
    } else {
        make_dkv<E, 256, 256, 64, 1, 32, 1, true, false>(q, args, B, Hk);
        make_dkv<E, 256, 256, 64, 1, 32, 1, false, true>(q, args, B, Hk);
    }
}

#define FOR(E)                                                                                                         \
    template void spw__cuda_attention_dq<E>(cuda_queue * q, const attention_args<E> &args, uint64_t B);                \
    template void spw__cuda_attention_dkv<E>(cuda_queue * q, const attention_args<E> &args, uint64_t B, uint64_t Hk);
FOR(bf16)
FOR(f16)
