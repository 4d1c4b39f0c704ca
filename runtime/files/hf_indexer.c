/*
 * What config.json says of attention to keys that an indexer chooses (DeepSeek-V3.2's and GLM-5's).
 * Source: the configuration classes of transformers; DeepSeek-AI 2025 (2512.02556).
 */
#include "hf_source.h"

/* Of a list of words, or a string with a letter for each layer. */
static bool
is_kind(const json_t *list, uint64_t layer_idx, const char *kind)
{
    const char *letters = json_string_value(list), *word;
    if (letters != NULL)
        return letters[layer_idx] == (strcmp(kind, "full") == 0 ? 'F' : 'S');
    word = json_string_value(json_array_get(list, layer_idx));
    return word != NULL && strcmp(word, kind) == 0;
}

/* Which layers of GLM-5 have an indexer, by any of three spellings. */
static spw_status
read_indexed_layers(const source *s, spw_model_config *c)
{
    const char *key = get(s, "indexer_types") != NULL ? "indexer_types" : "index_topk_pattern";
    const json_t *list = get(s, key);
    uint64_t first = 0, next, count = json_is_string(list) ? json_string_length(list) : json_array_size(list);
    c->index_from = 2;
    SPW_TRY(read_size(s, "index_topk_freq", 1, &c->index_every));
    SPW_TRY(read_size(s, "index_skip_topk_offset", 1, &c->index_from));
    if (list == NULL)
        return SPW_OK;
    if (count != c->layers)
        return wrong(s, key, "one entry for each layer", list);
    while (first < c->layers && is_kind(list, first, "full"))
        first++;
    for (next = first + 1; next < c->layers && !is_kind(list, next, "full");)
        next++;
    c->index_from = first;
    c->index_every = first < c->layers ? next - first + 1 : 1;
    for (uint64_t l = 0; l < c->layers; l++) {
        if (first == 0 || !is_kind(list, l, spw_model_has_indexer(c, l) ? "full" : "shared"))
            return refuse(s, key, list);
    }
    return SPW_OK;
}

/* Attention of chosen keys. */
spw_status
spw__hf_read_indexer(const source *s, spw_model_config *c)
{
    if (!spw__hf_of(c->family, INDEXED))
        return SPW_OK;
    c->index_keys = 2048;
    c->index_dim = 128;
    c->index_heads = c->family == SPW_FAMILY_GLM_DSA ? 32 : 64;
    c->index_from = c->index_every = 1;
    SPW_TRY(read_size(s, "index_topk", 1, &c->index_keys));
    SPW_TRY(read_size(s, "index_n_heads", 1, &c->index_heads));
    SPW_TRY(read_size(s, "index_head_dim", 1, &c->index_dim));
    SPW_TRY(must_be(s, "rope_interleave", true));
    SPW_TRY(must_be(s, "indexer_rope_interleave", true));
    if (c->q_rank == 0)
        return wrong(s, "q_lora_rank", "integer", json_object_get(s->object, "q_lora_rank"));
    if (c->family == SPW_FAMILY_GLM_DSA)
        SPW_TRY(read_indexed_layers(s, c));
    c->index_paired = c->family == SPW_FAMILY_GLM_DSA;
    return SPW_OK;
}

void
spw__hf_write_indexer(json_t *o, const spw_model_config *c)
{
    set_size(o, "index_topk", c->index_keys);
    set_size(o, "index_n_heads", c->index_heads);
    set_size(o, "index_head_dim", c->index_dim);
    if (c->family == SPW_FAMILY_GLM_DSA) {
        json_t *list = json_array();
        for (uint64_t l = 0; l < c->layers; l++)
            json_array_append_new(list, json_string(spw_model_has_indexer(c, l) ? "full" : "shared"));
        json_object_set_new(o, "indexer_types", list);
    }
}
