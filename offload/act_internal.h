/* Inside the activation checkpoints: what activations.c, which moves them, and act_room.c, which has their memory, share. */
#ifndef SPW_ACT_INTERNAL_H
#define SPW_ACT_INTERNAL_H

#include "offload_internal.h"

typedef enum act_state { EMPTY, PENDING, LEAVING, STAGED, WRITING, AWAY, READING, LOADED, ARRIVING, READY } act_state;

typedef struct working_buffer {
    void *data;
    spw_gpu_event *used; /* the compute that read it last */
} working_buffer;

typedef struct checkpoint {
    spw_act *act;
    uint32_t idx;
    spw_act_place place;
    act_state state;
    const void *source;      /* PENDING, LEAVING */
    void *device;            /* its home there */
    void *host;              /* its home there, or a staging buffer */
    working_buffer *working; /* ARRIVING, READY */
    uint64_t offset, sum;    /* in the swap file; of what was written */
    spw_aio_request req;
} checkpoint;

enum { COPIES_INFLIGHT_MAX = 8 }; /* far below a queue's ring: they are enqueued under the lock that their ends take */

struct spw_act {
    /* Fixed after create. */
    spw_act_config cfg;
    uint32_t count;
    uint64_t bytes, page_bytes; /* of a checkpoint; of one on nvme */
    spw_region host, staging;
    void *device_memory;
    spw_swap **swaps;
    spw_gpu_queue *d2h, *h2d;
    spw_gpu_event *made; /* the compute that wrote the sources */
    pthread_t driver;
    bool driver_started, host_pinned, staging_pinned;
    spw_aio *aio; /* used by the driver alone */

    pthread_mutex_t lock;
    pthread_cond_t main_cond, driver_cond;
    /* Under lock. */
    checkpoint *list; /* (slot_count, micro_count) */
    working_buffer *buffers, **working_free;
    void **staging_free;
    uint32_t working_free_count, staging_free_count;
    uint32_t put_end, leave_next, write_next; /* indices: one behind the last put; to be copied out; to be written */
    uint32_t read_next, copy_next, get_next;  /* places in the order of use */
    uint32_t copies_inflight, aio_inflight;   /* aio: from the checksum before a write to the one after a read */
    bool turned, stop, kicked;
    spw_error poison; /* status SPW_OK while healthy */
    spw_act_stats stats;
    uint64_t chaos_calls; /* atomic */
};

/* Lock held: the driver looks again. */
void spw__act_kick(spw_act *a);
/* Every buffer is free, every checkpoint empty. Lock held, or nobody else is there. */
void spw__act_reset(spw_act *a);
/* The driver's thread; arg: the spw_act. */
void *spw__act_driver(void *arg);

#endif
