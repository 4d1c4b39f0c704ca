/*
 * bench_aio - what aio reaches beside fio on the same disk, in one run. usage: bench_aio FOLDER [ROUNDS]
 *
 * Four contenders: this library on io_uring and on threads, fio's io_uring engine as it comes, and the same with huge
 * pages, registered buffers and files. Each looks for its own best block size and depth first; then all run in turn,
 * a second each with a pause in between (disks of virtual machines have a burst allowance), the order rotating from
 * round to round. Printed are medians, and per round ratios' medians, because only neighbours in time are comparable.
 */
#include "spw_aio.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OURS, THREADS, FIO, FIO_HUGE, CONTENDERS, ROUNDS_MAX = 32, CANDIDATES = 3, TRIALS = 5 };
static const char *const names[CONTENDERS] = {"aio io_uring", "aio threads", "fio", "fio huge"};
static const struct {
    unsigned block_kib, depth;
} candidates[CANDIDATES] = {{512, 8}, {1024, 4}, {1024, 8}};
static const unsigned long long FILE_BYTES = 2ull << 30;

typedef struct figure {
    double gb_s, cpu;
} figure;

static char fio_path[4096];
static spw_aio_bench *bench;
static bool have_fio, have_huge;
static unsigned long long wrong;

static bool
measure_ours(spw_aio_pattern pattern, spw_aio_backend backend, int candidate, double seconds, bool verify, figure *out)
{
    spw_aio_options aio = {.backend = backend,
                           .block_bytes = candidates[candidate].block_kib * 1024ull,
                           .queue_depth = candidates[candidate].depth,
                           .thread_count = candidates[candidate].depth};
    spw_aio_bench_run run = {
        .pattern = pattern, .aio = &aio, .duration_ns = (uint64_t)(seconds * 1e9), .dir_count = 1, .verify = verify};
    spw_aio_bench_result r;
    spw_error err = {0};
    if (spw_aio_bench_measure(bench, &run, &r, &err) != SPW_OK) {
        fprintf(stderr, "bench_aio: %s\n", err.message);
        return false;
    }
    wrong += r.wrong;
    *out = (figure){r.gb_s * r.seconds / (r.seconds - r.flush_seconds), r.cpu_s_per_gb}; /* fio counts no flush */
    return true;
}

static double
number(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

static bool
measure_fio(spw_aio_pattern pattern, bool huge, int candidate, double seconds, figure *out)
{
    static const char *const modes[SPW_AIO_PATTERN_COUNT] = {"--rw=read", "--rw=write", "--rw=rw --rwmixread=50",
                                                             "--rw=rw --rwmixread=54"};
    char command[8192], text[1 << 17];
    size_t n;
    json_t *root, *job, *read, *write;
    double bytes, run_s, write_s;
    FILE *f;
    snprintf(
        command, sizeof command,
        "fio --name=x --filename='%s' --size=%llu --direct=1 --ioengine=io_uring --output-format=json --time_based "
        "--runtime=%.0fms --bs=%uk --iodepth=%u %s %s 2>&1",
        fio_path, FILE_BYTES, seconds * 1000, candidates[candidate].block_kib, candidates[candidate].depth,
        modes[pattern], huge ? "--mem=mmaphuge --fixedbufs --registerfiles" : "");
    f = popen(command, "r");
    if (f == NULL)
        return false;
    n = fread(text, 1, sizeof text - 1, f);
    text[n] = '\0';
    if (pclose(f) != 0 || strchr(text, '{') == NULL) {
        fprintf(stderr, "bench_aio: fio failed: %.300s\n", text);
        return false;
    }
    root = json_loads(strchr(text, '{'), 0, NULL);
    job = json_array_get(json_object_get(root, "jobs"), 0);
    read = json_object_get(job, "read");
    write = json_object_get(job, "write");
    bytes = number(read, "io_bytes") + number(write, "io_bytes");
    run_s = number(read, "runtime") / 1000;
    write_s = number(write, "runtime") / 1000;
    if (write_s > run_s)
        run_s = write_s;
    if (bytes > 0 && run_s > 0)
        *out = (figure){bytes * 1e-9 / run_s,
                        (number(job, "usr_cpu") + number(job, "sys_cpu")) / 100 * run_s / (bytes * 1e-9)};
    json_decref(root);
    return bytes > 0 && run_s > 0;
}

static bool
measure(int who, spw_aio_pattern pattern, int candidate, double seconds, bool verify, figure *out)
{
    bool ok = who < FIO ? measure_ours(pattern, who == OURS ? SPW_AIO_URING : SPW_AIO_THREADS, candidate, seconds,
                                       verify, out)
                        : measure_fio(pattern, who == FIO_HUGE, candidate, seconds, out);
    usleep(1000000);
    return ok;
}

static int
compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double
median(const double *v, int n)
{
    double sorted[ROUNDS_MAX];
    memcpy(sorted, v, (size_t)n * sizeof *v);
    qsort(sorted, (size_t)n, sizeof *sorted, compare);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static bool
present(int who)
{
    return !(who == FIO && !have_fio) && !(who == FIO_HUGE && !have_huge);
}

/* The best median of five short runs, all candidates in turn; within 3 % of it, as in tune, the least CPU time. */
static bool
choose(int who, spw_aio_pattern pattern, int *best)
{
    double rates[CANDIDATES][TRIALS], cpus[CANDIDATES][TRIALS], top = 0, least = 1e9;
    for (int r = 0; r < TRIALS; r++)
        for (int c = 0; c < CANDIDATES; c++) {
            figure f;
            if (!measure(who, pattern, c, 0.5, false, &f))
                return false;
            rates[c][r] = f.gb_s;
            cpus[c][r] = f.cpu;
        }
    for (int c = 0; c < CANDIDATES; c++)
        top = median(rates[c], TRIALS) > top ? median(rates[c], TRIALS) : top;
    for (int c = 0; c < CANDIDATES; c++)
        if (median(rates[c], TRIALS) >= 0.97 * top && median(cpus[c], TRIALS) < least) {
            least = median(cpus[c], TRIALS);
            *best = c;
        }
    return true;
}

static bool
run_pattern(spw_aio_pattern pattern, int rounds)
{
    static figure got[CONTENDERS][ROUNDS_MAX];
    int best[CONTENDERS];
    for (int who = 0; who < CONTENDERS; who++)
        if (present(who) && !choose(who, pattern, &best[who]))
            return false;
    for (int r = 0; r < rounds; r++)
        for (int k = 0; k < CONTENDERS; k++) {
            int who = (r + k) % CONTENDERS;
            if (!present(who))
                continue;
            if (!measure(who, pattern, best[who], 1.0, who < FIO && r + 1 == rounds, &got[who][r]))
                return false;
        }
    for (int who = 0; who < CONTENDERS; who++) {
        double rate[ROUNDS_MAX], cpu[ROUNDS_MAX], to[2][ROUNDS_MAX], cpu_to[ROUNDS_MAX];
        if (!present(who))
            continue;
        for (int r = 0; r < rounds; r++) {
            rate[r] = got[who][r].gb_s;
            cpu[r] = got[who][r].cpu;
            to[0][r] = have_fio ? got[who][r].gb_s / got[FIO][r].gb_s : 0;
            to[1][r] = have_huge ? got[who][r].gb_s / got[FIO_HUGE][r].gb_s : 0;
            cpu_to[r] = have_fio ? got[who][r].cpu / got[FIO][r].cpu : 0;
        }
        printf("  %-6s %-13s %9u %8u %8.2f %8.4f %8.2f %8.2f %8.2f\n", spw_aio_pattern_name(pattern), names[who],
               candidates[best[who]].block_kib * 1024, candidates[best[who]].depth, median(rate, rounds),
               median(cpu, rounds), median(to[0], rounds), median(to[1], rounds), median(cpu_to, rounds));
        fflush(stdout);
    }
    return true;
}

/* Sets how many huge pages the kernel keeps; returns how many there were, or -1. */
static long
huge_pages_set(long count, bool only_more)
{
    long before = -1;
    FILE *f = fopen("/proc/sys/vm/nr_hugepages", "r+");
    if (f == NULL)
        return -1;
    if (fscanf(f, "%ld", &before) != 1)
        before = -1;
    if (before >= 0 && !(only_more && before >= count)) {
        rewind(f);
        fprintf(f, "%ld", count);
    }
    fclose(f);
    return before;
}

int
main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : ".";
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    long before = huge_pages_set(64, true);
    spw_error err = {0};
    bool ok;
    snprintf(fio_path, sizeof fio_path, "%s/spw-bench-fio-%ld.bin", dir, (long)getpid());
    rounds = rounds < 1 ? 1 : rounds > ROUNDS_MAX ? ROUNDS_MAX : rounds;
    have_fio = system("command -v fio >/dev/null 2>&1") == 0;
    ok = spw_aio_bench_open(&bench, &(spw_aio_bench_options){.dirs = &dir, .dir_count = 1, .file_bytes = FILE_BYTES},
                            &err) == SPW_OK;
    if (!ok)
        fprintf(stderr, "bench_aio: %s\n", err.message);
    if (ok && have_fio) { /* its file is laid out as ours, and huge pages are tried */
        figure f;
        ok = measure_fio(SPW_AIO_PATTERN_WRITE, false, 2, 3, &f);
        have_huge = ok && measure_fio(SPW_AIO_PATTERN_READ, true, 2, 0.2, &f);
    }
    printf(
        "# bench aio  schema 1  file 2 GiB in %s, %d rounds of 1 s, medians; each at its own best block and depth%s\n",
        dir, rounds, have_fio ? have_huge ? "" : "; no huge pages for fio" : "; fio is not installed");
    printf("#   op   contender         block inflight     rate      CPU   of fio  of huge   CPU of\n"
           "#                            (B)            (GB/s)   (s/GB)                       fio\n");
    for (int p = 0; p < SPW_AIO_PATTERN_COUNT && ok; p++)
        ok = run_pattern((spw_aio_pattern)p, rounds);
    spw_aio_bench_close(bench);
    (void)unlink(fio_path);
    if (before >= 0 && before < 64)
        (void)huge_pages_set(before, false);
    if (wrong > 0)
        fprintf(stderr, "bench_aio: %llu wrong pages\n", wrong);
    return ok && wrong == 0 ? 0 : 1;
}
