/*
 * Past the page cache. What is as large as a checkpoint or a model finds no room there, pushes out what else had some, and is copied once
 * more by a processor that has better things to do; so runs of large files pass through buffers of ours by direct I/O, whose limits
 * stay in here: whole pages at addresses of whole pages.
 *
 * A run ends anywhere in a page, and what has the rest of it comes later, or from another thread. Such ends wait in a table until their
 * page is whole. Through the page cache they would go one by one, and while one does no other write of the file moves (the inode's
 * lock). Only what never becomes whole, or finds no room in the table, goes there.
 */
#include "files_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_LEAST = 4096, CACHED_LEAST = 64 << 10, EDGES = 64, STRETCHES = 4, MEASURED_LEAST = 32 << 20 };

/* A page of a file of which not all has come. */
typedef struct edge {
    spw__large_file *file; /* NULL: free */
    uint64_t at;           /* of the page */
    bool moving;           /* whole, on its way to the file */
    struct {
        uint32_t first, end;
    } stretches[STRETCHES]; /* of what is there: apart, in order */
    uint32_t count;
} edge;

struct spw_bounce {
    spw_region memory; /* (count) buffers, then (EDGES) pages */
    uint64_t stride, edges_at;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    /* Under lock. */
    edge edges[EDGES];
    uint32_t next_edge;
    uint64_t spare, rate;              /* bytes that may go to the page cache where the disk takes fewer a second */
    uint64_t direct, busy_ns, busy_at; /* bytes that it took, in how long, since when, */
    uint32_t writing;                  /* while so many write */
    uint32_t free_count;
    uint32_t free[]; /* (count) */
};

static uint64_t
page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* A run begins and ends within pages. */
static uint64_t
stride_bytes(void)
{
    return SPW_BOUNCE_BYTES + 2 * page_bytes();
}

/* ---------------------------------------------------------------- buffers */

uint64_t
spw_bounce_bytes(uint32_t count)
{
    return count * stride_bytes() + EDGES * page_bytes() + sizeof(spw_bounce);
}

spw_status
spw_bounce_create(spw_bounce **out, uint32_t count, spw_error *err)
{
    spw_bounce *b = spw_mem_zalloc(sizeof *b + count * sizeof b->free[0]);
    spw_status st;
    *out = NULL;
    if (b == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "bounce buffers");
    b->stride = stride_bytes();
    b->edges_at = count * b->stride;
    st = spw_region_map(&b->memory, b->edges_at + EDGES * page_bytes(), SPW_REGION_TABLE, err);
    if (st != SPW_OK) {
        spw_mem_free(b);
        return st;
    }
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->cond, NULL);
    while (b->free_count < count) {
        b->free[b->free_count] = b->free_count;
        b->free_count++;
    }
    *out = b;
    return SPW_OK;
}

void
spw_bounce_destroy(spw_bounce *b)
{
    if (b == NULL)
        return;
    spw_region_unmap(&b->memory);
    pthread_cond_destroy(&b->cond);
    pthread_mutex_destroy(&b->lock);
    spw_mem_free(b);
}

char *
spw__bounce_take(spw_bounce *b)
{
    uint32_t i;
    pthread_mutex_lock(&b->lock);
    while (b->free_count == 0)
        pthread_cond_wait(&b->cond, &b->lock);
    i = b->free[--b->free_count];
    pthread_mutex_unlock(&b->lock);
    return (char *)b->memory.base + i * b->stride;
}

void
spw__bounce_give(spw_bounce *b, char *buffer)
{
    pthread_mutex_lock(&b->lock);
    b->free[b->free_count++] = (uint32_t)((uint64_t)(buffer - (char *)b->memory.base) / b->stride);
    pthread_cond_signal(&b->cond);
    pthread_mutex_unlock(&b->lock);
}

void
spw__large_open(spw__large_file *f, const char *path, int flags)
{
    f->path = path;
    f->direct_fd = SPW_CALL(EINVAL, open(path, flags | O_DIRECT | O_CLOEXEC));
}

char *
spw__bounce_at(char *buffer, uint64_t offset)
{
    return buffer + offset % page_bytes();
}

/* ---------------------------------------------------------------- reading */

/* All pages of it are in the page cache; also said of a file that belongs to somebody else. */
static bool
is_cached(int fd, uint64_t at, uint64_t bytes)
{
    unsigned char pages[SPW_BOUNCE_BYTES / PAGE_LEAST + 2];
    size_t count = bytes / page_bytes();
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, (off_t)at);
    bool cached = map != MAP_FAILED && mincore(map, bytes, pages) == 0;
    for (size_t i = 0; cached && i < count; i++)
        cached = (pages[i] & 1) != 0;
    if (map != MAP_FAILED)
        munmap(map, bytes);
    return cached;
}

/* [at, end), whole pages; false: not all that is wanted of them, for any reason. */
static bool
read_direct(int fd, char *buffer, uint64_t at, uint64_t end, uint64_t wanted)
{
    uint64_t got = 0;
    while (got < wanted) {
        ssize_t rc = SPW_CALL(EIO, pread(fd, buffer + got, end - at - got, (off_t)(at + got)));
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc <= 0)
            return false;
        got += (uint64_t)rc;
    }
    return true;
}

spw_status
spw__bounce_read(const spw__large_file *f, char *buffer, uint64_t at, uint64_t bytes, spw_error *err)
{
    uint64_t page = page_bytes(), from = at / page * page, end = spw_round_up(at + bytes, page);
    bool cached = bytes < CACHED_LEAST || is_cached(f->fd, from, end - from);
    spw_status st;
    SPW_ASSERT(bytes <= SPW_BOUNCE_BYTES);
    if (!cached && f->direct_fd >= 0 && read_direct(f->direct_fd, buffer, from, end, at + bytes - from))
        return SPW_OK;
    st = spw_file_read_at(f->fd, f->path, spw__bounce_at(buffer, at), bytes, at, err);
    if (!cached)
        (void)posix_fadvise(f->fd, (off_t)from, (off_t)(end - from), POSIX_FADV_DONTNEED);
    return st;
}

/* ---------------------------------------------------------------- writing */

/* Whole pages. What does not go past the cache, for any reason, goes through it: what is wrong with the disk is said there, or by fsync. */
static spw_status
write_pages(const spw__large_file *f, const char *data, uint64_t at, uint64_t bytes, spw_error *err)
{
    uint64_t done = 0;
    while (f->direct_fd >= 0 && done < bytes) {
        ssize_t rc = SPW_CALL(EIO, pwrite(f->direct_fd, data + done, bytes - done, (off_t)(at + done)));
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc <= 0)
            break;
        done += (uint64_t)rc;
    }
    return spw__file_write_at(f->fd, f->path, data + done, bytes - done, at + done, err);
}

void
spw_bounce_spill(spw_bounce *b, uint64_t bytes, uint64_t rate)
{
    b->spare = bytes;
    b->rate = rate;
}

/* To the disk, or where that is too slow to be waited for, as far as there is memory for it, to the page cache. */
static spw_status
write_paced(spw_bounce *b, const spw__large_file *f, const char *data, uint64_t at, uint64_t bytes, spw_error *err)
{
    uint64_t busy_ns;
    bool spilled;
    spw_status st;
    pthread_mutex_lock(&b->lock);
    busy_ns = b->busy_ns + (b->writing > 0 ? spw_now_ns() - b->busy_at : 0);
    spilled =
        b->spare >= bytes && b->direct >= MEASURED_LEAST && (double)b->direct * 1e9 < (double)b->rate * (double)busy_ns;
    if (spilled)
        b->spare -= bytes;
    else if (b->writing++ == 0)
        b->busy_at = spw_now_ns();
    pthread_mutex_unlock(&b->lock);
    if (spilled)
        return spw__file_write_at(f->fd, f->path, data, bytes, at, err);
    st = write_pages(f, data, at, bytes, err);
    pthread_mutex_lock(&b->lock);
    b->direct += bytes;
    if (--b->writing == 0)
        b->busy_ns += spw_now_ns() - b->busy_at;
    pthread_mutex_unlock(&b->lock);
    return st;
}

static char *
edge_data(const spw_bounce *b, const edge *e)
{
    return (char *)b->memory.base + b->edges_at + (uint64_t)(e - b->edges) * page_bytes();
}

/* Lock held. What is there goes through the page cache, and the entry is free. */
static spw_status
let_go(spw_bounce *b, edge *e, spw_error *err)
{
    spw_status st = SPW_OK;
    for (uint32_t i = 0; st == SPW_OK && i < e->count; i++)
        st = spw__file_write_at(e->file->fd, e->file->path, edge_data(b, e) + e->stretches[i].first,
                                e->stretches[i].end - e->stretches[i].first, e->at + e->stretches[i].first, err);
    e->file = NULL;
    return st;
}

/* Lock held. The page's entry, or one that is free now; NULL: all that can be said is err's, or they all move. */
static edge *
edge_of(spw_bounce *b, spw__large_file *f, uint64_t at, spw_error *err)
{
    edge *found = NULL;
    for (uint32_t i = 0; i < EDGES; i++) {
        edge *e = &b->edges[i];
        if (e->file == f && e->at == at)
            return e;
        if (e->file == NULL)
            found = e;
    }
    for (uint32_t i = 0; found == NULL && i < EDGES; i++) {
        edge *oldest = &b->edges[b->next_edge++ % EDGES];
        if (!oldest->moving && let_go(b, oldest, err) == SPW_OK)
            found = oldest;
    }
    if (found != NULL)
        *found = (edge){.file = f, .at = at};
    return found;
}

/* Adds [first, end) to what is there; false: it touches nothing, and there are too many already. */
static bool
add_stretch(edge *e, uint32_t first, uint32_t end)
{
    uint32_t i = 0, past;
    while (i < e->count && e->stretches[i].end < first)
        i++;
    for (past = i; past < e->count && e->stretches[past].first <= end; past++) {
        first = first < e->stretches[past].first ? first : e->stretches[past].first;
        end = end > e->stretches[past].end ? end : e->stretches[past].end;
    }
    if (past == i && e->count == STRETCHES)
        return false;
    memmove(&e->stretches[i + 1], &e->stretches[past], (e->count - past) * sizeof e->stretches[0]);
    e->stretches[i].first = first;
    e->stretches[i].end = end;
    e->count = e->count - past + i + 1;
    return true;
}

/* Part of a page. */
static spw_status
write_edge(spw_bounce *b, spw__large_file *f, const char *data, uint64_t at, uint64_t bytes, spw_error *err)
{
    uint64_t page = page_bytes(), from = at / page * page;
    uint32_t first = (uint32_t)(at - from), end = first + (uint32_t)bytes;
    spw_error own = {0};
    bool taken, whole;
    edge *e;
    if (bytes == 0)
        return SPW_OK;
    pthread_mutex_lock(&b->lock);
    e = edge_of(b, f, from, &own);
    taken = e != NULL && add_stretch(e, first, end);
    whole = taken && e->stretches[0].first == 0 && e->stretches[0].end == page;
    if (taken) {
        memcpy(edge_data(b, e) + first, data, bytes);
        e->moving = whole;
    }
    pthread_mutex_unlock(&b->lock);
    if (whole) {
        (void)write_pages(f, edge_data(b, e), from, page, &own);
        pthread_mutex_lock(&b->lock);
        e->file = NULL;
        pthread_mutex_unlock(&b->lock);
    } else if (!taken && own.status == SPW_OK) {
        (void)spw__file_write_at(f->fd, f->path, data, bytes, at, &own);
    }
    if (own.status != SPW_OK && err != NULL)
        *err = own;
    return own.status;
}

spw_status
spw__bounce_write(spw_bounce *b, spw__large_file *f, const char *buffer, uint64_t at, uint64_t bytes, spw_error *err)
{
    const char *data = buffer + at % page_bytes();
    uint64_t page = page_bytes(), end = at + bytes, first = spw_round_up(at, page), last = end / page * page;
    if (first >= last) { /* parts of one page, or of two */
        uint64_t cut = first < end ? first : end;
        SPW_TRY(write_edge(b, f, data, at, cut - at, err));
        return write_edge(b, f, data + (cut - at), cut, end - cut, err);
    }
    SPW_TRY(write_edge(b, f, data, at, first - at, err));
    SPW_TRY(write_paced(b, f, data + (first - at), first, last - first, err));
    return write_edge(b, f, data + (last - at), last, end - last, err);
}

spw_status
spw__bounce_flush(spw_bounce *b, spw__large_file *f, spw_error *err)
{
    spw_status st = SPW_OK;
    pthread_mutex_lock(&b->lock);
    for (uint32_t i = 0; i < EDGES; i++) {
        if (b->edges[i].file == f && st == SPW_OK)
            st = let_go(b, &b->edges[i], err);
        else if (b->edges[i].file == f)
            b->edges[i].file = NULL;
    }
    pthread_mutex_unlock(&b->lock);
    return st;
}
