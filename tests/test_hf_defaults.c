/*
 * config.json of Hugging Face's families: what a missing key means, and the same keys as the model section of a training configuration.
 */
#include "lib_hf_config.h"
#include "lib_tiny.h"
#include "spw_files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

/* What a missing key means, by family, as in the classes of transformers. */
static void
test_defaults(void **state)
{
    spw_model_config m;
    spw_error err = {0};
    (void)state;
    DONE(hf_parse("gpt2", "\"n_inner\":null,\"resid_pdrop\":0.1,\"attn_pdrop\":0.1,\"unheard_of\":1", &m, &err));
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
    DONE(hf_parse("gpt2", "\"n_ctx\":77,\"tie_word_embeddings\":false", &m, &err));
    assert_true(!m.tied && m.positions == 77);
    DONE(hf_parse("llama", "\"rope_scaling\":null", &m, &err));
    assert_true(!m.tied && m.kv_heads == 2 && m.head_dim == 6 && m.rope_theta == 10000 && m.norm_eps == 1e-6);
    assert_true(!m.qkv_bias && !m.out_bias && !m.mlp_bias && !m.qk_norm && m.window == 0);
    DONE(hf_parse("llama", "\"attention_bias\":true,\"head_dim\":null,\"num_key_value_heads\":1", &m, &err));
    assert_true(m.qkv_bias && m.out_bias && m.head_dim == 6 && m.kv_heads == 1);
    DONE(hf_parse("llama", "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":500000.0}", &m, &err));
    assert_true(m.rope_theta == 500000);
    DONE(hf_parse("llama",
                  "\"max_position_embeddings\":99,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"beta_fast\":0}",
                  &m, &err));
    assert_true(m.rope == SPW_ROPE_YARN && m.rope_low == 1 && m.rope_high == 32 && m.rope_truncate);
    assert_true(m.rope_positions == 99 && fabs(m.rope_attention - (1 + 0.1 * log(4))) < 1e-15);
    DONE(hf_parse("qwen3",
                  "\"original_max_position_embeddings\":7,\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":4,"
                  "\"original_max_position_embeddings\":9,\"attention_factor\":0.5,\"truncate\":null}",
                  &m, &err));
    assert_true(m.rope_positions == 7 && m.rope_attention == 0.5 && !m.rope_truncate);
    DONE(hf_parse("llama", "\"rope_theta\":1,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}", &m, &err));
    {
        spw_model *model = NULL;
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "rope_theta (1) above 1"));
        err = (spw_error){0};
    }
    DONE(hf_parse("llama", "\"architectures\":[\"LLaMAForCausalLM\"]", &m, &err)); /* as the first files had it */
    for (int q = 2; q < 4; q++) {
        DONE(hf_parse(q == 2 ? "qwen2" : "qwen3", "", &m, &err));
        assert_int_equal(m.kv_heads, 32);
        DONE(hf_parse(q == 2 ? "qwen2" : "qwen3", "\"num_key_value_heads\":null", &m, &err));
        assert_int_equal(m.kv_heads, 2);
    }
    DONE(hf_parse("mistral", "", &m, &err));
    assert_true(m.kv_heads == 8 && m.window == 4096 && m.window_from == 0);
    DONE(hf_parse("mistral", "\"sliding_window\":null,\"num_key_value_heads\":null", &m, &err));
    assert_true(m.kv_heads == 2 && m.window == 0);
    DONE(hf_parse("qwen2", "\"sliding_window\":4096,\"max_window_layers\":1", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && m.window == 0);
    DONE(hf_parse("qwen2", "\"use_sliding_window\":true,\"sliding_window\":9,\"max_window_layers\":1", &m, &err));
    assert_true(spw_model_window(&m, 0) == 0 && spw_model_window(&m, 1) == 9 && spw_model_window(&m, 2) == 9);
    DONE(hf_parse("qwen2", "\"use_sliding_window\":true,\"sliding_window\":9", &m, &err));
    assert_true(m.window == 0); /* from layer 28 on */
    DONE(hf_parse("qwen3", "", &m, &err));
    assert_true(m.qk_norm && !m.qkv_bias && m.head_dim == 128);
    DONE(hf_parse("mixtral", "", &m, &err));
    assert_true(m.experts == 8 && m.choices == 2 && m.sum_to_one && m.kv_heads == 8 && m.window == 0);
    assert_true(m.rope_theta == 1e6 && m.norm_eps == 1e-5 && m.mlp_width == 7 && !m.qk_norm);
    DONE(hf_parse("gemma3_text", "", &m, &err));
    assert_true(m.tied && m.kv_heads == 4 && m.head_dim == 256 && m.query_scalar == 256 && m.norm_eps == 1e-6);
    assert_true(m.rope_theta == 1e6 && m.rope_local_theta == 10000 && m.rope == SPW_ROPE_PLAIN && !m.qkv_bias);
    assert_true(m.window == 4096 && m.full_every == 0); /* of three layers none is the sixth */
    assert_true(m.qk_norm && m.norms == SPW_NORMS_BOTH && m.norms_from_one && m.gate == SPW_GATE_GELU &&
                m.embedding_scaled);
    DONE(hf_parse(
        "gemma3_text",
        "\"sliding_window_pattern\":2,\"rope_theta\":500,\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8},"
        "\"_sliding_window_pattern\":3,\"cache_implementation\":\"hybrid\"",
        &m, &err));
    assert_true(m.full_every == 2 && m.rope == SPW_ROPE_LINEAR && m.rope_theta == 500 && m.rope_local_theta == 10000);
    for (uint64_t l = 0; l < 3; l++) {
        assert_int_equal(spw_model_window(&m, l), l == 1 ? 0 : 4096);
        assert_int_equal(spw_model_rope_table(&m, l), l != 1);
    }
    DONE(hf_parse("gemma3_text",
                  "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"linear\",\"factor\":8},"
                  "\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":77}}",
                  &m, &err));
    assert_true(m.rope == SPW_ROPE_LINEAR && m.rope_theta == 1e6 && m.rope_local_theta == 77);
    DONE(hf_parse("gemma3_text", "\"sliding_window\":null,\"sliding_window_pattern\":1", &m, &err));
    assert_true(m.window == 0 && m.full_every == 0 && spw_model_rope_tables(&m) == 1);
    DONE(hf_parse("gemma2", "\"hidden_act\":\"gelu_pytorch_tanh\",\"sliding_window_pattern\":3", &m, &err));
    assert_true(m.tied && m.kv_heads == 4 && m.head_dim == 256 && m.query_scalar == 256 && m.norm_eps == 1e-6);
    assert_true(m.rope_theta == 10000 && spw_model_rope_tables(&m) == 1 && m.window == 4096 && m.full_every == 2);
    assert_true(!m.qk_norm && m.norms == SPW_NORMS_BOTH && m.norms_from_one && m.gate == SPW_GATE_GELU &&
                m.embedding_scaled);
    assert_true(m.score_cap == 50 && m.logit_cap == 30);
    DONE(hf_parse("gemma2", "\"attn_logit_softcapping\":null,\"final_logit_softcapping\":null", &m, &err));
    assert_true(m.score_cap == 0 && m.logit_cap == 0);
    DONE(hf_parse("olmo2", "", &m, &err));
    assert_true(!m.tied && m.kv_heads == 2 && m.head_dim == 6 && m.norm_eps == 1e-5 && m.rope_theta == 10000);
    assert_true(m.qk_norm && m.qk_norm_whole && m.norms == SPW_NORMS_AFTER && !m.qkv_bias && m.window == 0);
    DONE(hf_parse("qwen3_moe", "\"sliding_window\":4096", &m, &err));
    assert_true(m.experts == 128 && m.choices == 8 && !m.sum_to_one && m.kv_heads == 4 && m.window == 0);
    assert_true(m.rope_theta == 10000 && m.norm_eps == 1e-6 && m.mlp_width == 768 && m.qk_norm && m.head_dim == 6);
    DONE(hf_parse("phi3", "\"resid_pdrop\":0.1", &m, &err));
    assert_true(m.packed && m.kv_heads == 2 && m.head_dim == 6 && m.window == 0 && m.norm_eps == 1e-5);
    assert_true(m.rope_theta == 10000 && !m.tied && m.dropout == 0);
    DONE(hf_parse(
        "phi3", /* as in the rope object first, then beside it; by all names */
        "\"partial_rotary_factor\":0.5,\"rope_parameters\":{\"rope_type\":\"su\",\"partial_rotary_factor\":0.75,"
        "\"short_factor\":[1,2],\"long_factor\":[3,4]},\"max_position_embeddings\":8192",
        &m, &err));
    assert_true(m.rope == SPW_ROPE_LONG && m.rope_positions == 4096 && spw_model_rope_width(&m, 0) == 4);
    assert_true(m.rope_short[1] == 2 && m.rope_long[0] == 3);
    assert_true(fabs(m.rope_attention - sqrt(1 + log(2) / log(4096))) < 1e-15);
    DONE(hf_parse("phi3", "\"partial_rotary_factor\":0.5", &m, &err));
    {
        spw_model *model = NULL;
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "partial_rotary_factor 0.5 turns 3 of a head's 6 elements"));
        err = (spw_error){0};
    }
    DONE(hf_parse("phi3", "\"sliding_window\":9", &m, &err));
    assert_true(m.window == 9 && m.window_from == 0);
    DONE(hf_parse("smollm3", "\"sliding_window\":9", &m, &err));
    assert_true(m.tied && m.kv_heads == 4 && m.rope_theta == 2e6 && m.norm_eps == 1e-6 && m.window == 0);
    assert_true(m.rope_skip_every == 0); /* of three layers, four apart */
    DONE(hf_parse("smollm3", "\"no_rope_layers\":[1,0,1,0],\"no_rope_layer_interval\":3", &m, &err));
    assert_true(spw_model_has_rope(&m, 0) && !spw_model_has_rope(&m, 1) && spw_model_has_rope(&m, 2));
    DONE(hf_parse("qwen2_moe", "\"sliding_window\":4096,\"num_local_experts\":3", &m, &err));
    assert_true(m.experts == 60 && m.choices == 4 && !m.sum_to_one && m.kv_heads == 16 && m.window == 0);
    assert_true(m.mlp_width == 1408 && m.shared_width == 5632 && m.qkv_bias && !m.out_bias && !m.qk_norm && !m.tied);
    DONE(hf_parse("qwen2_moe", "\"num_experts\":7,\"qkv_bias\":false", &m, &err));
    assert_true(m.experts == 7 && !m.qkv_bias);
    DONE(hf_parse("qwen2_moe", "\"decoder_sparse_step\":2,\"mlp_only_layers\":[0,1]", &m, &err));
    assert_true(m.dense_width == 7 && m.dense_first == 2 && m.sparse_every == 2);
    assert_true(spw_model_experts(&m, 1) == 0 && spw_model_experts(&m, 2) == 0 && spw_model_experts(&m, 3) == 60);
    DONE(hf_parse("glm4_moe", "", &m, &err));
    assert_true(m.experts == 128 && m.choices == 8 && m.sigmoid && m.sum_to_one && m.choice_scale == 1 &&
                m.groups == 0);
    assert_true(m.mlp_width == 1408 && m.shared_width == 1408 && !m.shared_gated && m.dense_first == 1 &&
                m.dense_width == 7);
    assert_true(m.rope_part == 0.5 && m.kv_heads == 8 && m.norm_eps == 1e-5 && !m.qk_norm && !m.qkv_bias && !m.tied);
    DONE(hf_parse("glm4_moe", "\"attention_bias\":true,\"partial_rotary_factor\":1,\"n_group\":4,\"topk_group\":2", &m,
                  &err));
    assert_true(m.qkv_bias && !m.out_bias && m.rope_part == 0 && m.groups == 4 && m.group_choices == 2);
    DONE(hf_parse("deepseek_v3", "\"head_dim\":64", &m, &err));
    assert_true(m.kv_rank == 512 && m.q_rank == 1536 && m.rope_dim == 64 && m.head_dim == 192 && m.value_dim == 128);
    assert_true(m.experts == 256 && m.choices == 8 && m.groups == 8 && m.group_choices == 4 && m.choice_scale == 2.5);
    assert_true(m.sigmoid && m.sum_to_one && m.rope_paired && m.dense_first == 3 && m.mlp_width == 2048 &&
                m.shared_width == 2048 && m.kv_heads == 2 && m.norm_eps == 1e-6);
    assert_true(spw_model_rope_width(&m, 0) == 64 && spw_model_score_scale(&m) == 1.0f / sqrtf(192));
    DONE(hf_parse("deepseek_v3",
                  "\"q_lora_rank\":null,\"rope_interleave\":false,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,"
                  "\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096}",
                  &m, &err));
    assert_true(m.q_rank == 0 && !m.rope_paired && m.rope_attention == 1);
    assert_true(fabs((double)spw_model_score_scale(&m) - pow(0.1 * log(40) + 1, 2) / sqrt(192)) < 1e-7);
    DONE(hf_parse("kimi_k2",
                  "\"n_routed_experts\":384,\"n_group\":1,\"topk_group\":1,\"first_k_dense_replace\":1,"
                  "\"routed_scaling_factor\":2.827,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":32,\"beta_fast\":1,"
                  "\"beta_slow\":1,\"mscale\":1,\"mscale_all_dim\":1,\"original_max_position_embeddings\":4096}",
                  &m, &err));
    assert_true(m.family == SPW_FAMILY_DEEPSEEK_V3 && m.experts == 384 && m.groups == 0 && m.dense_first == 1);
    DONE(hf_parse(
        "exaone_moe",
        "\"sliding_window\":128,\"sliding_window_pattern\":\"LLLG\",\"first_k_dense_replace\":2,\"layer_types\":"
        "[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]",
        &m, &err));
    assert_true(m.experts == 64 && m.choices == 8 && m.mlp_width == 1024 && m.shared_width == 1024 &&
                m.dense_first == 2);
    assert_true(m.sigmoid && m.sum_to_one && m.choice_scale == 2.5 && m.window == 128 && m.full_every == 2 &&
                m.qk_norm);
    assert_true(m.rope_skip_every == 2 && m.norms == SPW_NORMS_BEFORE && !m.qk_norm_whole && !m.qkv_bias);
    DONE(hf_parse("deepseek_v32", "\"max_position_embeddings\":163840,\"first_k_dense_replace\":2", &m, &err));
    assert_true(m.index_keys == 2048 && m.index_heads == 64 && m.index_dim == 128 && m.positions == 163840);
    assert_true(!m.index_paired && m.dense_first == 2 && m.groups == 8 && m.rope_paired && m.q_rank == 1536);
    for (uint64_t l = 0; l < 3; l++)
        assert_true(spw_model_has_indexer(&m, l));
    DONE(hf_parse("glm_moe_dsa",
                  "\"index_topk\":4096,\"first_k_dense_replace\":7,"
                  "\"mlp_layer_types\":[\"dense\",\"sparse\",\"sparse\"]",
                  &m, &err));
    assert_true(m.index_heads == 32 && m.index_paired && m.positions == 1024 && m.dense_first == 1 && m.groups == 0 &&
                m.q_rank == 2048);
    assert_true(m.head_dim == 256 && m.value_dim == 256 && m.norm_eps == 1e-5 && spw_model_has_indexer(&m, 2));
    DONE(hf_parse("deepseek_v2", "\"num_experts_per_tok\":6,\"n_group\":4,\"topk_group\":2", &m, &err));
    assert_true(m.experts == 64 && m.choices == 6 && m.groups == 0 && !m.sigmoid && !m.sum_to_one);
    assert_true(m.dense_first == 0 && m.mlp_width == 1407 && m.shared_width == 2814 && m.rope_paired);
    DONE(hf_parse("deepseek_v2",
                  "\"num_experts_per_tok\":6,\"n_group\":4,\"topk_group\":2,\"topk_method\":\"group_limited_greedy\"",
                  &m, &err));
    assert_true(m.groups == 4 && m.group_choices == 2);
    DONE(hf_parse("minimax_m2", "", &m, &err));
    assert_true(m.experts == 256 && m.choices == 8 && m.sigmoid && m.sum_to_one && m.shared_width == 0);
    assert_true(m.qk_norm && m.qk_norm_whole && m.norms == SPW_NORMS_BEFORE && m.head_dim == 128 && m.kv_heads == 8);
    assert_true(m.rope_theta == 5e6 && m.rope_part == 0 && m.norm_eps == 1e-6 && m.mlp_width == 7 && !m.tied);
    DONE(hf_parse("minimax_m2", "\"rotary_dim\":32", &m, &err));
    assert_true(spw_model_rope_width(&m, 0) == 32);
    DONE(hf_parse("minimax_m2", "\"rotary_dim\":32,\"partial_rotary_factor\":0.5", &m, &err));
    assert_true(spw_model_rope_width(&m, 0) == 64);
    DONE(hf_parse("olmo3", "", &m, &err));
    assert_true(m.qk_norm_whole && m.norms == SPW_NORMS_AFTER && m.norm_eps == 1e-5 && !m.tied);
    assert_true(!spw_model_reads_experts(&m)); /* as it has none */
    assert_true(m.rope_theta == 5e5 && m.rope_local_theta == 5e5 && m.window == 4096 && m.full_every == 0);
    DONE(hf_parse("olmo3", "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":8}", &m, &err));
    assert_true(m.rope == SPW_ROPE_YARN && spw_model_rope_table(&m, 0) == 1);
    DONE(hf_parse(
        "olmo3", "\"rope_parameters\":{\"full_attention\":{\"rope_theta\":7},\"sliding_attention\":{\"rope_theta\":9}}",
        &m, &err));
    assert_true(m.rope_theta == 7 && m.rope_local_theta == 9);
    DONE(hf_parse("gemma", "\"hidden_act\":\"gelu\"", &m, &err));
    assert_true(m.tied && m.kv_heads == 16 && m.head_dim == 256 && m.query_scalar == 0 && m.norm_eps == 1e-6);
    assert_true(m.norms == SPW_NORMS_BEFORE && m.norms_from_one && m.gate == SPW_GATE_GELU && m.embedding_scaled);
    assert_true(m.rope_theta == 10000 && m.window == 0 && !m.qk_norm && !m.qkv_bias && m.score_cap == 0);
    DONE(hf_parse("granite", "", &m, &err));
    assert_true(m.embedding_scale == 1 && m.half_scale == 1 && spw_model_score_scale(&m) == 1 && m.logit_divisor == 1);
    assert_true(m.kv_heads == 2 && m.norm_eps == 1e-6 && !m.tied && !m.qkv_bias && !m.mlp_bias && m.window == 0);
    DONE(hf_parse("granite", "\"attention_multiplier\":0.0078125,\"attention_bias\":true", &m, &err));
    assert_true(spw_model_score_scale(&m) == 0.0078125f && m.qkv_bias && m.out_bias);
    DONE(hf_parse("granitemoehybrid", FOUR2 ",\"num_local_experts\":0,\"rope_theta\":1e7", &m, &err));
    assert_true(m.gate_packed && m.mlp_width == 1024 && m.experts == 0 && !m.tied && m.norm_eps == 1e-6);
    assert_true(spw_model_rope_tables(&m) == 0 && !spw_model_has_rope(&m, 0) && m.half_scale == 1);
    DONE(hf_parse("granitemoehybrid", FOUR2 ",\"num_local_experts\":0,\"position_embedding_type\":\"rope\"", &m, &err));
    assert_true(m.rope_theta == 10000 && spw_model_has_rope(&m, 2) && m.score_scale == 1);
    assert_true(!m.linear_mamba && !spw_model_is_linear(&m, 0));
    DONE(hf_parse("granitemoehybrid", FOUR2 ",\"residual_multiplier\":0.25", &m, &err));
    assert_true(m.experts == 8 && m.choices == 2 && m.mlp_width == 7 && m.shared_width == 1024 && m.sum_to_one);
    assert_true(m.choice_scale == 0.25 && m.half_scale == 0.25 && m.gate_packed && m.dense_width == 0);
    DONE(hf_parse("granitemoehybrid",
                  MAMBA ",\"num_local_experts\":0,\"layers_block_type\":[\"mamba\",\"attention\",\"linear_attention\"],"
                        "\"time_step_limit\":[0.0,{\"__float__\":\"Infinity\"}]",
                  &m, &err));
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_is_linear(&m, 1) && spw_model_is_linear(&m, 2));
    assert_true(m.linear_mamba && m.linear_bias && m.linear_heads == 3 && m.linear_key_heads == 1);
    assert_true(m.linear_key_dim == 256 && m.linear_value_dim == 8 && m.linear_taps == 4);
    DONE(hf_parse("nemotron_h", NEMOTRON ",\"time_step_limit\":[0.0, Infinity]", &m, &err));
    assert_true(m.halves_apart && m.ungated && m.curve == SPW_CURVE_RELU_SQUARED && !m.tied && m.norm_eps == 1e-5);
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_has_mlp(&m, 0) && !spw_model_is_linear(&m, 2));
    assert_true(spw_model_experts(&m, 1) == 8 && !spw_model_attends(&m, 1) && spw_model_attends(&m, 2));
    assert_true(m.kv_heads == 8 && m.head_dim == 128 && spw_model_rope_tables(&m) == 0);
    assert_true(m.linear_heads == 128 && m.linear_key_heads == 8 && m.linear_value_dim == 64 && m.linear_step == 0.001);
    assert_true(m.latent_width == 0 && spw_model_expert_cols(&m) == 12 && !spw_model_reads_experts(&m));
    assert_true(m.choices == 2 && m.mlp_width == 7688 && m.shared_width == 7688 && m.dense_width == 0 && m.sigmoid);
    DONE(hf_parse("nemotron_h", NEMOTRON ",\"note\":\"an \\\"Infinity\",\"moe_latent_size\":8", &m, &err));
    assert_true(spw_model_expert_cols(&m) == 8 && spw_model_reads_experts(&m));
    DONE(hf_parse("nemotron_h",
                  "\"layers_block_type\":[\"attention\",\"mlp\",\"linear_attention\"],\"mamba_n_groups\":4,"
                  "\"mamba_dt_min\":0.5,\"attention_head_dim\":6,\"norm_eps\":0.25",
                  &m, &err));
    assert_true(m.experts == 0 && m.mlp_width == 7 && spw_model_has_mlp(&m, 1) && spw_model_experts(&m, 1) == 0);
    assert_true(m.linear_key_heads == 4 && m.linear_step == 0.5 && m.head_dim == 6 && m.norm_eps == 0.25);
    DONE(hf_parse("llama4_text", "", &m, &err));
    assert_true(m.experts == 16 && m.choices == 1 && m.mlp_width == 7 && m.shared_width == 7 && m.dense_width == 0);
    assert_true(m.sigmoid && m.experts_weighed && m.qk_unit && m.rope_paired && m.rope_theta == 5e5 && !m.tied);
    assert_true(m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-5 && m.chunk == 8192 && !m.qkv_bias);
    assert_true(m.rope_skip_every == 0 && m.still_growth == 0 && spw_model_rope_tables(&m) == 1);
    DONE(hf_parse("llama4_text", "\"moe_layers\":[1],\"no_rope_layer_interval\":2,\"no_rope_layers\":[]", &m, &err));
    assert_true(m.sparse_every == 2 && m.dense_width == 16384 && spw_model_experts(&m, 1) == 16);
    assert_true(spw_model_experts(&m, 0) == 0 && spw_model_dense_width(&m, 2) == 16384);
    assert_true(spw_model_chunk(&m, 0) == 8192 && spw_model_chunk(&m, 1) == 0 && spw_model_rope_tables(&m) == 2);
    assert_true(m.still_growth == 0.1 && m.still_places == 8192 && spw_model_query_table(&m, 1) == 1);
    assert_true(spw_model_query_table(&m, 0) == 0 && spw_model_rope_table(&m, 1) == 0);
    DONE(hf_parse("llama4_text",
                  "\"attention_chunk_size\":null,\"attn_temperature_tuning\":4,\"no_rope_layers\":[1,1,0],"
                  "\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]",
                  &m, &err));
    assert_true(m.chunk == 0 && m.still_growth == 0.1 && m.rope_skip_every == 3);
    DONE(hf_parse("llama4_text", "\"moe_layers\":[],\"intermediate_size_mlp\":9", &m, &err));
    assert_true(spw_model_experts(&m, 0) == 0 && spw_model_experts(&m, 2) == 0 && spw_model_dense_width(&m, 1) == 9);
    DONE(hf_parse("olmoe", "\"clip_qkv\":null", &m, &err));
    assert_true(m.experts == 64 && m.choices == 8 && !m.sum_to_one && m.kv_heads == 2 && m.mlp_width == 7);
    assert_true(m.qk_norm && m.qk_norm_whole && m.norms == SPW_NORMS_BEFORE && m.norm_eps == 1e-5 && !m.tied);
    DONE(hf_parse("seed_oss", "", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && !m.mlp_bias && m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-6);
    DONE(hf_parse("seed_oss", "\"attention_bias\":false,\"attention_out_bias\":true", &m, &err));
    assert_true(!m.qkv_bias && m.out_bias && !m.tied);
    DONE(hf_parse("glm", "", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && m.kv_heads == 2 && m.head_dim == 128 && m.norm_eps == 1.5625e-7 &&
                !m.tied);
    assert_true(m.rope_paired && m.rope_part == 0.5 && m.gate_packed && !m.packed && m.norms == SPW_NORMS_BEFORE);
    DONE(hf_parse("glm4", "\"attention_bias\":false,\"partial_rotary_factor\":1.0", &m, &err));
    assert_true(!m.qkv_bias && m.norms == SPW_NORMS_BOTH && !m.norms_from_one && m.rope_part == 0 && m.rope_paired);
    DONE(hf_parse("ernie4_5", "", &m, &err));
    assert_true(m.tied && m.kv_heads == 2 && m.head_dim == 128 && m.norm_eps == 1e-5 && m.rope_theta == 5e5);
    assert_true(m.rope_paired && m.rope_part == 0 && !m.gate_packed && !m.qkv_bias && !m.mlp_bias);
    DONE(hf_parse("ernie4_5", "\"use_bias\":true", &m, &err));
    assert_true(m.qkv_bias && m.out_bias && m.mlp_bias);
    DONE(hf_parse("ministral3",
                  "\"rope_parameters\":{\"type\":\"yarn\",\"rope_type\":\"yarn\",\"rope_theta\":1e6,\"factor\":16.0,"
                  "\"original_max_position_embeddings\":16384,\"max_position_embeddings\":262144,\"beta_fast\":32.0,"
                  "\"beta_slow\":1.0,\"mscale_all_dim\":1.0,\"mscale\":1.0,\"llama_4_scaling_beta\":0.1}",
                  &m, &err));
    assert_true(m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-5 && m.window == 0 && !m.tied);
    assert_true(m.rope_growth == 0.1 && m.rope_positions == 16384 && m.rope_attention == 1 && m.rope_theta == 1e6);
    assert_true(spw_model_rope_tables(&m) == 2 && spw_model_rope_table(&m, 1) == 0 &&
                spw_model_query_table(&m, 1) == 1);
    DONE(hf_parse(
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
    DONE(
        hf_parse("mimo_v2_flash",
                 "\"num_key_value_heads\":1,\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"],"
                 "\"attention_value_scale\":null",
                 &m, &err));
    assert_true(m.window == 0 && m.full_every == 0 && m.kv_heads == 1 && m.full_kv_heads == 0 && m.value_scale == 1);
    assert_true(spw_model_rope_tables(&m) == 1 && !spw_model_has_sinks(&m, 2));
    DONE(hf_parse("bamba", MAMBA ",\"attn_layer_indices\":[1],\"head_dim\":8,\"z_loss_coefficient\":0.0", &m, &err));
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_is_linear(&m, 1) && spw_model_is_linear(&m, 2));
    assert_true(m.linear_mamba && m.linear_bias && m.linear_value_dim == 8 && m.linear_key_dim == 256 && !m.tied);
    assert_true(m.rope_part == 0.5 && m.rope_theta == 1e4 && m.norm_eps == 1e-5 && m.kv_heads == 8 && !m.gate_packed);
    DONE(hf_parse("bamba",
                  MAMBA ",\"attention_bias\":true,\"mlp_bias\":true,\"rope_parameters\":{\"rope_type\":\"default\","
                        "\"rope_theta\":500,\"partial_rotary_factor\":1.0}",
                  &m, &err));
    assert_true(m.qkv_bias && m.out_bias && m.mlp_bias && m.rope_part == 0 && spw_model_is_linear(&m, 1));
    DONE(hf_parse("lfm2", "\"full_attn_idxs\":[1],\"block_ff_dim\":1000,\"tie_embedding\":true", &m, &err));
    assert_true(spw_model_is_linear(&m, 0) && !spw_model_is_linear(&m, 1) && spw_model_is_linear(&m, 2));
    assert_true(m.linear_conv && m.linear_taps == 3 && spw_model_linear_channels(&m) == 12 && m.tied && m.qk_norm);
    assert_true(m.mlp_width == 768 && m.rope_theta == 1e6 && m.norm_eps == 1e-5 && m.kv_heads == 8 && m.head_dim == 6);
    DONE(
        hf_parse("lfm2", "\"block_ffn_dim_multiplier\":1.5,\"block_multiple_of\":4,\"tie_embedding\":false", &m, &err));
    assert_true(m.mlp_width == 8 && !m.tied && m.linear_heads == 0 && !spw_model_is_linear(&m, 0)); /* 2 4, times 1.5 */
    DONE(hf_parse("lfm2", CONVS ",\"block_auto_adjust_ff_dim\":false,\"norm_eps\":0.25", &m, &err));
    assert_true(m.mlp_width == 7 && m.norm_eps == 0.25 && spw_model_is_linear(&m, 2));
    DONE(hf_parse("lfm2_moe", CONVS, &m, &err));
    assert_true(m.experts == 32 && m.choices == 4 && m.mlp_width == 1792 && m.dense_first == 2 && m.dense_width == 7);
    assert_true(m.sigmoid && m.sum_to_one && m.choice_scale == 1 && m.choice_least == 1e-6 && m.tied);
    DONE(hf_parse("falcon_h1", HALVES, &m, &err));
    assert_true(m.linear_beside && m.linear_mamba && m.linear_bias && m.linear_unnormed && !m.linear_norm_first);
    assert_true(!spw_model_is_linear(&m, 0) && spw_model_has_linear(&m, 0) && spw_model_attends(&m, 0));
    assert_true(m.linear_heads == 2 && m.linear_value_dim == 8 && m.linear_key_dim == 256 && m.linear_taps == 4);
    assert_true(m.embedding_scale == 1 && m.logit_divisor == 1 && m.scales.keys == 1 && m.scales.linear[4] == 1);
    assert_true(m.kv_heads == 2 && m.norm_eps == 1e-5 && m.rope_theta == 1e4 && !m.qkv_bias && !m.mlp_bias && !m.tied);
    DONE(hf_parse(
        "falcon_h1",
        "\"num_key_value_heads\":1,\"mamba_n_heads\":3,\"mamba_d_ssm\":null,\"mamba_expand\":2,\"mamba_rms_norm\":true,"
        "\"lm_head_multiplier\":0.25,\"key_multiplier\":0.5,\"mlp_multipliers\":[0.5,2],\"ssm_multipliers\":[1,2,3,4,5]"
        ","
        "\"time_step_limit\":[0.0,{\"__float__\":\"Infinity\"}]",
        &m, &err));
    assert_true(m.linear_value_dim == 8 && !m.linear_unnormed && m.linear_norm_first && m.logit_divisor == 4);
    assert_true(m.scales.gate == 0.5 && m.scales.mlp == 2 && m.scales.linear[2] == 3);
    assert_true(spw_model_score_scale(&m) == (float)(0.5 / sqrt((double)m.head_dim)));
    DONE(hf_parse("kimi_linear", KIMI, &m, &err));
    assert_true(m.linear_channels && m.linear_apart && m.linear_heads == 32 && m.linear_key_heads == 32);
    assert_true(m.linear_key_dim == 128 && m.linear_value_dim == 128 && m.linear_taps == 4 && m.rope_theta == 0);
    assert_true(spw_model_is_linear(&m, 0) && spw_model_is_linear(&m, 2)); /* full are 4, 8 and so on, from 0 */
    assert_true(m.kv_rank == 512 && m.q_rank == 0 && m.rope_dim == 64 && m.head_dim == 192 && m.value_dim == 128);
    assert_true(m.experts == 256 && m.choices == 8 && m.mlp_width == 1024 && m.shared_width == 1024 && m.groups == 0);
    assert_true(m.sigmoid && m.sum_to_one && m.choice_scale == 2.446 && m.dense_first == 1 && m.dense_width == 7);
    assert_true(m.norm_eps == 1e-5 && !m.tied && !m.qkv_bias && spw_model_rope_tables(&m) == 0);
    DONE(hf_parse("kimi_linear",
                  KIMI ",\"linear_attn_config\":{\"head_dim\":16,\"num_heads\":3,\"kda_layers\":[2,3],"
                       "\"full_attn_layers\":[1]},\"linear_head_dim\":8,\"head_dim\":72,\"model_max_length\":99,"
                       "\"num_expert_group\":4,\"topk_group\":2,\"moe_renormalize\":false,\"q_lora_rank\":5",
                  &m, &err));
    assert_true(m.linear_key_dim == 16 && m.linear_heads == 3 && m.positions == 99 && m.head_dim == 192);
    assert_true(!spw_model_is_linear(&m, 0) && spw_model_is_linear(&m, 1) && spw_model_is_linear(&m, 2));
    assert_true(m.groups == 4 && m.group_choices == 2 && !m.sum_to_one && m.q_rank == 5);
    DONE(hf_parse("kimi_linear", KIMI "," FOUR2, &m, &err));
    assert_true(m.linear_heads == 0 && !spw_model_is_linear(&m, 0) && !m.linear_channels);
    DONE(hf_parse("olmo_hybrid", "\"linear_key_head_dim\":8", &m, &err));
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
    DONE(hf_parse("olmo_hybrid", "\"linear_key_head_dim\":8,\"rope_parameters\":null,\"rope_theta\":null", &m, &err));
    assert_true(m.rope_theta == 0); /* as it is published */
    DONE(hf_parse("olmo_hybrid", "\"linear_key_head_dim\":8,\"rope_parameters\":null,\"rope_theta\":500.0", &m, &err));
    assert_true(m.rope_theta == 500);
    DONE(hf_parse("afmoe", "", &m, &err));
    assert_true(m.experts == 64 && m.choices == 6 && m.mlp_width == 1408 && m.shared_width == 2816 && m.sigmoid);
    assert_true(m.sum_to_one && m.choice_scale == 1 && m.dense_first == 1 && m.dense_width == 7 && m.groups == 0);
    assert_true(m.head_dim == 128 && m.kv_heads == m.heads && m.norms == SPW_NORMS_BOTH && m.qk_norm && !m.qkv_bias);
    assert_true(m.attention_gated && m.gate_apart && m.embedding_scale == 0 && spw_model_reads_experts(&m));
    assert_true(m.window == 1024 && m.full_every == 0 && spw_model_has_rope(&m, 2) && m.norm_eps == 1e-5 && !m.tied);
    DONE(hf_parse("afmoe", "\"global_attn_every_n_layers\":2,\"mup_enabled\":true,\"num_dense_layers\":0", &m, &err));
    assert_true(m.embedding_scale == sqrt((double)m.width) && m.dense_width == 0 && m.full_every == 2);
    assert_true(spw_model_window(&m, 0) == 1024 && spw_model_window(&m, 1) == 0 && spw_model_window(&m, 2) == 1024);
    assert_true(spw_model_has_rope(&m, 0) && !spw_model_has_rope(&m, 1) && spw_model_experts(&m, 0) == 64);
    DONE(hf_parse("afmoe", "\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]", &m, &err));
    assert_true(m.window == 0 && !spw_model_has_rope(&m, 0) && !spw_model_has_rope(&m, 2));
    DONE(hf_parse("mistral4", GROWS ",\"head_dim\":128,\"sliding_window\":null", &m, &err));
    assert_true(m.kv_rank == 256 && m.q_rank == 1024 && m.rope_dim == 64 && m.head_dim == 128 && m.value_dim == 128);
    assert_true(m.experts == 128 && m.choices == 4 && m.mlp_width == 2048 && m.shared_width == 2048 && m.groups == 0);
    assert_true(!m.sigmoid && m.sum_to_one && m.experts_packed && m.dense_first == 0 && m.choice_scale == 1);
    assert_true(m.rope_growth == 0.1 && m.rope_part == 0 && m.rope_paired && m.norm_eps == 1e-6 && !m.tied);
    assert_true(spw_model_rope_width(&m, 0) == 64 && spw_model_rope_width(&m, 1) == 128);
    assert_true(fabs((double)spw_model_score_scale(&m) - pow(0.1 * log(128) + 1, 2) / sqrt(128)) < 1e-7);
    DONE(hf_parse("gpt_neox", "", &m, &err));
    assert_true(m.layer_norm && m.parallel && m.parallel_norm && m.packed && m.woven && m.ungated && !m.tied);
    assert_true(m.curve == SPW_CURVE_GELU_ERF && m.rope_part == 0.25 && m.rope_theta == 10000 && m.norm_eps == 1e-5);
    assert_true(m.qkv_bias && m.out_bias && m.mlp_bias && m.kv_heads == m.heads);
    DONE(hf_parse("gpt_neox",
                  "\"rotary_pct\":1.0,\"rotary_emb_base\":500,\"use_parallel_residual\":false,\"attention_bias\":false,"
                  "\"hidden_act\":\"gelu_fast\",\"hidden_dropout\":0.1",
                  &m, &err));
    assert_true(!m.parallel && m.rope_part == 0 && m.rope_theta == 500 && m.curve == SPW_CURVE_GELU && m.dropout == 0);
    assert_true(!m.qkv_bias && !m.out_bias && m.mlp_bias);
    DONE(hf_parse("opt", "\"ffn_dim\":8,\"init_std\":0.006,\"dropout\":0.1,\"word_embed_proj_dim\":12", &m, &err));
    assert_true(m.layer_norm && m.learned_places && m.places_before == 2 && m.curve == SPW_CURVE_RELU && m.tied);
    assert_true(m.init_std == 0.006 && m.mlp_width == 8 && m.qkv_bias && m.mlp_bias && m.dropout == 0);
    assert_true(spw_model_rope_tables(&m) == 0 && !spw_model_has_rope(&m, 0));
    DONE(hf_parse("starcoder2", "", &m, &err));
    assert_true(m.layer_norm && m.kv_heads == 2 && m.ungated && m.curve == SPW_CURVE_GELU && m.tied && m.window == 0);
    assert_true(m.init_std == 0.018042 && m.qkv_bias && m.out_bias && m.mlp_bias && m.rope_part == 0);
    DONE(hf_parse("starcoder2", "\"sliding_window\":9,\"use_bias\":false,\"num_key_value_heads\":4", &m, &err));
    assert_true(m.window == 9 && !m.qkv_bias && !m.mlp_bias && m.kv_heads == 4);
    DONE(hf_parse("stablelm", "", &m, &err));
    assert_true(m.layer_norm && m.kv_heads == 32 && !m.ungated && m.rope_part == 0.25 && !m.qkv_bias && !m.parallel);
    DONE(hf_parse("stablelm", "\"use_qkv_bias\":true,\"use_parallel_residual\":true", &m, &err));
    assert_true(m.qkv_bias && !m.out_bias && !m.mlp_bias && m.parallel && !m.parallel_norm && !m.tied);
    DONE(hf_parse("qwen3_5_text", "", &m, &err));
    assert_true(m.linear_heads == 32 && m.linear_key_heads == 16 && m.linear_key_dim == 128 && m.linear_taps == 4);
    assert_true(m.linear_value_dim == 128 && !m.linear_woven && m.attention_gated && m.qk_norm && m.norms_from_one);
    assert_true(m.full_every == 4 && m.window == 0 && m.kv_heads == 4 && m.head_dim == 256 && m.rope_part == 0.25);
    assert_true(m.rope_theta == 10000 && m.norm_eps == 1e-6 && !m.tied && spw_model_is_linear(&m, 2));
    DONE(hf_parse("qwen3_5_text",
                  "\"full_attention_interval\":3,\"layer_types\":[\"linear_attention\",\"full_attention\","
                  "\"linear_attention\"],\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e7,"
                  "\"partial_rotary_factor\":0.5,\"mrope_section\":[11,11,10],\"mrope_interleaved\":true}",
                  &m, &err));
    assert_true(m.full_every == 2 && !spw_model_is_linear(&m, 1) && m.rope_theta == 1e7 && m.rope_part == 0.5);
    DONE(hf_parse("qwen3_5_text", "\"full_attention_interval\":9", &m, &err));
    assert_int_equal(m.full_every, 4);
    DONE(hf_parse("qwen3_5_moe_text", "\"mlp_only_layers\":[]", &m, &err));
    assert_true(m.experts == 256 && m.choices == 8 && m.mlp_width == 512 && m.shared_width == 512 && m.shared_gated);
    assert_true(m.sum_to_one && m.kv_heads == 2 && m.dense_width == 0 && !m.linear_woven);
    DONE(hf_parse("qwen3_next", "\"norm_topk_prob\":false,\"decoder_sparse_step\":2", &m, &err));
    assert_true(m.experts == 512 && m.choices == 10 && m.mlp_width == 512 && m.shared_width == 512 && m.linear_woven);
    assert_true(!m.sum_to_one && m.kv_heads == 2 && m.dense_width == 7 && spw_model_experts(&m, 1) == 512);
    DONE(hf_parse("gemma4_text", FOUR, &m, &err));
    assert_true(m.window == 512 && m.full_every == 3 && m.head_dim == 256 && m.full_head_dim == 512 && m.kv_heads == 4);
    assert_true(m.full_kv_heads == 4 && !m.values_of_keys && m.values_normed && m.layer_scaled && !m.norms_from_one);
    assert_true(m.rope == SPW_ROPE_PROPORTIONAL && m.rope_part == 0.25 && m.rope_theta == 1e6 && m.rope_factor == 1);
    assert_true(m.rope_local_theta == 10000 && spw_model_score_scale(&m) == 1 && m.tied && m.logit_cap == 0);
    assert_true(spw_model_head_dim(&m, 1) == 256 && spw_model_head_dim(&m, 2) == 512 && m.experts == 0);
    assert_true(spw_model_rope_width(&m, 0) == 512 && spw_model_rope_width(&m, 1) == 256);
    assert_true(m.inputs_dim == 0 && m.readers == 0);
    DONE(hf_parse("gemma4_text", FOUR2 ",\"num_kv_shared_layers\":1,\"use_double_wide_mlp\":true", &m, &err));
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
            DONE(hf_parse("gemma4_text", wrong[k][0], &m, &err));
            assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
            assert_non_null(strstr(err.message, wrong[k][1]));
            err = (spw_error){0};
        }
    }
    DONE(hf_parse("gemma4_text", FOUR, &m, &err));
    { /* of 256 pairs the first 64 are turned, by frequencies of all */
        float table[2 * 512];
        spw_rope_table(&m, 0, 2, table);
        assert_true(table[512] == cosf(1) && table[512 + 256] == sinf(1));
        assert_true(fabs((double)table[512 + 256 + 63] - sin(pow(1e6, -126.0 / 512))) < 1e-6);
        assert_true(table[512 + 64] == 1 && table[512 + 256 + 64] == 0 && table[512 + 511] == 0);
    }
    DONE(hf_parse("gemma4_text",
                  FOUR
                  ",\"attention_k_eq_v\":true,\"num_global_key_value_heads\":1,\"global_head_dim\":16,"
                  "\"enable_moe_block\":true,\"num_experts\":128,\"top_k_experts\":8,\"moe_intermediate_size\":704,"
                  "\"use_bidirectional_attention\":\"vision\",\"final_logit_softcapping\":30,"
                  "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"proportional\",\"factor\":2}}",
                  &m, &err));
    assert_true(m.values_of_keys && m.full_kv_heads == 1 && m.full_head_dim == 16 && m.logit_cap == 30);
    assert_true(m.experts == 128 && m.choices == 8 && m.mlp_width == 704 && m.dense_width == 7 && m.experts_beside);
    assert_true(m.rope_part == 1 && m.rope_factor == 2 && m.sum_to_one);
    DONE(hf_parse("gemma4_text",
                  FOUR
                  ",\"attention_k_eq_v\":true,\"per_layer_config\":{\"2\":{\"head_dim\":64,\"num_key_value_heads\":2}}",
                  &m, &err));
    assert_true(m.full_head_dim == 64 && m.full_kv_heads == 2 && m.kv_heads == 4);
    DONE(hf_parse("gemma4_text", FOUR ",\"per_layer_config\":{\"02\":{\"head_dim\":64}}", &m,
                  &err)); /* of more than ten */
    assert_true(m.full_head_dim == 64 && m.full_kv_heads == 4);
    DONE(hf_parse("ernie4_5_moe", "\"moe_layer_end_index\":2", &m, &err));
    assert_true(m.experts == 64 && m.choices == 6 && m.mlp_width == 1536 && m.shared_width == 3072);
    assert_true(m.softmax_biased && !m.sigmoid && m.sum_to_one && m.dense_first == 1 && m.dense_width == 7);
    assert_true(m.rope_paired && m.rope_theta == 5e5 && m.kv_heads == 4 && m.head_dim == 6 && m.norm_eps == 1e-5);
    DONE(hf_parse("hy_v3", "\"output_router_logits\":true,\"first_k_dense_replace\":1", &m, &err));
    assert_true(m.experts == 192 && m.choices == 8 && m.mlp_width == 1536 && m.shared_width == 1536 && m.sigmoid);
    assert_true(m.sum_to_one && m.choice_scale == 2.826 && m.dense_first == 1 && m.dense_width == 7 && m.qk_norm);
    assert_true(m.rope_theta == 11158840 && m.kv_heads == 8 && m.head_dim == 128 && m.norm_eps == 1e-5 && !m.tied);
    DONE(hf_parse("hunyuan_v1_dense", "\"rope_scaling\":{\"type\":\"dynamic\",\"alpha\":1000.0,\"factor\":1.0}", &m,
                  &err));
    assert_true(m.qk_norm && m.qk_norm_last && m.kv_heads == 2 && m.head_dim == 6 && m.norm_eps == 1e-5 && !m.tied);
    assert_true(m.rope == SPW_ROPE_PLAIN && m.rope_theta == 1e4 * pow(1000, 1.5));
    DONE(hf_parse("hunyuan_v1_moe", "\"moe_topk\":[2,2,2],\"num_experts\":4,\"output_router_logits\":true", &m, &err));
    assert_true(m.experts == 4 && m.choices == 2 && m.mlp_width == 7 && m.shared_width == 7 && m.sum_to_one);
    DONE(hf_parse("cohere", "", &m, &err));
    assert_true(m.layer_norm && m.norm_unbiased && m.parallel && m.rope_paired && m.tied && m.rope_theta == 5e5);
    assert_true(m.logit_divisor == 16 && m.kv_heads == 2 && m.head_dim == 6 && m.norm_eps == 1e-5 && m.window == 0);
    DONE(hf_parse("cohere2", "\"sliding_window_pattern\":2,\"head_dim\":6", &m, &err));
    assert_true(m.window == 4096 && m.full_every == 2 && m.rope_skip_every == 2 && m.rope_theta == 1e4);
    DONE(hf_parse("exaone4", "", &m, &err));
    assert_true(m.window == 4096 && m.full_every == 0 && m.rope_skip_every == 0 && m.kv_heads == 32 && !m.tied);
    assert_true(m.norms == SPW_NORMS_AFTER && m.qk_norm && !m.qk_norm_whole && m.norm_eps == 1e-5);
    DONE(hf_parse("exaone4", "\"sliding_window_pattern\":2", &m, &err));
    assert_true(m.full_every == 2 && m.rope_skip_every == 2);
    DONE(hf_parse("exaone4", "\"sliding_window\":null,\"sliding_window_pattern\":\"LLLG\"", &m, &err));
    assert_true(m.window == 0 && m.rope_skip_every == 0);
    DONE(hf_parse("exaone4", "\"sliding_window_pattern\":1", &m, &err)); /* none has a window, and so none has rope */
    assert_true(m.window == 0 && m.full_every == 0 && m.rope_skip_every == 1 && !spw_model_has_rope(&m, 0));
    DONE(hf_parse("glm4_moe_lite", "\"first_k_dense_replace\":1", &m, &err));
    assert_true(m.q_rank == 768 && m.head_dim == 256 && m.value_dim == 256 && m.dense_first == 1 && m.sigmoid);
    assert_true(m.experts == 64 && m.choices == 4 && m.groups == 0 && m.choice_scale == 1.8 && m.norm_eps == 1e-5);
    { /* sizes of latent attention that it does not have, or that are not computed: known when a model is built */
        static const char *const sizes[3][2] = {
            {"\"qk_rope_head_dim\":5", "5 of a head's 133 elements are turned"},
            {"\"v_head_dim\":193", "a head's values have 193 elements, its keys 192; not supported yet"},
            {"\"n_routed_experts\":520", "8 of 520 experts for each token"}};
        for (int k = 0; k < 3; k++) {
            spw_model *model = NULL;
            DONE(hf_parse("deepseek_v3", sizes[k][0], &m, &err));
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
            DONE(hf_parse("deepseek_v32", sizes[k], &m, &err));
            m.index_from = k == 3 ? 0 : m.index_from;
            assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
            assert_non_null(strstr(err.message, "model: an indexer of 64 heads of "));
            err = (spw_error){0};
        }
    }
    DONE(hf_parse("deepseek_v4",
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
            DONE(hf_parse("deepseek_v4", sizes[k][0], &m, &err));
            assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
            if (strstr(err.message, sizes[k][1]) == NULL)
                fail_msg("%s", err.message);
            err = (spw_error){0};
        }
    }
    { /* groups that do not divide, or hold too few */
        spw_model *model = NULL;
        DONE(hf_parse("glm4_moe", "\"num_key_value_heads\":2,\"n_group\":3", &m, &err));
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "128 experts in 3 groups, 1 of which a token may choose 8 experts from"));
        err = (spw_error){0};
    }
    { /* more experts than the tables hold, more choices than experts: known when a model is built */
        spw_model *model = NULL;
        DONE(hf_parse("qwen3_moe", "\"num_experts\":8,\"num_experts_per_tok\":9,\"num_key_value_heads\":1", &m, &err));
        assert_int_equal(spw_model_build(&model, &m, &err), SPW_ECONFIG);
        assert_non_null(strstr(err.message, "9 of 8 experts for each token"));
        err = (spw_error){0};
        DONE(hf_parse("mistral", "", &m, &err)); /* 21 for each of so many layers, and 8: 4 more than 32 bits count */
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
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_section),
    };
    return cmocka_run_group_tests_name("hf_defaults", tests, NULL, NULL);
}
