/*
 * spillway bench io: what swap paths deliver through the engine's own file transfers, beside a bare io_uring loop in
 * the same run.
 *
 * A row is one pattern at one block size, depth and backend, on one path or on all of them at once. Each row is
 * measured in rounds, the library and the bare ring in turn, and the row shows the medians. After the rounds every byte
 * of the files is read and compared.
 */
#include "bench_io.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { LIST_MAX = 16, ROUNDS = 3 };

typedef struct job {
    const char *dirs[SPW_AIO_BENCH_DIRS_MAX];
    uint32_t dir_count;
    uint64_t file_bytes, blocks[LIST_MAX];
    uint32_t depths[LIST_MAX], block_count, depth_count;
    spw_aio_backend backends[LIST_MAX];
    uint32_t backend_count;
    bool patterns[SPW_AIO_PATTERN_COUNT];
    uint64_t threads;
    bool sqpoll, iopoll;
    double seconds;
    uint32_t rounds;
    bool json, smoke;
} job;

/* The median of one field over the rounds. */
static double
field_median(const spw_aio_bench_result *r, uint32_t n, size_t offset)
{
    double v[64] = {0};
    for (uint32_t i = 0; i < n; i++)
        v[i] = *(const double *)(const void *)((const char *)&r[i] + offset);
    return spw_median(v, n);
}
#define MEDIAN(r, n, field) field_median((r), (n), offsetof(spw_aio_bench_result, field))

spw_status
cli_bench_row(spw_aio_bench *bench, const spw_aio_bench_run *run, bool with_bare, uint32_t rounds, bench_row *row,
              spw_error *err)
{
    static spw_aio_bench_result ours[64], bare[64];
    uint32_t bare_count = 0;
    memset(row, 0, sizeof *row);
    for (uint32_t i = 0; i < rounds && i < 64; i++) {
        spw_aio_bench_run one = *run;
        spw_error no = {0};
        one.verify = run->verify && i + 1 == rounds;
        SPW_TRY(spw_aio_bench_measure(bench, &one, &ours[i], err));
        row->wrong += ours[i].wrong;
        if (!with_bare || run->aio->backend == SPW_AIO_THREADS)
            continue;
        one.bare = true;
        one.verify = false;
        if (run->pattern == SPW_AIO_PATTERN_SWAP) { /* the same bytes each way, without the order */
            one.pattern = SPW_AIO_PATTERN_MIXED;
            one.reads = 14.0 / 26;
        }
        if (spw_aio_bench_measure(bench, &one, &bare[bare_count], &no) == SPW_OK)
            bare_count++;
        else if (no.status != SPW_EUNSUPPORTED) {
            spw_error_keep_first(err, &no);
            return no.status;
        }
    }
    row->pattern = run->pattern;
    row->backend = ours[0].backend;
    row->block_bytes = run->aio->block_bytes;
    row->depth = run->aio->queue_depth;
    row->direct = ours[0].direct;
    row->rounds = rounds;
    row->gb_s = MEDIAN(ours, rounds, gb_s);
    row->burst_gb_s = MEDIAN(ours, rounds, burst_gb_s);
    row->settled_gb_s = MEDIAN(ours, rounds, settled_gb_s);
    row->p50_us = MEDIAN(ours, rounds, p50_us);
    row->p99_us = MEDIAN(ours, rounds, p99_us);
    row->cpu_s_per_gb = MEDIAN(ours, rounds, cpu_s_per_gb);
    row->device_ratio = MEDIAN(ours, rounds, device_ratio);
    row->bare_gb_s = MEDIAN(bare, bare_count, gb_s);
    row->bare_cpu_s_per_gb = MEDIAN(bare, bare_count, cpu_s_per_gb);
    snprintf(row->device_note, sizeof row->device_note, "%s", ours[0].device_note);
    return SPW_OK;
}

void
cli_bench_write_text(FILE *f, const char *text)
{
    json_t *object = cli_json_text(text);
    (void)json_dumpf(object, f, JSON_ENCODE_ANY);
    json_decref(object);
}

void
cli_bench_print_json(const bench_row *row, const char *path)
{
    printf("{\"pattern\": \"%s\", \"path\": ", spw_aio_pattern_name(row->pattern));
    cli_bench_write_text(stdout, path);
    printf(", \"backend\": \"%s\", \"block\": %llu, \"depth\": %u, \"threads\": %u, \"direct\": %s, \"rounds\": %u, "
           "\"gb_s\": %.4f, \"burst_gb_s\": %.4f, \"settled_gb_s\": %.4f, \"p50_us\": %.1f, \"p99_us\": %.1f, "
           "\"cpu_s_per_gb\": %.5f, \"wrong\": %llu",
           spw_aio_backend_name(row->backend), (unsigned long long)row->block_bytes, row->depth, row->threads,
           row->direct ? "true" : "false", row->rounds, row->gb_s, row->burst_gb_s, row->settled_gb_s, row->p50_us,
           row->p99_us, row->cpu_s_per_gb, (unsigned long long)row->wrong);
    if (row->bare_gb_s > 0)
        printf(", \"bare_gb_s\": %.4f, \"bare_cpu_s_per_gb\": %.5f, \"ratio_to_bare\": %.4f", row->bare_gb_s,
               row->bare_cpu_s_per_gb, row->gb_s / row->bare_gb_s);
    if (row->device_ratio > 0)
        printf(", \"device_ratio\": %.4f", row->device_ratio);
    puts("}");
    fflush(stdout);
}

static void
print_row(const bench_row *row, const char *path, bool show_path)
{
    char bare[32] = "-", device[32] = "-";
    if (row->bare_gb_s > 0)
        snprintf(bare, sizeof bare, "%.0f", 100 * row->gb_s / row->bare_gb_s);
    if (row->device_ratio > 0)
        snprintf(device, sizeof device, "%.0f", 100 * row->device_ratio);
    printf("  %-6s %9llu %8u %-8s %8.0f %8.0f %7.2f %7.2f %7.2f %6s %8.4f %7s %6llu%s%s\n",
           spw_aio_pattern_name(row->pattern), (unsigned long long)row->block_bytes, row->depth,
           spw_aio_backend_name(row->backend), row->p50_us, row->p99_us, row->gb_s, row->burst_gb_s, row->settled_gb_s,
           bare, row->cpu_s_per_gb, device, (unsigned long long)row->wrong, show_path ? "  " : "",
           show_path ? path : "");
    fflush(stdout);
}

static void
print_header(const job *j)
{
    char size[32];
    printf("# bench io  schema 1  spillway %s  build %s\n", SPW_VERSION, cli_build_name());
    for (uint32_t i = 0; i < j->dir_count; i++)
        printf("# path %s, file %s\n", j->dirs[i], spw_format_bytes(size, sizeof size, j->file_bytes));
    printf("# %u round(s) of %.2f s per row, medians; %%bare: of a bare io_uring loop in the same run (registered file "
           "and\n"
           "# buffers); %%disk: of these bytes that /proc/diskstats counted; latency of a block from\n"
           "# start to end (swap: of records read)\n",
           j->rounds, j->seconds);
    printf("#   op       block inflight backend       p50      p99    rate   burst settled  %%bare      CPU   %%disk "
           "#wrong\n"
           "#             (B)                       (us)     (us)  (GB/s)  (GB/s)  (GB/s)          (s/GB)\n");
}

/* Warns once per run about what makes the numbers mean something else. */
static void
warn_about(const bench_row *row, const char *path)
{
    static bool direct_told, device_told;
    if (!row->direct && !direct_told)
        fprintf(stderr, "spillway: warning: %s refuses O_DIRECT: these rates include the page cache\n", path);
    direct_told |= !row->direct;
    if (row->device_ratio > 0 && row->device_ratio < 0.95)
        fprintf(stderr, "spillway: warning: only %.0f %% of the bytes reached the device of %s during %s\n",
                100 * row->device_ratio, path, spw_aio_pattern_name(row->pattern));
    if (row->device_ratio == 0 && !device_told)
        fprintf(stderr, "spillway: warning: whether the bytes reached a device cannot be checked: %s\n",
                row->device_note[0] != '\0' ? row->device_note : "it counted none of them");
    device_told |= row->device_ratio == 0;
}

static spw_status
run_all(const job *j, spw_aio_bench *bench, uint64_t *wrong, spw_error *err)
{
    /* Each path by itself, then all at once. */
    for (uint32_t d = 0; d < j->dir_count + (j->dir_count > 1); d++) {
        const char *path = d < j->dir_count ? j->dirs[d] : "all";
        for (uint32_t p = 0; p < SPW_AIO_PATTERN_COUNT; p++)
            for (uint32_t i = 0; i < j->block_count * j->depth_count * j->backend_count && j->patterns[p]; i++) {
                spw_aio_options aio = {.backend = j->backends[i % j->backend_count],
                                       .block_bytes = j->blocks[i / j->backend_count / j->depth_count],
                                       .queue_depth = j->depths[i / j->backend_count % j->depth_count],
                                       .sqpoll = j->sqpoll,
                                       .iopoll = j->iopoll};
                spw_aio_bench_run run = {.pattern = (spw_aio_pattern)p,
                                         .aio = &aio,
                                         .duration_ns = (uint64_t)(j->seconds * 1e9),
                                         .dir_first = d < j->dir_count ? d : 0,
                                         .dir_count = d < j->dir_count ? 1 : j->dir_count,
                                         .verify = true};
                bench_row row;
                aio.thread_count = j->threads > 0          ? (uint32_t)j->threads
                                   : aio.queue_depth < 256 ? aio.queue_depth
                                                           : 256;
                SPW_TRY(cli_bench_row(bench, &run, true, j->rounds, &row, err));
                row.threads = row.backend == SPW_AIO_THREADS ? aio.thread_count : 0;
                *wrong += row.wrong;
                if (j->json)
                    cli_bench_print_json(&row, path);
                else
                    print_row(&row, path, j->dir_count > 1);
                warn_about(&row, path);
            }
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- the command line */

/* Calls take(text) for each part between commas. */
static bool
each_part(const char *text, bool (*take)(job *j, const char *part), job *j)
{
    char part[64];
    for (;;) {
        size_t n = strcspn(text, ",");
        if (n == 0 || n >= sizeof part)
            return false;
        memcpy(part, text, n);
        part[n] = '\0';
        if (!take(j, part))
            return false;
        if (text[n] == '\0')
            return true;
        text += n + 1;
    }
}

static bool
take_block(job *j, const char *part)
{
    uint64_t v;
    if (j->block_count == LIST_MAX || !spw_parse_bytes(part, &v) || v < 4096 || v > 32u << 20 || (v & (v - 1)) != 0)
        return false;
    j->blocks[j->block_count++] = v;
    return true;
}

static bool
take_depth(job *j, const char *part)
{
    uint64_t v;
    if (j->depth_count == LIST_MAX || !cli_number(part, &v) || v < 1 || v > 1024)
        return false;
    j->depths[j->depth_count++] = (uint32_t)v;
    return true;
}

static bool
take_backend(job *j, const char *part)
{
    for (int b = 0; b < SPW_AIO_BACKEND_COUNT && j->backend_count < LIST_MAX; b++)
        if (strcmp(part, spw_aio_backend_name((spw_aio_backend)b)) == 0) {
            j->backends[j->backend_count++] = (spw_aio_backend)b;
            return true;
        }
    return false;
}

static bool
take_pattern(job *j, const char *part)
{
    for (int p = 0; p < SPW_AIO_PATTERN_COUNT; p++)
        if (strcmp(part, spw_aio_pattern_name((spw_aio_pattern)p)) == 0) {
            j->patterns[p] = true;
            return true;
        }
    return false;
}

static bool
take_seconds(job *j, const char *text)
{
    char *end;
    j->seconds = strtod(text, &end);
    return end != text && *end == '\0' && j->seconds >= 0.05 && j->seconds <= 3600;
}

/* Fills in what was not said; returns an exit code, or -1 to go on. */
static int
parse(job *j, int argc, char **argv)
{
    static const char *const with_value[] = {"--size",    "--block",   "--depth",   "--backend",
                                             "--pattern", "--threads", "--seconds", NULL};
    bool pattern_given = false, seconds_given = false;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *v;
        if (strcmp(name, "--json") == 0)
            j->json = true;
        else if (strcmp(name, "--smoke") == 0)
            j->smoke = true;
        else if (strcmp(name, "--sqpoll") == 0)
            j->sqpoll = true;
        else if (strcmp(name, "--iopoll") == 0)
            j->iopoll = true;
        else if (name[0] != '-') {
            if (j->dir_count == SPW_AIO_BENCH_DIRS_MAX)
                return cli_usage("bench io", "it takes at most %d paths", SPW_AIO_BENCH_DIRS_MAX);
            if (name[0] == '\0')
                return cli_usage("bench io", "a path is empty");
            j->dirs[j->dir_count++] = name;
        } else {
            bool ok;
            if ((v = cli_known_value("bench io", with_value, argc, argv, &i)) == NULL)
                return EXIT_USAGE;
            if (strcmp(name, "--size") == 0)
                ok = spw_parse_bytes(v, &j->file_bytes) && j->file_bytes >= 64u << 20;
            else if (strcmp(name, "--block") == 0)
                ok = each_part(v, take_block, j);
            else if (strcmp(name, "--depth") == 0)
                ok = each_part(v, take_depth, j);
            else if (strcmp(name, "--backend") == 0)
                ok = each_part(v, take_backend, j);
            else if (strcmp(name, "--pattern") == 0)
                ok = pattern_given = each_part(v, take_pattern, j);
            else if (strcmp(name, "--threads") == 0)
                ok = cli_number(v, &j->threads) && j->threads >= 1 && j->threads <= 256;
            else
                ok = seconds_given = take_seconds(j, v);
            if (!ok)
                return cli_usage("bench io", "%s cannot be %s", name, v);
        }
    }
    if (j->dir_count == 0)
        return cli_usage("bench io", "it needs a folder on the disk to measure");
    if (j->file_bytes == 0)
        j->file_bytes = j->smoke ? 64u << 20 : 2ull << 30;
    j->file_bytes -= j->file_bytes % (64u << 20);
    if (j->block_count == 0)
        j->blocks[j->block_count++] = j->smoke ? 128 << 10 : 256 << 10;
    if (j->depth_count == 0)
        j->depths[j->depth_count++] = 8;
    if (j->backend_count == 0)
        j->backends[j->backend_count++] = SPW_AIO_AUTO;
    for (int p = 0; p < SPW_AIO_PATTERN_COUNT && !pattern_given; p++)
        j->patterns[p] = true;
    if (!seconds_given)
        j->seconds = j->smoke ? 0.05 : 1;
    j->rounds = j->smoke ? 1 : ROUNDS;
    return -1;
}

int
cli_bench_io(int argc, char **argv)
{
    static job j;
    spw_aio_bench *bench = NULL;
    spw_error err = {0};
    uint64_t wrong = 0;
    spw_status st;
    int rc = parse(&j, argc, argv);
    if (rc >= 0)
        return rc;
    cli_catch_signals();
    if (!j.json)
        print_header(&j);
    st =
        spw_aio_bench_open(&bench,
                           &(spw_aio_bench_options){
                               .dirs = j.dirs, .dir_count = j.dir_count, .file_bytes = j.file_bytes, .stop = &cli_stop},
                           &err);
    if (st == SPW_OK)
        st = run_all(&j, bench, &wrong, &err);
    spw_aio_bench_close(bench);
    if (st != SPW_OK)
        return cli_fail(&err);
    if (wrong > 0) {
        fprintf(stderr, "spillway: %llu page(s) held other bytes than were written\n", (unsigned long long)wrong);
        return EXIT_FAILED;
    }
    return EXIT_DONE;
}
