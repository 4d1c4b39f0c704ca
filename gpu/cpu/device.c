/*
 * The cpu device: memory under a limit, a compute queue that works in the calling thread and the device's others, and copy queues
 * with a thread, helpers and a fixed ring of commands each, so that the engine sees the same order of events as with a real
 * accelerator.
 */
#include "cpu_internal.h"
#include "quant.h"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include <pthread.h>
#include <stdio.h>

/* ---------------------------------------------------------------- the device and its memory */

static void
describe(cpu_gpu *gpu, const char *core)
{
    char line[256], model[96] = "CPU";
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "model name : %95[^\n]", model) == 1)
            break;
    }
    if (f != NULL)
        fclose(f);
    snprintf(gpu->description, sizeof gpu->description, "%s, %u threads, %s, OpenBLAS for %s", model,
             gpu->info.thread_count, spw_isa_name(spw_cpu_isa()), core);
}

static spw_status
cpu_open(spw_gpu **out, const spw_gpu_options *options, uint32_t device_idx, spw_error *err)
{
    spw_isa isa = spw_cpu_isa();
    spw_status st;
    cpu_gpu *gpu = spw_mem_zalloc(sizeof *gpu);
    (void)device_idx;
    *out = NULL;
    if (gpu == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device");
    gpu->base.calls = &spw__cpu_calls;
    pthread_mutex_init(&gpu->memory_lock, NULL);
    st = spw_pool_create(&gpu->pool, options->thread_count, "spw-compute", err);
    if (st == SPW_OK && options->topology != NULL && options->pin_threads)
        st = spw_pool_seat(gpu->pool, options->topology, err);
    if (st != SPW_OK) {
        spw_pool_destroy(gpu->pool);
        pthread_mutex_destroy(&gpu->memory_lock);
        spw_mem_free(gpu);
        return st;
    }
    if (options->topology != NULL)
        (void)spw_topology_nodes(options->topology, &gpu->nodes);
    gpu->kernels = isa == SPW_ISA_AVX512 ? &spw__cpu_kernels_avx512
                   : isa == SPW_ISA_AVX2 ? &spw__cpu_kernels_avx2
                                         : &spw__cpu_kernels_scalar;
    gpu->info = (spw_gpu_info){.name = "cpu",
                               .link = "",
                               .description = gpu->description,
                               .compute_dtype = SPW_F32,
                               .host_addressable = true,
                               .memory_bytes = options->memory_bytes > 0 ? options->memory_bytes : UINT64_MAX,
                               .thread_count = spw_pool_threads(gpu->pool),
                               .loss_rows = 256,
                               .fp8 = true};
    describe(gpu, spw__cpu_gemm_open());
    *out = &gpu->base;
    return SPW_OK;
}

void
spw__cpu_close(spw_gpu *device)
{
    cpu_gpu *gpu = (cpu_gpu *)device;
    SPW_ASSERT(gpu->bytes_live == 0);
    spw_pool_destroy(gpu->pool);
    pthread_mutex_destroy(&gpu->memory_lock);
    spw_mem_free(gpu);
}

const spw_gpu_info *
spw__cpu_get_info(const spw_gpu *gpu)
{
    return &((const cpu_gpu *)gpu)->info;
}

spw_status
spw__cpu_check(spw_gpu *gpu, spw_error *err)
{
    (void)gpu;
    (void)err;
    return SPW_OK; /* operations on the cpu cannot fail by themselves */
}

spw_status
spw__cpu_alloc(spw_gpu *device, void **out, uint64_t bytes, spw_error *err)
{
    cpu_gpu *gpu = (cpu_gpu *)device;
    uint64_t need = spw_round_up(bytes > 0 ? bytes : 1, 4096), limit = gpu->info.memory_bytes;
    cpu_memory *m;
    spw_status st = SPW_OK;
    *out = NULL;
    pthread_mutex_lock(&gpu->memory_lock);
    if (need < bytes || need > limit || gpu->bytes_live > limit - need)
        st = SPW_RAISE(err, SPW_ENOMEM, "device cpu: %llu bytes asked for, %llu of its limit of %llu in use",
                       (unsigned long long)bytes, (unsigned long long)gpu->bytes_live, (unsigned long long)limit);
    m = st == SPW_OK ? spw_mem_zalloc(sizeof *m) : NULL;
    if (st == SPW_OK)
        st = m != NULL ? spw_region_map_over(&m->region, need, 0, &gpu->nodes, err)
                       : SPW_RAISE(err, SPW_ENOMEM, "device cpu: %llu bytes", (unsigned long long)bytes);
    if (st == SPW_OK) {
        uint64_t live = gpu->bytes_live + need;
        m->bytes = need;
        m->next = gpu->memory;
        gpu->memory = m;
        __atomic_store_n(&gpu->bytes_live, live, __ATOMIC_RELAXED);
        if (live > gpu->bytes_peak)
            __atomic_store_n(&gpu->bytes_peak, live, __ATOMIC_RELAXED);
        *out = m->region.base;
    } else {
        spw_mem_free(m);
    }
    pthread_mutex_unlock(&gpu->memory_lock);
    return st;
}

void
spw__cpu_free(spw_gpu *device, void *p)
{
    cpu_gpu *gpu = (cpu_gpu *)device;
    cpu_memory **at = &gpu->memory, *m;
    if (p == NULL)
        return;
    pthread_mutex_lock(&gpu->memory_lock);
    while (*at != NULL && (*at)->region.base != p)
        at = &(*at)->next;
    m = *at;
    SPW_ASSERT(m != NULL);
    *at = m->next;
    __atomic_store_n(&gpu->bytes_live, gpu->bytes_live - m->bytes, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&gpu->memory_lock);
    spw_region_unmap(&m->region);
    spw_mem_free(m);
}

spw_status
spw__cpu_pin_host(spw_gpu *gpu, void *base, uint64_t bytes, spw_error *err)
{
    (void)gpu;
    (void)base;
    (void)bytes;
    (void)err;
    return SPW_OK; /* copies here are a thread's loads and stores */
}

void
spw__cpu_unpin_host(spw_gpu *gpu, void *base)
{
    (void)gpu;
    (void)base;
}

uint64_t
spw__cpu_bytes_live(const spw_gpu *gpu)
{
    return __atomic_load_n(&((const cpu_gpu *)gpu)->bytes_live, __ATOMIC_RELAXED);
}

uint64_t
spw__cpu_bytes_peak(const spw_gpu *gpu)
{
    return __atomic_load_n(&((const cpu_gpu *)gpu)->bytes_peak, __ATOMIC_RELAXED);
}

/* ---------------------------------------------------------------- queues and events */

typedef enum {
    CMD_COPY,
    CMD_ENCODE,
    CMD_DECODE,
    CMD_NOTIFY,
    CMD_RECORD,
    CMD_WAIT,
    CMD_SPAN_BEGIN,
    CMD_SPAN_END
} command_kind;

typedef struct command {
    command_kind kind;
    void *dst;
    const void *src;
    spw_dtype dst_type, src_type;
    spw_quant form;
    uint64_t n;
    double *sumsq;
    void (*fn)(void *arg);
    void *arg;
    const char *name;
    spw_gpu_span_fn span_fn;
    struct cpu_event *event;
    uint64_t mark;
} command;

enum { RING = 256 };

typedef struct cpu_event {
    spw_gpu_event base;
    pthread_mutex_t lock;
    pthread_cond_t passed;
    uint64_t marked, reached;
} cpu_event;

typedef struct cpu_queue {
    spw_gpu_queue base;
    cpu_gpu *gpu;
    spw_gpu_queue_kind kind;
    pthread_t thread;
    bool started;
    /* Of the thread that executes. */
    const char *span_name;
    uint64_t span_ns;
    spw_pool
        *copiers; /* a core alone does not fill the memory bus; NULL: the queue's thread copies by itself. A compute
                          queue's are the device's, whose thread it works in */
    const command *copying; /* under way */
    pthread_mutex_t lock;
    pthread_cond_t filled, drained;
    /* Under lock. */
    command ring[RING];
    uint64_t head, tail; /* commands taken and finished; commands submitted */
    bool stop;
} cpu_queue;

/* Elements of a copy that one thread does at a time; whole blocks of sums. */
enum { PIECE = 1 << 17, BLOCK = 4096, COPY_THREADS = 4 };

/* Of a copy queue, its own included. */
static uint32_t
copy_threads(uint32_t compute_threads)
{
    return compute_threads < COPY_THREADS ? compute_threads : COPY_THREADS;
}

uint64_t
spw__cpu_work_bytes(const spw_gpu *gpu)
{
    uint32_t threads = ((const cpu_gpu *)gpu)->info.thread_count, queues = 2 * copy_threads(threads);
    return (threads + queues) * spw_touched_bytes(SPW_STACK_BYTES) + 2 * sizeof(cpu_queue);
}

/* Past the caches: nobody reads a gradient before its update, and memory that is about to be written need not be fetched first. */
static void
copy_past(float *dst, const float *src, uint64_t n)
{
    uint64_t i = 0;
#if defined(__x86_64__)
    for (; (uintptr_t)dst % 16 == 0 && i + 16 <= n; i += 16)
        for (uint64_t k = i; k < i + 16; k += 4)
            _mm_stream_ps(dst + k, _mm_loadu_ps(src + k));
    _mm_sfence(); /* before somebody is told that it is there */
#endif
    memcpy(dst + i, src + i, (n - i) * sizeof *dst);
}

static void
copy_block(const command *c, const cpu_kernels *k, uint64_t first, uint64_t n)
{
    char *dst = (char *)c->dst + first * spw_dtype_bytes(c->dst_type);
    const char *src = (const char *)c->src + first * spw_dtype_bytes(c->src_type);
    if (c->sumsq != NULL && c->dst_type == SPW_F32 && c->src_type == SPW_F32) {
        copy_past((float *)(void *)dst, (const float *)(const void *)src, n);
        c->sumsq[first / BLOCK] = k->sumsq((const float *)(const void *)src, n);
        return;
    }
    spw_convert(dst, c->dst_type, src, c->src_type, n);
    if (c->sumsq != NULL) { /* of what arrives, rounded */
        float wide[BLOCK];
        spw_convert(wide, SPW_F32, dst, c->dst_type, n);
        c->sumsq[first / BLOCK] = k->sumsq(wide, n);
    }
}

/* Sums are taken while a block is in the core's cache: no byte comes from memory twice. */
static void
copy_piece(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const cpu_queue *q = ctx;
    const command *c = q->copying;
    uint64_t first = (uint64_t)part_idx * PIECE, end = c->n - first < PIECE ? c->n : first + PIECE;
    uint64_t step = c->sumsq != NULL ? BLOCK : PIECE;
    (void)worker_idx;
    for (; first < end; first += step)
        copy_block(c, q->gpu->kernels, first, end - first < step ? end - first : step);
}

/* Codes are cut between blocks or strips, each of which has its own scales: the bytes are those of one thread. */
static uint64_t
piece_of(const command *c)
{
    return c->kind == CMD_COPY ? PIECE : spw_round_up(PIECE, spw_codes_unit(c->form));
}

static void
code_piece(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const command *c = ((const cpu_queue *)ctx)->copying;
    const spw_quant kind = c->form;
    uint64_t each = piece_of(c), first = part_idx * each, n = c->n - first < each ? c->n - first : each;
    uint64_t coded = spw__quant_bytes(kind, first);
    (void)worker_idx;
    if (c->kind == CMD_ENCODE)
        spw__quant_encode((char *)c->dst + coded, kind, (const char *)c->src + first * spw_dtype_bytes(c->src_type),
                          c->src_type, n);
    else
        spw__quant_decode((char *)c->dst + first * spw_dtype_bytes(c->dst_type), c->dst_type,
                          (const char *)c->src + coded, kind, n);
}

static void
run_pieces(cpu_queue *q, const command *c, spw_pool_fn piece)
{
    q->copying = c;
    spw_pool_run(q->copiers, (uint32_t)((c->n + piece_of(c) - 1) / piece_of(c)), piece, q);
}

static void
reach(cpu_event *event, uint64_t mark)
{
    pthread_mutex_lock(&event->lock);
    if (mark > event->reached)
        event->reached = mark;
    pthread_cond_broadcast(&event->passed);
    pthread_mutex_unlock(&event->lock);
}

static void
await(cpu_event *event, uint64_t mark)
{
    pthread_mutex_lock(&event->lock);
    while (event->reached < mark)
        pthread_cond_wait(&event->passed, &event->lock);
    pthread_mutex_unlock(&event->lock);
}

static void
execute(cpu_queue *q, const command *c)
{
    switch (c->kind) {
    case CMD_COPY: run_pieces(q, c, copy_piece); return;
    case CMD_ENCODE:
    case CMD_DECODE: run_pieces(q, c, code_piece); return;
    case CMD_NOTIFY: c->fn(c->arg); return;
    case CMD_RECORD: reach(c->event, c->mark); return;
    case CMD_WAIT: await(c->event, c->mark); return;
    case CMD_SPAN_BEGIN:
        q->span_name = c->name;
        q->span_ns = spw_now_ns();
        return;
    case CMD_SPAN_END: c->span_fn(c->arg, q->span_name, c->n, q->span_ns, spw_now_ns()); return;
    }
}

static void *
queue_main(void *arg)
{
    cpu_queue *q = arg;
    (void)pthread_setname_np(pthread_self(), q->kind == SPW_QUEUE_H2D ? "spw-h2d" : "spw-d2h");
    spw_thread_be_prompt();
    pthread_mutex_lock(&q->lock);
    for (;;) {
        command c;
        while (q->head == q->tail && !q->stop)
            pthread_cond_wait(&q->filled, &q->lock);
        if (q->head == q->tail)
            break;
        c = q->ring[q->head % RING];
        pthread_mutex_unlock(&q->lock);
        execute(q, &c);
        pthread_mutex_lock(&q->lock);
        q->head++;
        pthread_cond_broadcast(&q->drained);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

spw_status
spw__cpu_queue_create(spw_gpu_queue **out, spw_gpu *gpu, spw_gpu_queue_kind kind, spw_error *err)
{
    cpu_queue *q = spw_mem_zalloc(sizeof *q);
    *out = NULL;
    if (q == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device queue");
    q->base.calls = gpu->calls;
    q->gpu = (cpu_gpu *)gpu;
    q->kind = kind;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->filled, NULL);
    pthread_cond_init(&q->drained, NULL);
    if (kind == SPW_QUEUE_COMPUTE) {
        q->copiers = q->gpu->pool;
    } else {
        uint32_t threads = copy_threads(q->gpu->info.thread_count);
        spw_status st = threads > 1 ? spw_pool_create(&q->copiers, threads, "spw-copy", err) : SPW_OK;
        int rc;
        if (st != SPW_OK) {
            spw__cpu_queue_destroy(&q->base);
            return st;
        }
        rc = pthread_create(&q->thread, NULL, queue_main, q);
        if (rc != 0) {
            spw__cpu_queue_destroy(&q->base);
            return SPW_RAISE_SYS(err, rc, "start of a copy thread " SPW_THREAD_LIMITS);
        }
        q->started = true;
    }
    *out = &q->base;
    return SPW_OK;
}

void
spw__cpu_queue_destroy(spw_gpu_queue *queue)
{
    cpu_queue *q = (cpu_queue *)queue;
    if (q->started) {
        pthread_mutex_lock(&q->lock);
        q->stop = true;
        pthread_cond_broadcast(&q->filled);
        pthread_mutex_unlock(&q->lock);
        pthread_join(q->thread, NULL);
    }
    if (q->kind != SPW_QUEUE_COMPUTE)
        spw_pool_destroy(q->copiers);
    pthread_cond_destroy(&q->filled);
    pthread_cond_destroy(&q->drained);
    pthread_mutex_destroy(&q->lock);
    spw_mem_free(q);
}

static void
enqueue(cpu_queue *q, const command *c)
{
    if (q->kind == SPW_QUEUE_COMPUTE) {
        execute(q, c);
        return;
    }
    pthread_mutex_lock(&q->lock);
    while (q->tail - q->head == RING)
        pthread_cond_wait(&q->drained, &q->lock);
    q->ring[q->tail++ % RING] = *c;
    pthread_cond_signal(&q->filled);
    pthread_mutex_unlock(&q->lock);
}

void
spw__cpu_queue_sync(spw_gpu_queue *queue)
{
    cpu_queue *q = (cpu_queue *)queue;
    uint64_t until;
    pthread_mutex_lock(&q->lock);
    until = q->tail;
    while (q->head < until)
        pthread_cond_wait(&q->drained, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

void
spw__cpu_queue_notify(spw_gpu_queue *q, void (*fn)(void *arg), void *arg)
{
    enqueue((cpu_queue *)q, &(command){.kind = CMD_NOTIFY, .fn = fn, .arg = arg});
}

void
spw__cpu_span_begin(spw_gpu_queue *q, const char *name)
{
    enqueue((cpu_queue *)q, &(command){.kind = CMD_SPAN_BEGIN, .name = name});
}

void
spw__cpu_span_end(spw_gpu_queue *q, uint64_t tag, spw_gpu_span_fn fn, void *arg)
{
    enqueue((cpu_queue *)q, &(command){.kind = CMD_SPAN_END, .n = tag, .span_fn = fn, .arg = arg});
}

spw_status
spw__cpu_event_create(spw_gpu_event **out, spw_gpu *gpu, spw_error *err)
{
    cpu_event *event = spw_mem_zalloc(sizeof *event);
    *out = NULL;
    if (event == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device event");
    event->base.calls = gpu->calls;
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->passed, NULL);
    *out = &event->base;
    return SPW_OK;
}

void
spw__cpu_event_destroy(spw_gpu_event *base)
{
    cpu_event *event = (cpu_event *)base;
    pthread_cond_destroy(&event->passed);
    pthread_mutex_destroy(&event->lock);
    spw_mem_free(event);
}

static uint64_t
last_mark(cpu_event *event, bool new_mark)
{
    uint64_t mark;
    pthread_mutex_lock(&event->lock);
    mark = event->marked += new_mark;
    pthread_mutex_unlock(&event->lock);
    return mark;
}

void
spw__cpu_event_record(spw_gpu_event *event, spw_gpu_queue *q)
{
    enqueue((cpu_queue *)q,
            &(command){.kind = CMD_RECORD, .event = (cpu_event *)event, .mark = last_mark((cpu_event *)event, true)});
}

void
spw__cpu_event_wait(spw_gpu_event *event, spw_gpu_queue *q)
{
    enqueue((cpu_queue *)q,
            &(command){.kind = CMD_WAIT, .event = (cpu_event *)event, .mark = last_mark((cpu_event *)event, false)});
}

void
spw__cpu_event_sync(spw_gpu_event *event)
{
    await((cpu_event *)event, last_mark((cpu_event *)event, false));
}

void
spw__cpu_copy_h2d(spw_gpu_queue *q, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n)
{
    spw__cpu_copy_d2d(q, dst, dst_type, src, src_type, n, NULL);
}

void
spw__cpu_copy_d2h(spw_gpu_queue *q, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n,
                  double *sumsq)
{
    spw__cpu_copy_d2d(q, dst, dst_type, src, src_type, n, sumsq);
}

void
spw__cpu_copy_d2d(spw_gpu_queue *q, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n,
                  double *sumsq)
{
    enqueue((cpu_queue *)q, &(command){.kind = CMD_COPY,
                                       .dst = dst,
                                       .src = src,
                                       .dst_type = dst_type,
                                       .src_type = src_type,
                                       .n = n,
                                       .sumsq = sumsq});
}

void
spw__cpu_encode(spw_gpu_queue *q, void *codes, spw_quant form, const void *src, spw_dtype type, uint64_t n)
{
    enqueue((cpu_queue *)q,
            &(command){.kind = CMD_ENCODE, .dst = codes, .src = src, .src_type = type, .form = form, .n = n});
}

void
spw__cpu_decode(spw_gpu_queue *q, void *dst, spw_dtype type, const void *codes, spw_quant form, uint64_t n)
{
    enqueue((cpu_queue *)q,
            &(command){.kind = CMD_DECODE, .dst = dst, .src = codes, .dst_type = type, .form = form, .n = n});
}

void
spw__cpu_decode_h2d(spw_gpu_queue *q, void *dst, spw_dtype type, const void *codes, spw_quant form, uint64_t n)
{
    spw__cpu_decode(q, dst, type, codes, form, n);
}

void
spw__cpu_write_bytes(spw_gpu_queue *q, void *dst, const void *src, uint64_t bytes)
{
    spw__cpu_queue_sync(q);
    memcpy(dst, src, bytes);
}

void
spw__cpu_read_bytes(spw_gpu_queue *q, void *dst, const void *src, uint64_t bytes)
{
    spw__cpu_queue_sync(q);
    memcpy(dst, src, bytes);
}

const cpu_kernels *
spw__cpu_kernels(const spw_gpu_queue *q)
{
    return ((const cpu_queue *)q)->gpu->kernels;
}

void
spw__cpu_run(spw_gpu_queue *q, uint32_t part_count, spw_pool_fn fn, void *ctx)
{
    SPW_ASSERT(((cpu_queue *)q)->kind == SPW_QUEUE_COMPUTE);
    spw_pool_run(((cpu_queue *)q)->gpu->pool, part_count, fn, ctx);
}

uint32_t
spw__cpu_parts(uint64_t n, uint64_t grain)
{
    uint64_t parts = (n + grain / 2) / grain;
    return parts < 1 ? 1 : parts > 4096 ? 4096 : (uint32_t)parts;
}

const spw_gpu_calls spw__cpu_calls = {.abi = SPW_GPU_ABI,
                                      .open = cpu_open,
#define X(name) .name = spw__cpu_##name,
                                      SPW_GPU_CALLS(X)
#undef X
};

/* ---------------------------------------------------------------- links: ranks share this device's memory instead */

spw_status
spw__cpu_link_probe(spw_gpu *gpu, spw_error *err)
{
    (void)gpu;
    return SPW_RAISE(err, SPW_EUNSUPPORTED, "the cpu device has no links: ranks share its memory");
}

spw_status
spw__cpu_link_id(spw_gpu *gpu, unsigned char *id, spw_error *err)
{
    (void)id;
    return spw__cpu_link_probe(gpu, err);
}

spw_status
spw__cpu_link_create(spw_gpu_link **out, spw_gpu *gpu, const unsigned char *id, uint32_t rank, uint32_t world,
                     spw_gpu_going going, void *ctx, spw_error *err)
{
    (void)id;
    (void)rank;
    (void)world;
    (void)going;
    (void)ctx;
    *out = NULL;
    return spw__cpu_link_probe(gpu, err);
}
