/*
 * What an engine needs before it takes anything: its shapes run dry through the tape, tables counted, and all of it handed to
 * the planner as plain numbers.
 */
#include "engine_internal.h"
#include "spw_files.h"
#include "spw_data.h"
#include <math.h>

/* ---------------------------------------------------------------- measuring, before anything is allocated */

/* Pages of the program and its libraries that a training process touches after its plan was made: measured, rounded up. */
enum { LIBRARY_BYTES = 5 << 18 };

/* How far a dry run goes: to the block's end, back to its weights, or to what enters it. */
typedef enum reach { FORWARD, TO_WEIGHTS, TO_INPUT } reach;

/* Of which parameters a dry backward has made the gradient of what they are multiplied by. */
static void
note_passes(spw_engine *e, const block_run *run)
{
    const spw_block *b = &e->model->blocks[run->block_idx];
    for (uint32_t k = 0; k < b->param_count; k++)
        e->passes[b->param_ids[k]] |= run->params[k] != NULL && run->params[k]->passes;
    e->back[run->block_idx] |= spw_tape_passed(e->tape);
}

/*
 * Runs a block dry, on a tape that was reset; logit_rows as below. What goes back from the lowest trained block to what enters it, which other
 * chains may ask for, is none of what is counted.
 */
static spw_status
dry_run(spw_engine *e, uint32_t block_idx, const spw_batch *batch, uint64_t logit_rows, reach to, spw_error *err)
{
    bool head = block_idx + 1 == e->model->block_count;
    block_run run = {.block_idx = block_idx};
    spw_value *x = NULL, *y;
    run.unit_count = spw__block_units(e, block_idx, run.units);
    if (block_idx > 0)
        x = spw_tape_input(e->tape, NULL, head && logit_rows > 0 ? logit_rows : batch->sequences * batch->positions,
                           spw_model_row_cols(&e->model->config), to == TO_INPUT);
    if (x != NULL)
        x->grad = x->data;
    y = spw__call_forward(e, &run, batch, x, true, head && logit_rows > 0);
    if (y != NULL && !head)
        y->grad = y->data; /* it lies in the flow */
    if (to != FORWARD)
        spw_tape_backward(e->tape, y);
    if (to == (block_idx > e->lowest ? TO_INPUT : TO_WEIGHTS))
        note_passes(e, &run);
    if (spw_tape_check(e->tape, err) == SPW_OK && y != NULL)
        return SPW_OK;
    spw_error_wrap(err, "block %s", e->model->blocks[block_idx].name);
    return SPW_EINVAL;
}

/* The same of one part of a call, on a tape that was not. */
static spw_status
dry_part(spw_engine *e, uint32_t block_idx, const spw_batch *batch, spw_part part, reach to, spw_error *err)
{
    void *const unseen = (void *)(uintptr_t)256;
    spw_apart apart = {.read = unseen, .sums = unseen, .routing = unseen, .dy = unseen};
    spw_tape_reset(e->tape, NULL, 0, to != FORWARD);
    spw_tape_call_part(e->tape, part, &apart, 0, 1);
    return dry_run(e, block_idx, batch, 0, to, err);
}

static void
note_most(uint64_t *most, uint64_t bytes)
{
    if (bytes > *most)
        *most = bytes;
}

/* A block that is called in parts, of which none needs what another one does; in one it is so for a context's logits alone. */
static spw_status
measure_parts(spw_engine *e, uint32_t block_idx, const spw_batch *batch, uint64_t *bytes_out, spw_error *err)
{
    spw_batch one = *batch;
    one.sequences = 1;
    spw_tape_reset(e->tape, NULL, 0, false);
    SPW_TRY(dry_run(e, block_idx, &one, 0, FORWARD, err));
    note_most(bytes_out, spw_tape_arena_used(e->tape));
    for (spw_part part = SPW_PART_BEFORE; part <= SPW_PART_BACK; part++) {
        const bool back = part >= SPW_PART_BACK_TURN;
        if (part == (spw__keeps_read(e, block_idx) ? SPW_PART_BACK_BEFORE : SPW_PART_BACK_READ))
            continue;
        SPW_TRY(dry_part(e, block_idx, batch, part, back ? TO_INPUT : FORWARD, err));
        note_most(bytes_out, spw_tape_arena_used(e->tape));
        if (block_idx == e->lowest && back)
            SPW_TRY(dry_part(e, block_idx, batch, part, TO_WEIGHTS, err));
        if (e->trades != NULL)
            *(part >= SPW_PART_BACK_BEFORE ? &e->trades[block_idx].backward : &e->trades[block_idx].forward) +=
                spw_tape_traded(e->tape);
        if (block_idx >= e->lowest && part >= SPW_PART_BACK_BEFORE && part != SPW_PART_BACK_TURN)
            e->again_flops += (double)spw_tape_linear_flops(e->tape);
    }
    return SPW_OK;
}

/*
 * Bytes of tape memory that the largest block needs, forward and backward, with nothing computed, if more than *bytes_out.
 * logit_rows: the head makes logits of so many rows; 0: the loss of all. In e->tape_bytes what forward leaves there at most, in
 * blocks that are not the last, and in e->again_flops what backward computes again.
 */
static spw_status
measure_arena(spw_engine *e, uint64_t sequences, uint64_t positions, uint64_t logit_rows, uint64_t *bytes_out,
              spw_error *err)
{
    static const int32_t targeted; /* not looked at */
    spw_batch batch = {.sequences = sequences,
                       .positions = positions,
                       .preference = e->prefers ? &e->preference : NULL,
                       .targeted = e->hides_targets ? &targeted : NULL};
    spw_front_cache front;
    for (uint32_t b = 0; b < e->model->block_count; b++) {
        bool head = b + 1 == e->model->block_count;
        if (spw__shares_turns(e, b)) {
            SPW_TRY(measure_parts(e, b, &batch, bytes_out, err));
            continue;
        }
        spw_tape_reset(e->tape, NULL, 0, false);
        if (e->cache_slots > 0 && positions == 1) /* as spw__engine_extend() does */
            spw_tape_use_cache(e->tape, NULL, 0, NULL, true);
        front = spw__front_cache(e, e->model->blocks[b].layer_idx);
        if (e->cache_slots > 0 && e->model->config.keys_are_values)
            spw_tape_use_front_cache(e->tape, &front);
        SPW_TRY(dry_run(e, b, &batch, logit_rows, FORWARD, err));
        note_most(bytes_out, spw_tape_arena_used(e->tape));
        if (e->trades != NULL)
            e->trades[b].forward = e->trades[b].again = spw_tape_traded(e->tape);
        if (e->inference)
            continue;
        if (!head) { /* whose forward is part of its backward */
            spw_tape_reset_keeping(e->tape, NULL, 0);
            SPW_TRY(dry_run(e, b, &batch, logit_rows, FORWARD, err));
            note_most(&e->tape_bytes, spw_round_up(spw_tape_arena_used(e->tape), 4096));
        }
        spw_tape_reset(e->tape, NULL, 0, true);
        SPW_TRY(dry_run(e, b, &batch, logit_rows, TO_INPUT, err));
        note_most(bytes_out, spw_tape_arena_used(e->tape));
        if (b == e->lowest) {
            spw_tape_reset(e->tape, NULL, 0, true);
            SPW_TRY(dry_run(e, b, &batch, logit_rows, TO_WEIGHTS, err));
        }
        if (e->trades != NULL)
            e->trades[b].backward = spw_tape_traded(e->tape) - e->trades[b].again;
        if (!head && b >= e->lowest)
            e->again_flops += (double)spw_tape_linear_flops(e->tape);
    }
    e->send_bytes = spw_tape_sent_most(e->tape);
    return SPW_OK;
}

/* How many blocks use each unit, and what the largest block takes. */
static spw_status
measure_blocks(spw_engine *e, spw_error *err)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX];
    e->users = spw_mem_calloc(e->layout.unit_count, sizeof *e->users);
    e->passes = spw_mem_calloc(e->model->param_count, sizeof *e->passes);
    e->back = spw_mem_calloc(e->model->block_count, sizeof *e->back);
    if (e->users == NULL || e->passes == NULL || e->back == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "plan of %u units", e->layout.unit_count);
    for (uint32_t b = 0; b < e->model->block_count; b++) {
        uint32_t n = spw__block_units(e, b, units);
        for (uint32_t k = 0; k < n; k++)
            e->users[units[k]]++;
        note_most(&e->block_elems, spw__block_elems(e, b));
    }
    return SPW_OK;
}

/* What is the same in all plans of an engine, whatever is chosen: measured once. */
static spw_status
measure_all(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    SPW_TRY(measure_blocks(e, err));
    if (e->sequence_ranks > 1 && (e->trades = spw_mem_calloc(e->model->block_count, sizeof *e->trades)) == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "plan of %u blocks", e->model->block_count);
    if (e->cache_slots == 0)
        return measure_arena(e, e->B, e->own_T, e->inference && !o->losses, &e->arena_bytes, err);
    /* a piece of a prompt, or a token of each sequence, whose logits come from one call */
    SPW_TRY(measure_arena(e, 1, e->T, e->B, &e->arena_bytes, err));
    return measure_arena(e, e->B, 1, e->B, &e->arena_bytes, err);
}

/* ---------------------------------------------------------------- counting */

/* How often gradients of pieces leave the device in a step beyond once a pass. */
static uint64_t
piece_returns(const spw_engine *e, uint64_t passes)
{
    uint64_t most = passes;
    for (uint32_t u = 0; u < e->layout.unit_count; u++) {
        uint64_t leaves = spw__piece_leaves(e, u);
        most = leaves > most ? leaves : most;
    }
    return most - passes;
}

static uint64_t
add_grad_buffer(spw_engine *e, uint64_t elems, uint32_t owner, uint32_t kind)
{
    if (elems == 0)
        return 0;
    e->buffers[e->buffer_count++] = (grad_buffer){.elems = elems, .unit_idx = UINT32_MAX, .owner = owner, .kind = kind};
    return elems * sizeof(float);
}

bool
spw__made_there(const spw_engine *e)
{
    return e->holds && e->world == 1;
}

/*
 * Gradient buffers: one of its own for a unit with several users. The others' gradients are made in turn, those of a kind in the largest
 * one and in a second one, which need hold only the smaller of any two neighbours; single: in the largest alone, which each leaves before
 * the next begins. Passes that hold them have one for each unit. What comes in turns has its gradient sent when its
 * turn is over, whoever uses it later.
 */
static uint64_t
size_grad_buffers(spw_engine *e, uint32_t chain_extra, bool single)
{
    uint64_t largest[GRAD_KINDS] = {0}, second[GRAD_KINDS] = {0}, before[GRAD_KINDS] = {0}, bytes = 0;
    e->buffer_count = 0;
    for (uint32_t u = 0; u < e->layout.unit_count; u++) {
        const uint32_t kind = spw__grad_kind(e, u);
        uint64_t elems = spw__grad_elems(e, u), smaller = elems < before[kind] ? elems : before[kind];
        if (!e->layout.units[u].trainable)
            continue;
        if (e->holds || (e->users[u] > 1 && kind <= GRAD_BESIDE)) {
            bytes += add_grad_buffer(e, elems, u, kind);
            continue;
        }
        largest[kind] = elems > largest[kind] ? elems : largest[kind];
        second[kind] = smaller > second[kind] ? smaller : second[kind];
        before[kind] = elems;
    }
    for (uint32_t kind = 0; kind < GRAD_KINDS; kind++) {
        const uint32_t any_order = kind <= GRAD_BESIDE ? chain_extra : 0;
        for (uint32_t k = 0; k < 1 + any_order; k++)
            bytes += add_grad_buffer(e, largest[kind], UINT32_MAX, kind);
        if (!single)
            bytes += add_grad_buffer(e, any_order > 0 || kind > GRAD_BESIDE ? largest[kind] : second[kind], UINT32_MAX,
                                     kind);
    }
    return bytes;
}

/* Adds units that are used together, and stay until the use `until`; NULL: are counted only. */
static void
note_together(plan_use *uses, uint32_t *n, const uint32_t *units, uint32_t count, uint32_t until)
{
    for (uint32_t k = 0; uses != NULL && k < count; k++)
        uses[*n + k] = (plan_use){units[k], *n + count, until, false};
    *n += count;
}

/* Those of the uses from `first` on whose units a block before them uses, whose backward pass reads no weights. */
static void
note_later_ends(const spw_engine *e, plan_use *uses, uint32_t first, uint32_t n, uint32_t block_idx)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX], count = spw__block_units(e, block_idx, units);
    for (uint32_t i = first; uses != NULL && i < n; i++) {
        for (uint32_t k = 0; k < count; k++)
            uses[i].ends_later |= uses[i].unit_idx == units[k];
    }
}

/* Units that come in turns, upwards, or downwards as a backward pass has them. */
static void
note_turns(const spw_engine *e, plan_use *uses, uint32_t *n, const uint32_t *units, uint32_t count, bool downwards)
{
    for (uint32_t done = 0, each; done < count; done += each) {
        const uint32_t *rest = downwards ? units : units + done, *turn;
        each = spw__turn_units(e, rest, count - done, downwards);
        turn = downwards ? units + count - done - each : rest;
        note_together(uses, n, turn, each, *n + each);
    }
}

/*
 * Whether the experts of a block's turns are computed a second time in its backward pass before they go back: what reads their sum needs
 * it.
 */
static bool
comes_again(const spw_engine *e)
{
    return spw_model_reads_experts(&e->model->config) && e->in_turns;
}

/* The units of one pass in the order of their use; returns how many. uses may be NULL. */
static uint32_t
pass_uses(const spw_engine *e, plan_use *uses, uint32_t *forward_count)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX], n = 0, last = e->chain_count - 1;
    for (uint32_t at = 0; at < last + e->chain_count - e->lowest;
         at++) { /* the last block runs in the backward pass only */
        uint32_t block_idx = e->chain[at < last ? at : 2 * last - at];
        uint32_t count = spw__block_units(e, block_idx, units);
        uint32_t held = spw__block_turns(e, units, count), turns = count - held;
        bool pieces = turns > 0 && e->layout.of_vocab[units[held]], seen = pieces && at == last; /* before losses */
        uint32_t micros = pieces ? e->group_max : 1;
        const bool experts_back = turns > 0 && !pieces && at >= last;
        const bool again = seen || (experts_back && comes_again(e));
        const bool goes = !experts_back || (e->back[block_idx] & SPW_PASSED_EXPERTS) != 0;
        if (at == last)
            *forward_count = n;
        if (at > last && spw_model_is_embedding(e->model, block_idx)) {
            note_later_ends(e, uses, *forward_count, n, block_idx);
            continue;
        }
        note_together(uses, &n, units, held, n + held + micros * turns * (again + goes));
        for (uint32_t micro = 0; micro < micros; micro++) {
            if (again)
                note_turns(e, uses, &n, units + held, turns, false);
            if (goes)
                note_turns(e, uses, &n, units + held, turns, at >= last);
        }
    }
    return n;
}

/* And of the keys in front, of which the t-th row may read one for so many rows before it. */
static double
fronts_read(const spw_model_config *m, uint64_t layer_idx, double T)
{
    const double rate = (double)spw_model_front_rate(m, layer_idx), all = rate > 0 ? floor(T / rate) : 0;
    return all > 0 ? all * (T + 1 - rate * (all + 1) / 2) / T : 0;
}

/* What a row of a layer reads on average: half of the keys, or all but a window, or half of its chunk, of which the last is cut. */
static double
keys_read(const spw_model_config *m, uint64_t layer_idx, double T)
{
    double W = (double)spw_model_window(m, layer_idx), C = (double)spw_model_chunk(m, layer_idx);
    double rest = C > 0 ? fmod(T, C) : 0;
    if (C > 0)
        return (C * (T - rest) + rest * rest) / (2 * T);
    if (m->keys_are_values)
        return fronts_read(m, layer_idx, T) + (W > T ? T / 2 : W - W * W / (2 * T));
    return W == 0 || W > T ? T / 2 : W - W * W / (2 * T);
}

/* Of a row in a layer's linear attention, which reads a state twice and writes it; Mamba-2 reads it once. */
static double
linear_attention_flops(const spw_model_config *m, uint64_t layer_idx)
{
    if (!spw_model_has_linear(m, layer_idx))
        return 0;
    return (m->linear_mamba ? 4.0 : 6.0) * (double)(m->linear_heads * m->linear_key_dim * m->linear_value_dim);
}

/* Of a row in a layer's attention of keys. */
static double
attention_flops(const spw_model_config *m, uint64_t layer_idx, double T)
{
    if (!spw_model_attends(m, layer_idx) || spw_model_is_linear(m, layer_idx))
        return 0;
    return 2.0 * (double)(m->heads * (spw_model_head_dim(m, layer_idx) + spw_model_value_dim(m, layer_idx))) *
           keys_read(m, layer_idx, T);
}

/* Of a row's scores in a layer's indexer, if that chooses. */
static double
choice_flops(const spw_engine *e, uint64_t layer_idx)
{
    const spw_model_config *m = &e->model->config;
    const double all = m->keys_are_values ? 2 * fronts_read(m, layer_idx, (double)e->T) : (double)e->T;
    return e->chooses && spw_model_has_indexer(m, layer_idx) ? (double)(m->index_heads * m->index_dim) * all : 0;
}

/*
 * Of a step: each matrix twice per element and token forward, again for recomputing what backward reads, and in backward for its own
 * gradient and for that of what it is multiplied by, where they are made; forward alone below the lowest block that is trained. And so the products of attention, and of what chooses its keys,
 * which backward finds where the next layer does. Experts in pieces are not
 * kept, so backward computes them again in any case, if it goes through them, and those in turns too; and where their sum is read, once more for it, unless that is kept.
 */
static void
count_flops(const spw_engine *e, plan_input *in)
{
    const spw_model_config *m = &e->model->config;
    const bool in_pieces = spw_nn_tile_rows(e->B, e->own_T, spw__tile_tokens(&e->config, e->model)) < e->rows;
    double tokens = (double)(e->config.accumulation * e->rows), forward = 0, backward = 0;
    double again = e->again_flops / (double)e->rows, twice = 0, attention = 0, attention_again = 0;
    for (uint32_t b = 1; b < e->model->block_count; b++) { /* the first looks embeddings up */
        const spw_block *block = &e->model->blocks[b];
        const double rows = b + 1 == e->model->block_count ? e->targeted_share : 1;
        const bool goes = (e->back[b] & SPW_PASSED_EXPERTS) != 0;
        for (uint32_t k = 0; k < block->param_count; k++) {
            const spw_param *p = &e->model->params[block->param_ids[k]];
            const bool chosen = p->expert > 0 || p->of_experts;
            double share = chosen ? (double)m->choices / (double)m->experts : rows; /* of the rows that meet it */
            double product = p->ndim == 2 && (!p->of_indexer || e->chooses) ? 2 * share * (double)(p->rows * p->cols)
                                                                            : 0; /* taps multiply no matrix */
            forward += product;
            if (b >= e->lowest) {
                backward += product * ((p->frozen ? 0 : 1) + (e->passes[block->param_ids[k]] ? 1 : 0));
                again += chosen && (spw_model_reads_experts(m) || (!in_pieces && (goes || !e->in_turns))) ? product : 0;
                twice += chosen && in_pieces && goes ? product : 0;
            }
        }
    }
    for (uint64_t l = 0; l < m->layers; l++) {
        const double keys = attention_flops(m, l, (double)e->T), linear = linear_attention_flops(m, l);
        const unsigned back = l + 1 < e->model->block_count ? e->back[l + 1] : 0;
        double product = keys + linear, choice = choice_flops(e, l), choices = 0; /* made again */
        const bool trained = l + 1 >= e->lowest; /* the first block has the embeddings */
        const bool twice_more = e->shares_turns && l + 1 < e->read_kept_from && spw_model_experts(m, l) > 0;
        attention += (!trained ? 1 : twice_more ? 3 : 2) * product;
        attention += (back & SPW_PASSED_ATTENTION ? 2 * keys : 0) + (back & SPW_PASSED_LINEAR ? 2 * linear : 0);
        attention_again += !trained ? 0 : twice_more ? 2 * product : product;
        if (trained)
            choices = (spw_model_lends_choice(m, l) ? 0 : choice) + (twice_more ? choice : 0);
        attention += choice + choices;
        attention_again += choices;
    }
    in->recompute_flops = tokens * (again + attention_again);
    in->flops = tokens * (forward + again + backward + attention);
    in->twice_flops = tokens * twice;
    in->attention_flops = tokens * attention;
    in->attention_again = tokens * attention_again;
}

/* Of the head's logits, where they are made twice. */
static double
logit_flops(const spw_engine *e)
{
    const spw_block *head = &e->model->blocks[e->model->block_count - 1];
    double sum = 0;
    for (uint32_t k = 0; k < head->param_count; k++) {
        const spw_place *at = &e->layout.places[head->param_ids[k]];
        bool again = at->pieces > 1 || (e->prefers && e->model->params[head->param_ids[k]].ndim > 1);
        sum += again ? 2 * (double)at->elems : 0;
    }
    return sum * e->targeted_share * (double)(e->config.accumulation * e->rows);
}

uint32_t
spw__engine_workers(const spw_engine *e)
{
    return e->config.run.optimizer_threads > 0 ? e->config.run.optimizer_threads : spw__engine_cpus(e);
}

/* Ranks of this host on this one's processors, it among them. */
static uint32_t
cpu_sharers(const spw_engine *e)
{
    return e->comm != NULL ? spw_comm_get_info(e->comm)->cpu_sharers : e->local_world;
}

uint32_t
spw__engine_cpus(const spw_engine *e)
{
    uint32_t each = spw_cpu_allowed_count() / cpu_sharers(e);
    return each > 0 ? each : 1;
}

spw_aio_options
spw__engine_aio(const spw_config *c)
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
                        .aio = spw__engine_aio(&e->config)};
    spw_act_tables tables;
    spw_act_compute_tables(&c, &tables);
    return tables;
}

/*
 * What threads map and do not touch: OpenBLAS maps 128 MiB for each that computes, and where that is refused tries again for
 * ever; and there are stacks. VmPeak less VmHWM of the demo with 1, 2 and 4 computing threads: 346, 497 and 800 MiB, of which
 * some 200 are mapped before the plan.
 */
static uint64_t
untouched_bytes(const spw_engine *e)
{
    return (160ull << 20) * spw_gpu_get_info(e->gpu)->thread_count + (16ull << 20) * (spw__engine_workers(e) + 2);
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

/* The largest chunk whose weights are codes: elements, and bytes of codes, which may be another one's. 0: there is none. */
static uint64_t
largest_coded(const spw_layout *l, uint64_t *codes)
{
    uint64_t largest = 0;
    *codes = 0;
    for (uint32_t u = 0; u < l->unit_count; u++) {
        const spw_store_unit *unit = &l->units[u];
        const bool is = unit->form != SPW_QUANT_NONE && unit->chunk_count > 0;
        const uint64_t elems = is ? l->chunks[unit->chunk_first].elems : 0; /* the first is the largest of a unit */
        const uint64_t bytes = is ? spw_store_weight_bytes(elems, 0, unit->form) : 0;
        largest = elems > largest ? elems : largest;
        *codes = bytes > *codes ? bytes : *codes;
    }
    return largest;
}

/*
 * What brings chunks of the device to workers, and what codes decode to: for each the largest one's weights, codes and record; and
 * what updates there tell.
 */
static uint64_t
stage_bytes(const spw_engine *e)
{
    spw_state_format f = e->config.run.state_format;
    bool there = !e->host_addressable && (e->device_updates || e->config.zero.offload_param == SPW_TIER_DEVICE);
    uint64_t record = e->device_updates ? spw__plan_largest_trained(&e->layout) : 0, codes,
             coded = largest_coded(&e->layout, &codes);
    uint64_t weights = there ? spw__plan_largest_chunk(&e->layout) : coded;
    uint64_t one = spw_round_up(weights * spw_state_weight_bytes(f), 4096) + (there ? codes : 0) +
                   spw_round_up(spw_state_record_bytes(f, e->optimizer, record), 4096);
    return spw_store_stages(spw__engine_workers(e)) * one +
           (e->device_updates ? spw_store_told_bytes(e->layout.chunk_count) : 0);
}

/*
 * Host memory that appears after the plan and outside of arena and device: tables of engine and store, the caller's
 * batches, checkpoints, stacks, BLAS, and library code that is first run then.
 */
uint64_t
spw__partial_bytes(const spw_engine *e)
{
    return spw__layout_trained(&e->layout) / 4096 * sizeof *e->partials;
}

static uint64_t
table_bytes(const spw_engine *e, const spw_engine_options *o, uint32_t trace_capacity)
{
    const spw_config *c = &e->config;
    uint64_t units = e->layout.unit_count, chunks = e->layout.chunk_count, params = e->layout.param_count;
    spw_store_config store = {.unit_count = e->layout.unit_count,
                              .chunk_count = e->layout.chunk_count,
                              .worker_count = spw__engine_workers(e),
                              .path_count = c->zero.param_path.count > c->zero.optimizer_path.count
                                                ? c->zero.param_path.count
                                                : c->zero.optimizer_path.count,
                              .weight_slot_count = c->run.weight_slots,
                              .record_slot_count = c->run.record_slots,
                              .file_count = e->in_place.file_count,
                              .aio = spw__engine_aio(c)};
    uint64_t own = spw_touched_bytes(spw__partial_bytes(e)) + MODE_COUNT * trace_capacity * sizeof(uint32_t) +
                   e->future_max * sizeof *e->future +
                   units * (sizeof *e->notes + sizeof *e->buffers + 4 * sizeof(uint64_t)) +
                   (params + 2 * chunks) * sizeof *e->ranges + (chunks + 1) * sizeof *e->range_first;
    own += e->in_place.piece_count * sizeof *e->in_place.pieces;
    uint64_t batches = e->micro_max * e->B * e->T * 2 * sizeof(int32_t);
    if (e->sequence_ranks > 1)
        own += 2 * e->rows * sizeof *e->own_ids + e->model->block_count * sizeof *e->trades;
    if (!e->host_addressable)
        own += spw__losses_bytes(e);
    own += spw__documents_bytes(e);
    own += e->hides_targets ? e->rows * sizeof *e->targeted_host + e->micro_max * sizeof *e->targeted_counts : 0;
    own += spw__pairs_bytes(e) + (e->prefers ? e->micro_max * sizeof *e->pair_counts : 0);
    own += stage_bytes(e);
    if (e->world > 1)
        own += e->future_max * sizeof *e->future + spw__ranks_table_bytes(e) +
               spw_comm_table_bytes(NULL, e->world,
                                    e->comm != NULL ? spw_comm_get_info(e->comm)->local_world : e->local_world,
                                    spw__ranks_channels(&e->zeropp, e->sequence_ranks));
    own += activation_tables(e).table_bytes + (uint64_t)e->kept_slots * e->group_max * sizeof *e->activation_places;
    store.weight_slot_count = store.weight_slot_count > chunks ? store.weight_slot_count : e->layout.chunk_count;
    store.record_slot_count = store.record_slot_count > chunks ? store.record_slot_count : e->layout.chunk_count;
    if (o->resumes || c->run.checkpoint_dir[0] != '\0' || (!e->inference && c->model_path[0] != '\0'))
        own += spw__checkpoint_bytes(e->model, &e->layout, e->optimizer, spw__engine_workers(e));
    else if (c->model_path[0] != '\0')
        own += spw_bounce_bytes(spw__checkpoint_buffers(spw__engine_workers(e)));
    return spw_round_up(o->caller_bytes + own + batches + spw_store_table_bytes(&store) + spw_gpu_work_bytes(e->gpu) +
                            product_bytes(e) + LIBRARY_BYTES,
                        4096);
}

/* ---------------------------------------------------------------- what layers keep of running sequences */

enum { CACHE_ALIGN = 64 };

uint64_t
spw__cache_width(const spw_engine *e, uint64_t layer_idx)
{
    const spw_model_config *m = &e->model->config;
    return (m->family == SPW_FAMILY_GPT2 ? m->heads : spw_model_kv_heads(m, layer_idx)) *
           spw_model_head_dim(m, layer_idx);
}

/* Of a layer whose keys stand for several rows, and one sequence: how many such keys, and bytes of what they are made of, once, of D elements. */
static uint64_t
front_keys(const spw_engine *e, uint64_t layer_idx)
{
    const uint64_t rate = spw_model_front_rate(&e->model->config, layer_idx);
    return rate > 0 ? spw_round_up(e->cache_positions / rate, SPW_FRONT_TILE) : 0; /* as attention wants them */
}

static uint64_t
front_rows(const spw_engine *e, uint64_t layer_idx, uint64_t D)
{
    const spw_model_config *m = &e->model->config;
    const uint64_t parts = spw_model_front_overlaps(m, layer_idx) ? 2 : 1;
    return front_keys(e, layer_idx) > 0 ? parts * spw_model_front_rate(m, layer_idx) * parts * D * e->compute_bytes : 0;
}

/* The bytes of such a layer's arrays, of all sequences. */
static void
size_fronts(const spw_engine *e, uint64_t layer_idx, layer_cache *c)
{
    const uint64_t keys = front_keys(e, layer_idx), D = e->model->config.index_dim;
    const uint64_t index = keys * D * e->compute_bytes + 2 * front_rows(e, layer_idx, D);
    c->bytes[0] = e->cache_slots * (keys + e->cache_positions) * spw__cache_width(e, layer_idx) * e->compute_bytes;
    c->bytes[1] = e->cache_slots * 2 * front_rows(e, layer_idx, spw__cache_width(e, layer_idx));
    c->bytes[2] = e->chooses && spw_model_has_indexer(&e->model->config, layer_idx) ? e->cache_slots * index : 0;
    for (int k = 0; k < 3; k++)
        c->bytes[k] = spw_round_up(c->bytes[k], CACHE_ALIGN);
}

/*
 * Every layer up to this one has its own; one of linear attention keeps as much whatever the number of positions is. An indexer's keys come third,
 * and what linear attention beside attention keeps behind them.
 */
static layer_cache
own_cache(const spw_engine *e, uint64_t layer_idx)
{
    const spw_model_config *m = &e->model->config;
    uint64_t state = m->linear_heads * m->linear_key_dim * m->linear_value_dim * sizeof(float);
    uint64_t taps = m->linear_heads > 0 ? (m->linear_taps - 1) * spw_model_linear_channels(m) * e->compute_bytes : 0;
    layer_cache c = {.at = 0};
    for (uint64_t l = 0; l <= layer_idx; l++) {
        uint64_t keys = spw_model_attends(m, l) ? e->cache_positions * spw__cache_width(e, l) * e->compute_bytes : 0;
        bool linear = spw_model_is_linear(m, l);
        c.at += c.bytes[0] + c.bytes[1] + c.bytes[2] + c.beside[0] + c.beside[1];
        if (m->keys_are_values) {
            size_fronts(e, l, &c);
            continue;
        }
        c.bytes[0] = spw_round_up(e->cache_slots * (linear ? state : keys), CACHE_ALIGN);
        c.bytes[1] = spw_round_up(e->cache_slots * (linear ? taps : keys), CACHE_ALIGN);
        c.beside[0] = m->linear_beside ? spw_round_up(e->cache_slots * state, CACHE_ALIGN) : 0;
        c.beside[1] = m->linear_beside ? spw_round_up(e->cache_slots * taps, CACHE_ALIGN) : 0;
        c.bytes[2] =
            e->chooses && spw_model_has_indexer(m, l)
                ? spw_round_up(e->cache_slots * e->cache_positions * m->index_dim * e->compute_bytes, CACHE_ALIGN)
                : 0;
    }
    return c;
}

layer_cache
spw__cache_of_layer(const spw_engine *e, uint64_t layer_idx)
{
    return own_cache(e, spw_model_keys_of(&e->model->config, layer_idx));
}

spw_front_cache
spw__front_cache(const spw_engine *e, uint64_t layer_idx)
{
    const layer_cache c = spw__cache_of_layer(e, layer_idx);
    const uint64_t n = e->cache_slots, D = e->model->config.index_dim;
    const uint64_t index_rows = n * front_rows(e, layer_idx, D);
    char *at = (e->cache != NULL ? e->cache : (char *)(uintptr_t)4096) + c.at + c.bytes[0];
    spw_front_cache f = {.keys = front_keys(e, layer_idx), .kv = at};
    f.gate = at + n * front_rows(e, layer_idx, spw__cache_width(e, layer_idx));
    at += c.bytes[1];
    f.index_keys = at;
    f.index_kv = at + n * f.keys * D * e->compute_bytes;
    f.index_gate = (char *)f.index_kv + index_rows;
    return f;
}

/* Every block between the first and the last may hold an attention; the last ones may read another's keys. */
uint64_t
spw__cache_bytes(const spw_engine *e)
{
    return own_cache(e, e->model->block_count - 2 - e->model->config.readers).at;
}

uint64_t
spw__losses_bytes(const spw_engine *e)
{
    return e->micro_max * e->rows * sizeof *e->losses;
}

/* A document with a target has two tokens. */
uint64_t
spw__pairs_max(const spw_engine *e)
{
    return e->prefers ? e->rows / 4 : 0;
}

uint64_t
spw__pairs_bytes(const spw_engine *e)
{
    return e->micro_max * spw__pairs_max(e) * sizeof *e->pairs;
}

uint64_t
spw__documents_bytes(const spw_engine *e)
{
    spw_documents documents = SPW_DOCUMENTS_PACKED;
    (void)spw_documents_parse(e->config.data.documents, &documents);
    return documents >= SPW_DOCUMENTS_SEPARATE && e->cache_slots == 0 ? 4 * e->B * e->T * sizeof *e->window : 0;
}

uint64_t
spw__chunks_bytes(const spw_engine *e)
{
    const uint64_t chunk = e->model->config.chunk, micros = spw__documents_bytes(e) > 0 ? e->micro_max : 1;
    return chunk > 0 && spw__table_positions(e) > chunk ? 2 * micros * e->B * e->T * sizeof *e->chunks : 0;
}

/* How many positions a table of rotary positions has. */
uint64_t
spw__table_positions(const spw_engine *e)
{
    return e->cache_slots > 0 ? e->cache_positions : e->T;
}

/* Of all tables. */
uint64_t
spw__rope_elems(const spw_engine *e)
{
    const spw_model_config *m = &e->model->config;
    return spw_model_rope_tables(m) * spw_model_rope_elems(m, spw__table_positions(e));
}

uint64_t
spw__sides_bytes(const spw_engine *e)
{
    uint64_t sum = 0;
    for (uint32_t k = 0; k < SPW_SIDES_MAX; k++)
        sum += spw_model_side_cols(&e->model->config, k);
    return spw_round_up(sum * e->group_max * e->rows * e->compute_bytes * (e->inference ? 1 : 2), 4096);
}

uint64_t
spw__choice_words(const spw_engine *e)
{
    return e->chooses ? (spw_model_index_keys(&e->model->config, spw__table_positions(e)) + 31) / 32 : 0;
}

/* In training until the layer that leaves them goes back, else until the next one that does. */
uint64_t
spw__choices_bytes(const spw_engine *e)
{
    uint64_t lenders = 0;
    for (uint64_t l = 0; l < e->model->config.layers; l++)
        lenders += spw_model_lends_choice(&e->model->config, l);
    lenders = e->inference && lenders > 1 ? 1 : lenders;
    return spw_round_up(lenders * e->group_max * e->rows * spw__choice_words(e) * sizeof(uint32_t), 4096);
}

uint64_t
spw__deferred_bytes(const spw_engine *e)
{
    return e->defers ? e->config.accumulation * e->rows * spw_model_row_cols(&e->model->config) * e->compute_bytes : 0;
}

/* ---------------------------------------------------------------- the plan */

/* What a step reads of its batches, and what else lies on the device all the time that is no weight and no state. */
static uint64_t
batch_device(const spw_engine *e)
{
    const uint64_t rows = e->micro_max * e->rows;
    uint64_t bytes = 4096 * 8 + rows * 12 + e->rows * 4 + spw__rope_elems(e) * sizeof *e->cos_sin;
    if (spw__documents_bytes(e) > 0)
        bytes += 4096 + rows * 4 + 2 * e->micro_max * e->B * e->T * 4;
    bytes += spw__chunks_bytes(e) > 0 ? 4096 + spw__chunks_bytes(e) : 0;
    bytes += e->hides_targets ? 4096 + rows * sizeof *e->targeted : 0;
    bytes += e->prefers ? 4096 + spw__pairs_bytes(e) : 0;
    bytes += spw__deferred_bytes(e) + spw__sides_bytes(e) + spw__choices_bytes(e) + spw__orthogonal_bytes(e);
    bytes += spw__cache_bytes(e) + e->cache_slots * 8;
    return spw_round_up(bytes, 4096);
}

/* What a plan counts with: of the machine, of formats and options, and of what the engine has chosen so far. */
static plan_input
input_of_choices(spw_engine *e, const spw_engine_options *o)
{
    const uint64_t passes = (e->config.accumulation + e->group_max - 1) / e->group_max;
    const spw_optimizer *beside = spw__optimizer_for(e->optimizer, false);
    return (plan_input){
        .config = &e->config,
        .layout = &e->layout,
        .local_ranks = e->local_world,
        .cpu_ranks = cpu_sharers(e),
        .device_ranks = e->device_sharers,
        .path_ranks = {e->path_ranks[0], e->path_ranks[1]},
        .path_free = {e->path_free[0], e->path_free[1]},
        .inference = e->inference,
        .largest_block_bytes = e->block_elems * e->compute_bytes,
        .weight_bytes = spw_state_weight_bytes(e->config.run.state_format),
        .record_bytes_32 = {spw_state_record_bytes_32(e->config.run.state_format, beside),
                            spw_state_record_bytes_32(e->config.run.state_format, e->optimizer)},
        .grad_bytes = spw_dtype_bytes(e->config.run.grad_dtype),
        .compute_bytes = e->compute_bytes,
        .room_bytes = o->room_bytes,
        .device_in_host = e->host_addressable,
        .device_room = e->host_addressable ? 0 : spw_gpu_get_info(e->gpu)->memory_bytes / e->device_sharers,
        .device_asked = e->device_asked,
        .gather_most = e->gather_most,
        .single_grad = e->single_grad,
        .process_bytes = o->process_bytes,
        .device_updates = e->device_updates,
        .fills = e->fills_device,
        .device_share = e->device_share,
        .trial = e->trial,
        .unexplained = o->unexplained,
        .uncounted = o->uncounted && e->trial == NULL,
        .measured = e->measured,
        .given = o->rates != NULL || o->gpu != NULL,
        .displaces = e->displaces,
        .direct = !e->host_addressable && spw_state_weight_dtype(e->config.run.state_format) == e->compute_dtype,
        .gather_all = e->gather_all,
        .in_pieces = e->in_pieces,
        .piece_returns = piece_returns(e, passes),
        .passes = (uint32_t)passes,
        .holds = e->holds,
        .made_there = spw__made_there(e),
        .micro_batches = (uint32_t)e->config.accumulation,
        .expert_turns = e->in_turns ? ((uint32_t)e->model->config.experts + e->turn_experts - 1) / e->turn_experts : 0,
        .read_kept =
            spw__kept_slots(e, e->chain, e->lowest, e->chain_count) - spw__kept_blocks(e->lowest, e->chain_count),
        .future_max = e->future_max,
        .optimizer_threads = spw__engine_workers(e),
        .tables_bytes = table_bytes(e, o, e->traces[MODE_TRAIN].capacity),
        .stage_bytes = stage_bytes(e),
        .wire_host = spw__wire_host_bytes(e) + spw__sequences_host_bytes(e) + spw__orthogonal_host_bytes(e),
        .kept_host = spw__wire_kept_bytes(e),
        .coded_grads = e->zeropp.grads,
        .replicas = spw__replicas(e),
        .update_reads_weights = spw_state_update_reads_weights(e->config.run.state_format),
        .log_bytes_32 = {spw_opt_log_bytes_32(e->config.run.state_format, beside, false),
                         spw_opt_log_bytes_32(e->config.run.state_format, beside, true)},
        .tokens = e->config.accumulation * e->rows * e->world};
}

/* And what was measured and counted: working memory, operations, checkpoints, gradients. */
static void
add_measured(spw_engine *e, const spw_engine_options *o, plan_input *in)
{
    in->arena_device = spw_round_up(e->arena_bytes, 4096);
    in->tape_bytes = e->shares_turns ? 0 : e->tape_bytes; /* what is called in parts keeps nothing */
    in->flow_device = spw__flow_bytes(e);
    in->activation_elems = e->rows * spw_model_row_cols(&e->model->config);
    count_flops(e, in);
    in->twice_flops += logit_flops(e);
    in->orthogonal_flops = spw__orthogonal_flops(e);
    in->activation_slots = e->kept_slots;
    in->activation_slots_used = e->inference ? 0 : spw__kept_slots(e, e->chain, e->lowest, e->chain_count);
    in->activation_micros = e->group_max;
    in->activation_places = e->activation_places;
    in->activation_tables = activation_tables(e);
    if (!e->inference && e->grads_stay) {
        (void)size_grad_buffers(e, o->chain_extra, false);
    } else if (!e->inference) {
        in->grads_device_least = size_grad_buffers(e, o->chain_extra, true);
        in->grads_device = size_grad_buffers(e, o->chain_extra, false);
    }
    in->grads_device += spw__wire_device_bytes(e) + spw__sequences_device_bytes(e);
    in->grads_device_least += spw__wire_device_bytes(e) + spw__sequences_device_bytes(e);
    in->tapes_most = e->tapes_most;
    in->batch_device = batch_device(e);
}

/* The caller's: its paths are those of the caller's configuration, not of the engine's copy of it. */
static void
give_plan(const spw_engine *e, const spw_engine_options *o)
{
    *o->plan_out = e->plan;
    for (uint32_t i = 0; i < e->plan.path_count; i++)
        o->plan_out->paths[i] = (const char *)o->config + (e->plan.paths[i] - (const char *)&e->config);
}

spw_status
spw__make_one_plan(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    plan_input in = input_of_choices(e, o);
    plan_use *uses;
    spw_status st;
    add_measured(e, o, &in);
    in.use_count = o->fit_only ? 0 : pass_uses(e, NULL, &in.forward_count);
    in.uses = uses = spw_mem_calloc(in.use_count + 1, sizeof *uses);
    if (uses != NULL) {
        if (!o->fit_only)
            (void)pass_uses(e, uses, &in.forward_count);
        st = spw__plan_make(&e->plan, &in, err);
        e->plan.ranks = e->world;
        e->plan.local_ranks = e->local_world;
        e->plan.linked = e->linked;
        e->plan.gpu = o->plan_only ? o->gpu : NULL;
        if (st == SPW_OK && e->world > 1 && !e->inference && in.use_count > 0)
            st = spw__count_received(e, &in, err);
        spw__sequences_count(e);
        if (e->plan.single_grad)
            (void)size_grad_buffers(e, o->chain_extra, true);
    } else {
        st = SPW_RAISE(err, SPW_ENOMEM, "plan of %u uses", in.use_count);
    }
    spw_mem_free(uses);
    if (o->plan_out != NULL)
        give_plan(e, o);
    return st;
}

/* What is the same on all ranks, whatever their budgets: they look for each other's gradients where their own lie, and gather in one order. */
typedef struct shape {
    uint64_t gathered; /* bytes on the device; 0: nothing is gathered between ranks */
    int32_t lacks_room, single_grad, lands;
    uint32_t group, holds; /* how many micro-batches a pass takes, and whether passes hold sums */
    uint32_t tapes;        /* what is not computed again of attention of shared sequences; 0: none are */
} shape;

/*
 * SPW_ENOFIT on all ranks if one of them has it. Else what the next plans keep to: the least that one of them gathers, one gradient at
 * a time if one of them makes them so, room in shared memory for sums on their way to a device if one of them has state there, as much kept between
 * checkpoints of shared sequences as the least of them keeps, and no passes that hold sums unless all have chosen the same. *again: somebody's plan does not.
 */
static spw_status
agree_on_shape(spw_engine *e, spw_status st, bool *again, spw_error *err)
{
    shape own = {.gathered = e->layout.parts > 1 ? e->plan.cache_device : 0,
                 .lacks_room = st == SPW_ENOFIT,
                 .single_grad = e->plan.single_grad,
                 .lands = e->lands,
                 .group = e->group_max,
                 .holds = e->holds,
                 .tapes = e->sequence_ranks > 1 ? e->plan.tape_count : 0};
    void *heard;
    const shape *all;
    spw_error other = {0};
    uint32_t lacking = e->world; /* the first rank that has no room */
    spw_status told = spw__ranks_hear(e->comm, "plan", &own, &heard, sizeof own, &other);
    all = heard;
    e->gather_most = own.gathered;
    e->tapes_most = e->sequence_ranks > 1 ? own.tapes : UINT32_MAX;
    for (uint32_t r = 0; told == SPW_OK && r < e->world; r++) {
        lacking = lacking == e->world && all[r].lacks_room != 0 ? r : lacking;
        e->single_grad = e->single_grad || all[r].single_grad != 0;
        e->lands = e->lands || all[r].lands != 0;
        e->gather_most = all[r].gathered < e->gather_most ? all[r].gathered : e->gather_most;
        if (e->sequence_ranks > 1 && all[r].tapes < e->tapes_most)
            e->tapes_most = all[r].tapes;
    }
    *again = false;
    for (uint32_t r = 0; told == SPW_OK && r < e->world && lacking == e->world; r++) {
        if (all[r].group == own.group && all[r].holds == own.holds)
            continue;
        e->may_hold = false;
        *again = true;
    }
    for (uint32_t r = 0; told == SPW_OK && r < e->world && lacking == e->world; r++)
        *again = *again || all[r].gathered != e->gather_most ||
                 (e->sequence_ranks > 1 && all[r].tapes != e->tapes_most) ||
                 (all[r].single_grad != 0) != e->single_grad || (all[r].lands != 0) != e->lands;
    spw_mem_free(heard);
    if (told == SPW_OK && lacking < e->world)
        told = SPW_RAISE(&other, SPW_ENOFIT, "rank %u has no room for what ranks plan together, this one has", lacking);
    if (st == SPW_OK && told != SPW_OK && err != NULL)
        *err = other;
    return st != SPW_OK ? st : told;
}

static spw_status
plan_together(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    spw_engine_options own = *o;         /* what is free is read once: it changes, and ranks plan until they agree */
    const uint32_t group = e->group_max; /* what choices begin from, each time */
    const bool fills = e->fills_device, updates = e->device_updates, defers = e->defers;
    const double share = e->device_share;
    bool again = true;
    if (own.room_bytes == 0)
        own.room_bytes = spw_memory_room_bytes(untouched_bytes(e), e->local_world);
    if (own.process_bytes == 0)
        own.process_bytes = spw_round_up(spw_process_rss_bytes(), 1 << 20);
    SPW_TRY(measure_all(e, o, err)); /* behind what is read of the process, whose memory it takes */
    e->gather_most = 0;
    e->tapes_most = UINT32_MAX;
    e->single_grad = false;
    e->lands = e->device_updates || e->may_fill;
    while (again) {
        spw_status st;
        e->group_max = group;
        e->fills_device = fills;
        e->device_updates = updates;
        e->device_share = share;
        e->holds = false;
        e->defers = defers;
        st = spw__choose_plan(e, &own, err);
        if (e->comm == NULL || own.plan_only || (st != SPW_OK && st != SPW_ENOFIT))
            return st;
        SPW_TRY(agree_on_shape(e, st, &again, err));
    }
    return SPW_OK;
}

spw_status
spw__engine_make_plan(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    spw_status st = plan_together(e, o, err);
    spw_mem_free(e->users);
    spw_mem_free(e->passes);
    spw_mem_free(e->back);
    e->users = NULL;
    e->passes = NULL;
    e->back = NULL;
    return st;
}
