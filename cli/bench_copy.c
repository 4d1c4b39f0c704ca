/*
 * spillway bench copy: what the engine's copies between host and device reach, and what memcpy reaches beside them.
 *
 * A row is one operation at one size. Each repetition times the engine's call on its queue, from submit until the queue
 * is idle, and a memcpy of the same bytes between the same buffers by as many threads; which goes first alternates.
 * Destinations are zeroed before each, and every element is checked after each copy; neither is in the timing. One copy
 * is in flight per queue, so small sizes show the hand-over to the queue's thread, whose cache is colder than that of
 * the thread which zeroed the destination and calls memcpy; only sizes beyond the caches show memory. Bytes of the source
 * count once.
 */
#include "cli.h"
#include <jansson.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { REPS_MAX = 1000, REPS_MIN = 5, REPS_SMOKE = 2, LEGS_MAX = 2, GUARD_BYTES = 4096 };

enum { H2D = 1, D2H = 2, D2D = 4 };

typedef struct copy_op {
    const char *name;
    unsigned ways; /* H2D | D2H: both at once, on their two queues */
    bool convert;  /* towards the device bf16 becomes fp32, towards the host fp32 becomes bf16 */
    bool pageable; /* host memory from malloc, not from the pinned region */
} copy_op;

static const copy_op ops[] = {
    {"h2d-bf16-pinned", H2D, false, false},
    {"h2d-bf16-pageable", H2D, false, true},
    {"h2d-bf16-fp32-pinned", H2D, true, false},
    {"h2d-bf16-fp32-pageable", H2D, true, true},
    {"d2h-bf16-pinned", D2H, false, false},
    {"d2h-bf16-pageable", D2H, false, true},
    {"d2h-fp32-bf16-pinned", D2H, true, false},
    {"d2h-fp32-bf16-pageable", D2H, true, true},
    {"d2d-bf16", D2D, false, false},
    {"d2d-bf16-fp32", D2D, true, false},
    {"both-bf16-pinned", H2D | D2H, false, false},
    {"both-bf16-pageable", H2D | D2H, false, true},
    {"both-convert-pinned", H2D | D2H, true, false},
    {"both-convert-pageable", H2D | D2H, true, true},
};
enum { OP_COUNT = sizeof ops / sizeof ops[0] };

typedef struct options {
    const char *device;
    cli_sizes sizes; /* of the source, one direction */
    double seconds;  /* for each row */
    bool json, smoke;
} options;

/* Source (S bytes, the same random numbers in every one) and destination of one kind of memory. */
typedef struct buffers {
    char *src, *dst;
} buffers;

typedef struct bench {
    options opt;
    spw_gpu *gpu;
    spw_gpu_queue *compute, *h2d, *d2h;
    spw_pool *pool; /* two threads: the ceiling of both directions at once */
    spw_region region;
    bool known;      /* the region, to the device */
    char *heap;      /* pageable memory */
    char *check;     /* what the device holds after a copy, brought back */
    void *device[2]; /* the allocations behind dev */
    buffers pinned, pageable, dev;
} bench;

/* One direction of an operation, as the queue is asked for it. */
typedef struct leg {
    unsigned way;
    spw_gpu_queue *queue;
    void *dst;
    const void *src;
    spw_dtype dst_type, src_type;
    uint64_t n, src_bytes, dst_bytes;
    void *memcpy_dst; /* the same buffers where the CPU may touch them, otherwise the host's */
    const void *memcpy_src;
} leg;

typedef struct memcpy_job {
    const leg *legs;
    uint32_t leg_count;
    _Atomic uint32_t started;
    uint64_t begin_ns[LEGS_MAX], end_ns[LEGS_MAX];
} memcpy_job;

typedef struct result {
    const char *op;
    uint64_t size, wrong; /* wrong: elements of the destination, and bytes written past its end */
    uint32_t reps;
    double p50_us, p99_us, gb_s, cpu_s_per_gb, ceiling_gb_s;
    double samples_us[REPS_MAX]; /* in the order they were taken */
} result;

/* ---------------------------------------------------------------- set-up */

static void
bench_close(bench *b)
{
    if (b->gpu != NULL) {
        spw_gpu_queue_destroy(b->compute);
        spw_gpu_queue_destroy(b->h2d);
        spw_gpu_queue_destroy(b->d2h);
        spw_gpu_free(b->gpu, b->device[0]);
        spw_gpu_free(b->gpu, b->device[1]);
        if (b->known)
            spw_gpu_unpin_host(b->gpu, b->region.base);
        spw_gpu_close(b->gpu);
    }
    spw_pool_destroy(b->pool);
    spw_region_unmap(&b->region);
    free(b->heap);
    free(b->check);
}

/* The same bits are a bf16 and an fp32 pattern without infinities and NaNs: one exponent bit of each is off. */
static void
fill(char *to, uint64_t bytes)
{
    uint32_t r[4];
    for (uint64_t at = 0; at < bytes; at += sizeof r) {
        spw_philox(0x636f7079, 0, at, r);
        for (int i = 0; i < 4; i++)
            r[i] &= 0xbfffbfffu;
        memcpy(to + at, r, bytes - at < sizeof r ? bytes - at : sizeof r);
    }
}

static spw_status
bench_open(bench *b, spw_error *err)
{
    uint64_t S = 0, room, free_bytes = spw_memory_available_bytes(""), cgroup = spw_cgroup_memory_bytes("");
    spw_carve carve;
    for (uint32_t i = 0; i < b->opt.sizes.count; i++)
        S = b->opt.sizes.bytes[i] > S ? b->opt.sizes.bytes[i] : S;
    room = S + GUARD_BYTES;
    free_bytes = free_bytes == 0 || cgroup < free_bytes ? cgroup : free_bytes;
    if (9 * room > free_bytes)
        return SPW_RAISE(err, SPW_ENOMEM, "bench copy of %llu bytes needs %llu of memory, %llu are free",
                         (unsigned long long)S, (unsigned long long)(9 * room), (unsigned long long)free_bytes);
    SPW_TRY(spw_gpu_open(&b->gpu, &(spw_gpu_options){.name = b->opt.device, .thread_count = 1}, err));
    SPW_TRY(spw_gpu_queue_create(&b->compute, b->gpu, SPW_QUEUE_COMPUTE, err));
    SPW_TRY(spw_gpu_queue_create(&b->h2d, b->gpu, SPW_QUEUE_H2D, err));
    SPW_TRY(spw_gpu_queue_create(&b->d2h, b->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_pool_create(&b->pool, 2, "spw-memcpy", err));
    SPW_TRY(spw_region_map(&b->region, 2 * spw_round_up(room, 4096), SPW_REGION_LOCK, err));
    SPW_TRY(spw_gpu_pin_host(b->gpu, b->region.base, b->region.bytes, err));
    b->known = true;
    SPW_TRY(spw_gpu_alloc(b->gpu, &b->device[0], room, err));
    SPW_TRY(spw_gpu_alloc(b->gpu, &b->device[1], 2 * room, err));
    b->heap = malloc(2 * room);
    b->check = malloc(2 * room);
    if (b->heap == NULL || b->check == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "pageable memory (%llu bytes)", (unsigned long long)(4 * room));
    memset(b->heap, 0, 2 * room); /* resident from here on */
    memset(b->check, 0, 2 * room);
    carve = (spw_carve){.base = b->region.base, .bytes = b->region.bytes};
    b->pinned = (buffers){.src = spw_carve_take(&carve, room), .dst = spw_carve_take(&carve, room)};
    b->pageable = (buffers){.src = b->heap, .dst = b->heap + room};
    b->dev = (buffers){.src = b->device[0], .dst = b->device[1]};
    fill(b->pinned.src, S);
    memcpy(b->pageable.src, b->pinned.src, S);
    spw_gpu_copy_h2d(b->h2d, b->dev.src, SPW_BF16, b->pinned.src, SPW_BF16, S / 2);
    spw_gpu_queue_sync(b->h2d);
    return spw_gpu_check(b->gpu, err);
}

/* ---------------------------------------------------------------- one repetition */

static leg
make_leg(const bench *b, const copy_op *op, unsigned way, uint64_t size)
{
    const buffers *host = op->pageable ? &b->pageable : &b->pinned;
    bool touch = spw_gpu_get_info(b->gpu)->host_addressable;
    leg l = {.way = way,
             .queue = way == D2H ? b->d2h : b->h2d, /* d2d: where the mover puts it */
             .src = way == H2D ? host->src : b->dev.src,
             .dst = way == D2H ? host->dst : b->dev.dst,
             .src_type = op->convert && way == D2H ? SPW_F32 : SPW_BF16,
             .dst_type = op->convert && way != D2H ? SPW_F32 : SPW_BF16,
             .src_bytes = size};
    l.n = size / spw_dtype_bytes(l.src_type);
    l.dst_bytes = l.n * spw_dtype_bytes(l.dst_type);
    l.memcpy_src = touch ? l.src : host->src;
    l.memcpy_dst = touch ? l.dst : host->dst;
    return l;
}

static double
cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Returns seconds; adds the processor's to *cpu_s. */
static double
time_copy(const leg *legs, uint32_t leg_count, double *cpu_s)
{
    double cpu = cpu_seconds();
    uint64_t ns = spw_now_ns();
    for (uint32_t i = 0; i < leg_count; i++) {
        const leg *l = &legs[i];
        if (l->way == H2D)
            spw_gpu_copy_h2d(l->queue, l->dst, l->dst_type, l->src, l->src_type, l->n);
        else if (l->way == D2H)
            spw_gpu_copy_d2h(l->queue, l->dst, l->dst_type, l->src, l->src_type, l->n, NULL);
        else
            spw_gpu_copy_d2d(l->queue, l->dst, l->dst_type, l->src, l->src_type, l->n, NULL);
    }
    for (uint32_t i = 0; i < leg_count; i++)
        spw_gpu_queue_sync(legs[i].queue);
    ns = spw_now_ns() - ns;
    *cpu_s += cpu_seconds() - cpu;
    return (double)(ns > 0 ? ns : 1) * 1e-9;
}

static void
memcpy_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    memcpy_job *job = ctx;
    const leg *l = &job->legs[part_idx];
    (void)worker_idx;
    atomic_fetch_add(&job->started, 1); /* nobody takes both parts: two threads, as with two queues */
    while (atomic_load(&job->started) < job->leg_count)
        sched_yield();
    job->begin_ns[part_idx] = spw_now_ns();
    memcpy(l->memcpy_dst, l->memcpy_src, l->src_bytes);
    job->end_ns[part_idx] = spw_now_ns();
}

/* From the first thread's begin to the last one's end: a ceiling does not wait for threads to wake. */
static double
time_memcpy(spw_pool *pool, const leg *legs, uint32_t leg_count)
{
    memcpy_job job = {.legs = legs, .leg_count = leg_count};
    uint64_t begin = UINT64_MAX, end = 0;
    spw_pool_run(pool, leg_count, memcpy_part, &job);
    for (uint32_t i = 0; i < leg_count; i++) {
        begin = job.begin_ns[i] < begin ? job.begin_ns[i] : begin;
        end = job.end_ns[i] > end ? job.end_ns[i] : end;
    }
    return (double)(end > begin ? end - begin : 1) * 1e-9;
}

static void
clear_copy(bench *b, const leg *l)
{
    if (l->way == D2H) {
        memset(l->dst, 0, l->dst_bytes + GUARD_BYTES);
    } else {
        spw_gpu_zero(b->compute, l->dst, l->dst_bytes + GUARD_BYTES);
        spw_gpu_queue_sync(b->compute);
    }
}

/* Compares every element with the scalar definition of the conversion, and the bytes behind the last with zero. */
static uint64_t
count_wrong(bench *b, const leg *l)
{
    const void *got = l->dst;
    const uint16_t *half = (const void *)b->pinned.src; /* the numbers every source holds */
    const float *full = (const void *)b->pinned.src;
    const char *guard;
    uint64_t wrong = 0;
    if (l->way != D2H) {
        spw_gpu_copy_d2h(b->d2h, b->check, SPW_BF16, l->dst, SPW_BF16, (l->dst_bytes + GUARD_BYTES) / 2, NULL);
        spw_gpu_queue_sync(b->d2h);
        got = b->check;
    }
    if (l->dst_type == SPW_F32) {
        for (uint64_t i = 0; i < l->n; i++)
            wrong += ((const uint32_t *)got)[i] != spw_f32_bits(spw_bf16_to_f32(half[i]));
    } else if (l->src_type == SPW_F32) {
        for (uint64_t i = 0; i < l->n; i++)
            wrong += ((const uint16_t *)got)[i] != spw_f32_to_bf16(full[i]);
    } else {
        for (uint64_t i = 0; i < l->n; i++)
            wrong += ((const uint16_t *)got)[i] != half[i];
    }
    guard = (const char *)got + l->dst_bytes;
    for (uint32_t i = 0; i < GUARD_BYTES; i++)
        wrong += guard[i] != 0;
    return wrong;
}

/* ---------------------------------------------------------------- one row */

static void
measure(bench *b, const copy_op *op, uint64_t size, result *r)
{
    static double ceiling_us[REPS_MAX];
    leg legs[LEGS_MAX];
    uint32_t leg_count = 0, reps_min = b->opt.smoke ? REPS_SMOKE : REPS_MIN;
    uint64_t end_ns = spw_now_ns() + (b->opt.smoke ? 0 : (uint64_t)(b->opt.seconds * 1e9));
    double gb, cpu_s = 0;
    for (unsigned way = H2D; way <= D2D; way *= 2) {
        if ((op->ways & way) != 0)
            legs[leg_count++] = make_leg(b, op, way, size);
    }
    gb = (double)size * leg_count * 1e-9;
    r->op = op->name;
    r->size = size;
    r->wrong = 0;
    r->reps = 0;
    for (uint32_t round = 0; r->reps < REPS_MAX && (r->reps < reps_min || spw_now_ns() < end_ns); round++) {
        double copy_s = 0, memcpy_s = 0;
        for (uint32_t turn = 0; turn < 2; turn++) { /* who goes first alternates: caches and clocks favour neither */
            if ((turn + round) % 2 == 0) {
                for (uint32_t i = 0; i < leg_count; i++)
                    clear_copy(b, &legs[i]);
                copy_s = time_copy(legs, leg_count, &cpu_s);
                for (uint32_t i = 0; i < leg_count; i++)
                    r->wrong += count_wrong(b, &legs[i]);
            } else {
                for (uint32_t i = 0; i < leg_count; i++)
                    memset(legs[i].memcpy_dst, 0, size);
                memcpy_s = time_memcpy(b->pool, legs, leg_count);
            }
        }
        if (round == 0) { /* warm-up */
            cpu_s = 0;
            continue;
        }
        r->samples_us[r->reps] = copy_s * 1e6;
        ceiling_us[r->reps++] = memcpy_s * 1e6;
    }
    r->p50_us = spw_median(r->samples_us, r->reps);
    r->p99_us = spw_sample_at(r->samples_us, r->reps, (r->reps * 99 + 99) / 100 - 1); /* 99 of 100 do not exceed it */
    r->gb_s = gb / (r->p50_us * 1e-6);
    r->ceiling_gb_s = gb / (spw_median(ceiling_us, r->reps) * 1e-6);
    r->cpu_s_per_gb = cpu_s / (gb * r->reps);
}

/* ---------------------------------------------------------------- reports */

static spw_status
print_header(const bench *b, spw_error *err)
{
    const spw_gpu_info *info = spw_gpu_get_info(b->gpu);
    if (b->opt.json)
        return cli_show_json("bench copy", CLI_DIGITS_MEASURED,
                             json_pack("{s:{s:s,s:i,s:s,s:s,s:s,s:s,s:b}}", "header", "bench", "copy", "schema", 1,
                                       "version", SPW_VERSION, "device", info->name, "description", info->description,
                                       "build", cli_build_name(), "pinned", (int)b->region.locked),
                             err);
    printf("# bench copy  schema 1  spillway %s  device %s (%s)  build %s\n", SPW_VERSION, info->name,
           info->description, cli_build_name());
    printf("# pinned region %s; one copy in flight per queue; peak: memcpy of the source's bytes, as many threads\n",
           b->region.locked ? "locked" : "NOT locked (see memlock in spillway doctor)");
    printf("#   op                            size   reps       p50       p99     rate  %%peak  #wrong\n"
           "#                                  (B)             (us)      (us)   (GB/s)\n");
    return SPW_OK;
}

static spw_status
print_row(const bench *b, const result *r, spw_error *err)
{
    double ratio = r->gb_s / r->ceiling_gb_s;
    if (b->opt.json) {
        json_t *samples = json_array();
        for (uint32_t i = 0; i < r->reps; i++)
            json_array_append_new(samples, json_real(r->samples_us[i])); /* a failure shows in json_pack */
        return cli_show_json("bench copy", CLI_DIGITS_MEASURED,
                             json_pack("{s:s,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:f,s:I,s:o}", "op", r->op, "size",
                                       (json_int_t)r->size, "reps", (json_int_t)r->reps, "gb_s", r->gb_s, "p50_us",
                                       r->p50_us, "p99_us", r->p99_us, "cpu_s_per_gb", r->cpu_s_per_gb, "ceiling_gb_s",
                                       r->ceiling_gb_s, "ratio_to_ceiling", ratio, "wrong", (json_int_t)r->wrong,
                                       "samples_us", samples),
                             err);
    }
    printf("  %-24s %11llu %6u %9.1f %9.1f %8.2f %6.0f %7llu\n", r->op, (unsigned long long)r->size, r->reps, r->p50_us,
           r->p99_us, r->gb_s, 100 * ratio, (unsigned long long)r->wrong);
    fflush(stdout);
    return SPW_OK;
}

/* ---------------------------------------------------------------- the command */

static int
parse_options(options *opt, int argc, char **argv)
{
    static const char *const with_value[] = {"--device", "--size", "--seconds", NULL};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        if (strcmp(name, "--json") == 0) {
            opt->json = true;
            continue;
        }
        if (strcmp(name, "--smoke") == 0) {
            opt->smoke = true;
            continue;
        }
        if ((value = cli_known_value("bench copy", with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if (strcmp(name, "--device") == 0) {
            opt->device = value;
        } else if (strcmp(name, "--size") == 0) {
            if (!cli_bench_sizes("bench copy", value, 4, &opt->sizes))
                return EXIT_USAGE;
        } else if (!cli_bench_seconds("bench copy", value, &opt->seconds)) {
            return EXIT_USAGE;
        }
    }
    if (opt->sizes.count == 0)
        (void)cli_bench_sizes("bench copy", opt->smoke ? "4KiB,64KiB" : "256KiB,4MiB,64MiB", 4, &opt->sizes);
    return EXIT_DONE;
}

int
cli_bench_copy(int argc, char **argv)
{
    static result r; /* large */
    bench b = {.opt = {.device = "cpu", .seconds = 1}};
    spw_error err = {0};
    spw_status st;
    uint64_t wrong = 0;
    if (parse_options(&b.opt, argc, argv) != EXIT_DONE)
        return EXIT_USAGE;
    st = bench_open(&b, &err);
    if (st == SPW_OK)
        st = print_header(&b, &err);
    for (uint32_t i = 0; i < OP_COUNT; i++) {
        for (uint32_t j = 0; st == SPW_OK && j < b.opt.sizes.count; j++) {
            measure(&b, &ops[i], b.opt.sizes.bytes[j], &r);
            wrong += r.wrong;
            st = spw_gpu_check(b.gpu, &err);
            if (st == SPW_OK)
                st = print_row(&b, &r, &err);
        }
    }
    bench_close(&b);
    if (st == SPW_OK && wrong > 0)
        st = SPW_RAISE(&err, SPW_ECORRUPT, "bench copy: %llu elements arrived wrong", (unsigned long long)wrong);
    return st == SPW_OK ? EXIT_DONE : cli_fail(&err);
}
