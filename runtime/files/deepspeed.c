/*
 * Checkpoints of DeepSpeed's ZeRO stages: which bytes of which rank's file are which parameter's. Nothing of them is loaded; the parts of
 * a tensor become stretches of a span, and what reads a tensor then reads the ranks' files where they are.
 *
 *   stage 1, 2   of each group of parameters one flat array, cut among the ranks; parameters in the order of param_shapes, with padding
 *                behind each where param_alignment_paddings says so, and behind the last
 *   stage 3      each rank has of each parameter the next ceil(n / ranks) elements, the last ones filled up; a rank's parts lie in the
 *                order of param_shapes in the flat arrays of its sub-groups. Those that were on nvme are in files of their own, below
 *                offloaded_tensors/
 *
 * Masters and what the optimizer keeps lie alike. The order of the names is in the model's states, which in stage 3 each rank has.
 *
 * Source  DeepSpeed's documentation of checkpoints, and the layout of files that 0.19.8 writes.
 */
#include "foreign.h"
#include "hf_reader.h"
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS_MAX = 65536, LATEST_BYTES_MAX = 4096 };

/* ---------------------------------------------------------------- finding */

/* The rank in "[bf16_]zero_pp_rank_<R>_mp_rank_00_optim_states.pt"; false: another file, or of another part of the model (its number is *part). */
static bool
parse_name(const char *name, const char *end, uint64_t *rank, uint64_t *part)
{
    const char *at = strstr(name, "zero_pp_rank_");
    char *after;
    if (at == NULL || strlen(name) < strlen(end) || strcmp(name + strlen(name) - strlen(end), end) != 0)
        return false;
    *rank = strtoull(at + strlen("zero_pp_rank_"), &after, 10);
    if (strncmp(after, "_mp_rank_", 9) != 0)
        return false;
    *part = strtoull(after + 9, &after, 10);
    return strcmp(after, end) == 0;
}

/* How many ranks' files there are; parts: the highest number of a part of the model, from 0 on. */
static uint64_t
count_ranks(const char *folder, uint64_t *parts)
{
    DIR *dir = opendir(folder);
    struct dirent *at;
    uint64_t count = 0, rank, part;
    *parts = 0;
    while (dir != NULL && (at = readdir(dir)) != NULL) {
        if (!parse_name(at->d_name, "_optim_states.pt", &rank, &part))
            continue;
        count = rank < RANKS_MAX && rank + 1 > count ? rank + 1 : count;
        *parts = part > *parts ? part : *parts;
    }
    if (dir != NULL)
        closedir(dir);
    return count;
}

bool
spw__ds_find(const char *path, char *found, uint64_t bytes)
{
    char name[SPW__FOREIGN_PATH_BYTES], *tag = NULL;
    uint64_t parts;
    spw_error ignored = {0};
    snprintf(name, sizeof name, "%.3000s/latest", path);
    if (spw_file_read_text(name, LATEST_BYTES_MAX, &tag, &ignored) == SPW_OK) {
        tag[strcspn(tag, "\r\n")] = '\0';
        snprintf(name, sizeof name, "%.3000s/%.1000s", path, tag);
        spw_mem_free(tag);
    } else {
        snprintf(name, sizeof name, "%.3000s", path);
    }
    return count_ranks(name, &parts) > 0 && snprintf(found, bytes, "%s", name) < (int)bytes;
}

/* ---------------------------------------------------------------- where parameters lie */

static spw__ds_flat
flat_of(const spw_foreign *d, uint32_t rank, uint32_t part, uint32_t group)
{
    return d->ranks[rank].flats[(size_t)part * d->group_count + group];
}

static void
place(spw__foreign_param *p, uint32_t part, uint64_t begin)
{
    if (part == 0)
        p->info.begin = begin;
    else
        p->moment[part - 1] = begin;
}

static spw_status
not_all(const spw_foreign *d, uint64_t want, uint64_t have, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT,
                     "%s: parameters take %llu elements of a flat array, and its files have %llu: they are not of one "
                     "checkpoint, or in a layout that is not read",
                     d->folder, (unsigned long long)want, (unsigned long long)have);
}

/* Stage 1 and 2: the ranks' parts of a group, one after the other. */
static spw_status
place_group(spw_foreign *d, uint32_t part, uint32_t g, spw_error *err)
{
    uint64_t begin = spw__span_bytes(d->span), at = 0, have = 0;
    for (uint32_t r = 0; r < d->about.ranks; r++) {
        spw__ds_flat f = flat_of(d, r, part, g);
        SPW_TRY(spw__span_add(d->span, f.file_idx, f.offset, f.elems * 4, err));
        have += f.elems;
    }
    for (uint32_t i = 0; i < d->trained_count; i++) {
        if (d->params[i].group_idx != g)
            continue;
        place(&d->params[i], part, begin + at * 4);
        at += d->params[i].info.bytes / 4 + d->params[i].padding;
    }
    /* Behind the last one there may be padding, to a multiple of twice the ranks; the moments' is never cut off. */
    if (at > have || (part == 0 && have - at >= 2ull * d->about.ranks))
        return not_all(d, at, have, err);
    return SPW_OK;
}

/* Elements [first, first + count) of a rank's flat arrays, one after the other. */
static spw_status
add_part(spw_foreign *d, uint32_t rank, uint32_t part, uint64_t first, uint64_t count, spw_error *err)
{
    uint64_t before = 0;
    for (uint32_t g = 0; g < d->group_count && count > 0; g++) {
        spw__ds_flat f = flat_of(d, rank, part, g);
        uint64_t skip = first - before, n;
        before += f.elems;
        if (first >= before)
            continue;
        n = f.elems - skip < count ? f.elems - skip : count;
        SPW_TRY(spw__span_add(d->span, f.file_idx, f.offset + skip * 4, n * 4, err));
        first += n;
        count -= n;
    }
    return count == 0 ? SPW_OK : not_all(d, first + count, before, err);
}

static spw_status
place_parts(spw_foreign *d, uint32_t part, spw_error *err)
{
    uint64_t at = 0, have = 0;
    for (uint32_t i = 0; i < d->trained_count; i++) {
        uint64_t all = d->params[i].info.bytes / 4, each = (all + d->about.ranks - 1) / d->about.ranks;
        place(&d->params[i], part, spw__span_bytes(d->span));
        for (uint32_t r = 0; r < d->about.ranks; r++)
            SPW_TRY(add_part(d, r, part, at, each, err));
        at += each;
    }
    for (uint32_t g = 0; g < d->group_count; g++)
        have += flat_of(d, 0, part, g).elems;
    return at == have ? SPW_OK : not_all(d, at, have, err);
}

static spw_status
place_all(spw_foreign *d, spw_error *err)
{
    for (uint32_t part = 0; part <= d->about.moment_count; part++) {
        if (d->about.stage == 3)
            SPW_TRY(place_parts(d, part, err));
        for (uint32_t g = 0; d->about.stage < 3 && g < d->group_count; g++)
            SPW_TRY(place_group(d, part, g, err));
    }
    return d->param_count > d->trained_count ? spw__ds_read_frozen(d, err) : SPW_OK;
}

spw_status
spw__ds_read(spw_foreign *d, spw_error *err)
{
    uint64_t parts, ranks = count_ranks(d->folder, &parts);
    if (ranks == 0)
        return SPW_RAISE(err, SPW_ENOENT, "%s has no *_optim_states.pt: it is no checkpoint of DeepSpeed's ZeRO",
                         d->folder);
    if (parts > 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: the model is cut into %llu parts (mp_rank); whole ones are read",
                         d->folder, (unsigned long long)parts + 1);
    snprintf(d->about.maker, sizeof d->about.maker, "DeepSpeed");
    d->about.ranks = (uint32_t)ranks;
    d->ranks = spw_mem_calloc(ranks, sizeof *d->ranks);
    if (d->ranks == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "ranks of %s", d->folder);
    SPW_TRY(spw__ds_read_states(d, err));
    for (uint32_t r = 0; r < d->about.ranks; r++)
        SPW_TRY(spw__ds_read_rank(d, r, err));
    return place_all(d, err);
}
