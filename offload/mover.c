/*
 * The mover: one thread that looks at the states under the lock, starts every transfer that can start, and sleeps until
 * something finishes. Order of service: writes behind (they free slots), the unit somebody waits for, the future in its
 * order, updates of the lowest ready unit, records read ahead.
 *
 * Nothing here holds one resource while it waits for the main thread (fills.c, updates.c), so the smallest pools (one slot each) still make
 * progress.
 */
#include "offload_internal.h"

enum { BATCH = 64 };

void *
spw__store_mover_main(void *arg)
{
    spw_store *s = arg;
    spw_aio_request *done[BATCH];
    uint32_t done_count = 0;
    (void)pthread_setname_np(pthread_self(), "spw-mover");
    spw_thread_be_prompt();
    for (;;) {
        bool stop;
        while (s->aio != NULL && done_count < BATCH && (done[done_count] = spw_aio_poll(s->aio)) != NULL)
            done_count++;
        pthread_mutex_lock(&s->lock);
        for (uint32_t i = 0; i < done_count; i++)
            spw__store_finish_request(s, done[i]);
        if (s->aio != NULL) {
            spw_aio_stats io;
            spw_aio_get_stats(s->aio, &io);
            s->stats.read_busy_ns = io.read_busy_ns;
            s->stats.write_busy_ns = io.write_busy_ns;
        }
        if (s->poison.status == SPW_OK) {
            spw__ahead_reads(s);
            spw__store_schedule_writes(s);
            spw__store_schedule_grads(s);
            spw__store_schedule_fills(s);
            spw__store_schedule_updates(s);
            spw__store_schedule_writes(s);
        }
        s->passes++;
        stop = s->stop && s->copies_inflight == 0 && s->aio_inflight == 0 && s->jobs_running == 0;
        if (!stop && s->aio == NULL) {
            while (!s->mover_kicked)
                pthread_cond_wait(&s->mover_cond, &s->lock);
            s->mover_kicked = false;
        }
        pthread_mutex_unlock(&s->lock);
        if (stop)
            return NULL;
        done_count = 0;
        if (s->aio != NULL && (done[0] = spw_aio_wait(s->aio, UINT64_MAX)) != NULL)
            done_count = 1;
    }
}
