/*
 * aio_bench.c - measures what paths deliver through this library, on files whose every byte can be checked.
 *
 * A page carries its number and the generation of its last write, so a lost, torn or misplaced write shows. While the
 * clock runs only the ends of each block are looked at (and a block written in place gets new stamps on one page in
 * eight), because a look at every byte would cost more than the transfer;
 * all of it is read and compared afterwards. The kernel's own counters of the block devices tell whether the bytes
 * really went there. What is timed ends with the flush of the last write.
 */
#include "aio_bench.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { PAGE = SPW__AIO_PAGE_BYTES, WORDS = PAGE / 8, LARGE_PAGE = 2 << 20, SWEEP_BYTES = 1 << 20, SWEEP_DEPTH = 8 };
static const uint64_t FILE_UNIT_BYTES = 64u << 20;

const char *
spw_aio_pattern_name(spw_aio_pattern pattern)
{
    static const char *const names[SPW_AIO_PATTERN_COUNT] = {"read", "write", "mixed", "swap"};
    return (unsigned)pattern < SPW_AIO_PATTERN_COUNT ? names[pattern] : "unknown";
}

/* ---------------------------------------------------------------- pages */

static uint64_t
filler(uint32_t word)
{
    return (word + 1) * 0xd1342543de82ef95u;
}

static void
fill_pages(char *buf, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += PAGE)
        for (uint32_t i = 0; i < WORDS; i++)
            ((uint64_t *)(void *)(buf + at))[i] = filler(i);
}

/* Where the two stamps of a page stand: not in the same cache set in all pages, which would cost a miss each. */
static inline uint32_t
stamp_word(uint64_t page_idx)
{
    return (uint32_t)(page_idx % 64 * 8);
}
static inline uint32_t
stamp_word_2(uint64_t page_idx)
{
    return (uint32_t)((page_idx + 32) % 64 * 8 + 7);
}

void
spw__bench_stamp_pages(spw_aio_bench *bench, uint32_t file_idx, uint64_t old_offset, uint64_t offset, uint64_t bytes,
                       uint64_t every, void *buf)
{
    uint64_t first = offset / PAGE, old = old_offset / PAGE, count = bytes / PAGE;
    for (uint64_t i = 0; i < count && old % 64 != first % 64 && old_offset != UINT64_MAX; i++) {
        uint64_t *words = (uint64_t *)buf + i * WORDS;
        words[stamp_word(old + i)] = filler(stamp_word(old + i));
        words[stamp_word_2(old + i)] = filler(stamp_word_2(old + i));
    }
    for (uint64_t i = every > 1 ? bench->rotation++ % every : 0; i < count; i += every) {
        uint64_t stamp = spw__bench_stamp(file_idx, first + i, bench->generation), *words = buf;
        words[i * WORDS + stamp_word(first + i)] = stamp;
        words[i * WORDS + stamp_word_2(first + i)] = ~stamp;
        bench->generations[file_idx][first + i] = bench->generation;
    }
}

static bool
stamp_right(const spw_aio_bench *bench, uint32_t file_idx, uint64_t page_idx, const uint64_t *words)
{
    uint64_t stamp = spw__bench_stamp(file_idx, page_idx, bench->generations[file_idx][page_idx]);
    return words[stamp_word(page_idx)] == stamp && words[stamp_word_2(page_idx)] == ~stamp;
}

uint64_t
spw__bench_check_ends(const spw_aio_bench *bench, uint32_t file_idx, uint64_t offset, uint64_t bytes, const void *buf)
{
    const uint64_t *words = buf, first = offset / PAGE, last = bytes / PAGE - 1;
    return !stamp_right(bench, file_idx, first, words) +
           (last > 0 && !stamp_right(bench, file_idx, first + last, words + last * WORDS));
}

static uint64_t
check_all(const spw_aio_bench *bench, uint32_t file_idx, uint64_t offset, uint64_t bytes, const void *buf)
{
    uint64_t wrong = 0;
    for (uint64_t at = 0; at < bytes; at += PAGE) {
        const uint64_t *words = (const uint64_t *)(const void *)((const char *)buf + at);
        const uint64_t page_idx = (offset + at) / PAGE;
        uint64_t differing = 0; /* words that are not the filler: the two stamps, unless one happens to be it */
        for (uint32_t i = 0; i < WORDS; i++)
            differing += words[i] != filler(i);
        wrong += !(stamp_right(bench, file_idx, page_idx, words) && differing <= 2);
    }
    return wrong;
}

/* Writes or checks all of a file, SWEEP_DEPTH requests at a time. */
static spw_status
sweep(spw_aio_bench *bench, spw_aio *aio, spw_aio_file *file, uint32_t file_idx, spw_aio_op op, spw_region *region,
      uint64_t *wrong, spw_error *err)
{
    spw_aio_request reqs[SWEEP_DEPTH];
    uint64_t at = 0;
    uint32_t going = 0;
    spw_status st = SPW_OK;
    for (uint32_t i = 0; i < SWEEP_DEPTH; i++) {
        reqs[i] = (spw_aio_request){
            .op = op, .file = file, .bytes = SWEEP_BYTES, .buf = (char *)region->base + (uint64_t)i * SWEEP_BYTES};
    }
    for (uint32_t next = 0;;) {
        spw_aio_request *req = going < SWEEP_DEPTH && next < SWEEP_DEPTH ? &reqs[next++] : NULL;
        if (req == NULL || at == bench->file_bytes || st != SPW_OK) {
            if (going == 0)
                break;
            req = spw_aio_wait(aio, UINT64_MAX);
            if (req == NULL)
                continue;
            going--;
            if (req->status != SPW_OK && st == SPW_OK)
                st = spw_aio_request_error(req, err);
            else if (op == SPW_AIO_READ && req->status == SPW_OK)
                *wrong += check_all(bench, file_idx, req->offset, req->bytes, req->buf);
            if (st == SPW_OK && bench->stop != NULL && *bench->stop != 0)
                st = SPW_RAISE(err, SPW_ECANCELED, "stopped");
        }
        if (at == bench->file_bytes || st != SPW_OK)
            continue;
        req->offset = at;
        at += SWEEP_BYTES;
        if (op == SPW_AIO_WRITE)
            spw__bench_stamp_pages(bench, file_idx, req->offset, req->offset, req->bytes, 1, req->buf);
        st = spw_aio_submit(aio, req, err);
        going += st == SPW_OK;
    }
    return st;
}

/* ---------------------------------------------------------------- files */

/* Takes the name away: whatever ends this process, nothing is left on the disk. The file is opened again by its descriptor. */
static spw_status
file_unlink(spw_aio_bench *b, uint32_t i, const char *path, spw_error *err)
{
    char by_fd[32];
    snprintf(by_fd, sizeof by_fd, "/proc/self/fd/%d", b->fds[i]);
    b->paths[i] = spw_mem_strdup(access(by_fd, F_OK) == 0 ? by_fd : path); /* no /proc: close removes it */
    if (b->paths[i] == NULL)
        close(b->fds[i]);
    if (b->paths[i] == NULL || strcmp(b->paths[i], path) != 0)
        (void)unlink(path);
    return b->paths[i] != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "bench of %s: its name", b->dirs[i]);
}

static spw_status
file_make(spw_aio_bench *b, uint32_t i, const char *dir, spw_error *err)
{
    char path[4096], need[32], have[32];
    struct statvfs fs;
    struct stat sb;
    uint64_t free_bytes;
    int fd, rc;
    if ((size_t)snprintf(path, sizeof path, "%s/spw-bench-%ld-%u.bin", dir, (long)getpid(), i) >= sizeof path)
        return SPW_RAISE(err, SPW_EINVAL, "bench folder %.64s...: the path is too long", dir);
    b->dirs[i] = spw_mem_strdup(dir);
    if (b->dirs[i] == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "bench of %s: its name", dir);
    fd = SPW_CALL(EACCES, open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "create %s", path);
    b->fds[i] = fd;
    SPW_TRY(file_unlink(b, i, path, err));
    free_bytes = fstatvfs(fd, &fs) == 0 ? (uint64_t)fs.f_bavail * fs.f_frsize : 0; /* a try may leave less */
    do
        rc = SPW_CALL(ENOSPC, fallocate(fd, 0, 0, (off_t)b->file_bytes));
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && errno == EOPNOTSUPP)
        rc = ftruncate(fd, (off_t)b->file_bytes);
    if (rc != 0 && (errno == ENOSPC || errno == EDQUOT))
        return SPW_RAISE(err, SPW_ENOSPC, "bench file in %s: needs %s, %s free", dir,
                         spw_format_bytes(need, sizeof need, b->file_bytes),
                         spw_format_bytes(have, sizeof have, free_bytes));
    if (rc != 0)
        return SPW_RAISE_SYS(err, errno, "preallocating %s in %s", spw_format_bytes(need, sizeof need, b->file_bytes),
                             dir);
    b->devs[i] = fstat(fd, &sb) == 0 ? sb.st_dev : 0;
    b->generations[i] = spw_mem_calloc(b->file_bytes / PAGE, 1); /* once the disk has agreed to the size */
    return b->generations[i] != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "bench of %s: page table", dir);
}

static spw_status
files_open(spw_aio_bench *b, spw_aio *aio, uint32_t first, uint32_t count, spw_aio_file **files, spw_error *err)
{
    for (uint32_t i = 0; i < count; i++)
        SPW_TRY(spw_aio_file_open(&files[i], aio, b->paths[first + i], SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE, err));
    return SPW_OK;
}

/* Writes every page (op WRITE), or counts the wrong ones. */
static spw_status
sweep_files(spw_aio_bench *b, uint32_t first, uint32_t count, spw_aio_op op, const spw_aio_options *options,
            uint64_t *wrong, spw_error *err)
{
    spw_aio_options own = options != NULL ? *options : (spw_aio_options){0};
    spw_aio_file *files[SPW_AIO_BENCH_DIRS_MAX];
    spw_region region = {0};
    spw_aio *aio = NULL;
    spw_status st = spw_region_map(&region, (uint64_t)SWEEP_DEPTH * SWEEP_BYTES, 0, err);
    own.block_bytes = own.queue_depth = 0;
    own.fixed = NULL;
    own.probe_dir = b->dirs[first];
    if (st == SPW_OK)
        st = spw_aio_create(&aio, &own, err);
    if (st == SPW_OK)
        st = files_open(b, aio, first, count, files, err);
    if (st == SPW_OK && op == SPW_AIO_WRITE)
        fill_pages(region.base, region.bytes);
    for (uint32_t i = 0; i < count && st == SPW_OK; i++)
        st = sweep(b, aio, files[i], first + i, op, &region, wrong, err);
    for (uint32_t i = 0; i < count && st == SPW_OK && op == SPW_AIO_WRITE; i++)
        if (fdatasync(spw_aio_file_fd(files[i])) != 0)
            st = SPW_RAISE_SYS(err, errno, "fdatasync of the bench file in %s", b->dirs[first + i]);
    spw_aio_destroy(aio);
    spw_region_unmap(&region);
    return st;
}

spw_status
spw_aio_bench_open(spw_aio_bench **out, const spw_aio_bench_options *options, spw_error *err)
{
    spw_aio_bench *b;
    spw_status st = SPW_OK;
    *out = NULL;
    if (options->dir_count == 0 || options->dir_count > SPW_AIO_BENCH_DIRS_MAX || options->file_bytes == 0 ||
        options->file_bytes % FILE_UNIT_BYTES != 0)
        return SPW_RAISE(err, SPW_EINVAL,
                         "a bench takes 1 to %d folders and files of a multiple of 64 MiB, not %u and %llu",
                         SPW_AIO_BENCH_DIRS_MAX, options->dir_count, (unsigned long long)options->file_bytes);
    b = spw_mem_zalloc(sizeof *b);
    if (b == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "bench handle");
    b->dir_count = options->dir_count;
    b->file_bytes = options->file_bytes;
    b->stop = options->stop;
    b->latency_us = spw_mem_calloc(SPW__BENCH_LATENCY_MAX, sizeof *b->latency_us);
    if (b->latency_us == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "bench latencies");
    for (uint32_t i = 0; i < b->dir_count && st == SPW_OK; i++)
        st = file_make(b, i, options->dirs[i], err);
    if (st == SPW_OK)
        st = sweep_files(b, 0, b->dir_count, SPW_AIO_WRITE, options->aio, NULL, err);
    if (st != SPW_OK)
        spw_aio_bench_close(b);
    else
        *out = b;
    return st;
}

void
spw_aio_bench_close(spw_aio_bench *b)
{
    if (b == NULL)
        return;
    for (uint32_t i = 0; i < b->dir_count; i++) {
        if (b->paths[i] != NULL) {
            close(b->fds[i]);
            (void)unlink(b->paths[i]); /* where it still has a name */
        }
        spw_mem_free(b->paths[i]);
        spw_mem_free(b->dirs[i]);
        spw_mem_free(b->generations[i]);
    }
    spw_mem_free(b->latency_us);
    spw_mem_free(b);
}

/* ---------------------------------------------------------------- the devices' own counters */

/* Sectors of 512 bytes read and written by a block device since boot; false when it is not listed. */
static bool
diskstats(dev_t dev, uint64_t bytes[2])
{
    char line[512];
    bool found = false;
    FILE *f = fopen("/proc/diskstats", "re");
    if (f == NULL)
        return false;
    while (!found && fgets(line, sizeof line, f) != NULL) {
        unsigned a, b;
        unsigned long long read, written;
        if (sscanf(line, "%u %u %*s %*u %*u %llu %*u %*u %*u %llu", &a, &b, &read, &written) == 4 && a == major(dev) &&
            b == minor(dev)) {
            bytes[0] = read * 512;
            bytes[1] = written * 512;
            found = true;
        }
    }
    fclose(f);
    return found;
}

/* Sums over the devices of a run, each once. */
static bool
device_bytes(const spw_aio_bench *b, const spw_aio_bench_run *run, uint64_t sum[2], char *note, size_t note_bytes)
{
    sum[0] = sum[1] = 0;
    for (uint32_t i = run->dir_first; i < run->dir_first + run->dir_count; i++) {
        uint64_t bytes[2];
        bool seen = false;
        for (uint32_t k = run->dir_first; k < i; k++)
            seen |= b->devs[k] == b->devs[i];
        if (seen)
            continue;
        if (!diskstats(b->devs[i], bytes)) {
            snprintf(note, note_bytes, "device %u:%u of %.60s is not in /proc/diskstats", major(b->devs[i]),
                     minor(b->devs[i]), b->dirs[i]);
            return false;
        }
        sum[0] += bytes[0];
        sum[1] += bytes[1];
    }
    return true;
}

/* ---------------------------------------------------------------- a run */

static double
cpu_seconds(void)
{
    struct rusage u;
    if (getrusage(RUSAGE_SELF, &u) != 0)
        return 0;
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static int
compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

void
spw__bench_land(spw_aio_bench *b, spw__bench_count *c, spw_aio_op op, uint64_t bytes, uint64_t start_ns)
{
    uint64_t now = spw_now_ns(), window = (now - c->begin_ns) / c->window_ns;
    c->bytes[spw__aio_side(op)] += bytes;
    c->requests++;
    if (start_ns != 0) {
        b->latency_us[c->latency_count % SPW__BENCH_LATENCY_MAX] = (float)(now - start_ns) * 1e-3f;
        c->latency_count++;
    }
    c->window_bytes[window < SPW__BENCH_WINDOW_COUNT ? window : SPW__BENCH_WINDOW_COUNT - 1] += bytes;
}

static void
summarise(spw_aio_bench *b, const spw__bench_count *c, spw_aio_bench_result *out)
{
    const uint32_t quarter = SPW__BENCH_WINDOW_COUNT / 4, half = SPW__BENCH_WINDOW_COUNT / 2;
    uint64_t n = c->latency_count < SPW__BENCH_LATENCY_MAX ? c->latency_count : SPW__BENCH_LATENCY_MAX;
    double begin_bytes = 0, end_bytes = 0, tail_s;
    out->read_bytes = c->bytes[0];
    out->write_bytes = c->bytes[1];
    out->requests = c->requests;
    out->wrong = c->wrong;
    out->seconds = (double)(c->end_ns - c->begin_ns) * 1e-9;
    out->gb_s = (double)(c->bytes[0] + c->bytes[1]) * 1e-9 / out->seconds;
    for (uint32_t i = 0; i < SPW__BENCH_WINDOW_COUNT; i++) {
        begin_bytes += i < quarter ? (double)c->window_bytes[i] : 0;
        end_bytes += i >= half ? (double)c->window_bytes[i] : 0;
    }
    tail_s = out->seconds - (double)half * (double)c->window_ns * 1e-9;
    out->burst_gb_s = begin_bytes / ((double)quarter * (double)c->window_ns);
    out->settled_gb_s = tail_s > 0 ? end_bytes * 1e-9 / tail_s : out->gb_s;
    if (n == 0)
        return;
    qsort(b->latency_us, n, sizeof *b->latency_us, compare_floats);
    out->p50_us = b->latency_us[(n - 1) / 2];
    out->p99_us = b->latency_us[(n - 1) * 99 / 100];
}

static spw_status
flush_files(spw_aio *aio, spw_aio_file **files, uint32_t count, spw_error *err)
{
    spw_aio_request reqs[SPW_AIO_BENCH_DIRS_MAX];
    spw_status st = SPW_OK;
    for (uint32_t i = 0; i < count; i++) {
        reqs[i] = (spw_aio_request){.op = SPW_AIO_FDATASYNC, .file = files[i]};
        SPW_TRY(spw_aio_submit(aio, &reqs[i], err));
    }
    for (uint32_t back = 0; back < count;) {
        spw_aio_request *req = spw_aio_wait(aio, UINT64_MAX);
        if (req == NULL)
            continue;
        back++;
        if (req->status != SPW_OK && st == SPW_OK)
            st = spw_aio_request_error(req, err);
    }
    return st;
}

static spw_status
run_check(const spw_aio_bench *b, const spw_aio_bench_run *run, uint64_t block, spw_error *err)
{
    if (run->dir_count == 0 || run->dir_first + run->dir_count > b->dir_count || run->duration_ns == 0 ||
        (unsigned)run->pattern >= SPW_AIO_PATTERN_COUNT || (run->bare && run->pattern == SPW_AIO_PATTERN_SWAP))
        return SPW_RAISE(err, SPW_EINVAL, "bench run: folders, duration or pattern");
    if (block % PAGE != 0 || (block & (block - 1)) != 0 || block > FILE_UNIT_BYTES / 2)
        return SPW_RAISE(err, SPW_EINVAL, "bench: block of %llu bytes: a power of two from 4 KiB to 32 MiB is needed",
                         (unsigned long long)block);
    return SPW_OK;
}

spw_status
spw_aio_bench_measure(spw_aio_bench *b, const spw_aio_bench_run *run, spw_aio_bench_result *out, spw_error *err)
{
    const bool swap = run->pattern == SPW_AIO_PATTERN_SWAP;
    spw_aio_options own = run->aio != NULL ? *run->aio : (spw_aio_options){0};
    spw_aio_bench_run checked = *run;
    spw_aio_file *files[SPW_AIO_BENCH_DIRS_MAX];
    spw__bench_count count = {0};
    spw_region region = {0};
    uint64_t before[2], after[2], bytes, flush_ns;
    double cpu;
    bool counted;
    spw_aio *aio = NULL;
    spw_status st;
    memset(out, 0, sizeof *out);
    if (own.block_bytes == 0)
        own.block_bytes = 1 << 20;
    if (own.queue_depth == 0)
        own.queue_depth = 16;
    checked.aio = &own;
    SPW_TRY(run_check(b, run, own.block_bytes, err));
    bytes = swap ? spw__bench_swap_bytes(&checked) : spw__bench_blocks_bytes(&checked);
    SPW_TRY(spw_region_map(&region, spw_round_up(bytes, LARGE_PAGE), 0, err)); /* the rest of one would be slower */
    fill_pages(region.base, region.bytes);
    own.fixed = &region;
    own.probe_dir = b->dirs[run->dir_first];
    st = spw_aio_create(&aio, &own, err);
    if (st == SPW_OK)
        st = files_open(b, aio, run->dir_first, run->dir_count, files, err);
    if (st != SPW_OK)
        goto out;
    out->backend = run->bare ? SPW_AIO_URING : spw_aio_backend_of(aio);
    snprintf(out->reason, sizeof out->reason, "%s", spw_aio_reason(aio));
    out->direct = true;
    for (uint32_t i = 0; i < run->dir_count; i++)
        out->direct &= spw_aio_file_direct(files[i]);
    b->generation++;
    counted = device_bytes(b, run, before, out->device_note, sizeof out->device_note);
    count.window_ns = run->duration_ns / SPW__BENCH_WINDOW_COUNT + 1;
    cpu = cpu_seconds();
    count.begin_ns = spw_now_ns();
    st = swap ? spw__bench_swap(b, &checked, aio, files, &region, &count, err)
              : spw__bench_blocks(b, &checked, run->bare ? NULL : aio, files, &region, &count, err);
    flush_ns = spw_now_ns();
    if (st == SPW_OK && count.bytes[1] > 0)
        st = flush_files(aio, files, run->dir_count, err);
    count.end_ns = spw_now_ns();
    out->flush_seconds = (double)(count.end_ns - flush_ns) * 1e-9;
    cpu = cpu_seconds() - cpu;
    if (st != SPW_OK)
        goto out;
    summarise(b, &count, out);
    out->cpu_s_per_gb = cpu / ((double)(out->read_bytes + out->write_bytes) * 1e-9);
    if (counted && device_bytes(b, run, after, out->device_note, sizeof out->device_note)) {
        double moved = (double)(out->read_bytes + out->write_bytes);
        double seen[2] = {(double)(after[0] - before[0]), (double)(after[1] - before[1])};
        /* Each way by itself: the reads of somebody else do not prove our writes. */
        seen[0] = seen[0] < (double)out->read_bytes ? seen[0] : (double)out->read_bytes;
        seen[1] = seen[1] < (double)out->write_bytes ? seen[1] : (double)out->write_bytes;
        out->device_ratio = (seen[0] + seen[1]) / moved;
    }
out:
    spw_aio_destroy(aio);
    spw_region_unmap(&region);
    if (st == SPW_OK && run->verify)
        st = sweep_files(b, run->dir_first, run->dir_count, SPW_AIO_READ, NULL, &out->wrong, err);
    if (st == SPW_EIO || st == SPW_ECORRUPT) /* its file has no name to be told */
        spw_error_wrap(err, "bench file in %s", b->dirs[run->dir_first]);
    return st;
}
