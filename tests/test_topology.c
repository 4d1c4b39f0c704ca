/*
 * Where threads, memory and files go: CPU limits, topologies and disks read from made-up trees, and the placement policy on hand-made
 * and on random machines.
 */
#include "spw_offload.h"
#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <numaif.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

static char root[256];

/* Makes root/path, with the folders above it, holding text. */
static void
put(const char *path, const char *text)
{
    char full[512];
    FILE *f;
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(full, 0700);
        *slash = '/';
    }
    f = fopen(full, "we");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static int
make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "%s/spw-topology-XXXXXX", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    return mkdtemp(root) == NULL ? -1 : 0;
}

static int
remove_root(void **state)
{
    char command[300];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

/* The CPU quota is the least on the way from the process' cgroup up to the mount, in both versions of cgroups. */
static void
test_cgroup_quota(void **state)
{
    (void)state;
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("proc/self/cgroup", "0::/a.slice/job\n");
    put("sys/fs/cgroup/a.slice/job/cpu.max", "350000 100000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 3.5, 0);
    put("sys/fs/cgroup/a.slice/cpu.max", "100000 50000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 2.0, 0);
    put("sys/fs/cgroup/cpu.max", "50000 100000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 0.5, 0);
    put("sys/fs/cgroup/cpu.max", "nonsense\n");
    put("proc/self/cgroup", "12:memory:/m\n4:cpuacct,cpu:/docker/x\n1:name=systemd:/a.slice\nbroken\n0::/\n");
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n");
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n"); /* a container sees its own limit at the mount */
    put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 4.0, 0);
    assert_true(spw_cpu_allowed_count() >= 1);
}

/* What is left of a limit is without files in the page cache, in both versions of cgroups, where no limit is set there is none. */
static void
test_cgroup_memory(void **state)
{
    (void)state;
    assert_true(spw_cgroup_memory_room_bytes(root) == UINT64_MAX && spw_cgroup_memory_bytes(root) == UINT64_MAX);
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_true(spw_cgroup_memory_room_bytes(root) == UINT64_MAX && spw_cgroup_memory_bytes(root) == UINT64_MAX);
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "1500000\n");
    assert_int_equal(spw_cgroup_memory_bytes(root), 1500000);
    assert_int_equal(spw_cgroup_memory_room_bytes(root), 500000);
    put("sys/fs/cgroup/memory/memory.stat",
        "cache 1\ninactive_file 7\nactive_file 9\ntotal_inactive_file 200000\ntotal_active_file 300000\n");
    assert_int_equal(spw_cgroup_memory_room_bytes(root), 1000000);
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "-1\n");
    put("sys/fs/cgroup/memory.max", "8000000000\n");
    put("sys/fs/cgroup/memory.current", "5000000000\n");
    assert_true(spw_cgroup_memory_room_bytes(root) == 3000000000);
    put("sys/fs/cgroup/memory.stat",
        "anon 1000\nfile 4\ninactive_anon 3\nactive_file 1000000000\ninactive_file 2500000000\nunevictable 5\n");
    assert_true(spw_cgroup_memory_room_bytes(root) == 6500000000);
    put("sys/fs/cgroup/memory.stat", "inactive_file 6000000000\n"); /* two files, read one after the other */
    assert_true(spw_cgroup_memory_room_bytes(root) == 8000000000);
    put("sys/fs/cgroup/memory.high",
        "7000000000\n"); /* beyond that there is memory, and a kernel that holds up who takes it */
    assert_true(spw_cgroup_memory_bytes(root) == 7000000000 && spw_cgroup_memory_room_bytes(root) == 7000000000);
    put("sys/fs/cgroup/memory.max", "max\n");
    assert_true(spw_cgroup_memory_bytes(root) == 7000000000);
    put("sys/fs/cgroup/memory.high", "max\n");
    assert_true(spw_cgroup_memory_bytes(root) == UINT64_MAX);
    put("sys/fs/cgroup/memory.max", "8000000000\n");
}

/* The memory of a GPU that is coherent with the CPU is a node of the kernel's, and nothing that the host has. */
static void
test_gpu_nodes(void **state)
{
    spw_id_set nodes;
    (void)state;
    assert_true(spw_memory_available_bytes(root) == 0 && spw_gpu_nodes(root, &nodes) == 0);
    put("proc/meminfo",
        "MemTotal:  602931200 kB\nMemFree:   500000000 kB\nMemAvailable:   560000000 kB\nBuffers: 1 kB\n");
    put("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 500000000 kB\nNode 0 MemFree: 401000000 kB\n");
    put("sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal:       98000000 kB\nNode 1 MemFree:        95000000 kB\nNode 1 MemUsed:        3000000 kB\n"
        "Node 1 Active(anon):   7 kB\nNode 1 Active(file):   1000000 kB\nNode 1 Inactive(file):   500000 kB\n");
    put("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H100 80GB HBM3\n");
    assert_int_equal(spw_gpu_nodes(root, &nodes), 0); /* no such file: it hangs on PCI Express */
    assert_true(spw_memory_available_bytes(root) == 560000000ull * 1024);
    put("proc/driver/nvidia/gpus/0009:01:00.0/numa_status", "Node:      -1\nStatus:    offline\n");
    assert_int_equal(spw_gpu_nodes(root, &nodes), 0);
    put("proc/driver/nvidia/gpus/0009:01:00.0/numa_status",
        "Node:      1\nStatus:    online\nAddress:   420000000000\nSize:      1800000000\n");
    assert_int_equal(spw_gpu_nodes(root, &nodes), 1);
    assert_true(spw_id_set_has(&nodes, 1));
    assert_true(spw_memory_available_bytes(root) == (560000000ull - 96500000) * 1024);
    put("proc/meminfo", "MemAvailable: 9 kB\n");        /* read one after the other */
    assert_true(spw_memory_available_bytes(root) == 1); /* none, which is not the same as unknown */
}

/* Of what a machine has, each process that wants as much gets its share; a limit on its own mappings is its own. */
static void
test_memory_shared(void **state)
{
    enum { LEFT = 128 << 20, SHARERS = 8 };
    pid_t child;
    int status = -1;
    (void)state;
    if (spw_memory_room_bytes(0, 1) / SHARERS < LEFT)
        skip();
    fflush(stdout);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        uint64_t mapped = 0, alone, shared;
        FILE *f = fopen("/proc/self/statm", "re");
        bool read = f != NULL && fscanf(f, "%" SCNu64, &mapped) == 1;
        struct rlimit as = {.rlim_max = RLIM_INFINITY};
        as.rlim_cur = mapped * (uint64_t)sysconf(_SC_PAGESIZE) + LEFT;
        if (!read || setrlimit(RLIMIT_AS, &as) != 0)
            _exit(2);
        alone = spw_memory_room_bytes(0, 1);
        shared = spw_memory_room_bytes(0, SHARERS);
        _exit(alone > LEFT / 2 && alone <= LEFT && shared > LEFT / 2 && shared <= LEFT ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_true(spw_memory_room_bytes(0, SHARERS) <= spw_memory_available_bytes("") / (SHARERS / 2));
}

/* A limit holds for all that is below it: a batch system's or a service's stands in the middle, not at the mount. */
static void
test_cgroup_memory_above(void **state)
{
    (void)state;
    put("proc/self/cgroup", "0::/batch/job_7/step_0\n");
    put("sys/fs/cgroup/batch/job_7/step_0/memory.max", "max\n");
    put("sys/fs/cgroup/batch/job_7/memory.max", "4000000000\n");
    put("sys/fs/cgroup/batch/job_7/memory.current", "1000000000\n");
    assert_true(spw_cgroup_memory_bytes(root) == 4000000000);
    assert_true(spw_cgroup_memory_room_bytes(root) == 3000000000);
    put("sys/fs/cgroup/batch/memory.max", "6000000000\n"); /* more, and fuller */
    put("sys/fs/cgroup/batch/memory.current", "5500000000\n");
    assert_true(spw_cgroup_memory_bytes(root) == 4000000000);
    assert_true(spw_cgroup_memory_room_bytes(root) == 500000000);
    put("proc/self/cgroup", "4:cpu,cpuacct:/c\n3:memory:/a/b\n0::/\n");
    put("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "300000\n");
    put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "200000\n");
    assert_int_equal(spw_cgroup_memory_bytes(root), 200000);
    put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "300000\n"); /* lowered while in use */
    assert_int_equal(spw_cgroup_memory_room_bytes(root), 1);
}

/* Lists come back as they went in, in the kernel's form; what is no list is refused. */
static void
test_id_sets(void **state)
{
    static const char *const good[] = {"", "0", "0-3", "1,3-4,63-65,1023", "0-1023", "2\n"};
    static const char *const bad[] = {"x", "-1", "3-", "3-2", "1,", "1,,2", "1 2", "0-3,"};
    spw_id_set set;
    char text[64];
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        size_t len = strcspn(good[i], "\n");
        assert_true(spw_id_set_parse(&set, good[i]));
        spw_id_set_format(text, sizeof text, &set);
        assert_int_equal(strlen(text), len);
        assert_memory_equal(text, good[i], len);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(spw_id_set_parse(&set, bad[i]));
    assert_true(spw_id_set_parse(&set, "7,1022-5000,99999999999999999999")); /* what has no room is left out */
    assert_int_equal(spw_id_set_count(&set), 3);
    assert_false(spw_id_set_has(&set, 5000));
    assert_string_equal(spw_id_set_format(text, 4, &set), "7,1"); /* cut, and ended */
}

/* Two sockets of two cores, two threads each; CPUs 2 and 3 do not exist, 9 is offline, 5 may not be used. */
static void
test_read(void **state)
{
    static const struct {
        unsigned cpu;
        const char *siblings;
    } cpus[] = {{0, "0,6"}, {1, "1,7"}, {4, "4,8"}, {5, "5"}, {6, "0,6"}, {7, "1,7"}, {8, "4,8"}};
    static const spw_cpu want[] = {{0, 0, 0}, {1, 1, 0}, {4, 4, 2}, {6, 0, 0}, {7, 1, 0}, {8, 4, 2}};
    spw_topology t;
    spw_id_set allowed, nodes;
    char path[128], text[32];
    (void)state;
    for (size_t i = 0; i < sizeof cpus / sizeof cpus[0]; i++) {
        snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%u/topology/thread_siblings_list", cpus[i].cpu);
        snprintf(text, sizeof text, "%s\n", cpus[i].siblings);
        put(path, text);
        snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%u/online", cpus[i].cpu);
        put(path, "1\n");
    }
    put("sys/devices/system/cpu/cpu9/online", "0\n");
    put("sys/devices/system/node/online", "0-2\n");
    put("sys/devices/system/node/node0/cpulist", "0-1,6-7\n");
    put("sys/devices/system/node/node1/cpulist", "\n"); /* memory alone */
    put("sys/devices/system/node/node2/cpulist", "4-5,8\n");
    assert_true(spw_id_set_parse(&allowed, "0-1,4,6-9"));
    spw_topology_read(&t, root, &allowed);
    assert_int_equal(t.cpu_count, sizeof want / sizeof want[0]);
    for (uint32_t i = 0; i < t.cpu_count; i++) {
        assert_int_equal(t.cpus[i].cpu, want[i].cpu);
        assert_int_equal(t.cpus[i].core, want[i].core);
        assert_int_equal(t.cpus[i].node, want[i].node);
    }
    assert_int_equal(spw_topology_nodes(&t, &nodes), 2);
    assert_string_equal(spw_id_set_format(text, sizeof text, &nodes), "0,2");
}

/* Where sysfs is missing or says nonsense, a CPU is a core on node 0; a tree without any CPU still has one. */
static void
test_read_nothing(void **state)
{
    spw_topology t;
    spw_id_set allowed, mine;
    (void)state;
    assert_true(spw_id_set_parse(&allowed, "3,5,900"));
    for (int nonsense = 0; nonsense < 2; nonsense++) {
        spw_topology_read(&t, root, &allowed);
        assert_int_equal(t.cpu_count, 3);
        for (uint32_t i = 0; i < 3; i++) {
            assert_int_equal(t.cpus[i].core, t.cpus[i].cpu);
            assert_int_equal(t.cpus[i].node, 0);
        }
        put("sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "a lot\n");
        put("sys/devices/system/cpu/cpu5/topology/thread_siblings_list", "6-7\n"); /* without itself */
        put("sys/devices/system/node/online", "0-1\n");
        put("sys/devices/system/node/node1/cpulist", "3-\n");
    }
    put("sys/devices/system/cpu/cpu3/online", "0\n");
    put("sys/devices/system/cpu/cpu5/online", "0\n");
    put("sys/devices/system/cpu/cpu900/online", "0\n");
    spw_topology_read(&t, root, &allowed);
    assert_int_equal(t.cpu_count, 1);
    spw_topology_read(&t, "", NULL); /* this machine */
    spw_cpu_affinity(&mine);
    assert_true(t.cpu_count >= 1 && t.cpu_count <= spw_id_set_count(&mine));
    for (uint32_t i = 0; i < t.cpu_count; i++)
        assert_true(spw_id_set_has(&mine, t.cpus[i].cpu));
}

/* Homes as a list, and what the first and the last worker are bound to, on machines drawn by hand. */
static void
test_seats(void **state)
{
    /* "cpu.core.node ..." */
    static const char one[] = "0.0.0 1.1.0 2.2.0 3.3.0", smt[] = "0.0.0 1.1.0 2.0.0 3.1.0";
    static const char two[] = "0.0.0 1.1.0 2.2.1 3.3.1 4.0.0 5.1.0 6.2.1 7.3.1";
    static const char lame[] = "0.0.0 8.8.3 9.9.3 10.10.3", hole[] = "5.1.0 6.2.0 7.2.0";
    static const struct {
        const char *machine;
        uint32_t workers;
        const char *homes, *first, *last; /* "": not bound */
    } cases[] = {
        {one, 1, "0", "", ""},
        {one, 4, "0 1 2 3", "", ""},
        {one, 6, "0 1 2 3 0 1", "", ""},
        {smt, 1, "0", "0-1", "0-1"},
        {smt, 2, "0 1", "0-1", "0-1"},
        {smt, 3, "0 1 2", "", ""},
        {smt, 9, "0 1 2 3 0 1 2 3 0", "", ""},
        {two, 1, "0", "0-1", "0-1"},
        {two, 2, "0 2", "0-1", "2-3"},
        {two, 3, "0 1 2", "0-1", "2-3"},
        {two, 4, "0 1 2 3", "0-1", "2-3"},
        {two, 5, "0 1 4 2 3", "0-1,4-5", "2-3,6-7"},
        {two, 8, "0 1 4 5 2 3 6 7", "0-1,4-5", "2-3,6-7"},
        {two, 10, "0 1 4 5 0 2 3 6 7 2", "0-1,4-5", "2-3,6-7"},
        {lame, 2, "0 8", "0", "8-10"},
        {lame, 4, "0 8 9 10", "0", "8-10"},
        {hole, 2, "5 6", "5-6", "5-6"}, /* the sibling of 5 may not be used */
        {hole, 3, "5 6 7", "", ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        spw_topology t = {0};
        spw_seat seats[16];
        char homes[64] = "", text[64];
        unsigned cpu, core, node;
        int len;
        for (const char *at = cases[i].machine; sscanf(at, "%u.%u.%u%n", &cpu, &core, &node, &len) == 3; at += len)
            t.cpus[t.cpu_count++] = (spw_cpu){(uint16_t)cpu, (uint16_t)core, (uint16_t)node};
        spw_seat_workers(seats, cases[i].workers, &t);
        for (uint32_t w = 0; w < cases[i].workers; w++)
            snprintf(homes + strlen(homes), sizeof homes - strlen(homes), w > 0 ? " %u" : "%u", seats[w].home.cpu);
        assert_string_equal(homes, cases[i].homes);
        for (int last = 0; last < 2; last++) {
            const spw_seat *seat = &seats[last ? cases[i].workers - 1 : 0];
            spw_id_set_format(text, sizeof text, &seat->cpus);
            assert_string_equal(seat->bound ? text : "", last ? cases[i].last : cases[i].first);
        }
    }
}

/* A machine of up to 4 nodes, 8 cores each, 4 threads each, of which a random part may be used. */
static void
random_machine(spw_topology *t, uint64_t seed, uint32_t round)
{
    uint32_t r[4], nodes, cores, threads, keep, cpu = 0;
    bool siblings_last;
    spw_philox(seed, round, 0, r);
    nodes = 1 + r[0] % 4;
    cores = 1 + r[1] % 8;
    threads = 1 + r[2] % 4;
    keep = 1 + r[3] % 4; /* of 4 CPUs */
    siblings_last = r[3] >> 8 & 1;
    t->cpu_count = 0;
    for (uint32_t i = 0; i < nodes * cores * threads; i++, cpu++) {
        uint32_t core = siblings_last ? i % (nodes * cores) : i / threads;
        spw_philox(seed, round, i + 1, r);
        cpu += r[1] % 8 == 0;
        if (r[0] % 4 < keep)
            t->cpus[t->cpu_count++] = (spw_cpu){(uint16_t)cpu, (uint16_t)(core * 3), (uint16_t)(core / cores * 2)};
    }
    if (t->cpu_count == 0)
        t->cpus[t->cpu_count++] = (spw_cpu){7, 7, 5};
}

/* How many CPUs of its core come before it. */
static uint32_t
rank_of(const spw_topology *t, uint32_t idx)
{
    uint32_t rank = 0;
    for (uint32_t i = 0; i < idx; i++)
        rank += t->cpus[i].core == t->cpus[idx].core;
    return rank;
}

static void
check_seats(const spw_topology *t, const spw_seat *seats, uint32_t worker_count)
{
    uint32_t used[SPW_IDS_MAX] = {0}, on_node[8] = {0}, cores_of[8] = {0}, cores = 0;
    spw_id_set all = {{0}}, nodes;
    uint32_t node_count = spw_topology_nodes(t, &nodes);
    for (uint32_t i = 0; i < t->cpu_count; i++) {
        spw_id_set_add(&all, t->cpus[i].cpu);
        cores += rank_of(t, i) == 0;
        cores_of[t->cpus[i].node] += rank_of(t, i) == 0;
    }
    for (uint32_t w = 0; w < worker_count; w++) {
        const spw_seat *seat = &seats[w];
        assert_true(spw_id_set_has(&all, seat->home.cpu));
        used[seat->home.cpu]++;
        on_node[seat->home.node]++;
        assert_true(w == 0 || seats[w - 1].home.node <= seat->home.node);
        assert_int_equal(seat->bound, node_count > 1 || (worker_count <= cores && cores < t->cpu_count));
        assert_true(spw_id_set_has(&seat->cpus, seat->home.cpu));
        for (uint32_t i = 0; i < t->cpu_count; i++) {
            bool near = t->cpus[i].node == seat->home.node && (worker_count > cores || rank_of(t, i) == 0);
            assert_int_equal(spw_id_set_has(&seat->cpus, t->cpus[i].cpu), near);
        }
        assert_true(spw_id_set_count(&seat->cpus) <= t->cpu_count);
    }
    for (uint32_t i = 0; i < t->cpu_count; i++) {
        for (uint32_t j = 0; j < t->cpu_count; j++) {
            uint32_t a = used[t->cpus[i].cpu], b = used[t->cpus[j].cpu];
            assert_true(a <= b + 1);                               /* no CPU twice while one is free */
            assert_true(rank_of(t, i) <= rank_of(t, j) || a <= b); /* no sibling while a core is free */
        }
    }
    for (uint32_t a = 0; a < 8 && worker_count <= cores; a++) { /* nodes differ by one, or the smaller is full */
        for (uint32_t b = 0; b < 8; b++)
            assert_true(on_node[a] <= on_node[b] + 1 || on_node[b] == cores_of[b]);
    }
}

/* The same promises on random machines, and the same seats when asked again. */
static void
test_seats_random(void **state)
{
    const char *wish = getenv("SPW_SEED");
    uint64_t seed = wish != NULL ? strtoull(wish, NULL, 10) : spw_now_ns() % 1000000;
    (void)state;
    print_message("# SPW_SEED=%llu\n", (unsigned long long)seed);
    for (uint32_t round = 0; round < 200; round++) {
        static spw_seat seats[300], again[300];
        spw_topology t;
        uint32_t worker_count;
        random_machine(&t, seed, round);
        worker_count = 1 + (uint32_t)(seed + round * 7919u) % (2 * t.cpu_count + 3);
        spw_seat_workers(seats, worker_count, &t);
        spw_seat_workers(again, worker_count, &t);
        for (uint32_t w = 0; w < worker_count; w++)
            assert_true(seats[w].home.cpu == again[w].home.cpu && seats[w].bound == again[w].bound);
        check_seats(&t, seats, worker_count);
    }
}

/* Shares of a machine drawn by hand, as CPUs per turn. */
static void
test_shares(void **state)
{
    static const char one[] = "0.0.0 1.1.0 2.2.0 3.3.0", smt[] = "0.0.0 1.1.0 2.0.0 3.1.0";
    static const char two[] = "0.0.0 1.1.0 2.2.1 3.3.1 4.0.0 5.1.0 6.2.1 7.3.1";
    static const char lame[] = "0.0.0 8.8.3 9.9.3 10.10.3";
    static const struct {
        const char *machine;
        uint32_t count;
        const char *cpus[4];
    } cases[] = {
        {one, 1, {"0-3"}},
        {one, 2, {"0-1", "2-3"}},
        {one, 3, {"0", "1", "2-3"}},
        {smt, 2, {"0,2", "1,3"}},
        {smt, 4, {"0,2", "0,2", "1,3", "1,3"}},
        {two, 1, {"0-7"}},
        {two, 2, {"0-1,4-5", "2-3,6-7"}},
        {two, 3, {"0,4", "1,5", "2-3,6-7"}},
        {two, 4, {"0,4", "1,5", "2,6", "3,7"}},
        {lame, 2, {"0", "8-10"}},
        {lame, 4, {"0", "0", "8", "9-10"}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (uint32_t turn = 0; turn < cases[i].count; turn++) {
            spw_topology t = {0};
            spw_id_set cpus = {{0}};
            char text[64];
            unsigned cpu, core, node;
            int len;
            for (const char *at = cases[i].machine; sscanf(at, "%u.%u.%u%n", &cpu, &core, &node, &len) == 3; at += len)
                t.cpus[t.cpu_count++] = (spw_cpu){(uint16_t)cpu, (uint16_t)core, (uint16_t)node};
            spw_topology_share(&t, turn, cases[i].count);
            for (uint32_t k = 0; k < t.cpu_count; k++)
                spw_id_set_add(&cpus, t.cpus[k].cpu);
            assert_string_equal(spw_id_set_format(text, sizeof text, &cpus), cases[i].cpus[turn]);
        }
    }
}

/* On random machines: nobody goes without, all CPUs are somebody's, and no more nodes than there must be. */
static void
test_shares_random(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 300; round++) {
        spw_topology whole;
        spw_id_set nodes, all = {{0}};
        uint32_t count = 1 + round % 9, used = 0;
        random_machine(&whole, 5, round);
        for (uint32_t turn = 0; turn < count; turn++) {
            spw_topology t = whole;
            uint32_t node_count;
            spw_topology_share(&t, turn, count);
            assert_true(t.cpu_count > 0);
            node_count = spw_topology_nodes(&t, &nodes);
            assert_true(node_count <= spw_topology_nodes(&whole, &nodes) / count + 1);
            for (uint32_t k = 0; k < t.cpu_count; k++) {
                used += !spw_id_set_has(&all, t.cpus[k].cpu);
                spw_id_set_add(&all, t.cpus[k].cpu);
            }
        }
        if (count == 1 || count == spw_topology_nodes(&whole, &nodes))
            assert_int_equal(used, whole.cpu_count);
    }
}

static void
note_mask(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    spw_id_set *masks = ctx;
    (void)part_idx;
    spw_cpu_affinity(&masks[worker_idx]);
    spw_sleep_ns(2000000); /* the others get parts too */
}

/* A pool's threads keep to their seats, the caller's own mask stays, and results do not know of it. */
static void
test_pool_seat(void **state)
{
    enum { THREADS = 4, ROUNDS = 200 };
    spw_topology t = {0}, here;
    spw_id_set before, after, masks[THREADS] = {{{0}}};
    spw_pool *pool;
    uint32_t seen = 0;
    (void)state;
    spw_topology_read(&here, "", NULL);
    if (here.cpu_count < 2) {
        print_message("# one CPU: nothing can be bound\n");
        skip();
    }
    for (uint16_t i = 0; i < 2; i++) /* a node each */
        t.cpus[t.cpu_count++] = (spw_cpu){here.cpus[i].cpu, here.cpus[i].cpu, i};
    spw_cpu_affinity(&before);
    assert_int_equal(spw_pool_create(&pool, THREADS, "seated", NULL), SPW_OK);
    spw_test_fail_alloc(1);
    assert_int_equal(spw_pool_seat(pool, &t, NULL), SPW_ENOMEM);
    assert_int_equal(spw_pool_seat(pool, &t, NULL), SPW_OK);
    for (uint32_t round = 0; round < ROUNDS && seen < THREADS; round++) {
        spw_pool_run(pool, 2 * THREADS, note_mask, masks);
        seen = 0;
        for (uint32_t w = 0; w < THREADS; w++)
            seen += spw_id_set_count(&masks[w]) > 0;
    }
    spw_pool_destroy(pool);
    assert_int_equal(seen, THREADS);
    spw_cpu_affinity(&after);
    assert_memory_equal(&after, &before, sizeof before);
    assert_memory_equal(&masks[0], &before, sizeof before);
    for (uint32_t w = 1; w < THREADS; w++) { /* seats 0 and 1 on the first node, 2 and 3 on the second */
        assert_int_equal(spw_id_set_count(&masks[w]), 1);
        assert_true(spw_id_set_has(&masks[w], here.cpus[w / 2].cpu));
    }
}

/* How many threads with this name may run on the CPUs of the mask, and on no others; waits for all of them to start. */
static uint32_t
count_threads(const char *name, uint32_t thread_count, const spw_id_set *mask)
{
    for (uint32_t patience = 0;; patience++) {
        DIR *tasks = opendir("/proc/self/task");
        uint32_t named = 0, match = 0;
        assert_non_null(tasks);
        for (struct dirent *d = readdir(tasks); d != NULL; d = readdir(tasks)) {
            char path[300], comm[32] = "";
            spw_id_set own = {{0}};
            cpu_set_t set;
            FILE *f;
            snprintf(path, sizeof path, "/proc/self/task/%s/comm", d->d_name);
            f = fopen(path, "re");
            if (f == NULL)
                continue;
            if (fgets(comm, sizeof comm, f) == NULL)
                comm[0] = '\0';
            fclose(f);
            if (strncmp(comm, name, strlen(name)) != 0 || sched_getaffinity(atoi(d->d_name), sizeof set, &set) != 0)
                continue;
            for (uint32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
                if (CPU_ISSET(cpu, &set))
                    spw_id_set_add(&own, cpu);
            }
            named++;
            match += memcmp(&own, mask, sizeof own) == 0;
        }
        closedir(tasks);
        if (named == thread_count || patience == 1000)
            return named == thread_count ? match : UINT32_MAX;
        spw_sleep_ns(10000000); /* a thread may not have its name yet */
    }
}

/* The device's and the store's threads are seated as the topology says when asked to, and left alone otherwise. */
static void
test_threads(void **state)
{
    static const spw_store_unit unit = {.chunk_count = 1, .elems = 4096, .trainable = true};
    static const spw_store_chunk chunk = {.elems = 4096, .weight_tier = SPW_TIER_HOST, .record_tier = SPW_TIER_HOST};
    spw_topology t = {0}, here;
    spw_id_set mine, near[2] = {{{0}}};
    (void)state;
    spw_topology_read(&here, "", NULL);
    if (here.cpu_count < 2) {
        print_message("# one CPU: nothing can be bound\n");
        skip();
    }
    for (uint16_t i = 0; i < 2; i++) { /* a node each */
        t.cpus[t.cpu_count++] = (spw_cpu){here.cpus[i].cpu, here.cpus[i].cpu, i};
        spw_id_set_add(&near[i], here.cpus[i].cpu);
    }
    spw_cpu_affinity(&mine);
    for (int pin = 0; pin < 2; pin++) {
        spw_gpu_options options = {.name = "cpu", .thread_count = 4, .topology = &t, .pin_threads = pin};
        spw_store_config config = {.units = &unit,
                                   .chunks = &chunk,
                                   .unit_count = 1,
                                   .chunk_count = 1,
                                   .weight_bytes = 4,
                                   .record = {{.bytes_32 = 256}},
                                   .device_cache_bytes = 16384,
                                   .worker_count = 5,
                                   .topology = &t,
                                   .pin_threads = pin};
        spw_store *store;
        assert_int_equal(spw_gpu_open(&config.gpu, &options, NULL), SPW_OK);
        assert_int_equal(spw_store_create(&store, &config, NULL), SPW_OK);
        if (pin) {
            assert_int_equal(count_threads("spw-compute", 3, &near[0]), 1); /* and the caller */
            assert_int_equal(count_threads("spw-compute", 3, &near[1]), 2);
            assert_int_equal(count_threads("spw-adam", 5, &near[0]), 3);
            assert_int_equal(count_threads("spw-adam", 5, &near[1]), 2);
        } else {
            assert_int_equal(count_threads("spw-compute", 3, &mine), 3);
            assert_int_equal(count_threads("spw-adam", 5, &mine), 5);
        }
        spw_store_destroy(store);
        spw_gpu_close(config.gpu);
    }
}

/* Milliseconds that all threads whose name begins so have spent on a CPU; how many they are. */
static uint64_t
cpu_time_ms(const char *name, uint32_t *count)
{
    unsigned long user, system;
    uint64_t ticks = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    *count = 0;
    for (struct dirent *d = readdir(tasks); d != NULL; d = readdir(tasks)) {
        char path[300], comm[32];
        FILE *f;
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", d->d_name);
        f = fopen(path, "re");
        if (f == NULL)
            continue;
        if (fscanf(f, "%*d (%31[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", comm, &user, &system) == 3 &&
            strncmp(comm, name, strlen(name)) == 0) {
            ticks += user + system;
            ++*count;
        }
        fclose(f);
    }
    closedir(tasks);
    return ticks * 1000 / (uint64_t)sysconf(_SC_CLK_TCK);
}

static void
nothing(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    (void)ctx;
    (void)part_idx;
    (void)worker_idx;
}

/* Workers that wait cost nothing: seven of them take less than 50 ms of CPU time in 400 ms. */
static void
test_idle(void **state)
{
    spw_pool *pool;
    uint64_t before;
    uint32_t count;
    (void)state;
    assert_int_equal(spw_pool_create(&pool, 8, "idle", NULL), SPW_OK); /* and the caller */
    for (int round = 0; round < 2; round++) {                          /* before the first job, and after one */
        before = cpu_time_ms("idle", &count);
        assert_int_equal(count, 7);
        spw_sleep_ns(400000000);
        assert_true(cpu_time_ms("idle", &count) - before < 50);
        spw_pool_run(pool, 100, nothing, NULL);
    }
    spw_pool_destroy(pool);
}

/* The size comes from the affinity mask and the quota; OMP_NUM_THREADS belongs to others. */
static void
test_size(void **state)
{
    uint32_t count = spw_cpu_allowed_count();
    double quota = spw_cgroup_cpu_quota("");
    spw_id_set mask;
    spw_pool *pool;
    (void)state;
    spw_cpu_affinity(&mask);
    assert_true(count <= spw_id_set_count(&mask) && (count == 1 || count < quota + 1));
    assert_int_equal(setenv("OMP_NUM_THREADS", "7", 1), 0);
    assert_int_equal(spw_cpu_allowed_count(), count);
    assert_int_equal(spw_pool_create(&pool, 0, "sized", NULL), SPW_OK);
    assert_int_equal(spw_pool_threads(pool), count);
    spw_pool_destroy(pool);
    (void)unsetenv("OMP_NUM_THREADS");
}

/* Memory over several nodes: resident and counted as ever, and on the nodes in turn where there are two. */
static void
test_region_over(void **state)
{
    enum { BYTES = 8 << 20, PAGE = 2 << 20 };
    spw_topology here;
    spw_id_set nodes, made_up;
    spw_region r;
    (void)state;
    assert_true(spw_id_set_parse(&made_up, "0-1")); /* where node 1 does not exist the kernel keeps to node 0 */
    assert_int_equal(spw_region_map_over(&r, BYTES, SPW_REGION_LOCK, &made_up, NULL), SPW_OK);
    for (uint32_t i = 0; i < BYTES; i += 4096)
        assert_int_equal(((char *)r.base)[i]++, 0);
    spw_region_unmap(&r);
    spw_topology_read(&here, "", NULL);
    if (spw_topology_nodes(&here, &nodes) < 2) {
        print_message("# one node: which node a page is on cannot be seen\n");
        skip();
    }
    assert_int_equal(spw_region_map_over(&r, BYTES, 0, &nodes, NULL), SPW_OK);
    for (uint32_t at = 0; at + PAGE < BYTES; at += PAGE) { /* pages of 2 MiB or of 4 KiB, neighbours differ */
        int a = -1, b = -1, c = -1;
        char *p = (char *)r.base + at;
        assert_int_equal(get_mempolicy(&a, NULL, 0, p, MPOL_F_NODE | MPOL_F_ADDR), 0);
        assert_int_equal(get_mempolicy(&b, NULL, 0, p + 4096, MPOL_F_NODE | MPOL_F_ADDR), 0);
        assert_int_equal(get_mempolicy(&c, NULL, 0, p + PAGE, MPOL_F_NODE | MPOL_F_ADDR), 0);
        assert_true(spw_id_set_has(&nodes, (uint32_t)a) && (a != b || a != c));
    }
    spw_region_unmap(&r);
}

/* A partition is on its whole disk; a path that is not there yet is where its folder is. */
static void
test_disks(void **state)
{
    char from[300], path[300];
    (void)state;
    put("sys/devices/nvme0n1/dev", "259:0\n");
    put("sys/devices/nvme0n1/nvme0n1p2/partition", "2\n");
    put("sys/dev/block/none", "");
    snprintf(from, sizeof from, "%s/sys/dev/block/259:2", root);
    assert_int_equal(symlink("../../devices/nvme0n1/nvme0n1p2", from), 0);
    assert_int_equal(spw_disk_behind(root, makedev(259, 2)), makedev(259, 0));
    assert_int_equal(spw_disk_behind(root, makedev(259, 0)), makedev(259, 0));
    assert_int_equal(spw_disk_behind(root, makedev(0, 44)), makedev(0, 44)); /* btrfs, overlays: all that is known */
    put("sys/devices/nvme0n1/dev", "what\n");
    assert_int_equal(spw_disk_behind(root, makedev(259, 2)), makedev(259, 2));
    snprintf(path, sizeof path, "%s/not/there", root);
    assert_true(spw_disk_of(root) != 0);
    assert_int_equal(spw_disk_of(path), spw_disk_of(root));
    assert_int_equal(spw_disk_of("not-there"), spw_disk_of("."));
    assert_int_equal(spw_disk_of("/not-there"), spw_disk_of("/"));
    assert_true(spw_disk_of("/proc") != spw_disk_of(root));
    assert_int_equal(spw_disk_of(""), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_id_sets),
        cmocka_unit_test_setup_teardown(test_read, make_root, remove_root),
        cmocka_unit_test_setup_teardown(test_read_nothing, make_root, remove_root),
        cmocka_unit_test(test_seats),
        cmocka_unit_test(test_seats_random),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_shares_random),
        cmocka_unit_test(test_pool_seat),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_idle),
        cmocka_unit_test(test_size),
        cmocka_unit_test(test_region_over),
        cmocka_unit_test_setup_teardown(test_cgroup_quota, make_root, remove_root),
        cmocka_unit_test_setup_teardown(test_cgroup_memory, make_root, remove_root),
        cmocka_unit_test_setup_teardown(test_gpu_nodes, make_root, remove_root),
        cmocka_unit_test_setup_teardown(test_cgroup_memory_above, make_root, remove_root),
        cmocka_unit_test(test_memory_shared),
        cmocka_unit_test_setup_teardown(test_disks, make_root, remove_root),
    };
    return cmocka_run_group_tests_name("topology", tests, NULL, NULL);
}
