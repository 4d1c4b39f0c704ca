/*
 * The engine's life: it settles what follows from configuration and model, plans, takes everything that a run needs, in as few turns of
 * experts as there is room for, and gives it back. Then engine_walk.c and engine_step.c train, engine_extend.c generates.
 */
#include "engine_internal.h"
#include "spw_files.h"
#include <fnmatch.h>

/* What the configuration freezes was frozen, and its adapters were made, when the model was made from it. */
static spw_status
check_frozen(const spw_engine *e, spw_error *err)
{
    const spw_glob_list *globs = &e->config.run.freeze;
    if (e->config.run.lora.rank != e->model->lora.rank)
        return SPW_RAISE(err, SPW_EINVAL,
                         "spillway.lora.rank is %llu, this model has adapters of rank %llu (0: none); "
                         "spw_model_from_config() makes them",
                         (unsigned long long)e->config.run.lora.rank, (unsigned long long)e->model->lora.rank);
    for (uint32_t g = 0; g < globs->count && !e->inference; g++) {
        for (uint32_t id = 0; id < e->model->param_count; id++) {
            const spw_param *p = &e->model->params[id];
            if (!p->frozen && fnmatch(globs->item[g], p->name, 0) == 0)
                return SPW_RAISE(err, SPW_EINVAL,
                                 "spillway.freeze \"%s\" matches %s, which this model does not have frozen; "
                                 "spw_model_from_config() and spw_model_freeze() do it",
                                 globs->item[g], p->name);
        }
    }
    if (!e->inference && spw__layout_trained(&e->layout) == 0)
        return SPW_RAISE(err, SPW_ECONFIG, "all %u parameters of the model are frozen: there is nothing to train",
                         e->model->param_count);
    return SPW_OK;
}

/* ---------------------------------------------------------------- taking memory */

/* Positions of a micro-batch's rows, and the rotary tables: each made in host memory, which is given back. */
static spw_status
fill_tables(spw_engine *e, spw_error *err)
{
    const spw_model_config *m = &e->model->config;
    uint64_t tables = spw_model_rope_tables(m), table_elems = tables > 0 ? spw__rope_elems(e) / tables : 0;
    uint64_t table_bytes = table_elems * sizeof(float);
    uint64_t places_bytes = e->rows * sizeof *e->places;
    void *host = spw_mem_zalloc(table_bytes > places_bytes ? table_bytes : places_bytes);
    int32_t *places = host;
    if (host == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "tables of positions");
    for (uint64_t i = 0; i < e->rows; i++)
        places[i] = (int32_t)(e->sequence_rank * e->own_T + i % e->own_T);
    spw_gpu_write_bytes(e->compute, e->places, places, places_bytes);
    for (uint64_t i = 0; i < tables; i++) {
        spw_rope_table(m, i, spw__table_positions(e), host);
        spw_gpu_write_bytes(e->compute, e->cos_sin + i * table_elems, host, table_bytes);
    }
    spw_mem_free(host);
    spw__cut_sequences(e);
    return SPW_OK;
}

/* Gradients and gathered units lie in memory that other ranks read: the device's is the host's. */
static bool
ranks_read(const spw_engine *e)
{
    return e->comm != NULL && e->host_addressable;
}

static spw_status
take_memory(spw_engine *e, spw_error *err)
{
    uint64_t flow_bytes = spw__flow_bytes(e);
    uint64_t bytes = flow_bytes + e->plan.arena_device + e->plan.tapes_device + e->plan.batch_device;
    uint64_t between = e->plan.grads_device;
    spw_carve carve, grads;
    between += e->layout.parts > 1 ? e->plan.cache_device : 0;
    SPW_TRY(spw_gpu_alloc(e->gpu, &e->device, bytes + (ranks_read(e) ? 0 : between), err));
    carve = (spw_carve){.base = e->device, .bytes = bytes};
    if (ranks_read(e))
        SPW_TRY(spw_comm_alloc(e->comm, (void **)&e->between, between, err));
    else
        e->between = (char *)e->device + bytes;
    grads = (spw_carve){.base = e->between, .bytes = e->plan.grads_device};
    e->arena = spw_carve_take(&carve, e->plan.arena_device);
    e->flow = spw_carve_take(&carve, flow_bytes);
    e->tapes = spw_carve_take(&carve, e->plan.tapes_device);
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        bool stays = e->grads_stay || (spw__made_there(e) &&
                                       spw__layout_record_tier(&e->layout, e->buffers[i].owner) == SPW_TIER_DEVICE);
        e->buffers[i].data = stays ? NULL : spw_carve_take(&grads, e->buffers[i].elems * sizeof(float));
        SPW_TRY(spw_gpu_event_create(&e->buffers[i].sent, e->gpu, err));
        SPW_TRY(spw_gpu_event_create(&e->buffers[i].made, e->gpu, err));
    }
    e->deferred = e->defers ? spw_carve_take(&carve, spw__deferred_bytes(e)) : NULL;
    e->sides = spw_carve_take(&carve, spw__sides_bytes(e));
    e->choices = spw_carve_take(&carve, spw__choices_bytes(e));
    e->orthogonal.memory = spw_carve_take(&carve, spw__orthogonal_bytes(e));
    e->wire_memory = spw_carve_take(&grads, spw__wire_device_bytes(e));
    e->share.send = spw_carve_take(&grads, spw__sequences_device_bytes(e));
    e->tokens = spw_carve_take(&carve, e->micro_max * e->rows * 4);
    e->targets = spw_carve_take(&carve, e->micro_max * e->rows * 4);
    e->losses = spw_carve_take(&carve, e->micro_max * e->rows * 4);
    e->places = spw_carve_take(&carve, e->rows * 4);
    e->cos_sin = spw_carve_take(&carve, spw__rope_elems(e) * sizeof *e->cos_sin);
    e->slots = spw_carve_take(&carve, e->cache_slots * 4);
    e->starts = spw_carve_take(&carve, e->cache_slots * 4);
    if (spw__documents_bytes(e) > 0)
        e->documents = spw_carve_take(&carve, e->micro_max * (e->rows + 2 * e->B * e->T) * 4);
    if (spw__chunks_bytes(e) > 0)
        e->chunks = spw_carve_take(&carve, spw__chunks_bytes(e));
    if (e->hides_targets)
        e->targeted = spw_carve_take(&carve, e->micro_max * e->rows * sizeof *e->targeted);
    if (e->prefers)
        e->pairs = spw_carve_take(&carve, spw__pairs_bytes(e));
    e->cache = spw_carve_take(&carve, spw__cache_bytes(e));
    if (e->cos_sin == NULL || e->arena == NULL || e->flow == NULL || e->wire_memory == NULL || e->cache == NULL ||
        e->share.send == NULL || e->sides == NULL || e->choices == NULL ||
        (spw__chunks_bytes(e) > 0 && e->chunks == NULL))
        return SPW_RAISE(err, SPW_ENOMEM, "device memory was planned too small");
    return fill_tables(e, err);
}

/* Pinned if that can be: else they come by small copies. */
static spw_status
take_partials(spw_engine *e, spw_error *err)
{
    const uint64_t bytes = spw__partial_bytes(e);
    spw_region *memory = &e->partial_memory;
    if (bytes == 0)
        return SPW_OK;
    SPW_TRY(spw_region_map(memory, bytes, SPW_REGION_TABLE, err));
    e->partials = memory->base;
    e->partials_pinned = spw_gpu_pin_host(e->gpu, memory->base, memory->bytes, NULL) == SPW_OK;
    return SPW_OK;
}

static spw_status
make_act(spw_engine *e, spw_error *err)
{
    const spw_config *c = &e->config;
    spw_act_config a = {.gpu = e->gpu,
                        .dtype = e->compute_dtype,
                        .elems = e->rows * spw_model_row_cols(&e->model->config),
                        .slot_count = e->kept_slots,
                        .micro_count = e->group_max,
                        .places = e->activation_places,
                        .working_count = e->plan.activation_working,
                        .staging_count = e->plan.activation_staging,
                        .pin_memory = c->zero.pin_memory_param || c->zero.pin_memory_optimizer,
                        .integrity = c->run.integrity,
                        .paths = e->plan.paths,
                        .path_count = e->plan.path_count,
                        .rank = e->rank,
                        .aio = spw__engine_aio(c),
                        .stall_ns = e->stall_ns,
                        .chaos_seed = c->run.chaos_seed,
                        .aio_faults = c->run.activation_faults};
    return e->inference ? SPW_OK : spw_act_create(&e->act, &a, err);
}

static spw_status
make_store(spw_engine *e, const spw_topology *topology, spw_error *err)
{
    const spw_config *c = &e->config;
    spw_store_config s = {.gpu = e->gpu,
                          .units = e->layout.units,
                          .chunks = e->layout.chunks,
                          .unit_count = e->layout.unit_count,
                          .chunk_count = e->layout.chunk_count,
                          .weight_dtype = spw_state_weight_dtype(c->run.state_format),
                          .grad_dtype = c->run.grad_dtype,
                          .weight_bytes = spw_state_weight_bytes(c->run.state_format),
                          .update_reads_weights = spw_state_update_reads_weights(c->run.state_format),
                          .weight_slot_count = e->plan.weight_slots,
                          .record_slot_count = e->plan.record_slots,
                          .grad_window_count = e->plan.grad_windows,
                          .device_granule = e->layout.granule * e->compute_bytes,
                          .device_cache_bytes = e->layout.parts > 1 ? e->plan.parts_device : e->plan.cache_device,
                          .rank = e->rank,
                          .worker_count = spw__engine_workers(e),
                          .pin_memory = c->zero.pin_memory_param || c->zero.pin_memory_optimizer,
                          .integrity = c->run.integrity,
                          .topology = topology,
                          .pin_threads = c->run.pin_threads,
                          .paths = e->plan.paths,
                          .path_count = e->plan.path_count,
                          .pieces = e->in_place.pieces,
                          .files = e->in_place.files,
                          .file_count = e->in_place.file_count,
                          .aio = spw__engine_aio(c),
                          .update = spw__update_chunk,
                          .undo = spw__undo_chunk,
                          .update_device = spw__update_on_device,
                          .prepare_device = spw__take_momentum_on_device,
                          .bad_fn = spw__raise_nonfinite,
                          .prepare = spw__take_momentum,
                          .whole = e->layout.parts > 1 ? NULL : spw__make_orthogonal,
                          .update_ctx = e,
                          .chaos_seed = c->run.chaos_seed,
                          .aio_faults = c->run.aio_faults};
    for (int whole = 0; whole < 2; whole++) {
        const spw_optimizer *o = spw__optimizer_for(e->optimizer, whole);
        s.record[whole].bytes_32 = spw_state_record_bytes_32(c->run.state_format, o);
        s.record[whole].part_count = spw_state_record_parts(c->run.state_format, o, s.record[whole].parts);
    }
    for (int weights = 0; weights < 2; weights++)
        s.log_bytes_32[weights] =
            spw_opt_log_bytes_32(c->run.state_format, spw__optimizer_for(e->optimizer, false), weights);
    return spw_store_create(&e->store, &s, err);
}

/* What budgets and placements are about. */
static spw_status
take_own(spw_engine *e, const spw_topology *topology, spw_error *err)
{
    SPW_TRY(make_act(e, err));
    return make_store(e, topology, err);
}

/* Ranks may have differently much of it, and so take differently long: who has it waits for the others, and all know when one cannot. */
static spw_status
take_together(spw_engine *e, const spw_topology *topology, spw_error *err)
{
    spw_channel *channel;
    spw_error own = {0};
    spw_status st;
    if (e->comm == NULL)
        return take_own(e, topology, err);
    SPW_TRY(spw_channel_open(&channel, e->comm, NULL, 0, "memory", err));
    spw_channel_set_timeout(channel, SPW__FILES_S);
    st = take_own(e, topology, &own);
    st = spw_agree(channel, st, &own, NULL, err);
    spw_channel_close(channel);
    return st;
}

/* ---------------------------------------------------------------- lifetime */

/* Do matrices come in pieces, and has one of them a gradient that several blocks add to? */
static void
find_pieces(spw_engine *e, uint64_t piece_rows, bool *shared)
{
    const spw_model *m = e->model;
    *shared = e->in_pieces = false;
    for (uint32_t id = 0; id < m->param_count && piece_rows > 0; id++) {
        uint32_t users = 0;
        if (!spw_model_by_vocab(m, id))
            continue;
        for (uint32_t b = 0; b < m->block_count; b++) {
            for (uint32_t k = 0; k < m->blocks[b].param_count; k++)
                users += m->blocks[b].param_ids[k] == id;
        }
        e->in_pieces = true;
        *shared = *shared || (users > 1 && !m->params[id].frozen);
    }
}

/* Of pieces, for one micro-batch: in the embedding once, in the head twice. */
static uint32_t
piece_uses(const spw_engine *e)
{
    uint32_t uses = 0;
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        uses += e->layout.of_vocab[u] ? 3 : 0;
    return uses;
}

/* What is read from a file has been checked, and says so in its words. */
static spw_status
check_whole(const spw_engine *e, spw_error *err)
{
    const spw_config *c = &e->config;
    if (!e->layout.whole || (c->run.delayed_update == 0 && c->optimizer.ns_steps > 0))
        return SPW_OK;
    return SPW_RAISE(
        err, SPW_ECONFIG,
        "Muon with delayed_update %llu and %u ns_steps: it needs updates that are not late and a step at least",
        (unsigned long long)c->run.delayed_update, c->optimizer.ns_steps);
}

/* What needs all of a unit's gradient at once, which passes add to, and pieces' turns. shared: one's gradient has two blocks' turns. */
static spw_status
check_passes(const spw_engine *e, const spw_engine_options *o, uint32_t accumulation, bool shared, spw_error *err)
{
    const spw_config *c = &e->config;
    bool passes = e->group_max < accumulation, returns = e->in_pieces && (shared || accumulation > 1);
    if (returns && c->run.grad_dtype != SPW_F32)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "spillway.tile_vocab adds gradients of micro-batches, and of both uses of tied embeddings, in "
                         "host memory, which needs spillway.grad_dtype fp32");
    if (passes && c->run.grad_dtype != SPW_F32)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "spillway.micro_batches_per_pass %u with gradient_accumulation_steps %u adds gradients in host "
            "memory, which needs spillway.grad_dtype fp32",
            e->group_max, accumulation);
    if (strcmp(c->run.gradients, "nvme") == 0 && !o->inference &&
        (passes || c->zero.offload_optimizer != SPW_TIER_NVME))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "spillway.gradients nvme needs zero_optimization.offload_optimizer.device nvme, and all micro-batches "
            "of a step in one pass (spillway.micro_batches_per_pass 0)");
    if (c->run.delayed_update > 0 && !o->inference &&
        (passes || returns || c->zero.offload_optimizer == SPW_TIER_DEVICE || c->zero.optimizer_ratio < 1 ||
         strcmp(c->run.fill_device, "always") == 0 || strcmp(c->run.gradients, "nvme") == 0))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "spillway.delayed_update is for state that the host updates with gradients in its memory: it needs "
            "zero_optimization.offload_optimizer.device cpu or nvme with ratio 1, all micro-batches of a step in one "
            "pass (spillway.micro_batches_per_pass 0%s), spillway.fill_device not always and spillway.gradients not "
            "nvme",
            returns ? ") that is not in pieces (spillway.tile_vocab 0" : "");
    return SPW_OK;
}

/* Of units, of blocks, and of what a pass holds. */
static spw_status
make_tables(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    const uint32_t units = e->layout.unit_count;
    e->future_max = 4 * units + 64;
    e->buffers = spw_mem_calloc(units + GRAD_KINDS * (2 + o->chain_extra), sizeof *e->buffers);
    e->unit_partial = spw_mem_calloc(units + 1, sizeof *e->unit_partial);
    e->chain = spw_mem_calloc(e->chain_max, sizeof *e->chain);
    e->first_use = spw_mem_calloc(units, sizeof *e->first_use);
    e->grad_begun = spw_mem_calloc(e->model->param_count, sizeof *e->grad_begun);
    e->takes_part = spw_mem_calloc(units, sizeof *e->takes_part);
    e->late.units = spw_mem_calloc(units, sizeof *e->late.units);
    e->last_use = spw_mem_calloc(units, sizeof *e->last_use);
    e->generations = spw_mem_calloc(units, sizeof *e->generations);
    e->future = spw_mem_calloc(2 * (uint64_t)e->future_max, sizeof *e->future);
    e->notes = spw_mem_calloc(units, sizeof *e->notes);
    for (uint32_t b = 0; b < e->model->block_count && e->chain != NULL; b++)
        e->chain[b] = b;
    e->chain_count = e->model->block_count;
    if (!o->inference && e->chain != NULL) /* another chain may train blocks that stand lower */
        e->kept_slots = spw__kept_slots(
            e, e->chain, o->chain_extra > 0 ? 0 : spw__lowest_trained(e, e->chain, e->chain_count), e->chain_max);
    e->activation_places = spw_mem_calloc((uint64_t)e->kept_slots * e->group_max + 1, sizeof *e->activation_places);
    e->flow_lent = spw_mem_calloc(2 * (uint64_t)e->group_max, sizeof *e->flow_lent);
    e->apart = spw_mem_calloc(e->shares_turns ? e->group_max : 1, sizeof *e->apart);
    if (!e->buffers || !e->unit_partial || !e->chain || !e->first_use || !e->grad_begun || !e->takes_part ||
        !e->late.units || !e->last_use || !e->generations || !e->future || !e->notes || !e->activation_places ||
        !e->flow_lent || !e->apart)
        return SPW_RAISE(err, SPW_ENOMEM, "engine");
    for (uint32_t u = 0; u < units; u++)
        e->unit_partial[u + 1] =
            e->unit_partial[u] + (e->layout.units[u].trainable ? e->layout.units[u].elems / 4096 : 0);
    return SPW_OK;
}

/* What batches bring and give, in host memory, where the device has its own or the batch is more than tokens. */
static spw_status
make_batch_tables(spw_engine *e, spw_error *err)
{
    bool there = true;
    if (!e->host_addressable)
        there = (e->losses_host = spw_mem_zalloc(spw__losses_bytes(e))) != NULL;
    if (spw__documents_bytes(e) > 0)
        there = (e->window = spw_mem_zalloc(spw__documents_bytes(e))) != NULL && there;
    if (e->sequence_ranks > 1) {
        e->own_ids = spw_mem_calloc(2 * e->rows, sizeof *e->own_ids);
        there = there && e->own_ids != NULL;
    }
    if (e->hides_targets) {
        e->targeted_host = spw_mem_calloc(e->rows, sizeof *e->targeted_host);
        e->targeted_counts = spw_mem_calloc(e->micro_max, sizeof *e->targeted_counts);
        there = there && e->targeted_host != NULL && e->targeted_counts != NULL;
    }
    if (e->prefers) {
        e->pairs_host = spw_mem_zalloc(spw__pairs_bytes(e));
        e->pair_counts = spw_mem_calloc(e->micro_max, sizeof *e->pair_counts);
        there = there && e->pairs_host != NULL && e->pair_counts != NULL;
    }
    return there ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "engine");
}

/* Of the uses of one step in each mode. */
static spw_status
make_traces(spw_engine *e, const spw_engine_options *o, uint32_t accumulation, spw_error *err)
{
    const uint32_t passes = accumulation / (e->may_hold ? 1 : e->group_max) + 1;
    const uint32_t pass_uses = 8 * e->chain_max + (e->in_turns ? 2 * e->layout.unit_count : 0);
    for (int k = 0; k < MODE_COUNT; k++)
        SPW_TRY(spw_trace_init(&e->traces[k],
                               passes * pass_uses + (accumulation + 1) * piece_uses(e) + 64 +
                                   (o->inference ? e->layout.unit_count : 0),
                               err));
    return SPW_OK;
}

/* ---------------------------------------------------------------- building it */

/* What follows from the configuration alone: rows of a pass and what is cached of running sequences. */
static void
settle_rows(spw_engine *e, const spw_engine_options *o)
{
    const spw_config *c = &e->config;
    const spw_model_config *m = &e->model->config;
    e->B = o->sequences > 0 ? o->sequences : c->micro_batch;
    e->T = o->positions > 0 ? o->positions : c->data.seq_length;
    if (o->cache_slots > 0) {
        e->B = e->cache_slots = o->cache_slots;
        e->cache_positions = o->cache_positions;
        SPW_ASSERT(o->inference && e->T <= e->cache_positions);
    }
    e->chooses = m->index_keys > 0 && spw_model_index_keys(m, spw__table_positions(e)) > m->index_keys;
}

static uint32_t
accumulation_of(const spw_engine *e, const spw_engine_options *o)
{
    return o->inference ? 1 : (uint32_t)e->config.accumulation;
}

/* How many micro-batches a pass has at most, and what experts in turns change of it. */
static void
settle_passes(spw_engine *e, const spw_engine_options *o, expert_way way)
{
    const spw_config *c = &e->config;
    const uint32_t accumulation = accumulation_of(e, o), experts = (uint32_t)e->model->config.experts;
    e->group_max = c->run.micro_batches_per_pass == 0 || c->run.micro_batches_per_pass > accumulation
                       ? accumulation
                       : (uint32_t)c->run.micro_batches_per_pass;
    if (way.turns > 1 && e->group_max > way.micros)
        e->group_max = way.micros;
    e->in_turns = way.turns > 1;
    e->shares_turns = way.turns > 1 && e->group_max > 1;
    e->read_kept_from = way.read_kept_from;
    e->turn_experts = (experts + way.turns - 1) / way.turns;
    e->micro_max = accumulation > c->run.eval_batches ? accumulation : (uint32_t)c->run.eval_batches;
    e->chain_max = e->model->block_count + o->chain_extra;
}

static spw_status
check_positions(const spw_engine *e, spw_error *err)
{
    const spw_model_config *m = &e->model->config;
    const char *table = m->family == SPW_FAMILY_GPT2 ? "n_positions"
                        : m->learned_places          ? "max_position_embeddings"
                                                     : NULL;
    return e->T <= m->positions || table == NULL
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG, "data.seq_length %llu is larger than the model's %s %llu",
                           (unsigned long long)e->T, table, (unsigned long long)m->positions);
}

/* Where each parameter is: units, chunks, this rank's part. */
static spw_status
lay_out(spw_engine *e, const spw_engine_options *o, uint32_t turns, spw_error *err)
{
    const spw_config *c = &e->config;
    const uint32_t experts = (uint32_t)e->model->config.experts;
    const uint64_t piece_rows = o->inference ? 0 : spw_model_piece_rows(&e->model->config, c->run.tile_vocab);
    uint64_t chunk = c->run.chunk_elems;
    uint32_t parts, experts_each;
    bool shared;
    SPW_TRY(spw__zeropp_parts(e, &parts, err));
    experts_each = o->inference && parts == 1 && experts > 0 ? 1 : turns > 1 ? (experts + turns - 1) / turns : 0;
    if (c->zero.sub_group_size > 0 && c->zero.sub_group_size < chunk)
        chunk = c->zero.sub_group_size / 4096 * 4096 > 0 ? c->zero.sub_group_size / 4096 * 4096 : 4096;
    find_pieces(e, piece_rows, &shared);
    SPW_TRY(check_passes(e, o, accumulation_of(e, o), shared, err));
    SPW_TRY(check_positions(e, err));
    SPW_TRY(spw_layout_make(&e->layout, e->model, chunk, !o->inference, experts_each, o->forms,
                            e->optimizer == &spw_opt_muon, piece_rows, e->rank % parts, parts, err));
    return check_whole(e, err);
}

/* The device, and what it, its ranks' wires and disks are to be shared with. */
static spw_status
open_devices(spw_engine *e, const spw_engine_options *o, const spw_topology *topology, spw_error *err)
{
    const spw_config *c = &e->config;
    spw_gpu_options gpu = {.name = c->run.device,
                           .memory_bytes = c->run.device_memory == SPW_AUTO ? 0 : c->run.device_memory,
                           .thread_count = c->run.compute_threads > 0 ? c->run.compute_threads : spw__engine_cpus(e),
                           .topology = topology,
                           .pin_threads = c->run.pin_threads,
                           .compute_dtype = spw__config_compute(c),
                           .turn = e->comm != NULL ? spw_comm_get_info(e->comm)->machine_rank : 0,
                           .planned = o->plan_only ? o->gpu : NULL};
    SPW_TRY(spw__open_device(e, &gpu, err));
    spw__settle_choices(e, o);
    e->device_sharers = o->device_ranks > 0 ? o->device_ranks : spw__guess_sharers(e);
    if (e->comm != NULL && !o->plan_only)
        SPW_TRY(spw__devices_compare(e, err));
    spw__bound_device(e, !o->plan_only);
    SPW_TRY(spw__zeropp_settle(e, err));
    SPW_TRY(spw__wire_choose(e, o->plan_only, err));
    spw__zeropp_tell(e, o->plan_only);
    SPW_TRY(spw__disks_share(e, o->plan_only, err));
    if (!e->host_addressable)
        e->rates.shared_cores = 0;
    return SPW_OK;
}

/* What computes, and the order in which it will use everything. */
static spw_status
make_passes(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    SPW_TRY(spw_gpu_queue_create(&e->compute, e->gpu, SPW_QUEUE_COMPUTE, err));
    SPW_TRY(spw_gpu_queue_create(&e->d2h, e->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_gpu_event_create(&e->passed, e->gpu, err));
    SPW_TRY(spw_tape_create(&e->tape, e->compute, spw_gpu_get_info(e->gpu), err));
    if (e->cache_slots == 0) /* of this size for shorter contexts too, which then need no more memory */
        spw_tape_in_tiles(e->tape, spw_nn_tile_rows(e->B, e->own_T, spw__tile_tokens(&e->config, e->model)));
    if (e->sequence_ranks > 1)
        spw_tape_share(e->tape, &e->share);
    SPW_TRY(make_tables(e, o, err));
    SPW_TRY(make_batch_tables(e, err));
    SPW_TRY(make_traces(e, o, accumulation_of(e, o), err));
    spw__note_uses(e);
    return check_frozen(e, err);
}

/* All that the plan says. */
static spw_status
take_planned(spw_engine *e, const spw_topology *topology, spw_error *err)
{
    SPW_TRY(spw__make_ranges(e, err));
    SPW_TRY(take_memory(e, err));
    SPW_TRY(take_partials(e, err));
    SPW_TRY(spw__orthogonal_open(e, err));
    SPW_TRY(take_together(e, topology, err));
    return e->comm == NULL ? SPW_OK : spw__ranks_create(&e->ranks, e, e->comm, e->between + e->plan.grads_device, err);
}

static spw_status
build(spw_engine *e, const spw_engine_options *o, expert_way way, spw_error *err)
{
    spw_topology topology;
    settle_rows(e, o);
    SPW_TRY(spw__sequences_settle(e, err));
    settle_passes(e, o, way);
    SPW_TRY(lay_out(e, o, way.turns, err));
    if (o->weights_from != NULL && spw__in_place_wanted(e))
        SPW_TRY(spw__in_place_find(e, o->weights_from, err));
    spw_topology_read(&topology, "", NULL);
    SPW_TRY(open_devices(e, o, &topology, err));
    SPW_TRY(make_passes(e, o, err));
    SPW_TRY(spw__engine_make_plan(e, o, err));
    SPW_TRY(spw__check_groups(e, err));
    return o->plan_only ? SPW_OK : take_planned(e, &topology, err);
}

/* Prompts, what others say, padding: rows of which heads compute nothing. */
static void
note_targeted(spw_engine *e, const spw_engine_options *o)
{
    const spw_config *c = o->config;
    const bool some = o->targeted > 0 && o->targeted < 1;
    e->hides_targets = o->cache_slots == 0 && (some || e->prefers || strcmp(c->data.documents, "whole") == 0 ||
                                               c->data.chat[0] != '\0' || c->data.prompt_field[0] != '\0');
    e->targeted_share = e->hides_targets && some ? o->targeted : 1;
}

spw_status
spw__engine_build(spw_engine **out, const spw_engine_options *o, expert_way way, spw_error *err)
{
    spw_engine *e = spw_mem_zalloc(sizeof *e);
    uint32_t asked = o->config->run.ranks > 0 ? o->config->run.ranks : 1;
    spw_status st;
    *out = NULL;
    if (e == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "engine");
    pthread_mutex_init(&e->squares_lock, NULL);
    e->config = *o->config;
    e->model = o->model;
    e->inference = o->inference;
    e->prefers = (!o->inference || o->losses) && spw_config_preference(o->config, &e->preference);
    e->stop = o->stop;
    note_targeted(e, o);
    e->world = e->local_world = 1;
    if (o->comm != NULL && spw_comm_get_info(o->comm)->world > 1) {
        e->comm = o->comm;
        e->rank = spw_comm_get_info(o->comm)->rank;
        e->world = spw_comm_get_info(o->comm)->world;
        e->local_world = spw_comm_get_info(o->comm)->machine_world;
    } else if (o->plan_only) {
        e->world = asked; /* what each of them would plan */
        e->local_world = o->local_ranks > 0 && o->local_ranks < asked ? o->local_ranks : asked;
    }
    if (e->world != asked && !o->inference) {
        spw_engine_destroy(e);
        return SPW_RAISE(err, SPW_ECONFIG,
                         "spillway.ranks is %u, this run has %u: a launcher starts them (spillway train -n %u, mpirun, "
                         "srun, torchrun)",
                         asked, o->comm != NULL ? spw_comm_get_info(o->comm)->world : 1, asked);
    }
    spw_loss_scale_init(&e->scaler, &e->config);
    e->rates = (spw_rates){.shared_cores = spw_cpu_allowed_count()};
    e->optimizer = o->config->optimizer.type[0] != '\0' ? spw_optimizer_find(o->config->optimizer.type) : &spw_opt_adam;
    st = e->optimizer != NULL ? build(e, o, way, err)
                              : SPW_RAISE(err, SPW_ECONFIG, "there is no optimizer %s", o->config->optimizer.type);
    if (st != SPW_OK)
        spw_engine_destroy(e);
    else
        *out = e;
    return st;
}

static bool
has_frozen(const spw_model *m)
{
    uint32_t id = 0;
    while (id < m->param_count && !m->params[id].frozen)
        id++;
    return id < m->param_count;
}

/* What frozen matrices are stored as: (param_count), the caller's; NULL: as numbers. */
static spw_status
find_forms(spw_engine_options *o, spw_quant **forms, spw_error *err)
{
    const char *path = o->config->model_path, *codes = o->config->run.frozen_codes;
    const spw_dtype dtype = spw_state_weight_dtype(o->config->run.state_format);
    const bool published = strcmp(codes, "published") == 0;
    *forms = NULL;
    if (codes[0] == '\0' || strcmp(codes, "none") == 0)
        return SPW_OK;
    if (published && (path[0] == '\0' || dtype == SPW_F16))
        return SPW_RAISE(err, SPW_ECONFIG, "spillway.frozen_codes \"published\" %s",
                         dtype == SPW_F16
                             ? "is for weights in bf16 or fp32, not in fp16 (fp16.enabled)"
                             : "needs model.path, a folder that has weights as codes: a whole checkpoint has numbers");
    *forms = spw_mem_calloc(o->model->param_count, sizeof **forms);
    if (*forms == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "codes of %u parameters", o->model->param_count);
    o->forms = *forms;
    if (published)
        return spw_hf_codes(*forms, path, o->model, dtype, err);
    for (uint32_t id = 0; id < o->model->param_count; id++)
        (*forms)[id] = strcmp(codes, "int8") == 0 ? SPW_QUANT_INT8 : SPW_QUANT_INT4;
    return SPW_OK;
}

/*
 * Frozen weights stay in their files where there is room for what reads them there, and are copied to swap where there is not: who goes on from a
 * checkpoint fits where the run that wrote it did, which had drawn them. All ranks try again together, also those that read none there.
 */
static spw_status
create(spw_engine **out, const spw_engine_options *o, spw_error *err)
{
    spw_engine_options copied = *o;
    spw_error first = {0};
    spw_status st = spw__engine_in_turns(out, o, &first);
    if (st == SPW_ENOFIT && o->weights_from != NULL && (o->inference || has_frozen(o->model))) {
        spw_engine_destroy(*out); /* a plan alone, of what does not fit */
        copied.weights_from = NULL;
        first = (spw_error){0};
        st = spw__engine_in_turns(out, &copied, &first);
        if (st == SPW_OK && !o->plan_only && (*out)->rank == 0 && spw__in_place_wanted(*out))
            spw_log(SPW_LOG_NOTE,
                    "frozen weights are copied from %s: there is no memory for what would read them there",
                    o->weights_from);
    }
    if (st != SPW_OK && err != NULL)
        *err = first;
    return st;
}

spw_status
spw_engine_create(spw_engine **out, const spw_engine_options *o, spw_error *err)
{
    spw_engine_options told = *o;
    spw_quant *forms;
    spw_status st = find_forms(&told, &forms, err);
    *out = NULL;
    if (st == SPW_OK)
        st = create(out, &told, err);
    spw_mem_free(forms);
    return st;
}

void
spw_engine_destroy(spw_engine *e)
{
    if (e == NULL)
        return;
    if (e->compute != NULL)
        spw_gpu_queue_sync(e->compute); /* it may read the store's memory */
    spw__ranks_destroy(e->ranks);
    spw_gpu_queue_destroy(e->d2h); /* its notifies call the store */
    spw__orthogonal_close(e);
    spw_store_destroy(e->store);
    spw_act_destroy(e->act);
    spw_tape_destroy(e->tape);
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        spw_gpu_event_destroy(e->buffers[i].sent);
        spw_gpu_event_destroy(e->buffers[i].made);
    }
    spw_gpu_event_destroy(e->passed);
    spw_gpu_queue_destroy(e->compute);
    if (e->partials_pinned)
        spw_gpu_unpin_host(e->gpu, e->partial_memory.base);
    spw_region_unmap(&e->partial_memory);
    if (ranks_read(e))
        spw_comm_free(e->comm, e->between);
    if (e->gpu != NULL)
        spw_gpu_free(e->gpu, e->device);
    spw_gpu_close(e->gpu);
    for (int k = 0; k < MODE_COUNT; k++)
        spw_trace_deinit(&e->traces[k]);
    spw_layout_free(&e->layout);
    spw__in_place_free(e);
    spw_mem_free(e->buffers);
    spw_mem_free(e->notes);
    spw_mem_free(e->activation_places);
    spw_mem_free(e->flow_lent);
    spw_mem_free(e->apart);
    spw_mem_free(e->losses_host);
    spw_mem_free(e->own_ids);
    spw_mem_free(e->trades);
    spw_mem_free(e->targeted_host);
    spw_mem_free(e->targeted_counts);
    spw_mem_free(e->pairs_host);
    spw_mem_free(e->pair_counts);
    spw_mem_free(e->window);
    spw_mem_free(e->unit_partial);
    spw_mem_free(e->chain);
    spw_mem_free(e->first_use);
    spw_mem_free(e->takes_part);
    spw_mem_free(e->late.units);
    spw_mem_free(e->grad_begun);
    spw_mem_free(e->ranges);
    spw_mem_free(e->range_first);
    spw_mem_free(e->device_ranges);
    spw_mem_free(e->last_use);
    spw_mem_free(e->generations);
    spw_mem_free(e->future);
    pthread_mutex_destroy(&e->squares_lock);
    spw_mem_free(e);
}
