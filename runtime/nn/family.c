/*
 * What follows from a model's configuration alone: the families' names, which layers have a window, and the table of rotary
 * positions. Pure; config.json's reader uses it without the rest of nn.
 */
#include "spw_nn.h"
#include <math.h>

static const char *const family_names[SPW_FAMILY_COUNT] = {"gpt2",    "llama",     "mistral", "qwen2",       "qwen3",
                                                           "mixtral", "qwen3_moe", "olmo2",   "gemma3_text", "custom"};

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

uint64_t
spw_model_window(const spw_model_config *c, uint64_t layer_idx)
{
    bool full = layer_idx < c->window_from || (c->full_every > 0 && (layer_idx + 1) % c->full_every == 0);
    return full ? 0 : c->window;
}

uint64_t
spw_model_rope_tables(const spw_model_config *c)
{
    return c->rope_theta > 0 ? 1 + (c->rope_local_theta > 0) : 0;
}

uint64_t
spw_model_rope_table(const spw_model_config *c, uint64_t layer_idx)
{
    return c->rope_local_theta > 0 && spw_model_window(c, layer_idx) > 0;
}

static double
scaled_frequency(const spw_model_config *c, double f)
{
    double wavelength = 2 * acos(-1.0) / f, M = (double)c->rope_positions, mix;
    if (c->rope == SPW_ROPE_LINEAR)
        return f / c->rope_factor;
    if (c->rope != SPW_ROPE_LLAMA3 || wavelength < M / c->rope_high)
        return f;
    if (wavelength > M / c->rope_low)
        return f / c->rope_factor;
    mix = (M / wavelength - c->rope_low) / (c->rope_high - c->rope_low);
    return (1 - mix) * f / c->rope_factor + mix * f;
}

void
spw_rope_table(const spw_model_config *c, uint64_t table_idx, uint64_t T, float *out)
{
    uint64_t half = c->head_dim / 2;
    spw_model_config local = *c;
    local.rope = SPW_ROPE_PLAIN;
    local.rope_theta = c->rope_local_theta;
    c = table_idx > 0 ? &local : c;
    for (uint64_t j = 0; j < half; j++) {
        float f = (float)(1.0 / pow(c->rope_theta, (double)(2 * j) / (double)c->head_dim));
        f = (float)scaled_frequency(c, (double)f);
        for (uint64_t t = 0; t < T; t++) {
            float angle = (float)t * f;
            out[t * c->head_dim + j] = (float)cos((double)angle);
            out[t * c->head_dim + half + j] = (float)sin((double)angle);
        }
    }
}
