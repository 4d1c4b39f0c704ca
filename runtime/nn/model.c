/*
 * A model is a chain of blocks and a list of parameters with Hugging Face names. This file builds chains; what the
 * blocks compute is in gpt2.c and llama.c.
 */
#include "nn_internal.h"
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>

spw_status
spw_model_create(spw_model **out, const spw_model_config *config, uint32_t params_max, uint32_t blocks_max,
                 spw_error *err)
{
    spw_model *m = spw_mem_zalloc(sizeof *m);
    *out = NULL;
    if (m == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "model");
    m->config = *config;
    m->params_max = params_max;
    m->blocks_max = blocks_max;
    m->params = spw_mem_calloc(params_max + (uint64_t)1, sizeof *m->params); /* the last takes what is too much */
    m->blocks = spw_mem_calloc(blocks_max + (uint64_t)1, sizeof *m->blocks);
    if (m->params == NULL || m->blocks == NULL) {
        spw_model_destroy(m);
        return SPW_RAISE(err, SPW_ENOMEM, "model of %u parameters", params_max);
    }
    *out = m;
    return SPW_OK;
}

void
spw_model_destroy(spw_model *model)
{
    if (model == NULL)
        return;
    spw_mem_free(model->params);
    spw_mem_free(model->blocks);
    spw_mem_free(model);
}

/* The first mistake of who puts the model together, whose calls return no status: spw_model_check() tells. */
static void
note_fault(spw_model *m, const char *fmt, ...)
{
    va_list args;
    if (m->fault[0] != '\0')
        return;
    va_start(args, fmt);
    vsnprintf(m->fault, sizeof m->fault, fmt, args);
    va_end(args);
}

uint32_t
spw_model_add_param(spw_model *m, const char *name, uint64_t rows, uint64_t cols, uint32_t ndim, spw_init init,
                    float std)
{
    uint32_t id = m->param_count < m->params_max ? m->param_count++ : m->params_max;
    spw_param *p = &m->params[id];
    if (id == m->params_max)
        note_fault(m, "parameter %.95s is one more than the %u that spw_model_create was told of", name, id);
    snprintf(p->name, sizeof p->name, "%s", name);
    p->rows = rows;
    p->cols = cols;
    p->ndim = ndim;
    p->init = init;
    p->init_std = std;
    p->owner_block = UINT32_MAX;
    return id;
}

spw_block *
spw_model_add_block(spw_model *m, const char *name, spw_forward_fn forward)
{
    uint32_t idx = m->block_count < m->blocks_max ? m->block_count++ : m->blocks_max;
    spw_block *b = &m->blocks[idx];
    if (idx == m->blocks_max)
        note_fault(m, "block %.63s is one more than the %u that spw_model_create was told of", name, idx);
    snprintf(b->name, sizeof b->name, "%s", name);
    b->forward = forward;
    return b;
}

void
spw_block_use(spw_model *m, spw_block *b, uint32_t param_id)
{
    if (param_id >= m->param_count) {
        note_fault(m, "block %s uses parameter %u of %u", b->name, param_id, m->param_count);
        return;
    }
    if (b->param_count == SPW_BLOCK_PARAMS_MAX) {
        note_fault(m, "block %s uses more than %d parameters", b->name, SPW_BLOCK_PARAMS_MAX);
        return;
    }
    b->param_ids[b->param_count++] = param_id;
    if (m->params[param_id].owner_block == UINT32_MAX)
        m->params[param_id].owner_block = (uint32_t)(b - m->blocks);
}

spw_status
spw_model_check(const spw_model *m, spw_error *err)
{
    if (m->fault[0] != '\0')
        return SPW_RAISE(err, SPW_EINVAL, "model: %s", m->fault);
    for (uint32_t id = 0; id < m->param_count; id++) {
        const char *name = m->params[id].name;
        if (m->params[id].owner_block == UINT32_MAX)
            return SPW_RAISE(err, SPW_EINVAL, "model: no block uses parameter %s", name);
        /* built-in families give each a name of its own, and may have very many */
        if (m->config.family == SPW_FAMILY_CUSTOM && spw_model_find_param(m, name) != id)
            return SPW_RAISE(err, SPW_EINVAL, "model: two parameters have the name %s", name);
    }
    return SPW_OK;
}

uint32_t
spw_model_find_param(const spw_model *m, const char *name)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        if (strcmp(m->params[id].name, name) == 0)
            return id;
    }
    return UINT32_MAX;
}

uint32_t
spw_model_freeze(spw_model *m, const char *glob)
{
    uint32_t count = 0;
    for (uint32_t id = 0; id < m->param_count; id++) {
        bool matches = fnmatch(glob, m->params[id].name, 0) == 0;
        m->params[id].frozen |= matches;
        count += matches;
    }
    return count;
}

bool
spw_model_is_embedding(const spw_model *m, uint32_t block_idx)
{
    spw_forward_fn forward = m->blocks[block_idx].forward;
    return forward == spw_gpt2_embed_forward || forward == spw_llama_embed_forward;
}

bool
spw_model_by_vocab(const spw_model *m, uint32_t id)
{
    const spw_param *p = &m->params[id];
    uint32_t owner = p->owner_block;
    if (p->rows != m->config.vocab || p->ndim != 2 || owner >= m->block_count ||
        (owner > 0 && owner + 1 < m->block_count))
        return false;
    for (uint32_t b = 0; b < m->block_count; b++) {
        spw_forward_fn forward = m->blocks[b].forward;
        bool head = forward == spw_gpt2_head_forward || forward == spw_llama_head_forward;
        for (uint32_t k = 0; k < m->blocks[b].param_count; k++) {
            bool used = m->blocks[b].param_ids[k] == id;
            if (used && !head && !(k <= (m->config.inputs_dim > 0) && spw_model_is_embedding(m, b)))
                return false;
        }
    }
    return true;
}

uint64_t
spw_model_piece_rows(const spw_model_config *c, uint64_t most)
{
    enum { STEP = 64, PIECES_MAX = SPW_BLOCK_PARAMS_MAX / 2 }; /* rows of logits begin at multiples of STEP */
    uint64_t least = spw_round_up((c->vocab + PIECES_MAX - 1) / PIECES_MAX, STEP), pieces;
    if (most == 0 || most >= c->vocab)
        return 0;
    most = most < least ? least : most / STEP * STEP;
    pieces = (c->vocab + most - 1) / most;
    return pieces > 1 ? spw_round_up((c->vocab + pieces - 1) / pieces, STEP) : 0;
}

uint64_t
spw_model_elems(const spw_model *m)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->param_count; i++)
        sum += m->params[i].rows * m->params[i].cols;
    return sum;
}

void
spw__nn_own(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols,
            uint32_t ndim, spw_init init, float std)
{
    char full[96];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    spw_block_use(m, b, spw_model_add_param(m, full, rows, cols, ndim, init, std));
}

/* Sizes of linear attention. */
static spw_status
check_linear(const spw_model_config *c, spw_error *err)
{
    uint64_t K = c->linear_key_dim, V = c->linear_value_dim;
    if (c->linear_heads == 0)
        return SPW_OK;
    if (c->linear_key_heads == 0 || c->linear_heads % c->linear_key_heads != 0)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: %llu value heads of linear attention do not divide into %llu key heads",
                         (unsigned long long)c->linear_heads, (unsigned long long)c->linear_key_heads);
    if (!c->linear_conv &&
        (K == 0 || K % 8 != 0 || K > SPW_DELTA_DIM_MAX || V == 0 || V % 8 != 0 || V > SPW_DELTA_DIM_MAX))
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: linear attention has keys of %llu elements and values of %llu; both must be multiples "
                         "of 8, and at most %d",
                         (unsigned long long)K, (unsigned long long)V, SPW_DELTA_DIM_MAX);
    if (c->linear_taps == 0 || c->linear_taps > SPW_TAPS_MAX)
        return SPW_RAISE(err, SPW_ECONFIG, "model: linear_conv_kernel_dim is %llu, it must be between 1 and %d",
                         (unsigned long long)c->linear_taps, SPW_TAPS_MAX);
    return c->full_every > 0 || c->linear_mamba || c->linear_conv || c->linear_channels
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG, "model: full_attention_interval is 0, it must be above");
}

/* Layers that read another's keys, and embeddings of each layer. */
static spw_status
check_sides(const spw_model_config *c, spw_error *err)
{
    bool alone = c->readers >= c->layers;
    for (uint64_t l = c->layers - c->readers; l < c->layers && !alone; l++)
        alone = spw_model_keys_of(c, l) == l;
    if (c->readers > 0 && alone)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: the last %llu of %llu layers read the keys of one before them that has a window as they "
            "have, or none; it is not there",
            (unsigned long long)c->readers, (unsigned long long)c->layers);
    if (c->inputs_dim > 0 && (c->inputs_vocab < c->vocab || c->experts > 0))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: embeddings of each layer have %llu rows for %llu tokens, and %llu experts; there must be "
            "one for each token, and no experts",
            (unsigned long long)c->inputs_vocab, (unsigned long long)c->vocab, (unsigned long long)c->experts);
    return SPW_OK;
}

/* Attention whose keys are values, and streams. */
static spw_status
check_streams(const spw_model_config *c, spw_error *err)
{
    if (!c->keys_are_values)
        return SPW_OK;
    if (c->streams == 0 || c->streams > SPW_STREAMS_MAX || c->stream_rounds == 0 || c->stream_rounds > SPW_ROUNDS_MAX)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: %llu streams, whose maps take %llu rounds; there can be 1 to %d, and 1 to %d of them",
                         (unsigned long long)c->streams, (unsigned long long)c->stream_rounds, SPW_STREAMS_MAX,
                         SPW_ROUNDS_MAX);
    if (c->kv_heads != 1 || c->out_groups == 0 || c->heads % c->out_groups != 0 || c->out_rank == 0 || c->q_rank == 0)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: %llu heads, %llu of keys, in %llu groups; there is one of keys, and groups are of one "
                         "size",
                         (unsigned long long)c->heads, (unsigned long long)c->kv_heads,
                         (unsigned long long)c->out_groups);
    if (c->rope_dim == 0 || c->rope_dim % 2 != 0 || c->rope_dim > c->head_dim || c->index_dim < c->rope_dim ||
        c->index_dim > SPW_CHOICE_DIM_MAX || c->index_heads == 0 || c->index_keys == 0)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: %llu of a head's %llu elements are turned, and of an indexer's %llu; it must be an even "
            "number, of at most all, and the indexer's heads have at most %d",
            (unsigned long long)c->rope_dim, (unsigned long long)c->head_dim, (unsigned long long)c->index_dim,
            SPW_CHOICE_DIM_MAX);
    return c->few_rate > 0 && c->many_rate > 0 && c->window > 0
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG, "model: a window of %llu, and keys for %llu and %llu rows; none may be 0",
                           (unsigned long long)c->window, (unsigned long long)c->few_rate,
                           (unsigned long long)c->many_rate);
}

enum { LAYERS_MAX = 65536 }; /* their parameters, of all experts, are counted in 32 bits */

static spw_status
check_sizes(const spw_model_config *c, spw_error *err)
{
    const struct {
        const char *key;
        uint64_t value;
    } sizes[] = {{"vocab_size", c->vocab},
                 {"hidden size", c->width},
                 {"number of layers", c->layers},
                 {"number of heads", c->heads},
                 {"number of key/value heads", c->kv_heads},
                 {"head_dim", c->head_dim},
                 {"MLP width", c->mlp_width},
                 {"positions", c->positions}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value == 0 || sizes[i].value > (1ull << 31))
            return SPW_RAISE(err, SPW_ECONFIG, "model: %s is %llu, it must be between 1 and 2^31", sizes[i].key,
                             (unsigned long long)sizes[i].value);
    }
    if (c->layers > LAYERS_MAX)
        return SPW_RAISE(err, SPW_ECONFIG, "model: the number of layers is %llu, it must be between 1 and %d",
                         (unsigned long long)c->layers, LAYERS_MAX);
    return SPW_OK;
}

/* Whether positions turn queries and keys. */
static bool
has_rope(const spw_model_config *c)
{
    return c->family != SPW_FAMILY_GPT2 && !c->learned_places;
}

static spw_status
check_heads(const spw_model_config *c, spw_error *err)
{
    if (c->heads % c->kv_heads != 0)
        return SPW_RAISE(err, SPW_ECONFIG, "model: %llu heads do not divide into %llu key/value heads",
                         (unsigned long long)c->heads, (unsigned long long)c->kv_heads);
    if (c->family == SPW_FAMILY_GPT2 && c->heads * c->head_dim != c->width)
        return SPW_RAISE(err, SPW_ECONFIG, "model: n_embd %llu is not a multiple of n_head %llu",
                         (unsigned long long)c->width, (unsigned long long)c->heads);
    if (c->woven && (!c->packed || c->kv_heads != c->heads))
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: %llu heads and %llu key/value heads; where a head's query, key and value are beside "
                         "each other, each has its own",
                         (unsigned long long)c->heads, (unsigned long long)c->kv_heads);
    if (c->full_head_dim > 0 && (c->full_kv_heads == 0 || c->heads % c->full_kv_heads != 0))
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: %llu heads do not divide into %llu key/value heads of layers without a window",
                         (unsigned long long)c->heads, (unsigned long long)c->full_kv_heads);
    if (spw_model_value_dim(c, 0) > spw_model_head_dim(c, 0))
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: a head's values have %llu elements, its keys %llu; not supported yet",
                         (unsigned long long)c->value_dim, (unsigned long long)c->head_dim);
    if (has_rope(c) && (c->kv_rank == 0 || c->rope_growth > 0) && (c->head_dim % 2 != 0 || c->full_head_dim % 2 != 0))
        return SPW_RAISE(err, SPW_ECONFIG, "model: head_dim %llu is odd, rope needs an even one",
                         (unsigned long long)(c->head_dim % 2 != 0 ? c->head_dim : c->full_head_dim));
    return SPW_OK;
}

/* Latent attention, and what chooses its keys. */
static spw_status
check_latent(const spw_model_config *c, spw_error *err)
{
    if (c->kv_rank > 0 &&
        (c->rope_dim == 0 || c->rope_dim % 2 != 0 || c->rope_dim >= c->head_dim || c->kv_heads != c->heads))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: %llu of a head's %llu elements are turned, and %llu heads have keys of %llu; of latent attention "
            "it must be an even number below all, and each head has keys of its own",
            (unsigned long long)c->rope_dim, (unsigned long long)c->head_dim, (unsigned long long)c->heads,
            (unsigned long long)c->kv_heads);
    if (c->index_keys > 0 && !c->keys_are_values &&
        (c->kv_rank == 0 || c->q_rank == 0 || c->index_heads == 0 || c->index_dim < c->rope_dim ||
         c->index_dim > SPW_CHOICE_DIM_MAX || c->index_from == 0 || c->index_every == 0))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: an indexer of %llu heads of %llu elements, of which %llu are turned; it must have some, of at most "
            "%d elements, of which as many are turned as of latent attention's, and the first layer has one",
            (unsigned long long)c->index_heads, (unsigned long long)c->index_dim, (unsigned long long)c->rope_dim,
            SPW_CHOICE_DIM_MAX);
    return SPW_OK;
}

static spw_status
check_experts(const spw_model_config *c, spw_error *err)
{
    if (c->experts > SPW_EXPERTS_MAX || c->choices > SPW_CHOICES_MAX || c->choices > c->experts ||
        (c->experts > 0 && c->choices == 0))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: %llu of %llu experts for each token; there can be 1 to %d experts, and 1 to %d of them",
            (unsigned long long)c->choices, (unsigned long long)c->experts, SPW_EXPERTS_MAX, SPW_CHOICES_MAX);
    if (c->groups > 0 && (c->experts % c->groups != 0 || c->group_choices == 0 || c->group_choices > c->groups ||
                          c->choices > c->group_choices * (c->experts / c->groups)))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: %llu experts in %llu groups, %llu of which a token may choose %llu experts from; groups must "
            "be of one size and hold that many",
            (unsigned long long)c->experts, (unsigned long long)c->groups, (unsigned long long)c->group_choices,
            (unsigned long long)c->choices);
    if (c->experts > 0 && (c->dense_first > 0 || c->sparse_every > 1 || c->experts_beside) && c->dense_width == 0)
        return SPW_RAISE(err, SPW_ECONFIG, "model: layers without experts have an MLP of width 0");
    if (c->experts_paired && 4 * c->experts > SPW_BLOCK_PARAMS_MAX - 32)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: a layer of %llu experts, each with biases, has more than %d parameters",
                         (unsigned long long)c->experts, SPW_BLOCK_PARAMS_MAX);
    return SPW_OK;
}

static spw_status
check_rope(const spw_model_config *c, spw_error *err)
{
    if (c->rope != SPW_ROPE_PLAIN && !(c->rope_factor > 0))
        return SPW_RAISE(err, SPW_ECONFIG, "model: the rope factor is %g, it must be above 0", c->rope_factor);
    if (has_rope(c) && (spw_model_rope_width(c, 0) == 0 || spw_model_rope_width(c, 0) % 2 != 0))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: partial_rotary_factor %g turns %llu of a head's %llu elements; it must be an even number",
            c->rope_part, (unsigned long long)spw_model_rope_width(c, 0), (unsigned long long)c->head_dim);
    if (c->rope == SPW_ROPE_LLAMA3 && !(c->rope_low > 0 && c->rope_low <= c->rope_high && c->rope_positions > 0))
        return SPW_RAISE(err, SPW_ECONFIG,
                         "model: llama3 rope needs 0 < low_freq_factor (%g) <= high_freq_factor (%g) and "
                         "original_max_position_embeddings above 0",
                         c->rope_low, c->rope_high);
    if (c->rope == SPW_ROPE_YARN &&
        !(c->rope_low > 0 && c->rope_high > 0 && c->rope_positions > 0 && c->rope_theta > 1))
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "model: yarn rope needs beta_slow (%g), beta_fast (%g) and original_max_position_embeddings above "
            "0, and rope_theta (%g) above 1",
            c->rope_low, c->rope_high, c->rope_theta);
    return SPW_OK;
}

spw_status
spw_model_build(spw_model **out, const spw_model_config *config, spw_error *err)
{
    spw_model *m;
    *out = NULL;
    SPW_TRY(check_sizes(config, err));
    SPW_TRY(check_heads(config, err));
    SPW_TRY(check_latent(config, err));
    SPW_TRY(check_experts(config, err));
    SPW_TRY(check_rope(config, err));
    SPW_TRY(check_linear(config, err));
    SPW_TRY(check_sides(config, err));
    SPW_TRY(check_streams(config, err));
    if ((unsigned)config->family >= SPW_FAMILY_CUSTOM)
        return SPW_RAISE(err, SPW_EINVAL, "not a built-in model family");
    SPW_TRY(spw_model_create(&m, config, (uint32_t)((40 + 4 * config->experts) * config->layers + 8),
                             (uint32_t)config->layers + 2, err));
    if (config->family == SPW_FAMILY_GPT2)
        spw__nn_build_gpt2(m);
    else
        spw__nn_build_llama(m);
    *out = m;
    return SPW_OK;
}
