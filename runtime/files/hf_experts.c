/*
 * What config.json says of experts, by the names of Mixtral, Qwen, gpt-oss, DeepSeek, GLM, MiniMax, OLMoE, ERNIE, Hy3, HunYuan, Nemotron-H and AFMoE, and of latent attention.
 */
#include "hf_source.h"

spw_status
spw__hf_check_router_logits(const source *s)
{
    if (json_is_true(get(s, "output_router_logits")))
        return say(s, "not supported yet: ", "output_router_logits", " ", get(s, "output_router_logits"),
                   ": spillway.router_balance is the loss that spreads tokens over experts; set it to false");
    return must_be(s, "output_router_logits", false);
}

static bool
is_listed(const json_t *list, uint64_t l)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (json_is_integer(v) && json_integer_value(v) == (json_int_t)l)
            return true;
    }
    return false;
}

/* Qwen's layers without experts: those of a list, which must be the first ones here, and all but each so many-th. */
static spw_status
read_dense_layers(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "mlp_only_layers");
    uint64_t step = 1;
    SPW_TRY(read_size(s, "decoder_sparse_step", 1, &step));
    if (list != NULL && !json_is_array(list))
        return wrong(s, "mlp_only_layers", "a list of layers", list);
    c->sparse_every = step > 1 ? step : 0;
    while (c->dense_first < c->layers && is_listed(list, c->dense_first))
        c->dense_first++;
    for (uint64_t l = 0; l < c->layers; l++) {
        if ((spw_model_experts(c, l) == 0) != (is_listed(list, l) || (l + 1) % step != 0))
            return refuse(s, "mlp_only_layers", list);
    }
    if (c->dense_first == 0 && step == 1)
        c->dense_width = 0;
    else if (c->dense_width == 0)
        return wrong(s, "intermediate_size", "the width of layers without experts", get(s, "intermediate_size"));
    return SPW_OK;
}

/* The classes' defaults. */
static const struct qwen_experts {
    spw_family family;
    uint64_t experts, choices, width, shared;
    bool sum_to_one;
} qwen_experts[] = {
    {SPW_FAMILY_QWEN2_MOE, 60, 4, 1408, 5632, false},
    {SPW_FAMILY_QWEN3_MOE, 128, 8, 768, 0, false},
    {SPW_FAMILY_QWEN3_5_MOE, 256, 8, 512, 512, true},
    {SPW_FAMILY_QWEN3_NEXT, 512, 10, 512, 512, true},
};

/* NULL: none of Qwen's mixtures. */
static const struct qwen_experts *
qwen_defaults(const source *s, spw_family family)
{
    static const struct qwen_experts with_images = {SPW_FAMILY_QWEN3_MOE, 60, 4, 1408, 0, true};
    if (s->axes && family == with_images.family)
        return &with_images;
    for (size_t i = 0; i < sizeof qwen_experts / sizeof qwen_experts[0]; i++) {
        if (qwen_experts[i].family == family)
            return &qwen_experts[i];
    }
    return NULL;
}

/* Qwen3.5's class has experts in all layers, and their weights' sum is one; its folders have an empty list all the same. */
static spw_status
check_qwen3_5(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "mlp_only_layers");
    c->dense_width = 0;
    if (list != NULL && json_array_size(list) > 0)
        return refuse(s, "mlp_only_layers", list);
    return must_be(s, "norm_topk_prob", true);
}

static spw_status
read_qwen_experts(const source *s, const struct qwen_experts *d, spw_model_config *c)
{
    c->experts = d->experts;
    c->choices = d->choices;
    c->mlp_width = d->width;
    c->shared_width = d->shared;
    c->shared_gated = d->shared > 0;
    c->sum_to_one = d->sum_to_one;
    SPW_TRY(read_size(s, get(s, "num_local_experts") != NULL && !c->shared_gated ? "num_local_experts" : "num_experts",
                      1, &c->experts));
    SPW_TRY(read_size(s, "moe_intermediate_size", 1, &c->mlp_width));
    if (c->shared_gated)
        SPW_TRY(read_size(s, "shared_expert_intermediate_size", 1, &c->shared_width));
    if (c->family == SPW_FAMILY_QWEN3_5_MOE)
        return check_qwen3_5(s, c);
    SPW_TRY(s->axes ? must_be(s, "norm_topk_prob", true) : read_bool(s, "norm_topk_prob", &c->sum_to_one));
    return read_dense_layers(s, c);
}

/* A word that says what a family does anyway. */
static spw_status
must_say(const source *s, const char *key, const char *want)
{
    const json_t *v = get(s, key);
    const char *text = json_string_value(v);
    return v == NULL || (text != NULL && strcmp(text, want) == 0) ? SPW_OK : refuse(s, key, v);
}

/* DeepSeek-V2's, which go by the softmax, and have groups where the method says so. */
static spw_status
read_method(const source *s, spw_model_config *c)
{
    const char *method = json_string_value(get(s, "topk_method"));
    uint64_t every = 1;
    bool v2 = c->family == SPW_FAMILY_DEEPSEEK_V2,
         limited = method != NULL && strcmp(method, "group_limited_greedy") == 0;
    if (!spw__hf_of(c->family, LATENT | EXAONE_MOE | MIMO))
        return SPW_OK;
    if (c->family != SPW_FAMILY_MIMO_V2) /* who has a list there */
        SPW_TRY(read_size(s, "moe_layer_freq", 1, &every));
    if (every != 1)
        return refuse(s, "moe_layer_freq", get(s, "moe_layer_freq"));
    SPW_TRY(must_say(s, "scoring_func", spw__hf_of(c->family, SOFTMAX) ? "softmax" : "sigmoid"));
    if (c->family == SPW_FAMILY_MISTRAL4) /* a group of several would be as good as its best two shares */
        return c->groups == 1 ? SPW_OK : refuse(s, "n_group", get(s, "n_group"));
    if (v2 && !limited)
        c->groups = c->group_choices = 1;
    if (v2) /* its class does not look at it, others do */
        SPW_TRY(must_be(s, "norm_topk_prob", false));
    return v2 && limited ? SPW_OK : must_say(s, "topk_method", v2 ? "greedy" : "noaux_tc");
}

/* GLM-4.7-Flash's, Hy3's and its younger relatives' layers without experts, which must be the first ones here, whatever else is said. */
static spw_status
read_mlp_types(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "mlp_layer_types"), *said = get(s, "first_k_dense_replace");
    if (!spw__hf_of(c->family, GLM_LITE | HY | MIMO) &&
        (!spw__hf_of(c->family, INDEXED | EXAONE_MOE | KIMI) || list == NULL))
        return SPW_OK;
    c->dense_first = list == NULL ? 1 : 0;
    if (list != NULL && (!json_is_array(list) || json_array_size(list) != c->layers))
        return wrong(s, "mlp_layer_types", "a list with one entry for each layer", list);
    for (size_t l = 0; l < json_array_size(list); l++) {
        const char *text = json_string_value(json_array_get(list, l));
        bool dense = text != NULL && strcmp(text, "dense") == 0;
        if (text == NULL || (!dense && strcmp(text, "sparse") != 0) || (dense && c->dense_first < l))
            return refuse(s, "mlp_layer_types", list);
        c->dense_first += dense;
    }
    /* These classes write their default whatever the list says. */
    return said == NULL || spw__hf_of(c->family, INDEXED | EXAONE_MOE | KIMI) ||
                   json_number_value(said) == (double)c->dense_first
               ? SPW_OK
               : wrong(s, "first_k_dense_replace", "what mlp_layer_types says, or its default of 1", said);
}

/* The classes' defaults. */
static const struct shared_experts {
    spw_family family;
    uint64_t experts, choices, width, shared, dense_first, groups, group_choices;
    double scale;
    uint64_t q_rank, own, values; /* of latent attention */
} shared_experts[] = {
    {SPW_FAMILY_GLM4_MOE, 128, 8, 1408, 1, 1, 1, 1, 1, 0, 0, 0},
    {SPW_FAMILY_DEEPSEEK_V2, 64, 0, 1407, 2, 0, 1, 1, 1, 1536, 128, 128},
    {SPW_FAMILY_DEEPSEEK_V3, 256, 8, 2048, 1, 3, 8, 4, 2.5, 1536, 128, 128},
    {SPW_FAMILY_DEEPSEEK_V32, 256, 8, 2048, 1, 3, 8, 4, 2.5, 1536, 128, 128},
    {SPW_FAMILY_GLM_DSA, 256, 8, 2048, 1, 3, 1, 1, 2.5, 2048, 192, 256},
    {SPW_FAMILY_GLM4_LITE, 64, 4, 1536, 1, 1, 1, 1, 1.8, 768, 192, 256},
    {SPW_FAMILY_MISTRAL4, 128, 4, 2048, 1, 0, 1, 1, 1, 1024, 64, 128},
    {SPW_FAMILY_MIMO_V2, 256, 8, 2048, 0, 0, 1, 1, 1, 0, 0, 0},
    {SPW_FAMILY_EXAONE_MOE, 64, 8, 1024, 1, 1, 1, 1, 2.5, 0, 0, 0},
    {SPW_FAMILY_DOTS1, 0, 0, 1408, 0, 0, 1, 1, 1, 0, 0, 0}, /* whose class has no number of experts */
    {SPW_FAMILY_SOLAR_OPEN, 128, 8, 1280, 1, 0, 1, 1, 1, 0, 0, 0},
    {SPW_FAMILY_KIMI_LINEAR, 256, 8, 1024, 1, 1, 1, 1, 2.446, 0, 128,
     128}, /* what it has of experts is read elsewhere */
    {SPW_FAMILY_NEMOTRON_H, 8, 2, 7688, 1, 0, 1, 1, 1, 0, 0, 0},
};

static const struct shared_experts *
defaults_of(spw_family family)
{
    size_t i = 0;
    while (shared_experts[i].family != family)
        i++;
    return &shared_experts[i];
}

spw_status
spw__hf_settle_experts(const source *s, spw_model_config *c, uint64_t shared)
{
    SPW_TRY(read_mlp_types(s, c));
    c->shared_width = shared * c->mlp_width;
    if (c->groups == 1)
        c->groups = c->group_choices = 0;
    if (c->dense_first == 0)
        c->dense_width = 0;
    return SPW_OK;
}

static spw_status
read_shared_experts(const source *s, spw_model_config *c)
{
    const struct shared_experts *d = defaults_of(c->family);
    const bool exaone = c->family == SPW_FAMILY_EXAONE_MOE;
    const char *all_key = exaone ? "num_experts" : "n_routed_experts",
               *shared_key = exaone ? "num_shared_experts" : "n_shared_experts";
    uint64_t shared = d->shared;
    c->experts = d->experts;
    c->choices = d->choices;
    c->mlp_width = d->width;
    c->sigmoid = !spw__hf_of(c->family, SOFTMAX);
    c->sum_to_one = !spw__hf_of(c->family, DEEPSEEK_V2 | DOTS);
    c->experts_packed = c->family == SPW_FAMILY_MISTRAL4;
    c->dense_first = d->dense_first;
    c->groups = d->groups;
    c->group_choices = d->group_choices;
    c->choice_scale = d->scale;
    SPW_TRY(read_size(s, all_key, 1, &c->experts));
    SPW_TRY(read_size(s, "moe_intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, shared_key, c->family == SPW_FAMILY_MIMO_V2 ? 0 : 1, &shared));
    if (c->family == SPW_FAMILY_MIMO_V2 && shared > 0)
        return refuse(s, shared_key, get(s, shared_key));
    if (c->experts == 0 || (shared == 0 && c->family != SPW_FAMILY_MIMO_V2))
        return wrong(s, c->experts == 0 ? all_key : shared_key, "integer", NULL);
    if (!spw__hf_of(c->family, SOLAR | NEMOTRON | MIMO))
        SPW_TRY(read_size(s, "first_k_dense_replace", 0, &c->dense_first));
    SPW_TRY(read_size(s, "n_group", 1, &c->groups));
    SPW_TRY(read_size(s, "topk_group", 1, &c->group_choices));
    SPW_TRY(read_bool(s, "norm_topk_prob", &c->sum_to_one));
    SPW_TRY(read_real(s, "routed_scaling_factor", &c->choice_scale));
    if (!(c->choice_scale > 0))
        return wrong(s, "routed_scaling_factor", "number above 0", get(s, "routed_scaling_factor"));
    SPW_TRY(read_method(s, c));
    return spw__hf_settle_experts(s, c, shared);
}

/* A null q_lora_rank is none. Keys' sizes are the sum of what a head has of its own and what all share. */
spw_status
spw__hf_read_latent(const source *s, spw_model_config *c)
{
    const struct shared_experts *d;
    uint64_t own;
    if (!spw__hf_of(c->family, LATENT | KIMI))
        return SPW_OK;
    d = defaults_of(c->family);
    own = d->own;
    c->kv_rank = c->family == SPW_FAMILY_MISTRAL4 ? 256 : 512;
    c->rope_dim = 64;
    c->q_rank = json_object_get(s->object, "q_lora_rank") == NULL ? d->q_rank : 0;
    c->value_dim = d->values;
    c->rope_paired = true;
    SPW_TRY(read_size(s, "kv_lora_rank", 1, &c->kv_rank));
    SPW_TRY(read_size(s, "q_lora_rank", 1, &c->q_rank));
    SPW_TRY(read_size(s, "qk_nope_head_dim", 1, &own));
    SPW_TRY(read_size(s, "qk_rope_head_dim", 2, &c->rope_dim));
    SPW_TRY(read_size(s, "v_head_dim", 1, &c->value_dim));
    SPW_TRY(read_bool(s, "rope_interleave", &c->rope_paired));
    if (c->family == SPW_FAMILY_DEEPSEEK_V2) /* whose class has no other */
        SPW_TRY(must_be(s, "rope_interleave", true));
    if (get(s, "head_dim") != NULL && c->family != SPW_FAMILY_KIMI_LINEAR &&
        c->head_dim != c->rope_dim + (c->family == SPW_FAMILY_MISTRAL4 ? own : 0))
        return wrong(s, "head_dim",
                     c->family == SPW_FAMILY_MISTRAL4 ? "the sum of qk_nope_head_dim and qk_rope_head_dim"
                                                      : "the same as qk_rope_head_dim",
                     get(s, "head_dim"));
    if (c->kv_heads != c->heads)
        return wrong(s, "num_key_value_heads", "the same as num_attention_heads", get(s, "num_key_value_heads"));
    c->head_dim = own + c->rope_dim;
    return SPW_OK;
}

/* The published files say more than the class looks at: what it does anyway. */
static spw_status
read_minimax_experts(const source *s, spw_model_config *c)
{
    uint64_t shared = 0;
    c->experts = 256;
    c->choices = 8;
    c->sigmoid = c->sum_to_one = true;
    c->dense_width = 0;
    SPW_TRY(must_be(s, "use_qk_norm", true));
    SPW_TRY(must_say(s, "qk_norm_type", "per_layer"));
    SPW_TRY(must_say(s, "scoring_func", "sigmoid"));
    SPW_TRY(must_be(s, "use_routing_bias", true));
    SPW_TRY(read_size(s, "shared_intermediate_size", 0, &shared));
    if (shared > 0)
        return refuse(s, "shared_intermediate_size", get(s, "shared_intermediate_size"));
    return read_size(s, get(s, "num_local_experts") != NULL ? "num_local_experts" : "num_experts", 1, &c->experts);
}

/* Its class does not divide by sums below moe_norm_min; here they end far below, and larger ones would be seen. */
static spw_status
read_ernie_experts(const source *s, spw_model_config *c)
{
    const json_t *last = get(s, "moe_layer_end_index");
    uint64_t every = 1, shared = 2;
    double least = 1e-12;
    c->experts = 64;
    c->choices = 6;
    c->mlp_width = 1536;
    c->dense_first = 1;
    c->softmax_biased = c->sum_to_one = true;
    SPW_TRY(read_size(s, "moe_num_experts", 1, &c->experts));
    SPW_TRY(read_size(s, "moe_k", 1, &c->choices));
    SPW_TRY(read_size(s, "moe_intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "moe_num_shared_experts", 0, &shared));
    SPW_TRY(read_size(s, "moe_layer_start_index", 0, &c->dense_first));
    SPW_TRY(read_size(s, "moe_layer_interval", 1, &every));
    SPW_TRY(read_real(s, "moe_norm_min", &least));
    if (least > 1e-12)
        return refuse(s, "moe_norm_min", get(s, "moe_norm_min"));
    if (last != NULL && json_number_value(last) != -1 && json_number_value(last) + 1 < (double)c->layers)
        return refuse(s, "moe_layer_end_index", last);
    c->sparse_every = every > 1 ? every : 0;
    c->shared_width = shared * c->mlp_width;
    if (c->dense_first == 0 && every == 1)
        c->dense_width = 0;
    return SPW_OK;
}

static spw_status
read_hy_experts(const source *s, spw_model_config *c)
{
    uint64_t shared = 1;
    c->experts = 192;
    c->choices = 8;
    c->mlp_width = 1536;
    c->choice_scale = 2.826;
    c->sigmoid = c->sum_to_one = true;
    SPW_TRY(read_size(s, get(s, "num_local_experts") != NULL ? "num_local_experts" : "num_experts", 1, &c->experts));
    SPW_TRY(read_size(s, "moe_intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "num_shared_experts", 1, &shared));
    SPW_TRY(read_real(s, "router_scaling_factor", &c->choice_scale));
    if (!(c->choice_scale > 0))
        return wrong(s, "router_scaling_factor", "number above 0", get(s, "router_scaling_factor"));
    return spw__hf_settle_experts(s, c, shared);
}

/* One for all layers, or a list of what each has, which must be the same. The shared expert is as wide as another one. */
static spw_status
read_hunyuan_experts(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "moe_topk");
    c->experts = c->choices = 1;
    c->sum_to_one = true;
    c->shared_width = c->mlp_width;
    c->dense_width = 0;
    SPW_TRY(read_size(s, get(s, "num_local_experts") != NULL ? "num_local_experts" : "num_experts", 1, &c->experts));
    if (!json_is_array(list))
        return read_size(s, "moe_topk", 1, &c->choices);
    c->choices = (uint64_t)json_integer_value(json_array_get(list, 0));
    for (uint64_t l = 0; l < c->layers; l++) {
        const json_t *v = json_array_get(list, l);
        if (!json_is_integer(v) || json_integer_value(v) < 1 || (uint64_t)json_integer_value(v) != c->choices)
            return refuse(s, "moe_topk", list);
    }
    return SPW_OK;
}

/* LFM2's, to whose sums of sigmoids its class adds more than others'. */
static spw_status
read_lfm_experts(const source *s, spw_model_config *c)
{
    c->experts = 32;
    c->choices = 4;
    c->mlp_width = 1792;
    c->dense_first = 2;
    c->choice_scale = 1;
    c->sigmoid = c->sum_to_one = true;
    SPW_TRY(read_size(s, "num_experts", 1, &c->experts));
    SPW_TRY(read_size(s, "moe_intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "num_dense_layers", 0, &c->dense_first));
    SPW_TRY(read_bool(s, "norm_topk_prob", &c->sum_to_one));
    SPW_TRY(must_be(s, "use_expert_bias", true));
    SPW_TRY(read_real(s, "routed_scaling_factor", &c->choice_scale));
    if (!(c->choice_scale > 0))
        return wrong(s, "routed_scaling_factor", "number above 0", get(s, "routed_scaling_factor"));
    c->choice_least = c->sum_to_one ? 1e-6 : 0;
    if (c->dense_first == 0)
        c->dense_width = 0;
    return SPW_OK;
}

/* AFMoE's, and what sets its attention and embeddings apart. Published files say more of what its class does anyway. */
static spw_status
read_afmoe(const source *s, spw_model_config *c)
{
    static const char *const ones[] = {"n_group", "topk_group", "num_expert_groups", "num_limited_groups"};
    uint64_t shared = 2, one;
    bool scaled = false;
    c->experts = 64;
    c->choices = 6;
    c->mlp_width = 1408;
    c->dense_first = 1;
    c->choice_scale = 1;
    c->sigmoid = c->sum_to_one = c->attention_gated = c->gate_apart = true;
    SPW_TRY(read_size(s, "num_experts", 1, &c->experts));
    SPW_TRY(read_size(s, "moe_intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "num_shared_experts", 1, &shared));
    SPW_TRY(read_size(s, "num_dense_layers", 0, &c->dense_first));
    SPW_TRY(read_real(s, "route_scale", &c->choice_scale));
    if (!(c->choice_scale > 0))
        return wrong(s, "route_scale", "number above 0", get(s, "route_scale"));
    for (size_t i = 0; i < sizeof ones / sizeof ones[0]; i++) {
        one = 1;
        SPW_TRY(read_size(s, ones[i], 1, &one));
        if (one != 1)
            return refuse(s, ones[i], get(s, ones[i]));
    }
    SPW_TRY(must_be(s, "route_norm", true));
    SPW_TRY(must_say(s, "score_func", "sigmoid"));
    SPW_TRY(read_bool(s, "mup_enabled", &scaled));
    c->embedding_scale = scaled ? sqrt((double)c->width) : 0;
    c->shared_width = shared * c->mlp_width;
    if (c->dense_first == 0)
        c->dense_width = 0;
    return SPW_OK;
}

/* mlp_width is an expert's, dense_width that of layers without. */
spw_status
spw__hf_read_experts(const source *s, spw_model_config *c)
{
    bool gpt_oss = c->family == SPW_FAMILY_GPT_OSS, mixtral = c->family == SPW_FAMILY_MIXTRAL;
    const struct qwen_experts *qwen = qwen_defaults(s, c->family);
    double jitter = 0;
    bool shared = spw__hf_of(c->family, SHARED | NEMOTRON);
    bool minimax = c->family == SPW_FAMILY_MINIMAX_M2, olmoe = c->family == SPW_FAMILY_OLMOE;
    bool ernie = c->family == SPW_FAMILY_ERNIE_MOE, hy = c->family == SPW_FAMILY_HY_V3;
    bool hunyuan = c->family == SPW_FAMILY_HUNYUAN_MOE, lfm = c->family == SPW_FAMILY_LFM2_MOE;
    bool afmoe = c->family == SPW_FAMILY_AFMOE, kimi = c->family == SPW_FAMILY_KIMI_LINEAR;
    if (!mixtral && qwen == NULL && !gpt_oss && !shared && !minimax && !olmoe && !ernie && !hy && !hunyuan && !lfm &&
        !afmoe && !kimi)
        return SPW_OK;
    if (!hy && !hunyuan) /* whose classes make no loss of them */
        SPW_TRY(spw__hf_check_router_logits(s));
    c->dense_width = c->mlp_width;
    if (qwen != NULL) {
        SPW_TRY(read_qwen_experts(s, qwen, c));
    } else if (shared) {
        SPW_TRY(read_shared_experts(s, c));
    } else if (minimax) {
        SPW_TRY(read_minimax_experts(s, c));
    } else if (ernie) {
        SPW_TRY(read_ernie_experts(s, c));
    } else if (hy) {
        SPW_TRY(read_hy_experts(s, c));
    } else if (lfm) {
        SPW_TRY(read_lfm_experts(s, c));
    } else if (kimi) {
        return spw__hf_read_kimi_experts(s, c);
    } else if (afmoe) {
        SPW_TRY(read_afmoe(s, c));
    } else if (hunyuan) {
        SPW_TRY(read_hunyuan_experts(s, c));
    } else {
        c->experts = gpt_oss ? 128 : olmoe ? 64 : 8;
        c->choices = gpt_oss ? 4 : olmoe ? 8 : 2;
        c->sum_to_one = !olmoe;
        if (olmoe)
            SPW_TRY(read_bool(s, "norm_topk_prob", &c->sum_to_one));
        c->dense_width = 0;
        SPW_TRY(
            read_size(s, get(s, "num_local_experts") != NULL ? "num_local_experts" : "num_experts", 1, &c->experts));
    }
    SPW_TRY(read_size(s, "num_experts_per_tok", 1, &c->choices));
    if (c->choices == 0)
        return wrong(s, "num_experts_per_tok", "integer", NULL);
    if (mixtral || minimax)
        SPW_TRY(read_real(s, "router_jitter_noise", &jitter));
    return jitter == 0 ? SPW_OK : refuse(s, "router_jitter_noise", get(s, "router_jitter_noise"));
}
