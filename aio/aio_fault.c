/*
 * aio_fault.c - faults for tests: a schedule of delays, short and torn transfers and errors, drawn from a seed.
 *
 * They are applied above the backends (aio_piece.c), so every backend meets the same ones, and what moves really moves:
 * a torn write leaves its first part on the disk. Only tests call it.
 */
#include "aio_internal.h"

#include <errno.h>

void
spw_test_aio_fault(spw_aio *aio, spw_aio_fault_fn fn, void *ctx)
{
    aio->fault = fn;
    aio->fault_ctx = ctx;
}

int
spw_test_aio_scheduled(void *ctx, const spw_aio_request *req, uint64_t offset, uint64_t bytes, uint64_t *move_bytes,
                       uint64_t *delay_ns)
{
    spw_test_aio_schedule *s = ctx;
    uint32_t words[4], die;
    (void)offset;
    spw_philox(s->seed, 0, s->transfers++, words);
    if (words[0] % 1000 < s->delays && s->delay_ns_max > 0)
        *delay_ns = 1 + ((uint64_t)words[1] << 16 | words[2] >> 16) % s->delay_ns_max;
    if (s->error_at == s->transfers) {
        s->failures++;
        return EIO;
    }
    die = words[2] % 1000;
    if (die < s->agains)
        return words[3] % 2 ? EAGAIN : EINTR;
    die -= s->agains;
    if (die < s->errors) {
        s->failures++;
        return EIO;
    }
    die -= s->errors;
    if (die < s->shorts) {
        if (bytes > 1)
            *move_bytes = 1 + words[3] % (bytes - 1);
        return 0;
    }
    die -= s->shorts;
    if (req->op != SPW_AIO_WRITE)
        return 0;
    if (die < s->full) {
        s->failures++;
        return ENOSPC;
    }
    die -= s->full;
    if (die < s->torn && bytes > 1) {
        s->failures++;
        *move_bytes = 1 + words[3] % (bytes - 1);
        return EIO;
    }
    return 0;
}
