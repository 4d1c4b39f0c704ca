/*
 * Frozen weights in place: where a chunk's weights lie when they stay in the files that they come from, instead of an extent in
 * swap. They are read in pieces, one after the other, into the chunk's slot, and what lies between the pieces is padding, made
 * here. Nobody but this process knows that the files are in use, so a file that changes is noticed: by size and time when it
 * is opened, by the checksum of the first read at every later one. Called by the mover, under the store's lock.
 */
#include "offload_internal.h"
#include <errno.h>
#include <sys/stat.h>

spw_status
spw__in_place_open(spw_store *s, spw_error *err)
{
    s->files = spw_mem_calloc(s->cfg.file_count + 1, sizeof(spw_aio_file *));
    if (s->files == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "files of frozen weights");
    for (uint32_t i = 0; i < s->cfg.file_count; i++) {
        const spw_store_file *f = &s->cfg.files[i];
        struct stat info;
        SPW_TRY(spw_aio_file_open(&s->files[i], s->aio, f->path, SPW_AIO_OPEN_READ, err));
        if (fstat(spw_aio_file_fd(s->files[i]), &info) != 0)
            return SPW_RAISE_SYS(err, errno, "stat %s", f->path);
        if ((uint64_t)info.st_size != f->bytes ||
            (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec != f->mtime_ns)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s changed since its header was read", f->path);
    }
    return SPW_OK;
}

void
spw__in_place_close(spw_store *s)
{
    for (uint32_t i = 0; s->files != NULL && i < s->cfg.file_count; i++)
        spw_aio_file_close(s->files[i]);
    spw_mem_free(s->files);
}

static const spw_store_piece *
piece_of(const spw_store *s, const chunk *c, uint32_t k)
{
    return &s->cfg.pieces[c->plan.piece_first + k];
}

static void
make_padding(const spw_store *s, chunk *c)
{
    uint64_t at = 0;
    for (uint32_t k = 0; k < c->plan.piece_count; k++) {
        const spw_store_piece *p = piece_of(s, c, k);
        memset((char *)c->weights + at, 0, p->at - at);
        at = p->at + p->bytes;
    }
    memset((char *)c->weights + at, 0, c->plan.elems * s->cfg.weight_bytes - at);
}

void
spw__in_place_aim(spw_store *s, chunk *c, spw_aio_request *req)
{
    const spw_store_piece *p = piece_of(s, c, c->piece_next);
    if (c->piece_next == 0)
        make_padding(s, c);
    req->file = s->files[p->file_idx];
    req->offset = p->offset;
    req->bytes = p->bytes;
    req->buf = (char *)c->weights + p->at;
}

bool
spw__in_place_more(chunk *c)
{
    if (++c->piece_next < c->plan.piece_count)
        return true;
    c->piece_next = 0;
    return false;
}

spw_status
spw__in_place_verify(const spw_store *s, chunk *c, uint64_t found, spw_error *err)
{
    const spw_store_piece *p = piece_of(s, c, 0);
    if (!c->summed) {
        c->weight_sum = found;
        c->summed = true;
    }
    return found == c->weight_sum
               ? SPW_OK
               : SPW_RAISE(
                     err, SPW_ECORRUPT,
                     "%s changed while its frozen weights were in use: chunk %u (unit %u, from offset %llu on) has "
                     "checksum %016llx, at first it was %016llx; spillway.frozen_in_place false copies them",
                     s->cfg.files[p->file_idx].path, c->idx, c->plan.unit_idx, (unsigned long long)p->offset,
                     (unsigned long long)found, (unsigned long long)c->weight_sum);
}
