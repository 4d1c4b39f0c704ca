/*
 * Queues are streams; copies convert on the device, so that what crosses the link has the host's type and no CPU touches it.
 * A long copy goes in pieces through two halves of staging memory: while one is on the link, in a stream of its own, the other is
 * converted. Copy streams have the higher priority: their short kernels wait for blocks under way, but not for those to come.
 *
 * Small results (sums of squares, counts) land in a pinned ring and are put where they belong by a host function of the
 * stream, which only copies bytes. Callbacks of the caller may take locks that a thread inside the runtime holds others up
 * with, so each queue has a thread of its own for them, which waits for events.
 */
#include "cuda_internal.h"
#include "sums.cuh"
#include <stdlib.h>
#ifdef SPW_EMULATED
#define NVTX_PUSH(name) ((void)(name))
#define NVTX_POP()      ((void)0)
#else
#include <nvtx3/nvToolsExt.h> /* costs nothing unless a tool listens */
#define NVTX_PUSH(name) ((void)nvtxRangePushA(name))
#define NVTX_POP()      ((void)nvtxRangePop())
#endif

/* ---------------------------------------------------------------- notifications */

/*
 * When a span began and ended by the host's clock. Its events are timed from one that passed at a known time, which is set anew
 * every second, because the clocks drift apart: by the least delay with which the thread saw a span end.
 */
static void
tell_span(cuda_queue *q, cuda_note *note)
{
    const uint64_t period = 1000000000;
    uint64_t now = spw_now_ns(), begin_ns, end_ns;
    float begin_ms = 0.0f, end_ms = 0.0f;
    if (!spw__cuda_ok(q->gpu, cudaEventElapsedTime(&begin_ms, q->zero, note->begin), "time of a span") ||
        !spw__cuda_ok(q->gpu, cudaEventElapsedTime(&end_ms, q->zero, note->event), "time of a span"))
        begin_ms = end_ms = 0.0f;
    begin_ns = q->zero_ns + (uint64_t)((double)begin_ms * 1e6);
    end_ns = q->zero_ns + (uint64_t)((double)end_ms * 1e6);
    if ((int64_t)(now - end_ns) < q->least_delay_ns)
        q->least_delay_ns = (int64_t)(now - end_ns);
    note->span_fn(note->arg, note->name, note->tag, begin_ns, end_ns);
    if (end_ns - q->zero_ns > period) { /* the slot is this thread's until it is taken: the events change places */
        cudaEvent_t zero = q->zero;
        q->zero = note->event;
        note->event = zero;
        q->zero_ns = end_ns + (uint64_t)q->least_delay_ns;
        q->least_delay_ns = INT64_MAX;
    }
}

static void *
queue_main(void *arg)
{
    cuda_queue *q = (cuda_queue *)arg;
    (void)pthread_setname_np(pthread_self(), "spw-cuda-notify");
    spw_thread_be_prompt();
    (void)spw__cuda_enter(q->gpu);
    pthread_mutex_lock(&q->lock);
    for (;;) {
        cuda_note *note;
        while (q->head == q->tail && !q->stop)
            pthread_cond_wait(&q->filled, &q->lock);
        if (q->head == q->tail)
            break;
        note = &q->notes[q->head % NOTES]; /* this thread's until head passes it */
        pthread_mutex_unlock(&q->lock);
        (void)spw__cuda_ok(q->gpu, cudaEventSynchronize(note->event), "waiting to notify");
        if (note->span_fn != NULL) /* after an error too: who waits must come to see it */
            tell_span(q, note);
        else
            note->fn(note->arg);
        pthread_mutex_lock(&q->lock);
        q->head++;
        pthread_cond_broadcast(&q->drained);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* The next note: its event is free, for the note it was for has been taken. */
static cuda_note *
take_note(cuda_queue *q)
{
    cuda_note *note;
    pthread_mutex_lock(&q->lock);
    while (q->tail - q->head == NOTES)
        pthread_cond_wait(&q->drained, &q->lock);
    note = &q->notes[q->tail % NOTES];
    pthread_mutex_unlock(&q->lock);
    note->span_fn = NULL;
    return note;
}

static void
give_note(cuda_queue *q, const cuda_note *note)
{
    (void)spw__cuda_ok(q->gpu, cudaEventRecord(note->event, q->stream), "notify");
    pthread_mutex_lock(&q->lock);
    q->tail++;
    pthread_cond_signal(&q->filled);
    pthread_mutex_unlock(&q->lock);
}

void
spw__cuda_queue_notify(spw_gpu_queue *queue, void (*fn)(void *arg), void *arg)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    cuda_note *note = take_note(q);
    note->fn = fn;
    note->arg = arg;
    give_note(q, note);
}

void
spw__cuda_span_begin(spw_gpu_queue *queue, const char *name)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    NVTX_PUSH(name);
    q->span_name = name;
    (void)spw__cuda_ok(q->gpu, cudaEventRecord(q->span_begins[q->span_count % (NOTES + 1)], q->stream), "span");
}

void
spw__cuda_span_end(spw_gpu_queue *queue, uint64_t tag, spw_gpu_span_fn fn, void *arg)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    cuda_note *note = take_note(q);
    note->span_fn = fn;
    note->arg = arg;
    note->name = q->span_name;
    note->tag = tag;
    note->begin = q->span_begins[q->span_count++ % (NOTES + 1)];
    give_note(q, note);
    NVTX_POP();
}

/* ---------------------------------------------------------------- queues */

spw_status
spw__cuda_queue_create(spw_gpu_queue **out, spw_gpu *device, spw_gpu_queue_kind kind, spw_error *err)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    cuda_queue *q = (cuda_queue *)spw_mem_zalloc(sizeof *q);
    int low = 0, high = 0, rc;
    cudaError_t e;
    *out = NULL;
    if (q == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device queue");
    q->base.calls = gpu->base.calls;
    q->gpu = gpu;
    q->kind = kind;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->filled, NULL);
    pthread_cond_init(&q->drained, NULL);
    (void)cudaDeviceGetStreamPriorityRange(&low, &high);
    e = cudaStreamCreateWithPriority(&q->stream, cudaStreamNonBlocking, kind == SPW_QUEUE_COMPUTE ? low : high);
    if (e == cudaSuccess)
        e = cudaHostAlloc((void **)&q->ring, (size_t)SLOTS * SLOT_BYTES, cudaHostAllocDefault);
    for (int i = 0; e == cudaSuccess && i < SLOTS; i++)
        e = cudaEventCreateWithFlags(&q->ring_passed[i], cudaEventDisableTiming | cudaEventBlockingSync);
    for (int i = 0; e == cudaSuccess && i < NOTES; i++)
        e = cudaEventCreateWithFlags(&q->notes[i].event, cudaEventBlockingSync);
    for (int i = 0; e == cudaSuccess && i <= NOTES; i++)
        e = cudaEventCreateWithFlags(&q->span_begins[i], cudaEventDefault);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&q->zero, cudaEventBlockingSync);
    if (e == cudaSuccess)
        e = cudaEventRecord(q->zero, q->stream);
    if (e == cudaSuccess)
        e = cudaEventSynchronize(q->zero);
    q->zero_ns = spw_now_ns();
    q->least_delay_ns = INT64_MAX;
    if (e == cudaSuccess && kind == SPW_QUEUE_COMPUTE && gpu->blas != NULL)
        e = cudaMalloc(&q->blas_workspace, BLAS_BYTES);
    if (spw__cuda_refused(e) != cudaSuccess) {
        spw__cuda_queue_destroy(&q->base);
        return SPW_RAISE(err, SPW_ENOMEM, "device queue: %s", cudaGetErrorString(e));
    }
    rc = pthread_create(&q->thread, NULL, queue_main, q);
    if (rc != 0) {
        spw__cuda_queue_destroy(&q->base);
        return SPW_RAISE_SYS(err, rc, "start of a queue's thread");
    }
    q->started = true;
    *out = &q->base;
    return SPW_OK;
}

void
spw__cuda_queue_destroy(spw_gpu_queue *queue) /* accepts a half-built queue */
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (q->started) {
        (void)spw__cuda_ok(q->gpu, cudaStreamSynchronize(q->stream), "end of a queue");
        pthread_mutex_lock(&q->lock);
        q->stop = true;
        pthread_cond_broadcast(&q->filled);
        pthread_mutex_unlock(&q->lock);
        pthread_join(q->thread, NULL);
    }
    for (int i = 0; i < SLOTS; i++)
        if (q->ring_passed[i] != NULL)
            (void)cudaEventDestroy(q->ring_passed[i]);
    for (int i = 0; i < NOTES; i++)
        if (q->notes[i].event != NULL)
            (void)cudaEventDestroy(q->notes[i].event);
    for (int i = 0; i <= NOTES; i++)
        if (q->span_begins[i] != NULL)
            (void)cudaEventDestroy(q->span_begins[i]);
    for (int i = 0; i < 2; i++) {
        if (q->linked[i] != NULL)
            (void)cudaEventDestroy(q->linked[i]);
        if (q->converted[i] != NULL)
            (void)cudaEventDestroy(q->converted[i]);
    }
    if (q->zero != NULL)
        (void)cudaEventDestroy(q->zero);
    (void)cudaFreeHost(q->ring);
    (void)cudaFree(q->scratch);
    (void)cudaFree(q->blas_workspace);
    if (q->link != NULL)
        (void)cudaStreamDestroy(q->link);
    if (q->stream != NULL)
        (void)cudaStreamDestroy(q->stream);
    pthread_cond_destroy(&q->drained);
    pthread_cond_destroy(&q->filled);
    pthread_mutex_destroy(&q->lock);
    spw_mem_free(q);
}

void
spw__cuda_queue_sync(spw_gpu_queue *queue)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t until;
    (void)spw__cuda_ok(q->gpu, cudaStreamSynchronize(q->stream), "queue");
    pthread_mutex_lock(&q->lock); /* and its callbacks have run */
    until = q->tail;
    while (q->head < until)
        pthread_cond_wait(&q->drained, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

/* ---------------------------------------------------------------- events */

spw_status
spw__cuda_event_create(spw_gpu_event **out, spw_gpu *device, spw_error *err)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    cuda_event *event = (cuda_event *)spw_mem_zalloc(sizeof *event);
    cudaError_t e;
    *out = NULL;
    if (event == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device event");
    event->base.calls = gpu->base.calls;
    event->gpu = gpu;
    e = spw__cuda_refused(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming | cudaEventBlockingSync));
    if (e != cudaSuccess) {
        spw_mem_free(event);
        return SPW_RAISE(err, SPW_ENOMEM, "device event: %s", cudaGetErrorString(e));
    }
    *out = &event->base;
    return SPW_OK;
}

void
spw__cuda_event_destroy(spw_gpu_event *base)
{
    cuda_event *event = (cuda_event *)base;
    (void)spw__cuda_enter(event->gpu);
    (void)cudaEventDestroy(event->event);
    spw_mem_free(event);
}

void
spw__cuda_event_record(spw_gpu_event *base, spw_gpu_queue *queue)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    (void)spw__cuda_ok(q->gpu, cudaEventRecord(((cuda_event *)base)->event, q->stream), "event record");
}

void
spw__cuda_event_wait(spw_gpu_event *base, spw_gpu_queue *queue)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    (void)spw__cuda_ok(q->gpu, cudaStreamWaitEvent(q->stream, ((cuda_event *)base)->event, 0), "event wait");
}

void
spw__cuda_event_sync(spw_gpu_event *base)
{
    cuda_event *event = (cuda_event *)base;
    cuda_gpu *gpu = spw__cuda_enter(event->gpu);
    (void)spw__cuda_ok(gpu, cudaEventSynchronize(event->event), "event");
}

/* ---------------------------------------------------------------- scratch and the ring */

/*
 * Grown in the stream's order: cudaFree waits for all of the device, where a collective may run that waits for another rank,
 * and that one for what this thread has yet to submit. A device without memory pools (some that virtual machines share) leaves no
 * choice.
 */
void *
spw__cuda_scratch(cuda_queue *q, uint64_t bytes)
{
    bool pools = q->gpu->pools;
    void *old = q->scratch;
    if (bytes <= q->scratch_bytes)
        return old;
    bytes = spw_round_up(bytes, 1 << 20);
    q->scratch = NULL;
    q->scratch_bytes = 0;
    if (old != NULL && !spw__cuda_ok(q->gpu, pools ? cudaFreeAsync(old, q->stream) : cudaFree(old), "scratch memory"))
        return NULL;
    if (!spw__cuda_ok(
            q->gpu,
            spw__cuda_refused(pools ? cudaMallocAsync(&q->scratch, bytes, q->stream) : cudaMalloc(&q->scratch, bytes)),
            "scratch memory"))
        return NULL;
    q->scratch_bytes = bytes;
    return q->scratch;
}

/*
 * The first of the slots in a row, free by now, for what is left; *bytes is how much of it goes there, at most PARCEL_SLOTS. Sums of
 * a large copy are one small copy and one host function, of which each stops the stream for microseconds.
 */
static unsigned
take_slots(cuda_queue *q, uint64_t left, uint64_t *bytes)
{
    const uint64_t most = (uint64_t)PARCEL_SLOTS * SLOT_BYTES;
    unsigned count, first;
    *bytes = left < most ? left : most;
    count = spw__cuda_blocks(*bytes, SLOT_BYTES);
    first = q->ring_next + count <= (unsigned)SLOTS ? q->ring_next : 0;
    for (unsigned i = first; i < first + count; i++)
        (void)spw__cuda_ok(q->gpu, cudaEventSynchronize(q->ring_passed[i]), "ring"); /* at once when never recorded */
    q->ring_next = first + count;
    return first;
}

/* The slots from first on, which end at ring_next, are free again after what the stream has so far. */
static cudaError_t
pass_slots(cuda_queue *q, unsigned first, cudaError_t e)
{
    for (unsigned i = first; e == cudaSuccess && i < q->ring_next; i++)
        e = cudaEventRecord(q->ring_passed[i], q->stream);
    return e;
}

static void
unpack_parcel(void *arg)
{
    const cuda_parcel *p = (const cuda_parcel *)arg;
    memcpy(p->dst, p->src, p->bytes);
}

void
spw__cuda_deliver(cuda_queue *q, void *dst_host, const void *src_device, uint64_t bytes)
{
    for (uint64_t first = 0, n; first < bytes; first += n) {
        unsigned slot = take_slots(q, bytes - first, &n);
        unsigned char *at = q->ring + (size_t)slot * SLOT_BYTES;
        cudaError_t e = cudaMemcpyAsync(at, (const char *)src_device + first, n, cudaMemcpyDefault, q->stream);
        q->parcels[slot].dst = (char *)dst_host + first;
        q->parcels[slot].src = at;
        q->parcels[slot].bytes = n;
        if (e == cudaSuccess)
            e = cudaLaunchHostFunc(q->stream, unpack_parcel, &q->parcels[slot]);
        (void)spw__cuda_ok(q->gpu, pass_slots(q, slot, e), "a small copy to the host");
    }
}

void *
spw__cuda_reach(void *host)
{
    cudaPointerAttributes known;
    bool pinned =
        spw__cuda_refused(cudaPointerGetAttributes(&known, host)) == cudaSuccess && known.type == cudaMemoryTypeHost;
    return pinned ? known.devicePointer : NULL;
}

void
spw__cuda_write_bytes(spw_gpu_queue *queue, void *dst, const void *src, uint64_t bytes)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    for (uint64_t first = 0, n; first < bytes; first += n) {
        unsigned slot = take_slots(q, bytes - first, &n);
        unsigned char *at = q->ring + (size_t)slot * SLOT_BYTES;
        cudaError_t e;
        memcpy(at, (const char *)src + first, n);
        e = cudaMemcpyAsync((char *)dst + first, at, n, cudaMemcpyDefault, q->stream);
        (void)spw__cuda_ok(q->gpu, pass_slots(q, slot, e), "a small copy to the device");
    }
}

void
spw__cuda_read_bytes(spw_gpu_queue *queue, void *dst, const void *src, uint64_t bytes)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    cudaError_t e = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, q->stream);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(q->stream);
    (void)spw__cuda_ok(q->gpu, e, "a small copy to the host");
}

/* ---------------------------------------------------------------- copies */

template <class D, class S>
static void
convert_as(cuda_queue *q, void *dst, const void *src, uint64_t n)
{
    LAUNCH(q, spw__cuda_blocks(n, 8 * 256), 256, 0, (convert_kernel<D, S>), (D *)dst, (const S *)src, n,
           spw__cuda_aligned(dst, src));
}

static void
convert(cuda_queue *q, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n)
{
    typedef void (*convert_fn)(cuda_queue *, void *, const void *, uint64_t);
    static const convert_fn table[3][3] = {
        {NULL, convert_as<float, bf16>, convert_as<float, f16>},
        {convert_as<bf16, float>, NULL, convert_as<bf16, f16>},
        {convert_as<f16, float>, convert_as<f16, bf16>, NULL},
    };
    table[dst_type][src_type](q, dst, src, n);
}

template <class D, class S>
static void
sum_as(cuda_queue *q, double *sums, const void *x, uint64_t n)
{
    LAUNCH(q, spw__cuda_blocks(n, SUM_ELEMS * SUM_CHUNKS), SUM_CHUNKS * SUM_LANES, 0, (sumsq_kernel<D, S>), sums,
           (const S *)x, n);
}

/* Of n elements of src_type as dst_type holds them; sums is device memory. */
static void
sum_squares(cuda_queue *q, double *sums, spw_dtype dst_type, const void *x, spw_dtype src_type, uint64_t n)
{
    typedef void (*sum_fn)(cuda_queue *, double *, const void *, uint64_t);
    static const sum_fn table[3][3] = {
        {sum_as<float, float>, sum_as<float, bf16>, sum_as<float, f16>},
        {sum_as<bf16, float>, sum_as<bf16, bf16>, sum_as<bf16, f16>},
        {sum_as<f16, float>, sum_as<f16, bf16>, sum_as<f16, f16>},
    };
    table[dst_type][src_type](q, sums, x, n);
}

static uint64_t
sum_bytes_of(uint64_t n)
{
    return (n + SUM_ELEMS - 1) / SUM_ELEMS * sizeof(double);
}

/* Of an array on the device, to the host. */
static void
sum_and_deliver(cuda_queue *q, double *sumsq, const void *x, spw_dtype type, uint64_t n)
{
    double *reach = (double *)spw__cuda_reach(sumsq);
    double *sums = reach != NULL ? reach : (double *)spw__cuda_scratch(q, sum_bytes_of(n));
    if (sums == NULL)
        return;
    sum_squares(q, sums, type, x, type, n);
    if (reach == NULL)
        spw__cuda_deliver(q, sumsq, sums, sum_bytes_of(n));
}

cudaError_t
spw__cuda_follow(cudaStream_t later, cudaEvent_t by, cudaStream_t earlier)
{
    cudaError_t e = cudaEventRecord(by, earlier);
    return e == cudaSuccess ? cudaStreamWaitEvent(later, by, 0) : e;
}

/* Made when a copy first has several pieces: streams share the few queues of the hardware, and then wait for each other. */
static bool
open_link(cuda_queue *q)
{
    int low = 0, high = 0;
    cudaError_t e = cudaSuccess;
    if (q->link != NULL)
        return true;
    for (int i = 0; e == cudaSuccess && i < 2; i++) {
        e = cudaEventCreateWithFlags(&q->linked[i], cudaEventDisableTiming);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&q->converted[i], cudaEventDisableTiming);
    }
    (void)cudaDeviceGetStreamPriorityRange(&low, &high);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&q->link, cudaStreamNonBlocking, high);
    return spw__cuda_ok(q->gpu, spw__cuda_refused(e), "a stream for copies");
}

/* Before the first piece the link follows all that the queue has; from the third on, what made its half free. */
void *
spw__cuda_fetch(cuda_queue *q, uint64_t k, uint64_t pieces, uint64_t piece_bytes, const void *src, uint64_t bytes)
{
    char *staging = (char *)spw__cuda_scratch(q, pieces > 1 ? 2 * piece_bytes : piece_bytes);
    cudaError_t e = cudaSuccess;
    cudaStream_t link;
    if (staging == NULL || (pieces > 1 && !open_link(q)))
        return NULL;
    link = pieces > 1 ? q->link : q->stream;
    staging += k % 2 * piece_bytes;
    if (k == 0 && pieces > 1)
        e = spw__cuda_follow(link, q->converted[1], q->stream);
    else if (k > 1)
        e = cudaStreamWaitEvent(link, q->converted[k % 2], 0);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(staging, src, bytes, cudaMemcpyDefault, link);
    if (e == cudaSuccess && pieces > 1)
        e = spw__cuda_follow(q->stream, q->linked[k % 2], link);
    return spw__cuda_ok(q->gpu, e, "copy") ? staging : NULL;
}

void
spw__cuda_release(cuda_queue *q, uint64_t k)
{
    if (q->link != NULL)
        (void)spw__cuda_ok(q->gpu, cudaEventRecord(q->converted[k % 2], q->stream), "copy");
}

void
spw__cuda_copy_h2d(spw_gpu_queue *queue, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint32_t dst_bytes = spw_dtype_bytes(dst_type), src_bytes = spw_dtype_bytes(src_type);
    uint64_t piece = n < PIECE_BYTES / src_bytes ? n : PIECE_BYTES / src_bytes, pieces;
    if (n == 0)
        return;
    if (dst_type == src_type) {
        (void)spw__cuda_ok(q->gpu, cudaMemcpyAsync(dst, src, n * dst_bytes, cudaMemcpyDefault, q->stream), "copy");
        return;
    }
    pieces = (n + piece - 1) / piece;
    for (uint64_t k = 0; k < pieces; k++) {
        uint64_t first = k * piece, m = n - first < piece ? n - first : piece;
        const void *staged =
            spw__cuda_fetch(q, k, pieces, piece * src_bytes, (const char *)src + first * src_bytes, m * src_bytes);
        if (staged == NULL)
            return;
        convert(q, (char *)dst + first * dst_bytes, dst_type, staged, src_type, m);
        spw__cuda_release(q, k);
    }
}

/* Pieces through staging memory (2, piece), converted in the queue's stream. */
static bool
send_converted(cuda_queue *q, char *staging, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type,
               uint64_t n, uint64_t piece)
{
    uint32_t dst_bytes = spw_dtype_bytes(dst_type), src_bytes = spw_dtype_bytes(src_type);
    cudaError_t e = cudaSuccess;
    cudaStream_t link;
    if (piece < n && !open_link(q))
        return false;
    link = piece < n ? q->link : q->stream;
    for (uint64_t k = 0, first = 0; first < n && e == cudaSuccess; k++, first += piece) {
        uint64_t m = n - first < piece ? n - first : piece;
        char *half = staging + k % 2 * piece * dst_bytes;
        if (k > 1)
            e = cudaStreamWaitEvent(q->stream, q->linked[k % 2], 0);
        convert(q, half, dst_type, (const char *)src + first * src_bytes, src_type, m);
        if (e == cudaSuccess && piece < n)
            e = spw__cuda_follow(link, q->converted[k % 2], q->stream);
        if (e == cudaSuccess)
            e = cudaMemcpyAsync((char *)dst + first * dst_bytes, half, m * dst_bytes, cudaMemcpyDefault, link);
        if (e == cudaSuccess && piece < n)
            e = cudaEventRecord(q->linked[k % 2], link);
        if (e == cudaSuccess && piece < n && first + m == n)
            e = cudaStreamWaitEvent(q->stream, q->linked[k % 2], 0); /* and so after all pieces */
    }
    return spw__cuda_ok(q->gpu, e, "copy");
}

/*
 * All sums at once, before the first piece: what a piece costs besides its bytes, a launch, and host functions above all, is time
 * in which the link does nothing. Those that kernels do not reach leave at the end, when nothing waits behind them.
 */
void
spw__cuda_copy_d2h(spw_gpu_queue *queue, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n,
                   double *sumsq)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint32_t dst_bytes = spw_dtype_bytes(dst_type);
    bool converts = dst_type != src_type;
    uint64_t piece = converts && n > PIECE_BYTES / dst_bytes ? PIECE_BYTES / dst_bytes : n;
    double *sums = sumsq != NULL ? (double *)spw__cuda_reach(sumsq) : NULL;
    uint64_t sum_bytes = sumsq != NULL && sums == NULL ? sum_bytes_of(n) : 0, staging_at = spw_round_up(sum_bytes, 256);
    char *scratch = NULL;
    if (n == 0)
        return;
    if (converts || sum_bytes > 0) {
        scratch = (char *)spw__cuda_scratch(q, staging_at + (converts ? (piece < n ? 2 : 1) * piece * dst_bytes : 0));
        if (scratch == NULL)
            return;
    }
    if (sumsq != NULL)
        sum_squares(q, sums != NULL ? sums : (double *)scratch, dst_type, src, src_type, n);
    if (converts
            ? !send_converted(q, scratch + staging_at, dst, dst_type, src, src_type, n, piece)
            : !spw__cuda_ok(q->gpu, cudaMemcpyAsync(dst, src, n * dst_bytes, cudaMemcpyDefault, q->stream), "copy"))
        return;
    if (sum_bytes > 0)
        spw__cuda_deliver(q, sumsq, scratch, sum_bytes);
}

void
spw__cuda_copy_d2d(spw_gpu_queue *queue, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n,
                   double *sumsq)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (n == 0)
        return;
    if (dst_type != src_type)
        convert(q, dst, dst_type, src, src_type, n);
    else
        (void)spw__cuda_ok(
            q->gpu, cudaMemcpyAsync(dst, src, n * spw_dtype_bytes(dst_type), cudaMemcpyDefault, q->stream), "copy");
    if (sumsq != NULL)
        sum_and_deliver(q, sumsq, dst, dst_type, n);
}

void
spw__cuda_zero(spw_gpu_queue *queue, void *p, uint64_t bytes)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (bytes > 0)
        (void)spw__cuda_ok(q->gpu, cudaMemsetAsync(p, 0, bytes, q->stream), "zero");
}

void
spw__cuda_sumsq(spw_gpu_queue *queue, double *out, const float *x, uint64_t n)
{
    if (n > 0)
        sum_and_deliver(spw__cuda_queue_of(queue), out, x, SPW_F32, n);
}
