/*
 * Forward passes that make logits: of one context as a whole, or of new tokens after what the engine keeps the keys and
 * values of. Generation decides which tokens; this walks the chain once over them.
 */
#include "engine_internal.h"

/* n logits to host memory, there on return. */
static void
take_logits(const spw_engine *e, float *out, const spw_value *y, uint64_t n)
{
    spw_gpu_copy_d2h(e->compute, out, SPW_F32, y->data, e->compute_dtype, n, NULL);
    spw_gpu_queue_sync(e->compute);
}

/* An embedding has no row for what is outside the vocabulary, and would show what its memory held before. */
static spw_status
check_context(const spw_engine *e, const int32_t *tokens, uint64_t count, spw_error *err)
{
    if (count == 0 || count > e->T)
        return SPW_RAISE(err, SPW_EINVAL, "%llu tokens of context, at most %llu fit", (unsigned long long)count,
                         (unsigned long long)e->T);
    for (uint64_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (uint64_t)tokens[i] >= e->model->config.vocab)
            return SPW_RAISE(err, SPW_EINVAL, "token %d is outside the vocabulary of %llu", tokens[i],
                             (unsigned long long)e->model->config.vocab);
    }
    if (e->in_pieces) /* logits of all the vocabulary are nowhere */
        return SPW_RAISE(
            err, SPW_EUNSUPPORTED,
            "logits of a model whose embeddings and head come in pieces; with spillway.tile_vocab 0, or an "
            "engine for inference, there are some");
    return SPW_OK;
}

static spw_status
run_logits(spw_engine *e, const int32_t *tokens, uint64_t count, float *logits, spw_error *err)
{
    uint64_t width = spw_model_row_cols(&e->model->config);
    spw_batch batch = {.sequences = 1,
                       .positions = count,
                       .tokens = e->tokens,
                       .places = e->places,
                       .chunk_begins = spw__chunks_of(e, 0).begins};
    e->counting = false;
    SPW_TRY(spw__engine_unbroken(e, err));
    SPW_TRY(check_context(e, tokens, count, err));
    SPW_TRY(e->ranks != NULL ? spw__ranks_begin(e->ranks, NULL, err) : SPW_OK);
    spw_gpu_write_bytes(e->compute, e->tokens, tokens, count * sizeof *tokens);
    spw__cut_sequences(e);
    spw_trace_begin(&e->traces[MODE_EVAL]);
    spw__tell_future(e, MODE_EVAL);
    for (uint32_t c = 0; c < e->chain_count; c++) {
        block_run run = {.block_idx = e->chain[c]};
        bool head = c + 1 == e->chain_count;
        spw_value *x = NULL, *y;
        SPW_TRY(spw__acquire_block(e, MODE_EVAL, &run, err));
        spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
        if (c > 0)
            x = spw_tape_input(e->tape, spw__flow(e, c, 0) + (head ? (count - 1) * width * e->compute_bytes : 0),
                               head ? 1 : count, width, false);
        y = spw__call_forward(e, &run, &batch, x, false, head);
        if (spw_tape_check(e->tape, err) == SPW_OK && head)
            take_logits(e, logits, y, e->model->config.vocab);
        else if (y != NULL)
            spw_gpu_copy_d2d(e->compute, spw__flow(e, c + 1, 0), e->compute_dtype, y->data, e->compute_dtype,
                             count * width, NULL);
        spw__release_block(e, &run);
        SPW_TRY(spw_tape_check(e->tape, err));
    }
    spw_trace_end(&e->traces[MODE_EVAL]);
    return spw_gpu_check(e->gpu, err);
}

spw_status
spw_engine_logits(spw_engine *e, const int32_t *tokens, uint64_t count, float *logits, spw_error *err)
{
    spw_error own = {0};
    spw_status st = run_logits(e, tokens, count, logits, &own);
    if (st == SPW_OK)
        return st;
    if (err != NULL)
        *err = own;
    return spw__ranks_fail(e->ranks, st, &own);
}

/* Copies the rows whose logits are wanted side by side, to the turn after the last block's input. */
static char *
gather_rows(spw_engine *e, uint32_t c, const uint64_t *rows, uint32_t count)
{
    uint64_t width = spw_model_row_cols(&e->model->config);
    char *from = spw__flow(e, c, 0), *to = spw__flow(e, c + 1, 0);
    for (uint32_t i = 0; i < count; i++)
        spw_gpu_copy_d2d(e->compute, to + i * width * e->compute_bytes, e->compute_dtype,
                         from + rows[i] * width * e->compute_bytes, e->compute_dtype, width, NULL);
    return to;
}

/* The block at c over one part; its output goes on to the next turn. */
static spw_status
extend_part(spw_engine *e, block_run *run, uint32_t c, const engine_part *p, spw_error *err)
{
    uint64_t width = spw_model_row_cols(&e->model->config), n = p->sequences * p->positions;
    uint64_t row_bytes = width * e->compute_bytes, layer = c > 0 ? c - 1 : 0; /* the first block has no attention */
    spw_batch batch = {.sequences = p->sequences,
                       .positions = p->positions,
                       .tokens = e->tokens + p->row,
                       .places = e->places + p->row,
                       .chunk_begins = e->chunks != NULL ? e->chunks + p->row : NULL};
    layer_cache kept = spw__cache_of_layer(e, layer);
    char *first = e->cache + kept.at, *second = first + kept.bytes[0];
    const int32_t *slots = e->slots + p->sequence, *starts = e->starts + p->sequence;
    spw_attention_cache keys = {
        .key = first, .value = second, .capacity = e->cache_positions, .slots = slots, .starts = starts};
    bool linear = spw_model_is_linear(&e->model->config, layer), beside = e->model->config.linear_beside;
    char *state = beside ? second + kept.bytes[1] + kept.bytes[2] : first;
    char *before = beside ? state + kept.beside[0] : second;
    spw_delta_cache states = {.state = (float *)(void *)state, .before = before, .slots = slots, .starts = starts};
    const spw_front_cache fronts = spw__front_cache(e, layer);
    spw_value *x = NULL, *y;
    run->side_row = p->row;
    spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
    spw_tape_use_cache(e->tape, linear ? NULL : &keys, spw__cache_width(e, layer), batch.places, p->positions == 1);
    if (linear || beside)
        spw_tape_use_delta_cache(e->tape, &states);
    if (e->model->config.keys_are_values) {
        keys.value = keys.key;
        spw_tape_use_front_cache(e->tape, &fronts);
    }
    if (c > 0)
        x = spw_tape_input(e->tape, spw__flow(e, c, 0) + p->row * row_bytes, n, width, false);
    y = spw__call_forward(e, run, &batch, x, false, false);
    SPW_TRY(spw_tape_check(e->tape, err));
    spw_gpu_copy_d2d(e->compute, spw__flow(e, c + 1, 0) + p->row * row_bytes, e->compute_dtype, y->data,
                     e->compute_dtype, n * width, NULL);
    return SPW_OK;
}

spw_status
spw__engine_extend(spw_engine *e, const engine_extension *x, spw_error *err)
{
    uint32_t last = e->chain_count - 1;
    uint64_t rows = 0;
    int mode;
    SPW_ASSERT(e->cache_slots > 0 && x->logit_count <= e->cache_slots);
    for (uint32_t i = 0; i < x->part_count; i++)
        rows += x->parts[i].sequences * x->parts[i].positions;
    SPW_ASSERT(rows <= e->rows);
    /* Rows that choose at random leave out a seventh of the experts where there are twice as many choices as experts. */
    mode = e->layout.granule > 0 && rows * e->model->config.choices < 2 * e->model->config.experts ? MODE_CHOICE
                                                                                                   : MODE_EVAL;
    e->counting = false;
    SPW_TRY(e->ranks != NULL ? spw__ranks_begin(e->ranks, NULL, err) : SPW_OK);
    spw_gpu_write_bytes(e->compute, e->tokens, x->tokens, rows * sizeof *e->tokens);
    spw_gpu_write_bytes(e->compute, e->places, x->places, rows * sizeof *e->places);
    spw_gpu_write_bytes(e->compute, e->slots, x->slots, e->cache_slots * sizeof *e->slots);
    spw_gpu_write_bytes(e->compute, e->starts, x->starts, e->cache_slots * sizeof *e->starts);
    for (uint32_t i = 0; i < x->part_count && e->chunks != NULL; i++) {
        const engine_part *p = &x->parts[i];
        spw_gpu_chunks(e->compute, e->chunks + p->row, NULL, NULL, NULL, e->starts + p->sequence, p->sequences,
                       p->positions, e->model->config.chunk);
    }
    spw_trace_begin(&e->traces[mode]);
    spw__tell_future(e, mode);
    for (uint32_t c = 0; c <= last; c++) {
        block_run run = {.block_idx = e->chain[c]};
        spw_status st = SPW_OK;
        SPW_TRY(spw__acquire_block(e, mode, &run, err));
        for (uint32_t i = 0; i < x->part_count && c < last && st == SPW_OK; i++)
            st = extend_part(e, &run, c, &x->parts[i], err);
        if (c == last && x->logit_count > 0) {
            spw_batch batch = {.sequences = x->logit_count, .positions = 1};
            spw_value *y;
            spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
            spw_tape_use_cache(e->tape, NULL, 0, NULL, true);
            y = spw__call_forward(e, &run, &batch,
                                  spw_tape_input(e->tape, gather_rows(e, c, x->logit_rows, x->logit_count),
                                                 x->logit_count, spw_model_row_cols(&e->model->config), false),
                                  false, true);
            st = spw_tape_check(e->tape, err);
            if (st == SPW_OK)
                take_logits(e, x->logits, y, x->logit_count * e->model->config.vocab);
        }
        spw__release_block(e, &run);
        SPW_TRY(st);
    }
    spw_trace_end(&e->traces[mode]);
    SPW_TRY(spw_store_check(e->store, err));
    return spw_gpu_check(e->gpu, err);
}
