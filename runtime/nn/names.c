/*
 * How Hugging Face's files call what the blocks of Llama's relatives own, family by family: what most of them say, and where others differ.
 * Gates, experts and what only some families have are named where they are made (llama.c).
 */
#include "nn_internal.h"

/* All but an MLP's matrices and two norms, in the words of Llama's relatives; and with these. */
#define LIKE_LLAMA                                                                                                     \
    .base = "model.", .embedding = "embed_tokens", .norm = "input_layernorm", .qkv = "self_attn.qkv_proj",             \
    .q = "self_attn.q_proj", .k = "self_attn.k_proj", .v = "self_attn.v_proj", .out = "self_attn.o_proj",              \
    .q_norm = "self_attn.q_norm", .k_norm = "self_attn.k_norm", .head = "lm_head"
#define OF_LLAMA LIKE_LLAMA, .mlp_norm = "post_attention_layernorm", .last_norm = "norm"

const spw__names *
spw__nn_names(spw_family family)
{
    static const spw__names usual = {OF_LLAMA, .linear = "linear_attn", .up = "mlp.gate_up_proj",
                                     .down = "mlp.down_proj"};
    static const spw__names granite = {OF_LLAMA, .linear = "mamba", .up = "shared_mlp.input_linear",
                                       .down = "shared_mlp.output_linear"};
    static const spw__names bamba = {LIKE_LLAMA, .linear = "mamba", .mlp_norm = "pre_ff_layernorm",
                                     .last_norm = "final_layernorm", .down = "feed_forward.down_proj"};
    static const spw__names starcoder = {OF_LLAMA, .up = "mlp.c_fc", .down = "mlp.c_proj"};
    static const spw__names neox = {.base = "gpt_neox.",
                                    .embedding = "embed_in",
                                    .norm = "input_layernorm",
                                    .qkv = "attention.query_key_value",
                                    .out = "attention.dense",
                                    .mlp_norm = "post_attention_layernorm",
                                    .up = "mlp.dense_h_to_4h",
                                    .down = "mlp.dense_4h_to_h",
                                    .last_norm = "final_layer_norm",
                                    .head = "embed_out"};
    static const spw__names opt = {.base = "model.decoder.",
                                   .embedding = "embed_tokens",
                                   .norm = "self_attn_layer_norm",
                                   .q = "self_attn.q_proj",
                                   .k = "self_attn.k_proj",
                                   .v = "self_attn.v_proj",
                                   .out = "self_attn.out_proj",
                                   .mlp_norm = "final_layer_norm",
                                   .up = "fc1",
                                   .down = "fc2",
                                   .last_norm = "final_layer_norm",
                                   .head = "lm_head"};
    static const spw__names nemotron = {.base = "backbone.",
                                        .embedding = "embeddings",
                                        .norm = "norm",
                                        .q = "mixer.q_proj",
                                        .k = "mixer.k_proj",
                                        .v = "mixer.v_proj",
                                        .out = "mixer.o_proj",
                                        .linear = "mixer",
                                        .up = "mixer.up_proj",
                                        .down = "mixer.down_proj",
                                        .last_norm = "norm_f",
                                        .head = "lm_head"};
    static const spw__names lfm = {.base = "model.",
                                   .embedding = "embed_tokens",
                                   .norm = "operator_norm",
                                   .q = "self_attn.q_proj",
                                   .k = "self_attn.k_proj",
                                   .v = "self_attn.v_proj",
                                   .out = "self_attn.out_proj",
                                   .q_norm = "self_attn.q_layernorm",
                                   .k_norm = "self_attn.k_layernorm",
                                   .linear = "conv",
                                   .mlp_norm = "ffn_norm",
                                   .last_norm = "embedding_norm",
                                   .head = "lm_head"};
    static const spw__names olmo = {OF_LLAMA,
                                    .linear = "linear_attn",
                                    .linear_out = "o_proj",
                                    .linear_norm = "o_norm",
                                    .linear_halves = {"attention_layer_norm", "feedforward_layer_norm"},
                                    .down = "mlp.down_proj"};
    static const spw__names kimi = {OF_LLAMA, .linear = "self_attn", .linear_out = "o_proj", .linear_norm = "o_norm",
                                    .down = "mlp.down_proj"};
    switch (family) {
    case SPW_FAMILY_KIMI_LINEAR: return &kimi;
    case SPW_FAMILY_OLMO_HYBRID: return &olmo;
    case SPW_FAMILY_LFM2:
    case SPW_FAMILY_LFM2_MOE: return &lfm;
    case SPW_FAMILY_GRANITE_HYBRID: return &granite;
    case SPW_FAMILY_BAMBA:
    case SPW_FAMILY_FALCON_H1: return &bamba;
    case SPW_FAMILY_STARCODER2: return &starcoder;
    case SPW_FAMILY_NEOX: return &neox;
    case SPW_FAMILY_OPT: return &opt;
    case SPW_FAMILY_NEMOTRON_H: return &nemotron;
    default: return &usual;
    }
}

const char *
spw_family_head(spw_family family)
{
    return spw__nn_names(family)->head;
}
