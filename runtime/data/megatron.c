/*
 * Megatron's index. The tokens of all sequences lie end to end in PREFIX.bin; PREFIX.idx says what they are:
 *
 *   0   "MMIDIDX" 0 0 | 9  u64 version 1 | 17  u8 dtype | 18  u64 S sequences | 26  u64 D, documents + 1
 *   34  i32 (S) tokens of each sequence | i64 (S) its byte in .bin | i64 (D) first sequence of each document, last S
 *
 * All of it is checked when it is opened, a piece at a time; nothing of it stays in memory. Where documents begin is looked
 * up on disk, for each window, by bisection. dtype: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 and 7 floats, 8 u16.
 */
#include "data_internal.h"
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEAD_BYTES = 34, PIECE = 2048 }; /* PIECE: entries looked at together */

/* A stretch of the index, read forward. */
typedef struct cursor {
    const data_file *f;
    int fd;
    uint32_t width;
    uint64_t offset, left; /* of the next entry, and how many there are from it on */
    uint64_t have, at;
    unsigned char bytes[PIECE * 8];
} cursor;

static spw_status
next_entry(cursor *c, uint64_t *out, spw_error *err)
{
    if (c->at == c->have) {
        c->have = c->left < PIECE ? c->left : PIECE;
        c->at = 0;
        SPW_TRY(spw__data_read(c->fd, c->f->index, c->offset, c->bytes, c->have * c->width, err));
        c->offset += c->have * c->width;
        c->left -= c->have;
    }
    *out = spw_get_le(c->bytes + c->at++ * c->width, c->width);
    return SPW_OK;
}

/* Lengths and offsets: each sequence begins where the one before it ends, and the last ends inside .bin. */
static spw_status
check_sequences(data_file *f, int fd, cursor *lengths, cursor *offsets, spw_error *err)
{
    uint64_t S = f->entries, e = spw__data_element_bytes(f->element), at = 0;
    lengths->f = offsets->f = f;
    lengths->fd = offsets->fd = fd;
    lengths->left = offsets->left = S;
    lengths->width = 4;
    offsets->width = 8;
    lengths->offset = HEAD_BYTES;
    offsets->offset = HEAD_BYTES + 4 * S;
    for (uint64_t i = 0; i < S; i++) {
        uint64_t length, offset;
        SPW_TRY(next_entry(lengths, &length, err));
        SPW_TRY(next_entry(offsets, &offset, err));
        if (length > INT32_MAX)
            return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: length of sequence %llu at offset %llu is negative",
                             f->index, (unsigned long long)i, (unsigned long long)(HEAD_BYTES + 4 * i));
        if (offset != at)
            return SPW_RAISE(
                err, SPW_ECORRUPT,
                "data: %s: pointer of sequence %llu at offset %llu is %lld, the sequences before it end at %llu",
                f->index, (unsigned long long)i, (unsigned long long)(HEAD_BYTES + 4 * S + 8 * i), (long long)offset,
                (unsigned long long)at);
        at += length * e;
        if (at > f->bytes)
            return SPW_RAISE(
                err, SPW_ECORRUPT,
                "data: %s: sequence %llu (pointer at offset %llu, length at %llu) ends at byte %llu of %s, "
                "which has %llu",
                f->index, (unsigned long long)i, (unsigned long long)(HEAD_BYTES + 4 * S + 8 * i),
                (unsigned long long)(HEAD_BYTES + 4 * i), (unsigned long long)at, f->path,
                (unsigned long long)f->bytes);
    }
    f->tokens = at / e;
    return SPW_OK;
}

static spw_status
check_documents(const data_file *f, int fd, cursor *c, spw_error *err)
{
    uint64_t first = HEAD_BYTES + 12 * f->entries, before = 0;
    *c = (cursor){.f = f, .fd = fd, .width = 8, .offset = first, .left = f->ends};
    for (uint64_t i = 0; i < f->ends; i++) {
        uint64_t sequence;
        SPW_TRY(next_entry(c, &sequence, err));
        if (sequence < before || sequence > f->entries || (i == 0 && sequence != 0) ||
            (i + 1 == f->ends && sequence != f->entries))
            return SPW_RAISE(
                err, SPW_ECORRUPT,
                "data: %s: document index %llu at offset %llu is %lld: it rises from 0 to %llu, and the one "
                "before is %llu",
                f->index, (unsigned long long)i, (unsigned long long)(first + 8 * i), (long long)sequence,
                (unsigned long long)f->entries, (unsigned long long)before);
        before = sequence;
    }
    return SPW_OK;
}

static spw_status
read_head(data_file *f, int fd, spw_error *err)
{
    static const data_element by_code[9] = {[1] = E_U8, E_I8, E_I16, E_I32, E_I64, [8] = E_U16};
    unsigned char head[HEAD_BYTES];
    struct stat info;
    uint64_t size, needed = 0, part = 0;
    uint32_t code;
    if (fstat(fd, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", f->index);
    size = (uint64_t)info.st_size;
    if (size < HEAD_BYTES)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s has %llu bytes, the head of Megatron's index has %d", f->index,
                         (unsigned long long)size, HEAD_BYTES);
    SPW_TRY(spw__data_read(fd, f->index, 0, head, sizeof head, err));
    if (memcmp(head, "MMIDIDX\0\0", 9) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: no \"MMIDIDX\" at offset 0: not Megatron's index", f->index);
    if (spw_get_le(head + 9, 8) != 1)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s: version at offset 9 is %llu, 1 is known", f->index,
                         (unsigned long long)spw_get_le(head + 9, 8));
    code = head[17];
    if (code == 6 || code == 7)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s: dtype at offset 17 is %u: floats are no tokens", f->index,
                         code);
    if (code < 1 || code > 8)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: dtype at offset 17 is %u, 1 to 5 and 8 are integers", f->index,
                         code);
    f->element = by_code[code];
    f->entries = spw_get_le(head + 18, 8);
    f->ends = spw_get_le(head + 26, 8);
    if (!spw_mul_u64(f->entries, 12, &needed) || !spw_mul_u64(f->ends, 8, &part) ||
        !spw_add_u64(needed, part, &needed) || !spw_add_u64(needed, HEAD_BYTES, &needed) || needed > size)
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "data: %s: %llu sequences (offset 18) and %llu document indices (offset 26) need more than its "
            "%llu bytes (truncated)",
            f->index, (unsigned long long)f->entries, (unsigned long long)f->ends, (unsigned long long)size);
    if (size == needed + f->entries && f->entries > 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "data: %s: a multimodal dataset (a mode for each sequence at offset %llu)", f->index,
                         (unsigned long long)needed);
    if (size != needed)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "data: %s: %llu sequences and %llu document indices take %llu bytes, it has %llu", f->index,
                         (unsigned long long)f->entries, (unsigned long long)f->ends, (unsigned long long)needed,
                         (unsigned long long)size);
    return SPW_OK;
}

spw_status
spw__data_megatron_open(data_file *f, int fd, spw_error *err)
{
    cursor *two;
    spw_status st;
    SPW_TRY(read_head(f, fd, err));
    two = spw_mem_calloc(2, sizeof *two);
    if (two == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reading %s", f->index);
    st = check_sequences(f, fd, &two[0], &two[1], err);
    if (st == SPW_OK)
        st = check_documents(f, fd, &two[0], err);
    spw_mem_free(two);
    f->begin = 0;
    return st;
}

/* ---------------------------------------------------------------- where documents begin */

/* The first token of document i, for i < ends; the last entry stands for the end of all tokens. */
static spw_status
document_first(const data_file *f, int fd, uint64_t i, uint64_t *out, spw_error *err)
{
    unsigned char x[8];
    uint64_t sequence;
    SPW_TRY(spw__data_read(fd, f->index, HEAD_BYTES + 12 * f->entries + 8 * i, x, 8, err));
    sequence = spw_get_le(x, 8);
    *out = f->tokens;
    if (sequence >= f->entries)
        return SPW_OK;
    SPW_TRY(spw__data_read(fd, f->index, HEAD_BYTES + 4 * f->entries + 8 * sequence, x, 8, err));
    *out = spw_get_le(x, 8) / spw__data_element_bytes(f->element);
    return SPW_OK;
}

static spw_status
mask(const data_file *f, int fd, uint64_t first, uint64_t count, int32_t mark, int32_t *tokens, int32_t *targets,
     spw_error *err)
{
    uint64_t low = 0, high = f->ends, x;
    while (low < high) { /* the first document that begins behind `first` */
        uint64_t mid = low + (high - low) / 2;
        SPW_TRY(document_first(f, fd, mid, &x, err));
        if (x <= first)
            low = mid + 1;
        else
            high = mid;
    }
    for (; low < f->ends; low++) {
        SPW_TRY(document_first(f, fd, low, &x, err));
        if (x - first > count || x <= first)
            break;
        targets[x - first - 1] = -1;
        if (x - first < count)
            tokens[x - first] |= mark;
    }
    return SPW_OK;
}

spw_status
spw__data_megatron_mask(const data_file *f, uint64_t first, uint64_t count, int32_t mark, int32_t *tokens,
                        int32_t *targets, spw_error *err)
{
    int fd;
    spw_status st = spw__data_fd(&fd, f->index, true, err);
    if (st == SPW_OK)
        st = mask(f, fd, first, count, mark, tokens, targets, err);
    if (fd >= 0)
        close(fd);
    return st;
}
