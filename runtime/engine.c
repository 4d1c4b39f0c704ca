/*
 * The engine: one training step walks the chain of blocks layer-major, forward and then backward with recompute. It
 * waits for a unit by generation, never for "the optimizer": updates of this step run on into the next forward pass.
 */
#include "runtime_internal.h"
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>

enum { MODE_TRAIN, MODE_EVAL, MODE_COUNT };

/* Where a unit's gradient is accumulated on the device while the backward pass needs it. */
typedef struct grad_buffer {
    float *data;
    uint64_t elems;
    uint32_t unit_idx; /* UINT32_MAX: free */
    uint64_t turn;
    spw_gpu_event *sent; /* its last copy to the host */
} grad_buffer;

/* What a copy's completion has to say, to whom. */
typedef struct grad_note {
    spw_store *store;
    uint32_t unit_idx;
} grad_note;

/*
 * Coefficients for each parameter group of the configuration and, first, for all other parameters; twice each: weight
 * decay is for matrices and embeddings, norms and biases stay as they are unless their group says otherwise.
 */
enum { MATRIX, VECTOR, KINDS, COEF_COUNT = KINDS * (SPW_PARAM_GROUPS_MAX + 1) };

struct spw_engine {
    spw_config config;
    const spw_model *model;
    bool inference;
    spw_gpu *gpu;
    spw_gpu_queue *compute, *d2h;
    spw_store *store;
    spw_layout layout;
    spw_plan plan;
    spw_tape *tape;
    uint64_t B, T, rows;
    uint64_t cache_slots, cache_positions; /* generation: B is the slots, T the longest piece of a prompt; else 0 */
    uint32_t micro_max, group_max, chain_max;
    uint64_t target_count; /* of this step: positions with a target */
    /* Device memory. */
    void *device;
    char *arena;
    uint64_t arena_bytes;
    float *cos_sin, *losses;
    int32_t *tokens, *targets, *places, *slots, *starts;
    float *cache; /* (layers, 2, cache_slots, cache_positions, cache_width) keys, then values */
    /*
     * x[c], the input of the block at c, of every micro-batch: kept for the backward pass from c = 1 to the last but one.
     * The flow holds the others, and in the backward pass the gradients: rows take turns, so that what is made never
     * lies on what it is made from. A kept x[c] that has no home on the device leaves from the flow.
     */
    char *flow;                       /* (2, group_max, rows, width) */
    spw_act *act;                     /* slot c - 1; NULL: inference */
    spw_act_place *activation_places; /* (kept_slots, group_max) */
    uint32_t kept_slots, *flow_lent;  /* (2, group_max) the checkpoint that may still be leaving from there */
    grad_buffer *buffers;
    uint32_t buffer_count;
    uint64_t buffer_turn;
    grad_note *notes; /* (unit_count) */
    /* Host. */
    double *partials;       /* sums of squares, one per 4096 elements of the element space */
    uint64_t *unit_partial; /* where a unit's partials start */
    uint32_t *chain, chain_count;
    int32_t *first_use, *last_use; /* of a unit, positions in the chain; -1: unused */
    uint64_t *generations;
    spw_trace traces[MODE_COUNT];
    spw_store_use *future;
    uint32_t future_max;
    uint64_t updates, step_count;
    const spw_optimizer *optimizer;
    spw_opt_coef coefs[COEF_COUNT];
    spw_opt_range *ranges; /* (range_first[chunk_count]) which group's coefficients a chunk's elements take */
    uint32_t *range_first; /* (chunk_count + 1) */
    uint64_t d2h_bytes, grad_h2d_bytes;
    /* Of the step under way. */
    uint64_t compute_ns, stall_ns[SPW_STALL_COUNT];
    spw_rates rates;
    spw_store_stats counted; /* up to here the steps' bytes have been told; what moves between two steps counts too */
    bool counting;           /* false: something else than steps has moved bytes since */
};

/* ---------------------------------------------------------------- units of a block */

/*
 * Units whose parameters a block uses, its own and external ones, without repeats; the largest first, which is the order
 * of acquiring: a small one that is held in the middle of the device's cache can keep a large one out for good.
 */
static uint32_t
block_units(const spw_engine *e, uint32_t block_idx, uint32_t *out)
{
    const spw_block *b = &e->model->blocks[block_idx];
    uint32_t n = 0;
    for (uint32_t k = 0; k < b->param_count; k++) {
        uint32_t u = e->layout.places[b->param_ids[k]].unit_idx, j = 0;
        while (j < n && out[j] != u)
            j++;
        if (j < n)
            continue;
        for (n++; j > 0 && e->layout.units[out[j - 1]].elems < e->layout.units[u].elems; j--)
            out[j] = out[j - 1];
        out[j] = u;
    }
    return n;
}

/*
 * Elements of device cache in which a block's units fit one after another, wherever those before lie: k units that are
 * held leave k + 1 gaps at most, and when all of them together hold k + 1 times the next one, it fits in one of them.
 */
static uint64_t
block_elems(const spw_engine *e, uint32_t block_idx)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX], n = block_units(e, block_idx, units);
    uint64_t held = 0, least = 0;
    for (uint32_t k = 0; k < n; k++) {
        uint64_t elems = e->layout.units[units[k]].elems;
        least = held + (k + 1) * elems > least ? held + (k + 1) * elems : least;
        held += elems;
    }
    return least;
}

static void
note_uses(spw_engine *e)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX];
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->first_use[u] = e->last_use[u] = -1;
    for (uint32_t c = 0; c < e->chain_count; c++) {
        uint32_t n = block_units(e, e->chain[c], units);
        for (uint32_t k = 0; k < n; k++) {
            if (e->first_use[units[k]] < 0)
                e->first_use[units[k]] = (int32_t)c;
            e->last_use[units[k]] = (int32_t)c;
        }
    }
}

/* ---------------------------------------------------------------- running one block */

typedef struct block_run {
    uint32_t block_idx;
    const void *weights[SPW_BLOCK_PARAMS_MAX]; /* by unit, parallel to units */
    float *grads[SPW_BLOCK_PARAMS_MAX];
    uint32_t units[SPW_BLOCK_PARAMS_MAX], unit_count;
} block_run;

/* Binds the parameters and calls forward on the tape, which was reset. Dry when run->weights are not set. */
static spw_value *
call_forward(spw_engine *e, const block_run *run, const spw_batch *batch, spw_value *x, bool training, bool logits)
{
    const spw_block *b = &e->model->blocks[run->block_idx];
    spw_value *params[SPW_BLOCK_PARAMS_MAX];
    static act *const want_logits = (act *)(uintptr_t)1;
    spw_call call = {.tape = e->tape,
                     .batch = batch,
                     .block = b,
                     .params = params,
                     .model = e->model,
                     .cos_sin = e->cos_sin,
                     .training = training,
                     .logits_out = logits ? want_logits : NULL};
    for (uint32_t k = 0; k < b->param_count; k++) {
        const spw_param *p = &e->model->params[b->param_ids[k]];
        const spw_place *at = &e->layout.places[b->param_ids[k]];
        uint32_t j = 0;
        while (run->units[j] != at->unit_idx)
            j++;
        params[k] = spw_tape_param(e->tape, run->weights[j] == NULL ? NULL : (const float *)run->weights[j] + at->first,
                                   run->grads[j] == NULL ? NULL : run->grads[j] + at->first, p->rows, p->cols);
    }
    return b->forward(&call, x);
}

static char *
flow(const spw_engine *e, uint32_t turn, uint32_t micro)
{
    return e->flow + ((uint64_t)(turn % 2) * e->group_max + micro) * e->rows * e->model->config.width * sizeof(float);
}

/* x[c] is a checkpoint; the last block's input goes straight into its backward pass. */
static bool
kept(const spw_engine *e, uint32_t c)
{
    return c > 0 && c + 1 < e->chain_count;
}

static uint32_t
checkpoint_of(const spw_engine *e, uint32_t c, uint32_t micro)
{
    return (c - 1) * e->group_max + micro;
}

/* Where the forward pass of a training step makes x[c], and reads it. */
static char *
input_of(const spw_engine *e, uint32_t c, uint32_t micro)
{
    char *home = kept(e, c) ? spw_act_home(e->act, checkpoint_of(e, c, micro)) : NULL;
    return home != NULL ? home : flow(e, c, micro);
}

static spw_batch
batch_of(const spw_engine *e, uint32_t micro)
{
    return (spw_batch){.sequences = e->B,
                       .positions = e->T,
                       .tokens = e->tokens + micro * e->rows,
                       .targets = e->targets + micro * e->rows,
                       .places = e->places,
                       .losses = e->losses + micro * e->rows,
                       .grad_scale = 1.0f / (float)e->target_count,
                       .dropout_key = e->config.run.seed,
                       .dropout_counter = (e->step_count << 20) + micro};
}

/* ---------------------------------------------------------------- measuring, before anything is allocated */

/* Pages of the program and its libraries that a training process touches after its plan was made: measured, rounded up. */
enum { LIBRARY_BYTES = 5 << 18 };

/*
 * Bytes of tape memory that the largest block needs, forward and backward, with nothing computed, if more than *bytes_out.
 * logit_rows: the head makes logits of so many rows; 0: the loss of all.
 */
static spw_status
measure_arena(spw_engine *e, uint64_t sequences, uint64_t positions, uint64_t logit_rows, uint64_t *bytes_out,
              spw_error *err)
{
    spw_batch batch = {.sequences = sequences, .positions = positions};
    for (uint32_t b = 0; b < e->model->block_count; b++) {
        block_run run = {.block_idx = b};
        bool head = b + 1 == e->model->block_count;
        spw_value *x, *y;
        run.unit_count = block_units(e, b, run.units);
        spw_tape_reset(e->tape, NULL, 0, !e->inference);
        x = b == 0 ? NULL
                   : spw_tape_input(e->tape, NULL, head && logit_rows > 0 ? logit_rows : sequences * positions,
                                    e->model->config.width, !e->inference);
        if (x != NULL)
            x->grad = x->data;
        y = call_forward(e, &run, &batch, x, true, head && logit_rows > 0);
        if (!e->inference)
            spw_tape_backward(e->tape, y);
        if (spw_tape_check(e->tape, err) != SPW_OK || y == NULL) {
            spw_error_wrap(err, "block %s", e->model->blocks[b].name);
            return SPW_EINVAL;
        }
        if (spw_tape_arena_used(e->tape) > *bytes_out)
            *bytes_out = spw_tape_arena_used(e->tape);
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- lifetime */

static spw_status update_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad,
                               uint64_t first, uint64_t count, spw_error *err);

static uint32_t
users_of(const spw_engine *e, uint32_t unit_idx)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX], count = 0;
    for (uint32_t b = 0; b < e->model->block_count; b++) {
        uint32_t n = block_units(e, b, units);
        for (uint32_t k = 0; k < n; k++)
            count += units[k] == unit_idx;
    }
    return count;
}

/* Gradient buffers: one of its own for a unit with several users, a pool for the others. */
static uint64_t
size_grad_buffers(spw_engine *e, uint32_t chain_extra)
{
    uint64_t pool_elems = 0, bytes = 0;
    uint32_t pool = 2 + chain_extra;
    e->buffer_count = 0;
    for (uint32_t u = 0; u < e->layout.unit_count; u++) {
        uint64_t elems = e->layout.units[u].elems;
        if (!e->layout.units[u].trainable)
            continue;
        if (users_of(e, u) > 1)
            e->buffers[e->buffer_count++] = (grad_buffer){.elems = elems, .unit_idx = UINT32_MAX};
        else if (elems > pool_elems)
            pool_elems = elems;
    }
    for (uint32_t k = 0; k < pool && pool_elems > 0; k++)
        e->buffers[e->buffer_count++] = (grad_buffer){.elems = pool_elems, .unit_idx = UINT32_MAX};
    for (uint32_t i = 0; i < e->buffer_count; i++)
        bytes += e->buffers[i].elems * sizeof(float);
    return bytes;
}

/* The units of one pass in the order of their use; returns how many. uses and walk may be NULL. */
static uint32_t
pass_uses(const spw_engine *e, uint32_t *uses, uint32_t *walk, uint32_t *forward_count)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX], n = 0, last = e->chain_count - 1;
    for (uint32_t at = 0; at < last + e->chain_count; at++) { /* the last block runs in the backward pass only */
        uint32_t count = block_units(e, e->chain[at < last ? at : 2 * last - at], units);
        if (at == last)
            *forward_count = n;
        for (uint32_t k = 0; k < count; k++, n++) {
            if (uses != NULL) {
                uses[n] = units[k];
                walk[n] = at;
            }
        }
    }
    return n;
}

/*
 * Of a step: each matrix twice per element and token forward, again for recomputing, and twice that backward, where half
 * is for its own gradient.
 */
static double
step_flops(const spw_engine *e)
{
    const spw_model_config *m = &e->model->config;
    double tokens = (double)(e->config.accumulation * e->rows), per_token = 0;
    for (uint32_t b = 1; b < e->model->block_count; b++) { /* the first looks embeddings up */
        const spw_block *block = &e->model->blocks[b];
        for (uint32_t k = 0; k < block->param_count; k++) {
            const spw_param *p = &e->model->params[block->param_ids[k]];
            if (p->ndim > 1)
                per_token += ((b + 1 < e->model->block_count ? 8.0 : 6.0) - (p->frozen ? 2.0 : 0.0)) *
                             (double)(p->rows * p->cols);
        }
    }
    for (uint64_t l = 0; l < m->layers; l++) { /* attention: half of the keys are masked, or all but a window */
        double W = (double)spw_model_window(m, l), T = (double)e->T;
        per_token += 16.0 * (double)(m->heads * m->head_dim) * (W == 0 || W > T ? T / 2 : W - W * W / (2 * T));
    }
    return tokens * per_token;
}

static uint32_t
worker_count(const spw_engine *e)
{
    return e->config.run.optimizer_threads > 0 ? e->config.run.optimizer_threads : spw_cpu_allowed_count();
}

static spw_aio_options
aio_options(const spw_config *c)
{
    return (spw_aio_options){.backend = c->aio.backend,
                             .block_bytes = c->aio.block_size,
                             .queue_depth = c->aio.queue_depth,
                             .thread_count = c->aio.thread_count,
                             .single_submit = c->aio.single_submit,
                             .lockstep = !c->aio.overlap_events,
                             .sqpoll = c->aio.sqpoll,
                             .iopoll = c->aio.iopoll};
}

static spw_act_tables
activation_tables(const spw_engine *e)
{
    const spw_path_list *lists[2] = {&e->config.zero.param_path, &e->config.zero.optimizer_path};
    spw_act_config c = {.slot_count = e->kept_slots,
                        .micro_count = e->group_max,
                        .path_count = lists[0]->count > lists[1]->count ? lists[0]->count : lists[1]->count,
                        .aio = aio_options(&e->config)};
    spw_act_tables tables;
    spw_act_compute_tables(&c, &tables);
    return tables;
}

/* Products of this model, forward and backward to input and weights: each thread keeps its largest buffer. */
static uint64_t
product_bytes(const spw_engine *e)
{
    uint64_t sum = 0;
    for (uint32_t thread = 0; thread < spw_gpu_get_info(e->gpu)->thread_count; thread++) {
        uint64_t most = 0;
        for (uint32_t id = 0; id < e->model->param_count; id++) {
            uint64_t out = e->model->params[id].rows, in = e->model->params[id].cols;
            uint64_t rows = e->cache_slots > 0 ? e->T : e->rows;
            const uint64_t shapes[3][3] = {{rows, out, in}, {rows, in, out}, {out, in, rows}};
            for (int k = 0; k < 3 && e->model->params[id].ndim > 1; k++) {
                uint64_t bytes = spw_gpu_product_bytes(e->gpu, thread, shapes[k][0], shapes[k][1], shapes[k][2]);
                most = bytes > most ? bytes : most;
            }
        }
        sum += spw_touched_bytes(most);
    }
    return sum;
}

/*
 * Host memory that appears after the plan and outside of arena and device: tables of engine and store, the caller's
 * batches, checkpoints, stacks, BLAS, and library code that is first run then.
 */
static uint64_t
table_bytes(const spw_engine *e, const spw_engine_options *o, uint32_t trace_capacity)
{
    const spw_config *c = &e->config;
    uint64_t units = e->layout.unit_count, chunks = e->layout.chunk_count, params = e->layout.param_count;
    spw_store_config store = {.unit_count = e->layout.unit_count,
                              .chunk_count = e->layout.chunk_count,
                              .worker_count = worker_count(e),
                              .path_count = c->zero.param_path.count > c->zero.optimizer_path.count
                                                ? c->zero.param_path.count
                                                : c->zero.optimizer_path.count,
                              .weight_slot_count = c->run.weight_slots,
                              .record_slot_count = c->run.record_slots,
                              .aio = aio_options(c)};
    uint64_t own = e->layout.elems / 4096 * sizeof *e->partials + MODE_COUNT * trace_capacity * sizeof(uint32_t) +
                   e->future_max * sizeof *e->future +
                   units * (sizeof *e->notes + sizeof *e->buffers + 4 * sizeof(uint64_t)) +
                   (params + 2 * chunks) * sizeof *e->ranges + (chunks + 1) * sizeof *e->range_first;
    uint64_t batches = e->micro_max * e->rows * 2 * sizeof(int32_t);
    own += activation_tables(e).table_bytes + (uint64_t)e->kept_slots * e->group_max * sizeof *e->activation_places;
    store.weight_slot_count = store.weight_slot_count > chunks ? store.weight_slot_count : e->layout.chunk_count;
    store.record_slot_count = store.record_slot_count > chunks ? store.record_slot_count : e->layout.chunk_count;
    if (o->resumes || c->run.checkpoint_dir[0] != '\0')
        own += spw__checkpoint_bytes(e->model, &e->layout, e->optimizer, worker_count(e));
    return spw_round_up(o->caller_bytes + own + batches + spw_store_table_bytes(&store) + spw_gpu_work_bytes(e->gpu) +
                            product_bytes(e) + LIBRARY_BYTES,
                        4096);
}

/* ---------------------------------------------------------------- keys and values of running sequences */

static uint64_t
cache_width(const spw_engine *e)
{
    const spw_model_config *m = &e->model->config;
    return (m->family == SPW_FAMILY_GPT2 ? m->heads : m->kv_heads) * m->head_dim;
}

/* Of a layer's keys or values. */
static uint64_t
cache_part_elems(const spw_engine *e)
{
    return e->cache_slots * e->cache_positions * cache_width(e);
}

/* Every block between the first and the last may hold an attention. */
static uint64_t
cache_elems(const spw_engine *e)
{
    return (e->model->block_count - 2) * 2 * cache_part_elems(e);
}

/* How many positions the table of rotary positions has. */
static uint64_t
table_positions(const spw_engine *e)
{
    return e->cache_slots > 0 ? e->cache_positions : e->T;
}

static spw_status
make_plan(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    plan_input in = {.config = &e->config,
                     .layout = &e->layout,
                     .inference = e->inference,
                     .weight_bytes = spw_state_weight_bytes(e->config.run.state_format),
                     .record_bytes_32 = (uint32_t)spw_state_record_bytes(e->config.run.state_format, e->optimizer, 32),
                     .grad_bytes = spw_dtype_bytes(e->config.run.grad_dtype),
                     .compute_bytes = spw_dtype_bytes(spw_gpu_get_info(e->gpu)->compute_dtype),
                     .room_bytes = o->room_bytes > 0 ? o->room_bytes : spw_memory_room_bytes(),
                     .device_in_host = spw_gpu_get_info(e->gpu)->host_addressable,
                     .process_bytes =
                         o->process_bytes > 0 ? o->process_bytes : spw_round_up(spw_process_rss_bytes(), 1 << 20),
                     .passes = (uint32_t)((e->config.accumulation + e->group_max - 1) / e->group_max),
                     .micro_batches = (uint32_t)e->config.accumulation,
                     .future_max = e->future_max,
                     .optimizer_threads = worker_count(e),
                     .tables_bytes = table_bytes(e, o, e->traces[MODE_TRAIN].capacity),
                     .update_reads_weights = spw_state_update_reads_weights(e->config.run.state_format),
                     .tokens = e->config.accumulation * e->rows,
                     .flops = step_flops(e)};
    uint32_t *uses, *walk;
    uint64_t width_bytes = e->rows * e->model->config.width * sizeof(float);
    spw_status st;
    for (uint32_t b = 0; b < e->model->block_count; b++) {
        uint64_t bytes = block_elems(e, b) * in.compute_bytes;
        if (bytes > in.largest_block_bytes)
            in.largest_block_bytes = bytes;
    }
    e->arena_bytes = 0;
    if (e->cache_slots > 0) { /* a piece of a prompt, or a token of each sequence, whose logits come from one call */
        SPW_TRY(measure_arena(e, 1, e->T, e->B, &e->arena_bytes, err));
        SPW_TRY(measure_arena(e, e->B, 1, e->B, &e->arena_bytes, err));
    } else {
        SPW_TRY(measure_arena(e, e->B, e->T, e->inference && !o->losses, &e->arena_bytes, err));
    }
    in.arena_device = spw_round_up(e->arena_bytes, 4096);
    in.flow_device = spw_round_up(2 * (uint64_t)e->group_max * width_bytes, 4096);
    in.activation_elems = e->rows * e->model->config.width;
    in.activation_slots = e->kept_slots;
    in.activation_slots_used = e->kept_slots > 0 ? e->chain_count - 2 : 0;
    in.activation_micros = e->group_max;
    in.activation_places = e->activation_places;
    in.activation_tables = activation_tables(e);
    in.grads_device = e->inference ? 0 : size_grad_buffers(e, o->chain_extra);
    in.batch_device =
        4096 * 8 + e->micro_max * e->rows * 12 + e->rows * 4 + table_positions(e) * e->model->config.head_dim * 4;
    in.batch_device += cache_elems(e) * sizeof(float) + e->cache_slots * 8;
    in.batch_device = spw_round_up(in.batch_device, 4096);
    in.use_count = pass_uses(e, NULL, NULL, &in.forward_count);
    in.uses = uses = spw_mem_calloc(in.use_count, sizeof *uses);
    in.walk = walk = spw_mem_calloc(in.use_count, sizeof *walk);
    if (uses != NULL && walk != NULL) {
        (void)pass_uses(e, uses, walk, &in.forward_count);
        st = spw__plan_make(&e->plan, &in, err);
    } else {
        st = SPW_RAISE(err, SPW_ENOMEM, "plan of %u uses", in.use_count);
    }
    spw_mem_free(uses);
    spw_mem_free(walk);
    if (o->plan_out != NULL) {
        *o->plan_out = e->plan;
        for (uint32_t i = 0; i < e->plan.path_count;
             i++) /* from the engine's copy of the configuration to the caller's */
            o->plan_out->paths[i] = (const char *)o->config + (e->plan.paths[i] - (const char *)&e->config);
    }
    return st;
}

static spw_status
take_memory(spw_engine *e, spw_error *err)
{
    uint64_t flow_bytes = spw_round_up(2 * e->group_max * e->rows * e->model->config.width * sizeof(float), 4096);
    uint64_t bytes = e->plan.grads_device + flow_bytes + e->plan.arena_device + e->plan.batch_device;
    spw_carve carve;
    SPW_TRY(spw_gpu_alloc(e->gpu, &e->device, bytes, err));
    carve = (spw_carve){.base = e->device, .bytes = bytes};
    e->arena = spw_carve_take(&carve, e->plan.arena_device);
    e->flow = spw_carve_take(&carve, flow_bytes);
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        e->buffers[i].data = spw_carve_take(&carve, e->buffers[i].elems * sizeof(float));
        SPW_TRY(spw_gpu_event_create(&e->buffers[i].sent, e->gpu, err));
    }
    e->tokens = spw_carve_take(&carve, e->micro_max * e->rows * 4);
    e->targets = spw_carve_take(&carve, e->micro_max * e->rows * 4);
    e->losses = spw_carve_take(&carve, e->micro_max * e->rows * 4);
    e->places = spw_carve_take(&carve, e->rows * 4);
    e->cos_sin = spw_carve_take(&carve, table_positions(e) * e->model->config.head_dim * 4);
    e->slots = spw_carve_take(&carve, e->cache_slots * 4);
    e->starts = spw_carve_take(&carve, e->cache_slots * 4);
    e->cache = spw_carve_take(&carve, cache_elems(e) * sizeof(float));
    if (e->cos_sin == NULL || e->arena == NULL || e->flow == NULL || e->cache == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device memory was planned too small");
    for (uint64_t i = 0; i < e->rows; i++)
        e->places[i] = (int32_t)(i % e->T);
    if (e->model->config.rope_theta > 0)
        spw_rope_table(&e->model->config, table_positions(e), e->cos_sin);
    return SPW_OK;
}

static spw_status
make_act(spw_engine *e, spw_error *err)
{
    const spw_config *c = &e->config;
    spw_act_config a = {.gpu = e->gpu,
                        .dtype = SPW_F32,
                        .elems = e->rows * e->model->config.width,
                        .slot_count = e->kept_slots,
                        .micro_count = e->group_max,
                        .places = e->activation_places,
                        .working_count = e->plan.activation_working,
                        .staging_count = e->plan.activation_staging,
                        .pin_memory = c->zero.pin_memory_param || c->zero.pin_memory_optimizer,
                        .integrity = c->run.integrity,
                        .paths = e->plan.paths,
                        .path_count = e->plan.path_count,
                        .aio = aio_options(c),
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
                          .record_bytes_32 = (uint32_t)spw_state_record_bytes(c->run.state_format, e->optimizer, 32),
                          .update_reads_weights = spw_state_update_reads_weights(c->run.state_format),
                          .weight_slot_count = e->plan.weight_slots,
                          .record_slot_count = e->plan.record_slots,
                          .device_cache_bytes = e->plan.cache_device,
                          .worker_count = worker_count(e),
                          .pin_memory = c->zero.pin_memory_param || c->zero.pin_memory_optimizer,
                          .integrity = c->run.integrity,
                          .topology = topology,
                          .pin_threads = c->run.pin_threads,
                          .paths = e->plan.paths,
                          .path_count = e->plan.path_count,
                          .aio = aio_options(c),
                          .update = update_chunk,
                          .update_ctx = e,
                          .chaos_seed = c->run.chaos_seed,
                          .aio_faults = c->run.aio_faults};
    s.record_part_count = spw_state_record_parts(c->run.state_format, e->optimizer, s.record_parts);
    return spw_store_create(&e->store, &s, err);
}

/* The parameter of a unit that holds an element, or else the next one; NULL behind the last. */
static const spw_param *
param_from(const spw_engine *e, uint32_t unit_idx, uint64_t element, uint64_t *end)
{
    const spw_param *found = NULL;
    uint64_t nearest = UINT64_MAX;
    for (uint32_t id = 0; id < e->layout.param_count; id++) {
        const spw_place *at = &e->layout.places[id];
        if (at->unit_idx == unit_idx && at->first + at->elems > element && at->first < nearest) {
            nearest = at->first;
            *end = at->first + at->elems;
            found = &e->model->params[id];
        }
    }
    return found;
}

static uint32_t
coef_of(const spw_engine *e, const spw_param *p)
{
    const spw_config *c = &e->config;
    uint32_t g = 0;
    while (g < c->optimizer.group_count && fnmatch(c->optimizer.groups[g].match, p->name, 0) != 0)
        g++;
    return KINDS * (g < c->optimizer.group_count ? g + 1 : 0) + (p->ndim > 1 ? MATRIX : VECTOR);
}

/* A group that no parameter belongs to is a mistake in its glob. */
static spw_status
check_groups(const spw_engine *e, spw_error *err)
{
    for (uint32_t g = 1; g <= e->config.optimizer.group_count; g++) {
        bool used = false;
        for (uint32_t id = 0; id < e->model->param_count; id++)
            used |= coef_of(e, &e->model->params[id]) / KINDS == g;
        if (!used)
            return SPW_RAISE(err, SPW_ECONFIG,
                             "spillway.param_groups: no parameter is left for \"%s\" (names look like %s)",
                             e->config.optimizer.groups[g - 1].match, e->model->params[0].name);
    }
    return SPW_OK;
}

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

/* Cuts every chunk into stretches of one parameter group; padding goes with what follows. */
static spw_status
make_ranges(spw_engine *e, spw_error *err)
{
    uint32_t count = 0, most = e->layout.param_count + 2 * e->layout.chunk_count;
    e->ranges = spw_mem_calloc(most, sizeof *e->ranges);
    e->range_first = spw_mem_calloc(e->layout.chunk_count + 1, sizeof *e->range_first);
    if (e->ranges == NULL || e->range_first == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "parameter groups of %u chunks", e->layout.chunk_count);
    for (uint32_t i = 0; i < e->layout.chunk_count; i++) {
        const spw_store_chunk *c = &e->layout.chunks[i];
        uint64_t end = 0;
        e->range_first[i] = count;
        for (uint64_t at = 0; at < c->elems; at = end) {
            const spw_param *p = param_from(e, c->unit_idx, c->first + at, &end);
            const spw_opt_coef *coef = &e->coefs[p != NULL ? coef_of(e, p) : MATRIX];
            end = p == NULL || end - c->first > c->elems ? c->elems : end - c->first;
            if (count > e->range_first[i] && e->ranges[count - 1].coef == coef)
                count--;
            e->ranges[count++] = (spw_opt_range){end, coef};
        }
    }
    e->range_first[e->layout.chunk_count] = count;
    SPW_ASSERT(count <= most);
    return SPW_OK;
}

static spw_status
build(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    const spw_config *c = &e->config;
    uint64_t chunk = c->run.chunk_elems, partial_count = 0;
    uint32_t accumulation = o->inference ? 1 : (uint32_t)c->accumulation, group;
    spw_topology topology;
    spw_gpu_options gpu = {.name = c->run.device,
                           .memory_bytes = c->run.device_memory == SPW_AUTO ? 0 : c->run.device_memory,
                           .thread_count = c->run.compute_threads,
                           .topology = &topology,
                           .pin_threads = c->run.pin_threads};
    if (c->zero.sub_group_size > 0 && c->zero.sub_group_size < chunk)
        chunk = c->zero.sub_group_size / 4096 * 4096 > 0 ? c->zero.sub_group_size / 4096 * 4096 : 4096;
    e->B = o->sequences > 0 ? o->sequences : c->micro_batch;
    e->T = o->positions > 0 ? o->positions : c->data.seq_length;
    if (o->cache_slots > 0) {
        e->B = e->cache_slots = o->cache_slots;
        e->cache_positions = o->cache_positions;
        SPW_ASSERT(o->inference && e->T <= e->cache_positions);
    }
    e->rows = e->B * e->T;
    group = c->run.micro_batches_per_pass == 0 || c->run.micro_batches_per_pass > accumulation
                ? accumulation
                : (uint32_t)c->run.micro_batches_per_pass;
    e->micro_max = accumulation > c->run.eval_batches ? accumulation : (uint32_t)c->run.eval_batches;
    e->group_max = group;
    e->chain_max = e->model->block_count + o->chain_extra;
    e->kept_slots = o->inference || e->chain_max < 2 ? 0 : e->chain_max - 2;
    if (group < accumulation && c->run.grad_dtype != SPW_F32)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "spillway.micro_batches_per_pass %u with gradient_accumulation_steps %u adds gradients in host "
            "memory, which needs spillway.grad_dtype fp32",
            group, accumulation);
    if (e->T > e->model->config.positions && e->model->config.family == SPW_FAMILY_GPT2)
        return SPW_RAISE(err, SPW_ECONFIG, "data.seq_length %llu is larger than the model's n_positions %llu",
                         (unsigned long long)e->T, (unsigned long long)e->model->config.positions);
    SPW_TRY(spw_layout_make(&e->layout, e->model, chunk, !o->inference, err));
    spw_topology_read(&topology, "", NULL);
    SPW_TRY(spw_gpu_open(&e->gpu, &gpu, err));
    SPW_TRY(spw_gpu_queue_create(&e->compute, e->gpu, SPW_QUEUE_COMPUTE, err));
    SPW_TRY(spw_gpu_queue_create(&e->d2h, e->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_tape_create(&e->tape, e->compute, err));
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        partial_count += e->layout.units[u].elems / 4096;
    e->future_max = 4 * e->layout.unit_count + 64;
    e->buffers = spw_mem_calloc(e->layout.unit_count + 2 + o->chain_extra, sizeof *e->buffers);
    e->partials = spw_mem_calloc(partial_count, sizeof *e->partials);
    e->unit_partial = spw_mem_calloc(e->layout.unit_count + 1, sizeof *e->unit_partial);
    e->chain = spw_mem_calloc(e->chain_max, sizeof *e->chain);
    e->first_use = spw_mem_calloc(e->layout.unit_count, sizeof *e->first_use);
    e->last_use = spw_mem_calloc(e->layout.unit_count, sizeof *e->last_use);
    e->generations = spw_mem_calloc(e->layout.unit_count, sizeof *e->generations);
    e->future = spw_mem_calloc(e->future_max, sizeof *e->future);
    e->notes = spw_mem_calloc(e->layout.unit_count, sizeof *e->notes);
    e->activation_places = spw_mem_calloc((uint64_t)e->kept_slots * e->group_max + 1, sizeof *e->activation_places);
    e->flow_lent = spw_mem_calloc(2 * (uint64_t)e->group_max, sizeof *e->flow_lent);
    if (!e->flow_lent || !e->activation_places || !e->notes || !e->buffers || !e->partials || !e->unit_partial ||
        !e->chain || !e->first_use || !e->last_use || !e->generations || !e->future)
        return SPW_RAISE(err, SPW_ENOMEM, "engine");
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->unit_partial[u + 1] = e->unit_partial[u] + e->layout.units[u].elems / 4096;
    for (int k = 0; k < MODE_COUNT; k++)
        SPW_TRY(spw_trace_init(&e->traces[k], (accumulation / group + 1) * 8 * e->chain_max + 64, err));
    for (uint32_t b = 0; b < e->model->block_count; b++)
        e->chain[b] = b;
    e->chain_count = e->model->block_count;
    note_uses(e);
    SPW_TRY(check_frozen(e, err));
    SPW_TRY(make_plan(e, o, err));
    SPW_TRY(check_groups(e, err));
    if (o->plan_only)
        return SPW_OK;
    SPW_TRY(make_ranges(e, err));
    SPW_TRY(take_memory(e, err));
    SPW_TRY(make_act(e, err));
    return make_store(e, &topology, err);
}

spw_status
spw_engine_create(spw_engine **out, const spw_engine_options *o, spw_error *err)
{
    spw_engine *e = spw_mem_zalloc(sizeof *e);
    spw_status st;
    *out = NULL;
    if (e == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "engine");
    e->config = *o->config;
    e->model = o->model;
    e->inference = o->inference;
    e->rates = (spw_rates){.shared_cores = spw_cpu_allowed_count()};
    e->optimizer = o->config->optimizer.type[0] != '\0' ? spw_optimizer_find(o->config->optimizer.type) : &spw_opt_adam;
    st = e->optimizer != NULL ? build(e, o, err)
                              : SPW_RAISE(err, SPW_ECONFIG, "there is no optimizer %s", o->config->optimizer.type);
    if (st != SPW_OK)
        spw_engine_destroy(e);
    else
        *out = e;
    return st;
}

void
spw_engine_destroy(spw_engine *e)
{
    if (e == NULL)
        return;
    spw_gpu_queue_destroy(e->d2h); /* its notifies call the store */
    spw_store_destroy(e->store);
    spw_act_destroy(e->act);
    spw_tape_destroy(e->tape);
    for (uint32_t i = 0; i < e->buffer_count; i++)
        spw_gpu_event_destroy(e->buffers[i].sent);
    spw_gpu_queue_destroy(e->compute);
    if (e->gpu != NULL)
        spw_gpu_free(e->gpu, e->device);
    spw_gpu_close(e->gpu);
    for (int k = 0; k < MODE_COUNT; k++)
        spw_trace_deinit(&e->traces[k]);
    spw_layout_free(&e->layout);
    spw_mem_free(e->buffers);
    spw_mem_free(e->notes);
    spw_mem_free(e->activation_places);
    spw_mem_free(e->flow_lent);
    spw_mem_free(e->partials);
    spw_mem_free(e->unit_partial);
    spw_mem_free(e->chain);
    spw_mem_free(e->first_use);
    spw_mem_free(e->ranges);
    spw_mem_free(e->range_first);
    spw_mem_free(e->last_use);
    spw_mem_free(e->generations);
    spw_mem_free(e->future);
    spw_mem_free(e);
}

/* ---------------------------------------------------------------- parameters and updates (on the store's workers) */

static spw_status
update_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, uint64_t first,
             uint64_t count, spw_error *err)
{
    spw_engine *e = ctx;
    const spw_store_chunk *c = &e->layout.chunks[chunk_idx];
    spw_opt_chunk chunk = {.format = e->config.run.state_format,
                           .elems = c->elems,
                           .weights = weights,
                           .record = record,
                           .grad = grad,
                           .grad_dtype = e->config.run.grad_dtype,
                           .first = e->unit_partial[c->unit_idx] * 4096 + c->first,
                           .begin = first,
                           .end = first + count};
    const spw_opt_range *ranges = e->ranges + e->range_first[chunk_idx];
    uint64_t bad = spw_opt_step(&chunk, ranges, e->range_first[chunk_idx + 1] - e->range_first[chunk_idx]);
    if (bad > 0)
        return SPW_RAISE(err, SPW_ENONFINITE,
                         "%llu elements of the gradient of unit %u are infinite or NaN; with gradient_clipping or "
                         "bf16.check_grad_overflow such a step is skipped",
                         (unsigned long long)bad, e->layout.chunks[chunk_idx].unit_idx);
    return SPW_OK;
}

typedef struct init_job {
    spw_engine *e;
    uint64_t seed;
} init_job;

/* Box-Muller on counter-based bits. */
void
spw__draw_param(float *out, const spw_param *p, uint32_t param_id, uint64_t seed, uint64_t at, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t element = at + i;
        uint32_t r[4];
        double radius, angle;
        if (p->init != SPW_INIT_NORMAL) {
            out[i] = p->init == SPW_INIT_ONES ? 1.0f : 0.0f;
            continue;
        }
        spw_philox(seed, param_id, element, r);
        radius = sqrt(-2.0 * log(((double)r[0] + 1.0) / 4294967296.0));
        angle = 6.283185307179586 * ((double)r[1] / 4294967296.0);
        out[i] = (float)(radius * cos(angle) * (double)p->init_std);
    }
}

static spw_status
init_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    init_job *job = ctx;
    spw_engine *e = job->e;
    const spw_store_chunk *c = &e->layout.chunks[chunk_idx];
    spw_state_format f = e->config.run.state_format;
    float block[4096];
    (void)grad;
    (void)err;
    memset(weights, 0, c->elems * spw_state_weight_bytes(f));
    if (record != NULL)
        memset(record, 0, spw_state_record_bytes(f, e->optimizer, c->elems));
    for (uint32_t id = 0; id < e->layout.param_count; id++) {
        const spw_place *at = &e->layout.places[id];
        uint64_t first = at->first > c->first ? at->first : c->first;
        uint64_t end = at->first + at->elems < c->first + c->elems ? at->first + at->elems : c->first + c->elems;
        if (at->unit_idx != c->unit_idx)
            continue;
        for (; first < end; first += 4096) {
            uint64_t n = end - first < 4096 ? end - first : 4096;
            spw__draw_param(block, &e->model->params[id], id, job->seed, first - at->first, n);
            spw_state_set(f, e->optimizer, weights, record, c->elems, SPW_PART_MASTER, first - c->first, n, block);
        }
    }
    return SPW_OK;
}

spw_status
spw_engine_init_params(spw_engine *e, uint64_t seed, spw_error *err)
{
    init_job job = {e, seed};
    return spw_store_sweep(e->store, SPW_SWEEP_INIT, init_chunk, &job, err);
}

/* ---------------------------------------------------------------- uses */

static void
tell_future(spw_engine *e, int mode)
{
    uint32_t n;
    if (!e->config.run.prefetch)
        return;
    n = spw_trace_future(&e->traces[mode], e->generations, mode == MODE_TRAIN ? 1 : 0, e->future, e->future_max);
    for (uint32_t i = 0; i < n; i++) { /* what is frozen stays at the generation it has */
        if (!e->layout.units[e->future[i].unit_idx].trainable)
            e->future[i].generation = e->generations[e->future[i].unit_idx];
    }
    spw_store_set_future(e->store, e->future, n,
                         spw_trace_ahead(e->future, n, e->layout.units, e->config.zero.prefetch_bucket_size));
}

static spw_status
acquire_block(spw_engine *e, int mode, block_run *run, spw_error *err)
{
    spw_store_use uses[SPW_BLOCK_PARAMS_MAX];
    run->unit_count = block_units(e, run->block_idx, run->units);
    for (uint32_t k = 0; k < run->unit_count; k++)
        uses[k] = (spw_store_use){run->units[k], e->generations[run->units[k]]};
    SPW_TRY(spw_store_acquire(e->store, uses, run->unit_count, run->weights, err));
    for (uint32_t k = 0; k < run->unit_count; k++)
        spw_trace_use(&e->traces[mode], run->units[k]);
    tell_future(e, mode);
    return SPW_OK;
}

static void
release_block(spw_engine *e, const block_run *run)
{
    for (uint32_t k = 0; k < run->unit_count; k++)
        spw_store_release(e->store, run->units[k]);
}

/* ---------------------------------------------------------------- forward and backward over a group */

/* All waiting of this step that the store does not count. */
static uint64_t
waited_ns(const spw_engine *e)
{
    uint64_t sum = 0;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        sum += e->stall_ns[k];
    return sum;
}

/* Counts what began at begin, without the waiting since waited. */
static void
end_compute(spw_engine *e, const char *name, uint32_t block_idx, uint64_t begin, uint64_t waited)
{
    uint64_t now = spw_now_ns();
    e->compute_ns += now - begin - (waited_ns(e) - waited);
    spw_timeline_add(SPW_LANE_COMPUTE, name, block_idx, begin, now);
}

enum { NOT_LENT = UINT32_MAX };

/* Before a part of the flow is written: the checkpoint that leaves from there must have done so. */
static spw_status
settle_flow(spw_engine *e, uint32_t turn, uint32_t micro, spw_error *err)
{
    uint32_t *lent = &e->flow_lent[turn % 2 * e->group_max + micro], idx = *lent;
    *lent = NOT_LENT;
    return idx == NOT_LENT ? SPW_OK : spw_act_settle(e->act, idx, err);
}

static spw_status
begin_keeping(spw_engine *e, spw_error *err)
{
    for (uint32_t i = 0; i < 2 * e->group_max; i++)
        e->flow_lent[i] = NOT_LENT;
    return spw_act_begin(e->act, err);
}

/* Gives compute the copy of y to x[c], and x[c] to those that are kept. */
static spw_status
pass_on(spw_engine *e, const spw_value *y, uint32_t c, uint32_t micro, bool keep, spw_error *err)
{
    char *out = keep ? input_of(e, c, micro) : flow(e, c, micro);
    bool in_flow = out == flow(e, c, micro);
    if (keep && in_flow)
        SPW_TRY(settle_flow(e, c, micro, err));
    spw_gpu_copy_d2d(e->compute, out, SPW_F32, y->data, SPW_F32, e->rows * e->model->config.width, NULL);
    if (!keep || !kept(e, c))
        return SPW_OK;
    if (in_flow)
        e->flow_lent[c % 2 * e->group_max + micro] = checkpoint_of(e, c, micro);
    return spw_act_put(e->act, checkpoint_of(e, c, micro), out, e->compute, err);
}

/* keep: blocks' inputs are kept for the backward pass. */
static spw_status
forward_group(spw_engine *e, int mode, uint32_t first, uint32_t count, bool keep, spw_error *err)
{
    uint32_t last = e->chain_count - 1;
    if (keep)
        SPW_TRY(begin_keeping(e, err));
    for (uint32_t c = 0; c < last + (keep ? 0u : 1u); c++) {
        block_run run = {.block_idx = e->chain[c]};
        uint64_t begin, waited;
        spw_status st = SPW_OK;
        SPW_TRY(acquire_block(e, mode, &run, err));
        begin = spw_now_ns();
        waited = waited_ns(e);
        for (uint32_t i = 0; i < count && st == SPW_OK; i++) {
            spw_batch batch = batch_of(e, first + i);
            spw_value *x = NULL, *y;
            spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
            if (c > 0)
                x = spw_tape_input(e->tape, keep ? input_of(e, c, i) : flow(e, c, i), e->rows, e->model->config.width,
                                   false);
            y = call_forward(e, &run, &batch, x, keep, false);
            st = spw_tape_check(e->tape, err);
            if (st == SPW_OK && c < last)
                st = pass_on(e, y, c + 1, i, keep, err);
        }
        end_compute(e, "forward", run.block_idx, begin, waited);
        release_block(e, &run);
        SPW_TRY(st);
    }
    if (keep)
        spw_act_turn(e->act);
    return SPW_OK;
}

/* Waits for what leaves the device, on account of d2h. */
static void
wait_d2h(spw_engine *e)
{
    uint64_t begin = spw_now_ns();
    spw_gpu_queue_sync(e->d2h);
    e->stall_ns[SPW_STALL_D2H] += spw_now_ns() - begin;
}

static grad_buffer *
buffer_of(spw_engine *e, uint32_t unit_idx)
{
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        if (e->buffers[i].unit_idx == unit_idx)
            return &e->buffers[i];
    }
    return NULL;
}

/* A free buffer for the unit, zeroed or, in a later group, holding what earlier groups added up. */
static spw_status
open_grad(spw_engine *e, uint32_t unit_idx, bool later_group, spw_error *err)
{
    uint64_t elems = e->layout.units[unit_idx].elems, begin;
    grad_buffer *best = NULL;
    for (uint32_t i = 0; i < e->buffer_count; i++) { /* the smallest that fits; among equals the one idle longest */
        grad_buffer *b = &e->buffers[i];
        if (b->unit_idx == UINT32_MAX && b->elems >= elems &&
            (best == NULL || b->elems < best->elems || (b->elems == best->elems && b->turn < best->turn)))
            best = b;
    }
    if (best == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "the chain needs more gradient buffers at once than chain_extra allows");
    best->unit_idx = unit_idx;
    best->turn = ++e->buffer_turn;
    begin = spw_now_ns();
    spw_gpu_event_sync(best->sent);
    e->stall_ns[SPW_STALL_D2H] += spw_now_ns() - begin;
    if (later_group)
        wait_d2h(e); /* the earlier group's sum may still be on its way out of another buffer */
    if (later_group) {
        spw_gpu_copy_h2d(e->compute, best->data, SPW_F32, spw_store_grad(e->store, unit_idx), e->config.run.grad_dtype,
                         elems);
        e->grad_h2d_bytes += elems * spw_dtype_bytes(e->config.run.grad_dtype);
    } else {
        spw_gpu_zero(e->compute, best->data, elems * sizeof(float));
    }
    return SPW_OK;
}

static void
grad_arrived(void *arg)
{
    grad_note *note = arg;
    spw_store_grad_ready(note->store, note->unit_idx);
}

static spw_status
send_grad(spw_engine *e, uint32_t unit_idx, bool final_group, spw_error *err)
{
    grad_buffer *b = buffer_of(e, unit_idx);
    uint64_t elems = e->layout.units[unit_idx].elems;
    SPW_TRY(spw_store_grad_open(e->store, unit_idx, err));
    spw_gpu_copy_d2h(e->d2h, spw_store_grad(e->store, unit_idx), e->config.run.grad_dtype, b->data, SPW_F32, elems,
                     final_group ? e->partials + e->unit_partial[unit_idx] : NULL);
    e->d2h_bytes += elems * spw_dtype_bytes(e->config.run.grad_dtype);
    spw_gpu_event_record(b->sent, e->d2h);
    b->unit_idx = UINT32_MAX;
    if (final_group) {
        e->notes[unit_idx] = (grad_note){e->store, unit_idx};
        spw_gpu_queue_notify(e->d2h, grad_arrived, &e->notes[unit_idx]);
    }
    return SPW_OK;
}

/*
 * The gradient of x[c] lies in the flow at turn c + 1: where the block's output had its own before, or, for the last
 * block, where x[c - 1] leaves from.
 */
static spw_status
backward_block(spw_engine *e, const block_run *run, uint32_t c, uint32_t first, uint32_t count, spw_error *err)
{
    bool last = c + 1 == e->chain_count;
    for (uint32_t i = 0; i < count; i++) {
        spw_batch batch = batch_of(e, first + i);
        spw_value *x = NULL, *y;
        void *data = flow(e, c, i);
        if (kept(e, c))
            SPW_TRY(spw_act_get(e->act, checkpoint_of(e, c, i), &data, err));
        spw_tape_reset(e->tape, e->arena, e->arena_bytes, true);
        if (c > 0) {
            x = spw_tape_input(e->tape, data, e->rows, e->model->config.width, true);
            SPW_TRY(settle_flow(e, c + 1, i, err));
            x->grad = flow(e, c + 1, i);
        }
        y = call_forward(e, run, &batch, x, true, false);
        if (y != NULL && !last)
            y->grad = flow(e, c + 2, i);
        spw_tape_backward(e->tape, y);
        SPW_TRY(spw_tape_check(e->tape, err));
        if (kept(e, c))
            spw_act_release(e->act, checkpoint_of(e, c, i), e->compute);
    }
    return SPW_OK;
}

static spw_status
backward_group(spw_engine *e, uint32_t first, uint32_t count, bool later_group, bool final_group, spw_error *err)
{
    for (uint32_t c = e->chain_count; c-- > 0;) {
        block_run run = {.block_idx = e->chain[c]};
        uint64_t begin, waited;
        spw_status st;
        SPW_TRY(acquire_block(e, MODE_TRAIN, &run, err));
        begin = spw_now_ns();
        waited = waited_ns(e);
        st = SPW_OK;
        for (uint32_t k = 0; k < run.unit_count && st == SPW_OK; k++) {
            if (!e->layout.units[run.units[k]].trainable)
                continue;
            if (e->last_use[run.units[k]] == (int32_t)c)
                st = open_grad(e, run.units[k], later_group, err);
            if (st == SPW_OK)
                run.grads[k] = buffer_of(e, run.units[k])->data;
        }
        if (st == SPW_OK)
            st = backward_block(e, &run, c, first, count, err);
        end_compute(e, "backward", run.block_idx, begin, waited);
        release_block(e, &run);
        for (uint32_t k = 0; k < run.unit_count && st == SPW_OK; k++) {
            if (e->layout.units[run.units[k]].trainable && e->first_use[run.units[k]] == (int32_t)c)
                st = send_grad(e, run.units[k], final_group, err);
        }
        if (st != SPW_OK)
            return st;
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- sums that decide */

/* Element order, fp64 partials per 4096: the same whatever the micro-batches' grouping. */
static double
mean_loss(const spw_engine *e, uint32_t micro_batches)
{
    double total = 0;
    uint64_t n = micro_batches * e->rows;
    for (uint64_t first = 0; first < n; first += 4096) {
        double part = 0;
        for (uint64_t i = first; i < n && i < first + 4096; i++)
            part += (double)e->losses[i];
        total += part;
    }
    return total / (double)e->target_count;
}

static double
global_norm(const spw_engine *e)
{
    double sum = 0;
    for (uint32_t u = 0; u < e->layout.unit_count; u++) {
        if (e->first_use[u] < 0 || !e->layout.units[u].trainable)
            continue;
        for (uint64_t i = e->unit_partial[u]; i < e->unit_partial[u + 1]; i++)
            sum += e->partials[i];
    }
    return sqrt(sum);
}

static spw_status
set_coefficients(spw_engine *e, double lr, double grad_scale, spw_error *err)
{
    const spw_config *c = &e->config;
    spw_opt_hp hp = {.lr = lr,
                     .beta1 = c->optimizer.beta1,
                     .beta2 = c->optimizer.beta2,
                     .eps = c->optimizer.eps,
                     .weight_decay = c->optimizer.weight_decay,
                     .decoupled = c->optimizer.adam_w_mode,
                     .bias_correction = c->optimizer.bias_correction,
                     .momentum = c->optimizer.momentum,
                     .dampening = c->optimizer.dampening,
                     .nesterov = c->optimizer.nesterov,
                     .lr_decay = c->optimizer.lr_decay,
                     .step = e->updates + 1,
                     .grad_scale = grad_scale,
                     .seed = c->run.seed,
                     .nearest = c->run.nearest_moments};
    for (uint32_t g = 0; g <= c->optimizer.group_count; g++) {
        const spw_param_group *own = g > 0 ? &c->optimizer.groups[g - 1] : NULL;
        for (int kind = MATRIX; kind < KINDS; kind++) {
            spw_opt_hp with = hp;
            if (kind == VECTOR && !c->run.decay_norm_and_bias)
                with.weight_decay = 0;
            if (own != NULL && !isnan(own->weight_decay))
                with.weight_decay = own->weight_decay;
            if (own != NULL && !isnan(own->lr)) /* on the same schedule */
                with.lr = c->optimizer.lr > 0 ? lr * (own->lr / c->optimizer.lr) : own->lr;
            if (own != NULL && !isnan(own->beta1)) {
                with.beta1 = own->beta1;
                with.beta2 = own->beta2;
            }
            SPW_TRY(spw_opt_prepare(&e->coefs[KINDS * g + (uint32_t)kind], e->optimizer, &with, err));
        }
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- steps */

static spw_status
load_batch(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, spw_error *err)
{
    uint64_t n = micro_batches * e->rows, count = 0;
    if (micro_batches == 0 || micro_batches > e->micro_max)
        return SPW_RAISE(err, SPW_EINVAL, "%u micro-batches, the engine was made for 1 to %u", micro_batches,
                         e->micro_max);
    for (uint64_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || (uint64_t)tokens[i] >= e->model->config.vocab || targets[i] < -1 ||
            (targets[i] >= 0 && (uint64_t)targets[i] >= e->model->config.vocab))
            return SPW_RAISE(err, SPW_EINVAL, "token %d (target %d) is outside the vocabulary of %llu", tokens[i],
                             targets[i], (unsigned long long)e->model->config.vocab);
        count += targets[i] >= 0;
    }
    e->target_count = count > 0 ? count : 1;
    memcpy(e->tokens, tokens, n * sizeof *tokens);
    memcpy(e->targets, targets, n * sizeof *targets);
    return SPW_OK;
}

/* What the counters said when a step began. */
typedef struct step_start {
    uint64_t begin_ns, cpu_ns, d2h_bytes, grad_h2d_bytes;
    spw_store_stats store;
    spw_act_stats kept;
} step_start;

static void
begin_account(spw_engine *e, step_start *s)
{
    *s = (step_start){.begin_ns = spw_now_ns(),
                      .cpu_ns = spw_process_cpu_ns(),
                      .d2h_bytes = e->d2h_bytes,
                      .grad_h2d_bytes = e->grad_h2d_bytes};
    spw_store_get_stats(e->store, &s->store);
    spw_act_get_stats(e->act, &s->kept);
    e->compute_ns = 0;
    memset(e->stall_ns, 0, sizeof e->stall_ns);
    if (!e->counting)
        e->counted = s->store;
}

static void
end_account(spw_engine *e, const step_start *s, spw_step_result *r)
{
    spw_store_stats now;
    spw_act_stats kept_now;
    double parts = (double)e->compute_ns * 1e-9;
    spw_store_get_stats(e->store, &now);
    spw_act_get_stats(e->act, &kept_now);
    r->step_s = (double)(spw_now_ns() - s->begin_ns) * 1e-9;
    r->cpu_s = (double)(spw_process_cpu_ns() - s->cpu_ns) * 1e-9;
    r->compute_s = parts;
    for (int k = 0; k < SPW_STALL_COUNT; k++) {
        r->stall_s[k] = (double)(now.stall_ns[k] - s->store.stall_ns[k] + e->stall_ns[k]) * 1e-9;
        parts += r->stall_s[k];
    }
    r->other_s = r->step_s - parts;
    r->nvme_read =
        now.nvme_read_bytes - e->counted.nvme_read_bytes + kept_now.nvme_read_bytes - s->kept.nvme_read_bytes;
    r->nvme_write =
        now.nvme_write_bytes - e->counted.nvme_write_bytes + kept_now.nvme_write_bytes - s->kept.nvme_write_bytes;
    r->h2d = now.h2d_bytes - e->counted.h2d_bytes + e->grad_h2d_bytes - s->grad_h2d_bytes + kept_now.h2d_bytes -
             s->kept.h2d_bytes;
    e->counted = now;
    e->counting = true;
    r->d2h = e->d2h_bytes - s->d2h_bytes + kept_now.d2h_bytes - s->kept.d2h_bytes;
    r->bound_by = spw_step_bound(&e->plan, &e->rates, r->nvme_read, r->nvme_write, r->compute_s, r->cpu_s, r->bounds_s);
    r->bound_s = r->bounds_s[r->bound_by];
}

/* The decision at the end of a step: norm, finite check, clip, go or skip. */
static spw_status
decide(spw_engine *e, double lr, bool gate_was_open, spw_step_result *r, spw_error *err)
{
    const spw_config *c = &e->config;
    double scale = 1.0;
    wait_d2h(e);
    r->grad_norm = global_norm(e);
    if (!gate_was_open) {
        if (!isfinite(r->grad_norm)) {
            r->skipped = true;
            spw_store_step_skip(e->store);
            return SPW_OK;
        }
        if (c->gradient_clipping > 0 && r->grad_norm > c->gradient_clipping)
            scale = c->gradient_clipping / (r->grad_norm + 1e-6);
        SPW_TRY(set_coefficients(e, lr, scale, err));
        spw_store_step_go(e->store);
    }
    e->updates++;
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->generations[u] += e->first_use[u] >= 0 && e->layout.units[u].trainable;
    return SPW_OK;
}

spw_status
spw_engine_step(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, double lr,
                spw_step_result *r, spw_error *err)
{
    const spw_config *c = &e->config;
    bool gate_early = c->gradient_clipping <= 0 && !c->bf16_check_overflow;
    step_start start;
    memset(r, 0, sizeof *r);
    if (e->inference)
        return SPW_RAISE(err, SPW_EINVAL, "an engine made for inference cannot train");
    begin_account(e, &start);
    SPW_TRY(load_batch(e, tokens, targets, micro_batches, err));
    e->step_count++;
    spw_trace_begin(&e->traces[MODE_TRAIN]);
    tell_future(e, MODE_TRAIN);
    for (uint32_t first = 0; first < micro_batches; first += e->group_max) {
        uint32_t count = micro_batches - first < e->group_max ? micro_batches - first : e->group_max;
        bool final_group = first + count == micro_batches;
        SPW_TRY(forward_group(e, MODE_TRAIN, first, count, true, err));
        if (final_group) {
            uint64_t begin = spw_now_ns();
            spw_store_step_begin(e->store); /* all updates of the last step are done: forward has waited for them */
            e->stall_ns[SPW_STALL_OPTIMIZER] += spw_now_ns() - begin;
            SPW_TRY(spw_store_check(e->store, err));
            if (gate_early) {
                SPW_TRY(set_coefficients(e, lr, 1.0, err));
                spw_store_step_go(e->store);
            }
        }
        SPW_TRY(backward_group(e, first, count, first > 0, final_group, err));
    }
    spw_trace_end(&e->traces[MODE_TRAIN]);
    SPW_TRY(decide(e, lr, gate_early, r, err));
    spw_trace_begin(&e->traces[MODE_TRAIN]); /* the updates to come are handed to the next forward pass */
    tell_future(e, MODE_TRAIN);
    r->loss = mean_loss(e, micro_batches);
    r->lr = lr;
    r->tokens = micro_batches * e->rows;
    end_account(e, &start, r);
    return spw_store_check(e->store, err);
}

spw_status
spw_engine_eval(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, double *loss_out,
                spw_error *err)
{
    SPW_TRY(load_batch(e, tokens, targets, micro_batches, err));
    e->counting = false;
    spw_trace_begin(&e->traces[MODE_EVAL]);
    for (uint32_t first = 0; first < micro_batches; first += e->group_max) {
        uint32_t count = micro_batches - first < e->group_max ? micro_batches - first : e->group_max;
        SPW_TRY(forward_group(e, MODE_EVAL, first, count, false, err));
    }
    spw_trace_end(&e->traces[MODE_EVAL]);
    *loss_out = mean_loss(e, micro_batches);
    return SPW_OK;
}

spw_status
spw_engine_logits(spw_engine *e, const int32_t *tokens, uint64_t count, float *logits, spw_error *err)
{
    uint64_t width = e->model->config.width;
    spw_batch batch = {.sequences = 1, .positions = count, .tokens = e->tokens, .places = e->places};
    e->counting = false;
    if (count == 0 || count > e->T)
        return SPW_RAISE(err, SPW_EINVAL, "%llu tokens of context, at most %llu fit", (unsigned long long)count,
                         (unsigned long long)e->T);
    memcpy(e->tokens, tokens, count * sizeof *tokens);
    spw_trace_begin(&e->traces[MODE_EVAL]);
    tell_future(e, MODE_EVAL);
    for (uint32_t c = 0; c < e->chain_count; c++) {
        block_run run = {.block_idx = e->chain[c]};
        bool head = c + 1 == e->chain_count;
        spw_value *x = NULL, *y;
        SPW_TRY(acquire_block(e, MODE_EVAL, &run, err));
        spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
        if (c > 0)
            x = spw_tape_input(e->tape, flow(e, c, 0) + (head ? (count - 1) * width * sizeof(float) : 0),
                               head ? 1 : count, width, false);
        y = call_forward(e, &run, &batch, x, false, head);
        if (spw_tape_check(e->tape, err) == SPW_OK && head)
            memcpy(logits, y->data, e->model->config.vocab * sizeof(float));
        else if (y != NULL)
            spw_gpu_copy_d2d(e->compute, flow(e, c + 1, 0), SPW_F32, y->data, SPW_F32, count * width, NULL);
        release_block(e, &run);
        SPW_TRY(spw_tape_check(e->tape, err));
    }
    spw_trace_end(&e->traces[MODE_EVAL]);
    return SPW_OK;
}

/* Copies the rows whose logits are wanted side by side, to the turn after the last block's input. */
static char *
gather_rows(spw_engine *e, uint32_t c, const uint64_t *rows, uint32_t count)
{
    uint64_t width = e->model->config.width;
    char *from = flow(e, c, 0), *to = flow(e, c + 1, 0);
    for (uint32_t i = 0; i < count; i++)
        spw_gpu_copy_d2d(e->compute, to + i * width * sizeof(float), SPW_F32, from + rows[i] * width * sizeof(float),
                         SPW_F32, width, NULL);
    return to;
}

/* The block at c over one part; its output goes on to the next turn. */
static spw_status
extend_part(spw_engine *e, const block_run *run, uint32_t c, const engine_part *p, spw_error *err)
{
    uint64_t width = e->model->config.width, n = p->sequences * p->positions;
    uint64_t row_bytes = width * sizeof(float), layer = c > 0 ? c - 1 : 0; /* the first block has no attention */
    spw_batch batch = {.sequences = p->sequences,
                       .positions = p->positions,
                       .tokens = e->tokens + p->row,
                       .places = e->places + p->row};
    spw_attention_cache cache = {.key = e->cache + layer * 2 * cache_part_elems(e),
                                 .value = e->cache + (layer * 2 + 1) * cache_part_elems(e),
                                 .capacity = e->cache_positions,
                                 .slots = e->slots + p->sequence,
                                 .starts = e->starts + p->sequence};
    spw_value *x = NULL, *y;
    spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
    spw_tape_use_cache(e->tape, &cache, cache_width(e), batch.places, p->positions == 1);
    if (c > 0)
        x = spw_tape_input(e->tape, flow(e, c, 0) + p->row * row_bytes, n, width, false);
    y = call_forward(e, run, &batch, x, false, false);
    SPW_TRY(spw_tape_check(e->tape, err));
    spw_gpu_copy_d2d(e->compute, flow(e, c + 1, 0) + p->row * row_bytes, SPW_F32, y->data, SPW_F32, n * width, NULL);
    return SPW_OK;
}

spw_status
spw__engine_extend(spw_engine *e, const engine_extension *x, spw_error *err)
{
    uint32_t last = e->chain_count - 1;
    uint64_t rows = 0;
    SPW_ASSERT(e->cache_slots > 0 && x->logit_count <= e->cache_slots);
    for (uint32_t i = 0; i < x->part_count; i++)
        rows += x->parts[i].sequences * x->parts[i].positions;
    SPW_ASSERT(rows <= e->rows);
    e->counting = false;
    memcpy(e->tokens, x->tokens, rows * sizeof *e->tokens);
    memcpy(e->places, x->places, rows * sizeof *e->places);
    memcpy(e->slots, x->slots, e->cache_slots * sizeof *e->slots);
    memcpy(e->starts, x->starts, e->cache_slots * sizeof *e->starts);
    spw_trace_begin(&e->traces[MODE_EVAL]);
    tell_future(e, MODE_EVAL);
    for (uint32_t c = 0; c <= last; c++) {
        block_run run = {.block_idx = e->chain[c]};
        spw_status st = SPW_OK;
        SPW_TRY(acquire_block(e, MODE_EVAL, &run, err));
        for (uint32_t i = 0; i < x->part_count && c < last && st == SPW_OK; i++)
            st = extend_part(e, &run, c, &x->parts[i], err);
        if (c == last && x->logit_count > 0) {
            spw_batch batch = {.sequences = x->logit_count, .positions = 1};
            spw_value *y;
            spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
            spw_tape_use_cache(e->tape, NULL, 0, NULL, true);
            y = call_forward(e, &run, &batch,
                             spw_tape_input(e->tape, gather_rows(e, c, x->logit_rows, x->logit_count), x->logit_count,
                                            e->model->config.width, false),
                             false, true);
            st = spw_tape_check(e->tape, err);
            if (st == SPW_OK)
                memcpy(x->logits, y->data, x->logit_count * e->model->config.vocab * sizeof(float));
        }
        release_block(e, &run);
        SPW_TRY(st);
    }
    spw_trace_end(&e->traces[MODE_EVAL]);
    return spw_store_check(e->store, err);
}

spw_status
spw_engine_set_chain(spw_engine *e, const uint32_t *blocks, uint32_t count, spw_error *err)
{
    if (count < 2 || count > e->chain_max || blocks[0] != 0 || blocks[count - 1] != e->model->block_count - 1)
        return SPW_RAISE(err, SPW_EINVAL, "a chain has 2 to %u blocks and starts and ends with the model's own",
                         e->chain_max);
    for (uint32_t i = 0; i < count; i++) {
        if (blocks[i] >= e->model->block_count || (i > 0 && blocks[i] == 0))
            return SPW_RAISE(err, SPW_EINVAL,
                             "block %u at position %u of the chain does not exist or cannot stand there", blocks[i], i);
    }
    memcpy(e->chain, blocks, count * sizeof *blocks);
    e->chain_count = count;
    note_uses(e);
    return SPW_OK;
}

void
spw_engine_set_rates(spw_engine *e, const spw_rates *rates)
{
    e->rates = *rates;
}

spw_status
spw_engine_drain(spw_engine *e, spw_error *err)
{
    e->counting = false;
    return spw_store_drain(e->store, err);
}

/* ---------------------------------------------------------------- views */

const spw_plan *
spw_engine_plan(const spw_engine *e)
{
    return &e->plan;
}

const spw_layout *
spw_engine_layout(const spw_engine *e)
{
    return &e->layout;
}

spw_store *
spw_engine_store(spw_engine *e)
{
    return e->store;
}

spw_gpu *
spw_engine_gpu(spw_engine *e)
{
    return e->gpu;
}

const spw_model *
spw_engine_model(const spw_engine *e)
{
    return e->model;
}

uint64_t
spw_engine_updates(const spw_engine *e)
{
    return e->updates;
}

void
spw_engine_set_updates(spw_engine *e, uint64_t updates)
{
    e->updates = updates;
    e->step_count = updates;
}

spw_state_format
spw__engine_format(const spw_engine *e)
{
    return e->config.run.state_format;
}

const uint64_t *
spw__engine_generations(const spw_engine *e)
{
    return e->generations;
}

const spw_optimizer *
spw__engine_optimizer(const spw_engine *e)
{
    return e->optimizer;
}

const spw_config *
spw__engine_config(const spw_engine *e)
{
    return &e->config;
}
