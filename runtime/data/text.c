/*
 * Text files as byte tokens. Files are mapped; windows of T + 1 bytes start every T bytes. The training order is a keyed
 * permutation per epoch (a Feistel network with cycle walking), computed for each position: nothing is shuffled in memory.
 */
#include "spw_data.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct text_file {
    const unsigned char *bytes;
    uint64_t length;
    uint64_t train_first, train_count; /* windows in the training order's numbering */
    uint64_t valid_first, valid_count;
} text_file;

struct spw_data {
    text_file *files;
    uint32_t file_count, capacity;
    uint64_t seq_length, seed, bytes, train, valid;
};

static spw_status
add_file(spw_data *d, const char *path, spw_error *err)
{
    struct stat info;
    void *map = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0) {
        spw_status st = SPW_RAISE_SYS(err, errno, "data.path: open %s", path);
        if (fd >= 0)
            close(fd);
        return st;
    }
    if (S_ISDIR(info.st_mode)) {
        close(fd);
        return SPW_OK;
    }
    if (info.st_size > 0) {
        map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            spw_status st = SPW_RAISE_SYS(err, errno, "data.path: mapping %s", path);
            close(fd);
            return st;
        }
    }
    close(fd);
    if (d->file_count == d->capacity) {
        uint32_t capacity = d->capacity * 2 + 16;
        text_file *grown = spw_mem_calloc(capacity, sizeof *grown);
        if (grown == NULL) {
            if (map != NULL)
                munmap(map, (size_t)info.st_size);
            return SPW_RAISE(err, SPW_ENOMEM, "list of %u data files", capacity);
        }
        if (d->file_count > 0)
            memcpy(grown, d->files, d->file_count * sizeof *grown);
        spw_mem_free(d->files);
        d->files = grown;
        d->capacity = capacity;
    }
    d->files[d->file_count++] = (text_file){.bytes = map, .length = (uint64_t)info.st_size};
    d->bytes += (uint64_t)info.st_size;
    return SPW_OK;
}

static spw_status
add_pattern(spw_data *d, const char *pattern, spw_error *err)
{
    glob_t found;
    spw_status st = SPW_OK;
    int rc = glob(pattern, GLOB_ERR, NULL, &found);
    if (rc == GLOB_NOMATCH)
        return SPW_RAISE(err, SPW_ENOENT, "data.path: nothing matches %s", pattern);
    if (rc != 0)
        return SPW_RAISE_SYS(err, errno != 0 ? errno : EIO, "data.path: looking for %s", pattern);
    for (size_t i = 0; i < found.gl_pathc && st == SPW_OK; i++)
        st = add_file(d, found.gl_pathv[i], err);
    globfree(&found);
    return st;
}

/* The windows at every file's end are held out; a split above 0 holds out one window at least where there are two. */
static void
number_windows(spw_data *d, double split)
{
    uint64_t T = d->seq_length;
    for (uint32_t i = 0; i < d->file_count; i++) {
        text_file *f = &d->files[i];
        uint64_t windows = f->length > T ? (f->length - 1) / T : 0;
        f->valid_count = (uint64_t)((double)windows * split + 0.5);
        if (f->valid_count >= windows)
            f->valid_count = windows > 0 ? windows - 1 : 0;
        f->train_count = windows - f->valid_count;
        f->train_first = d->train;
        d->train += f->train_count;
    }
    for (uint32_t i = d->file_count; split > 0 && d->train > 1 && i-- > 0;) {
        bool any = false;
        for (uint32_t j = 0; j < d->file_count; j++)
            any = any || d->files[j].valid_count > 0;
        if (!any && d->files[i].train_count > 0) { /* files too short for their share: one window of the last */
            d->files[i].train_count--;
            d->files[i].valid_count = 1;
            d->train--;
            for (uint32_t j = i + 1; j < d->file_count; j++)
                d->files[j].train_first--;
        }
    }
    for (uint32_t i = 0; i < d->file_count; i++) {
        d->files[i].valid_first = d->valid;
        d->valid += d->files[i].valid_count;
    }
}

spw_status
spw_data_open(spw_data **out, const spw_data_options *o, spw_error *err)
{
    spw_data *d = spw_mem_zalloc(sizeof *d);
    spw_status st = SPW_OK;
    *out = NULL;
    if (d == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "data");
    d->seq_length = o->seq_length;
    d->seed = o->seed;
    if (o->seq_length == 0 || !(o->validation_split >= 0 && o->validation_split < 1))
        st = SPW_RAISE(err, SPW_EINVAL, "data.seq_length must be at least 1 and data.validation_split in [0, 1)");
    for (uint32_t i = 0; i < o->pattern_count && st == SPW_OK; i++)
        st = add_pattern(d, o->patterns[i], err);
    if (st == SPW_OK && d->bytes == 0)
        st = SPW_RAISE(err, SPW_EINVAL, "data.path: all %u files are empty", d->file_count);
    if (st == SPW_OK)
        number_windows(d, o->validation_split);
    if (st == SPW_OK && d->train == 0)
        st = SPW_RAISE(err, SPW_EINVAL,
                       "data.path: no file is long enough for one sequence: %llu bytes in %u files, a sequence of %llu "
                       "tokens needs %llu bytes in one file",
                       (unsigned long long)d->bytes, d->file_count, (unsigned long long)o->seq_length,
                       (unsigned long long)o->seq_length + 1);
    if (st != SPW_OK)
        spw_data_close(d);
    else
        *out = d;
    return st;
}

void
spw_data_close(spw_data *d)
{
    if (d == NULL)
        return;
    for (uint32_t i = 0; i < d->file_count; i++) {
        if (d->files[i].bytes != NULL)
            munmap((void *)(uintptr_t)d->files[i].bytes, d->files[i].length);
    }
    spw_mem_free(d->files);
    spw_mem_free(d);
}

uint64_t
spw_data_bytes(const spw_data *d)
{
    return d->bytes;
}

uint32_t
spw_data_file_count(const spw_data *d)
{
    return d->file_count;
}

uint64_t
spw_data_sequences(const spw_data *d, spw_split split)
{
    return split == SPW_SPLIT_TRAIN ? d->train : d->valid;
}

/* A permutation of [0, n) keyed by (seed, epoch): four Feistel rounds on the next even power of two, walked into range. */
static uint64_t
permute(uint64_t seed, uint64_t epoch, uint64_t i, uint64_t n)
{
    unsigned half = 1;
    while (half < 32 && (1ull << (2 * half)) < n)
        half++;
    do {
        uint64_t mask = (1ull << half) - 1, left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint32_t r[4];
            uint64_t next;
            spw_philox(seed ^ 0x64617461, epoch, right * 4 + round, r);
            next = left ^ (((uint64_t)r[1] << 32 | r[0]) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

/* Where window w of a split starts, and its file. */
static const unsigned char *
window(const spw_data *d, spw_split split, uint64_t w, const text_file **file_out)
{
    uint32_t low = 0, high = d->file_count - 1;
    const text_file *f;
    while (low < high) { /* the last file that starts at or before w and has windows */
        uint32_t mid = (low + high + 1) / 2;
        uint64_t first = split == SPW_SPLIT_TRAIN ? d->files[mid].train_first : d->files[mid].valid_first;
        if (first <= w)
            low = mid;
        else
            high = mid - 1;
    }
    *file_out = f = &d->files[low];
    if (split == SPW_SPLIT_TRAIN)
        return f->bytes + (w - f->train_first) * d->seq_length;
    return f->bytes + (f->train_count + w - f->valid_first) * d->seq_length;
}

/* Gives the pages around a window back: a file of any size leaves nothing resident. Reading them again is no error. */
static void
give_back(const text_file *f, const unsigned char *at, uint64_t bytes)
{
    enum { AROUND = 64 << 10 }; /* the kernel maps up to so much around a page that is read */
    uint64_t first = (uint64_t)(at - f->bytes) / AROUND * AROUND;
    uint64_t end = spw_round_up((uint64_t)(at - f->bytes) + bytes, AROUND);
    if (end > f->length)
        end = f->length;
    (void)madvise((void *)(uintptr_t)(f->bytes + first), end - first, MADV_DONTNEED);
}

void
spw_data_fill(const spw_data *d, spw_split split, uint64_t first, uint64_t count, int32_t *tokens, int32_t *targets)
{
    uint64_t n = spw_data_sequences(d, split), T = d->seq_length;
    for (uint64_t s = 0; s < count; s++) {
        uint64_t position = first + s, w = position % n;
        const text_file *f;
        const unsigned char *at;
        if (split == SPW_SPLIT_TRAIN)
            w = permute(d->seed, position / n, w, n);
        at = window(d, split, w, &f);
        for (uint64_t t = 0; t < T; t++) {
            tokens[s * T + t] = at[t];
            targets[s * T + t] = at[t + 1];
        }
        give_back(f, at, T + 1);
    }
}
