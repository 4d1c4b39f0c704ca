/*
 * spillway bench adam: how close an optimizer's step comes to memory.
 *
 * Each thread has a chunk of its own, as in training. A repetition is one step over all chunks, and one pass of a stream
 * over the same arrays that reads what the step reads and writes what it writes, in as many streams; they take turns.
 * Memory bandwidth drifts by a factor of two within minutes on shared machines, so each repetition gives a ratio, and the
 * row shows medians. After the first step some elements are compared with the scalar truth.
 *
 * With --check, rows of fused kernels have limits: a share of the stream's rate, or for 8-bit moments, where arithmetic binds, of
 * split's parameters per second, whose step then takes its turn in each repetition. What counts is the time that the best
 * quarter of the repetitions needed, of the step and of what it is compared with, each by itself: that is where other programs
 * were least in the way. A row below is measured again up to two times before it counts.
 */
#include "cli.h"
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

enum { TRIES = 3 };      /* of a row that has a limit */
#define AVX2_PACKED 0.75 /* of the limits of packed formats: arithmetic binds sooner */
enum { REPS = 15, REPS_SMOKE = 3, THREADS_MAX = 256, STREAMS_MAX = 6, LIST_MAX = 16 };

typedef struct job {
    uint64_t params; /* of all chunks */
    spw_state_format formats[LIST_MAX];
    const spw_optimizer *optimizers[LIST_MAX];
    uint32_t format_count, optimizer_count;
    uint32_t threads;
    spw_isa isa;
    spw_dtype grad_dtype;
    bool json, smoke;
    double check; /* limits are multiplied by this; 0: not looked at */
} job;

/* One thread's share. */
typedef struct share {
    spw_opt_chunk chunk;
    spw_region weights, record, grad, log;
} share;

typedef struct run {
    const job *j;
    const spw_optimizer *optimizer;
    spw_opt_coef coef;
    share shares[THREADS_MAX];
    uint64_t granule, sink, no_room;
} run;

/* A time that the best quarter of the repetitions needed no more than. */
static double
best_quarter(const double *v, uint32_t n)
{
    return spw_sample_at(v, n, n / 4);
}

static void
step_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    run *r = ctx;
    const spw_opt_chunk *c = &r->shares[part_idx].chunk;
    (void)worker_idx;
    (void)spw_opt_step_isa(r->j->isa, c, &(spw_opt_range){c->elems, &r->coef}, 1, NULL);
}

/* The same with a log, as updates ahead of the gradient's norm have one, */
static void
logged_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    run *r = ctx;
    spw_opt_chunk c = r->shares[part_idx].chunk;
    uint64_t bad = 0;
    (void)worker_idx;
    c.log = r->shares[part_idx].log.base;
    c.log_weights = true;
    (void)spw_opt_step_isa(r->j->isa, &c, &(spw_opt_range){c.elems, &r->coef}, 1, &bad);
    if (bad == SPW_OPT_NO_ROOM)
        __atomic_fetch_add(&r->no_room, 1, __ATOMIC_RELAXED);
}

/* and back by it. */
static void
back_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    run *r = ctx;
    spw_opt_chunk c = r->shares[part_idx].chunk;
    (void)worker_idx;
    c.log = r->shares[part_idx].log.base;
    c.log_weights = true;
    (void)spw_opt_undo_isa(r->j->isa, &c, &(spw_opt_range){c.elems, &r->coef}, 1);
}

/* ---------------------------------------------------------------- the ceiling */

typedef struct stream {
    char *p;
    uint64_t bytes;
    bool reads, writes;
} stream;

/* The arrays of a chunk as the step touches them. */
static uint32_t
streams_of(const run *r, const share *s, stream out[STREAMS_MAX])
{
    const spw_opt_chunk *c = &s->chunk;
    const uint64_t n = c->elems, weights = n * spw_state_weight_bytes(c->format);
    const uint64_t record = spw_state_record_bytes(c->format, r->optimizer, n);
    const bool read_weights = spw_state_update_reads_weights(c->format);
    uint64_t at = 0, moment = n * 4;
    uint32_t k = 0;
    out[k++] = (stream){s->grad.base, n * spw_dtype_bytes(c->grad_dtype), true, false};
    out[k++] = (stream){s->weights.base, weights, read_weights, true};
    /* the low part of the record, then one array per moment; scales go with the last */
    for (uint32_t m = r->optimizer->moment_count; m-- > 0;) {
        static const spw_optimizer none = {.name = ""};
        uint64_t low = spw_state_record_bytes(c->format, &none, n);
        moment = (record - low) / r->optimizer->moment_count;
        at = low + m * moment;
        out[k++] = (stream){(char *)s->record.base + at, moment, true, true};
        if (m == 0 && low > 0)
            out[k++] = (stream){s->record.base, low, true, true};
    }
    return k;
}

/* Built for what the CPU has, as the kernels are. Its choice is made before ThreadSanitizer is there to watch it. */
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define EACH_ISA __attribute__((target_clones("default", "avx2", "avx512f"), noinline))
#else
#define EACH_ISA __attribute__((noinline))
#endif

EACH_ISA static uint64_t
stream_piece(uint64_t *x, uint64_t n, bool reads, bool writes)
{
    uint64_t sum = 0;
    if (reads && writes)
        for (uint64_t i = 0; i < n; i++)
            x[i] += 1;
    else if (writes)
        for (uint64_t i = 0; i < n; i++)
            x[i] = n;
    else
        for (uint64_t i = 0; i < n; i++)
            sum += x[i];
    return sum;
}

/* How much of one array before the next has its turn; which is fastest depends on the prefetchers, so all are tried. */
static const uint64_t granules[] = {512, 4096, UINT64_MAX};
enum { GRANULES = sizeof granules / sizeof *granules };

static void
stream_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    run *r = ctx;
    stream s[STREAMS_MAX];
    uint32_t count = streams_of(r, &r->shares[part_idx], s);
    uint64_t blocks = s[0].bytes / r->granule + 1, sum = 0;
    (void)worker_idx;
    for (uint64_t b = 0; b < blocks; b++)
        for (uint32_t k = 0; k < count; k++) {
            uint64_t begin = s[k].bytes / 64 * b / blocks * 64, end = s[k].bytes / 64 * (b + 1) / blocks * 64;
            sum += stream_piece((uint64_t *)(void *)(s[k].p + begin), (end - begin) / 8, s[k].reads, s[k].writes);
        }
    __atomic_fetch_add(&r->sink, sum, __ATOMIC_RELAXED);
}

static double
bytes_moved(const run *r)
{
    stream s[STREAMS_MAX];
    uint32_t count = streams_of(r, &r->shares[0], s);
    double bytes = 0;
    for (uint32_t k = 0; k < count; k++)
        bytes += (double)s[k].bytes * (s[k].reads + s[k].writes);
    return bytes * r->j->threads;
}

/* ---------------------------------------------------------------- limits */

/* What a row must reach. */
typedef struct limit {
    double least;  /* 0: none */
    double logged; /* the step's time over that with a log */
    bool of_split; /* in split's parameters per second, else in the stream's rate */
} limit;

static limit
limit_of(const job *j, const spw_optimizer *o, spw_state_format f)
{
    static const limit of_adam[SPW_STATE_COUNT] = {
        [SPW_STATE_FP32] = {0.90, 0.70, false},      [SPW_STATE_MIXED] = {0.90, 0.70, false},
        [SPW_STATE_SPLIT] = {0.90, 0.70, false},     [SPW_STATE_SPLIT_BF16] = {0.80, 0.40, false},
        [SPW_STATE_SPLIT_INT8] = {1.00, 0.40, true}, [SPW_STATE_SPLIT24_INT8] = {1.00, 0.40, true},
    };
    /* Their logs are copies. */
    static const limit of_others[SPW_STATE_COUNT] = {
        [SPW_STATE_FP32] = {0.80, 0, false},        [SPW_STATE_MIXED] = {0.80, 0, false},
        [SPW_STATE_MIXED_F16] = {0.80, 0, false},   [SPW_STATE_SPLIT] = {0.80, 0, false},
        [SPW_STATE_SPLIT_BF16] = {0.75, 0, false},  [SPW_STATE_SPLIT_INT8] = {1.00, 0, true},
        [SPW_STATE_SPLIT24_INT8] = {1.00, 0, true},
    };
    const bool adam = o == &spw_opt_adam;
    const limit *l = adam ? &of_adam[f] : &of_others[f];
    const bool packed = f >= SPW_STATE_SPLIT_BF16, avx2 = j->isa == SPW_ISA_AVX2;
    bool fused = adam && f <= SPW_STATE_SPLIT ? j->isa != SPW_ISA_SCALAR : j->isa == SPW_ISA_AVX512 || (avx2 && packed);
    if (j->check == 0 || o->rule != NULL || !fused)
        return (limit){0};
    return (limit){l->least * j->check * (avx2 && packed ? AVX2_PACKED : 1), l->logged * j->check, l->of_split};
}

/* ---------------------------------------------------------------- a row */

static void
fill(run *r, share *s, uint64_t first)
{
    spw_opt_chunk *c = &s->chunk;
    float block[4096];
    memset(s->record.base, 0, s->record.bytes);
    for (uint64_t at = 0; at < c->elems; at += 4096) {
        for (uint32_t i = 0; i < 4096; i++) {
            uint32_t x = (uint32_t)(first + at + i) * 2654435761u;
            block[i] = (float)(int32_t)x * 0x1p-33f;
        }
        spw_state_set(c->format, r->optimizer, c->weights, c->record, c->elems, SPW_PART_MASTER, at, 4096, block);
        spw_convert((char *)s->grad.base + at * spw_dtype_bytes(c->grad_dtype), c->grad_dtype, block, SPW_F32, 4096);
    }
}

/* A few blocks of the first step again, on the scalar reference; returns elements with other bits. */
static uint64_t
check(run *r, const share *s)
{
    enum { N = 4096 };
    static char weights[N * 4] __attribute__((aligned(64))), record[N * 12] __attribute__((aligned(64)));
    const spw_opt_chunk *c = &s->chunk;
    uint64_t wrong = 0;
    for (int part = 0; part <= (int)r->optimizer->moment_count; part++) {
        float got[N], want[N], start[N];
        spw_opt_chunk small = {.format = c->format,
                               .elems = N,
                               .weights = weights,
                               .record = record,
                               .grad = c->grad,
                               .grad_dtype = c->grad_dtype,
                               .first = c->first};
        for (uint32_t i = 0; i < N; i++)
            start[i] = (float)(int32_t)((uint32_t)(c->first + i) * 2654435761u) * 0x1p-33f;
        memset(record, 0, sizeof record);
        spw_state_set(c->format, r->optimizer, weights, record, N, SPW_PART_MASTER, 0, N, start);
        (void)spw_opt_step_isa(SPW_ISA_SCALAR, &small, &(spw_opt_range){N, &r->coef}, 1, NULL);
        spw_state_get(c->format, r->optimizer, weights, record, N, (spw_state_part)part, 0, N, want);
        spw_state_get(c->format, r->optimizer, c->weights, c->record, c->elems, (spw_state_part)part, 0, N, got);
        for (uint32_t i = 0; i < N; i++)
            wrong += memcmp(&got[i], &want[i], 4) != 0;
    }
    return wrong;
}

static void
release(run *r)
{
    for (uint32_t t = 0; t < r->j->threads; t++) {
        spw_region_unmap(&r->shares[t].weights);
        spw_region_unmap(&r->shares[t].record);
        spw_region_unmap(&r->shares[t].grad);
        spw_region_unmap(&r->shares[t].log);
    }
}

static const spw_opt_hp hyper_parameters = {.lr = 1e-4,
                                            .beta1 = 0.9,
                                            .beta2 = 0.95,
                                            .eps = 1e-8,
                                            .weight_decay = 0.1,
                                            .decoupled = true,
                                            .bias_correction = true,
                                            .momentum = 0.9,
                                            .step = 1,
                                            .grad_scale = 1};

/* Chunks with numbers in them; release() takes half of them too. */
static spw_status
allocate(run *r, spw_state_format format, spw_error *err)
{
    const job *j = r->j;
    const uint64_t n = spw_round_up(j->params / j->threads, 4096);
    SPW_TRY(spw_opt_prepare(&r->coef, r->optimizer, &hyper_parameters, err));
    for (uint32_t t = 0; t < j->threads; t++) {
        share *s = &r->shares[t];
        SPW_TRY(spw_region_map(&s->weights, n * spw_state_weight_bytes(format), 0, err));
        SPW_TRY(spw_region_map(&s->record, spw_state_record_bytes(format, r->optimizer, n), 0, err));
        SPW_TRY(spw_region_map(&s->log, n / 32 * spw_opt_log_bytes_32(format, r->optimizer, true), 0, err));
        SPW_TRY(spw_region_map(&s->grad, n * spw_dtype_bytes(j->grad_dtype), 0, err));
        s->chunk = (spw_opt_chunk){.format = format,
                                   .elems = n,
                                   .weights = s->weights.base,
                                   .record = s->record.base,
                                   .grad = s->grad.base,
                                   .grad_dtype = j->grad_dtype,
                                   .first = t * n};
        fill(r, s, t * n);
    }
    return SPW_OK;
}

static double
timed(run *r, spw_pool *pool, void (*part)(void *, uint32_t, uint32_t))
{
    uint64_t begin_ns = spw_now_ns();
    spw_pool_run(pool, r->j->threads, part, r);
    return (double)(spw_now_ns() - begin_ns) * 1e-9;
}

/* What a row came to. */
typedef struct result {
    double step_s, stream_s, to_stream, to_split; /* medians; to_split: 0 when there was no split */
    double reached;                               /* of the limit's ratio, by best quarters */
    double logged, back; /* time of the step over that with a log, and back; by best quarters */
    double bytes;
    uint64_t params, wrong;
} result;

/* split: a run of that format to take turns with; NULL: none. */
static void
measure(run *r, run *split, spw_pool *pool, result *out)
{
    const job *j = r->j;
    const uint32_t reps = j->smoke ? REPS_SMOKE : REPS;
    double step_s[REPS], split_s[REPS], logged_s[REPS], back_s[REPS], stream_s[GRANULES][REPS], to_stream[REPS],
        to_split[REPS];
    int fastest = 0;
    *out = (result){.bytes = bytes_moved(r), .params = r->shares[0].chunk.elems * j->threads};
    for (int rep = -1; rep < (int)reps; rep++) { /* the first warms up and is checked */
        double before_s = split != NULL ? timed(split, pool, step_part) : 0, s = timed(r, pool, step_part);
        for (uint32_t t = 0; t < j->threads && rep < 0; t++)
            out->wrong += check(r, &r->shares[t]);
        double with_log = timed(r, pool, logged_part), back = timed(r, pool, back_part);
        out->wrong += r->no_room;
        if (rep >= 0) {
            logged_s[rep] = with_log;
            back_s[rep] = back;
        }
        for (int g = 0; g < GRANULES; g++) {
            double pass_s;
            r->granule = granules[g];
            pass_s = timed(r, pool, stream_part);
            if (rep >= 0)
                stream_s[g][rep] = pass_s;
        }
        for (uint32_t t = 0; t < j->threads; t++) /* the stream left any numbers; denormals would be slow */
            fill(r, &r->shares[t], r->shares[t].chunk.first);
        if (rep < 0)
            continue;
        step_s[rep] = s;
        split_s[rep] = before_s;
        to_split[rep] = before_s / s;
    }
    /* One stream for all repetitions: the fastest of three each time would be compared with a single step. */
    for (int g = 0; g < GRANULES; g++) {
        double median_s = spw_median(stream_s[g], reps);
        if (g == 0 || median_s < out->stream_s) {
            fastest = g;
            out->stream_s = median_s;
        }
    }
    for (uint32_t rep = 0; rep < reps; rep++)
        to_stream[rep] = stream_s[fastest][rep] / step_s[rep];
    out->to_stream = spw_median(to_stream, reps);
    out->to_split = spw_median(to_split, reps);
    out->step_s = spw_median(step_s, reps);
    out->logged = best_quarter(step_s, reps) / best_quarter(logged_s, reps);
    out->back = best_quarter(step_s, reps) / best_quarter(back_s, reps);
    out->reached = best_quarter(split != NULL ? split_s : stream_s[fastest], reps) / best_quarter(step_s, reps);
}

static void
print_row(const run *r, const result *x)
{
    const job *j = r->j;
    const char *format = spw_state_name(r->shares[0].chunk.format), *rule = r->optimizer->name;
    double n = (double)x->params, mparams = n * 1e-6 / x->step_s, gb = x->bytes * 1e-9 / x->step_s;
    double ceiling = x->bytes * 1e-9 / x->stream_s;
    if (j->json) {
        printf("{\"op\": \"%s %s\", \"size\": %llu, \"optimizer\": \"%s\", \"format\": \"%s\", \"grad\": \"%s\", "
               "\"threads\": %u, \"isa\": \"%s\", \"params\": %llu, \"bytes_per_param\": %.3f, \"mparams_s\": %.1f, "
               "\"gb_s\": %.3f, \"ceiling_gb_s\": %.3f, \"ratio_to_ceiling\": %.4f, ",
               rule, format, (unsigned long long)x->params, rule, format, spw_dtype_name(j->grad_dtype), j->threads,
               spw_isa_name(j->isa), (unsigned long long)x->params, x->bytes / n, mparams, gb, ceiling, x->to_stream);
        printf("\"logged\": %.4f, \"back\": %.4f, ", x->logged, x->back);
        if (x->to_split > 0)
            printf("\"ratio_to_split\": %.4f, ", x->to_split);
        printf("\"wrong\": %llu}\n", (unsigned long long)x->wrong);
    } else {
        printf("  %-8s %-13s %8.2f %10.0f %8.1f %8.1f %7.0f %7.0f %7.0f %7llu\n", rule, format, x->bytes / n, mparams,
               gb, ceiling, 100 * x->to_stream, 100 * x->logged, 100 * x->back, (unsigned long long)x->wrong);
    }
    fflush(stdout);
}

/* One row, with what it must reach; *below: it did not, three times. */
static spw_status
row(run *r, run *split, spw_state_format format, spw_pool *pool, uint64_t *wrong, bool *below, spw_error *err)
{
    const job *j = r->j;
    const limit least = limit_of(j, r->optimizer, format);
    char logged[64] = "";
    SPW_TRY(allocate(r, format, err));
    if (least.of_split)
        SPW_TRY(allocate(split, SPW_STATE_SPLIT, err));
    for (int try = 1;; try++) {
        result x;
        measure(r, least.of_split ? split : NULL, pool, &x);
        print_row(r, &x);
        *wrong += x.wrong;
        *below = x.reached < least.least || x.logged < least.logged;
        if (least.logged > 0)
            snprintf(logged, sizeof logged, "; with a log %.3f, at least %.3f", x.logged, least.logged);
        if (least.least > 0)
            fprintf(j->json ? stderr : stdout, "# %s %s %s, %u thread(s): %.3f of %s, at least %.3f%s%s\n",
                    !*below       ? "ok   "
                    : try < TRIES ? "again"
                                  : "BELOW",
                    r->optimizer->name, spw_state_name(format), j->threads, x.reached,
                    least.of_split ? "split's parameters per second" : "the stream's rate", least.least, logged,
                    !*below || try == TRIES ? "" : "; measured again");
        if (!*below || try == TRIES)
            return SPW_OK;
    }
}

/* ---------------------------------------------------------------- the command line */

static bool
take_formats(job *j, const char *text)
{
    if (strcmp(text, "all") == 0) {
        for (int f = 0; f < SPW_STATE_COUNT; f++)
            j->formats[j->format_count++] = (spw_state_format)f;
        return true;
    }
    return j->format_count < LIST_MAX && spw_state_parse(text, &j->formats[j->format_count]) && ++j->format_count > 0;
}

static bool
take_optimizers(job *j, const char *text)
{
    static const spw_optimizer *const all[] = {&spw_opt_adam, &spw_opt_adagrad, &spw_opt_lion, &spw_opt_sgd};
    if (strcmp(text, "all") == 0) {
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            j->optimizers[j->optimizer_count++] = all[i];
        return true;
    }
    j->optimizers[j->optimizer_count] = spw_optimizer_find(text);
    if (j->optimizers[j->optimizer_count] ==
        &spw_opt_muon) /* its step is no pass over memory: a device has a part in it */
        return false;
    return j->optimizer_count < LIST_MAX && j->optimizers[j->optimizer_count] != NULL && ++j->optimizer_count > 0;
}

static bool
take_isa(job *j, const char *text)
{
    for (int isa = SPW_ISA_SCALAR; isa < SPW_ISA_COUNT; isa++)
        if (spw_cpu_has((spw_isa)isa) && strcasecmp(text, spw_isa_name((spw_isa)isa)) == 0) {
            j->isa = (spw_isa)isa;
            return true;
        }
    return false;
}

static bool
take_grad(job *j, const char *text)
{
    static const spw_dtype dtypes[] = {SPW_F32, SPW_BF16, SPW_F16};
    for (int i = 0; i < 3; i++)
        if (strcmp(text, spw_dtype_name(dtypes[i])) == 0) {
            j->grad_dtype = dtypes[i];
            return true;
        }
    return false;
}

static int
parse(job *j, int argc, char **argv)
{
    static const char *const with_value[] = {"--params", "--format", "--optimizer",    "--threads",
                                             "--isa",    "--grad",   "--check-factor", NULL};
    uint64_t threads = 0;
    j->isa = spw_cpu_isa();
    j->grad_dtype = SPW_F32;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *v;
        char *end = NULL;
        bool ok;
        if (strcmp(name, "--json") == 0 || strcmp(name, "--smoke") == 0) {
            *(strcmp(name, "--json") == 0 ? &j->json : &j->smoke) = true;
            continue;
        }
        if (strcmp(name, "--check") == 0) {
            j->check = 1;
            continue;
        }
        if ((v = cli_known_value("bench adam", with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if (strcmp(name, "--params") == 0) {
            double n = strtod(v, &end);
            ok = end != v && *end == '\0' && n >= 4096 && n <= 1e12;
            j->params = ok ? (uint64_t)n : 0;
        } else if (strcmp(name, "--format") == 0)
            ok = take_formats(j, v);
        else if (strcmp(name, "--optimizer") == 0)
            ok = take_optimizers(j, v);
        else if (strcmp(name, "--threads") == 0)
            ok = cli_number(v, &threads) && threads >= 1 && threads <= THREADS_MAX;
        else if (strcmp(name, "--isa") == 0)
            ok = take_isa(j, v);
        else if (strcmp(name, "--grad") == 0)
            ok = take_grad(j, v);
        else {
            j->check = strtod(v, &end);
            ok = end != v && *end == '\0' && j->check > 0 && j->check <= 1e6;
        }
        if (!ok)
            return cli_usage("bench adam", "%s cannot be %s", name, v);
    }
    j->threads = threads > 0                             ? (uint32_t)threads
                 : spw_cpu_allowed_count() < THREADS_MAX ? spw_cpu_allowed_count()
                                                         : THREADS_MAX;
    if (j->params == 0)
        j->params = j->smoke ? 65536 : 16000000;
    if (j->format_count == 0)
        (void)take_formats(j, "all");
    if (j->optimizer_count == 0)
        j->optimizers[j->optimizer_count++] = &spw_opt_adam;
    return -1;
}

int
cli_bench_adam(int argc, char **argv)
{
    static job j;
    static run r, split;
    spw_pool *pool = NULL;
    spw_error err = {0};
    uint64_t wrong_all = 0;
    uint32_t below_count = 0;
    spw_status st;
    int rc = parse(&j, argc, argv);
    if (rc >= 0)
        return rc;
    st = spw_pool_create(&pool, j.threads, "spw-bench", &err);
    if (!j.json && st == SPW_OK) {
        printf("# bench adam  schema 1  spillway %s  build %s  isa %s  %u thread(s)  %s gradients\n", SPW_VERSION,
               cli_build_name(), spw_isa_name(j.isa), j.threads, spw_dtype_name(j.grad_dtype));
        printf("# %.1f M parameters, %d repetitions, each beside a stream that reads and writes the same arrays; "
               "medians\n",
               (double)j.params * 1e-6, j.smoke ? REPS_SMOKE : REPS);
        printf("#   rule     format           B/par  Mpar/s     rate  ceiling   %%peak %%logged  %%back  #wrong\n"
               "#                                            (GB/s)   (GB/s)\n");
    }
    for (uint32_t o = 0; o < j.optimizer_count; o++)
        for (uint32_t f = 0; f < j.format_count && st == SPW_OK; f++) {
            bool below = false;
            r = (run){.j = &j, .optimizer = j.optimizers[o]};
            split = r;
            st = row(&r, &split, j.formats[f], pool, &wrong_all, &below, &err);
            release(&r);
            release(&split);
            below_count += below;
        }
    spw_pool_destroy(pool);
    if (st != SPW_OK)
        return cli_fail(&err);
    if (below_count > 0)
        fprintf(stderr, "spillway: bench adam: %u row(s) below their limit\n", below_count);
    return wrong_all == 0 && below_count == 0 ? EXIT_DONE : EXIT_FAILED;
}
