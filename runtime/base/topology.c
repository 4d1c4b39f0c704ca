/*
 * What the CPUs of a machine are to each other: which of them are hardware threads of one core, and which node each is
 * on. Read from sysfs for the CPUs that a thread may use; containers hide parts of it, so every answer has a substitute.
 */
#include "spw_base.h"
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---------------------------------------------------------------- sets of numbers */

uint32_t
spw_id_set_count(const spw_id_set *set)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < SPW_IDS_MAX / 64; i++)
        count += (uint32_t)__builtin_popcountll(set->bits[i]);
    return count;
}

static bool
parse_number(const char **at, unsigned long *out)
{
    char *end;
    if (**at < '0' || **at > '9')
        return false;
    *out = strtoul(*at, &end, 10);
    *at = end;
    return true;
}

bool
spw_id_set_parse(spw_id_set *out, const char *text)
{
    memset(out, 0, sizeof *out);
    if (*text == '\0' || *text == '\n') /* a node without CPUs */
        return true;
    for (;;) {
        unsigned long first, last;
        if (!parse_number(&text, &first))
            return false;
        last = first;
        if (*text == '-') {
            text++;
            if (!parse_number(&text, &last) || last < first)
                return false;
        }
        for (unsigned long id = first; id <= last && id < SPW_IDS_MAX; id++)
            spw_id_set_add(out, (uint32_t)id);
        if (*text == '\0' || *text == '\n')
            return true;
        if (*text++ != ',')
            return false;
    }
}

char *
spw_id_set_format(char *buf, size_t buf_bytes, const spw_id_set *set)
{
    size_t used = 0;
    buf[0] = '\0';
    for (uint32_t id = 0; id < SPW_IDS_MAX && used < buf_bytes; id++) {
        uint32_t first = id;
        if (!spw_id_set_has(set, id))
            continue;
        while (spw_id_set_has(set, id + 1))
            id++;
        used += (size_t)snprintf(buf + used, buf_bytes - used, id > first ? "%s%u-%u" : "%s%u", used > 0 ? "," : "",
                                 first, id);
    }
    return buf;
}

/* ---------------------------------------------------------------- the machine */

void
spw_cpu_affinity(spw_id_set *out)
{
    cpu_set_t set;
    memset(out, 0, sizeof *out);
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (uint32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            if (CPU_ISSET(cpu, &set))
                spw_id_set_add(out, cpu);
        }
    } else { /* more CPUs than a cpu_set_t holds */
        for (long cpu = 0; cpu < sysconf(_SC_NPROCESSORS_ONLN) && cpu < SPW_IDS_MAX; cpu++)
            spw_id_set_add(out, (uint32_t)cpu);
    }
}

static bool read_list(spw_id_set *out, const char *root, const char *fmt, ...) SPW_PRINTF(3, 4);

/* The list, or the one number, in a file below root/sys/devices/system. */
static bool
read_list(spw_id_set *out, const char *root, const char *fmt, ...)
{
    char name[128], path[PATH_MAX], text[8192];
    va_list args;
    FILE *f;
    bool ok;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    snprintf(path, sizeof path, "%s/sys/devices/system/%s", root, name);
    f = fopen(path, "re");
    ok = f != NULL && fgets(text, sizeof text, f) != NULL && spw_id_set_parse(out, text);
    if (f != NULL)
        fclose(f);
    return ok;
}

static bool
is_offline(const char *root, uint32_t cpu)
{
    spw_id_set value; /* 0 or 1; some machines have no such file for CPU 0 */
    return read_list(&value, root, "cpu/cpu%u/online", cpu) && spw_id_set_has(&value, 0);
}

/* The lowest CPU of its core: core ids repeat from socket to socket, the list of siblings names the CPUs themselves. */
static uint16_t
core_of(const char *root, uint32_t cpu)
{
    spw_id_set siblings;
    uint32_t lowest = 0;
    if (!read_list(&siblings, root, "cpu/cpu%u/topology/thread_siblings_list", cpu) || !spw_id_set_has(&siblings, cpu))
        return (uint16_t)cpu;
    while (!spw_id_set_has(&siblings, lowest))
        lowest++;
    return (uint16_t)lowest;
}

void
spw_topology_read(spw_topology *out, const char *root, const spw_id_set *allowed)
{
    spw_id_set own, nodes, cpus;
    if (allowed == NULL) {
        spw_cpu_affinity(&own);
        allowed = &own;
    }
    memset(out, 0, sizeof *out);
    for (uint32_t cpu = 0; cpu < SPW_IDS_MAX; cpu++) {
        if (spw_id_set_has(allowed, cpu) && !is_offline(root, cpu))
            out->cpus[out->cpu_count++] = (spw_cpu){.cpu = (uint16_t)cpu, .core = core_of(root, cpu)};
    }
    if (out->cpu_count == 0) /* an empty mask, or a tree that is not this machine's: one worker, which nothing binds */
        out->cpu_count = 1;
    if (!read_list(&nodes, root, "node/online"))
        return;
    for (uint32_t node = 0; node < SPW_IDS_MAX; node++) {
        if (!spw_id_set_has(&nodes, node) || !read_list(&cpus, root, "node/node%u/cpulist", node))
            continue;
        for (uint32_t i = 0; i < out->cpu_count; i++) {
            if (spw_id_set_has(&cpus, out->cpus[i].cpu))
                out->cpus[i].node = (uint16_t)node;
        }
    }
}

bool
spw_memory_nodes(const char *root, spw_id_set *out)
{
    return read_list(out, root, "node/has_memory");
}

uint32_t
spw_topology_nodes(const spw_topology *topology, spw_id_set *out)
{
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < topology->cpu_count; i++)
        spw_id_set_add(out, topology->cpus[i].node);
    return spw_id_set_count(out);
}

/* The n-th number of a set. */
static uint32_t
nth_of(const spw_id_set *set, uint32_t n)
{
    uint32_t id = 0;
    while (!spw_id_set_has(set, id) || n-- > 0)
        id++;
    return id;
}

void
spw_topology_share(spw_topology *topology, uint32_t turn, uint32_t count)
{
    spw_id_set node_set, core_set = {{0}}, mine = {{0}};
    uint32_t nodes = spw_topology_nodes(topology, &node_set), cores, kept = 0;
    uint32_t node = turn * nodes / count, node_end = (turn + 1) * nodes / count;
    /* The turns whose first node is this one: more than one only where there are fewer nodes than processes. */
    uint32_t turn_first = (node * count + nodes - 1) / nodes, turn_end = ((node + 1) * count + nodes - 1) / nodes;
    uint32_t core, core_end;
    SPW_ASSERT(turn < count);
    for (uint32_t k = node; k == node || k < node_end; k++)
        for (uint32_t i = 0; i < topology->cpu_count; i++)
            if (topology->cpus[i].node == nth_of(&node_set, k))
                spw_id_set_add(&core_set, topology->cpus[i].core);
    cores = spw_id_set_count(&core_set);
    core = (turn - turn_first) * cores / (turn_end - turn_first);
    core_end = (turn - turn_first + 1) * cores / (turn_end - turn_first);
    for (uint32_t k = core; k == core || k < core_end; k++)
        spw_id_set_add(&mine, nth_of(&core_set, k));
    for (uint32_t i = 0; i < topology->cpu_count; i++)
        if (spw_id_set_has(&mine, topology->cpus[i].core))
            topology->cpus[kept++] = topology->cpus[i];
    topology->cpu_count = kept;
}
