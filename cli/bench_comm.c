/*
 * spillway bench comm: what ranks receive from each other in a second, by the collectives that train, on a host and between hosts. Started
 * as the training is: with -n here, by mpirun, srun or torchrun across hosts. What it finds at the largest size is kept on each host, for
 * the times of spillway plan and the bounds of spillway train.
 */
#include "cli.h"
#include <jansson.h>
#include <stdio.h>

typedef struct options {
    const char *device, *collectives;
    cli_sizes sizes;
    double seconds; /* for each row */
    bool json, smoke;
    uint64_t ranks; /* 0: not said */
} options;

static spw_status
print_header(const options *o, const spw_comm_info *comm, const spw_rank_bench_info *info, spw_error *err)
{
    if (o->json)
        return cli_show_json("bench comm", CLI_DIGITS_MEASURED,
                             json_pack("{s:{s:s,s:i,s:s,s:s,s:s,s:i,s:i,s:i,s:b,s:s}}", "header", "bench", "comm",
                                       "schema", 1, "version", SPW_VERSION, "build", cli_build_name(), "device",
                                       info->device, "ranks", (int)comm->world, "ranks_here", (int)comm->machine_world,
                                       "hosts", (int)comm->host_count, "linked", (int)info->linked, "how", info->why),
                             err);
    printf("# bench comm  schema 1  spillway %s  %u ranks on %u host%s, %u here  build %s\n", SPW_VERSION, comm->world,
           comm->host_count, comm->host_count > 1 ? "s" : "", comm->machine_world, cli_build_name());
    printf("# %s; device %s\n", info->why, info->device);
    printf("# GB received a second, by each rank and by all ranks of a host; memcpy: of as many bytes, all ranks at "
           "once\n");
    printf("#   from     what              size      calls   time (us)  a rank   a host  %%memcpy  cpu s/GB  #wrong\n");
    return SPW_OK;
}

static spw_status
print_row(const options *o, spw_rank_way way, spw_rank_use use, uint64_t size, const spw_rank_rate *r, spw_error *err)
{
    char share[16] = "-";
    if (o->json)
        return cli_show_json("bench comm", CLI_DIGITS_MEASURED,
                             json_pack("{s:s,s:s,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:I}", "from", spw_rank_way_name(way),
                                       "op", spw_rank_use_name(use), "size", (json_int_t)size, "calls",
                                       (json_int_t)r->calls, "us", r->seconds * 1e6, "gb_s", r->rank * 1e-9,
                                       "host_gb_s", r->host * 1e-9, "memcpy_gb_s", r->memcpy * 1e-9, "cpu_s_per_gb",
                                       r->cpu > 0 ? 1e9 / r->cpu : 0, "wrong", (json_int_t)r->wrong),
                             err);
    if (r->memcpy > 0)
        snprintf(share, sizeof share, "%.0f", 100 * r->rank / r->memcpy);
    printf("  %-8s %-8s %13llu %10llu %11.1f %7.2f %8.2f %8s %9.3f %7llu\n", spw_rank_way_name(way),
           spw_rank_use_name(use), (unsigned long long)size, (unsigned long long)r->calls, r->seconds * 1e6,
           r->rank * 1e-9, r->host * 1e-9, share, r->cpu > 0 ? 1e9 / r->cpu : 0, (unsigned long long)r->wrong);
    fflush(stdout);
    return SPW_OK;
}

static spw_status
run_rows(const options *o, bool speaks, spw_rank_bench *bench, spw_error *err)
{
    const spw_rank_bench_info *info = spw_rank_bench_get_info(bench);
    uint64_t wrong = 0;
    for (int way = 0; way < SPW_WAY_COUNT; way++) {
        for (int use = 0; info->there[way] && use < SPW_USE_COUNT; use++) {
            for (uint32_t i = 0; i < o->sizes.count; i++) {
                spw_rank_rate rate;
                SPW_TRY(spw_rank_bench_measure(bench, (spw_rank_way)way, (spw_rank_use)use, o->sizes.bytes[i],
                                               o->smoke ? 0 : (uint64_t)(o->seconds * 1e9), &rate, err));
                wrong += rate.wrong;
                if (speaks)
                    SPW_TRY(print_row(o, (spw_rank_way)way, (spw_rank_use)use, o->sizes.bytes[i], &rate, err));
            }
        }
    }
    return wrong == 0 ? SPW_OK
                      : SPW_RAISE(err, SPW_ECORRUPT, "bench comm: %llu elements are not what they should be",
                                  (unsigned long long)wrong);
}

static uint64_t
largest(const cli_sizes *sizes)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < sizes->count; i++)
        most = sizes->bytes[i] > most ? sizes->bytes[i] : most;
    return most;
}

/* All of a rank's work, with its channels and memory; an exit code. What keeps all of them from beginning is said once. */
static int
run_rank(const options *o, spw_comm *comm)
{
    const spw_comm_info *info = spw_comm_get_info(comm);
    const spw_rank_bench_options wanted = {
        .device = o->device, .collectives = o->collectives, .unit_bytes = largest(&o->sizes)};
    char path[SPW_PATH_BYTES];
    spw_rank_bench *bench;
    spw_error err = {0};
    spw_status st = spw_rank_bench_open(&bench, comm, &wanted, &err);
    if (st != SPW_OK)
        return info->rank > 0 ? cli_exit_code(&err) : cli_fail(&err);
    cli_set_rank(info->rank);
    st = info->rank > 0 ? SPW_OK : print_header(o, info, spw_rank_bench_get_info(bench), &err);
    if (st == SPW_OK)
        st = run_rows(o, info->rank == 0, bench, &err);
    if (st == SPW_OK && !o->smoke) {
        st = spw_rank_bench_keep(bench, path, &err);
        if (st == SPW_OK && info->rank == 0 && !o->json)
            printf("# what the largest size gave is kept for plan and train%s%s\n",
                   path[0] != '\0' ? ", in " : ", nowhere", path);
    }
    spw_rank_bench_close(bench, st == SPW_OK);
    return st == SPW_OK ? EXIT_DONE : cli_fail(&err);
}

static int
parse_options(options *o, int argc, char **argv)
{
    static const char *const with_value[] = {"--device", "--collectives", "--size", "--seconds", NULL};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        if (strcmp(name, "--json") == 0) {
            o->json = true;
            continue;
        }
        if (strcmp(name, "--smoke") == 0) {
            o->smoke = true;
            continue;
        }
        if (strcmp(name, "-n") == 0) {
            if ((o->ranks = cli_rank_count("bench comm", argc, argv, &i)) == 0)
                return EXIT_USAGE;
            continue;
        }
        if ((value = cli_known_value("bench comm", with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if (strcmp(name, "--device") == 0) {
            o->device = value;
        } else if (strcmp(name, "--collectives") == 0) {
            if (strcmp(value, "auto") != 0 && strcmp(value, "host") != 0 && strcmp(value, "nccl") != 0)
                return cli_usage("bench comm", "--collectives is auto, host or nccl, not %s", value);
            o->collectives = value;
        } else if (strcmp(name, "--size") == 0) {
            if (!cli_bench_sizes("bench comm", value, 4, &o->sizes))
                return EXIT_USAGE;
        } else if (!cli_bench_seconds("bench comm", value, &o->seconds)) {
            return EXIT_USAGE;
        }
    }
    if (o->sizes.count == 0)
        (void)cli_bench_sizes("bench comm", o->smoke ? "1MiB" : "4MiB,64MiB", 4, &o->sizes);
    return EXIT_DONE;
}

int
cli_bench_comm(int argc, char **argv)
{
    options o = {.device = "auto", .collectives = "auto", .seconds = 1};
    spw_comm *comm;
    spw_error err = {0};
    int rc = parse_options(&o, argc, argv);
    if (rc != EXIT_DONE)
        return rc;
    if ((rc = cli_start_ranks("bench comm", o.ranks, argv - 2)) >= 0)
        return rc;
    if (spw_comm_open(&comm, &(spw_comm_options){.backend = SPW_COMM_AUTO}, &err) != SPW_OK)
        return cli_fail(&err);
    if (spw_comm_get_info(comm)->world == 1) {
        spw_comm_close(comm);
        return cli_usage("bench comm", "one rank has nobody to reach: -n RANKS starts some here, and mpirun, srun or "
                                       "torchrun start them on several hosts");
    }
    rc = run_rank(&o, comm);
    spw_comm_close(comm);
    return rc;
}
