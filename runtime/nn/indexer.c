/*
 * The indexer of a layer (DeepSeek-AI 2025, 2512.02556): which keys attention reads where there are more than it is to read. Forward alone: nothing
 * of it has a gradient, and its parameters are frozen. It computes on a tape of its own over what is free in the arena, some rows at a
 * time, of which only bits stay, and keys of the call's rows; where a part by rows is made in tiles it is a tile's, whose rows find the keys of those before.
 */
#include "nn_internal.h"
#include "tape_internal.h"
#include <stdio.h>

enum {
    PARAMS = 5,
    SCORES_MAX = 16 << 20, /* at a time, of rows that are not too few for products */
    ROWS_LEAST = 64
};

void
spw__nn_own_indexer(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    const struct {
        const char *name;
        uint64_t rows, cols;
        spw_init init;
    } own[PARAMS] = {{"wq_b.weight", c->index_heads * c->index_dim, c->q_rank, SPW_INIT_NORMAL},
                     {"wk.weight", c->index_dim, c->width, SPW_INIT_NORMAL},
                     {"k_norm.weight", 1, c->index_dim, SPW_INIT_ONES},
                     {"k_norm.bias", 1, c->index_dim, SPW_INIT_ZEROS},
                     {"weights_proj.weight", c->index_heads, c->width, SPW_INIT_NORMAL}};
    for (uint32_t k = 0; k < PARAMS; k++) {
        const bool normal = own[k].init == SPW_INIT_NORMAL;
        char name[64];
        snprintf(name, sizeof name, "self_attn.indexer.%s", own[k].name);
        spw__nn_own(m, b, prefix, name, own[k].rows, own[k].cols, normal ? 2 : 1, own[k].init,
                    normal ? (float)c->init_std : 0);
        m->params[m->param_count - 1].of_indexer = m->params[m->param_count - 1].frozen = true;
    }
}

spw_choice
spw__nn_begin_choice(const spw_call *call)
{
    const spw_model_config *m = &call->model->config;
    const uint64_t rows = call->batch->sequences * call->batch->positions;
    const bool own = spw_model_has_indexer(m, call->block->layer_idx);
    spw_tape *t = call->tape;
    spw_choice c = call->choice;
    if (c.words == 0)
        return c;
    c.there = !own || t->kept || (c.bits != NULL && t->record); /* since the forward pass */
    if (c.bits == NULL)
        c.bits = spw__tape_take(t, rows * c.words * sizeof *c.bits);
    if (own && c.cache == NULL && t->front_cache == NULL)
        c.keys = spw__tape_take(t, rows * m->index_dim * t->act_bytes);
    return c;
}

uint64_t
spw__nn_rows_chosen(const spw_call *call, uint64_t first, uint64_t left)
{
    uint64_t T = call->batch->positions, most = SCORES_MAX / (32 * call->choice.words), at = first % T;
    most = most < ROWS_LEAST ? ROWS_LEAST : most;
    most = most < left ? most : left;
    if (at == 0 && T <= most)
        return most / T * T;
    return most < T - at ? most : T - at;
}

/* Of rows [from, from + rows) of h and latent, on the tape p. */
static void
choose_rows(const spw_call *call, spw_tape *p, spw_value *const *w, const spw_value *h, const spw_value *latent,
            uint64_t from, uint64_t rows)
{
    const spw_model_config *m = &call->model->config;
    const spw_choice *c = &call->choice;
    const spw_tape *t = call->tape;
    const uint64_t T = call->batch->positions, D = m->index_dim, R = m->rope_dim, row = t->first_row + from;
    const uint64_t sequence = row / T, at = row % T;
    spw_choice_shape s = {.B = rows < T ? 1 : rows / T,
                          .T = rows < T ? rows : T,
                          .first = at,
                          .H = m->index_heads,
                          .D = D,
                          .keys = m->index_keys,
                          .words = c->words};
    spw_value *x = spw_tape_input(p, spw__tape_at_row(t, h, h->data, from), rows, h->cols, false);
    spw_value *q = spw_tape_input(p, spw__tape_at_row(t, latent, latent->data, from), rows, latent->cols, false);
    spw_value *k = spw_nn_linear(p, x, w[1], NULL, 0), *weights;
    act *keys = c->cache;
    float *scratch;
    if (c->cache == NULL) {
        keys = (char *)c->keys + sequence * T * D * t->act_bytes;
        p->into[0] = (char *)keys + at * D * t->act_bytes;
        spw_nn_into(p, 0);
    }
    k = spw_nn_layernorm(p, k, w[2], w[3], 1e-6f);
    k = spw_nn_rope(p, k, 0, call->cos_sin, NULL, T, 1, D, R, m->index_paired);
    q = spw_nn_linear(p, q, w[0], NULL, 0);
    q = spw_nn_rope(p, q, 0, call->cos_sin, NULL, T, m->index_heads, D, R, m->index_paired);
    weights = spw_nn_linear(p, x, w[4], NULL, 0);
    scratch = spw__tape_take(p, spw_gpu_choose_scratch(&s) * sizeof *scratch);
    if (q == NULL || k == NULL || weights == NULL || scratch == NULL || !spw__tape_computes(p))
        return;
    if (t->cache != NULL) {
        s.capacity = t->cache->capacity;
        s.slots = t->cache->slots + sequence;
        s.starts = t->cache->starts + sequence;
    } else if (call->batch->begins != NULL) {
        s.begins = call->batch->begins + row;
    }
    spw_gpu_choose_keys(p->queue, c->bits + row * c->words, q->data, keys, t->cache != NULL ? k->data : NULL,
                        weights->data, scratch, &s);
}

void
spw__nn_choose(const spw_call *call, uint32_t first_param, const spw_value *h, const spw_value *latent)
{
    spw_tape *t = call->tape, *p;
    if (call->choice.words == 0 || call->choice.there || (t->is_tile && t->record) || h == NULL || latent == NULL)
        return;
    if ((p = spw__tape_inner(t)) == NULL)
        return;
    spw__tape_catch_up(t);
    for (uint64_t from = 0, rows; from < h->rows && t->status == SPW_OK; from += rows) {
        rows = spw__nn_rows_chosen(call, t->first_row + from, h->rows - from);
        spw__tape_reset_inner(t, false);
        p->first_row = t->first_row + from;
        p->places = t->places != NULL ? t->places + from : NULL;
        p->by_row = t->by_row;
        choose_rows(call, p, call->params + first_param, h, latent, from, rows);
        spw__tape_note_inner(t);
        t->linear_flops += t->asleep ? 0 : p->linear_flops;
        t->status = p->status != SPW_OK ? p->status : t->status;
    }
}
