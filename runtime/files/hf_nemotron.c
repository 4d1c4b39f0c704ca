/*
 * What config.json says of Nemotron-H: which layers are Mamba-2's, attention, an MLP or experts, by a list or by a text with a letter for each,
 * and the sizes of all of them; the same written. Source: its configuration class in transformers, and the files that are published.
 */
#include "hf_source.h"

/* Of a layer: the text's letter, and a list's words, newer and older. */
static const struct {
    char letter;
    const char *words[2];
} kinds[] = {{'M', {"linear_attention", "mamba"}},
             {'*', {"full_attention", "attention"}},
             {'-', {"mlp", "mlp"}},
             {'E', {"moe", "moe"}}};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* That of layer l by a list or a text; 0: there is no such kind. */
static char
letter_of(const json_t *said, uint64_t l)
{
    const json_t *item = json_is_array(said) ? json_array_get(said, l) : said;
    const char *text = json_string_value(item);
    for (size_t k = 0; text != NULL && k < KINDS; k++) {
        if (item == said ? text[l] == kinds[k].letter
                         : strcmp(text, kinds[k].words[0]) == 0 || strcmp(text, kinds[k].words[1]) == 0)
            return kinds[k].letter;
    }
    return 0;
}

static void
set_kind(spw_model_config *c, uint64_t l, char letter)
{
    const uint64_t bit = 1ull << l % 64;
    c->full_layers[l / 64] |= letter == '*' ? bit : 0;
    c->mlp_layers[l / 64] |= letter == '-' || letter == 'E' ? bit : 0;
    c->sparse_layers[l / 64] |= letter == 'E' ? bit : 0;
}

/* What the class's layers are where nothing is said. */
static const char *const usual = "ME*-";

/* A list counts, where there is one; there are as many layers as it has. has: layers of this kind. */
static spw_status
read_layers(const source *s, spw_model_config *c, bool has[KINDS])
{
    static const char *const keys[] = {"layers_block_type", "layer_types", "hybrid_override_pattern"};
    const json_t *said = NULL;
    const char *key = NULL;
    uint64_t stated;
    for (size_t i = 0; said == NULL && i < sizeof keys / sizeof keys[0]; i++)
        said = get(s, key = keys[i]);
    if (said != NULL && !json_is_array(said) && !json_is_string(said))
        return wrong(s, key, "a list with one entry for each layer, or a text with a letter for each", said);
    c->layers = json_is_array(said) ? json_array_size(said) : strlen(said != NULL ? json_string_value(said) : usual);
    if (c->layers == 0 || c->layers > SPW_FULL_LAYERS_MAX)
        return refuse(s, key, said);
    for (uint64_t l = 0; l < c->layers; l++) {
        const char letter = said != NULL ? letter_of(said, l) : usual[l];
        if (letter == 0)
            return refuse(s, key, json_is_array(said) ? json_array_get(said, l) : said);
        for (size_t k = 0; k < KINDS; k++)
            has[k] |= kinds[k].letter == letter;
        set_kind(c, l, letter);
    }
    stated = c->layers;
    SPW_TRY(read_size(s, "num_hidden_layers", 1, &stated));
    return stated == c->layers
               ? SPW_OK
               : wrong(s, "num_hidden_layers", "as many layers as are listed", get(s, "num_hidden_layers"));
}

/* The class takes the older keys, too, and these count. */
static spw_status
read_mamba(const source *s, spw_model_config *c)
{
    c->linear_mamba = c->linear_bias = true;
    c->linear_heads = 128; /* the class's defaults */
    c->linear_value_dim = 64;
    c->linear_key_heads = 8;
    c->linear_key_dim = 128;
    c->linear_taps = 4;
    c->linear_step = 0.001;
    SPW_TRY(read_size(s, "mamba_num_heads", 1, &c->linear_heads));
    SPW_TRY(read_size(s, "mamba_head_dim", 1, &c->linear_value_dim));
    SPW_TRY(read_size(s, "n_groups", 1, &c->linear_key_heads));
    SPW_TRY(read_size(s, "mamba_n_groups", 1, &c->linear_key_heads));
    SPW_TRY(read_size(s, "ssm_state_size", 1, &c->linear_key_dim));
    SPW_TRY(read_size(s, "conv_kernel", 1, &c->linear_taps));
    SPW_TRY(read_size(s, "mamba_d_conv", 1, &c->linear_taps));
    SPW_TRY(read_bool(s, "use_conv_bias", &c->linear_bias));
    SPW_TRY(read_bool(s, "mamba_conv_bias", &c->linear_bias));
    SPW_TRY(read_real(s, "time_step_min", &c->linear_step));
    SPW_TRY(read_real(s, "mamba_dt_min", &c->linear_step));
    if (c->linear_heads % c->linear_key_heads != 0)
        return wrong(s, "mamba_num_heads", "a multiple of n_groups", get(s, "mamba_num_heads"));
    return spw__hf_check_linear(s, c, "ssm_state_size", "mamba_head_dim", "conv_kernel");
}

/* A word, or a switch, of what is not built otherwise. */
static spw_status
check_rest(const source *s)
{
    static const char *const words[][2] = {{"mlp_hidden_act", "relu2"}, {"mamba_hidden_act", "silu"}};
    static const char *const off[] = {"attention_bias", "mamba_proj_bias", "use_bias", "residual_in_fp32",
                                      "tie_word_embeddings"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        const json_t *v = get(s, words[i][0]);
        const char *text = json_string_value(v);
        if (v != NULL && (text == NULL || strcmp(text, words[i][1]) != 0))
            return refuse(s, words[i][0], v);
    }
    for (size_t i = 0; i < sizeof off / sizeof off[0]; i++)
        SPW_TRY(must_be(s, off[i], false));
    if (get(s, "sliding_window") != NULL)
        return refuse(s, "sliding_window", get(s, "sliding_window"));
    return spw__hf_check_steps(s);
}

/* Of the expert of all rows the class reads a width, and no number. */
static spw_status
read_experts(const source *s, spw_model_config *c, bool with_mlps)
{
    const uint64_t mlp_width = c->mlp_width;
    SPW_TRY(spw__hf_read_experts(s, c));
    c->dense_width = with_mlps ? mlp_width : 0;
    c->shared_width = 7688;
    SPW_TRY(read_size(s, "moe_latent_size", 1, &c->latent_width));
    return read_size(s, "moe_shared_expert_intermediate_size", 1, &c->shared_width);
}

spw_status
spw__hf_read_nemotron(const source *s, spw_model_config *c)
{
    bool has[KINDS] = {false};
    c->halves_apart = c->ungated = true;
    c->curve = SPW_CURVE_RELU_SQUARED;
    c->mlp_width = 21504; /* the class's defaults */
    c->kv_heads = 8;
    c->head_dim = 128;
    c->norm_eps = 1e-5;
    SPW_TRY(read_layers(s, c, has));
    SPW_TRY(read_size(s, "hidden_size", 1, &c->width));
    SPW_TRY(read_size(s, "num_attention_heads", 1, &c->heads));
    SPW_TRY(read_size(s, "num_key_value_heads", 1, &c->kv_heads));
    SPW_TRY(read_size(s, "attention_head_dim", 1, &c->head_dim)); /* the older name */
    SPW_TRY(read_size(s, "head_dim", 1, &c->head_dim));
    SPW_TRY(read_size(s, "intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "max_position_embeddings", 1, &c->positions));
    SPW_TRY(read_real(s, "norm_eps", &c->norm_eps)); /* likewise */
    SPW_TRY(read_real(s, "layer_norm_epsilon", &c->norm_eps));
    SPW_TRY(read_bool(s, "mlp_bias", &c->mlp_bias));
    SPW_TRY(check_rest(s));
    if (has[0])
        SPW_TRY(read_mamba(s, c));
    return has[3] ? read_experts(s, c, has[2]) : SPW_OK;
}

static void
write_layers(json_t *o, const spw_model_config *c)
{
    char text[SPW_FULL_LAYERS_MAX + 1];
    for (uint64_t l = 0; l < c->layers; l++)
        text[l] = spw_model_experts(c, l) > 0 ? 'E'
                  : spw_model_has_mlp(c, l)   ? '-'
                  : spw_model_is_linear(c, l) ? 'M'
                                              : '*';
    text[c->layers] = '\0';
    set_size(o, "num_hidden_layers", c->layers);
    json_object_set_new(o, "hybrid_override_pattern", json_string(text));
}

static void
write_mamba(json_t *o, const spw_model_config *c)
{
    set_size(o, "mamba_num_heads", c->linear_heads);
    set_size(o, "mamba_head_dim", c->linear_value_dim);
    set_size(o, "n_groups", c->linear_key_heads);
    set_size(o, "ssm_state_size", c->linear_key_dim);
    set_size(o, "conv_kernel", c->linear_taps);
    json_object_set_new(o, "use_conv_bias", json_boolean(c->linear_bias));
    json_object_set_new(o, "time_step_min", json_real(c->linear_step));
}

void
spw__hf_write_nemotron(json_t *o, const spw_model_config *c)
{
    write_layers(o, c);
    set_size(o, "hidden_size", c->width);
    set_size(o, "num_attention_heads", c->heads);
    set_size(o, "num_key_value_heads", c->kv_heads);
    set_size(o, "head_dim", c->head_dim);
    if (c->experts == 0 || c->dense_width > 0)
        set_size(o, "intermediate_size", c->experts > 0 ? c->dense_width : c->mlp_width);
    set_size(o, "max_position_embeddings", c->positions);
    json_object_set_new(o, "layer_norm_epsilon", json_real(c->norm_eps));
    json_object_set_new(o, "mlp_hidden_act", json_string("relu2"));
    json_object_set_new(o, "mlp_bias", json_boolean(c->mlp_bias));
    if (c->linear_heads > 0)
        write_mamba(o, c);
    if (c->experts == 0)
        return;
    spw__hf_write_shared_experts(o, c);
    set_size(o, "n_shared_experts", 1);
    if (c->latent_width > 0)
        set_size(o, "moe_latent_size", c->latent_width);
    set_size(o, "moe_shared_expert_intermediate_size", c->shared_width);
}
