/*
 * The world: joins the processes that were started together, finds out which of them share a host, gives each a seat in
 * memory that the host's ranks share, starts the watcher and opens the channel that everything else is agreed on.
 */
#include "comm_internal.h"
#include <stdio.h>
#include <unistd.h>

const char *
spw_comm_backend_name(spw_comm_backend backend)
{
    static const char *const names[] = {"auto", "self", "tcp", "mpi"};
    return (unsigned)backend < sizeof names / sizeof *names ? names[backend] : "unknown backend";
}

static spw_comm_options
with_defaults(const spw_comm_options *options)
{
    spw_comm_options o = options != NULL ? *options : (spw_comm_options){0};
    if (!(o.join_timeout_s > 0)) /* processes start at different times, and nobody waits for work that another lost */
        o.join_timeout_s = o.timeout_s > 0 ? o.timeout_s : 600;
    if (!(o.timeout_s > 0))
        o.timeout_s = 60;
    if (o.timeout_s > 1e8) /* years: nanoseconds must fit */
        o.timeout_s = 1e8;
    if (o.join_timeout_s > 1e8)
        o.join_timeout_s = 1e8;
    if (o.staging_bytes == 0)
        o.staging_bytes = 8 << 20;
    return o;
}

uint64_t
spw_comm_table_bytes(const spw_comm_options *options, uint32_t world, uint32_t local_world, uint32_t channel_count)
{
    spw_comm_options o = with_defaults(options);
    uint64_t bytes = sizeof(spw_comm) + world * (sizeof(spw__peer) + sizeof(spw__seat) + 256);
    if (world > 1)
        bytes += spw__watch_bytes(world) + SPW_COMM_ALLOCS_MAX * world * sizeof(spw__segment);
    return bytes +
           (channel_count + 1) * spw__channel_bytes(&o, world, world - local_world); /* one is the world's own */
}

/* ---------------------------------------------------------------- who is where */

/* What processes tell each other first. */
typedef struct identity {
    char host[200];
    int32_t pid, seats_fd;
    uint64_t start_ticks, staging_bytes;
    spw_id_set cpus; /* that it may use */
    uint32_t status;
    char text[200];
} identity;

static spw_status
gather(spw_comm *comm, const identity *mine, identity *all, uint64_t deadline_ns, spw_error *err)
{
    if (comm->transport != NULL)
        return comm->transport->gather(comm->transport, mine, all, sizeof *mine, deadline_ns, err);
    all[0] = *mine;
    return SPW_OK;
}

#ifndef SPW_SOURCES
#define SPW_SOURCES 0 /* the Makefile's: a checksum of all of them */
#endif

/* What hosts must have alike for anything that ranks tell each other to mean the same; they tell each other this first, whatever they have. */
typedef struct build {
    char version[52];
    uint32_t sources; /* of one version, between two releases */
    uint64_t sizes;   /* of what they tell each other then */
} build;

static spw_status
compare_builds(spw_comm *comm, uint64_t deadline_ns, spw_error *err)
{
    build mine = {.sources = comm->options.sources != 0 ? comm->options.sources : SPW_SOURCES,
                  .sizes = sizeof(identity) << 40 | sizeof(spw__call) << 20 | sizeof(spw__place)},
          *all;
    const char *version = comm->options.version != NULL ? comm->options.version : SPW_VERSION;
    spw_status st;
    if (comm->transport == NULL)
        return SPW_OK;
    all = spw_mem_calloc(comm->info.world, sizeof *all);
    if (all == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "list of %u ranks", comm->info.world);
    snprintf(mine.version, sizeof mine.version, "%s", version);
    st = comm->transport->gather(comm->transport, &mine, all, sizeof mine, deadline_ns, err);
    for (uint32_t r = 1; st == SPW_OK && r < comm->info.world; r++) {
        if (memcmp(&all[r], &all[0], sizeof *all) != 0)
            st = SPW_RAISE(err, SPW_ECONFIG, "rank 0 runs spillway %.51s, rank %u %s%.51s: all hosts need the same",
                           all[0].version, r,
                           strncmp(all[r].version, all[0].version, sizeof mine.version) == 0 ? "another build of " : "",
                           all[r].version);
    }
    spw_mem_free(all);
    return st;
}

/* Numbers hosts by their first rank. */
static void
number_hosts(spw_comm *comm, const identity *all)
{
    spw_comm_info *info = &comm->info;
    info->host_count = 0;
    for (uint32_t r = 0; r < info->world; r++) {
        spw__peer *p = &comm->peers[r];
        p->pid = (pid_t)all[r].pid;
        p->start_ticks = all[r].start_ticks;
        p->host = NO_IDX;
        p->local_rank = 0;
        for (uint32_t q = 0; q < r; q++) {
            if (strncmp(all[q].host, all[r].host, sizeof all[r].host) == 0) {
                p->host = comm->peers[q].host;
                p->local_rank = comm->peers[q].local_rank + 1;
            }
        }
        if (p->host == NO_IDX)
            p->host = info->host_count++;
    }
    info->host = comm->peers[info->rank].host;
    info->local_rank = comm->peers[info->rank].local_rank;
    info->local_world = info->cpu_sharers = 0;
    for (uint32_t r = 0; r < info->world; r++) {
        if (comm->peers[r].host != info->host)
            continue;
        comm->locals[info->local_world++] = r;
        info->cpu_sharers += memcmp(&all[r].cpus, &all[info->rank].cpus, sizeof all[r].cpus) == 0;
    }
}

static spw_status
trouble_of(const identity *all, uint32_t world, spw_error *err)
{
    for (uint32_t r = 0; r < world; r++) {
        if (all[r].status != SPW_OK)
            return SPW_RAISE(err, (spw_status)all[r].status, "rank %u: %.*s", r, (int)sizeof all[r].text - 1,
                             all[r].text);
    }
    return SPW_OK;
}

/* The first rank of a host shows seats for all, the others map them. */
static spw_status
take_seats(spw_comm *comm, identity *mine, identity *all, uint64_t deadline_ns, bool *mapped, spw_error *err)
{
    uint64_t bytes = comm->info.local_world * sizeof(spw__seat);
    uint32_t first = comm->locals[0];
    spw_error why = {0};
    if (comm->info.local_rank == 0)
        mine->status =
            spw__segment_create(&comm->seats_segment, bytes, comm->info.local_world > 1, SPW_REGION_TABLE, &why);
    mine->seats_fd = comm->seats_segment.fd;
    snprintf(mine->text, sizeof mine->text, "%.199s", why.message);
    SPW_TRY(gather(comm, mine, all, deadline_ns, err));
    SPW_TRY(trouble_of(all, comm->info.world, err));
    if (comm->info.local_rank > 0)
        mine->status =
            spw__segment_attach(&comm->seats_segment, (pid_t)all[first].pid, all[first].seats_fd, bytes, &why);
    snprintf(mine->text, sizeof mine->text, "%.199s", why.message);
    SPW_TRY(gather(comm, mine, all, deadline_ns, err));
    comm->seats = comm->seats_segment.region.base;
    *mapped = trouble_of(all, comm->info.world, NULL) == SPW_OK;
    return SPW_OK;
}

/* Who shares the machine, which stays as it is when hosts are split. */
static void
note_machine(spw_comm_info *info)
{
    info->machine = info->host;
    info->machine_rank = info->local_rank;
    info->machine_world = info->local_world;
}

/* Ranks of hosts where one of them cannot map another's memory become hosts of their own. */
static void
split_hosts(const spw_comm *comm, identity *all)
{
    for (uint32_t r = 0; r < comm->info.world; r++) {
        if (all[r].status == SPW_OK)
            continue;
        for (uint32_t q = 0; q < comm->info.world; q++) {
            if (comm->peers[q].host == comm->peers[r].host)
                snprintf(all[q].host, sizeof all[q].host, "rank %u", q);
        }
    }
    for (uint32_t r = 0; r < comm->info.world; r++)
        all[r].status = SPW_OK;
}

static spw_status
find_hosts(spw_comm *comm, uint64_t deadline_ns, spw_error *err)
{
    uint32_t world = comm->info.world;
    identity mine = {.pid = (int32_t)getpid(),
                     .start_ticks = spw__process_start_ticks(getpid()),
                     .staging_bytes = comm->options.staging_bytes};
    identity *all = spw_mem_calloc(world, sizeof *all);
    bool mapped = false;
    spw_status st = SPW_OK;
    if (all == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "list of %u ranks", world);
    spw__host_identity(mine.host, sizeof mine.host);
    spw_cpu_affinity(&mine.cpus);
    st = gather(comm, &mine, all, deadline_ns, err);
    for (uint32_t r = 0; st == SPW_OK && r < world; r++) {
        if (all[r].staging_bytes != all[0].staging_bytes)
            st = SPW_RAISE(err, SPW_ECONFIG, "rank 0 has staging of %llu bytes, rank %u of %llu: they must be equal",
                           (unsigned long long)all[0].staging_bytes, r, (unsigned long long)all[r].staging_bytes);
    }
    if (st == SPW_OK) {
        number_hosts(comm, all);
        note_machine(&comm->info);
        st = take_seats(comm, &mine, all, deadline_ns, &mapped, err);
    }
    if (st == SPW_OK && !mapped) {
        uint32_t sharers = comm->info.cpu_sharers;
        size_t at = strlen(comm->info.reason);
        for (uint32_t r = 0; r < world; r++) {
            if (all[r].status != SPW_OK && all[r].text[0] != '\0')
                snprintf(comm->info.reason + at, sizeof comm->info.reason - at, "; no shared memory: %.100s",
                         all[r].text);
        }
        split_hosts(comm, all);
        spw__segment_close(&comm->seats_segment);
        mine = (identity){.pid = mine.pid, .start_ticks = mine.start_ticks};
        snprintf(mine.host, sizeof mine.host, "%s", all[comm->info.rank].host);
        number_hosts(comm, all);
        comm->info.cpu_sharers = sharers;
        st = take_seats(comm, &mine, all, deadline_ns, &mapped, err);
        if (st == SPW_OK)
            st = trouble_of(all, world, err);
    }
    spw_mem_free(all);
    return st;
}

/* ---------------------------------------------------------------- open and close */

void
spw_comm_set_timeout(spw_comm *comm, double timeout_s)
{
    comm->options.timeout_s = timeout_s;
    spw_channel_set_timeout(comm->world, timeout_s);
}

static spw_status
open_transport(spw_comm *comm, uint64_t deadline_ns, spw_error *err)
{
    spw__launch launch;
    spw_comm_info *info = &comm->info;
    spw_status st = SPW_OK;
    SPW_TRY(spw__launch_read(&launch, comm->options.backend, err));
    if (launch.backend == SPW_COMM_MPI) {
        SPW_TRY(spw__mpi_load(&comm->transport, deadline_ns, err));
        if (comm->transport->world == 1 && launch.started > 1) /* each would train the whole by itself */
            return SPW_RAISE(err, SPW_ECONFIG,
                             "a launcher started %u processes (%s), but MPI here (%s) finds 1: the launcher belongs to "
                             "another MPI; use this one's mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                             launch.started, launch.reason, comm->transport->about);
    } else if (launch.backend == SPW_COMM_TCP && launch.world > 1) {
        SPW_TRY(spw__tcp_open(&comm->transport, &launch, deadline_ns, comm->options.join_timeout_s, err));
    }
    info->backend = spw_comm_backend_name(launch.backend);
    info->rank = comm->transport != NULL ? comm->transport->rank : 0;
    info->world = comm->transport != NULL ? comm->transport->world : 1;
    snprintf(info->reason, sizeof info->reason, "%s%s%s", launch.reason, comm->transport != NULL ? "; " : "",
             comm->transport != NULL ? comm->transport->about : "");
    return st;
}

static void
release(spw_comm *comm)
{
    bool failed = spw__failed(comm);
    spw_channel_close(comm->world);
    spw__watch_stop(comm);
    for (uint32_t i = 0; i < SPW_COMM_ALLOCS_MAX; i++) {
        if (comm->allocs[i].id != 0)
            spw_comm_free(comm, comm->allocs[i].own.region.base);
    }
    if (comm->transport != NULL)
        comm->transport->close(comm->transport, failed || spw__failed(comm));
    spw__segment_close(&comm->seats_segment);
    pthread_cond_destroy(&comm->settled_cond);
    pthread_mutex_destroy(&comm->lock);
    spw_mem_free(comm->peers);
    spw_mem_free(comm->locals);
    spw_mem_free(comm);
}

spw_status
spw_comm_open(spw_comm **out, const spw_comm_options *options, spw_error *err)
{
    spw_comm *comm = spw_mem_zalloc(sizeof *comm);
    uint64_t deadline_ns;
    spw_status st;
    *out = NULL;
    if (comm == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "world of ranks");
    comm->options = with_defaults(options);
    comm->link_next_id = LINK_WORLD;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->settled_cond, NULL);
    st = options != NULL && options->join_timeout_s > 0 ? SPW_OK
                                                        : spw__launch_join_timeout(&comm->options.join_timeout_s, err);
    deadline_ns = spw_now_ns() + (uint64_t)(comm->options.join_timeout_s * 1e9);
    if (st == SPW_OK)
        st = open_transport(comm, deadline_ns, err);
    if (st == SPW_OK) {
        comm->peers = spw_mem_calloc(comm->info.world, sizeof *comm->peers);
        comm->locals = spw_mem_calloc(comm->info.world, sizeof *comm->locals);
        if (comm->peers == NULL || comm->locals == NULL)
            st = SPW_RAISE(err, SPW_ENOMEM, "list of %u ranks", comm->info.world);
    }
    if (st == SPW_OK)
        st = compare_builds(comm, deadline_ns, err);
    if (st == SPW_OK)
        st = find_hosts(comm, deadline_ns, err);
    if (st == SPW_OK && comm->info.world > 1)
        st = spw__watch_start(comm, deadline_ns, err);
    /* Spinning helps only where those waited for run meanwhile. */
    comm->spin = st == SPW_OK && spw_cpu_allowed_count() > comm->info.machine_world ? 4000 : 0;
    if (st == SPW_OK)
        st = spw__channel_open_world(comm, deadline_ns, err);
    spw__segment_hide(&comm->seats_segment);
    if (st != SPW_OK) {
        if (comm->watch != NULL)
            spw__fail(comm, st, 0, "rank %u could not join: %s", comm->info.rank, err != NULL ? err->message : "");
        else
            atomic_store(&comm->failed, true);
        release(comm);
        return st;
    }
    *out = comm;
    return SPW_OK;
}

void
spw_comm_close(spw_comm *comm)
{
    if (comm == NULL)
        return;
    if (!spw__failed(comm))
        (void)spw_barrier(comm->world, NULL); /* nobody leaves while others are still at work */
    release(comm);
}

const spw_comm_info *
spw_comm_get_info(const spw_comm *comm)
{
    return &comm->info;
}

uint32_t
spw_comm_host_of(const spw_comm *comm, uint32_t rank)
{
    return comm->peers[rank].host;
}

void
spw_comm_abort(spw_comm *comm, const char *reason)
{
    spw__fail(comm, SPW_ECANCELED, 0, "rank %u gave up: %s", comm->info.rank, reason != NULL ? reason : "");
}

spw_status
spw_comm_check(spw_comm *comm, spw_error *err)
{
    return spw__failed(comm) ? spw__failure(comm, err) : SPW_OK;
}
