/*
 * config.json of Hugging Face's families: what is refused, by name, what a missing key means, and the same keys as the model
 * section of a training configuration.
 */
#include "lib_tiny.h"
#include "spw_files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

/* What Gemma 4's larger sizes say, of three layers, and what its smaller ones do. */
#define FOUR2    "\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]"
#define MAMBA    "\"mamba_n_heads\":3"
#define NEMOTRON "\"hybrid_override_pattern\":\"ME*\""
#define GROWS                                                                                                          \
    "\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":128.0,\"original_max_position_embeddings\":8192,"          \
    "\"llama_4_scaling_beta\":0.1,\"partial_rotary_factor\":0.5,\"mscale\":1.0,\"mscale_all_dim\":1.0}"
#define CONVS "\"layer_types\":[\"conv\",\"full_attention\",\"conv\"]"
#define FOUR                                                                                                           \
    "\"hidden_size_per_layer_input\":0,\"layer_types\":[\"sliding_attention\",\"sliding_attention\",\"full_"           \
    "attention\"]"

#define HALVES "\"num_key_value_heads\":2,\"mamba_n_heads\":2,\"mamba_d_ssm\":16,\"mamba_d_head\":\"auto\""

static spw_status
parse(const char *type, const char *rest, spw_model_config *m, spw_error *err)
{
    char text[2000];
    bool gpt2 = strcmp(type, "gpt2") == 0;
    snprintf(text, sizeof text, "{\"model_type\":\"%s\",%s%s%s}", type,
             gpt2 ? "\"n_embd\":12,\"n_layer\":3,\"n_head\":2"
                  : "\"hidden_size\":12,\"num_hidden_layers\":3,\"num_attention_heads\":2,\"intermediate_size\":7",
             rest[0] != '\0' ? "," : "", rest);
    return spw_hf_config_parse(m, text, "config.json", false, err);
}

/* Which of GLM-5's layers have an indexer, by three keys; every so many-th behind the first ones. */
static void
test_indexed_layers(void **state)
{
    static const struct {
        const char *keys, *layers; /* NULL: refused */
    } cases[] = {
        {"\"index_topk_freq\":3", "FFSSFSSFS"},
        {"\"index_topk_freq\":3,\"index_skip_topk_offset\":4", "FFFFSSFSS"},
        {"\"index_topk_freq\":1,\"index_skip_topk_offset\":4", "FFFFFFFFF"},
        {"\"index_topk_pattern\":\"FSSSFSSSF\"", "FSSSFSSSF"},
        {"\"index_topk_pattern\":\"FFFFFFFSS\"", "FFFFFFFSS"},
        {"\"index_topk_pattern\":\"FSSSFSSSS\"", NULL},
        {"\"index_topk_pattern\":\"FSFSFSFFS\"", NULL},
        {"\"indexer_types\":[\"full\",\"full\",\"shared\",\"full\",\"shared\",\"full\",\"shared\",\"full\",\"shared\"]",
         "FFSFSFSFS"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[500];
        spw_model_config m;
        spw_error err = {0};
        snprintf(text, sizeof text,
                 "{\"model_type\":\"glm_moe_dsa\",\"hidden_size\":12,\"num_hidden_layers\":9,\"num_attention_heads\":2,"
                 "\"intermediate_size\":7,%s}",
                 cases[i].keys);
        if (cases[i].layers == NULL) {
            assert_int_equal(spw_hf_config_parse(&m, text, "config.json", false, &err), SPW_ECONFIG);
            assert_non_null(strstr(err.message, "not supported yet: index_topk_pattern"));
            continue;
        }
        DONE(spw_hf_config_parse(&m, text, "config.json", false, &err));
        for (uint64_t l = 0; l < 9; l++)
            assert_int_equal(spw_model_has_indexer(&m, l), cases[i].layers[l] == 'F');
    }
}

/* Of a mixture of Qwen's, whose layers without experts are as wide as nothing else. */
static void
test_needs_dense_width(void **state)
{
    spw_model_config m;
    spw_error err = {0};
    char text[400];
    (void)state;
    for (int step = 1; step <= 2; step++) {
        snprintf(text, sizeof text,
                 "{\"model_type\":\"qwen3_moe\",\"hidden_size\":12,\"num_hidden_layers\":3,\"num_attention_heads\":2,"
                 "\"decoder_sparse_step\":%d}",
                 step);
        assert_int_equal(spw_hf_config_parse(&m, text, "config.json", false, &err), step == 1 ? SPW_OK : SPW_ECONFIG);
    }
    assert_non_null(
        strstr(err.message, "intermediate_size: expected the width of layers without experts, got nothing"));
}

/* Each is another model than is computed here, or no model; the message names file, key and value. */
static void
test_refusals(void **state)
{
    static const struct {
        const char *type, *rest, *says;
    } wrong[] = {
        {"mamba", "", "not supported yet: model_type \"mamba\""},
        {"mixtral", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"mixtral", "\"router_jitter_noise\":0.1", "not supported yet: router_jitter_noise 0.1"},
        {"mixtral", "\"num_experts_per_tok\":0", "num_experts_per_tok: expected integer in"},
        {"mixtral", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"qwen3_moe", "\"decoder_sparse_step\":0", "decoder_sparse_step: expected integer in [1, "},
        {"qwen3_moe", "\"mlp_only_layers\":[1]", "not supported yet: mlp_only_layers [1]"},
        {"qwen3_moe", "\"mlp_only_layers\":1", "mlp_only_layers: expected a list of layers, got 1"},
        {"qwen3_moe", "\"norm_topk_prob\":1", "norm_topk_prob: expected true or false, got 1"},
        {"phi3", "\"rope_scaling\":{\"type\":\"su\",\"short_factor\":[1,1,1],\"long_factor\":[1]}",
         "rope_scaling.long_factor: expected a list of 3 numbers above 0, got [1]"},
        {"phi3", "\"rope_scaling\":{\"type\":\"longrope\"}",
         "rope_scaling.short_factor: expected a list of 3 numbers above 0, got nothing"},
        {"phi3", "\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,0,1]}", "numbers above 0, got [1,0,1]"},
        {"phi3", "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}", "rope_scaling.short_factor: expected a list"},
        {"phi3", "\"rope_scaling\":{\"type\":\"longrope\",\"original_max_position_embeddings\":7}",
         "rope_scaling.original_max_position_embeddings: expected the same as outside, got 7"},
        {"phi3", "\"rope_scaling\":{\"type\":\"longrope\",\"long_mscale\":1}",
         "not supported yet: rope_scaling.long_mscale 1"},
        {"phi3", "\"rope_scaling\":{\"type\":\"default\",\"long_factor\":[1]}",
         "not supported yet: rope_scaling.long_factor [1]"},
        {"phi3", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}",
         "not supported yet: rope_scaling.type \"linear\""},
        {"phi3", "\"partial_rotary_factor\":1.5", "partial_rotary_factor: expected number above 0, at most 1, got 1.5"},
        {"phi3", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"smollm3", "\"no_rope_layers\":[1,0,0]", "not supported yet: no_rope_layers[2] 0"},
        {"smollm3", "\"no_rope_layers\":[1,true,1]", "not supported yet: no_rope_layers[1] true"},
        {"smollm3", "\"no_rope_layers\":[1,0]", "no_rope_layers: expected a list with an entry for each layer"},
        {"gpt_neox", "\"hidden_act\":\"silu\"", "not supported yet: hidden_act \"silu\""},
        {"gpt_neox", "\"rotary_pct\":1.5", "rotary_pct: expected number above 0, at most 1, got 1.5"},
        {"gpt_neox", "\"use_parallel_residual\":1", "use_parallel_residual: expected true or false, got 1"},
        {"gpt_neox", "\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}",
         "not supported yet: rope_scaling.type \"dynamic\""},
        {"opt", "\"ffn_dim\":8,\"do_layer_norm_before\":false",
         "not supported yet: do_layer_norm_before false: of OPT the models that norm what is read are computed"},
        {"opt", "\"ffn_dim\":8,\"word_embed_proj_dim\":4",
         "not supported yet: word_embed_proj_dim 4: embeddings must be as wide as hidden_size"},
        {"opt", "\"ffn_dim\":8,\"_remove_final_layer_norm\":true", "not supported yet: _remove_final_layer_norm true"},
        {"opt", "\"ffn_dim\":8,\"layer_norm_elementwise_affine\":false",
         "not supported yet: layer_norm_elementwise_affine false"},
        {"opt", "\"ffn_dim\":8,\"activation_function\":\"tanh\"", "not supported yet: activation_function \"tanh\""},
        {"opt", "", "model: hidden_size, num_hidden_layers, num_attention_heads, ffn_dim are needed"},
        {"starcoder2", "\"hidden_act\":\"silu\"", "not supported yet: hidden_act \"silu\""},
        {"starcoder2", "\"partial_rotary_factor\":0.5", "not supported yet: partial_rotary_factor 0.5"},
        {"starcoder2", "\"sliding_window\":0", "sliding_window: expected integer in [1, "},
        {"stablelm", "\"qk_layernorm\":true",
         "not supported yet: qk_layernorm true: of StableLM the models without norms of heads"},
        {"stablelm", "\"hidden_act\":\"gelu\"", "not supported yet: hidden_act \"gelu\""},
        {"qwen3_5_text", "\"attn_output_gate\":false", "not supported yet: attn_output_gate false"},
        {"qwen3_5_text", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"qwen3_5_text", "\"hidden_act\":\"gelu\"", "not supported yet: hidden_act \"gelu\""},
        {"qwen3_5_text", "\"linear_conv_kernel_dim\":9", "not supported yet: linear_conv_kernel_dim 9"},
        {"qwen3_5_text", "\"linear_key_head_dim\":12", "not supported yet: linear_key_head_dim 12"},
        {"qwen3_5_text", "\"linear_value_head_dim\":512", "not supported yet: linear_value_head_dim 512"},
        {"qwen3_5_text", "\"linear_num_value_heads\":24",
         "linear_num_value_heads: expected a multiple of linear_num_key_heads, got 24"},
        {"qwen3_5_text", "\"layer_types\":[\"full_attention\",\"linear_attention\",\"full_attention\"]",
         "not supported yet: layer_types[1] \"linear_attention\""},
        {"qwen3_5_text", "\"layer_types\":[\"linear_attention\",\"sliding_attention\",\"full_attention\"]",
         "not supported yet: layer_types[1] \"sliding_attention\""},
        {"qwen3_5_text", "\"layer_types\":[\"full_attention\"]", "layer_types: expected a list with one entry"},
        {"qwen3_5_text", "\"full_attention_interval\":0", "full_attention_interval: expected integer in [1, "},
        {"qwen3_5_text", "\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":4}",
         "not supported yet: rope_parameters.rope_type \"linear\""},
        {"qwen3_next", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}",
         "not supported yet: rope_scaling.type \"linear\""},
        {"qwen3_next", "\"rope_scaling\":{\"type\":\"default\",\"mrope_section\":[1,2]}",
         "not supported yet: rope_scaling.mrope_section [1,2]"},
        {"qwen3_next", "\"mlp_only_layers\":[1]", "not supported yet: mlp_only_layers [1]"},
        {"qwen3_next", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"qwen3_5_moe_text", "\"mlp_only_layers\":[0]", "not supported yet: mlp_only_layers [0]"},
        {"qwen3_5_moe_text", "\"norm_topk_prob\":false", "not supported yet: norm_topk_prob false"},
        {"qwen3_5", "",
         "not supported yet: model_type \"qwen3_5\": of a model of text and images only a folder's text"},
        {"gemma4_text", FOUR ",\"num_kv_shared_layers\":3", "not supported yet: num_kv_shared_layers 3"},
        {"gemma4_text", FOUR ",\"use_bidirectional_attention\":\"all\"",
         "not supported yet: use_bidirectional_attention \"all\""},
        {"gemma4_text", FOUR ",\"enable_moe_block\":true,\"num_experts\":4",
         "top_k_experts: expected an integer, because enable_moe_block is true, got nothing"},
        {"gemma4_text", FOUR ",\"final_logit_softcapping\":0",
         "final_logit_softcapping: expected number above 0, or null"},
        {"gemma4_text", FOUR ",\"hidden_activation\":\"silu\"", "not supported yet: hidden_activation \"silu\""},
        {"gemma4_text", FOUR ",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8}",
         "not supported yet: rope_scaling {"},
        {"gemma4_text", FOUR ",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"linear\",\"factor\":8}}",
         "not supported yet: rope_parameters.full_attention.rope_type \"linear\""},
        {"gemma4_text", FOUR ",\"rope_parameters\":{\"sliding_attention\":{\"rope_type\":\"proportional\"}}",
         "not supported yet: rope_parameters.sliding_attention.rope_type \"proportional\""},
        {"gemma4_text", FOUR ",\"rope_parameters\":{\"full_attention\":{\"partial_rotary_factor\":0.25}}",
         "not supported yet: rope_parameters.full_attention.partial_rotary_factor 0.25"},
        {"gemma4_text", FOUR ",\"per_layer_config\":{\"1\":{\"head_dim\":64}}",
         "not supported yet: per_layer_config.1 {\"head_dim\":64}"},
        {"gemma4_text", FOUR ",\"per_layer_config\":{\"2\":{\"hidden_size\":64}}",
         "not supported yet: per_layer_config.2.hidden_size 64"},
        {"gemma4_text", FOUR ",\"per_layer_config\":{\"2\":{\"num_key_value_heads\":1}}",
         "not supported yet: per_layer_config {"},
        {"gemma4_text",
         "\"hidden_size_per_layer_input\":0,\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_"
         "attention\"]",
         "layer_types: the last layer has a window"},
        {"gemma4", "", "not supported yet: model_type \"gemma4\": of a model of text and images only a folder's text"},
        {"smollm3", "\"no_rope_layer_interval\":0", "no_rope_layer_interval: expected integer in [1, "},
        {"smollm3", "\"use_sliding_window\":true,\"sliding_window\":4", "not supported yet: use_sliding_window true"},
        {"qwen2_moe", "\"mlp_only_layers\":[0,2]", "not supported yet: mlp_only_layers [0,2]"},
        {"glm4_moe", "\"routed_scaling_factor\":0", "routed_scaling_factor: expected number above 0, got 0"},
        {"glm4_moe", "\"n_group\":0", "n_group: expected integer in [1, "},
        {"glm4_moe", "\"n_shared_experts\":0", "n_shared_experts: expected integer in [1, "},
        {"glm4_moe", "\"mlp_bias\":true", "not supported yet: mlp_bias true"},
        {"deepseek_v3", "\"scoring_func\":\"softmax\"", "not supported yet: scoring_func \"softmax\""},
        {"deepseek_v3", "\"topk_method\":\"greedy\"", "not supported yet: topk_method \"greedy\""},
        {"deepseek_v3", "\"num_key_value_heads\":1",
         "num_key_value_heads: expected the same as num_attention_heads, got 1"},
        {"deepseek_v3", "\"head_dim\":8", "head_dim: expected the same as qk_rope_head_dim, got 8"},
        {"deepseek_v3", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}",
         "not supported yet: rope_scaling.type \"linear\""},
        {"deepseek_v3", "\"partial_rotary_factor\":0.5", "not supported yet: partial_rotary_factor 0.5"},
        {"deepseek_v2", "\"topk_method\":\"noaux_tc\"", "not supported yet: topk_method \"noaux_tc\""},
        {"deepseek_v2", "\"scoring_func\":\"sigmoid\"", "not supported yet: scoring_func \"sigmoid\""},
        {"deepseek_v2", "\"norm_topk_prob\":true", "not supported yet: norm_topk_prob true"},
        {"deepseek_v2", "\"moe_layer_freq\":2", "not supported yet: moe_layer_freq 2"},
        {"deepseek_v2", "\"rope_interleave\":false", "not supported yet: rope_interleave false"},
        {"deepseek_v2", "\"kv_lora_rank\":0", "kv_lora_rank: expected integer in [1, "},
        {"glm4_moe_lite", "\"mlp_layer_types\":[\"sparse\",\"dense\",\"sparse\"]",
         "not supported yet: mlp_layer_types [\"sparse\",\"dense\",\"sparse\"]"},
        {"glm4_moe_lite", "\"mlp_layer_types\":[\"dense\"]",
         "mlp_layer_types: expected a list with one entry for each layer, got [\"dense\"]"},
        {"glm4_moe_lite", "\"first_k_dense_replace\":2",
         "first_k_dense_replace: expected what mlp_layer_types says, or its default of 1, got 2"},
        {"deepseek_v32", "\"q_lora_rank\":null", "q_lora_rank: expected integer, got null"},
        {"deepseek_v32", "\"rope_interleave\":false", "not supported yet: rope_interleave false"},
        {"deepseek_v32", "\"index_topk\":0", "index_topk: expected integer in [1, "},
        {"deepseek_v32", "\"layer_types\":[\"full_attention\",\"indexed_attention\",\"indexed_attention\"]",
         "not supported yet: layer_types[0] \"full_attention\""},
        {"exaone_moe", "\"n_routed_experts\":4,\"num_experts\":0", "num_experts: expected integer in [1, "},
        {"exaone_moe", "\"scoring_func\":\"softmax\"", "not supported yet: scoring_func \"softmax\""},
        {"exaone_moe", "\"mlp_layer_types\":[\"sparse\",\"dense\",\"sparse\"]", "not supported yet: mlp_layer_types"},
        {"exaone_moe", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"glm_moe_dsa", "\"indexer_rope_interleave\":false", "not supported yet: indexer_rope_interleave false"},
        {"glm_moe_dsa", "\"indexer_types\":[\"full\"]",
         "indexer_types: expected one entry for each layer, got [\"full\"]"},
        {"glm_moe_dsa", "\"indexer_types\":[\"shared\",\"full\",\"full\"]",
         "not supported yet: indexer_types [\"shared\","},
        {"glm_moe_dsa", "\"indexer_types\":[\"full\",\"full\",\"half\"]",
         "not supported yet: indexer_types [\"full\","},
        {"glm_moe_dsa", "\"index_topk_pattern\":\"FSF?\"", "index_topk_pattern: expected one entry for each layer"},
        {"glm_moe_dsa", "\"index_topk_pattern\":\"FSX\"", "not supported yet: index_topk_pattern \"FSX\""},
        {"glm4_moe", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"qwen2_moe", "\"use_sliding_window\":true", "not supported yet: use_sliding_window true"},
        {"qwen2_moe", "\"shared_expert_intermediate_size\":0",
         "shared_expert_intermediate_size: expected integer in [1, "},
        {"gemma3", "",
         "not supported yet: model_type \"gemma3\": of a model of text and images only a folder's text part is read"},
        {"gemma2", "\"attn_logit_softcapping\":0", "attn_logit_softcapping: expected number above 0, or null, got 0"},
        {"gemma2", "\"final_logit_softcapping\":-3", "final_logit_softcapping: expected number in [0, 1e12], got -3"},
        {"gemma2", "\"layer_types\":[\"full_attention\",\"sliding_attention\",\"full_attention\"]",
         "not supported yet: layer_types[1] \"sliding_attention\""},
        {"gemma2", "\"use_bidirectional_attention\":true", "not supported yet: use_bidirectional_attention true"},
        {"gemma2", "\"hidden_activation\":\"silu\"", "not supported yet: hidden_activation \"silu\""},
        {"gemma3_text", "\"final_logit_softcapping\":30.0", "not supported yet: final_logit_softcapping 30.0"},
        {"gemma3_text", "\"attn_logit_softcapping\":50.0", "not supported yet: attn_logit_softcapping 50.0"},
        {"gemma3_text", "\"use_bidirectional_attention\":true", "not supported yet: use_bidirectional_attention true"},
        {"gemma3_text", "\"hidden_activation\":\"silu\"", "not supported yet: hidden_activation \"silu\""},
        {"gemma3_text", "\"sliding_window\":null", "sliding_window: expected integer, got null"},
        {"gemma3_text", "\"sliding_window_pattern\":0", "sliding_window_pattern: expected integer in [1,"},
        {"gemma3_text", "\"query_pre_attn_scalar\":0", "query_pre_attn_scalar: expected integer in [1,"},
        {"gemma3_text", "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\"]",
         "not supported yet: layer_types[2] \"full_attention\""},
        {"gemma3_text", "\"rope_parameters\":{\"rope_theta\":1e6}", "not supported yet: rope_parameters.rope_theta "},
        {"gemma3_text", "\"rope_parameters\":{\"sliding_attention\":{\"rope_type\":\"linear\",\"factor\":2}}",
         "not supported yet: rope_parameters.sliding_attention.rope_type \"linear\""},
        {"gemma3_text", "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"longrope\"}}",
         "not supported yet: rope_parameters.full_attention.rope_type \"longrope\""},
        {"gemma3_text", "\"rope_parameters\":{\"full_attention\":7}",
         "rope_parameters.full_attention: expected an object, got 7"},
        {"gemma3_text", "\"rope_local_base_freq\":0", "rope_local_base_freq: expected number above 0, got 0"},
        {"gemma3_text", "\"mlp_bias\":true", "not supported yet: mlp_bias true"},
        {"olmo2", "\"sliding_window\":4", "not supported yet: sliding_window 4"},
        {"olmo2", "\"mlp_bias\":true", "not supported yet: mlp_bias true"},
        {"olmo2", "\"hidden_act\":\"gelu\"", "not supported yet: hidden_act \"gelu\""},
        {"olmo3", "\"rope_theta\":1e4",
         "rope_theta: expected 500000, or rope_parameters with one for each kind of layer, got 10000"},
        {"olmo3", "\"sliding_window\":null", "sliding_window: expected integer, got null"},
        {"olmo3", "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\"]",
         "not supported yet: layer_types[2] \"full_attention\""},
        {"olmo3", "\"rope_parameters\":{\"sliding_attention\":{\"rope_type\":\"yarn\",\"factor\":2}}",
         "not supported yet: rope_parameters.sliding_attention.rope_type \"yarn\""},
        {"gemma", "\"hidden_act\":\"relu\"", "not supported yet: hidden_act \"relu\""},
        {"gemma", "\"hidden_act\":\"gelu\",\"hidden_activation\":\"gelu\"",
         "not supported yet: hidden_activation \"gelu\""},
        {"gemma", "\"use_bidirectional_attention\":true", "not supported yet: use_bidirectional_attention true"},
        {"gemma", "\"mlp_bias\":true", "not supported yet: mlp_bias true"},
        {"granite", "\"residual_multiplier\":0", "residual_multiplier: expected number above 0, got 0"},
        {"granite", "\"logits_scaling\":\"8\"", "logits_scaling: expected number in [0, 1e12], got \"8\""},
        {"olmoe", "\"clip_qkv\":8.0", "not supported yet: clip_qkv 8.0"},
        {"olmoe", "\"sliding_window\":9", "not supported yet: sliding_window 9"},
        {"olmoe", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"seed_oss", "\"attention_out_bias\":1", "attention_out_bias: expected true or false, got 1"},
        {"glm4", "\"mlp_bias\":true", "not supported yet: mlp_bias true"},
        {"glm4", "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\"]",
         "not supported yet: layer_types[0] \"sliding_attention\""},
        {"ernie4_5", "\"use_bias\":0", "use_bias: expected true or false, got 0"},
        {"ministral3", "\"sliding_window\":null", "rope_parameters: expected an object"},
        {"ministral3", "\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":2.0}",
         "not supported yet: rope_parameters.rope_type \"linear\""},
        {"ministral3", "\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":2.0,\"llama_4_scaling_beta\":\"a\"}",
         "rope_parameters.llama_4_scaling_beta: expected number"},
        {"mimo_v2_flash", "\"n_shared_experts\":1", "not supported yet: n_shared_experts 1"},
        {"mimo_v2_flash", "\"scoring_func\":\"softmax\"", "not supported yet: scoring_func \"softmax\""},
        {"mimo_v2_flash", "\"topk_method\":\"greedy\"", "not supported yet: topk_method \"greedy\""},
        {"mimo_v2_flash", "\"attention_value_scale\":0",
         "attention_value_scale: expected number above 0, or null, got 0"},
        {"mimo_v2_flash", "\"rope_theta\":1e4", "not supported yet: rope_theta 10000.0"},
        {"mimo_v2_flash", "\"swa_rope_theta\":1e5", "not supported yet: swa_rope_theta 100000.0"},
        {"mimo_v2_flash", "\"partial_rotary_factor\":0.5", "not supported yet: partial_rotary_factor 0.5"},
        {"mimo_v2_flash", "\"swa_num_key_value_heads\":4", "not supported yet: swa_num_key_value_heads 4"},
        {"mimo_v2_flash", "\"swa_v_head_dim\":192", "not supported yet: swa_v_head_dim 192"},
        {"mimo_v2_flash", "\"layernorm_epsilon\":1e-6", "not supported yet: layernorm_epsilon"},
        {"mimo_v2_flash", "\"add_full_attention_sink_bias\":true",
         "not supported yet: add_full_attention_sink_bias true"},
        {"mimo_v2_flash", "\"add_swa_attention_sink_bias\":false",
         "not supported yet: add_swa_attention_sink_bias false"},
        {"mimo_v2_flash", "\"hybrid_layer_pattern\":[1,1,1]", "not supported yet: hybrid_layer_pattern [1,1,1]"},
        {"mimo_v2_flash", "\"moe_layer_freq\":[1,1,1]", "not supported yet: moe_layer_freq [1,1,1]"},
        {"mimo_v2_flash", "\"moe_layer_freq\":1", "not supported yet: moe_layer_freq 1"},
        {"mimo_v2_flash", "\"mlp_layer_types\":[\"sparse\",\"dense\",\"sparse\"]",
         "not supported yet: mlp_layer_types"},
        {"mimo_v2_flash", "\"layer_types\":[\"full_attention\",\"sliding_attention\",\"conv\"]",
         "not supported yet: layer_types[2] \"conv\""},
        {"mimo_v2_flash",
         "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"yarn\",\"factor\":4},\"sliding_attention\":{}}",
         "not supported yet: rope_parameters.full_attention.rope_type \"yarn\""},
        {"mimo_v2_flash",
         "\"rope_parameters\":{\"full_attention\":{},\"sliding_attention\":{\"partial_rotary_factor\":0.5}}",
         "not supported yet: rope_parameters.sliding_attention.partial_rotary_factor 0.5"},
        {"bamba", "", "mamba_n_heads: expected heads of mamba_d_head that are"},
        {"bamba", MAMBA ",\"attn_layer_indices\":[3]", "not supported yet: attn_layer_indices [3]"},
        {"bamba", MAMBA ",\"attn_layer_indices\":2", "attn_layer_indices: expected a list of the layers"},
        {"bamba", MAMBA ",\"layer_types\":[\"mamba\",\"mamba\",\"mamba\"]", "not supported yet: layer_types"},
        {"bamba", MAMBA ",\"partial_rotary_factor\":1", "not supported yet: partial_rotary_factor 1"},
        {"bamba", MAMBA ",\"z_loss_coefficient\":1e-4", "not supported yet: z_loss_coefficient 0.0001"},
        {"bamba", MAMBA ",\"mamba_proj_bias\":true", "not supported yet: mamba_proj_bias true"},
        {"bamba", MAMBA ",\"time_step_limit\":[1,2]", "not supported yet: time_step_limit [1,2]"},
        {"lfm2", "\"conv_bias\":true", "not supported yet: conv_bias true"},
        {"lfm2", "\"full_attn_idxs\":[0],\"conv_L_cache\":9", "not supported yet: conv_L_cache 9"},
        {"lfm2", "\"full_attn_idxs\":[3]", "not supported yet: full_attn_idxs [3]"},
        {"lfm2", "\"full_attn_idxs\":[-1]", "not supported yet: full_attn_idxs [-1]"},
        {"lfm2", "\"full_attn_idxs\":1", "full_attn_idxs: expected a list of the layers"},
        {"lfm2", "\"full_attn_idxs\":[1],\"layer_types\":[\"conv\",\"conv\",\"full_attention\"]",
         "full_attn_idxs: expected a list of the layers"},
        {"lfm2", "\"layer_types\":[\"conv\",\"linear_attention\",\"conv\"]",
         "not supported yet: layer_types[1] \"linear_attention\""},
        {"lfm2", "\"layer_types\":[\"conv\"]", "layer_types: expected a list with one entry for each layer"},
        {"lfm2", "\"tie_embedding\":true,\"tie_word_embeddings\":false",
         "tie_embedding: expected the same as tie_word_embeddings, got true"},
        {"olmo_hybrid",
         "\"linear_key_head_dim\":8,\"layer_types\":[\"linear_attention\",\"linear_attention\",\"linear_attention\"]",
         "not supported yet: layer_types [\"linear_attention\","},
        {"olmo_hybrid",
         "\"linear_key_head_dim\":8,\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]",
         "not supported yet: layer_types [\"full_attention\","},
        {"olmo_hybrid",
         "\"linear_key_head_dim\":8,\"layer_types\":[\"full_attention\",\"linear_attention\",\"full_attention\"]",
         "not supported yet: layer_types [\"full_attention\","},
        {"olmo_hybrid", "", "not supported yet: linear_key_head_dim nothing"}, /* 0.75 12 / 2 */
        {"olmo_hybrid", "\"linear_key_head_dim\":8,\"linear_num_key_heads\":4",
         "linear_num_value_heads: expected a multiple of linear_num_key_heads"},
        {"olmo_hybrid", "\"linear_key_head_dim\":\"a\"", "linear_key_head_dim: expected integer"},
        {"olmo_hybrid", "\"linear_key_head_dim\":8,\"rope_parameters\":null",
         "not supported yet: rope_parameters null: transformers takes it for a rope_theta of 10000"},
        {"olmo_hybrid",
         "\"linear_key_head_dim\":8,\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":2,\"rope_theta\":null}",
         "not supported yet: rope_parameters.rope_type \"linear\""},
        {"falcon_h1", HALVES ",\"mamba_n_groups\":4", "mamba_n_heads: expected a multiple of mamba_n_groups"},
        {"falcon_h1", "\"num_key_value_heads\":2,\"mamba_n_heads\":2,\"mamba_d_ssm\":24,\"mamba_d_head\":8",
         "mamba_n_heads: expected heads of mamba_d_head that are mamba_d_ssm together"},
        {"falcon_h1", HALVES ",\"mamba_proj_bias\":true", "not supported yet: mamba_proj_bias true"},
        {"falcon_h1", HALVES ",\"projectors_bias\":true", "not supported yet: projectors_bias true"},
        {"falcon_h1", HALVES ",\"mamba_use_mlp\":false", "not supported yet: mamba_use_mlp false"},
        {"falcon_h1", HALVES ",\"key_multiplier\":0", "key_multiplier: expected number above 0, got 0"},
        {"falcon_h1", HALVES ",\"mlp_multipliers\":[1,0]",
         "mlp_multipliers: expected a list of 2 numbers above 0, got [1,0]"},
        {"falcon_h1", HALVES ",\"ssm_multipliers\":[1,1,1,1]", "ssm_multipliers: expected a list of 5 numbers above 0"},
        {"falcon_h1", HALVES ",\"time_step_limit\":[0.0,0.5]", "not supported yet: time_step_limit [0.0,0.5]"},
        {"afmoe", "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\"]",
         "not supported yet: layer_types[2] \"full_attention\""},
        {"afmoe", "\"sliding_window\":null", "sliding_window: expected integer"},
        {"afmoe", "\"num_shared_experts\":0", "num_shared_experts: expected integer in [1"},
        {"afmoe", "\"n_group\":2", "not supported yet: n_group 2"},
        {"afmoe", "\"topk_group\":2", "not supported yet: topk_group 2"},
        {"afmoe", "\"num_expert_groups\":2", "not supported yet: num_expert_groups 2"},
        {"afmoe", "\"num_limited_groups\":2", "not supported yet: num_limited_groups 2"},
        {"afmoe", "\"route_norm\":false", "not supported yet: route_norm false"},
        {"afmoe", "\"route_scale\":0", "route_scale: expected number above 0, got 0"},
        {"afmoe", "\"score_func\":\"softmax\"", "not supported yet: score_func \"softmax\""},
        {"afmoe", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"lfm2_moe", "", "layer_types: expected a list with one entry for each layer, got nothing"},
        {"lfm2_moe", CONVS ",\"use_expert_bias\":false", "not supported yet: use_expert_bias false"},
        {"lfm2_moe", CONVS ",\"routed_scaling_factor\":0", "routed_scaling_factor: expected number above 0, got 0"},
        {"lfm2_moe", CONVS ",\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"mistral4", "", "rope_parameters: expected an object"},
        {"mistral4", "\"rope_parameters\":{\"rope_theta\":1e4}",
         "not supported yet: rope_parameters.rope_type nothing"},
        {"mistral4", GROWS ",\"n_group\":2", "not supported yet: n_group 2"},
        {"mistral4", GROWS ",\"scoring_func\":\"sigmoid\"", "not supported yet: scoring_func \"sigmoid\""},
        {"mistral4", GROWS ",\"head_dim\":64",
         "head_dim: expected the sum of qk_nope_head_dim and qk_rope_head_dim, got 64"},
        {"mistral4", GROWS ",\"partial_rotary_factor\":1.0",
         "partial_rotary_factor: expected the share of qk_rope_head_dim in a head, got 1.0"},
        {"mistral4", GROWS ",\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"mistral", "\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":2.0,\"llama_4_scaling_beta\":0.1}",
         "not supported yet: rope_parameters.llama_4_scaling_beta 0.1"},
        {"exaone4", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"exaone4", "\"sliding_window_pattern\":\"LLLG\"", "sliding_window_pattern: expected integer"},
        {"exaone4",
         "\"sliding_window\":null,\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\"]",
         "not supported yet: layer_types[0] \"sliding_attention\""},
        {"ernie4_5_moe", "\"use_bias\":true", "not supported yet: use_bias true"},
        {"ernie4_5_moe", "\"moe_norm_min\":0.1", "not supported yet: moe_norm_min 0.1"},
        {"ernie4_5_moe", "\"moe_layer_end_index\":1", "not supported yet: moe_layer_end_index 1"},
        {"ernie4_5_moe", "\"moe_layer_start_index\":-1", "moe_layer_start_index: expected integer in [0, "},
        {"ernie4_5_moe", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"hy_v3", "\"first_k_dense_replace\":2", "first_k_dense_replace: expected what mlp_layer_types says"},
        {"hy_v3", "\"mlp_layer_types\":[\"dense\",\"sparse\",\"dense\"]", "not supported yet: mlp_layer_types ["},
        {"hy_v3", "\"num_shared_experts\":0", "num_shared_experts: expected integer in [1, "},
        {"hy_v3", "\"router_scaling_factor\":0", "router_scaling_factor: expected number above 0, got 0"},
        {"hunyuan_v1_dense", "\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2.0}",
         "not supported yet: rope_scaling.type \"dynamic\""},
        {"hunyuan_v1_dense", "\"use_cla\":true", "not supported yet: use_cla true"},
        {"hunyuan_v1_moe", "\"moe_topk\":[2,1,2]", "not supported yet: moe_topk [2,1,2]"},
        {"hunyuan_v1_moe", "\"moe_topk\":[2,2]", "not supported yet: moe_topk [2,2]"},
        {"cohere", "\"use_qk_norm\":true", "not supported yet: use_qk_norm true"},
        {"cohere", "\"logit_scale\":0", "logit_scale: expected number above 0, got 0"},
        {"cohere", "\"hidden_act\":\"gelu\"", "not supported yet: hidden_act \"gelu\""},
        {"cohere", "\"head_dim\":8", "not supported yet: head_dim 8"},
        {"cohere2", "\"sliding_window\":null", "sliding_window: expected integer, got null"},
        {"granitemoehybrid", "\"layers_block_type\":[\"attention\"]",
         "layers_block_type: expected a list with one entry for each layer, got [\"attention\"]"},
        {"granitemoehybrid", "\"layer_types\":[\"attention\",\"sliding_attention\",\"mamba\"]",
         "not supported yet: layer_types[1] \"sliding_attention\""},
        {"granitemoehybrid", "",
         "mamba_n_heads: expected heads of mamba_d_head that are mamba_expand times hidden_size together, got nothing"},
        {"granitemoehybrid", MAMBA ",\"mamba_d_head\":16", "mamba_n_heads: expected heads of mamba_d_head that are"},
        {"granitemoehybrid", MAMBA ",\"mamba_n_groups\":2",
         "mamba_n_heads: expected a multiple of mamba_n_groups, got 3"},
        {"nemotron_h", "\"hybrid_override_pattern\":\"ME+\"", "not supported yet: hybrid_override_pattern \"ME+\""},
        {"nemotron_h", "\"hybrid_override_pattern\":\"ME*-\"",
         "num_hidden_layers: expected as many layers as are listed"},
        {"nemotron_h", "\"layers_block_type\":[\"mamba\",\"mlp\",\"conv\"]",
         "not supported yet: layers_block_type \"conv\""},
        {"nemotron_h", "\"layers_block_type\":3",
         "layers_block_type: expected a list with one entry for each layer, or"},
        {"nemotron_h", NEMOTRON ",\"n_groups\":5", "mamba_num_heads: expected a multiple of n_groups, got nothing"},
        {"nemotron_h", NEMOTRON ",\"ssm_state_size\":12", "not supported yet: ssm_state_size 12"},
        {"nemotron_h", NEMOTRON ",\"mamba_head_dim\":257", "not supported yet: mamba_head_dim 257"},
        {"nemotron_h", NEMOTRON ",\"conv_kernel\":9", "not supported yet: conv_kernel 9"},
        {"nemotron_h", NEMOTRON ",\"mlp_hidden_act\":\"silu\"", "not supported yet: mlp_hidden_act \"silu\""},
        {"nemotron_h", NEMOTRON ",\"mamba_hidden_act\":\"relu2\"", "not supported yet: mamba_hidden_act \"relu2\""},
        {"nemotron_h", NEMOTRON ",\"use_bias\":true", "not supported yet: use_bias true"},
        {"nemotron_h", NEMOTRON ",\"sliding_window\":16", "not supported yet: sliding_window 16"},
        {"nemotron_h", NEMOTRON ",\"tie_word_embeddings\":true", "not supported yet: tie_word_embeddings true"},
        {"nemotron_h", NEMOTRON ",\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"deepseek_v4", "\"layer_types\":[\"sliding_attention\"]",
         "layer_types: expected a list with an entry for each layer, got [\"sliding_attention\"]"},
        {"deepseek_v4", "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]",
         "not supported yet: layer_types [\"sliding_attention\","},
        {"deepseek_v4", "\"compress_ratios\":[0,4,64]", "not supported yet: compress_ratios [0,4,64]"},
        {"deepseek_v4", "\"mlp_layer_types\":[\"moe\",\"dense\",\"moe\"]",
         "not supported yet: mlp_layer_types [\"moe\","},
        {"deepseek_v4", "\"mlp_layer_types\":[\"moe\"]",
         "mlp_layer_types: expected a list with an entry for each layer"},
        {"deepseek_v4", "\"compress_rates\":{\"compressed_sparse_attention\":0}",
         "compress_rates.compressed_sparse_attention: expected integer in [1, "},
        {"deepseek_v4", "\"qk_rope_head_dim\":5", "not supported yet: qk_rope_head_dim 5"},
        {"deepseek_v4", "\"partial_rotary_factor\":1.5", "not supported yet: partial_rotary_factor 1.5"},
        {"deepseek_v4", "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":2}",
         "not supported yet: rope_scaling.rope_type \"linear\""},
        {"deepseek_v4",
         "\"rope_parameters\":{\"main\":{\"rope_type\":\"yarn\"},\"compress\":{\"rope_type\":\"default\"}}",
         "not supported yet: rope_parameters.main.rope_type \"yarn\""},
        {"deepseek_v4", "\"scoring_func\":\"sigmoid\"", "not supported yet: scoring_func \"sigmoid\""},
        {"deepseek_v4", "\"topk_method\":\"greedy\"", "not supported yet: topk_method \"greedy\""},
        {"deepseek_v4", "\"swiglu_limit\":7.0", "not supported yet: swiglu_limit 7.0"},
        {"deepseek_v4", "\"n_shared_experts\":2", "not supported yet: n_shared_experts 2"},
        {"deepseek_v4", "\"num_key_value_heads\":2", "not supported yet: num_key_value_heads 2"},
        {"deepseek_v4", "\"norm_topk_prob\":false", "not supported yet: norm_topk_prob false"},
        {"deepseek_v4", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"deepseek_v4", "\"mlp_bias\":true", "not supported yet: mlp_bias true"},
        {"deepseek_v4", "\"routed_scaling_factor\":0", "routed_scaling_factor: expected number above 0, got 0"},
        {"deepseek_v4", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"granitemoehybrid", MAMBA ",\"mamba_d_state\":12", "not supported yet: mamba_d_state 12"},
        {"granitemoehybrid", MAMBA ",\"mamba_d_state\":512", "not supported yet: mamba_d_state 512"},
        {"granitemoehybrid", MAMBA ",\"mamba_d_conv\":9", "not supported yet: mamba_d_conv 9"},
        {"granitemoehybrid", MAMBA ",\"mamba_proj_bias\":true", "not supported yet: mamba_proj_bias true"},
        {"granitemoehybrid", MAMBA ",\"time_step_limit\":[0.0,0.5]", "not supported yet: time_step_limit [0.0,0.5]"},
        {"granitemoehybrid", MAMBA ",\"time_step_limit\":[0.001,{\"__float__\":\"Infinity\"}]",
         "not supported yet: time_step_limit [0.001,"},
        {"granitemoehybrid", FOUR2 ",\"num_local_experts\":-1",
         "num_local_experts: expected integer in [0, 2147483648]"},
        {"granitemoehybrid", FOUR2 ",\"output_router_logits\":true",
         "not supported yet: output_router_logits true: spillway.router_balance"},
        {"granitemoehybrid", FOUR2 ",\"num_local_experts\":0,\"position_embedding_type\":\"learned\"",
         "not supported yet: position_embedding_type \"learned\""},
        {"llama4", "", "not supported yet: model_type \"llama4\": of a model of text and images only"},
        {"llama4_text", "\"moe_layers\":[0,2]", "not supported yet: moe_layers [0,2]"},
        {"llama4_text", "\"moe_layers\":{}", "not supported yet: moe_layers {}"},
        {"llama4_text", "\"moe_layers\":[1,2]", "not supported yet: moe_layers [1,2]"},
        {"llama4_text", "\"interleave_moe_layer_step\":0", "interleave_moe_layer_step: expected integer in [1, "},
        {"llama4_text", "\"no_rope_layers\":[0,1,1]", "not supported yet: no_rope_layers[1] 1"},
        {"llama4_text", FOUR2, "not supported yet: layer_types[0] \"full_attention\""},
        {"llama4_text", "\"attention_chunk_size\":0", "attention_chunk_size: expected integer in [1, "},
        {"llama4_text", "\"attn_temperature_tuning\":\"yes\"", "attn_temperature_tuning: expected true or false"},
        {"llama4_text", "\"attn_scale\":-1", "attn_scale: expected number in [0, 1e12], got -1"},
        {"minimax_m2", "\"scoring_func\":\"softmax\"", "not supported yet: scoring_func \"softmax\""},
        {"minimax_m2", "\"qk_norm_type\":\"per_head\"", "not supported yet: qk_norm_type \"per_head\""},
        {"minimax_m2", "\"use_qk_norm\":false", "not supported yet: use_qk_norm false"},
        {"minimax_m2", "\"use_routing_bias\":false", "not supported yet: use_routing_bias false"},
        {"minimax_m2", "\"shared_intermediate_size\":9", "not supported yet: shared_intermediate_size 9"},
        {"minimax_m2", "\"router_jitter_noise\":0.1", "not supported yet: router_jitter_noise 0.1"},
        {"minimax_m2", "\"output_router_logits\":true", "not supported yet: output_router_logits true"},
        {"minimax_m2", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"minimax_m2", "\"rotary_dim\":1", "rotary_dim: expected integer in [2, "},
        {"minimax_m2", "\"rotary_dim\":256", "rotary_dim: expected no more than head_dim, got 256"},
        {"gpt_oss", "\"rope_scaling\":{\"rope_type\":\"default\"},\"swiglu_limit\":6.5",
         "not supported yet: swiglu_limit 6.5"},
        {"gpt_oss", "\"rope_scaling\":{\"rope_type\":\"default\"},\"swiglu_alpha\":1.5",
         "not supported yet: swiglu_alpha 1.5"},
        {"gpt_oss", "\"quantization_config\":{\"quant_method\":\"awq\"}",
         "not supported yet: quantization_config {\"quant_method\":\"awq\"}"},
        {"llama", "\"quantization_config\":{\"quant_method\":\"mxfp4\"}", "not supported yet: quantization_config"},
        {"gpt_oss", "", "rope_scaling: expected an object, as the family's folders have it, got nothing"},
        {"gpt_oss", "\"rope_scaling\":{\"rope_type\":\"default\"},\"num_experts_per_tok\":0",
         "num_experts_per_tok: expected integer in"},
        {"custom", "", "not supported yet: model_type \"custom\""},
        {"llama", "\"architectures\":[\"LlamaForSequenceClassification\"]",
         "not supported yet: architectures[0] \"LlamaForSequenceClassification\""},
        {"qwen3", "\"architectures\":[\"Qwen2ForCausalLM\"]",
         "not supported yet: architectures[0] \"Qwen2ForCausalLM\""},
        {"llama", "\"hidden_act\":\"gelu\"", "not supported yet: hidden_act \"gelu\""},
        {"mistral", "\"hidden_act\":3", "not supported yet: hidden_act 3"},
        {"gpt2", "\"activation_function\":\"gelu\"", "not supported yet: activation_function \"gelu\""},
        {"gpt2", "\"scale_attn_weights\":false", "not supported yet: scale_attn_weights false"},
        {"gpt2", "\"scale_attn_by_inverse_layer_idx\":true", "not supported yet: scale_attn_by_inverse_layer_idx true"},
        {"gpt2", "\"reorder_and_upcast_attn\":true", "not supported yet: reorder_and_upcast_attn true"},
        {"gpt2", "\"add_cross_attention\":true", "not supported yet: add_cross_attention true"},
        {"llama", "\"quantization_config\":{\"bits\":4}", "not supported yet: quantization_config {\"bits\":4}"},
        {"llama", "\"quantization_config\":{\"bits\":4}", "take the folder that was quantized"},
        {"mixtral", "\"output_router_logits\":true", "spillway.router_balance is the loss"},
        {"qwen3_moe", "\"output_router_logits\":1", "output_router_logits: expected true or false, got 1"},
        {"llama", "\"rope_scaling\":{\"long_factor\":[1],\"type\":\"longrope\"}", /* by its name, first */
         "not supported yet: rope_scaling.type \"longrope\""},
        {"llama", "\"architectures\":[\"LLaMAModel\"]", "not supported yet: architectures[0] \"LLaMAModel\""},
        {"llama", "\"rope_scaling\":{\"rope_type\":\"yarn\"}", "rope_scaling.factor: expected number of at least 1"},
        {"llama", "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"attn_factor\":2}",
         "not supported yet: rope_scaling.attn_factor 2: transformers does not look at it, vLLM multiplies by it; take "
         "it out for the former, for the latter write \"attention_factor\": 2.27725887 in its place"},
        {"qwen3", "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":4.0,\"attn_factor\":2}",
         "not supported yet: rope_scaling.attn_factor 2"},
        {"llama", "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"truncate\":1}",
         "rope_scaling.truncate: expected true or false, got 1"},
        {"llama", "\"partial_rotary_factor\":0.5", "not supported yet: partial_rotary_factor 0.5"},
        {"llama", "\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}",
         "not supported yet: rope_scaling.type \"dynamic\""},
        {"qwen2", "\"rope_parameters\":{\"rope_type\":\"longrope\",\"rope_theta\":1e4}",
         "not supported yet: rope_parameters.rope_type \"longrope\""},
        {"qwen2", "\"rope_scaling\":{\"type\":\"default\",\"mrope_section\":[1,2]}",
         "not supported yet: rope_scaling.mrope_section [1,2]"},
        {"llama", "\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.5}",
         "not supported yet: rope_parameters.partial_rotary_factor 0.5"},
        {"llama", "\"rope_scaling\":{\"factor\":2}", "rope_scaling.rope_type: expected"},
        {"llama", "\"rope_scaling\":{\"rope_type\":\"linear\"}", "rope_scaling.factor: expected number of at least 1"},
        {"llama", "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}",
         "rope_scaling.low_freq_factor: expected number above 0, got nothing"},
        {"llama",
         "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":3}",
         "rope_scaling.high_freq_factor: expected number of at least low_freq_factor"},
        {"llama",
         "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4}",
         "rope_scaling.original_max_position_embeddings: expected integer, got nothing"},
        {"llama", "\"rope_scaling\":7", "rope_scaling: expected an object, got 7"},
        {"llama", "\"rope_scaling\":{\"type\":\"default\"},\"rope_parameters\":{\"rope_type\":\"default\"}",
         "rope_parameters and rope_scaling"},
        {"llama", "\"rope_theta\":0", "rope_theta: expected number above 0, got 0"},
        {"llama", "\"rope_theta\":1e4,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e6}",
         "rope_parameters.rope_theta: expected the same as outside, got 1000000.0"},
        {"llama", "\"sliding_window\":64", "not supported yet: sliding_window 64"},
        {"llama", "\"use_sliding_window\":true", "not supported yet: use_sliding_window true"},
        {"mistral", "\"sliding_window\":0", "sliding_window: expected integer in [1, 2147483648], got 0"},
        {"mistral", "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]",
         "not supported yet: layer_types[1] \"full_attention\""},
        {"qwen3",
         "\"use_sliding_window\":true,\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\"]",
         "not supported yet: layer_types[1] \"full_attention\""},
        {"qwen2", "\"layer_types\":[\"full_attention\",\"full_attention\",\"sliding_attention\"]",
         "not supported yet: layer_types[2] \"sliding_attention\""},
        {"qwen2", "\"layer_types\":[\"full_attention\"]", "layer_types: expected a list with one entry"},
        {"mistral", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"qwen2", "\"attention_bias\":true", "not supported yet: attention_bias true"},
        {"qwen3", "\"mlp_bias\":true", "not supported yet: mlp_bias true"},
        {"llama", "\"mlp_bias\":1", "mlp_bias: expected true or false, got 1"},
        {"llama", "\"head_dim\":-4", "head_dim: expected integer in"},
        {"llama", "\"num_key_value_heads\":1.5", "num_key_value_heads: expected integer in"},
        {"llama", "\"rms_norm_eps\":\"small\"", "rms_norm_eps: expected number in [0, 1e12], got \"small\""},
        {"llama", "\"tie_word_embeddings\":\"no\"", "tie_word_embeddings: expected true or false, got \"no\""},
        {"llama", "\"hidden_size\":12", "config.json:1:"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        spw_model_config m;
        spw_error err = {0};
        if (parse(wrong[i].type, wrong[i].rest, &m, &err) != SPW_ECONFIG ||
            strstr(err.message, wrong[i].says) == NULL || strstr(err.message, "config.json") == NULL)
            fail_msg("%s: message is: %s", wrong[i].says, err.message);
    }
    {
        spw_model_config m;
        spw_error err = {0};
        const char *more_heads = "{\"model_type\":\"qwen2\",\"hidden_size\":2,\"num_attention_heads\":4,"
                                 "\"num_hidden_layers\":2,\"intermediate_size\":29}";
        assert_int_equal(spw_hf_config_parse(&m, more_heads, "config.json", false, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "num_attention_heads: expected no more heads than hidden_size, got 4"));
    }
}

/* What a missing key means, by family, as in the classes of transformers. */
static void
test_defaults(void **state)
{
    spw_model_config m;
    spw_error err = {0};
    (void)state;
    DONE(parse("gpt2", "\"n_inner\":null,\"resid_pdrop\":0.1,\"attn_pdrop\":0.1,\"unheard_of\":1", &m, &err));
    assert_true(m.tied && m.mlp_width == 48 && m.positions == 1024 && m.rope_theta == 0);
    assert_true(m.dropout == 0); /* not inherited silently */
    { /* nor taken from a family that has none: what is written of it would not say so (found by tests/fuzz_hf.c) */
        static const char text[] = "{\"model_type\":\"qwen3\",\"hidden_size\":12,\"num_hidden_layers\":3,"
                                   "\"num_attention_heads\":2,\"intermediate_size\":7,\"resid_pdrop\":0.1}";
        DONE(spw_hf_config_parse(&m, text, "section", true, &err));
        assert_true(m.dropout == 0);
    }
    { /* of a folder with images the text part, in which every key may be missing; not in a section, which has no folder */
        static const char whole[] = "{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":\"gemma3_text\"}}",
                          other[] = "{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":\"llama\"}}",
                          head[] = "{\"model_type\":\"gemma3\",\"architectures\":[\"Gemma3ForX\"],\"text_config\":{}}";
        DONE(spw_hf_config_parse(&m, whole, "config.json", false, &err));
        assert_true(m.family == SPW_FAMILY_GEMMA3 && m.vocab == 262208 && m.positions == 131072 && m.width == 2304);
        assert_true(m.layers == 26 && m.heads == 8 && m.kv_heads == 4 && m.head_dim == 256 && m.mlp_width == 9216);
        assert_true(m.tied && m.window == 4096 && m.full_every == 6 && m.query_scalar == 256);
        assert_int_equal(spw_hf_config_parse(&m, whole, "section", true, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "only a folder's text part is read"));
        assert_int_equal(spw_hf_config_parse(&m, other, "config.json", false, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "text_config.model_type \"llama\""));
        assert_int_equal(spw_hf_config_parse(&m, head, "config.json", false, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "architectures[0] \"Gemma3ForX\""));
        err = (spw_error){0};
    }
    { /* of Qwen's the text part may be apart or not, and what the heads share is said in either place */
        static const char whole[] = "{\"model_type\":\"qwen2_vl\",\"text_config\":{\"model_type\":\"qwen2_vl_text\"}}",
                          flat[] =
                              "{\"model_type\":\"qwen2_5_vl\",\"num_hidden_layers\":3,\"tie_word_embeddings\":true,"
                              "\"use_sliding_window\":true,\"max_window_layers\":1,"
                              "\"rope_scaling\":{\"type\":\"mrope\",\"mrope_section\":[16,24,24]}}",
                          tied[] = "{\"model_type\":\"qwen2_vl\",\"tie_word_embeddings\":false,"
                                   "\"text_config\":{\"model_type\":\"qwen2_vl_text\",\"tie_word_embeddings\":true}}",
                          other[] = "{\"model_type\":\"qwen2_vl\",\"text_config\":{\"model_type\":\"qwen2\"}}";
        DONE(spw_hf_config_parse(&m, whole, "config.json", false, &err));
        assert_true(m.family == SPW_FAMILY_QWEN2 && m.vocab == 152064 && m.positions == 32768 && m.width == 8192);
        assert_true(m.layers == 80 && m.heads == 64 && m.kv_heads == 8 && m.head_dim == 128 && m.mlp_width == 29568);
        assert_true(m.norm_eps == 1e-5 && m.rope_theta == 1e6 && m.qkv_bias && !m.tied && m.window == 0);
        DONE(spw_hf_config_parse(&m, flat, "config.json", false, &err));
        assert_true(m.layers == 3 && m.tied && m.rope == SPW_ROPE_PLAIN && m.window == 4096 && m.window_from == 1);
        DONE(spw_hf_config_parse(&m, tied, "config.json", false, &err));
        assert_true(m.tied);
        assert_int_equal(spw_hf_config_parse(&m, flat, "section", true, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "only a folder's text part is read"));
        assert_int_equal(spw_hf_config_parse(&m, other, "config.json", false, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "text_config.model_type \"qwen2\""));
        err = (spw_error){0};
    }
    DONE(parse("gpt2", "\"n_ctx\":77,\"tie_word_embeddings\":false", &m, &err));
    assert_true(!m.tied && m.positions == 77);
    DONE(parse("llama", "\"rope_scaling\":null", &m, &err));
    assert_true(!m.tied && m.kv_heads == 2 && m.head_dim == 6 && m.rope_theta == 10000 && m.norm_eps == 1e-6);
    assert_true(!m.qkv_bias && !m.out_bias && !m.mlp_bias && !m.qk_norm && m.window == 0);
    DONE(parse("llama", "\"attention_bias\":true,\"head_dim\":null,\"num_key_value_heads\":1", &m, &err));
    assert_true(m.qkv_bias && m.out_bias && m.head_dim == 6 && m.kv_heads == 1);
    DONE(parse("llama", "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":500000.0}", &m, &err));
    assert_true(m.rope_theta == 500000);
    DONE(parse("llama",
               "\"max_position_embeddings\":99,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"beta_fast\":0}", &m,
               &err));
    assert_true(m.rope == SPW_ROPE_YARN && m.rope_low == 1 && m.rope_high == 32 && m.rope_truncate);
    assert_true(m.rope_positions == 99 && fabs(m.rope_attention - (1 + 0.1 * log(4))) < 1e-15);
    DONE(parse("qwen3",
               "\"original_max_position_embeddings\":7,\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":4,"
               "\"original_max_position_embeddings\":9,\"attention_factor\":0.5,\"truncate\":null}",
               &m, &err));
    assert_true(m.rope_positions == 7 && m.rope_attention == 0.5 && !m.rope_truncate);
    DONE(parse("llama", "\"rope_theta\":1,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}", &m, &err));
    {
        spw_model *model = NULL;
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "rope_theta (1) above 1"));
        err = (spw_error){0};
    }
    DONE(parse("llama", "\"architectures\":[\"LLaMAForCausalLM\"]", &m, &err)); /* as the first files had it */
    for (int q = 2; q < 4; q++) {
        DONE(parse(q == 2 ? "qwen2" : "qwen3", "", &m, &err));
        assert_int_equal(m.kv_heads, 32);
        DONE(parse(q == 2 ? "qwen2" : "qwen3", "\"num_key_value_heads\":null", &m, &err));
        assert_int_equal(m.kv_heads, 2);
    }
    DONE(parse("mistral", "", &m, &err));
    assert_true(m.kv_heads == 8 && m.window == 4096 && m.window_from == 0);
    DONE(parse("mistral", "\"sliding_window\":null,\"num_key_value_heads\":null", &m, &err));
    assert_true(m.kv_heads == 2 && m.window == 0);
    DONE(parse("qwen2", "\"sliding_window\":4096,\"max_window_layers\":1", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && m.window == 0);
    DONE(parse("qwen2", "\"use_sliding_window\":true,\"sliding_window\":9,\"max_window_layers\":1", &m, &err));
    assert_true(spw_model_window(&m, 0) == 0 && spw_model_window(&m, 1) == 9 && spw_model_window(&m, 2) == 9);
    DONE(parse("qwen2", "\"use_sliding_window\":true,\"sliding_window\":9", &m, &err));
    assert_true(m.window == 0); /* from layer 28 on */
    DONE(parse("qwen3", "", &m, &err));
    assert_true(m.qk_norm && !m.qkv_bias && m.head_dim == 128);
    DONE(parse("mixtral", "", &m, &err));
    assert_true(m.experts == 8 && m.choices == 2 && m.sum_to_one && m.kv_heads == 8 && m.window == 0);
    assert_true(m.rope_theta == 1e6 && m.norm_eps == 1e-5 && m.mlp_width == 7 && !m.qk_norm);
    DONE(parse("gemma3_text", "", &m, &err));
    assert_true(m.tied && m.kv_heads == 4 && m.head_dim == 256 && m.query_scalar == 256 && m.norm_eps == 1e-6);
    assert_true(m.rope_theta == 1e6 && m.rope_local_theta == 10000 && m.rope == SPW_ROPE_PLAIN && !m.qkv_bias);
    assert_true(m.window == 4096 && m.full_every == 0); /* of three layers none is the sixth */
    assert_true(m.qk_norm && m.norms == SPW_NORMS_BOTH && m.norms_from_one && m.gate == SPW_GATE_GELU &&
                m.embedding_scaled);
    DONE(parse(
        "gemma3_text",
        "\"sliding_window_pattern\":2,\"rope_theta\":500,\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8},"
        "\"_sliding_window_pattern\":3,\"cache_implementation\":\"hybrid\"",
        &m, &err));
    assert_true(m.full_every == 2 && m.rope == SPW_ROPE_LINEAR && m.rope_theta == 500 && m.rope_local_theta == 10000);
    for (uint64_t l = 0; l < 3; l++) {
        assert_int_equal(spw_model_window(&m, l), l == 1 ? 0 : 4096);
        assert_int_equal(spw_model_rope_table(&m, l), l != 1);
    }
    DONE(parse("gemma3_text",
               "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"linear\",\"factor\":8},"
               "\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":77}}",
               &m, &err));
    assert_true(m.rope == SPW_ROPE_LINEAR && m.rope_theta == 1e6 && m.rope_local_theta == 77);
    DONE(parse("gemma3_text", "\"sliding_window\":null,\"sliding_window_pattern\":1", &m, &err));
    assert_true(m.window == 0 && m.full_every == 0 && spw_model_rope_tables(&m) == 1);
    DONE(parse("gemma2", "\"hidden_act\":\"gelu_pytorch_tanh\",\"sliding_window_pattern\":3", &m, &err));
    assert_true(m.tied && m.kv_heads == 4 && m.head_dim == 256 && m.query_scalar == 256 && m.norm_eps == 1e-6);
    assert_true(m.rope_theta == 10000 && spw_model_rope_tables(&m) == 1 && m.window == 4096 && m.full_every == 2);
    assert_true(!m.qk_norm && m.norms == SPW_NORMS_BOTH && m.norms_from_one && m.gate == SPW_GATE_GELU &&
                m.embedding_scaled);
    assert_true(m.score_cap == 50 && m.logit_cap == 30);
    DONE(parse("gemma2", "\"attn_logit_softcapping\":null,\"final_logit_softcapping\":null", &m, &err));
    assert_true(m.score_cap == 0 && m.logit_cap == 0);
    DONE(parse("olmo2", "", &m, &err));
    assert_true(!m.tied && m.kv_heads == 2 && m.head_dim == 6 && m.norm_eps == 1e-5 && m.rope_theta == 10000);
    assert_true(m.qk_norm && m.qk_norm_whole && m.norms == SPW_NORMS_AFTER && !m.qkv_bias && m.window == 0);
    DONE(parse("qwen3_moe", "\"sliding_window\":4096", &m, &err));
    assert_true(m.experts == 128 && m.choices == 8 && !m.sum_to_one && m.kv_heads == 4 && m.window == 0);
    assert_true(m.rope_theta == 10000 && m.norm_eps == 1e-6 && m.mlp_width == 768 && m.qk_norm && m.head_dim == 6);
    DONE(parse("phi3", "\"resid_pdrop\":0.1", &m, &err));
    assert_true(m.packed && m.kv_heads == 2 && m.head_dim == 6 && m.window == 0 && m.norm_eps == 1e-5);
    assert_true(m.rope_theta == 10000 && !m.tied && m.dropout == 0);
    DONE(parse("phi3", /* as in the rope object first, then beside it; by all names */
               "\"partial_rotary_factor\":0.5,\"rope_parameters\":{\"rope_type\":\"su\",\"partial_rotary_factor\":0.75,"
               "\"short_factor\":[1,2],\"long_factor\":[3,4]},\"max_position_embeddings\":8192",
               &m, &err));
    assert_true(m.rope == SPW_ROPE_LONG && m.rope_positions == 4096 && spw_model_rope_width(&m, 0) == 4);
    assert_true(m.rope_short[1] == 2 && m.rope_long[0] == 3);
    assert_true(fabs(m.rope_attention - sqrt(1 + log(2) / log(4096))) < 1e-15);
    DONE(parse("phi3", "\"partial_rotary_factor\":0.5", &m, &err));
    {
        spw_model *model = NULL;
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "partial_rotary_factor 0.5 turns 3 of a head's 6 elements"));
        err = (spw_error){0};
    }
    DONE(parse("phi3", "\"sliding_window\":9", &m, &err));
    assert_true(m.window == 9 && m.window_from == 0);
    DONE(parse("smollm3", "\"sliding_window\":9", &m, &err));
    assert_true(m.tied && m.kv_heads == 4 && m.rope_theta == 2e6 && m.norm_eps == 1e-6 && m.window == 0);
    assert_true(m.rope_skip_every == 0); /* of three layers, four apart */
    DONE(parse("smollm3", "\"no_rope_layers\":[1,0,1,0],\"no_rope_layer_interval\":3", &m, &err));
    assert_true(spw_model_has_rope(&m, 0) && !spw_model_has_rope(&m, 1) && spw_model_has_rope(&m, 2));
    DONE(parse("qwen2_moe", "\"sliding_window\":4096,\"num_local_experts\":3", &m, &err));
    assert_true(m.experts == 60 && m.choices == 4 && !m.sum_to_one && m.kv_heads == 16 && m.window == 0);
    assert_true(m.mlp_width == 1408 && m.shared_width == 5632 && m.qkv_bias && !m.out_bias && !m.qk_norm && !m.tied);
    DONE(parse("qwen2_moe", "\"num_experts\":7,\"qkv_bias\":false", &m, &err));
    assert_true(m.experts == 7 && !m.qkv_bias);
    DONE(parse("qwen2_moe", "\"decoder_sparse_step\":2,\"mlp_only_layers\":[0,1]", &m, &err));
    assert_true(m.dense_width == 7 && m.dense_first == 2 && m.sparse_every == 2);
    assert_true(spw_model_experts(&m, 1) == 0 && spw_model_experts(&m, 2) == 0 && spw_model_experts(&m, 3) == 60);
    DONE(parse("glm4_moe", "", &m, &err));
    assert_true(m.experts == 128 && m.choices == 8 && m.sigmoid && m.sum_to_one && m.choice_scale == 1 &&
                m.groups == 0);
    assert_true(m.mlp_width == 1408 && m.shared_width == 1408 && !m.shared_gated && m.dense_first == 1 &&
                m.dense_width == 7);
    assert_true(m.rope_part == 0.5 && m.kv_heads == 8 && m.norm_eps == 1e-5 && !m.qk_norm && !m.qkv_bias && !m.tied);
    DONE(parse("glm4_moe", "\"attention_bias\":true,\"partial_rotary_factor\":1,\"n_group\":4,\"topk_group\":2", &m,
               &err));
    assert_true(m.qkv_bias && !m.out_bias && m.rope_part == 0 && m.groups == 4 && m.group_choices == 2);
    DONE(parse("deepseek_v3", "\"head_dim\":64", &m, &err));
    assert_true(m.kv_rank == 512 && m.q_rank == 1536 && m.rope_dim == 64 && m.head_dim == 192 && m.value_dim == 128);
    assert_true(m.experts == 256 && m.choices == 8 && m.groups == 8 && m.group_choices == 4 && m.choice_scale == 2.5);
    assert_true(m.sigmoid && m.sum_to_one && m.rope_paired && m.dense_first == 3 && m.mlp_width == 2048 &&
                m.shared_width == 2048 && m.kv_heads == 2 && m.norm_eps == 1e-6);
    assert_true(spw_model_rope_width(&m, 0) == 64 && spw_model_score_scale(&m) == 1.0f / sqrtf(192));
    DONE(parse("deepseek_v3",
               "\"q_lora_rank\":null,\"rope_interleave\":false,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,"
               "\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096}",
               &m, &err));
    assert_true(m.q_rank == 0 && !m.rope_paired && m.rope_attention == 1);
    assert_true(fabs((double)spw_model_score_scale(&m) - pow(0.1 * log(40) + 1, 2) / sqrt(192)) < 1e-7);
    DONE(parse("kimi_k2",
               "\"n_routed_experts\":384,\"n_group\":1,\"topk_group\":1,\"first_k_dense_replace\":1,"
               "\"routed_scaling_factor\":2.827,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":32,\"beta_fast\":1,"
               "\"beta_slow\":1,\"mscale\":1,\"mscale_all_dim\":1,\"original_max_position_embeddings\":4096}",
               &m, &err));
    assert_true(m.family == SPW_FAMILY_DEEPSEEK_V3 && m.experts == 384 && m.groups == 0 && m.dense_first == 1);
    DONE(parse("exaone_moe",
               "\"sliding_window\":128,\"sliding_window_pattern\":\"LLLG\",\"first_k_dense_replace\":2,\"layer_types\":"
               "[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]",
               &m, &err));
    assert_true(m.experts == 64 && m.choices == 8 && m.mlp_width == 1024 && m.shared_width == 1024 &&
                m.dense_first == 2);
    assert_true(m.sigmoid && m.sum_to_one && m.choice_scale == 2.5 && m.window == 128 && m.full_every == 2 &&
                m.qk_norm);
    assert_true(m.rope_skip_every == 2 && m.norms == SPW_NORMS_BEFORE && !m.qk_norm_whole && !m.qkv_bias);
    DONE(parse("deepseek_v32", "\"max_position_embeddings\":163840,\"first_k_dense_replace\":2", &m, &err));
    assert_true(m.index_keys == 2048 && m.index_heads == 64 && m.index_dim == 128 && m.positions == 163840);
    assert_true(!m.index_paired && m.dense_first == 2 && m.groups == 8 && m.rope_paired && m.q_rank == 1536);
    for (uint64_t l = 0; l < 3; l++)
        assert_true(spw_model_has_indexer(&m, l));
    DONE(parse("glm_moe_dsa",
               "\"index_topk\":4096,\"first_k_dense_replace\":7,"
               "\"mlp_layer_types\":[\"dense\",\"sparse\",\"sparse\"]",
               &m, &err));
    assert_true(m.index_heads == 32 && m.index_paired && m.positions == 1024 && m.dense_first == 1 && m.groups == 0 &&
                m.q_rank == 2048);
    assert_true(m.head_dim == 256 && m.value_dim == 256 && m.norm_eps == 1e-5 && spw_model_has_indexer(&m, 2));
    DONE(parse("deepseek_v2", "\"num_experts_per_tok\":6,\"n_group\":4,\"topk_group\":2", &m, &err));
    assert_true(m.experts == 64 && m.choices == 6 && m.groups == 0 && !m.sigmoid && !m.sum_to_one);
    assert_true(m.dense_first == 0 && m.mlp_width == 1407 && m.shared_width == 2814 && m.rope_paired);
    DONE(parse("deepseek_v2",
               "\"num_experts_per_tok\":6,\"n_group\":4,\"topk_group\":2,\"topk_method\":\"group_limited_greedy\"", &m,
               &err));
    assert_true(m.groups == 4 && m.group_choices == 2);
    DONE(parse("minimax_m2", "", &m, &err));
    assert_true(m.experts == 256 && m.choices == 8 && m.sigmoid && m.sum_to_one && m.shared_width == 0);
    assert_true(m.qk_norm && m.qk_norm_whole && m.norms == SPW_NORMS_BEFORE && m.head_dim == 128 && m.kv_heads == 8);
    assert_true(m.rope_theta == 5e6 && m.rope_part == 0 && m.norm_eps == 1e-6 && m.mlp_width == 7 && !m.tied);
    DONE(parse("minimax_m2", "\"rotary_dim\":32", &m, &err));
    assert_true(spw_model_rope_width(&m, 0) == 32);
    DONE(parse("minimax_m2", "\"rotary_dim\":32,\"partial_rotary_factor\":0.5", &m, &err));
    assert_true(spw_model_rope_width(&m, 0) == 64);
    DONE(parse("olmo3", "", &m, &err));
    assert_true(m.qk_norm_whole && m.norms == SPW_NORMS_AFTER && m.norm_eps == 1e-5 && !m.tied);
    assert_true(!spw_model_reads_experts(&m)); /* as it has none */
    assert_true(m.rope_theta == 5e5 && m.rope_local_theta == 5e5 && m.window == 4096 && m.full_every == 0);
    DONE(parse("olmo3", "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":8}", &m, &err));
    assert_true(m.rope == SPW_ROPE_YARN && spw_model_rope_table(&m, 0) == 1);
    DONE(parse("olmo3",
               "\"rope_parameters\":{\"full_attention\":{\"rope_theta\":7},\"sliding_attention\":{\"rope_theta\":9}}",
               &m, &err));
    assert_true(m.rope_theta == 7 && m.rope_local_theta == 9);
    DONE(parse("gemma", "\"hidden_act\":\"gelu\"", &m, &err));
    assert_true(m.tied && m.kv_heads == 16 && m.head_dim == 256 && m.query_scalar == 0 && m.norm_eps == 1e-6);
    assert_true(m.norms == SPW_NORMS_BEFORE && m.norms_from_one && m.gate == SPW_GATE_GELU && m.embedding_scaled);
    assert_true(m.rope_theta == 10000 && m.window == 0 && !m.qk_norm && !m.qkv_bias && m.score_cap == 0);
    DONE(parse("granite", "", &m, &err));
    assert_true(m.embedding_scale == 1 && m.half_scale == 1 && spw_model_score_scale(&m) == 1 && m.logit_divisor == 1);
    assert_true(m.kv_heads == 2 && m.norm_eps == 1e-6 && !m.tied && !m.qkv_bias && !m.mlp_bias && m.window == 0);
    DONE(parse("granite", "\"attention_multiplier\":0.0078125,\"attention_bias\":true", &m, &err));
    assert_true(spw_model_score_scale(&m) == 0.0078125f && m.qkv_bias && m.out_bias);
    DONE(parse("granitemoehybrid", FOUR2 ",\"num_local_experts\":0,\"rope_theta\":1e7", &m, &err));
    assert_true(m.gate_packed && m.mlp_width == 1024 && m.experts == 0 && !m.tied && m.norm_eps == 1e-6);
    assert_true(spw_model_rope_tables(&m) == 0 && !spw_model_has_rope(&m, 0) && m.half_scale == 1);
    DONE(parse("granitemoehybrid", FOUR2 ",\"num_local_experts\":0,\"position_embedding_type\":\"rope\"", &m, &err));
    assert_true(m.rope_theta == 10000 && spw_model_has_rope(&m, 2) && m.score_scale == 1);
    assert_true(!m.linear_mamba && !spw_model_is_linear(&m, 0));
    DONE(parse("granitemoehybrid", FOUR2 ",\"residual_multiplier\":0.25", &m, &err));
    assert_true(m.experts == 8 && m.choices == 2 && m.mlp_width == 7 && m.shared_width == 1024 && m.sum_to_one);
    assert_true(m.choice_scale == 0.25 && m.half_scale == 0.25 && m.gate_packed && m.dense_width == 0);
    DONE(parse("granitemoehybrid",
               MAMBA ",\"num_local_experts\":0,\"layers_block_type\":[\"mamba\",\"attention\",\"linear_attention\"],"
                     "\"time_step_limit\":[0.0,{\"__float__\":\"Infinity\"}]",
               &m, &err));
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_is_linear(&m, 1) && spw_model_is_linear(&m, 2));
    assert_true(m.linear_mamba && m.linear_bias && m.linear_heads == 3 && m.linear_key_heads == 1);
    assert_true(m.linear_key_dim == 256 && m.linear_value_dim == 8 && m.linear_taps == 4);
    DONE(parse("nemotron_h", NEMOTRON ",\"time_step_limit\":[0.0, Infinity]", &m, &err));
    assert_true(m.halves_apart && m.ungated && m.curve == SPW_CURVE_RELU_SQUARED && !m.tied && m.norm_eps == 1e-5);
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_has_mlp(&m, 0) && !spw_model_is_linear(&m, 2));
    assert_true(spw_model_experts(&m, 1) == 8 && !spw_model_attends(&m, 1) && spw_model_attends(&m, 2));
    assert_true(m.kv_heads == 8 && m.head_dim == 128 && spw_model_rope_tables(&m) == 0);
    assert_true(m.linear_heads == 128 && m.linear_key_heads == 8 && m.linear_value_dim == 64 && m.linear_step == 0.001);
    assert_true(m.latent_width == 0 && spw_model_expert_cols(&m) == 12 && !spw_model_reads_experts(&m));
    assert_true(m.choices == 2 && m.mlp_width == 7688 && m.shared_width == 7688 && m.dense_width == 0 && m.sigmoid);
    DONE(parse("nemotron_h", NEMOTRON ",\"note\":\"an \\\"Infinity\",\"moe_latent_size\":8", &m, &err));
    assert_true(spw_model_expert_cols(&m) == 8 && spw_model_reads_experts(&m));
    DONE(parse("nemotron_h",
               "\"layers_block_type\":[\"attention\",\"mlp\",\"linear_attention\"],\"mamba_n_groups\":4,"
               "\"mamba_dt_min\":0.5,\"attention_head_dim\":6,\"norm_eps\":0.25",
               &m, &err));
    assert_true(m.experts == 0 && m.mlp_width == 7 && spw_model_has_mlp(&m, 1) && spw_model_experts(&m, 1) == 0);
    assert_true(m.linear_key_heads == 4 && m.linear_step == 0.5 && m.head_dim == 6 && m.norm_eps == 0.25);
    DONE(parse("llama4_text", "", &m, &err));
    assert_true(m.experts == 16 && m.choices == 1 && m.mlp_width == 7 && m.shared_width == 7 && m.dense_width == 0);
    assert_true(m.sigmoid && m.experts_weighed && m.qk_unit && m.rope_paired && m.rope_theta == 5e5 && !m.tied);
    assert_true(m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-5 && m.chunk == 8192 && !m.qkv_bias);
    assert_true(m.rope_skip_every == 0 && m.still_growth == 0 && spw_model_rope_tables(&m) == 1);
    DONE(parse("llama4_text", "\"moe_layers\":[1],\"no_rope_layer_interval\":2,\"no_rope_layers\":[]", &m, &err));
    assert_true(m.sparse_every == 2 && m.dense_width == 16384 && spw_model_experts(&m, 1) == 16);
    assert_true(spw_model_experts(&m, 0) == 0 && spw_model_dense_width(&m, 2) == 16384);
    assert_true(spw_model_chunk(&m, 0) == 8192 && spw_model_chunk(&m, 1) == 0 && spw_model_rope_tables(&m) == 2);
    assert_true(m.still_growth == 0.1 && m.still_places == 8192 && spw_model_query_table(&m, 1) == 1);
    assert_true(spw_model_query_table(&m, 0) == 0 && spw_model_rope_table(&m, 1) == 0);
    DONE(parse("llama4_text",
               "\"attention_chunk_size\":null,\"attn_temperature_tuning\":4,\"no_rope_layers\":[1,1,0],"
               "\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]",
               &m, &err));
    assert_true(m.chunk == 0 && m.still_growth == 0.1 && m.rope_skip_every == 3);
    DONE(parse("llama4_text", "\"moe_layers\":[],\"intermediate_size_mlp\":9", &m, &err));
    assert_true(spw_model_experts(&m, 0) == 0 && spw_model_experts(&m, 2) == 0 && spw_model_dense_width(&m, 1) == 9);
    DONE(parse("olmoe", "\"clip_qkv\":null", &m, &err));
    assert_true(m.experts == 64 && m.choices == 8 && !m.sum_to_one && m.kv_heads == 2 && m.mlp_width == 7);
    assert_true(m.qk_norm && m.qk_norm_whole && m.norms == SPW_NORMS_BEFORE && m.norm_eps == 1e-5 && !m.tied);
    DONE(parse("seed_oss", "", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && !m.mlp_bias && m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-6);
    DONE(parse("seed_oss", "\"attention_bias\":false,\"attention_out_bias\":true", &m, &err));
    assert_true(!m.qkv_bias && m.out_bias && !m.tied);
    DONE(parse("glm", "", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && m.kv_heads == 2 && m.head_dim == 128 && m.norm_eps == 1.5625e-7 &&
                !m.tied);
    assert_true(m.rope_paired && m.rope_part == 0.5 && m.gate_packed && !m.packed && m.norms == SPW_NORMS_BEFORE);
    DONE(parse("glm4", "\"attention_bias\":false,\"partial_rotary_factor\":1.0", &m, &err));
    assert_true(!m.qkv_bias && m.norms == SPW_NORMS_BOTH && !m.norms_from_one && m.rope_part == 0 && m.rope_paired);
    DONE(parse("ernie4_5", "", &m, &err));
    assert_true(m.tied && m.kv_heads == 2 && m.head_dim == 128 && m.norm_eps == 1e-5 && m.rope_theta == 5e5);
    assert_true(m.rope_paired && m.rope_part == 0 && !m.gate_packed && !m.qkv_bias && !m.mlp_bias);
    DONE(parse("ernie4_5", "\"use_bias\":true", &m, &err));
    assert_true(m.qkv_bias && m.out_bias && m.mlp_bias);
    DONE(parse("ministral3",
               "\"rope_parameters\":{\"type\":\"yarn\",\"rope_type\":\"yarn\",\"rope_theta\":1e6,\"factor\":16.0,"
               "\"original_max_position_embeddings\":16384,\"max_position_embeddings\":262144,\"beta_fast\":32.0,"
               "\"beta_slow\":1.0,\"mscale_all_dim\":1.0,\"mscale\":1.0,\"llama_4_scaling_beta\":0.1}",
               &m, &err));
    assert_true(m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-5 && m.window == 0 && !m.tied);
    assert_true(m.rope_growth == 0.1 && m.rope_positions == 16384 && m.rope_attention == 1 && m.rope_theta == 1e6);
    assert_true(spw_model_rope_tables(&m) == 2 && spw_model_rope_table(&m, 1) == 0 &&
                spw_model_query_table(&m, 1) == 1);
    DONE(parse(
        "mimo_v2_flash",
        "\"num_key_value_heads\":1,\"sliding_window_size\":128,\"sliding_window\":128,\"routed_scaling_factor\":null,"
        "\"hybrid_layer_pattern\":[0,1,1],\"moe_layer_freq\":[0,1,1],\"layernorm_epsilon\":1e-5,\"rope_theta\":5000000,"
        "\"swa_rope_theta\":10000,\"swa_num_key_value_heads\":2,\"partial_rotary_factor\":0.334,\"n_shared_experts\":"
        "null",
        &m, &err));
    assert_true(m.window == 129 && m.window_from == 1 && m.full_every == 0 && m.head_dim == 192 && m.value_dim == 128);
    assert_true(spw_model_kv_heads(&m, 0) == 1 && spw_model_kv_heads(&m, 1) == 2 && spw_model_head_dim(&m, 0) == 192);
    assert_true(!spw_model_has_sinks(&m, 0) && spw_model_has_sinks(&m, 1) && m.value_scale == 0.707 && !m.out_bias);
    assert_true(spw_model_rope_width(&m, 0) == 64 && spw_model_rope_width(&m, 1) == 64 && m.rope_theta == 5e6);
    assert_true(m.rope_local_theta == 1e4 && m.experts == 256 && m.choices == 8 && m.dense_first == 1);
    assert_true(m.shared_width == 0 && m.sigmoid && m.sum_to_one && m.groups == 0 && m.norm_eps == 1e-5 && !m.tied);
    DONE(parse("mimo_v2_flash",
               "\"num_key_value_heads\":1,\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"],"
               "\"attention_value_scale\":null",
               &m, &err));
    assert_true(m.window == 0 && m.full_every == 0 && m.kv_heads == 1 && m.full_kv_heads == 0 && m.value_scale == 1);
    assert_true(spw_model_rope_tables(&m) == 1 && !spw_model_has_sinks(&m, 2));
    DONE(parse("bamba", MAMBA ",\"attn_layer_indices\":[1],\"head_dim\":8,\"z_loss_coefficient\":0.0", &m, &err));
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_is_linear(&m, 1) && spw_model_is_linear(&m, 2));
    assert_true(m.linear_mamba && m.linear_bias && m.linear_value_dim == 8 && m.linear_key_dim == 256 && !m.tied);
    assert_true(m.rope_part == 0.5 && m.rope_theta == 1e4 && m.norm_eps == 1e-5 && m.kv_heads == 8 && !m.gate_packed);
    DONE(parse("bamba",
               MAMBA ",\"attention_bias\":true,\"mlp_bias\":true,\"rope_parameters\":{\"rope_type\":\"default\","
                     "\"rope_theta\":500,\"partial_rotary_factor\":1.0}",
               &m, &err));
    assert_true(m.qkv_bias && m.out_bias && m.mlp_bias && m.rope_part == 0 && spw_model_is_linear(&m, 1));
    DONE(parse("lfm2", "\"full_attn_idxs\":[1],\"block_ff_dim\":1000,\"tie_embedding\":true", &m, &err));
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_is_linear(&m, 1) && spw_model_is_linear(&m, 2));
    assert_true(m.linear_conv && m.linear_taps == 3 && spw_model_linear_channels(&m) == 12 && m.tied && m.qk_norm);
    assert_true(m.mlp_width == 768 && m.rope_theta == 1e6 && m.norm_eps == 1e-5 && m.kv_heads == 8 && m.head_dim == 6);
    DONE(parse("lfm2", "\"block_ffn_dim_multiplier\":1.5,\"block_multiple_of\":4,\"tie_embedding\":false", &m, &err));
    assert_true(m.mlp_width == 8 && !m.tied && m.linear_heads == 0 && !spw_model_is_linear(&m, 0)); /* 2 4, times 1.5 */
    DONE(parse("lfm2", CONVS ",\"block_auto_adjust_ff_dim\":false,\"norm_eps\":0.25", &m, &err));
    assert_true(m.mlp_width == 7 && m.norm_eps == 0.25 && spw_model_is_linear(&m, 2));
    DONE(parse("lfm2_moe", CONVS, &m, &err));
    assert_true(m.experts == 32 && m.choices == 4 && m.mlp_width == 1792 && m.dense_first == 2 && m.dense_width == 7);
    assert_true(m.sigmoid && m.sum_to_one && m.choice_scale == 1 && m.choice_least == 1e-6 && m.tied);
    DONE(parse("falcon_h1", HALVES, &m, &err));
    assert_true(m.linear_beside && m.linear_mamba && m.linear_bias && m.linear_unnormed && !m.linear_norm_first);
    assert_true(!spw_model_is_linear(&m, 0) && spw_model_has_linear(&m, 0) && spw_model_attends(&m, 0));
    assert_true(m.linear_heads == 2 && m.linear_value_dim == 8 && m.linear_key_dim == 256 && m.linear_taps == 4);
    assert_true(m.embedding_scale == 1 && m.logit_divisor == 1 && m.scales.keys == 1 && m.scales.linear[4] == 1);
    assert_true(m.kv_heads == 2 && m.norm_eps == 1e-5 && m.rope_theta == 1e4 && !m.qkv_bias && !m.mlp_bias && !m.tied);
    DONE(parse(
        "falcon_h1",
        "\"num_key_value_heads\":1,\"mamba_n_heads\":3,\"mamba_d_ssm\":null,\"mamba_expand\":2,\"mamba_rms_norm\":true,"
        "\"lm_head_multiplier\":0.25,\"key_multiplier\":0.5,\"mlp_multipliers\":[0.5,2],\"ssm_multipliers\":[1,2,3,4,5]"
        ","
        "\"time_step_limit\":[0.0,{\"__float__\":\"Infinity\"}]",
        &m, &err));
    assert_true(m.linear_value_dim == 8 && !m.linear_unnormed && m.linear_norm_first && m.logit_divisor == 4);
    assert_true(m.scales.gate == 0.5 && m.scales.mlp == 2 && m.scales.linear[2] == 3);
    assert_true(spw_model_score_scale(&m) == (float)(0.5 / sqrt((double)m.head_dim)));
    DONE(parse("olmo_hybrid", "\"linear_key_head_dim\":8", &m, &err));
    assert_true(m.linear_heads == 2 && m.linear_key_heads == 2 && m.linear_value_dim == 16 && m.linear_taps == 4);
    assert_true(m.linear_most == 2 && m.linear_eps == 1e-5 && m.linear_apart && !m.attention_gated &&
                m.full_every == 3);
    assert_true(spw_model_norms(&m, 0) == SPW_NORMS_BEFORE && spw_model_norms(&m, 2) == SPW_NORMS_AFTER);
    assert_true(m.qk_norm_whole && !m.norms_from_one && m.norm_eps == 1e-6 && m.rope_theta == 1e4 && !m.qkv_bias);
    DONE(spw_hf_config_parse(
        &m,
        "{\"model_type\":\"olmo_hybrid\",\"hidden_size\":64,\"num_hidden_layers\":9,\"num_attention_heads\":2,"
        "\"intermediate_size\":7,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":null},"
        "\"linear_allow_neg_eigval\":false}",
        "config.json", false, &err));
    assert_true(m.linear_key_dim == 24 && m.linear_value_dim == 48 && m.linear_most == 0 && m.full_every == 4);
    assert_true(m.rope_theta == 0 && spw_model_rope_tables(&m) == 0 && !spw_model_has_rope(&m, 3));
    DONE(parse("olmo_hybrid", "\"linear_key_head_dim\":8,\"rope_parameters\":null,\"rope_theta\":null", &m, &err));
    assert_true(m.rope_theta == 0); /* as it is published */
    DONE(parse("olmo_hybrid", "\"linear_key_head_dim\":8,\"rope_parameters\":null,\"rope_theta\":500.0", &m, &err));
    assert_true(m.rope_theta == 500);
    DONE(parse("afmoe", "", &m, &err));
    assert_true(m.experts == 64 && m.choices == 6 && m.mlp_width == 1408 && m.shared_width == 2816 && m.sigmoid);
    assert_true(m.sum_to_one && m.choice_scale == 1 && m.dense_first == 1 && m.dense_width == 7 && m.groups == 0);
    assert_true(m.head_dim == 128 && m.kv_heads == m.heads && m.norms == SPW_NORMS_BOTH && m.qk_norm && !m.qkv_bias);
    assert_true(m.attention_gated && m.gate_apart && m.embedding_scale == 0 && spw_model_reads_experts(&m));
    assert_true(m.window == 1024 && m.full_every == 0 && spw_model_has_rope(&m, 2) && m.norm_eps == 1e-5 && !m.tied);
    DONE(parse("afmoe", "\"global_attn_every_n_layers\":2,\"mup_enabled\":true,\"num_dense_layers\":0", &m, &err));
    assert_true(m.embedding_scale == sqrt((double)m.width) && m.dense_width == 0 && m.full_every == 2);
    assert_true(spw_model_window(&m, 0) == 1024 && spw_model_window(&m, 1) == 0 && spw_model_window(&m, 2) == 1024);
    assert_true(spw_model_has_rope(&m, 0) && !spw_model_has_rope(&m, 1) && spw_model_experts(&m, 0) == 64);
    DONE(parse("afmoe", "\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]", &m, &err));
    assert_true(m.window == 0 && !spw_model_has_rope(&m, 0) && !spw_model_has_rope(&m, 2));
    DONE(parse("mistral4", GROWS ",\"head_dim\":128,\"sliding_window\":null", &m, &err));
    assert_true(m.kv_rank == 256 && m.q_rank == 1024 && m.rope_dim == 64 && m.head_dim == 128 && m.value_dim == 128);
    assert_true(m.experts == 128 && m.choices == 4 && m.mlp_width == 2048 && m.shared_width == 2048 && m.groups == 0);
    assert_true(!m.sigmoid && m.sum_to_one && m.experts_packed && m.dense_first == 0 && m.choice_scale == 1);
    assert_true(m.rope_growth == 0.1 && m.rope_part == 0 && m.rope_paired && m.norm_eps == 1e-6 && !m.tied);
    assert_true(spw_model_rope_width(&m, 0) == 64 && spw_model_rope_width(&m, 1) == 128);
    assert_true(fabs((double)spw_model_score_scale(&m) - pow(0.1 * log(128) + 1, 2) / sqrt(128)) < 1e-7);
    DONE(parse("gpt_neox", "", &m, &err));
    assert_true(m.layer_norm && m.parallel && m.parallel_norm && m.packed && m.woven && m.ungated && !m.tied);
    assert_true(m.curve == SPW_CURVE_GELU_ERF && m.rope_part == 0.25 && m.rope_theta == 10000 && m.norm_eps == 1e-5);
    assert_true(m.qkv_bias && m.out_bias && m.mlp_bias && m.kv_heads == m.heads);
    DONE(parse("gpt_neox",
               "\"rotary_pct\":1.0,\"rotary_emb_base\":500,\"use_parallel_residual\":false,\"attention_bias\":false,"
               "\"hidden_act\":\"gelu_fast\",\"hidden_dropout\":0.1",
               &m, &err));
    assert_true(!m.parallel && m.rope_part == 0 && m.rope_theta == 500 && m.curve == SPW_CURVE_GELU && m.dropout == 0);
    assert_true(!m.qkv_bias && !m.out_bias && m.mlp_bias);
    DONE(parse("opt", "\"ffn_dim\":8,\"init_std\":0.006,\"dropout\":0.1,\"word_embed_proj_dim\":12", &m, &err));
    assert_true(m.layer_norm && m.learned_places && m.places_before == 2 && m.curve == SPW_CURVE_RELU && m.tied);
    assert_true(m.init_std == 0.006 && m.mlp_width == 8 && m.qkv_bias && m.mlp_bias && m.dropout == 0);
    assert_true(spw_model_rope_tables(&m) == 0 && !spw_model_has_rope(&m, 0));
    DONE(parse("starcoder2", "", &m, &err));
    assert_true(m.layer_norm && m.kv_heads == 2 && m.ungated && m.curve == SPW_CURVE_GELU && m.tied && m.window == 0);
    assert_true(m.init_std == 0.018042 && m.qkv_bias && m.out_bias && m.mlp_bias && m.rope_part == 0);
    DONE(parse("starcoder2", "\"sliding_window\":9,\"use_bias\":false,\"num_key_value_heads\":4", &m, &err));
    assert_true(m.window == 9 && !m.qkv_bias && !m.mlp_bias && m.kv_heads == 4);
    DONE(parse("stablelm", "", &m, &err));
    assert_true(m.layer_norm && m.kv_heads == 32 && !m.ungated && m.rope_part == 0.25 && !m.qkv_bias && !m.parallel);
    DONE(parse("stablelm", "\"use_qkv_bias\":true,\"use_parallel_residual\":true", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && !m.mlp_bias && m.parallel && !m.parallel_norm && !m.tied);
    DONE(parse("qwen3_5_text", "", &m, &err));
    assert_true(m.linear_heads == 32 && m.linear_key_heads == 16 && m.linear_key_dim == 128 && m.linear_taps == 4);
    assert_true(m.linear_value_dim == 128 && !m.linear_woven && m.attention_gated && m.qk_norm && m.norms_from_one);
    assert_true(m.full_every == 4 && m.window == 0 && m.kv_heads == 4 && m.head_dim == 256 && m.rope_part == 0.25);
    assert_true(m.rope_theta == 10000 && m.norm_eps == 1e-6 && !m.tied && spw_model_is_linear(&m, 2));
    DONE(parse("qwen3_5_text",
               "\"full_attention_interval\":3,\"layer_types\":[\"linear_attention\",\"full_attention\","
               "\"linear_attention\"],\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e7,"
               "\"partial_rotary_factor\":0.5,\"mrope_section\":[11,11,10],\"mrope_interleaved\":true}",
               &m, &err));
    assert_true(m.full_every == 2 && !spw_model_is_linear(&m, 1) && m.rope_theta == 1e7 && m.rope_part == 0.5);
    DONE(parse("qwen3_5_text", "\"full_attention_interval\":9", &m, &err));
    assert_int_equal(m.full_every, 4);
    DONE(parse("qwen3_5_moe_text", "\"mlp_only_layers\":[]", &m, &err));
    assert_true(m.experts == 256 && m.choices == 8 && m.mlp_width == 512 && m.shared_width == 512 && m.shared_gated);
    assert_true(m.sum_to_one && m.kv_heads == 2 && m.dense_width == 0 && !m.linear_woven);
    DONE(parse("qwen3_next", "\"norm_topk_prob\":false,\"decoder_sparse_step\":2", &m, &err));
    assert_true(m.experts == 512 && m.choices == 10 && m.mlp_width == 512 && m.shared_width == 512 && m.linear_woven);
    assert_true(!m.sum_to_one && m.kv_heads == 2 && m.dense_width == 7 && spw_model_experts(&m, 1) == 512);
    DONE(parse("gemma4_text", FOUR, &m, &err));
    assert_true(m.window == 512 && m.full_every == 3 && m.head_dim == 256 && m.full_head_dim == 512 && m.kv_heads == 4);
    assert_true(m.full_kv_heads == 4 && !m.values_of_keys && m.values_normed && m.layer_scaled && !m.norms_from_one);
    assert_true(m.rope == SPW_ROPE_PROPORTIONAL && m.rope_part == 0.25 && m.rope_theta == 1e6 && m.rope_factor == 1);
    assert_true(m.rope_local_theta == 10000 && spw_model_score_scale(&m) == 1 && m.tied && m.logit_cap == 0);
    assert_true(spw_model_head_dim(&m, 1) == 256 && spw_model_head_dim(&m, 2) == 512 && m.experts == 0);
    assert_true(spw_model_rope_width(&m, 0) == 512 && spw_model_rope_width(&m, 1) == 256);
    assert_true(m.inputs_dim == 0 && m.readers == 0);
    DONE(parse("gemma4_text", FOUR2 ",\"num_kv_shared_layers\":1,\"use_double_wide_mlp\":true", &m, &err));
    assert_true(m.inputs_dim == 256 && m.inputs_vocab == 262144 && m.readers == 1 && m.readers_double);
    assert_true(spw_model_keys_of(&m, 0) == 0 && spw_model_keys_of(&m, 1) == 1 && spw_model_keys_of(&m, 2) == 1);
    assert_true(!spw_model_lends_keys(&m, 0) && spw_model_lends_keys(&m, 1) && !spw_model_lends_keys(&m, 2));
    assert_true(spw_model_dense_width(&m, 1) == 7 && spw_model_dense_width(&m, 2) == 14);
    assert_true(spw_model_side_cols(&m, SPW_SIDE_INPUTS) == 768 && spw_model_side_cols(&m, SPW_SIDE_KEYS) == 0);
    assert_true(spw_model_side_cols(&m, SPW_SIDE_FULL_VALUES) == 4 * 512);
    assert_true(spw_model_side_block(&m, SPW_SIDE_FULL_KEYS) == 2 &&
                spw_model_side_reader(&m, SPW_SIDE_FULL_KEYS) == 3);
    { /* nobody before the reader has keys of its kind; fewer rows than tokens */
        static const char *const wrong[2][2] = {{FOUR ",\"num_key_value_heads\":2,\"num_kv_shared_layers\":1",
                                                 "the last 1 of 3 layers read the keys of one before them"},
                                                {FOUR2 ",\"num_key_value_heads\":2,\"vocab_size_per_layer_input\":9",
                                                 "embeddings of each layer have 9 rows for 256 tokens"}};
        for (int k = 0; k < 2; k++) {
            spw_model *model = NULL;
            DONE(parse("gemma4_text", wrong[k][0], &m, &err));
            assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
            assert_non_null(strstr(err.message, wrong[k][1]));
            err = (spw_error){0};
        }
    }
    DONE(parse("gemma4_text", FOUR, &m, &err));
    { /* of 256 pairs the first 64 are turned, by frequencies of all */
        float table[2 * 512];
        spw_rope_table(&m, 0, 2, table);
        assert_true(table[512] == cosf(1) && table[512 + 256] == sinf(1));
        assert_true(fabs((double)table[512 + 256 + 63] - sin(pow(1e6, -126.0 / 512))) < 1e-6);
        assert_true(table[512 + 64] == 1 && table[512 + 256 + 64] == 0 && table[512 + 511] == 0);
    }
    DONE(parse("gemma4_text",
               FOUR ",\"attention_k_eq_v\":true,\"num_global_key_value_heads\":1,\"global_head_dim\":16,"
                    "\"enable_moe_block\":true,\"num_experts\":128,\"top_k_experts\":8,\"moe_intermediate_size\":704,"
                    "\"use_bidirectional_attention\":\"vision\",\"final_logit_softcapping\":30,"
                    "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"proportional\",\"factor\":2}}",
               &m, &err));
    assert_true(m.values_of_keys && m.full_kv_heads == 1 && m.full_head_dim == 16 && m.logit_cap == 30);
    assert_true(m.experts == 128 && m.choices == 8 && m.mlp_width == 704 && m.dense_width == 7 && m.experts_beside);
    assert_true(m.rope_part == 1 && m.rope_factor == 2 && m.sum_to_one);
    DONE(parse("gemma4_text",
               FOUR
               ",\"attention_k_eq_v\":true,\"per_layer_config\":{\"2\":{\"head_dim\":64,\"num_key_value_heads\":2}}",
               &m, &err));
    assert_true(m.full_head_dim == 64 && m.full_kv_heads == 2 && m.kv_heads == 4);
    DONE(
        parse("gemma4_text", FOUR ",\"per_layer_config\":{\"02\":{\"head_dim\":64}}", &m, &err)); /* of more than ten */
    assert_true(m.full_head_dim == 64 && m.full_kv_heads == 4);
    DONE(parse("ernie4_5_moe", "\"moe_layer_end_index\":2", &m, &err));
    assert_true(m.experts == 64 && m.choices == 6 && m.mlp_width == 1536 && m.shared_width == 3072);
    assert_true(m.softmax_biased && !m.sigmoid && m.sum_to_one && m.dense_first == 1 && m.dense_width == 7);
    assert_true(m.rope_paired && m.rope_theta == 5e5 && m.kv_heads == 4 && m.head_dim == 6 && m.norm_eps == 1e-5);
    DONE(parse("hy_v3", "\"output_router_logits\":true,\"first_k_dense_replace\":1", &m, &err));
    assert_true(m.experts == 192 && m.choices == 8 && m.mlp_width == 1536 && m.shared_width == 1536 && m.sigmoid);
    assert_true(m.sum_to_one && m.choice_scale == 2.826 && m.dense_first == 1 && m.dense_width == 7 && m.qk_norm);
    assert_true(m.rope_theta == 11158840 && m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-5 && !m.tied);
    DONE(
        parse("hunyuan_v1_dense", "\"rope_scaling\":{\"type\":\"dynamic\",\"alpha\":1000.0,\"factor\":1.0}", &m, &err));
    assert_true(m.qk_norm && m.qk_norm_last && m.kv_heads == 2 && m.head_dim == 6 && m.norm_eps == 1e-5 && !m.tied);
    assert_true(m.rope == SPW_ROPE_PLAIN && m.rope_theta == 1e4 * pow(1000, 1.5));
    DONE(parse("hunyuan_v1_moe", "\"moe_topk\":[2,2,2],\"num_experts\":4,\"output_router_logits\":true", &m, &err));
    assert_true(m.experts == 4 && m.choices == 2 && m.mlp_width == 7 && m.shared_width == 7 && m.sum_to_one);
    DONE(parse("cohere", "", &m, &err));
    assert_true(m.layer_norm && m.norm_unbiased && m.parallel && m.rope_paired && m.tied && m.rope_theta == 5e5);
    assert_true(m.logit_divisor == 16 && m.kv_heads == 2 && m.head_dim == 6 && m.norm_eps == 1e-5 && m.window == 0);
    DONE(parse("cohere2", "\"sliding_window_pattern\":2,\"head_dim\":6", &m, &err));
    assert_true(m.window == 4096 && m.full_every == 2 && m.rope_skip_every == 2 && m.rope_theta == 1e4);
    DONE(parse("exaone4", "", &m, &err));
    assert_true(m.window == 4096 && m.full_every == 0 && m.rope_skip_every == 0 && m.kv_heads == 32 && !m.tied);
    assert_true(m.norms == SPW_NORMS_AFTER && m.qk_norm && !m.qk_norm_whole && m.norm_eps == 1e-5);
    DONE(parse("exaone4", "\"sliding_window_pattern\":2", &m, &err));
    assert_true(m.full_every == 2 && m.rope_skip_every == 2);
    DONE(parse("exaone4", "\"sliding_window\":null,\"sliding_window_pattern\":\"LLLG\"", &m, &err));
    assert_true(m.window == 0 && m.rope_skip_every == 0);
    DONE(parse("exaone4", "\"sliding_window_pattern\":1", &m, &err)); /* none has a window, and so none has rope */
    assert_true(m.window == 0 && m.full_every == 0 && m.rope_skip_every == 1 && !spw_model_has_rope(&m, 0));
    DONE(parse("glm4_moe_lite", "\"first_k_dense_replace\":1", &m, &err));
    assert_true(m.q_rank == 768 && m.head_dim == 256 && m.value_dim == 256 && m.dense_first == 1 && m.sigmoid);
    assert_true(m.experts == 64 && m.choices == 4 && m.groups == 0 && m.choice_scale == 1.8 && m.norm_eps == 1e-5);
    { /* sizes of latent attention that it does not have, or that are not computed: known when a model is built */
        static const char *const sizes[3][2] = {
            {"\"qk_rope_head_dim\":5", "5 of a head's 133 elements are turned"},
            {"\"v_head_dim\":193", "a head's values have 193 elements, its keys 192; not supported yet"},
            {"\"n_routed_experts\":520", "8 of 520 experts for each token"}};
        for (int k = 0; k < 3; k++) {
            spw_model *model = NULL;
            DONE(parse("deepseek_v3", sizes[k][0], &m, &err));
            assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
            assert_non_null(strstr(err.message, sizes[k][1]));
            err = (spw_error){0};
        }
    }
    { /* an indexer that has fewer elements than are turned, or more than there is room for, or none before the first layer */
        static const char *const sizes[4] = {"\"index_head_dim\":62", "\"index_head_dim\":520",
                                             "\"qk_rope_head_dim\":130", ""};
        for (int k = 0; k < 4; k++) {
            spw_model *model = NULL;
            DONE(parse("deepseek_v32", sizes[k], &m, &err));
            m.index_from = k == 3 ? 0 : m.index_from;
            assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
            assert_non_null(strstr(err.message, "model: an indexer of 64 heads of "));
            err = (spw_error){0};
        }
    }
    DONE(parse("deepseek_v4",
               "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":16,\"original_max_position_embeddings\":65536}", &m,
               &err));
    assert_true(m.keys_are_values && m.streams == 4 && m.stream_rounds == 20 && m.window == 128 && m.rope_dim == 64);
    assert_true(m.few_rate == 4 && m.many_rate == 128 && m.index_keys == 512 && m.rope == SPW_ROPE_YARN &&
                m.rope_attention == 1 && m.rope_theta == 160000 && m.rope_local_theta == 10000);
    for (uint64_t l = 0; l < 3; l++) /* many rows in the first two, then in turns; the first three choose by a table */
        assert_true(spw_model_front_rate(&m, l) == 128 && spw_model_is_hashed(&m, l));
    { /* streams, groups and elements that there is no room for, or that do not divide: known when a model is built */
        static const char *const sizes[4][2] = {{"\"hc_mult\":5", "model: 5 streams, whose maps take 20 rounds"},
                                                {"\"hc_sinkhorn_iters\":33", "whose maps take 33 rounds"},
                                                {"\"o_groups\":3", "model: 2 heads, 1 of keys, in 3 groups"},
                                                {"\"o_groups\":2,\"index_head_dim\":32", "and of an indexer's 32"}};
        for (int k = 0; k < 4; k++) {
            spw_model *model = NULL;
            DONE(parse("deepseek_v4", sizes[k][0], &m, &err));
            assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
            if (strstr(err.message, sizes[k][1]) == NULL)
                fail_msg("%s", err.message);
            err = (spw_error){0};
        }
    }
    { /* groups that do not divide, or hold too few */
        spw_model *model = NULL;
        DONE(parse("glm4_moe", "\"num_key_value_heads\":2,\"n_group\":3", &m, &err));
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "128 experts in 3 groups, 1 of which a token may choose 8 experts from"));
        err = (spw_error){0};
    }
    { /* more experts than the tables hold, more choices than experts: known when a model is built */
        spw_model *model = NULL;
        DONE(parse("qwen3_moe", "\"num_experts\":8,\"num_experts_per_tok\":9,\"num_key_value_heads\":1", &m, &err));
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "9 of 8 experts for each token"));
        err = (spw_error){0};
        DONE(parse("mistral", "", &m, &err)); /* 21 for each of so many layers, and 8: 4 more than 32 bits count */
        m.layers = 204522252;
        m.kv_heads = m.heads;
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "number of layers is 204522252, it must be between 1 and 65536"));
        err = (spw_error){0};
    }
}

/* A family can be the model section of a training configuration, where every key must be one of its own. */
static void
test_section(void **state)
{
    static spw_config c;
    static const char text[] =
        "{\"model\":{\"model_type\":\"qwen2\",\"vocab_size\":256,\"hidden_size\":12,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":2,\"intermediate_size\":7,\"rope_theta\":1e6},"
        "\"data\":{\"path\":[\"x\"]},\"train_micro_batch_size_per_gpu\":1}";
    static const char four[] =
        "{\"model\":{\"model_type\":\"gemma4_text\",\"hidden_size\":12,\"num_hidden_layers\":3,\"num_attention_heads\":"
        "4,"
        "\"intermediate_size\":7," FOUR "},\"data\":{\"path\":[\"x\"]},\"train_micro_batch_size_per_gpu\":1}";
    spw_error err = {0};
    (void)state;
    DONE(spw_config_parse(&c, text, "run.json", (const char *[]){"model.sliding_window=null"}, 1, &err));
    assert_int_equal(c.model.family, SPW_FAMILY_QWEN2);
    assert_true(c.model.qkv_bias && c.model.rope_theta == 1e6);
    assert_int_equal(spw_config_parse(&c, text, "run.json", (const char *[]){"model.hiden_act=\"silu\""}, 1, &err),
                     SPW_ECONFIG);
    assert_non_null(strstr(err.message, "unknown key \"model.hiden_act\"; did you mean \"model.hidden_act\"?"));
    err = (spw_error){0};
    assert_int_equal(
        spw_config_parse(&c, text, "run.json", (const char *[]){"model.rope_scaling.type=\"dynamic\""}, 1, &err),
        SPW_ECONFIG);
    assert_non_null(strstr(err.message, "run.json: not supported yet: model.rope_scaling.type \"dynamic\""));
    err = (spw_error){0};
    assert_int_equal(spw_config_parse(&c, text, "run.json",
                                      (const char *[]){"model.model_type=\"phi3\"", "model.embd_pdrop=0.1"}, 2, &err),
                     SPW_ECONFIG);
    assert_non_null(strstr(err.message, "run.json: not supported yet: model.embd_pdrop 0.1"));
    err = (spw_error){0};
    DONE(spw_config_parse(&c, text, "run.json", (const char *[]){"model.model_type=\"phi3\"", "model.resid_pdrop=0.1"},
                          2, &err));
    assert_true(c.model.dropout == 0.1);
    DONE(spw_config_parse(&c, text, "run.json", (const char *[]){"model={\"path\":\"tests/vectors/families/qwen3\"}"},
                          1, &err));
    assert_int_equal(c.model.family, SPW_FAMILY_QWEN3);
    assert_string_equal(c.model_path, "tests/vectors/families/qwen3");
    { /* whose class looks into rope_parameters alone */
        static const char *const older[] = {"rope_theta", "rope_scaling", "partial_rotary_factor",
                                            "original_max_position_embeddings"};
        for (size_t k = 0; k < sizeof older / sizeof older[0]; k++) {
            char value[64], want[100];
            snprintf(value, sizeof value, "model.%s=1", older[k]);
            snprintf(want, sizeof want, "\"model.%s\" is a key of other values of model.model_type", older[k]);
            assert_int_equal(spw_config_parse(&c, four, "run.json", (const char *[]){value}, 1, &err), SPW_ECONFIG);
            assert_non_null(strstr(err.message, want));
            err = (spw_error){0};
        }
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),       cmocka_unit_test(test_needs_dense_width),
        cmocka_unit_test(test_indexed_layers), cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_section),
    };
    return cmocka_run_group_tests_name("hf_config", tests, NULL, NULL);
}
