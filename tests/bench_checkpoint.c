/*
 * bench_checkpoint - how fast a checkpoint is saved and loaded, beside the disk. usage: bench_checkpoint FOLDER [ROUNDS]
 *
 * A GPT-2 of 152 M parameters in host memory, 2.1 GB of files. In turns, each round: what the disk takes and gives (as many bytes, a MiB at
 * a time by direct I/O, as many threads as the engine has), a save and a load, and the same bytes through the page cache, written in
 * blocks of 64 KiB and flushed, read when the cache has been told to forget them. Medians of rates and of each round's ratio to the disk, with
 * the processor time of this process. Fails where a save or a load has less than 0.35 of the disk's rate.
 */
#include "spw_files.h"
#include "spw_engine.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { DISK_WRITE, SAVE, CACHE_WRITE, DISK_READ, LOAD, CACHE_READ, KINDS, ROUNDS_MAX = 31, THREADS_MAX = 64 };
static const char *const names[KINDS] = {"disk, direct writes", "save", "page cache, writes and fsync",
                                         "disk, direct reads",  "load", "page cache, reads"};
static const double LEAST = 0.35;

typedef struct plain {
    int fd;
    bool writes, direct;
    uint64_t bytes, next; /* next: atomic */
    bool failed;
} plain;

/* Blocks of a file, as its threads come by them. */
static void *
plain_main(void *arg)
{
    plain *p = arg;
    uint64_t most = p->direct ? 1 << 20 : 64 << 10, at;
    spw_region region; /* huge pages, as the engine's buffers have */
    char *block;
    if (spw_region_map(&region, 2 << 20, 0, NULL) != SPW_OK)
        abort();
    block = memset(region.base, 0x5a, most);
    while ((at = __atomic_fetch_add(&p->next, most, __ATOMIC_RELAXED)) < p->bytes) {
        ssize_t rc = p->writes ? pwrite(p->fd, block, most, (off_t)at) : pread(p->fd, block, most, (off_t)at);
        if (rc != (ssize_t)most)
            p->failed = true;
    }
    spw_region_unmap(&region);
    return NULL;
}

static bool
move_plain(const char *path, bool writes, bool direct, uint64_t bytes, uint32_t threads)
{
    plain p = {.writes = writes, .direct = direct, .bytes = bytes / (1 << 20) * (1 << 20)};
    pthread_t thread[THREADS_MAX];
    p.fd = open(path, (writes ? O_RDWR | O_CREAT : O_RDONLY) | (direct ? O_DIRECT : 0), 0600);
    if (p.fd < 0 || (writes && posix_fallocate(p.fd, 0, (off_t)p.bytes) != 0))
        return false;
    for (uint32_t i = 0; i < threads; i++)
        pthread_create(&thread[i], NULL, plain_main, &p);
    for (uint32_t i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    if (writes && fsync(p.fd) != 0)
        p.failed = true;
    close(p.fd);
    return !p.failed;
}

/* Nothing of the file is in the page cache. */
static void
forget(const char *path)
{
    int fd = open(path, O_RDONLY);
    if (fd >= 0) {
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

static void
forget_checkpoint(const char *folder)
{
    static const char *const files[] = {"model.safetensors", "optimizer-00001-of-00001.safetensors"};
    char path[SPW_PATH_BYTES + 64];
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        snprintf(path, sizeof path, "%.1000s/%s", folder, files[i]);
        forget(path);
    }
}

static int
by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double
median(double *v, int count)
{
    qsort(v, (size_t)count, sizeof *v, by_value);
    return v[count / 2];
}

static spw_status
measure(spw_engine *e, const spw_config *c, const char *dir, int rounds, double ratio[KINDS], spw_error *err)
{
    static double seconds[KINDS][ROUNDS_MAX], cpu[KINDS][ROUNDS_MAX], ratios[KINDS][ROUNDS_MAX];
    uint64_t bytes = spw_checkpoint_disk_bytes(e, 1);
    uint32_t threads = spw_cpu_allowed_count() < THREADS_MAX ? spw_cpu_allowed_count() : THREADS_MAX;
    char plain_path[300], cached_path[300], saved[SPW_PATH_BYTES] = "";
    snprintf(plain_path, sizeof plain_path, "%s/plain", dir);
    snprintf(cached_path, sizeof cached_path, "%s/cached", dir);
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < KINDS; i++) {
            int k = i / 3 * 3 + (i + round) % 3; /* writes before reads, each first in turn */
            bool direct = k == DISK_WRITE || k == DISK_READ, ok = true;
            const char *path = direct ? plain_path : cached_path;
            spw_checkpoint_state state = {.step = 1};
            uint64_t before, busy;
            if (k == DISK_WRITE || k == CACHE_WRITE)
                (void)unlink(path); /* a checkpoint's files are new ones */
            if (k == CACHE_READ)
                forget(path);
            if (k == LOAD)
                forget_checkpoint(saved);
            before = spw_now_ns();
            busy = spw_process_cpu_ns();
            if (k == SAVE)
                SPW_TRY(spw_checkpoint_save(e, c, dir, &state, saved, err));
            else if (k == LOAD)
                SPW_TRY(spw_checkpoint_load(e, saved, err));
            else
                ok = move_plain(path, k < DISK_READ, direct, bytes, threads);
            seconds[k][round] = (double)(spw_now_ns() - before) * 1e-9;
            cpu[k][round] = (double)(spw_process_cpu_ns() - busy) * 1e-9;
            if (!ok)
                return SPW_RAISE(err, SPW_EIO, "%s of %s", names[k], path);
        }
        for (int k = 0; k < KINDS; k++)
            ratios[k][round] = seconds[k / 3 * 3][round] / seconds[k][round];
    }
    printf("# %.2f GB, %d rounds\n%-30s %6s %12s %14s\n", (double)bytes * 1e-9, rounds, "#", "GB/s", "of the disk",
           "CPU s per GB");
    for (int k = 0; k < KINDS; k++) {
        ratio[k] = median(ratios[k], rounds);
        printf("%-30s %6.2f %12.2f %14.2f\n", names[k], (double)bytes * 1e-9 / median(seconds[k], rounds), ratio[k],
               median(cpu[k], rounds) / ((double)bytes * 1e-9));
    }
    return SPW_OK;
}

int
main(int argc, char **argv)
{
    static spw_config config;
    spw_model *model = NULL;
    spw_engine *engine = NULL;
    spw_error err = {0};
    double ratio[KINDS] = {0};
    char dir[256];
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    bool slow;
    spw_status st =
        spw_config_parse(&config,
                         "{\"model\": {\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_positions\": 64, \"n_embd\": "
                         "1024, \"n_layer\": 12, "
                         "\"n_head\": 16}, \"train_micro_batch_size_per_gpu\": 1, \"bf16\": {\"enabled\": true}, "
                         "\"zero_optimization\": {\"stage\": 3, "
                         "\"offload_param\": {\"device\": \"cpu\"}, \"offload_optimizer\": {\"device\": \"cpu\"}}, "
                         "\"data\": {\"path\": \"-\", \"seq_length\": 64}, "
                         "\"spillway\": {\"device\": \"cpu\", \"steps\": 1, \"checkpoint_dir\": \"unused\"}}",
                         "bench_checkpoint", NULL, 0, &err);
    if (argc < 2 || rounds < 1 || rounds > ROUNDS_MAX) {
        fprintf(stderr, "usage: bench_checkpoint FOLDER [ROUNDS, at most %d]\n", ROUNDS_MAX);
        return 2;
    }
    snprintf(dir, sizeof dir, "%.200s/spw-checkpoint-XXXXXX", argv[1]);
    if (mkdtemp(dir) == NULL) {
        perror(dir);
        return 1;
    }
    if (st == SPW_OK)
        st = spw_model_from_config(&model, &config, &err);
    if (st == SPW_OK)
        st = spw_engine_create(&engine, &(spw_engine_options){.config = &config, .model = model}, &err);
    if (st == SPW_OK)
        st = spw_engine_init_params(engine, 1, &err);
    if (st == SPW_OK)
        st = measure(engine, &config, dir, rounds, ratio, &err);
    spw_engine_destroy(engine);
    spw_model_destroy(model);
    (void)spw_dir_remove(dir, NULL);
    if (st != SPW_OK)
        fprintf(stderr, "bench_checkpoint: %s\n", err.message);
    slow = st == SPW_OK && (ratio[SAVE] < LEAST || ratio[LOAD] < LEAST);
    if (slow)
        printf("a save or a load has less than %.2f of the disk's rate\n", LEAST);
    return st != SPW_OK || slow ? 1 : 0;
}
