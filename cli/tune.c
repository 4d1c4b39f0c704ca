/*
 * spillway tune: finds the aio settings for a set of paths, and says what a training step will cost on them.
 *
 * The search measures the pattern of a training step (bench io calls it swap). Every candidate runs for a moment, in
 * random order; the better half runs longer, and so on until four are left, which run in turn several times. A disk's
 * speed drifts while this goes on, so a candidate's score is its rate relative to the others of the same round. Among
 * the best within 3 % the one with the least CPU time wins: those cycles are the optimizer's.
 */
#include "bench_io.h"
#include <jansson.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CANDIDATES_MAX = 40, SCORES_MAX = 16, FINALISTS = 4, BAR = 40 };

typedef struct candidate {
    spw_aio_options aio;
    double scores[SPW_AIO_BENCH_DIRS_MAX][SCORES_MAX]; /* rate / the round's median */
    uint32_t score_count[SPW_AIO_BENCH_DIRS_MAX];
    double rate[SPW_AIO_BENCH_DIRS_MAX], cpu; /* of the last round it was in */
    double score;                             /* median over rounds, mean over paths */
    bool refused;
} candidate;

typedef struct tuning {
    const char *dirs[SPW_AIO_BENCH_DIRS_MAX];
    uint32_t dir_count;
    uint64_t file_bytes;
    double seconds; /* per path */
    const char *out_path;
    double params;
    bool json;
    candidate candidates[CANDIDATES_MAX];
    candidate *order[CANDIDATES_MAX]; /* those still in, best first after a round */
    uint32_t candidate_count, alive;
} tuning;

static void
candidates_make(tuning *t)
{
    static const uint32_t block_kib[] = {128, 256, 512, 1024, 2048, 4096}, depths[] = {4, 8, 16, 32};
    static const uint32_t threads[] = {4, 8, 16};
    for (size_t b = 0; b < sizeof block_kib / sizeof *block_kib; b++)
        for (size_t d = 0; d < sizeof depths / sizeof *depths; d++)
            if (block_kib[b] * depths[d] <= 64 * 1024)
                t->candidates[t->candidate_count++].aio = (spw_aio_options){
                    .backend = SPW_AIO_URING, .block_bytes = block_kib[b] * 1024ull, .queue_depth = depths[d]};
    for (size_t b = 3; b < 6; b += 2)
        for (size_t d = 0; d < sizeof threads / sizeof *threads; d++)
            t->candidates[t->candidate_count++].aio = (spw_aio_options){.backend = SPW_AIO_THREADS,
                                                                        .block_bytes = block_kib[b] * 1024ull,
                                                                        .queue_depth = threads[d],
                                                                        .thread_count = threads[d]};
    for (uint32_t i = 0; i < t->candidate_count; i++)
        t->order[i] = &t->candidates[i];
    t->alive = t->candidate_count;
}

static int
compare_scores(const void *a, const void *b)
{
    const candidate *x = *(candidate *const *)a, *y = *(candidate *const *)b;
    return x->score > y->score ? -1 : x->score < y->score;
}

/* Everybody who is still in runs once on every path; the scores and the order follow. */
static spw_status
one_round(tuning *t, spw_aio_bench *bench, double seconds, spw_error *err)
{
    static uint64_t rounds;
    for (uint32_t i = t->alive; i > 1; i--) {
        uint32_t words[4], k;
        candidate *c = t->order[i - 1];
        spw_philox(rounds, 0, i, words);
        k = words[0] % i;
        t->order[i - 1] = t->order[k];
        t->order[k] = c;
    }
    rounds++;
    for (uint32_t d = 0; d < t->dir_count; d++) {
        double rates[CANDIDATES_MAX], middle;
        uint32_t n = 0;
        for (uint32_t i = 0; i < t->alive; i++) {
            candidate *c = t->order[i];
            spw_aio_bench_run run = {.pattern = SPW_AIO_PATTERN_SWAP,
                                     .aio = &c->aio,
                                     .duration_ns = (uint64_t)(seconds * 1e9),
                                     .dir_first = d,
                                     .dir_count = 1};
            bench_row row;
            spw_error refusal = {0};
            spw_status st = c->refused ? SPW_EUNSUPPORTED : cli_bench_row(bench, &run, false, 1, &row, &refusal);
            c->rate[d] = 0;
            if (st == SPW_EUNSUPPORTED ||
                st == SPW_EINVAL) { /* no io_uring here; or more in flight than the file holds */
                c->refused = true;
                continue;
            }
            if (st != SPW_OK) {
                spw_error_keep_first(err, &refusal);
                return st;
            }
            row.threads = c->aio.thread_count;
            if (t->json)
                cli_bench_print_json(&row, t->dirs[d]);
            c->rate[d] = rates[n++] = row.gb_s;
            c->cpu = row.cpu_s_per_gb;
        }
        middle = spw_median(rates, n);
        for (uint32_t i = 0; i < t->alive; i++) {
            candidate *c = t->order[i];
            if (!c->refused && c->score_count[d] < SCORES_MAX)
                c->scores[d][c->score_count[d]++] = c->rate[d] / middle;
        }
    }
    for (uint32_t i = 0; i < t->alive; i++) {
        candidate *c = t->order[i];
        c->score = c->refused ? -1 : 0;
        for (uint32_t d = 0; d < t->dir_count && !c->refused; d++)
            c->score += spw_median(c->scores[d], c->score_count[d]) / t->dir_count;
    }
    qsort(t->order, t->alive, sizeof *t->order, compare_scores);
    return SPW_OK;
}

static spw_status
search(tuning *t, spw_aio_bench *bench, spw_error *err)
{
    /* About 35 of 60 seconds: 30, 15, 8 and 4 candidates. */
    const double unit = t->seconds / 60;
    double seconds = 0.3 * unit;
    while (t->alive > FINALISTS) {
        SPW_TRY(one_round(t, bench, seconds, err));
        t->alive = t->alive / 2 > FINALISTS ? t->alive / 2 : FINALISTS;
        while (t->alive > 1 && t->order[t->alive - 1]->refused)
            t->alive--;
        seconds *= 1.5;
    }
    /* The scores of these begin anew: against the weak ones of the first rounds everybody looks good. */
    for (uint32_t i = 0; i < t->alive; i++)
        memset(t->order[i]->score_count, 0, sizeof t->order[i]->score_count);
    for (int round = 0; round < 3; round++)
        SPW_TRY(one_round(t, bench, 0.7 * unit, err));
    for (uint32_t i = t->alive; i-- > 1;) /* among equals the thriftier */
        if (t->order[i]->score > t->order[0]->score * 0.97 && t->order[i]->cpu < t->order[0]->cpu * 0.8) {
            candidate *c = t->order[0];
            t->order[0] = t->order[i];
            t->order[i] = c;
        }
    return SPW_OK;
}

/* ---------------------------------------------------------------- what it says */

static void
print_table(const tuning *t)
{
    double top = 0;
    printf("\n# candidates that came far, best first: relative to the others of their rounds; rate of the last, all "
           "paths\n");
    printf("#    block inflight backend    score  (GB/s)  CPU (s/GB)\n");
    for (uint32_t i = 0; i < t->candidate_count && i < 8; i++)
        for (uint32_t d = 0; d < t->dir_count; d++)
            top = fmax(top, t->order[i]->rate[d]);
    for (uint32_t i = 0; i < t->candidate_count && i < 8; i++) {
        const candidate *c = t->order[i];
        double rate = 0;
        char bar[BAR + 1] = "";
        if (c->refused)
            continue;
        for (uint32_t d = 0; d < t->dir_count; d++)
            rate += c->rate[d];
        for (int k = 0; k < BAR && k < (int)lround(BAR * rate / (top * t->dir_count)); k++)
            bar[k] = '#';
        printf("  %8llu %8u %-8s %7.2f %7.2f %8.4f  %s%s\n", (unsigned long long)c->aio.block_bytes, c->aio.queue_depth,
               spw_aio_backend_name(c->aio.backend), c->score, rate, c->cpu, bar, i == 0 ? " <- chosen" : "");
    }
}

static void
print_prediction(const tuning *t, double gb_s)
{
    const double sizes[] = {1.3e9, 7e9, 13e9, 70e9};
    printf("\n# the NVMe part of a step at %.2f GB/s (all paths together, reading and writing), format split\n", gb_s);
    printf("#  parameters    records+weights on NVMe    records only\n");
    printf("#  (billions)   read GB  write GB       s   read GB  write GB       s\n");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        double n = t->params > 0 ? t->params : sizes[i];
        printf("  %11.2f  %8.1f  %8.1f %7.1f  %8.1f  %8.1f %7.1f\n", n * 1e-9, n * 14e-9, n * 12e-9, n * 26e-9 / gb_s,
               n * 10e-9, n * 10e-9, n * 20e-9 / gb_s);
        if (t->params > 0)
            break;
    }
}

/* As it is from anywhere: the file is there to be included, and a relative path would be another folder in another working directory. */
static const char *
path_from_anywhere(const char *dir, char room[PATH_MAX])
{
    return dir[0] != '/' && realpath(dir, room) != NULL ? room : dir;
}

/* The file is JSON, whose text is UTF-8. */
static spw_status
check_names(const tuning *t, spw_error *err)
{
    char room[PATH_MAX];
    for (uint32_t d = 0; d < t->dir_count; d++) {
        json_t *name = json_string(path_from_anywhere(t->dirs[d], room));
        if (name == NULL)
            return SPW_RAISE(err, SPW_EINVAL,
                             "-o %s: %s is not UTF-8, and a configuration cannot name it: name it by a link to it",
                             t->out_path, t->dirs[d]);
        json_decref(name);
    }
    return SPW_OK;
}

static void
write_paths(FILE *f, const tuning *t, const double *weights)
{
    char room[PATH_MAX];
    fputs("{\"nvme_path\": [", f);
    for (uint32_t d = 0; d < t->dir_count; d++) {
        fputs(d > 0 ? ", {\"path\": " : "{\"path\": ", f);
        cli_bench_write_text(f, path_from_anywhere(t->dirs[d], room));
        fprintf(f, ", \"weight\": %.3f}", weights[d]);
    }
    fputs("]}", f);
}

static void
write_config(FILE *f, const tuning *t, const double *weights)
{
    const spw_aio_options *aio = &t->order[0]->aio;
    fprintf(f,
            "{\n  \"aio\": {\"backend\": \"%s\", \"block_size\": %llu, \"queue_depth\": %u, \"thread_count\": %u},\n",
            spw_aio_backend_name(aio->backend), (unsigned long long)aio->block_bytes, aio->queue_depth,
            aio->thread_count > 0 ? aio->thread_count : 4);
    fputs("  \"zero_optimization\": {\n    \"offload_param\": ", f);
    write_paths(f, t, weights);
    fputs(",\n    \"offload_optimizer\": ", f);
    write_paths(f, t, weights);
    fputs("\n  }\n}\n", f);
}

/* Beside its place, then renamed, so that a full disk leaves an older file as it was. */
static spw_status
write_file(const tuning *t, const double *weights, spw_error *err)
{
    char partial[4200];
    bool ok;
    FILE *f;
    snprintf(partial, sizeof partial, "%s.partial", t->out_path);
    f = fopen(partial, "we");
    if (f == NULL)
        return SPW_RAISE_SYS(err, errno, "create %s", partial);
    write_config(f, t, weights);
    ok = fflush(f) == 0;
    ok = fclose(f) == 0 && ok;
    if (ok && rename(partial, t->out_path) == 0)
        return SPW_OK;
    spw_error_raise_sys(err, errno, "write %s", t->out_path);
    (void)unlink(partial);
    return err->status;
}

/* The chosen settings on each path and on all at once; gb_s: the swap rate of all. */
static spw_status
final_rows(tuning *t, spw_aio_bench *bench, double *weights, double *gb_s, uint64_t *wrong, spw_error *err)
{
    const double seconds = t->seconds / 60;
    for (uint32_t d = 0; d <= t->dir_count; d++) {
        bool all = d == t->dir_count;
        if (all && t->dir_count == 1)
            break;
        for (uint32_t p = 0; p < SPW_AIO_PATTERN_COUNT; p++) {
            spw_aio_bench_run run = {.pattern = (spw_aio_pattern)p,
                                     .aio = &t->order[0]->aio,
                                     .duration_ns = (uint64_t)(seconds * 1e9),
                                     .dir_first = all ? 0 : d,
                                     .dir_count = all ? t->dir_count : 1,
                                     .verify = p == SPW_AIO_PATTERN_SWAP};
            bench_row row;
            SPW_TRY(cli_bench_row(bench, &run, false, 1, &row, err));
            *wrong += row.wrong;
            row.threads = t->order[0]->aio.thread_count;
            if (t->json)
                cli_bench_print_json(&row, all ? "all" : t->dirs[d]);
            else
                printf("  %-6s %8.2f %9.0f %9.0f %10.4f  %s\n", spw_aio_pattern_name(row.pattern), row.gb_s, row.p50_us,
                       row.p99_us, row.cpu_s_per_gb, all ? "all" : t->dirs[d]);
            if (p == SPW_AIO_PATTERN_SWAP && !all)
                weights[d] = row.gb_s;
            if (p == SPW_AIO_PATTERN_SWAP)
                *gb_s = row.gb_s;
        }
    }
    return SPW_OK;
}

static int
parse(tuning *t, int argc, char **argv)
{
    static const char *const with_value[] = {"-o", "--seconds", "--params", "--size", NULL};
    t->seconds = 60;
    t->file_bytes = 1ull << 30;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *v, *takes = "";
        char *end = NULL;
        bool ok = true;
        if (strcmp(name, "--json") == 0) {
            t->json = true;
            continue;
        }
        if (name[0] != '-') {
            if (t->dir_count == SPW_AIO_BENCH_DIRS_MAX)
                return cli_usage("tune", "at most %d paths", SPW_AIO_BENCH_DIRS_MAX);
            if (name[0] == '\0') /* of a variable that is not set; with a "/" behind it, it would be the root */
                return cli_usage("tune", "a path is empty");
            t->dirs[t->dir_count++] = name;
            continue;
        }
        if ((v = cli_known_value("tune", with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if (strcmp(name, "-o") == 0)
            t->out_path = v;
        else if (strcmp(name, "--seconds") == 0) {
            takes = "5 to 3600";
            t->seconds = strtod(v, &end);
            ok = end != v && *end == '\0' && t->seconds >= 5 && t->seconds <= 3600;
        } else if (strcmp(name, "--params") == 0) {
            takes = "1 to 1e15";
            t->params = strtod(v, &end);
            ok = end != v && *end == '\0' && t->params >= 1 && t->params <= 1e15;
        } else {
            takes = "at least 256MiB";
            ok = spw_parse_bytes(v, &t->file_bytes) && t->file_bytes >= 256u << 20;
        }
        if (!ok)
            return cli_usage("tune", "%s takes %s, not %s", name, takes, v);
    }
    if (t->dir_count == 0)
        return cli_usage("tune", "a folder on the disk to tune for is needed");
    t->file_bytes -= t->file_bytes % (64u << 20);
    return -1;
}

int
cli_tune(int argc, char **argv)
{
    static tuning t;
    double weights[SPW_AIO_BENCH_DIRS_MAX] = {0}, gb_s = 0;
    spw_aio_bench *bench = NULL;
    spw_error err = {0};
    uint64_t wrong = 0;
    spw_status st;
    int rc = parse(&t, argc, argv);
    if (rc >= 0)
        return rc;
    if (t.out_path != NULL && (cli_check_replaced("-o", t.out_path, &err) != SPW_OK || check_names(&t, &err) != SPW_OK))
        return cli_fail(&err);
    cli_catch_signals();
    candidates_make(&t);
    if (!t.json)
        printf("# tune  schema 1  spillway %s  build %s; %u candidates, about %.0f s per path\n", SPW_VERSION,
               cli_build_name(), t.candidate_count, t.seconds);
    fflush(stdout);
    st =
        spw_aio_bench_open(&bench,
                           &(spw_aio_bench_options){
                               .dirs = t.dirs, .dir_count = t.dir_count, .file_bytes = t.file_bytes, .stop = &cli_stop},
                           &err);
    if (st == SPW_OK)
        st = search(&t, bench, &err);
    if (st == SPW_OK && !t.json) {
        print_table(&t);
        printf("\n# the chosen settings\n#   op       rate       p50       p99        CPU  path\n"
               "#          (GB/s)      (us)      (us)     (s/GB)\n");
    }
    if (st == SPW_OK)
        st = final_rows(&t, bench, weights, &gb_s, &wrong, &err);
    spw_aio_bench_close(bench);
    if (st == SPW_OK && t.out_path != NULL)
        st = write_file(&t, weights, &err);
    if (st != SPW_OK)
        return cli_fail(&err);
    if (!t.json) {
        print_prediction(&t, gb_s);
        if (t.out_path != NULL)
            printf("\n# written to %s; a configuration takes it with \"include\": \"%s\" (and without an nvme_path)\n",
                   t.out_path, t.out_path);
        else {
            printf("\n# for the configuration:\n");
            write_config(stdout, &t, weights);
        }
    }
    if (wrong > 0) {
        fprintf(stderr, "spillway: %llu page(s) held other bytes than were written\n", (unsigned long long)wrong);
        return EXIT_FAILED;
    }
    return EXIT_DONE;
}
