/*
 * Measures what the plan needs to predict seconds: disks, copies, optimizer, matrix products, each with the code that
 * trains, in about a quarter of a second each. What was measured before comes from the cache (rate_cache.c); everything
 * taken is given back. The planner (predict.c) only sees the numbers.
 */
#include "runtime_internal.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { STATE_BYTES = 128 << 20 /* more than caches hold: chunks come from memory, and transfers go there */ };
enum { FILE_BYTES = 64 << 20, BLOCK_MAX = 4 << 20, INFLIGHT_MAX = 32 << 20, GEMM_MAX = 1024, GEMM_MAX_APART = 4096 };
static const uint64_t LOOP_NS = 150000000, DISK_NS = 250000000; /* disks waver more */

typedef struct calibration {
    const spw_config *config;
    const spw_plan *plan;
    spw_calibrate_mode mode;
    spw_calibration *report;
    rate_cache *cache;
    int64_t now_s;
    char machine[320];
    uint32_t threads;
} calibration;

/* ---------------------------------------------------------------- disks */

static spw_status
measure_path(const calibration *c, const char *dir, double rates[3], spw_error *err)
{
    spw_aio_options aio = {.backend = c->config->aio.backend,
                           .block_bytes = 4096,
                           .queue_depth = c->config->aio.queue_depth,
                           .thread_count = c->config->aio.thread_count,
                           .single_submit = c->config->aio.single_submit,
                           .lockstep = !c->config->aio.overlap_events,
                           .sqpoll = c->config->aio.sqpoll,
                           .iopoll = c->config->aio.iopoll};
    static const spw_aio_pattern patterns[3] = {SPW_AIO_PATTERN_READ, SPW_AIO_PATTERN_WRITE, SPW_AIO_PATTERN_MIXED};
    spw_aio_bench *bench = NULL;
    struct statvfs fs;
    spw_status st;
    if (statvfs(dir, &fs) != 0)
        return SPW_RAISE_SYS(err, errno, "%s", dir);
    if ((double)fs.f_bavail * (double)fs.f_frsize < 2.0 * FILE_BYTES)
        return SPW_RAISE(err, SPW_ENOSPC, "%s has too little free space to be measured", dir);
    while (aio.block_bytes < BLOCK_MAX && aio.block_bytes * 2 <= c->config->aio.block_size)
        aio.block_bytes *= 2; /* the measuring loop wants a power of two */
    if (aio.queue_depth > INFLIGHT_MAX / aio.block_bytes)
        aio.queue_depth = (uint32_t)(INFLIGHT_MAX / aio.block_bytes);
    st = spw_aio_bench_open(
        &bench, &(spw_aio_bench_options){.dirs = &dir, .dir_count = 1, .file_bytes = FILE_BYTES, .aio = &aio}, err);
    for (int i = 0; i < 3 && st == SPW_OK; i++) {
        spw_aio_bench_run run = {
            .pattern = patterns[i], .aio = &aio, .duration_ns = DISK_NS, .dir_count = 1, .memory_bytes = STATE_BYTES};
        spw_aio_bench_result result;
        st = spw_aio_bench_measure(bench, &run, &result, err);
        if (st == SPW_OK)
            rates[i] = result.gb_s * 1e9;
    }
    spw_aio_bench_close(bench);
    return st;
}

/* ---------------------------------------------------------------- compute and copies */

static spw_status
open_gpu(const calibration *c, spw_gpu **gpu, spw_error *err)
{
    return spw_gpu_open(gpu,
                        &(spw_gpu_options){.name = c->config->run.device,
                                           .thread_count = c->config->run.compute_threads,
                                           .compute_dtype = spw__config_compute(c->config)},
                        err);
}

/* Calls between two waits: a device that works by itself would rest for longer than a call takes. */
static uint32_t
calls_at_once(spw_gpu *gpu)
{
    return spw_gpu_get_info(gpu)->host_addressable ? 1 : 16;
}

/* Numbers that look like activations: zeros take less power, and a GPU is faster with them. */
static spw_status
fill_drawn(spw_gpu *gpu, spw_gpu_queue *q, void *device, uint64_t elems, spw_error *err)
{
    spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    spw_region host = {0};
    char *narrow;
    SPW_TRY(spw_region_map(&host, 2 * elems * sizeof(float), 0, err));
    narrow = (char *)host.base + elems * sizeof(float);
    for (uint64_t i = 0; i < elems; i++)
        ((float *)host.base)[i] = (float)((int32_t)((uint32_t)i * 2654435761u) >> 8) * 0x1p-24f;
    spw_convert(narrow, type, host.base, SPW_F32, elems);
    spw_gpu_copy_h2d(q, device, type, narrow, type, elems);
    spw_gpu_queue_sync(q);
    spw_region_unmap(&host);
    return spw_gpu_check(gpu, err);
}

/* What a device does for a while: its memory, filled, and what is called again and again. */
enum { TRIAL_MAX = 9 };
typedef struct trial {
    spw_gpu *gpu;
    spw_gpu_queue *q;
    spw_dtype type; /* that it computes in */
    void *a[TRIAL_MAX];
    uint64_t M, N, K; /* of a product; rows and columns of a matrix */
    spw_attention_shape shape;
} trial;

static spw_status
trial_open(trial *t, const calibration *c, spw_error *err)
{
    *t = (trial){0};
    SPW_TRY(open_gpu(c, &t->gpu, err));
    t->type = spw_gpu_get_info(t->gpu)->compute_dtype;
    return spw_gpu_queue_create(&t->q, t->gpu, SPW_QUEUE_COMPUTE, err);
}

static void
trial_close(trial *t)
{
    for (int i = 0; i < TRIAL_MAX && t->gpu != NULL; i++)
        spw_gpu_free(t->gpu, t->a[i]);
    spw_gpu_queue_destroy(t->q);
    spw_gpu_close(t->gpu);
}

/* Of what a device that is in the host's memory, or one that is not, can do in the time. */
static uint64_t
at_most(const trial *t, uint64_t wanted, uint64_t here, uint64_t apart)
{
    const uint64_t most = spw_gpu_get_info(t->gpu)->host_addressable ? here : apart;
    return wanted == 0 || wanted > most ? most : wanted;
}

static spw_status
take_drawn(trial *t, int i, uint64_t elems, spw_error *err)
{
    SPW_TRY(spw_gpu_alloc(t->gpu, &t->a[i], elems * spw_dtype_bytes(t->type), err));
    return fill_drawn(t->gpu, t->q, t->a[i], elems, err);
}

/* Calls in a second, at_once of them between two waits; the first are not counted. */
static spw_status
time_trial(trial *t, void (*call)(const trial *t), uint32_t at_once, double *rate, spw_error *err)
{
    for (int warm = 1; warm >= 0; warm--) {
        const uint64_t begin = spw_now_ns();
        uint64_t count = 0;
        do {
            for (uint32_t i = 0; i < at_once; i++, count++)
                call(t);
            spw_gpu_queue_sync(t->q);
        } while (!warm && spw_now_ns() - begin < LOOP_NS);
        *rate = (double)count / ((double)(spw_now_ns() - begin) * 1e-9);
    }
    return spw_gpu_check(t->gpu, err);
}

static void
call_product(const trial *t)
{
    spw_gpu_linear(t->q, t->a[2], t->a[0], t->a[1], NULL, t->M, t->N, t->K, 0);
}

static void
call_orthogonal(const trial *t)
{
    spw_gpu_orthogonalize(t->q, t->type, t->a[0], t->a[1], t->M, t->N, 1 / (float)t->M, 5, 1);
}

enum { ATTENTION_MAX = 512, ATTENTION_MAX_APART = 4096 };
enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE };

static void
call_attention(const trial *t)
{
    void *const *a = t->a;
    spw_gpu_attention(t->q, a[OUT], a[LSE], a[Q], a[K], a[V], &t->shape);
    spw_gpu_attention_backward(t->q, a[DQ], a[DK], a[DV], NULL, a[DOUT], a[OUT], a[LSE], a[Q], a[K], a[V], &t->shape);
}

/* A product of the size of a micro-batch with a matrix of the model's. */
static spw_status
measure_compute(const calibration *c, const char *unused, double rates[1], spw_error *err)
{
    trial t;
    spw_status st = trial_open(&t, c, err);
    (void)unused;
    if (st == SPW_OK) {
        t.K = at_most(&t, c->config->model.width, GEMM_MAX, GEMM_MAX_APART);
        t.M = at_most(&t, c->config->micro_batch * c->config->data.seq_length, GEMM_MAX, GEMM_MAX_APART);
        t.N = at_most(&t, 4 * t.K, 2 * GEMM_MAX, 2 * GEMM_MAX_APART);
        st = take_drawn(&t, 0, t.M * t.K, err);
    }
    if (st == SPW_OK)
        st = take_drawn(&t, 1, t.N * t.K, err);
    if (st == SPW_OK)
        st = spw_gpu_alloc(t.gpu, &t.a[2], t.M * t.N * spw_dtype_bytes(t.type), err);
    if (st == SPW_OK)
        st = time_trial(&t, call_product, calls_at_once(t.gpu), &rates[0], err);
    if (st == SPW_OK)
        rates[0] *= 2.0 * (double)(t.M * t.N * t.K);
    trial_close(&t);
    return st;
}

/* Of Muon: a matrix of the model's width, as far as that goes, on its way to be orthogonal. */
static spw_status
measure_orthogonal(const calibration *c, const char *unused, double rates[1], spw_error *err)
{
    trial t;
    spw_status st = trial_open(&t, c, err);
    (void)unused;
    if (st == SPW_OK) {
        t.M = at_most(&t, c->config->model.width, GEMM_MAX, GEMM_MAX_APART);
        t.N = 2 * t.M;
        st = take_drawn(&t, 0, t.M * t.N, err);
    }
    if (st == SPW_OK)
        st = spw_gpu_alloc(t.gpu, &t.a[1], spw_gpu_orthogonal_bytes(t.type, t.M, t.N), err);
    if (st == SPW_OK)
        st = time_trial(&t, call_orthogonal, 1, &rates[0], err);
    if (st == SPW_OK)
        rates[0] *= spw_gpu_orthogonal_flops(t.M, t.N, 5);
    trial_close(&t);
    return st;
}

/* One sequence, as far as that goes, of the model's heads, forward and backward. */
static spw_status
measure_attention(const calibration *c, const char *unused, double rates[1], spw_error *err)
{
    const spw_model_config *m = &c->config->model;
    trial t;
    spw_attention_shape *s = &t.shape;
    spw_status st = trial_open(&t, c, err);
    (void)unused;
    if (st == SPW_OK) {
        *s = (spw_attention_shape){.B = 1,
                                   .T = at_most(&t, c->config->data.seq_length, ATTENTION_MAX, ATTENTION_MAX_APART),
                                   .Hq = m->heads,
                                   .Hk = m->kv_heads > 0 ? m->kv_heads : m->heads,
                                   .D = spw_model_head_dim(m, 0)};
        s->q_stride = s->Hq * s->D;
        s->kv_stride = s->Hk * s->D;
        s->scale = 1 / sqrtf((float)s->D);
        st = spw_gpu_alloc(t.gpu, &t.a[LSE], s->T * s->Hq * sizeof(float), err);
    }
    for (int i = 0; i < LSE && st == SPW_OK; i++)
        st = take_drawn(&t, i, s->T * (i == K || i == V || i == DK || i == DV ? s->kv_stride : s->q_stride), err);
    if (st == SPW_OK)
        st = time_trial(&t, call_attention, 1, &rates[0], err);
    if (st == SPW_OK) /* of the forward pass 2 products of half of T x T by D, and twice that */
        rates[0] *= 3.0 * 2 * (double)(s->T * s->T * s->Hq * s->D);
    trial_close(&t);
    return st;
}

/* Bytes per second on the host's side: weights in, gradients with their sums of squares out. */
static double
copy_rate(spw_gpu_queue *q, uint32_t at_once, bool in, void *host, void *device, spw_dtype host_type,
          spw_dtype device_type, uint64_t elems, double *sums)
{
    uint64_t begin = 0, count = 0;
    for (int warm = 1; warm >= 0; warm--) {
        begin = spw_now_ns();
        count = 0;
        do {
            for (uint32_t i = 0; i < at_once; i++, count++) {
                if (in)
                    spw_gpu_copy_h2d(q, device, device_type, host, host_type, elems);
                else
                    spw_gpu_copy_d2h(q, host, host_type, device, device_type, elems, sums);
            }
            spw_gpu_queue_sync(q);
        } while (!warm && spw_now_ns() - begin < LOOP_NS / 2);
    }
    return (double)(elems * spw_dtype_bytes(host_type) * count) / ((double)(spw_now_ns() - begin) * 1e-9);
}

static spw_status
measure_copies(const calibration *c, const char *unused, double rates[2], spw_error *err)
{
    const uint64_t elems = 4 << 20;
    spw_dtype weights = spw_state_weight_dtype(c->config->run.state_format);
    spw_region host = {0}, sums = {0};
    spw_gpu *gpu = NULL;
    spw_gpu_queue *in = NULL, *out = NULL;
    void *device = NULL;
    spw_status st = spw_region_map(&host, elems * 4, 0, err);
    (void)unused;
    if (st == SPW_OK)
        st = spw_region_map(&sums, elems / 4096 * sizeof(double), 0, err);
    if (st == SPW_OK)
        st = open_gpu(c, &gpu, err);
    if (st == SPW_OK)
        st = spw_gpu_queue_create(&in, gpu, SPW_QUEUE_H2D, err);
    if (st == SPW_OK)
        st = spw_gpu_queue_create(&out, gpu, SPW_QUEUE_D2H, err);
    if (st == SPW_OK)
        st = spw_gpu_alloc(gpu, &device, elems * 4, err);
    if (st == SPW_OK) {
        uint32_t at_once = calls_at_once(gpu);
        bool pinned = spw_gpu_pin_host(gpu, host.base, host.bytes, NULL) == SPW_OK;      /* as a store's memory is */
        bool sums_pinned = spw_gpu_pin_host(gpu, sums.base, sums.bytes, NULL) == SPW_OK; /* and an engine's sums */
        rates[0] =
            copy_rate(in, at_once, true, host.base, device, weights, spw_gpu_get_info(gpu)->compute_dtype, elems, NULL);
        rates[1] =
            copy_rate(out, at_once, false, host.base, device, c->config->run.grad_dtype, SPW_F32, elems, sums.base);
        if (pinned)
            spw_gpu_unpin_host(gpu, host.base);
        if (sums_pinned)
            spw_gpu_unpin_host(gpu, sums.base);
        st = spw_gpu_check(gpu, err);
    }
    spw_gpu_queue_destroy(in);
    spw_gpu_queue_destroy(out);
    spw_gpu_free(gpu, device);
    spw_gpu_close(gpu);
    spw_region_unmap(&host);
    spw_region_unmap(&sums);
    return st;
}

/* ---------------------------------------------------------------- the optimizer */

typedef struct update_job {
    char *base; /* parts of weights, record, gradient */
    uint64_t elems, part_bytes, grad_at, record_at;
    const spw_opt_coef *coef;
    spw_state_format format;
    spw_dtype grad_dtype;
} update_job;

enum { UPDATE_ELEMS_MAX = 1 << 20 };

static void
update_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const update_job *j = ctx;
    char *base = j->base + part_idx * j->part_bytes;
    spw_opt_chunk chunk = {.format = j->format,
                           .elems = j->elems,
                           .weights = base,
                           .record = base + j->record_at,
                           .grad = base + j->grad_at,
                           .grad_dtype = j->grad_dtype,
                           .first = part_idx * j->elems};
    spw_opt_range range = {j->elems, j->coef};
    double squares[UPDATE_ELEMS_MAX / 4096];
    (void)worker_idx;
    if (j->coef->optimizer == &spw_opt_muon) /* both halves */
        (void)spw_opt_momentum(&chunk, base + j->grad_at, &range, 1, squares);
    (void)spw_opt_step(&chunk, &range, 1);
}

static spw_status
measure_optimizer(const calibration *c, const char *unused, double rates[1], spw_error *err)
{
    const spw_config *cfg = c->config;
    const spw_optimizer *optimizer = spw_optimizer_find(cfg->optimizer.type[0] != '\0' ? cfg->optimizer.type : "AdamW");
    update_job j = {.elems = cfg->run.chunk_elems < UPDATE_ELEMS_MAX ? cfg->run.chunk_elems : UPDATE_ELEMS_MAX,
                    .format = cfg->run.state_format,
                    .grad_dtype = cfg->run.grad_dtype};
    spw_opt_hp hp = {.lr = 1e-4,
                     .beta1 = 0.9,
                     .beta2 = 0.95,
                     .eps = 1e-8,
                     .decoupled = true,
                     .bias_correction = true,
                     .momentum = 0.9,
                     .step = 1,
                     .grad_scale = 1};
    spw_region region = {0};
    spw_pool *pool = NULL;
    spw_opt_coef coef;
    uint64_t begin, count = 0, parts;
    spw_status st;
    (void)unused;
    if (optimizer == NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "there is no optimizer %s", cfg->optimizer.type);
    SPW_TRY(spw_opt_prepare(&coef, optimizer, &hp, err));
    j.coef = &coef;
    j.record_at = spw_round_up(j.elems * spw_state_weight_bytes(j.format), 4096);
    j.grad_at = j.record_at + spw_round_up(spw_state_record_bytes(j.format, optimizer, j.elems), 4096);
    j.part_bytes = j.grad_at + spw_round_up(j.elems * 4, 4096);
    parts = STATE_BYTES / j.part_bytes > c->threads ? STATE_BYTES / j.part_bytes / c->threads * c->threads : c->threads;
    st = spw_region_map(&region, j.part_bytes * parts, 0, err); /* zeros: a state like any other */
    if (st == SPW_OK)
        st = spw_pool_create(&pool, c->threads, "spw-measure", err);
    if (st == SPW_OK) {
        j.base = region.base;
        spw_pool_run(pool, (uint32_t)parts, update_part, &j); /* warm */
        for (begin = spw_now_ns(); spw_now_ns() - begin < LOOP_NS; count++)
            spw_pool_run(pool, (uint32_t)parts, update_part, &j);
        rates[0] = (double)(j.elems * parts * count) / ((double)(spw_now_ns() - begin) * 1e-9);
    }
    spw_pool_destroy(pool);
    spw_region_unmap(&region);
    return st;
}

/* ---------------------------------------------------------------- from the cache, or measured */

static void
describe_machine(calibration *c)
{
    char host[128] = "unknown", line[256], model[128] = "unknown";
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "model name : %127[^\n]", model) == 1)
            break;
    }
    if (f != NULL)
        fclose(f);
    (void)gethostname(host, sizeof host - 1);
    snprintf(c->machine, sizeof c->machine, "%s|%s|%ld", host, model,
             (long)sysconf(_SC_NPROCESSORS_ONLN)); /* bound or not: what depends on that says so in its own key */
}

typedef spw_status (*measure_fn)(const calibration *c, const char *path, double *rates, spw_error *err);

static void
make_key(char key[RATE_KEY_BYTES], const calibration *c, const char *what)
{
    snprintf(key, RATE_KEY_BYTES, "%s|%s", c->machine, what);
}

/* From the cache. False: it is not there, and rates (count) are 0. */
static bool
look_up(calibration *c, const char *what, double *rates, uint32_t count)
{
    char key[RATE_KEY_BYTES];
    double age = 0;
    make_key(key, c, what);
    if (c->cache != NULL && spw__rate_cache_get(c->cache, key, c->now_s, rates, count, &age)) {
        c->report->cached++;
        c->report->oldest_days = age > c->report->oldest_days ? age : c->report->oldest_days;
        return true;
    }
    memset(rates, 0, count * sizeof *rates);
    return false;
}

/* rates (count) stay 0 when they are not known. */
static void
get_rates(calibration *c, const char *what, measure_fn measure, const char *path, double *rates, uint32_t count)
{
    char key[RATE_KEY_BYTES];
    spw_error err = {0};
    uint64_t begin = spw_now_ns();
    make_key(key, c, what);
    if (c->mode != SPW_CALIBRATE_FORCE && look_up(c, what, rates, count))
        return;
    memset(rates, 0, count * sizeof *rates);
    if (c->mode != SPW_CALIBRATE_CACHE_ONLY && measure(c, path, rates, &err) == SPW_OK) {
        c->report->measured++;
        c->report->seconds += (double)(spw_now_ns() - begin) * 1e-9;
        if (c->cache != NULL)
            spw__rate_cache_put(c->cache, key, c->now_s, rates, count);
        return;
    }
    memset(rates, 0, count * sizeof *rates);
    c->report->unknown++;
    if (err.status != SPW_OK)
        spw_log(SPW_LOG_WARN, "not measured: %s", err.message);
}

/* ---------------------------------------------------------------- between ranks */

static void
name_received(char what[RATE_KEY_BYTES - 400], spw_rank_way way, bool linked, uint32_t local_ranks)
{
    snprintf(what, RATE_KEY_BYTES - 400, "received|%s|%s|%u", spw_rank_way_name(way), linked ? "linked" : "host",
             local_ranks);
}

enum { RECEIVED_VALUES = SPW_USE_COUNT + 1 };

/* What ranks have kept. One process cannot measure it: that it is not known is no news here. */
static void
find_received(calibration *c, spw_rank_way way, spw_rates *out)
{
    char what[RATE_KEY_BYTES - 400];
    double values[RECEIVED_VALUES];
    name_received(what, way, c->plan->linked, c->plan->local_ranks);
    (void)look_up(c, what, values, RECEIVED_VALUES);
    memcpy(out->received[way], values, sizeof out->received[way]);
    out->received_cpu[way] = values[SPW_USE_COUNT];
}

void
spw__keep_received(bool linked, uint32_t local_ranks, const spw_rates *rates, char *path)
{
    calibration c = {.cache = spw__rate_cache_open()};
    path[0] = '\0';
    if (c.cache == NULL)
        return;
    describe_machine(&c);
    snprintf(path, SPW_PATH_BYTES, "%s", spw__rate_cache_path(c.cache));
    for (int way = 0; way < SPW_WAY_COUNT; way++) {
        char what[RATE_KEY_BYTES - 400], key[RATE_KEY_BYTES];
        double values[RECEIVED_VALUES];
        bool whole = true;
        memcpy(values, rates->received[way], sizeof rates->received[way]);
        values[SPW_USE_COUNT] = rates->received_cpu[way];
        for (int i = 0; i < RECEIVED_VALUES; i++)
            whole = whole && values[i] > 0;
        name_received(what, (spw_rank_way)way, linked, local_ranks);
        make_key(key, &c, what);
        if (whole)
            spw__rate_cache_put(c.cache, key, (int64_t)time(NULL), values, RECEIVED_VALUES);
    }
    spw__rate_cache_close(c.cache);
}

/* ---------------------------------------------------------------- all of it */

/* Attention has a rate of its own where it is more than a tenth of the operations. */
static bool
attends_much(const spw_plan *plan)
{
    return plan->attention_flops > plan->flops / 10;
}

static void
device_rates(calibration *c, spw_rates *out)
{
    const spw_config *config = c->config;
    const spw_plan *plan = c->plan;
    const uint32_t threads = config->run.compute_threads > 0 ? config->run.compute_threads : spw_cpu_allowed_count();
    char what[RATE_KEY_BYTES - 400], device[64];
    double copies[2];
    /* What auto took, and in which precision: rates of one are not those of another. */
    snprintf(device, sizeof device, "%.32s%s%s", config->run.device, plan->device_apart ? " apart" : "",
             plan->device_apart && !config->bf16 && !config->fp16 ? " fp32" : "");
    snprintf(what, sizeof what, "copies|%s|%s|%s", device,
             spw_dtype_name(spw_state_weight_dtype(config->run.state_format)), spw_dtype_name(config->run.grad_dtype));
    get_rates(c, what, measure_copies, NULL, copies, 2);
    out->h2d = copies[0];
    out->d2h = copies[1];
    snprintf(what, sizeof what, "compute|%s|%u|%llu|%llu", device, threads,
             (unsigned long long)(config->micro_batch * config->data.seq_length),
             (unsigned long long)config->model.width);
    get_rates(c, what, measure_compute, NULL, &out->flops, 1);
    if (attends_much(plan)) {
        const spw_model_config *m = &config->model;
        snprintf(what, sizeof what, "attention|%s|%u|%llu|%llu|%llu|%llu", device, threads,
                 (unsigned long long)config->data.seq_length, (unsigned long long)m->heads,
                 (unsigned long long)m->kv_heads, (unsigned long long)spw_model_head_dim(m, 0));
        get_rates(c, what, measure_attention, NULL, &out->attention, 1);
    }
    if (plan->orthogonal_flops > 0) {
        snprintf(what, sizeof what, "orthogonal|%s|%u|%llu", device, threads, (unsigned long long)config->model.width);
        get_rates(c, what, measure_orthogonal, NULL, &out->orthogonal, 1);
    }
}

void
spw_calibrate(spw_rates *out, const spw_config *config, const spw_plan *plan, spw_calibrate_mode mode,
              spw_calibration *report)
{
    calibration c = {.config = config, .plan = plan, .mode = mode, .report = report, .now_s = (int64_t)time(NULL)};
    char what[RATE_KEY_BYTES - 400];
    memset(out, 0, sizeof *out);
    memset(report, 0, sizeof *report);
    describe_machine(&c);
    c.threads = config->run.optimizer_threads > 0 ? config->run.optimizer_threads : spw_cpu_allowed_count();
    c.cache = spw__rate_cache_open();
    if (c.cache != NULL)
        snprintf(report->cache_path, sizeof report->cache_path, "%s", spw__rate_cache_path(c.cache));
    for (uint32_t i = 0; i < plan->path_count; i++) {
        double rates[3];
        out->device_id[i] = spw_disk_of(plan->paths[i]);
        snprintf(what, sizeof what, "path|%llx|%s|%s %llu %u %u %d%d%d%d", (unsigned long long)out->device_id[i],
                 plan->paths[i], spw_aio_backend_name(config->aio.backend), (unsigned long long)config->aio.block_size,
                 config->aio.queue_depth, config->aio.thread_count, config->aio.single_submit,
                 config->aio.overlap_events, config->aio.sqpoll, config->aio.iopoll);
        get_rates(&c, what, measure_path, plan->paths[i], rates, 3);
        out->nvme_read[i] = rates[0];
        out->nvme_write[i] = rates[1];
        out->nvme_mixed[i] = rates[2];
    }
    snprintf(what, sizeof what, "optimizer|%s|%s|%s|%llu|%u",
             config->optimizer.type[0] != '\0' ? config->optimizer.type : "AdamW",
             spw_state_name(config->run.state_format), spw_dtype_name(config->run.grad_dtype),
             (unsigned long long)config->run.chunk_elems, c.threads);
    get_rates(&c, what, measure_optimizer, NULL, &out->optimizer, 1);
    if (plan->gpu == NULL) {
        device_rates(&c, out);
    } else {
        const bool single = !config->bf16 && !config->fp16;
        out->h2d = out->d2h = plan->gpu->link;
        out->flops = out->orthogonal = (single ? plan->gpu->single_flops : plan->gpu->half_flops) / 2;
        out->attention = attends_much(plan) ? out->flops * 4 / 5 : 0; /* of 65536 tokens */
        report->estimated = true;
    }
    if (plan->ranks > 1 && plan->local_ranks > 1)
        find_received(&c, SPW_WAY_NEAR, out);
    if (plan->ranks > plan->local_ranks)
        find_received(&c, SPW_WAY_FAR, out);
    for (int use = 0; plan->gpu != NULL && plan->linked && use < SPW_USE_COUNT; use++)
        out->received[SPW_WAY_NEAR][use] = plan->gpu->peers;
    if (!plan->device_apart)
        out->shared_cores = spw_cpu_allowed_count();
    out->compute_threads = config->run.compute_threads;
    out->optimizer_threads = c.threads;
    spw__rate_cache_close(c.cache);
}
