/*
 * Where workers belong, given what the CPUs are to each other: a pure policy, so that machines can be made up in tests.
 * Each worker gets a home, cores before their second threads, nodes in turn, and a set of CPUs around it to run on.
 */
#include "spw_base.h"
#include <sched.h>

typedef struct cpu_use {
    uint32_t rank;    /* how many CPUs of its core come before it */
    uint32_t workers; /* that live here */
} cpu_use;

/* Fills the ranks; returns how many there are. */
static uint32_t
rank_cpus(cpu_use *uses, const spw_topology *t, uint32_t *core_count_out)
{
    uint16_t seen[SPW_IDS_MAX] = {0}; /* CPUs of a core so far */
    uint32_t rank_count = 0;
    *core_count_out = 0;
    for (uint32_t i = 0; i < t->cpu_count; i++) {
        uses[i] = (cpu_use){.rank = seen[t->cpus[i].core]++};
        *core_count_out += uses[i].rank == 0;
        if (uses[i].rank >= rank_count)
            rank_count = uses[i].rank + 1;
    }
    return rank_count;
}

/*
 * One more worker on each CPU of a rank that has as many as the round began with, each time on the node that got the
 * fewest; until there is no such CPU or no worker left. Returns how many are left.
 */
static uint32_t
fill_rank(cpu_use *uses, const spw_topology *t, uint32_t round, uint32_t rank, uint32_t left)
{
    uint32_t on_node[SPW_IDS_MAX] = {0};
    for (; left > 0; left--) {
        uint32_t best = UINT32_MAX;
        for (uint32_t i = 0; i < t->cpu_count; i++) {
            uint16_t node = t->cpus[i].node;
            if (uses[i].rank != rank || uses[i].workers != round)
                continue;
            if (best == UINT32_MAX || on_node[node] < on_node[t->cpus[best].node] ||
                (on_node[node] == on_node[t->cpus[best].node] && node < t->cpus[best].node))
                best = i;
        }
        if (best == UINT32_MAX)
            break;
        uses[best].workers++;
        on_node[t->cpus[best].node]++;
    }
    return left;
}

/* The CPUs that workers of a node run on. */
static void
collect_cpus(spw_id_set *cpus, const cpu_use *uses, const spw_topology *t, uint32_t node, bool first_threads)
{
    memset(cpus, 0, sizeof *cpus);
    for (uint32_t i = 0; i < t->cpu_count; i++) {
        if (t->cpus[i].node == node && (uses[i].rank == 0 || !first_threads))
            spw_id_set_add(cpus, t->cpus[i].cpu);
    }
}

void
spw_seat_workers(spw_seat *seats, uint32_t worker_count, const spw_topology *topology)
{
    cpu_use uses[SPW_IDS_MAX];
    spw_id_set nodes, cpus;
    uint32_t core_count, rank_count = rank_cpus(uses, topology, &core_count);
    uint32_t left = worker_count, rounds = 0, placed = 0;
    bool first_threads = worker_count <= core_count;
    (void)spw_topology_nodes(topology, &nodes);
    for (; left > 0; rounds++) {
        for (uint32_t rank = 0; rank < rank_count && left > 0; rank++)
            left = fill_rank(uses, topology, rounds, rank, left);
    }
    for (uint32_t node = 0; node < SPW_IDS_MAX; node++) {
        if (!spw_id_set_has(&nodes, node))
            continue;
        collect_cpus(&cpus, uses, topology, node, first_threads);
        for (uint32_t round = 0; round < rounds; round++) {
            for (uint32_t i = 0; i < topology->cpu_count; i++) {
                if (topology->cpus[i].node == node && uses[i].workers > round)
                    seats[placed++] = (spw_seat){.home = topology->cpus[i],
                                                 .bound = spw_id_set_count(&cpus) < topology->cpu_count,
                                                 .cpus = cpus};
            }
        }
    }
    SPW_ASSERT(placed == worker_count);
}

void
spw_seat_apply(const spw_seat *seat, pthread_t thread)
{
    cpu_set_t set;
    if (!seat->bound)
        return;
    CPU_ZERO(&set);
    for (uint32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (spw_id_set_has(&seat->cpus, cpu))
            CPU_SET(cpu, &set);
    }
    (void)pthread_setaffinity_np(thread, sizeof set, &set);
}
