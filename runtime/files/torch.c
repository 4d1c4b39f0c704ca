/*
 * Where the tensors of a file of torch.save lie: the archive's directory, and what torch's callables mean in its pickle. Only tensors that
 * lie in their storage in one piece have a place that can be read by ranges; weights do, unless somebody saved a transposed view.
 */
#include "torch.h"
#include <errno.h>
#include <fcntl.h>
#include <isa-l/crc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DIRECTORY_MAX = 256 << 20,
    PICKLE_MAX = 512 << 20,
    END_BYTES = 22,     /* "end of central directory" */
    END64_BYTES = 56,   /* the same of zip64 */
    FIND64_BYTES = 20,  /* what says where that is, before the former */
    LOCAL_BYTES = 30,   /* before each file's name and bytes */
    CENTRAL_BYTES = 46, /* of each file, in the directory */
    COMMENT_MAX = 65535
};

/* A file in the archive. */
typedef struct member {
    char *name; /* without the archive's own name: "data/0" */
    uint64_t header_at, bytes;
    uint32_t crc;
    bool plain;
} member;

struct spw__torch {
    char *path;
    int fd;
    uint64_t base, file_bytes, member_count; /* base: where in the file it begins */
    member *members;                         /* by name */
    spw__pickle *pickle;
};

/* ---------------------------------------------------------------- the archive */

static uint64_t
uint_at(const unsigned char *b, int bytes)
{
    uint64_t x = 0;
    for (int i = 0; i < bytes; i++)
        x |= (uint64_t)b[i] << (8 * i);
    return x;
}

static spw_status
read_at(const spw__torch *t, void *data, uint64_t bytes, uint64_t at, spw_error *err)
{
    return spw_file_read_at(t->fd, t->path, data, bytes, t->base + at, err);
}

static spw_status
broken(const spw__torch *t, const char *what, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s; the file was not written, copied or fetched whole", t->path, what);
}

/* Replaces what is too large for its 4 bytes by what the extra field of zip64 says. */
static bool
widen(const unsigned char *extra, uint64_t extra_bytes, uint64_t *stored, uint64_t *bytes, uint64_t *header_at)
{
    for (uint64_t at = 0; at + 4 <= extra_bytes;) {
        uint64_t id = uint_at(extra + at, 2), size = uint_at(extra + at + 2, 2), next = at + 4 + size;
        if (next > extra_bytes)
            return false;
        if (id == 1) {
            uint64_t *wide[] = {bytes, stored, header_at};
            at += 4;
            for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
                if (*wide[i] != UINT32_MAX)
                    continue;
                if (at + 8 > next)
                    return false;
                *wide[i] = uint_at(extra + at, 8);
                at += 8;
            }
            return true;
        }
        at = next;
    }
    return *stored != UINT32_MAX && *bytes != UINT32_MAX && *header_at != UINT32_MAX;
}

static int
by_name(const void *a, const void *b)
{
    return strcmp(((const member *)a)->name, ((const member *)b)->name);
}

static spw_status
read_member(spw__torch *t, const unsigned char *entry, uint64_t room, uint64_t *taken, spw_error *err)
{
    member *m = &t->members[t->member_count];
    uint64_t name_bytes, extra_bytes, stored;
    const char *name, *inner;
    if (room < CENTRAL_BYTES || memcmp(entry, "PK\1\2", 4) != 0)
        return broken(t, "its directory is damaged", err);
    name_bytes = uint_at(entry + 28, 2);
    extra_bytes = uint_at(entry + 30, 2);
    *taken = CENTRAL_BYTES + name_bytes + extra_bytes + uint_at(entry + 32, 2);
    if (*taken > room)
        return broken(t, "its directory is cut off", err);
    stored = uint_at(entry + 20, 4);
    m->bytes = uint_at(entry + 24, 4);
    m->header_at = uint_at(entry + 42, 4);
    m->crc = (uint32_t)uint_at(entry + 16, 4);
    if (!widen(entry + CENTRAL_BYTES + name_bytes, extra_bytes, &stored, &m->bytes, &m->header_at) ||
        m->header_at > t->file_bytes || stored > t->file_bytes - m->header_at)
        return broken(t, "its directory names bytes that it does not have", err);
    m->plain = uint_at(entry + 10, 2) == 0 && stored == m->bytes && (entry[8] & 1) == 0;
    name = (const char *)entry + CENTRAL_BYTES;
    inner = memchr(name, '/', name_bytes);
    inner = inner != NULL ? inner + 1 : name;
    m->name = spw_mem_zalloc(name_bytes + 1);
    if (m->name == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "directory of %s", t->path);
    memcpy(m->name, inner, name_bytes - (uint64_t)(inner - name));
    t->member_count++;
    return SPW_OK;
}

static spw_status
read_directory(spw__torch *t, uint64_t at, uint64_t bytes, uint64_t count, spw_error *err)
{
    unsigned char *text;
    uint64_t taken = 0;
    spw_status st;
    if (bytes > DIRECTORY_MAX || at > t->file_bytes || bytes > t->file_bytes - at || count > bytes / CENTRAL_BYTES)
        return broken(t, "its directory lies outside of it", err);
    text = spw_mem_zalloc(bytes + 1);
    t->members = spw_mem_calloc(count + 1, sizeof *t->members);
    st = text != NULL && t->members != NULL ? read_at(t, text, bytes, at, err)
                                            : SPW_RAISE(err, SPW_ENOMEM, "directory of %s", t->path);
    for (uint64_t i = 0, from = 0; st == SPW_OK && i < count; i++, from += taken)
        st = read_member(t, text + from, bytes - from, &taken, err);
    spw_mem_free(text);
    if (st == SPW_OK)
        qsort(t->members, t->member_count, sizeof *t->members, by_name);
    return st;
}

/* The directory is found from the end: the last thing there says where it is, or where zip64's word for it is. */
static spw_status
find_directory(spw__torch *t, spw_error *err)
{
    uint64_t most = COMMENT_MAX + END_BYTES + FIND64_BYTES, n = t->file_bytes < most ? t->file_bytes : most;
    unsigned char *tail = spw_mem_zalloc(n + 1), wide[END64_BYTES];
    uint64_t end = n, begin = t->file_bytes - n, at = 0, bytes = 0, count = 0;
    spw_status st =
        tail != NULL ? read_at(t, tail, n, begin, err) : SPW_RAISE(err, SPW_ENOMEM, "directory of %s", t->path);
    for (uint64_t i = n; st == SPW_OK && end == n && i >= END_BYTES; i--) {
        const unsigned char *e = tail + i - END_BYTES;
        if (memcmp(e, "PK\5\6", 4) == 0 && uint_at(e + 20, 2) == n - i)
            end = i - END_BYTES;
    }
    if (st == SPW_OK && end == n)
        st = broken(t, "it ends before the archive's directory", err);
    if (st == SPW_OK) {
        count = uint_at(tail + end + 10, 2);
        bytes = uint_at(tail + end + 12, 4);
        at = uint_at(tail + end + 16, 4);
        if (end >= FIND64_BYTES && memcmp(tail + end - FIND64_BYTES, "PK\6\7", 4) == 0) {
            uint64_t wide_at = uint_at(tail + end - FIND64_BYTES + 8, 8);
            st = wide_at <= t->file_bytes && t->file_bytes - wide_at >= END64_BYTES
                     ? read_at(t, wide, END64_BYTES, wide_at, err)
                     : broken(t, "its directory lies outside of it", err);
            if (st == SPW_OK && memcmp(wide, "PK\6\6", 4) != 0)
                st = broken(t, "its directory is damaged", err);
            if (st == SPW_OK) {
                count = uint_at(wide + 32, 8);
                bytes = uint_at(wide + 40, 8);
                at = uint_at(wide + 48, 8);
            }
        }
    }
    spw_mem_free(tail);
    return st == SPW_OK ? read_directory(t, at, bytes, count, err) : st;
}

static const member *
find_member(const spw__torch *t, const char *name)
{
    member key = {.name = (char *)(uintptr_t)name};
    return bsearch(&key, t->members, t->member_count, sizeof key, by_name);
}

/* Where a member's bytes begin: behind its name, which the header before them has once more. */
static spw_status
member_begin(const spw__torch *t, const member *m, uint64_t *begin, spw_error *err)
{
    unsigned char local[LOCAL_BYTES];
    if (!m->plain)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s in it is compressed; torch.save does not do that", t->path,
                         m->name);
    if (t->file_bytes - m->header_at < LOCAL_BYTES)
        return broken(t, "it is cut off", err);
    SPW_TRY(read_at(t, local, LOCAL_BYTES, m->header_at, err));
    *begin = m->header_at + LOCAL_BYTES + uint_at(local + 26, 2) + uint_at(local + 28, 2);
    if (memcmp(local, "PK\3\4", 4) != 0 || *begin > t->file_bytes || m->bytes > t->file_bytes - *begin)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s in it is damaged or cut off", t->path, m->name);
    return SPW_OK;
}

/* The whole of a small member, checked; spw_mem_free. */
static spw_status
read_whole(const spw__torch *t, const member *m, uint64_t most, unsigned char **out, spw_error *err)
{
    uint64_t begin = 0;
    spw_status st;
    *out = NULL;
    SPW_TRY(member_begin(t, m, &begin, err));
    if (m->bytes > most)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s in it has %llu bytes, and more than %llu are not read", t->path,
                         m->name, (unsigned long long)m->bytes, (unsigned long long)most);
    *out = spw_mem_zalloc(m->bytes + 1);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s of %s", m->name, t->path);
    st = read_at(t, *out, m->bytes, begin, err);
    if (st == SPW_OK && crc32_gzip_refl(0, *out, m->bytes) != m->crc)
        st = SPW_RAISE(err, SPW_ECORRUPT, "%s: the checksum of %s in it is wrong; the file is damaged", t->path,
                       m->name);
    return st;
}

static spw_status
check_byte_order(const spw__torch *t, spw_error *err)
{
    const member *m = find_member(t, "byteorder");
    unsigned char *text = NULL;
    spw_status st = m != NULL ? read_whole(t, m, 64, &text, err) : SPW_OK; /* older versions do not say */
    if (st == SPW_OK && m != NULL && strcmp((const char *)text, "little") != 0)
        st = SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: its byte order is %s, not little", t->path, (const char *)text);
    spw_mem_free(text);
    return st;
}

static spw_status
read_pickle(spw__torch *t, spw_error *err)
{
    const member *m = find_member(t, "data.pkl");
    unsigned char *text;
    spw_status st;
    if (m == NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s is an archive without data.pkl: torch.save did not write it%s",
                         t->path, find_member(t, "constants.pkl") != NULL ? " (TorchScript?)" : "");
    SPW_TRY(check_byte_order(t, err));
    st = read_whole(t, m, PICKLE_MAX, &text, err);
    if (st == SPW_OK)
        st = spw__pickle_parse(&t->pickle, text, m->bytes, t->path, err);
    spw_mem_free(text);
    return st;
}

/* ---------------------------------------------------------------- the file */

spw_status
spw__torch_open(spw__torch **out, const char *path, spw_error *err)
{
    return spw__torch_open_at(out, path, 0, UINT64_MAX, err);
}

/* bytes UINT64_MAX: to the file's end. */
spw_status
spw__torch_open_at(spw__torch **out, const char *path, uint64_t base, uint64_t bytes, spw_error *err)
{
    spw__torch *t = spw_mem_zalloc(sizeof *t);
    unsigned char head[8] = {0};
    struct stat info;
    spw_status st = SPW_OK;
    *out = NULL;
    if (t == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s", path);
    t->path = spw_mem_strdup(path);
    t->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (t->path == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "%s", path);
    else if (t->fd < 0 || fstat(t->fd, &info) != 0)
        st = SPW_RAISE_SYS(err, errno, "open %s", path);
    if (st == SPW_OK && base > (uint64_t)info.st_size)
        st = SPW_RAISE(err, SPW_ECORRUPT, "%s ends before byte %llu, where a tensor begins", path,
                       (unsigned long long)base);
    if (st == SPW_OK) {
        t->base = base;
        t->file_bytes = (uint64_t)info.st_size - base < bytes ? (uint64_t)info.st_size - base : bytes;
        st = read_at(t, head, t->file_bytes < 8 ? t->file_bytes : 8, 0, err);
    }
    if (st == SPW_OK && memcmp(head, "PK\3\4", 4) != 0)
        st = spw__torch_begins(head)
                 ? SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "%s is a bare pickle, as PyTorch wrote before 1.6: load and save it once with a newer one",
                             path)
                 : SPW_RAISE(err, SPW_ECORRUPT, "%s is not a file of torch.save, or damaged", path);
    if (st == SPW_OK)
        st = find_directory(t, err);
    if (st == SPW_OK)
        st = read_pickle(t, err);
    if (st != SPW_OK)
        spw__torch_close(t);
    else
        *out = t;
    return st;
}

void
spw__torch_close(spw__torch *t)
{
    if (t == NULL)
        return;
    for (uint64_t i = 0; i < t->member_count; i++)
        spw_mem_free(t->members[i].name);
    spw_mem_free(t->members);
    spw__pickle_free(t->pickle);
    if (t->fd >= 0)
        close(t->fd);
    spw_mem_free(t->path);
    spw_mem_free(t);
}

const char *
spw__torch_path(const spw__torch *t)
{
    return t->path;
}

const spw__py *
spw__torch_root(const spw__torch *t)
{
    return spw__pickle_root(t->pickle);
}

/* ---------------------------------------------------------------- tensors */

/*
 * The arguments of _rebuild_tensor_v2, which makes a tensor of its storage, past what makes a parameter of one, or one that has attributes
 * (_rebuild_from_type_v2: a callable, a class, its arguments, the attributes). NULL: it is no tensor.
 */
static const spw__py *
tensor_args(const spw__py *v)
{
    static const char *const plain = "torch._utils._rebuild_tensor_v2";
    for (int depth = 0; depth < 4; depth++) {
        if (spw__py_is(v, plain))
            return v->args;
        if (spw__py_is(v, "torch._utils._rebuild_parameter") ||
            spw__py_is(v, "torch._utils._rebuild_parameter_with_state")) {
            v = spw__py_item(v->args, 0);
        } else if (spw__py_is(v, "torch._tensor._rebuild_from_type_v2")) {
            const spw__py *callable = spw__py_item(v->args, 0);
            bool is_plain = callable != NULL && callable->kind == SPW__PY_GLOBAL && strcmp(callable->text, plain) == 0;
            return is_plain ? spw__py_item(v->args, 2) : NULL;
        } else {
            return NULL;
        }
    }
    return NULL;
}

bool
spw__torch_is_tensor(const spw__py *v)
{
    return tensor_args(v) != NULL;
}

const spw__py *
spw__torch_attribute(const spw__py *v, const char *name)
{
    return spw__py_is(v, "torch._tensor._rebuild_from_type_v2") ? spw__py_get(spw__py_item(v->args, 3), name) : NULL;
}

const spw__py *
spw__torch_size(const spw__py *v)
{
    return spw__py_is(v, "torch.Size") ? spw__py_item(v->args, 0) : v;
}

/* By the class of its storage; SPW__ST_TYPE_COUNT: another. */
static int
type_of(const spw__py *storage)
{
    static const char *const classes[][2] = {
        {"Float", "F32"}, {"BFloat16", "BF16"}, {"Half", "F16"}, {"Double", "F64"}, {"Byte", "U8"},
        {"Char", "I8"},   {"Short", "I16"},     {"Int", "I32"},  {"Long", "I64"},   {"Bool", "BOOL"}};
    const char *name = storage != NULL && storage->kind == SPW__PY_GLOBAL ? storage->text : "";
    int type = 0;
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
        char whole[40];
        snprintf(whole, sizeof whole, "torch.%sStorage", classes[i][0]);
        if (strcmp(name, whole) != 0)
            continue;
        while (strcmp(spw__st_types[type].name, classes[i][1]) != 0)
            type++;
        return type;
    }
    return SPW__ST_TYPE_COUNT;
}

/* Sizes from v; strides must be those of a tensor in one piece, wherever there is a choice. */
static spw_status
read_shape(const spw__torch *t, const spw__py *sizes, const spw__py *strides, spw_tensor_info *out, spw_error *err)
{
    uint64_t step = 1;
    if (sizes == NULL || sizes->kind != SPW__PY_LIST || sizes->count > SPW_TENSOR_DIMS_MAX || strides == NULL ||
        strides->kind != SPW__PY_LIST || strides->count != sizes->count)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s: its shape is not one of at most %d sizes and strides", t->path,
                         out->name, SPW_TENSOR_DIMS_MAX);
    out->ndim = (uint32_t)sizes->count;
    for (uint32_t d = out->ndim; d-- > 0;) {
        int64_t size, stride;
        if (!spw__py_int(sizes->items[d], &size) || size < 0 || !spw__py_int(strides->items[d], &stride) || stride < 0)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s: size or stride %u is not a number", t->path, out->name, d);
        if (size > 1 && (uint64_t)stride != step)
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "%s: %s is a transposed or strided view of its storage; save it with contiguous()",
                             t->path, out->name);
        out->shape[d] = (uint64_t)size;
        if (size > 0 && !spw_mul_u64(step, (uint64_t)size, &step))
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s: its shape overflows", t->path, out->name);
    }
    return SPW_OK;
}

spw_status
spw__torch_tensor(const spw__torch *t, const spw__py *v, const char *name, spw_tensor_info *out, spw_error *err)
{
    const spw__py *args = tensor_args(v), *storage, *key;
    const member *m;
    uint64_t size, first;
    char file[80];
    int64_t offset;
    int type;
    memset(out, 0, sizeof *out);
    if (strlen(name) >= sizeof out->name)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor name %.40s... is longer than %zu bytes", t->path, name,
                         sizeof out->name - 1);
    snprintf(out->name, sizeof out->name, "%s", name);
    if (args == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "%s: %s is not a tensor", t->path, name);
    storage = spw__py_item(args, 0);
    storage = storage != NULL && storage->kind == SPW__PY_OUTSIDE ? storage->args : NULL;
    key = spw__py_item(storage, 2);
    if (spw__py_text(key) == NULL || !spw__py_int(spw__py_item(args, 1), &offset) || offset < 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s has no storage", t->path, name);
    type = type_of(spw__py_item(storage, 1));
    if (type == SPW__ST_TYPE_COUNT)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s is of a type that is not read", t->path, name);
    out->dtype = type < SPW_DTYPE_COUNT ? (spw_dtype)type : SPW_DTYPE_COUNT;
    out->type = spw__st_types[type].name;
    SPW_TRY(read_shape(t, spw__py_item(args, 2), spw__py_item(args, 3), out, err));
    if (!spw__st_tensor_bytes(out, spw__st_types[type].bits, &out->bytes))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s: its shape overflows", t->path, name);
    snprintf(file, sizeof file, "data/%.64s", key->text);
    m = find_member(t, file);
    if (m == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s: its storage, %s, is missing", t->path, name, file);
    SPW_TRY(member_begin(t, m, &out->begin, err));
    size = spw__st_types[type].bits / 8;
    if (!spw_mul_u64((uint64_t)offset, size, &first) || first > m->bytes || out->bytes > m->bytes - first)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s lies outside of its storage, %s", t->path, name, file);
    out->begin += t->base + first;
    return SPW_OK;
}

spw_status
spw__torch_read(const spw__torch *t, const spw_tensor_info *tensor, void *data, spw_error *err)
{
    return spw_file_read_at(t->fd, t->path, data, tensor->bytes, tensor->begin, err);
}
