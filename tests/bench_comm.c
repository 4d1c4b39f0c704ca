/*
 * bench_comm - reduce-scatter and all-gather of this host's ranks beside a plain copy, and beside MPI's own where an MPI
 * launcher started it and it was built with MPI. usage: bench_comm [MIB [ROUNDS]]; without a launcher it forks 2 and
 * 4 ranks. MIB is the whole buffer of one rank, fp32.
 *
 * All ranks do the same thing at the same time, one contender after the other in every round. Printed are medians of the
 * slowest rank, as bytes that a rank gets from others per second, and medians of each round's ratio to the copy: as many
 * bytes, by all ranks at once, from a rank's own memory. Sums are verified. ZeRO++'s codes of as many numbers are made and decoded by
 * one thread of each rank.
 */
#include "quant.h"
#include "spw_comm.h"
#ifdef SPW_BENCH_MPI
#include <mpi.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COPY, REDUCE, GATHER, ENCODE8, DECODE8, ENCODE4, DECODE4, MPI_REDUCE, MPI_GATHER, CONTENDERS, ROUNDS_MAX = 64 };
static const char *const names[CONTENDERS] = {"copy",
                                              "reduce_scatter",
                                              "all_gather",
                                              "to codes of 8 bits",
                                              "from codes of 8 bits",
                                              "to codes of 4 bits",
                                              "from codes of 4 bits",
                                              "MPI_Reduce_scatter_block",
                                              "MPI_Allgather"};

static void
must(spw_status st, const spw_error *err)
{
    if (st != SPW_OK) {
        fprintf(stderr, "bench_comm: %s\n", err->message);
        exit(1);
    }
}

static int
by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double
median(const double *from, int n)
{
    double sorted[ROUNDS_MAX];
    memcpy(sorted, from, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    return sorted[n / 2];
}

typedef struct room {
    spw_channel *ch;
    float *buf, *sink, *spare, *from, *to;
    uint64_t elems; /* of a part */
    uint32_t rank, size;
} room;

static void
once(const room *r, int what)
{
    spw_error err = {0};
    uint64_t part = r->elems * sizeof(float), others = r->elems * (r->size - 1) / SPW_QUANT_BLOCK * SPW_QUANT_BLOCK;
    spw_quant kind = what < ENCODE4 ? SPW_QUANT_INT8 : SPW_QUANT_INT4;
    switch (what) {
    case COPY: memcpy(r->to, r->from, part * (r->size - 1)); return;
    case REDUCE:
        must(spw_reduce_scatter(r->ch, 1, r->buf, SPW_F32, r->elems,
                                &(spw_reduce_sink){.data = r->sink, .dtype = SPW_F32}, &err),
             &err);
        return;
    case ENCODE8:
    case ENCODE4: spw__quant_encode(r->to, kind, r->from, SPW_F32, others); return;
    case DECODE8:
    case DECODE4: spw__quant_decode(r->buf, SPW_F32, r->to, kind, others); return;
    case GATHER: must(spw_all_gather(r->ch, 1, r->buf, part, &err), &err); return;
#ifdef SPW_BENCH_MPI
    case MPI_REDUCE:
        MPI_Reduce_scatter_block(r->buf, r->spare, (int)r->elems, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        return;
    case MPI_GATHER: MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, r->buf, (int)part, MPI_BYTE, MPI_COMM_WORLD); return;
#endif
    default: return;
    }
}

static void
measure(uint64_t mib, int rounds)
{
    spw_comm *comm = NULL;
    spw_error err = {0};
    room r = {0};
    double seconds[CONTENDERS][ROUNDS_MAX] = {{0}}, ratio[ROUNDS_MAX];
    unsigned long long wrong = 0;
    int contenders = MPI_REDUCE;
    const spw_comm_info *info;
    must(spw_comm_open(&comm, NULL, &err), &err);
    info = spw_comm_get_info(comm);
    must(spw_channel_open(&r.ch, comm, NULL, 0, "bench", &err), &err);
    r.rank = info->rank;
    r.size = info->world;
    r.elems = (mib << 20) / sizeof(float) / r.size;
#ifdef SPW_BENCH_MPI
    if (strcmp(info->backend, "mpi") == 0)
        contenders = CONTENDERS;
#endif
    must(spw_comm_alloc(comm, (void **)&r.buf, r.elems * r.size * sizeof(float), &err), &err);
    must(spw_comm_alloc(comm, (void **)&r.from, r.elems * r.size * sizeof(float), &err), &err);
    must(spw_comm_alloc(comm, (void **)&r.to, r.elems * r.size * sizeof(float), &err), &err);
    for (uint64_t k = 0; k < r.elems * r.size; k++)
        r.from[k] = (float)(k * 2654435761u % 65536) - 32768.0f;
    r.sink = r.to;
    r.spare = r.to + r.elems;
    for (int i = -1; i < rounds; i++) {
        for (int what = 0; what < contenders; what++) {
            double took;
            uint64_t begin;
            double all[1024];
            if (what == REDUCE) /* small numbers: every order gives the same sum */
                for (uint64_t k = 0; k < r.elems * r.size; k++)
                    r.buf[k] = (float)(k % 1000 + r.rank);
            must(spw_barrier(r.ch, &err), &err);
            begin = spw_now_ns();
            once(&r, what);
            took = (double)(spw_now_ns() - begin) * 1e-9;
            must(spw_exchange(r.ch, &took, all, sizeof took, &err), &err);
            for (uint32_t m = 0; m < r.size; m++)
                took = all[m] > took ? all[m] : took;
            if (i >= 0)
                seconds[what][i] = took;
            if (what == REDUCE)
                for (uint64_t k = 0; k < r.elems; k++)
                    wrong += r.sink[k] != (float)((r.rank * r.elems + k) % 1000 * r.size + r.size * (r.size - 1) / 2);
        }
    }
    for (int what = 0; r.rank == 0 && what < contenders; what++) {
        double bytes = (double)(r.elems * sizeof(float) * (r.size - 1));
        for (int i = 0; i < rounds; i++)
            ratio[i] = seconds[COPY][i] / seconds[what][i];
        printf("%5u %6llu  %-26s %8.1f %8.2f %8.2f %7llu\n", r.size, (unsigned long long)mib, names[what],
               median(seconds[what], rounds) * 1e3, bytes / median(seconds[what], rounds) * 1e-9, median(ratio, rounds),
               what == REDUCE ? wrong : 0);
    }
    fflush(stdout);
    spw_comm_free(comm, r.buf);
    spw_comm_free(comm, r.from);
    spw_comm_free(comm, r.to);
    spw_channel_close(r.ch);
    spw_comm_close(comm);
    if (wrong > 0)
        exit(1);
}

static void
fork_ranks(int size, uint64_t mib, int rounds)
{
    char text[32];
    snprintf(text, sizeof text, "%d", size);
    setenv("WORLD_SIZE", text, 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", "29547", 0);
    for (int r = 0; r < size; r++) {
        if (fork() == 0) {
            snprintf(text, sizeof text, "%d", r);
            setenv("RANK", text, 1);
            measure(mib, rounds);
            exit(0);
        }
    }
    for (int r = 0, status; r < size; r++) {
        if (wait(&status) > 0 && status != 0)
            exit(1);
    }
}

int
main(int argc, char **argv)
{
    uint64_t mib = argc > 1 ? strtoull(argv[1], NULL, 10) : 256;
    int rounds = argc > 2 ? atoi(argv[2]) : 9;
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    rounds = rounds < 1 ? 1 : rounds > ROUNDS_MAX ? ROUNDS_MAX : rounds;
    if (mib < 1)
        mib = 1;
    if (rank == NULL || strcmp(rank, "0") == 0) {
        printf("# bench comm  spillway %s  %u CPUs\n# ranks  MiB  what%*s ms     GB/s    /copy  #wrong\n", SPW_VERSION,
               spw_cpu_allowed_count(), 27, "");
        fflush(stdout);
    }
    if (rank != NULL) {
        measure(mib, rounds);
    } else {
        fork_ranks(2, mib, rounds);
        fork_ranks(4, mib, rounds);
    }
    return 0;
}
