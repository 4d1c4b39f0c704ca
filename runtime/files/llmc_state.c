/*
 * Checkpoints of llm.c, several in one folder:
 *
 *   model_00000040.bin          the weights (llmc.c) after 40 updates
 *   state_00000040_00002.bin    of rank 2: a header of 256 int32, then exp_avg, exp_avg_sq and, where there are such, masters, all fp32, each of the same
 *                               sixteen arrays: of one rank, or with -z 0, all of them; with ZeRO stage 1 of each layer of each array the rank's part
 *   DONE_00000040               empty: the others are whole
 *
 * Source  train_gpt2.cu of llm.c (commit f1e2ace); which of the two a state is in, its size alone tells.
 */
#include "foreign.h"
#include "llmc.h"
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { STATE_MAGIC = 20240527, RANKS_MAX = 65536, SHUFFLE_BYTES = 2520, PARTS = 3 };

/* ---------------------------------------------------------------- finding */

/* The number of a file "<before><eight digits><after>". */
static bool
numbered(const char *name, const char *before, const char *after, uint64_t *out)
{
    size_t n = strlen(before);
    char *end;
    if (strncmp(name, before, n) != 0 || strspn(name + n, "0123456789") < 8)
        return false;
    *out = strtoull(name + n, &end, 10);
    return strcmp(end, after) == 0;
}

static bool
is_model(const char *path, uint64_t *step)
{
    const char *slash = strrchr(path, '/');
    return numbered(slash != NULL ? slash + 1 : path, "model_", ".bin", step);
}

bool
spw__llmc_is(const char *path)
{
    uint64_t step;
    return is_model(path, &step);
}

bool
spw__llmc_find(const char *path, char *found, uint64_t bytes)
{
    DIR *dir;
    struct dirent *at;
    uint64_t step, last = 0;
    bool any = false;
    if (spw__llmc_is(path) && access(path, F_OK) == 0)
        return snprintf(found, bytes, "%s", path) < (int)bytes;
    dir = opendir(path);
    while (dir != NULL && (at = readdir(dir)) != NULL) {
        if (numbered(at->d_name, "DONE_", "", &step) && (!any || step > last)) {
            any = true;
            last = step;
        }
    }
    if (dir != NULL)
        closedir(dir);
    return any && snprintf(found, bytes, "%s/model_%08llu.bin", path, (unsigned long long)last) < (int)bytes;
}

/* ---------------------------------------------------------------- the ranks' files */

typedef struct reading {
    spw_foreign *d;
    spw__llmc m;
    uint64_t step;
    char folder[SPW__FOREIGN_PATH_BYTES];
    bool masters, shuffled;
    uint32_t *files;  /* (ranks) in the span, as many as are read */
    uint64_t part_at; /* of the part that is read: bytes before it in a rank's file */
} reading;

static void
state_path(const reading *r, uint32_t rank, char path[SPW__FOREIGN_PATH_BYTES + 64])
{
    snprintf(path, SPW__FOREIGN_PATH_BYTES + 64, "%s/state_%08llu_%05u.bin", r->folder, (unsigned long long)r->step,
             rank);
}

static spw_status
wrong_field(const char *path, int at, const char *name, int64_t is, int64_t want, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s at offset %d is %lld, it must be %lld", path, name, 4 * at,
                     (long long)is, (long long)want);
}

/* Of the first rank what all have in common. */
static spw_status
check_header(reading *r, const char *path, const int32_t *h, uint32_t rank, spw_error *err)
{
    const struct {
        int at;
        const char *name;
        int64_t want;
    } fields[] = {{0, "magic number", STATE_MAGIC},
                  {1, "version", 1},
                  {2, "number of ranks", r->d->about.ranks},
                  {3, "rank", rank},
                  {10, "step", (int64_t)r->step}};
    if (rank == 0 && h[0] == STATE_MAGIC && h[1] == 1) {
        if (h[2] < 1 || h[2] > RANKS_MAX)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: number of ranks at offset 8 is %d, outside [1, %d]", path, h[2],
                             RANKS_MAX);
        r->d->about.ranks = (uint32_t)h[2];
        r->masters = h[4] != 0;
        r->shuffled = h[5] != 0;
    }
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        int64_t want = fields[i].at == 2 ? r->d->about.ranks : fields[i].want;
        if (h[fields[i].at] != want)
            return wrong_field(path, fields[i].at, fields[i].name, h[fields[i].at], want, err);
    }
    if ((h[4] != 0) != r->masters || (h[5] != 0) != r->shuffled)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: masters and shuffling at offsets 16 and 20 are not those of rank 0",
                         path);
    return SPW_OK;
}

/* Is this its size, with so many elements of each part? What a loader that shuffles keeps is behind them. */
static spw_status
has_size(const reading *r, uint32_t file, uint64_t elems, bool *out, spw_error *err)
{
    const uint64_t bytes = spw__span_file_bytes(r->d->span, file);
    uint64_t at = SPW__LLMC_HEADER_BYTES + elems * sizeof(float) * (r->masters ? 3 : 2), count;
    for (int i = 0; r->shuffled && i < 2; i++) {
        if (at + sizeof count > bytes)
            break;
        SPW_TRY(spw__span_file_read(r->d->span, file, &count, sizeof count, at, err));
        at = count <= bytes / sizeof(int32_t) ? at + sizeof count + count * sizeof(int32_t) : UINT64_MAX;
        if (at > bytes)
            break;
    }
    *out = at <= bytes && at + (r->shuffled ? SHUFFLE_BYTES : 0) == bytes;
    return SPW_OK;
}

/* Do the ranks have a part of each layer of each array? */
static bool
divides(const reading *r)
{
    for (uint32_t i = 0; i < SPW__LLMC_ARRAYS; i++) {
        if (r->m.layer[i] % r->d->about.ranks != 0)
            return false;
    }
    return true;
}

/* The first says whether each rank has all of the state, or its part (stage 1). */
static spw_status
open_state(reading *r, uint32_t rank, spw_error *err)
{
    char path[SPW__FOREIGN_PATH_BYTES + 64];
    int32_t header[SPW__LLMC_HEADER_INTS];
    bool whole = false, part = false;
    spw_foreign_about *a = &r->d->about;
    state_path(r, rank, path);
    SPW_TRY(spw__span_open(r->d->span, path, &r->files[rank], err));
    if (spw__span_file_bytes(r->d->span, r->files[rank]) < sizeof header)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s is shorter than its header", path);
    SPW_TRY(spw__span_file_read(r->d->span, r->files[rank], header, sizeof header, 0, err));
    SPW_TRY(check_header(r, path, header, rank, err));
    if (rank == 0)
        SPW_TRY(has_size(r, r->files[rank], r->m.elems, &whole, err));
    if (!whole && a->ranks > 1 && divides(r))
        SPW_TRY(has_size(r, r->files[rank], r->m.elems / a->ranks, &part, err));
    if (rank == 0)
        a->stage = part;
    return whole || part ? SPW_OK
                         : SPW_RAISE(err, SPW_ECORRUPT,
                                     "%s has %llu bytes, which are neither those of the whole state of %s nor of one "
                                     "of %u ranks' part",
                                     path, (unsigned long long)spw__span_file_bytes(r->d->span, r->files[rank]),
                                     r->d->folder, a->ranks);
}

/* A part of the state, all arrays in order, to the span; *begin: where it begins there. */
static spw_status
add_part(reading *r, uint64_t *begin, spw_error *err)
{
    spw__span *span = r->d->span;
    const uint32_t ranks = r->d->about.stage > 0 ? r->d->about.ranks : 1;
    *begin = spw__span_bytes(span);
    for (uint32_t i = 0; i < SPW__LLMC_ARRAYS; i++) {
        const uint64_t bytes = r->m.layer[i] / ranks * sizeof(float);
        for (uint64_t l = 0; l < r->m.layer_count[i]; l++) {
            for (uint32_t rank = 0; rank < ranks; rank++)
                SPW_TRY(spw__span_add(span, r->files[rank],
                                      SPW__LLMC_HEADER_BYTES + r->part_at + r->m.first[i] / ranks * sizeof(float) +
                                          l * bytes,
                                      bytes, err));
        }
    }
    r->part_at += r->m.elems / ranks * sizeof(float);
    return SPW_OK;
}

static spw_status
open_states(reading *r, spw_error *err)
{
    r->files = spw_mem_calloc(1, sizeof *r->files);
    if (r->files == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", r->d->folder);
    SPW_TRY(open_state(r, 0, err));
    if (r->d->about.stage == 0)
        return SPW_OK;
    {
        uint32_t first = r->files[0], *files = spw_mem_calloc(r->d->about.ranks, sizeof *files);
        if (files == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", r->d->folder);
        spw_mem_free(r->files);
        r->files = files;
        files[0] = first;
    }
    for (uint32_t rank = 1; rank < r->d->about.ranks; rank++)
        SPW_TRY(open_state(r, rank, err));
    return SPW_OK;
}

/* ---------------------------------------------------------------- its tensors */

/* begin: of exp_avg, exp_avg_sq, and masters or weights, which are of this type. */
static spw_status
fill(reading *r, const uint64_t begin[PARTS], spw_dtype dtype, spw_error *err)
{
    const uint32_t count = spw__llmc_tensor_count(&r->m);
    spw_tensor_info *infos = spw_mem_calloc(count, sizeof *infos);
    spw_foreign *d = r->d;
    spw_status st = SPW_OK;
    d->params = spw_mem_calloc(count, sizeof *d->params);
    if (infos == NULL || d->params == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "parameters of %s", d->folder);
    for (uint32_t part = 0; st == SPW_OK && part < PARTS; part++) {
        st = spw__llmc_list(&r->m, d->span, begin[part], part < 2 ? SPW_F32 : dtype, infos, err);
        for (uint32_t i = 0; st == SPW_OK && i < count; i++) {
            if (part < 2)
                d->params[i].moment[part] = infos[i].begin;
            else
                d->params[i].info = infos[i];
        }
    }
    for (uint32_t i = 0; st == SPW_OK && i < count; i++) {
        d->params[i].moment_count = 2;
        d->params[i].decay = d->params[i].info.ndim > 1 ? NAN : 0; /* matrices have what was asked for, vectors none */
    }
    d->param_count = d->trained_count = st == SPW_OK ? count : 0;
    spw_mem_free(infos);
    return st;
}

static void
say(reading *r)
{
    spw_foreign_about *a = &r->d->about;
    snprintf(a->maker, sizeof a->maker, "llm.c");
    a->steps = a->updates = r->step;
    a->moment_count = 2;
    snprintf(a->moments[0], sizeof a->moments[0], "exp_avg");
    snprintf(a->moments[1], sizeof a->moments[1], "exp_avg_sq");
    a->clip = 1; /* these four cannot be set there */
    a->beta1 = 0.9;
    a->beta2 = 0.95;
    a->eps = 1e-8;
    r->d->model = r->m.config;
    r->d->says_model = true;
}

static spw_status
read_all(reading *r, spw_error *err)
{
    char path[SPW__FOREIGN_PATH_BYTES + 64];
    const char *slash = strrchr(r->d->folder, '/');
    uint64_t begin[PARTS];
    uint32_t model;
    (void)is_model(r->d->folder, &r->step);
    snprintf(r->folder, sizeof r->folder, "%.*s", slash != NULL ? (int)(slash - r->d->folder) : 1,
             slash != NULL ? r->d->folder : ".");
    snprintf(path, sizeof path, "%s/DONE_%08llu", r->folder, (unsigned long long)r->step);
    if (access(path, F_OK) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s is missing, so the checkpoint is not whole: llm.c makes it last", path);
    SPW_TRY(spw__llmc_open(&r->m, r->d->folder, err));
    SPW_TRY(open_states(r, err));
    for (uint32_t part = 0; part < (r->masters ? 3 : 2); part++)
        SPW_TRY(add_part(r, &begin[part], err));
    if (!r->masters) {
        SPW_TRY(spw__span_open(r->d->span, r->d->folder, &model, err));
        begin[2] = spw__span_bytes(r->d->span);
        SPW_TRY(
            spw__span_add(r->d->span, model, SPW__LLMC_HEADER_BYTES, r->m.elems * spw_dtype_bytes(r->m.dtype), err));
    }
    SPW_TRY(fill(r, begin, r->masters ? SPW_F32 : r->m.dtype, err));
    say(r);
    return SPW_OK;
}

spw_status
spw__llmc_read(spw_foreign *d, spw_error *err)
{
    reading r = {.d = d};
    spw_status st = read_all(&r, err);
    spw_mem_free(r.files);
    return st;
}
