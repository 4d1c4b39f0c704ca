/*
 * The model's file of one checkpoint in the next, or none (checkpoint_base.c): where everything in it is frozen, as with adapters, a save gives the file of
 * the last checkpoint (or of the one training went on from) a second name instead of writing all of it again. Only while it is
 * certain that both are the same: the store's frozen chunks were not edited on any rank, and the file is the one whose bytes
 * were summed. Where a link cannot be had (another file system, none of its kind there, the old one removed) the file is written.
 */
#include "checkpoint_internal.h"
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

uint64_t
spw__checkpoint_contents(spw_engine *e)
{
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(e), &stats);
    return stats.frozen_edits;
}

bool
spw__checkpoint_all_frozen(const spw_engine *e)
{
    const spw_model *m = spw_engine_model(e);
    uint32_t base = spw__base_count(m), id = 0;
    while (id < base && !spw__checkpoint_trains(e, id))
        id++;
    return id == base;
}

static bool
look(const char *path, saved_model *out)
{
    struct stat info;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode))
        return false;
    out->device = info.st_dev;
    out->inode = info.st_ino;
    out->bytes = (uint64_t)info.st_size;
    out->changed_ns = (uint64_t)info.st_mtim.tv_sec * 1000000000u + (uint64_t)info.st_mtim.tv_nsec;
    return true;
}

void
spw__checkpoint_saved(spw_engine *e, const char *checkpoint, const char *digest, uint64_t contents)
{
    saved_model *s = spw__engine_saved(e);
    snprintf(s->path, sizeof s->path, "%.1000s/" SPW_MODEL_FILE, checkpoint);
    snprintf(s->digest, sizeof s->digest, "%s", digest);
    s->contents = contents;
    s->base = false;
    s->there = spw__checkpoint_all_frozen(e) && (spw__engine_rank(e) > 0 || look(s->path, s));
}

bool
spw__checkpoint_unchanged(spw_engine *e, const spw_config *c)
{
    const saved_model *s = spw__engine_saved(e);
    const bool wanted = s->base ? !c->run.checkpoint_base : c->run.checkpoint_links;
    return wanted && s->there && s->contents == spw__checkpoint_contents(e);
}

bool
spw__checkpoint_link(spw_engine *e, const char *folder)
{
    const saved_model *s = spw__engine_saved(e);
    char to[SPW_PATH_BYTES + 128];
    saved_model now;
    if (s->base)
        return true; /* there is no file of it */
    snprintf(to, sizeof to, "%.1100s/" SPW_MODEL_FILE, folder);
    return look(s->path, &now) && now.device == s->device && now.inode == s->inode && now.bytes == s->bytes &&
           now.changed_ns == s->changed_ns && link(s->path, to) == 0;
}
