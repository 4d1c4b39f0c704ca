/* What a family's config.json says, for tests of what is read from it. */
#ifndef LIB_HF_CONFIG_H
#define LIB_HF_CONFIG_H

#include "spw_files.h"

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

#define KIMI   "\"num_key_value_heads\":2"
#define HALVES "\"num_key_value_heads\":2,\"mamba_n_heads\":2,\"mamba_d_ssm\":16,\"mamba_d_head\":\"auto\""

/* Of a small config.json of that type; rest: its other members, or "". */
spw_status hf_parse(const char *type, const char *rest, spw_model_config *m, spw_error *err);

#endif
