/*
 * DeepSeek-V4 (DeepSeek-AI 2026): several residual streams, which each half of a layer reads and leaves by maps of its own (streams.c); attention of one head of keys,
 * which are values too, to a window and, in front of that, to keys that stand for several rows each (front.c): few of those rows, and the best
 * keys by an indexer, or many rows, and all keys; experts by roots of softplus, in the first layers by a table of tokens.
 */
#include "nn_internal.h"
#include "tape_internal.h"
#include <math.h>
#include <stdio.h>

enum { INDEXER_PARAMS = 6 };

static spw_streams
streams_of(const spw_model_config *c, bool head)
{
    return (spw_streams){
        .C = c->width, .n = c->streams, .head = head, .rounds = c->stream_rounds, .eps = (float)c->stream_eps};
}

static spw_value *
normed(const spw_call *call, uint32_t *at, spw_value *x)
{
    return spw_nn_rmsnorm(call->tape, x, call->params[(*at)++], (float)call->model->config.norm_eps);
}

/* Maps of streams x, by the next three parameters; the part's output k. */
static spw_value *
maps_of(const spw_call *call, uint32_t *at, spw_value *x, bool head, uint32_t k)
{
    const spw_model_config *c = &call->model->config;
    const spw_streams s = streams_of(c, head);
    spw_value *const *w = call->params + *at;
    spw_value *h = spw_nn_rmsnorm_plain(call->tape, x, c->streams * c->width, (float)c->norm_eps);
    h = spw_nn_linear(call->tape, h, w[0], NULL, 0);
    *at += 3;
    if (k < SPW_ROWS_VALUES)
        spw_nn_into(call->tape, k);
    return spw_nn_stream_maps(call->tape, h, w[2], w[1], &s);
}

/* Of streams: their maps, and what a half reads by them. */
static void
before_half(const spw_call *call, uint32_t *at, spw_value *x, spw_value **out, uint32_t k)
{
    const spw_streams s = streams_of(&call->model->config, false);
    spw_value *h;
    out[k] = maps_of(call, at, x, false, k);
    h = spw_nn_mix(call->tape, NULL, x, out[k], &s);
    spw_nn_into(call->tape, k + 1);
    out[k + 1] = normed(call, at, h);
}

static void
first_half(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    before_half(call, at, in[0], out, 0);
}

/* Of what attention reads: queries, keys, and what queries are made of, where an indexer reads it too. */
static void
make_queries(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    const uint64_t D = c->head_dim, R = c->rope_dim, T = call->batch->positions;
    spw_tape *t = call->tape;
    spw_value *h = spw__nn_linear(call, at, in[0]);
    if (call->choice.words > 0)
        spw_nn_into(t, 2);
    out[2] = h = normed(call, at, h);
    h = spw__nn_linear(call, at, h);
    spw_nn_into(t, 0);
    h = spw_nn_rmsnorm_plain(t, h, D, (float)c->norm_eps);
    out[0] = spw_nn_rope(t, h, D - R, call->query_cos_sin, NULL, T, c->heads, D, R, true);
    h = spw__nn_linear(call, at, in[0]);
    spw_nn_into(t, 1);
    h = normed(call, at, h);
    out[1] = spw_nn_rope(t, h, D - R, call->query_cos_sin, NULL, T, 1, R, R, true);
}

/* What keys of several rows are made of. */
static void
make_fronts(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    for (uint32_t k = 0; k < 2; k++) {
        spw_nn_into(call->tape, k);
        out[k] = spw__nn_linear(call, at, in[0]);
    }
}

/* How many of a layer's keys stand for several rows, of running sequences at most. */
static uint64_t
fronts(const spw_call *call)
{
    const uint64_t rate = spw_model_front_rate(&call->model->config, call->block->layer_idx);
    if (call->tape->front_cache != NULL)
        return call->tape->front_cache->keys;
    return rate > 0 ? call->batch->positions / rate : 0;
}

/* Where running sequences have what keys are made of, the layer's or its indexer's; and those keys, so many of one sequence. */
typedef struct kept_windows {
    spw_window_cache rows;
    act *keys;
    uint64_t capacity;
} kept_windows;

/* False: there are none. What the tape has of them in a dry call is not looked at. */
static bool
find_kept(const spw_call *call, bool of_indexer, kept_windows *out)
{
    const spw_front_cache *f = call->tape->front_cache;
    const spw_attention_cache *keys = call->tape->cache;
    memset(out, 0, sizeof *out);
    if (f == NULL)
        return false;
    out->rows =
        (spw_window_cache){.kv = of_indexer ? f->index_kv : f->kv, .gate = of_indexer ? f->index_gate : f->gate};
    if (keys == NULL)
        return true;
    out->rows.slots = keys->slots;
    out->rows.starts = keys->starts;
    out->keys = of_indexer ? f->index_keys : keys->key;
    out->capacity = f->keys + (of_indexer ? 0 : keys->capacity);
    return true;
}

/*
 * Keys of several rows from row `first` of the batch on, their bias and norm next among the parameters, with D elements of which the last are turned, by
 * the row that is the first of theirs: *firsts. Those of running sequences go to their place.
 */
static spw_value *
compressed(const spw_call *call, spw_tape *t, spw_value *const *w, spw_value *kv, spw_value *gate, uint64_t first,
           bool of_indexer, const int32_t **firsts)
{
    const spw_model_config *c = &call->model->config;
    const uint64_t D = of_indexer ? c->index_dim : c->head_dim;
    const uint64_t l = call->block->layer_idx, R = c->rope_dim, T = call->batch->positions;
    kept_windows kept;
    const bool cached = find_kept(call, of_indexer, &kept);
    spw_compress_shape s = {.B = kv != NULL ? kv->rows / T : 0,
                            .T = T,
                            .D = D,
                            .rate = spw_model_front_rate(c, l),
                            .overlaps = spw_model_front_overlaps(c, l),
                            .begins = call->batch->begins != NULL ? call->batch->begins + first : NULL};
    spw_value *y = spw_nn_compress(t, kv, gate, w[0], &s, cached ? &kept.rows : NULL, firsts);
    if (of_indexer && !cached)
        spw_nn_into(t, 0);
    y = spw_nn_rmsnorm(t, y, w[1], (float)c->norm_eps);
    y = spw_nn_rope(t, y, D - R, call->cos_sin, *firsts, fronts(call), 1, R, R, true);
    s.firsts = *firsts;
    if (cached && y != NULL && spw__tape_computes(t))
        spw_gpu_keep_windows(t->queue, kept.keys, kept.capacity, y->data, &kept.rows, &s);
    return y;
}

/* ---------------------------------------------------------------- which keys are read */

/* The keys of one sequence, or of running ones, from row `first` on, into their place. w: kv, gate, bias, norm, what makes queries, weights. */
static void
index_keys(const spw_call *call, spw_tape *p, spw_value *const *w, const spw_value *h, uint64_t first, uint64_t rows)
{
    const spw_model_config *c = &call->model->config;
    const uint64_t T = call->batch->positions, D = c->index_dim;
    spw_tape *t = call->tape;
    spw_value *x = spw_tape_input(p, spw__tape_at_row(t, h, h->data, first), rows, h->cols, false);
    spw_value *kv = spw_nn_linear(p, x, w[0], NULL, 0), *gate = spw_nn_linear(p, x, w[1], NULL, 0);
    const int32_t *firsts;
    if (t->front_cache == NULL)
        p->into[0] = (char *)call->choice.keys + first / T * fronts(call) * D * t->act_bytes;
    (void)compressed(call, p, w + 2, kv, gate, first, true, &firsts);
}

static void
choose_rows(const spw_call *call, spw_tape *p, spw_value *const *w, const spw_value *h, const spw_value *latent,
            uint64_t row, uint64_t rows)
{
    const spw_model_config *c = &call->model->config;
    const spw_choice *choice = &call->choice;
    const uint64_t T = call->batch->positions, D = c->index_dim, R = c->rope_dim;
    const spw_tape *t = call->tape;
    spw_choice_shape s = {.B = rows < T ? 1 : rows / T,
                          .T = rows < T ? rows : T,
                          .first = row % T,
                          .H = c->index_heads,
                          .D = D,
                          .keys = c->index_keys,
                          .words = choice->words,
                          .begins = call->batch->begins != NULL ? call->batch->begins + row : NULL,
                          .each = spw_model_front_rate(c, call->block->layer_idx),
                          .key_rows = fronts(call)};
    act *keys = (char *)choice->keys + row / T * fronts(call) * D * t->act_bytes;
    spw_value *x = spw_tape_input(p, spw__tape_at_row(t, h, h->data, row), rows, h->cols, false);
    spw_value *q = spw_tape_input(p, spw__tape_at_row(t, latent, latent->data, row), rows, latent->cols, false);
    spw_value *weights = spw_nn_linear(p, x, w[5], NULL, 0);
    float *scratch;
    q = spw_nn_linear(p, q, w[4], NULL, 0);
    q = spw_nn_rope(p, q, D - R, call->query_cos_sin, NULL, T, c->index_heads, D, R, true);
    scratch = spw__tape_take(p, spw_gpu_choose_scratch(&s) * sizeof *scratch);
    if (t->cache != NULL) {
        s.capacity = fronts(call);
        s.slots = t->cache->slots + row / T;
        s.starts = t->cache->starts + row / T;
        keys = t->front_cache->index_keys;
    }
    if (q != NULL && weights != NULL && scratch != NULL && spw__tape_computes(p))
        spw_gpu_choose_keys(p->queue, choice->bits + row * choice->words, q->data, keys, NULL, weights->data, scratch,
                            &s);
}

/* Forward alone, on a tape of its own: nothing of an indexer has a gradient. */
static void
choose(const spw_call *call, spw_value *const *w, const spw_value *h, const spw_value *latent)
{
    spw_tape *t = call->tape, *p;
    const uint64_t each = t->front_cache != NULL && h != NULL ? h->rows : call->batch->positions;
    if (call->choice.words == 0 || call->choice.there || h == NULL || latent == NULL)
        return;
    if ((p = spw__tape_inner(t)) == NULL)
        return;
    spw__tape_catch_up(t);
    for (uint64_t at = 0, rows, keys_to = 0; at < h->rows && t->status == SPW_OK; at += rows) {
        rows = spw__nn_rows_chosen(call, at, h->rows - at);
        for (; keys_to < at + rows && p->status == SPW_OK; keys_to += each) {
            spw__tape_reset_inner(t, false);
            p->is_tile = false;
            p->by_row = t->by_row;
            index_keys(call, p, w, h, keys_to, each);
            spw__tape_note_inner(t);
            t->linear_flops += t->asleep ? 0 : p->linear_flops;
            t->status = p->status != SPW_OK ? p->status : t->status;
        }
        spw__tape_reset_inner(t, false);
        p->first_row = at;
        p->by_row = t->by_row;
        p->places = t->places != NULL ? t->places + at : NULL;
        choose_rows(call, p, w, h, latent, at, rows);
        spw__tape_note_inner(t);
        t->linear_flops += t->asleep ? 0 : p->linear_flops;
        t->status = p->status != SPW_OK ? p->status : t->status;
    }
    p->is_tile = true;
}

/* ---------------------------------------------------------------- a layer */

/* What attention gives of h, what it reads. */
static spw_value *
attended(const spw_call *call, uint32_t *at, spw_value *h)
{
    const spw_model_config *c = &call->model->config;
    const uint64_t l = call->block->layer_idx, rate = spw_model_front_rate(c, l);
    spw_attention_shape shape = {.B = call->batch->sequences,
                                 .T = call->batch->positions,
                                 .Hq = c->heads,
                                 .D = c->head_dim,
                                 .scale = spw_model_score_scale(c),
                                 .window = c->window,
                                 .begins = call->batch->begins,
                                 .ends = call->batch->ends,
                                 .front = fronts(call),
                                 .front_each = rate};
    const int32_t *firsts = NULL;
    spw_value *q[3], *made[2], *front = NULL;
    spw_call own = *call;
    own.choice = shape.front > c->index_keys && spw_model_has_indexer(c, l) ? spw__nn_begin_choice(call)
                                                                            : (spw_choice){.words = 0};
    shape.chosen = own.choice.bits;
    shape.chosen_words = own.choice.words;
    if (!spw_nn_rows(&own, at, make_queries, &h, 1, q, own.choice.words > 0 ? 3 : 2))
        return NULL;
    if (shape.front > 0) {
        spw_nn_rows(&own, at, make_fronts, &h, 1, made, 2);
        front = compressed(call, call->tape, call->params + *at, made[0], made[1], 0, false, &firsts);
    } else if (rate > 0) {
        *at += 2;
    }
    *at += rate > 0 ? 2 : 0;
    if (own.choice.words > 0)
        choose(&own, call->params + *at, h, q[2]);
    *at += spw_model_has_indexer(c, l) ? INDEXER_PARAMS : 0;
    shape.front_rows = shape.begins != NULL ? firsts : NULL;
    if (call->tape->front_cache != NULL)
        front = NULL; /* with those before, in the cache */
    return spw_nn_front_attention(call->tape, q[0], front, q[1], call->params[(*at)++], &shape);
}

/* Of streams, their maps, and what attention gives: the streams behind it, their maps, and what experts read. */
static void
between_halves(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    const uint64_t D = c->head_dim, R = c->rope_dim;
    const spw_streams s = streams_of(c, false);
    spw_tape *t = call->tape;
    const uint64_t whole = c->heads * D;
    spw_value *h = spw_nn_parts(t, in[2], 1, &whole, 0, 1);
    h = spw_nn_rope_back(t, h, D - R, call->query_cos_sin, NULL, call->batch->positions, c->heads, D, R, true);
    h = spw_nn_linear_groups(t, h, call->params[(*at)++], c->out_groups);
    h = spw__nn_linear(call, at, h);
    spw_nn_into(t, 0);
    out[0] = spw_nn_mix(t, h, in[0], in[1], &s);
    before_half(call, at, out[0], out, 1);
}

static void
who_reads(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_nn_into(call->tape, 0);
    out[0] = spw__nn_linear(call, at, in[0]);
}

/* Of streams, their maps, what experts read and what they give. */
static void
behind_experts(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_streams s = streams_of(&call->model->config, false);
    spw_value *h = spw__nn_add_mlp(call, at, in[3], in[2]);
    spw_nn_into(call->tape, 0);
    out[0] = spw_nn_mix(call->tape, h, in[0], in[1], &s);
}

spw_value *
spw__nn_streams_layer(const spw_call *call, spw_value *x)
{
    spw_value *v[3], *logits, *y;
    uint32_t at = 0;
    spw_nn_rows(call, &at, first_half, &x, 1, v, 2);
    y = attended(call, &at, v[1]);
    spw_nn_rows(call, &at, between_halves, (spw_value *[]){x, v[0], y}, 3, v, 3);
    spw_nn_rows(call, &at, who_reads, &v[2], 1, &logits, 1);
    y = spw__nn_experts(call, &at, NULL, v[2], logits);
    spw_nn_rows(call, &at, behind_experts, (spw_value *[]){v[0], v[1], v[2], y}, 4, &y, 1);
    return y;
}

spw_value *
spw__nn_streams_head(const spw_call *call, uint32_t *at, spw_value *x)
{
    const spw_streams s = streams_of(&call->model->config, true);
    spw_value *maps = maps_of(call, at, x, true, SPW_ROWS_VALUES);
    return spw_nn_mix(call->tape, NULL, x, maps, &s);
}

/* ---------------------------------------------------------------- parameters */

static spw_param *
own(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols)
{
    const bool matrix = strstr(name, "proj.weight") != NULL || strstr(name, ".fn") != NULL ||
                        strstr(name, ".hc_fn") != NULL; /* of one row, too */
    const bool norm = strstr(name, "norm") != NULL || strstr(name, "scale") != NULL;
    spw__nn_own(m, b, prefix, name, rows, cols, matrix ? 2 : 1,
                matrix ? SPW_INIT_NORMAL
                : norm ? SPW_INIT_ONES
                       : SPW_INIT_ZEROS,
                matrix ? (float)m->config.init_std : 0);
    return &m->params[m->param_count - 1];
}

static void
own_maps(spw_model *m, spw_block *b, const char *prefix, const char *name, bool head)
{
    const spw_streams s = streams_of(&m->config, head);
    const char *const parts[3] = {head ? "hc_fn" : "fn", head ? "hc_base" : "base", head ? "hc_scale" : "scale"};
    char full[48];
    for (int k = 0; k < 3; k++) {
        snprintf(full, sizeof full, "%s.%s", name, parts[k]);
        (void)own(m, b, prefix, full, k == 0 ? spw_stream_maps(&s) : 1,
                  k == 0   ? s.n * s.C
                  : k == 1 ? spw_stream_maps(&s)
                  : head   ? 1
                           : 3);
    }
}

/* What makes keys of several rows, of D elements. */
static void
own_compressor(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t D)
{
    const spw_model_config *c = &m->config;
    const uint64_t width = spw_model_front_overlaps(c, b->layer_idx) ? 2 * D : D;
    char full[64];
    spw_param *p;
    for (int k = 0; k < 2; k++) {
        snprintf(full, sizeof full, "%s.%s.weight", name, k == 0 ? "kv_proj" : "gate_proj");
        (void)own(m, b, prefix, full, width, c->width);
    }
    snprintf(full, sizeof full, "%s.position_bias", name);
    p = own(m, b, prefix, full, 1, spw_model_front_rate(c, b->layer_idx) * width);
    p->row_cols = width;
    snprintf(full, sizeof full, "%s.kv_norm.weight", name);
    (void)own(m, b, prefix, full, 1, D);
}

static void
own_attention(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    const uint64_t Q = c->heads * c->head_dim, l = b->layer_idx;
    (void)own(m, b, prefix, "self_attn.q_a_proj.weight", c->q_rank, c->width);
    (void)own(m, b, prefix, "self_attn.q_a_norm.weight", 1, c->q_rank);
    (void)own(m, b, prefix, "self_attn.q_b_proj.weight", Q, c->q_rank);
    (void)own(m, b, prefix, "self_attn.kv_proj.weight", c->head_dim, c->width);
    (void)own(m, b, prefix, "self_attn.kv_norm.weight", 1, c->head_dim);
    if (spw_model_front_rate(c, l) > 0)
        own_compressor(m, b, prefix, "self_attn.compressor", c->head_dim);
    if (spw_model_has_indexer(c, l)) {
        own_compressor(m, b, prefix, "self_attn.compressor.indexer", c->index_dim);
        (void)own(m, b, prefix, "self_attn.compressor.indexer.q_b_proj.weight", c->index_heads * c->index_dim,
                  c->q_rank);
        (void)own(m, b, prefix, "self_attn.compressor.indexer.scorer.weights_proj.weight", c->index_heads, c->width);
        for (uint32_t k = 1; k <= INDEXER_PARAMS; k++)
            m->params[m->param_count - k].of_indexer = m->params[m->param_count - k].frozen = true;
    }
    (void)own(m, b, prefix, "self_attn.sinks", 1, c->heads);
    (void)own(m, b, prefix, "self_attn.o_a_proj.weight", c->out_groups * c->out_rank, Q / c->out_groups);
    (void)own(m, b, prefix, "self_attn.o_b_proj.weight", c->width, c->out_groups * c->out_rank);
}

void
spw__nn_own_streams_layer(spw_model *m, spw_block *b, const char *prefix,
                          void (*own_experts)(spw_model *m, spw_block *b, const char *prefix))
{
    own_maps(m, b, prefix, "attn_hc", false);
    (void)own(m, b, prefix, "input_layernorm.weight", 1, m->config.width);
    own_attention(m, b, prefix);
    own_maps(m, b, prefix, "ffn_hc", false);
    (void)own(m, b, prefix, "post_attention_layernorm.weight", 1, m->config.width);
    own_experts(m, b, prefix);
}

void
spw__nn_own_streams_head(spw_model *m, spw_block *b)
{
    own_maps(m, b, "model.", "hc_head", true);
}
