/*
 * Striping: which swap path each chunk goes to. Pure arithmetic on sizes, weights and limits. Paths get bytes in proportion
 * to their weights, and so does every stretch of consecutive chunks, because chunks are used in their order and all disks
 * should be busy at any time.
 *
 * A path with a limit below its share gets the limit, spread evenly as well, and the others share the rest by weight. Then
 * each next chunk goes, among the paths that are not ahead of their share, to the one with the smallest (assigned + chunk)
 * / share; ties go to the lower index. This is Balinski and Young's quota method (1975): no path is ever more than one chunk
 * away from its share (proved for chunks of one size, tested for others). The smallest quotient alone (d'Hondt) lets one
 * heavy path run ahead of many light ones, by five chunks with 16 paths.
 */
#include "runtime_internal.h"
#include <stdio.h>

/* The bytes that each path should get of total; the limits hold total together. */
static void
share_out(const stripe_path *paths, uint32_t path_count, uint64_t total, double share[SPW_PATHS_MAX])
{
    bool full[SPW_PATHS_MAX] = {false};
    for (bool again = true; again;) {
        double rest = (double)total, weights = 0;
        for (uint32_t i = 0; i < path_count; i++) {
            rest -= full[i] ? (double)paths[i].limit : 0;
            weights += full[i] ? 0 : paths[i].weight;
        }
        rest = rest > 0 ? rest : 0; /* rounding */
        again = false;
        for (uint32_t i = 0; i < path_count; i++) {
            share[i] = full[i] ? (double)paths[i].limit : rest * (paths[i].weight / weights);
            if (!full[i] && paths[i].limit > 0 && share[i] > (double)paths[i].limit)
                full[i] = again = true;
        }
    }
}

static bool
has_room(const stripe_path *p, uint64_t bytes)
{
    return p->limit == 0 || (p->bytes <= p->limit && bytes <= p->limit - p->bytes);
}

/* The path of the next chunk; path_count if it fits nowhere. */
static uint32_t
choose(const stripe_path *paths, uint32_t path_count, const double *share, uint64_t bytes)
{
    double shares = 0, after = (double)bytes, best = 0;
    uint32_t chosen = path_count;
    for (uint32_t i = 0; i < path_count; i++) { /* a path without room no longer counts: the others make up for it */
        shares += has_room(&paths[i], bytes) ? share[i] : 0;
        after += has_room(&paths[i], bytes) ? (double)paths[i].bytes : 0;
    }
    for (int strict = 1; strict >= 0 && chosen == path_count; strict--) { /* rounding may leave all of them ahead */
        for (uint32_t i = 0; i < path_count; i++) {
            double quotient = ((double)paths[i].bytes + (double)bytes) / share[i];
            if (!has_room(&paths[i], bytes) || (strict && (double)paths[i].bytes >= share[i] / shares * after))
                continue;
            if (chosen == path_count || quotient < best) {
                chosen = i;
                best = quotient;
            }
        }
    }
    return chosen;
}

static spw_status
does_not_fit(const stripe_path *paths, uint32_t path_count, uint64_t total, uint64_t chunk, spw_error *err)
{
    char list[640] = "", need[32], piece[32], limit[32];
    /* all have a limit here: a path without one holds everything */
    for (uint32_t i = 0, at = 0; i < path_count && at < sizeof list; i++)
        at += (uint32_t)snprintf(list + at, sizeof list - at, "%s%s at most %s", i > 0 ? ", " : "", paths[i].name,
                                 spw_format_bytes(limit, sizeof limit, paths[i].limit));
    return SPW_RAISE(err, SPW_ENOFIT,
                     "swap space needs %s (%llu bytes) in chunks of up to %s, the limits (bytes) of nvme_path are too "
                     "small: %s",
                     spw_format_bytes(need, sizeof need, total), (unsigned long long)total,
                     spw_format_bytes(piece, sizeof piece, chunk), list);
}

spw_status
spw__stripe(stripe_path *paths, uint32_t path_count, const uint64_t *chunk_bytes, uint32_t chunk_count,
            uint32_t *path_idx, spw_error *err)
{
    double share[SPW_PATHS_MAX];
    uint64_t total = 0, largest = 0, room = 0;
    for (uint32_t i = 0; i < chunk_count; i++) {
        total += chunk_bytes[i];
        largest = chunk_bytes[i] > largest ? chunk_bytes[i] : largest;
        path_idx[i] = 0;
    }
    for (uint32_t i = 0; i < path_count; i++) {
        paths[i].bytes = 0;
        room += has_room(&paths[i], total - room) ? total - room : paths[i].limit;
    }
    if (total == 0)
        return SPW_OK;
    if (room < total)
        return does_not_fit(paths, path_count, total, largest, err);
    share_out(paths, path_count, total, share);
    for (uint32_t i = 0; i < chunk_count; i++) {
        uint32_t chosen = chunk_bytes[i] > 0 ? choose(paths, path_count, share, chunk_bytes[i]) : 0;
        if (chosen == path_count)
            return does_not_fit(paths, path_count, total, largest, err);
        paths[chosen].bytes += chunk_bytes[i];
        path_idx[i] = chosen;
    }
    return SPW_OK;
}
