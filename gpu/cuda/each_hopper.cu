/* Launches each_hopper.cuh; where the build is not for a Hopper (sm_90a), nobody calls this. */
#include "each_hopper.cuh"
#include "each_internal.h"

#if defined SPW_EMULATED || defined SPW_SM_90A
template <class E, int BM, bool OF_ROWS, bool B_ROWS>
static void
launch(cuda_queue *q, const each_args<E> &args)
{
    LAUNCH(q, args.experts[args.count - 1].tile_end, BM * 2, (each_hopper_shared_bytes<BM>()),
           (each_hopper_kernel<E, BM, OF_ROWS, B_ROWS>), args);
}

template <class E>
void
spw__cuda_each_hopper(cuda_queue *q, const each_args<E> &args, int down, bool of_rows, bool b_rows)
{
    if (!of_rows)
        launch<E, 128, false, false>(q, args);
    else if (down == 64 && b_rows)
        launch<E, 64, true, true>(q, args);
    else if (down == 64)
        launch<E, 64, true, false>(q, args);
    else if (b_rows)
        launch<E, 128, true, true>(q, args);
    else
        launch<E, 128, true, false>(q, args);
}
#else
template <class E>
void
spw__cuda_each_hopper(cuda_queue *, const each_args<E> &, int, bool, bool)
{
}
#endif

template void
spw__cuda_each_hopper<bf16>(cuda_queue *q, const each_args<bf16> &args, int down, bool of_rows, bool b_rows);
template void
spw__cuda_each_hopper<f16>(cuda_queue *q, const each_args<f16> &args, int down, bool of_rows, bool b_rows);
