/* spillway doctor: what this machine offers, each line OK or missing with the fix. */
#include "cli.h"
#include <dirent.h>
#include <linux/capability.h>
#include <math.h>
#include <numa.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

static void row(const char *name, bool ok, const char *fmt, ...) SPW_PRINTF(3, 4);

static void
row(const char *name, bool ok, const char *fmt, ...)
{
    va_list args;
    printf("  %-8s %-14s ", ok ? "OK" : "missing", name);
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    putchar('\n');
}

static void
check_aio(const char *dir)
{
    for (int backend = SPW_AIO_URING; backend <= SPW_AIO_THREADS; backend++) {
        spw_aio *aio = NULL;
        spw_error err = {0};
        bool ok = spw_aio_create(&aio, &(spw_aio_options){.backend = (spw_aio_backend)backend, .probe_dir = dir},
                                 &err) == SPW_OK;
        row(spw_aio_backend_name((spw_aio_backend)backend), ok, "%s", ok ? spw_aio_reason(aio) : err.message);
        if (!ok && backend == SPW_AIO_URING)
            printf("           fix: apt install liburing-dev and rebuild; sysctl kernel.io_uring_disabled=0; in a "
                   "container "
                   "allow io_uring in its seccomp profile\n");
        spw_aio_destroy(aio);
    }
}

/* The first of them that files can be made in: transfers are no worse for a folder that is missing, which has a line. */
static const char *
place_to_probe(char **dirs, int count, const char *otherwise)
{
    for (int i = 0; i < count; i++) {
        if (access(dirs[i], W_OK | X_OK) == 0)
            return dirs[i];
    }
    return otherwise;
}

static bool
check_path(const char *dir)
{
    char file[4200], free_text[32];
    spw_aio *aio = NULL;
    spw_aio_file *f = NULL;
    spw_error err = {0};
    struct statvfs fs;
    bool ok;
    snprintf(file, sizeof file, "%s/.spw-doctor-%ld", dir, (long)getpid());
    ok = spw_aio_create(&aio, &(spw_aio_options){.backend = SPW_AIO_THREADS, .probe_dir = dir}, &err) == SPW_OK &&
         spw_aio_file_open(&f, aio, file, SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE | SPW_AIO_OPEN_CREATE, &err) == SPW_OK;
    (void)unlink(file);
    if (!ok) {
        row("path", false, "%s", err.message);
        printf("           fix: name an existing folder that this user may write to\n");
    } else {
        row("path", true, "%s: %s, alignment %u, %s free", dir,
            spw_aio_file_direct(f) ? "O_DIRECT" : "no O_DIRECT (page cache is used; ext4, xfs and NVMe support it)",
            spw_aio_file_align(f),
            statvfs(dir, &fs) == 0 ? spw_format_bytes(free_text, sizeof free_text, (uint64_t)fs.f_bavail * fs.f_frsize)
                                   : "?");
    }
    spw_aio_file_close(f);
    spw_aio_destroy(aio);
    return ok;
}

/* "node 0: 0-3, node 1: 8-11" for the homes of workers, which come node by node. */
static void
show_seats(const spw_seat *seats, uint32_t worker_count)
{
    char list[512];
    for (uint32_t first = 0, w; first < worker_count; first = w) {
        spw_id_set homes = {{0}};
        for (w = first; w < worker_count && seats[w].home.node == seats[first].home.node; w++)
            spw_id_set_add(&homes, seats[w].home.cpu);
        printf("%s node %u: %s", first > 0 ? "," : "", seats[first].home.node,
               spw_id_set_format(list, sizeof list, &homes));
    }
}

/* Optimizer and compute workers as the engine would start and seat them. */
static void
check_workers(void)
{
    static spw_seat seats[SPW_IDS_MAX];
    spw_topology topology;
    spw_id_set affinity, nodes, cores = {{0}};
    double quota = spw_cgroup_cpu_quota("");
    uint32_t workers = spw_cpu_allowed_count(), core_count;
    char limit[64] = "no cgroup quota", list[512];
    spw_cpu_affinity(&affinity);
    spw_topology_read(&topology, "", NULL);
    spw_seat_workers(seats, workers, &topology);
    for (uint32_t i = 0; i < topology.cpu_count; i++)
        spw_id_set_add(&cores, topology.cpus[i].core);
    core_count = spw_id_set_count(&cores);
    if (isfinite(quota))
        snprintf(limit, sizeof limit, "cgroup quota %.1f", quota);
    printf("  %-8s %-14s %u of %ld CPUs (affinity %u, %s):", "OK", "workers", workers, sysconf(_SC_NPROCESSORS_ONLN),
           spw_id_set_count(&affinity), limit);
    show_seats(seats, workers);
    printf("; %s%s\n",
           core_count == topology.cpu_count ? "no SMT siblings"
           : workers <= core_count          ? "SMT siblings unused"
                                            : "SMT siblings used",
           seats[0].bound ? "" : ", not bound");
    if (spw_topology_nodes(&topology, &nodes) > 1)
        row("placement", true, "workers keep to their node, memory alternates over nodes %s",
            spw_id_set_format(list, sizeof list, &nodes));
}

static void *
ask_priority(void *given)
{
    *(bool *)given = spw_thread_be_prompt();
    return NULL;
}

/* In a thread of its own: this one stays as it is. */
static void
check_priority(void)
{
    pthread_t thread;
    bool given = false;
    if (pthread_create(&thread, NULL, ask_priority, &given) != 0)
        return;
    (void)pthread_join(thread, NULL);
    row("priority", given, "%s",
        given ? "threads that move data come before those that compute" : "a nice value of -10 is refused");
    if (!given)
        printf(
            "           fix: ulimit -e 30, or docker run --cap-add SYS_NICE; without it the disk may wait for a busy "
            "processor,\n           which costs a step that is bound by nvme a few percent\n");
}

/* Root may in a machine of its own; a container's root, as its runtime says. */
static bool
may_lock_more(void)
{
    return geteuid() == 0 && prctl(PR_CAPBSET_READ, CAP_IPC_LOCK, 0, 0, 0) == 1;
}

static void
check_memory(void)
{
    struct rlimit lock;
    spw_id_set gpus;
    char a[32], b[32];
    uint64_t cgroup = spw_cgroup_memory_bytes("");
    if (getrlimit(RLIMIT_MEMLOCK, &lock) == 0) {
        bool ok = lock.rlim_cur == RLIM_INFINITY || lock.rlim_cur >= (64u << 20) || may_lock_more();
        row("memlock", ok, "%s%s",
            lock.rlim_cur == RLIM_INFINITY ? "unlimited" : spw_format_bytes(a, sizeof a, lock.rlim_cur),
            may_lock_more() ? " (root may lock more)" : "");
        if (!ok)
            printf("           fix: ulimit -l unlimited, memlock lines in /etc/security/limits.conf, or docker run "
                   "--ulimit memlock=-1;\n           without it memory is not pinned\n");
    }
    row("memory", spw_memory_available_bytes("") > 0, "%s available, cgroup limit %s",
        spw_format_bytes(a, sizeof a, spw_memory_available_bytes("")),
        cgroup == UINT64_MAX ? "none" : spw_format_bytes(b, sizeof b, cgroup));
    if (numa_available() >= 0 && spw_gpu_nodes("", &gpus) > 0)
        row("numa", true, "%d node(s), of which %s: memory of GPUs, not counted as the host's",
            numa_num_configured_nodes(), spw_id_set_format(a, sizeof a, &gpus));
    else if (numa_available() >= 0)
        row("numa", true, "%d node(s)", numa_num_configured_nodes());
    else
        row("numa", false, "the kernel has no NUMA policy (harmless on one socket)");
}

static void
check_gpu(void)
{
    spw_gpu *gpu = NULL;
    spw_error err = {0};
    char bytes[32];
    if (spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda", .compute_dtype = SPW_BF16}, &err) == SPW_OK) {
        const spw_gpu_info *info = spw_gpu_get_info(gpu);
        row("gpu", true, "%s", info->description);
        row("gpu memory", true, "%s for device_memory auto", spw_format_bytes(bytes, sizeof bytes, info->memory_bytes));
        row("gpu link", info->link[0] != '\0', "%s", info->link[0] != '\0' ? info->link : "the driver does not tell");
        if (info->peak_flops > 0)
            row("gpu peak", true,
                "%.0f TFLOP/s in bf16 at the highest clock; spillway bench gemm shows what it reaches",
                info->peak_flops * 1e-12);
    } else {
        row("gpu", false, "%s; training runs on the cpu device", err.message);
    }
    spw_gpu_close(gpu);
}

int
cli_doctor(int argc, char **argv)
{
    spw_gpu *gpu = NULL;
    spw_error err = {0};
    bool ok = true;
    const char *given = getenv("TMPDIR"), *tmp = given != NULL && given[0] != '\0' ? given : "/tmp";
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-')
            return cli_unknown_option("doctor", argv[i]);
        if (argv[i][0] == '\0')
            return cli_usage("doctor", "a path is empty");
    }
    printf("spillway %s\n", SPW_VERSION);
    row("libraries", true, "OpenBLAS, libnuma, jansson, xxhash, ISA-L%s",
#ifdef SPW_HAVE_URING
        ", liburing"
#else
        " (no liburing: apt install liburing-dev and rebuild)"
#endif
    );
    row("isa", spw_cpu_isa() == spw_cpu_isa_native(), "%s (cpu has %s)", spw_isa_name(spw_cpu_isa()),
        spw_isa_name(spw_cpu_isa_native()));
    if (spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, &err) == SPW_OK)
        row("device cpu", true, "%s", spw_gpu_get_info(gpu)->description);
    else
        row("device cpu", false, "%s", err.message);
    spw_gpu_close(gpu);
    check_aio(place_to_probe(argv + 1, argc - 1, tmp));
    for (int i = 1; i < argc; i++)
        ok = check_path(argv[i]) && ok;
    if (argc == 1)
        ok = check_path(tmp);
    check_workers();
    check_priority();
    check_memory();
    check_gpu();
    return ok ? EXIT_DONE : EXIT_FAILED;
}
