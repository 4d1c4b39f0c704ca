/*
 * What follows from a model's configuration alone: the families' names, which layers have a window, and the table of rotary
 * positions. Pure; config.json's reader uses it without the rest of nn.
 */
#include "spw_nn.h"
#include <math.h>

static const char *const family_names[SPW_FAMILY_COUNT] = {"gpt2",
                                                           "llama",
                                                           "mistral",
                                                           "qwen2",
                                                           "qwen3",
                                                           "mixtral",
                                                           "qwen3_moe",
                                                           "phi3",
                                                           "smollm3",
                                                           "qwen2_moe",
                                                           "olmo2",
                                                           "gemma3_text",
                                                           "gemma2",
                                                           "gpt_oss",
                                                           "glm4_moe",
                                                           "deepseek_v2",
                                                           "deepseek_v3",
                                                           "glm4_moe_lite",
                                                           "minimax_m2",
                                                           "olmo3",
                                                           "gemma",
                                                           "granite",
                                                           "olmoe",
                                                           "seed_oss",
                                                           "glm",
                                                           "glm4",
                                                           "ernie4_5",
                                                           "exaone4",
                                                           "ministral3",
                                                           "gpt_neox",
                                                           "opt",
                                                           "starcoder2",
                                                           "stablelm",
                                                           "qwen3_5_text",
                                                           "qwen3_5_moe_text",
                                                           "qwen3_next",
                                                           "gemma4_text",
                                                           "dots1",
                                                           "solar_open",
                                                           "ernie4_5_moe",
                                                           "hy_v3",
                                                           "hunyuan_v1_dense",
                                                           "hunyuan_v1_moe",
                                                           "cohere",
                                                           "cohere2",
                                                           "granitemoehybrid",
                                                           "llama4_text",
                                                           "deepseek_v32",
                                                           "glm_moe_dsa",
                                                           "exaone_moe",
                                                           "nemotron_h",
                                                           "deepseek_v4",
                                                           "mistral4",
                                                           "mimo_v2_flash",
                                                           "lfm2",
                                                           "lfm2_moe",
                                                           "bamba",
                                                           "afmoe",
                                                           "olmo_hybrid",
                                                           "falcon_h1",
                                                           "kimi_linear",
                                                           "custom"};

const char *
spw_family_name(spw_family family)
{
    return family_names[family];
}

bool
spw_family_parse(const char *name, spw_family *out)
{
    for (int i = 0; i < SPW_FAMILY_COUNT; i++) {
        if (strcmp(family_names[i], name) == 0) {
            *out = (spw_family)i;
            return true;
        }
    }
    return false;
}

static bool
is_each(uint64_t every, uint64_t layer_idx)
{
    return every > 0 && (layer_idx + 1) % every == 0;
}

static bool
has_bit(const uint64_t *layers, uint64_t layer_idx)
{
    return layer_idx < SPW_FULL_LAYERS_MAX && (layers[layer_idx / 64] >> layer_idx % 64 & 1) != 0;
}

uint64_t
spw_model_row_cols(const spw_model_config *c)
{
    return c->streams > 0 ? c->streams * c->width : c->width;
}

bool
spw_model_front_overlaps(const spw_model_config *c, uint64_t layer_idx)
{
    return has_bit(c->few_layers, layer_idx);
}

uint64_t
spw_model_front_rate(const spw_model_config *c, uint64_t layer_idx)
{
    return has_bit(c->few_layers, layer_idx) ? c->few_rate : has_bit(c->many_layers, layer_idx) ? c->many_rate : 0;
}

bool
spw_model_is_hashed(const spw_model_config *c, uint64_t layer_idx)
{
    return has_bit(c->hashed_layers, layer_idx);
}

uint64_t
spw_model_index_keys(const spw_model_config *c, uint64_t positions)
{
    return c->keys_are_values ? positions / c->few_rate : positions;
}

bool
spw_model_has_mlp(const spw_model_config *c, uint64_t layer_idx)
{
    return !c->halves_apart || has_bit(c->mlp_layers, layer_idx);
}

bool
spw_model_attends(const spw_model_config *c, uint64_t layer_idx)
{
    return !c->halves_apart || !has_bit(c->mlp_layers, layer_idx);
}

bool
spw_model_is_linear(const spw_model_config *c, uint64_t layer_idx)
{
    if (c->linear_beside)
        return false;
    if (c->linear_heads > 0 && (c->linear_mamba || c->linear_conv || c->linear_channels))
        return spw_model_attends(c, layer_idx) && !has_bit(c->full_layers, layer_idx);
    return c->linear_heads > 0 && !is_each(c->full_every, layer_idx);
}

bool
spw_model_has_linear(const spw_model_config *c, uint64_t layer_idx)
{
    return c->linear_beside || spw_model_is_linear(c, layer_idx);
}

spw_norms
spw_model_norms(const spw_model_config *c, uint64_t layer_idx)
{
    return c->linear_before && spw_model_is_linear(c, layer_idx) ? SPW_NORMS_BEFORE : c->norms;
}

uint64_t
spw_model_linear_channels(const spw_model_config *c)
{
    return 2 * c->linear_key_heads * c->linear_key_dim + c->linear_heads * c->linear_value_dim;
}

uint64_t
spw_model_window(const spw_model_config *c, uint64_t layer_idx)
{
    return layer_idx < c->window_from || is_each(c->full_every, layer_idx) ? 0 : c->window;
}

bool
spw_model_has_sinks(const spw_model_config *c, uint64_t layer_idx)
{
    return c->sinks && (!c->sinks_windowed || spw_model_window(c, layer_idx) > 0);
}

uint64_t
spw_model_chunk(const spw_model_config *c, uint64_t layer_idx)
{
    return spw_model_has_rope(c, layer_idx) ? c->chunk : 0;
}

uint64_t
spw_model_keys_of(const spw_model_config *c, uint64_t layer_idx)
{
    bool full = spw_model_window(c, layer_idx) == 0;
    if (c->readers == 0 || layer_idx + c->readers < c->layers || layer_idx >= c->layers)
        return layer_idx;
    for (uint64_t l = c->layers - c->readers; l-- > 0;) {
        if ((spw_model_window(c, l) == 0) == full)
            return l;
    }
    return layer_idx;
}

/* The last layer of a kind, if it reads another one's keys; UINT64_MAX: none of that kind does. */
static uint64_t
last_reader(const spw_model_config *c, bool full)
{
    for (uint64_t l = c->layers; l-- > c->layers - c->readers;) {
        if ((spw_model_window(c, l) == 0) == full)
            return l;
    }
    return UINT64_MAX;
}

bool
spw_model_lends_keys(const spw_model_config *c, uint64_t layer_idx)
{
    uint64_t reader = last_reader(c, spw_model_window(c, layer_idx) == 0);
    return reader < c->layers && reader != layer_idx && spw_model_keys_of(c, reader) == layer_idx;
}

uint64_t
spw_model_side_cols(const spw_model_config *c, uint32_t side)
{
    uint64_t reader;
    if (side <= SPW_SIDE_INPUTS)
        return c->layers * c->inputs_dim;
    reader = last_reader(c, side >= SPW_SIDE_FULL_KEYS);
    return reader == UINT64_MAX ? 0 : spw_model_kv_heads(c, reader) * spw_model_head_dim(c, reader);
}

uint32_t
spw_model_side_block(const spw_model_config *c, uint32_t side)
{
    return side <= SPW_SIDE_INPUTS ? side
                                   : 1 + (uint32_t)spw_model_keys_of(c, last_reader(c, side >= SPW_SIDE_FULL_KEYS));
}

uint32_t
spw_model_side_reader(const spw_model_config *c, uint32_t side)
{
    return side <= SPW_SIDE_INPUTS ? 1 : 1 + (uint32_t)last_reader(c, side >= SPW_SIDE_FULL_KEYS);
}

uint64_t
spw_model_dense_width(const spw_model_config *c, uint64_t layer_idx)
{
    uint64_t width = c->experts > 0 ? c->dense_width : c->mlp_width;
    return c->readers_double && layer_idx + c->readers >= c->layers ? 2 * width : width;
}

static bool
is_larger(const spw_model_config *c, uint64_t layer_idx)
{
    return c->full_head_dim > 0 && spw_model_window(c, layer_idx) == 0;
}

uint64_t
spw_model_head_dim(const spw_model_config *c, uint64_t layer_idx)
{
    return is_larger(c, layer_idx) ? c->full_head_dim : c->head_dim;
}

uint64_t
spw_model_kv_heads(const spw_model_config *c, uint64_t layer_idx)
{
    return is_larger(c, layer_idx) ? c->full_kv_heads : c->kv_heads;
}

uint64_t
spw_model_value_dim(const spw_model_config *c, uint64_t layer_idx)
{
    return c->value_dim > 0 ? c->value_dim : spw_model_head_dim(c, layer_idx);
}

float
spw_model_score_scale(const spw_model_config *c)
{
    double all = 1;
    if (c->scales.keys > 0)
        return (float)(c->scales.keys / sqrt((double)c->head_dim));
    if (c->score_scale > 0)
        return (float)c->score_scale;
    if (c->rope == SPW_ROPE_YARN && c->rope_all_dim > 0 && c->rope_factor > 1)
        all = 0.1 * c->rope_all_dim * log(c->rope_factor) + 1;
    if (all != 1)
        return (float)(all * all / sqrt((double)c->head_dim));
    return 1.0f / sqrtf((float)(c->query_scalar > 0 ? c->query_scalar : c->head_dim));
}

uint64_t
spw_model_rope_width(const spw_model_config *c, uint64_t table_idx)
{
    uint64_t all = c->full_head_dim > 0 && table_idx == 0 ? c->full_head_dim : c->head_dim;
    if (c->rope_dim > 0)
        return table_idx > 0 && !c->keys_are_values ? c->head_dim : c->rope_dim;
    return c->rope_part > 0 && c->rope != SPW_ROPE_PROPORTIONAL ? (uint64_t)((double)all * c->rope_part) : all;
}

uint64_t
spw_model_rope_elems(const spw_model_config *c, uint64_t T)
{
    if (c->keys_are_values)
        return T * c->rope_dim;
    return T * (c->full_head_dim > c->head_dim ? c->full_head_dim : c->head_dim);
}

uint64_t
spw_model_rope_tables(const spw_model_config *c)
{
    if (c->keys_are_values)
        return 2;
    return c->rope_theta > 0 ? 1 + (c->rope_local_theta > 0 || c->rope_growth > 0 || c->still_growth > 0) : 0;
}

uint64_t
spw_model_rope_table(const spw_model_config *c, uint64_t layer_idx)
{
    if (c->keys_are_values)
        return spw_model_front_rate(c, layer_idx) == 0;
    return c->rope_local_theta > 0 && spw_model_window(c, layer_idx) > 0;
}

uint64_t
spw_model_query_table(const spw_model_config *c, uint64_t layer_idx)
{
    bool still = c->still_growth > 0 && !spw_model_has_rope(c, layer_idx);
    return c->rope_growth > 0 || still ? 1 : spw_model_rope_table(c, layer_idx);
}

bool
spw_model_has_indexer(const spw_model_config *c, uint64_t layer_idx)
{
    if (c->keys_are_values)
        return c->index_keys > 0 && spw_model_front_overlaps(c, layer_idx);
    return c->index_keys > 0 && (layer_idx < c->index_from || (layer_idx + 1 - c->index_from) % c->index_every == 0);
}

bool
spw_model_lends_choice(const spw_model_config *c, uint64_t layer_idx)
{
    return !c->keys_are_values && layer_idx + 1 < c->layers && spw_model_has_indexer(c, layer_idx) &&
           !spw_model_has_indexer(c, layer_idx + 1);
}

uint64_t
spw_model_experts(const spw_model_config *c, uint64_t layer_idx)
{
    bool dense = layer_idx < c->dense_first || (c->halves_apart && !has_bit(c->sparse_layers, layer_idx)) ||
                 (c->sparse_every > 0 && (layer_idx + 1) % c->sparse_every != 0);
    return dense ? 0 : c->experts;
}

bool
spw_model_reads_experts(const spw_model_config *c)
{
    return c->experts_beside || c->latent_width > 0 || c->streams > 0 ||
           (c->experts > 0 && c->norms != SPW_NORMS_BEFORE);
}

uint64_t
spw_model_expert_cols(const spw_model_config *c)
{
    return c->latent_width > 0 ? c->latent_width : c->width;
}

void
spw_terms_split(float x, float *terms)
{
    for (int i = 0; i < SPW_TERMS; i++) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        bits &= isfinite(x) ? 0xffff0000u : ~0u;
        memcpy(&terms[i], &bits, sizeof bits);
        x = isfinite(x) ? x - terms[i] : 0; /* exact: fewer of the same digits */
    }
}

void
spw_terms_sum(float *sums, const float *terms, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        sums[i] = terms[SPW_TERMS * i] + terms[SPW_TERMS * i + 1] + terms[SPW_TERMS * i + 2] + terms[SPW_TERMS * i + 3];
}

bool
spw_model_has_rope(const spw_model_config *c, uint64_t layer_idx)
{
    return !c->learned_places && c->rope_theta > 0 &&
           (c->rope_skip_every == 0 || (layer_idx + 1) % c->rope_skip_every != 0);
}

/* The place among the frequencies, a real number, of one that turns so often over the original positions. */
static double
place_of(const spw_model_config *c, double turns)
{
    return (double)spw_model_rope_width(c, 0) * log((double)c->rope_positions / (turns * 2 * acos(-1.0))) /
           (2 * log(c->rope_theta));
}

static double
yarn_frequency(const spw_model_config *c, uint64_t j, double f)
{
    double first = place_of(c, c->rope_high), last = place_of(c, c->rope_low), mix;
    first = fmax(c->rope_truncate ? floor(first) : first, 0);
    last = fmin(c->rope_truncate ? ceil(last) : last, (double)spw_model_rope_width(c, 0) - 1);
    if (first == last)
        last += 0.001;
    mix = fmin(fmax(((double)j - first) / (last - first), 0), 1);
    return mix * f / c->rope_factor + (1 - mix) * f;
}

static double
scaled_frequency(const spw_model_config *c, uint64_t j, double f)
{
    double wavelength = 2 * acos(-1.0) / f, M = (double)c->rope_positions, mix;
    if (c->rope == SPW_ROPE_LINEAR)
        return f / c->rope_factor;
    if (c->rope == SPW_ROPE_YARN)
        return yarn_frequency(c, j, f);
    if (c->rope == SPW_ROPE_PROPORTIONAL)
        return j < (uint64_t)(c->rope_part * (double)spw_model_rope_width(c, 0)) / 2 ? f / c->rope_factor : 0;
    if (c->rope != SPW_ROPE_LLAMA3 || wavelength < M / c->rope_high)
        return f;
    if (wavelength > M / c->rope_low || c->rope_high == c->rope_low)
        return f / c->rope_factor;
    mix = (M / wavelength - c->rope_low) / (c->rope_high - c->rope_low);
    return (1 - mix) * f / c->rope_factor + mix * f;
}

/* In fp32 step by step, as the usual implementation has it. */
static float
long_frequency(const spw_model_config *c, uint64_t j, uint64_t R, uint64_t T)
{
    float power = (float)pow(c->rope_theta, (double)((float)(2 * j) / (float)R));
    return 1.0f / ((T > c->rope_positions ? c->rope_long[j] : c->rope_short[j]) * power);
}

/* By which the query at a place is larger. */
static float
growth(const spw_model_config *c, uint64_t t)
{
    return (float)(1 + c->rope_growth * log(1 + (double)(t / c->rope_positions)));
}

/* Of queries that are not turned, or were by another table: as if by no angle. */
static void
still_table(const spw_model_config *c, uint64_t R, uint64_t T, float *out)
{
    for (uint64_t t = 0; t < T; t++) {
        double times = c->still_growth > 0 ? (double)((t + 1) / c->still_places) : 0;
        float factor = c->still_growth > 0 ? (float)(1 + c->still_growth * log(1 + times)) : growth(c, t);
        for (uint64_t j = 0; j < R; j++)
            out[t * R + j] = j < R / 2 ? factor : 0;
    }
}

void
spw_rope_table(const spw_model_config *c, uint64_t table_idx, uint64_t T, float *out)
{
    uint64_t R = spw_model_rope_width(c, table_idx), half = R / 2;
    spw_model_config local = *c;
    bool queries = table_idx > 0 && c->rope_growth > 0;
    float scale;
    if (table_idx > 0 && (c->still_growth > 0 || (queries && c->rope_dim > 0))) {
        still_table(c, R, T, out);
        return;
    }
    local.rope = SPW_ROPE_PLAIN;
    local.rope_theta = c->rope_local_theta;
    c = table_idx == 1 && !queries ? &local : c;
    scale = c->rope == SPW_ROPE_YARN || c->rope == SPW_ROPE_LONG ? (float)c->rope_attention : 1;
    for (uint64_t j = 0; j < half; j++) {
        float f = (float)(1.0 / pow(c->rope_theta, (double)(2 * j) / (double)R));
        f = c->rope == SPW_ROPE_LONG ? long_frequency(c, j, R, T) : (float)scaled_frequency(c, j, (double)f);
        for (uint64_t t = 0; t < T; t++) {
            float angle = (float)t * f, factor = queries ? scale * growth(c, t) : scale;
            out[t * R + j] = (float)cos((double)angle) * factor;
            out[t * R + half + j] = (float)sin((double)angle) * factor;
        }
    }
}
