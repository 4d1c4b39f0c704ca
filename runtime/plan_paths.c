/* Which swap folders the plan uses, what goes to which of them, and whether their disks have room for it. Pure. */
#include "plan_internal.h"
#include <string.h>

/* One list of paths for both kinds; a path named twice counts once. Activations go where state goes, or else anywhere. */
void
spw__plan_paths(spw_plan *p, const plan_input *in)
{
    const spw_config *c = in->config;
    const spw_path_list *lists[2] = {&c->zero.param_path, &c->zero.optimizer_path};
    bool any = !plan_on_nvme(c),
         used[2] = {any || c->zero.offload_param == SPW_TIER_NVME, any || c->zero.offload_optimizer == SPW_TIER_NVME};
    for (int k = 0; k < 2; k++) {
        for (uint32_t i = 0; used[k] && i < lists[k]->count && p->path_count < SPW_PATHS_MAX; i++) {
            bool known = false;
            for (uint32_t j = 0; j < p->path_count; j++)
                known = known || strcmp(p->paths[j], lists[k]->item[i]) == 0;
            if (known)
                continue;
            p->path_weight[p->path_count] = lists[k]->weight[i] > 0 ? lists[k]->weight[i] : 1;
            p->path_limit[p->path_count] = lists[k]->bytes[i];
            p->path_ranks[p->path_count] = in->path_ranks[k] != NULL ? in->path_ranks[k][i] : 1;
            p->paths[p->path_count++] = lists[k]->item[i];
        }
    }
}

/* Weights and record of a chunk go to one path; then checkpoints of activations, one by one. */
spw_status
spw__plan_spread(spw_plan *p, const plan_input *in, spw_error *err)
{
    uint32_t chunk_count = in->layout->chunk_count, nvme_count = p->activation_count[SPW_TIER_NVME];
    uint32_t count = chunk_count + nvme_count; /* of activations, those on nvme come first */
    stripe_path paths[SPW_PATHS_MAX];
    uint64_t *bytes = spw_mem_calloc(count, sizeof *bytes);
    uint32_t *path_idx = spw_mem_calloc(count, sizeof *path_idx);
    spw_status st = SPW_OK;
    for (uint32_t i = 0; i < p->path_count; i++)
        paths[i] = (stripe_path){p->paths[i], p->path_weight[i], p->path_limit[i], 0};
    if (bytes == NULL || path_idx == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "plan of %u chunks", count);
    for (uint32_t i = chunk_count; st == SPW_OK && i < count; i++)
        bytes[i] = p->activations_nvme / nvme_count;
    for (uint32_t i = 0; st == SPW_OK && i < chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        bytes[i] = plan_in_swap(in, c) * (c->spare ? 2 : 1);
        if (c->record_tier == SPW_TIER_NVME && plan_has_record(in, c))
            bytes[i] += plan_spilled(in, c);
    }
    if (st == SPW_OK)
        st = spw__stripe(paths, p->path_count, bytes, count, path_idx, err);
    for (uint32_t i = 0; st == SPW_OK && i < chunk_count; i++)
        in->layout->chunks[i].path_idx = path_idx[i];
    for (uint32_t i = 0; st == SPW_OK && i < nvme_count; i++)
        in->activation_places[i].path_idx = path_idx[chunk_count + i];
    for (uint32_t i = 0; st == SPW_OK && i < p->path_count; i++)
        p->path_bytes[i] = paths[i].bytes;
    spw_mem_free(bytes);
    spw_mem_free(path_idx);
    return st;
}

/* What a path has left; 0: unknown. Where it stands in both lists, both say the same. */
static uint64_t
free_of(const plan_input *in, const char *path)
{
    const spw_path_list *lists[2] = {&in->config->zero.param_path, &in->config->zero.optimizer_path};
    uint64_t bytes = 0;
    for (int k = 0; k < 2; k++) {
        for (uint32_t i = 0; in->path_free[k] != NULL && i < lists[k]->count; i++) {
            if (strcmp(lists[k]->item[i], path) == 0)
                bytes = in->path_free[k][i];
        }
    }
    return bytes;
}

bool
spw__plan_disks_have_room(const spw_plan *p, const plan_input *in)
{
    bool room = true;
    for (uint32_t i = 0; i < p->path_count && strcmp(in->config->run.update_ahead, "always") != 0; i++) {
        uint64_t bytes = free_of(in, p->paths[i]);
        room = room && (bytes == 0 || p->path_bytes[i] <= bytes / 10 * 9);
    }
    return room;
}
