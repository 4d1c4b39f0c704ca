#include "lib_foreign.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define GLM4_MOE                                                                                                       \
    "{\"model_type\":\"glm4_moe\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":1,"                 \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":4,\"vocab_size\":19,"                            \
    "\"partial_rotary_factor\":0.5,\"max_position_embeddings\":16,\"rms_norm_eps\":1e-5,"                              \
    "\"tie_word_embeddings\":false,\"n_routed_experts\":3,\"num_experts_per_tok\":2,"                                  \
    "\"moe_intermediate_size\":5,\"first_k_dense_replace\":0,\"n_group\":1,\"topk_group\":1,"                          \
    "\"n_shared_experts\":1,\"routed_scaling_factor\":1.5}"
#define GEMMA4                                                                                                         \
    "{\"model_type\":\"gemma4_text\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":2,"              \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":4,\"global_head_dim\":8,"                        \
    "\"num_global_key_value_heads\":2,\"attention_k_eq_v\":true,\"sliding_window\":5,\"vocab_size\":19,"               \
    "\"layer_types\":[\"sliding_attention\",\"full_attention\"],\"max_position_embeddings\":16,"                       \
    "\"rms_norm_eps\":1e-5,\"hidden_size_per_layer_input\":0,\"enable_moe_block\":true,\"num_experts\":3,"             \
    "\"top_k_experts\":2,\"moe_intermediate_size\":5}"
#define NEOX                                                                                                           \
    "{\"model_type\":\"gpt_neox\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":1,"                 \
    "\"num_attention_heads\":2,\"vocab_size\":19,\"max_position_embeddings\":16,\"rotary_pct\":0.5,"                   \
    "\"tie_word_embeddings\":false}"

#define MIXTRAL                                                                                                        \
    "{\"model_type\":\"mixtral\",\"hidden_size\":8,\"intermediate_size\":5,\"num_hidden_layers\":1,"                   \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":19,\"max_position_embeddings\":16,"            \
    "\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":false,\"num_local_experts\":2,\"num_experts_per_tok\":2,"           \
    "\"rope_theta\":1e6}"

const foreign_checkpoint foreign_checkpoints[] = {
    {.name = "deepspeed/stage1_bf16",
     .stage = 1,
     .ranks = 2,
     .precision = "\"bf16\":{\"enabled\":true},",
     .format = "mixed"},
    {.name = "deepspeed/stage2", .stage = 2, .ranks = 3, .groups = true},
    {.name = "deepspeed/stage2_elastic", .stage = 2, .ranks = 3, .groups = true, .moments_unknown = true},
    {.name = "deepspeed/stage2_fp16_frozen",
     .stage = 2,
     .ranks = 2,
     .skipped = 3,
     .frozen = true,
     .precision = "\"fp16\":{\"enabled\":true,\"initial_scale_power\":19,\"hysteresis\":1},",
     .format = "mixed-fp16"},
    /* with padding behind parameters, and experts in one tensor */
    {.name = "deepspeed/stage2_experts", .stage = 2, .ranks = 2, .experts = true, .tensors = 16},
    /* of transformers 5: a layer's experts in one tensor, and a buffer that is not trained; and another name of the head in memory */
    {.name = "deepspeed/stage2_buffers", .stage = 2, .ranks = 2, .model = GLM4_MOE, .tensors = 16},
    {.name = "deepspeed/stage3_neox", .stage = 3, .ranks = 2, .model = NEOX, .tensors = 16},
    {.name = "deepspeed/stage3", .stage = 3, .ranks = 3, .groups = true},
    {.name = "deepspeed/stage3_nvme", .stage = 3, .ranks = 3, .groups = true},
    {.name = "deepspeed/stage3_bf16_frozen",
     .stage = 3,
     .ranks = 3,
     .frozen = true,
     .precision = "\"bf16\":{\"enabled\":true},",
     .format = "split"},
    {.name = "deepspeed/stage1_bf16_fp32_sums",
     .stage = 1,
     .ranks = 2,
     .groups = true,
     .precision = "\"bf16\":{\"enabled\":true},",
     .format = "mixed"},
    {.name = "fsdp/checkpoint", .ranks = 3, .groups = true, .frozen = true, .fsdp = true},
    {.name = "fsdp/trainer", .ranks = 3, .groups = true, .frozen = true, .fsdp = true},
    {.name = "fsdp/full", .ranks = 1, .groups = true, .frozen = true, .fsdp = true, .batch = 3},
    {.name = "fsdp/full_hf", .ranks = 1, .groups = true, .frozen = true, .fsdp = true, .batch = 3},
    {.name = "llmc/one", .ranks = 1, .groups = true, .llmc = true},
    {.name = "llmc/parts", .stage = 1, .ranks = 2, .groups = true, .llmc = true},
    {.name = "llmc/copies", .ranks = 2, .groups = true, .llmc = true},
    /* beside a folder with a tensor for each expert's matrix */
    {.name = "full_experts", .ranks = 1, .model = MIXTRAL, .tensors = 16, .fsdp = true, .batch = 3},
    /* the same of layers of two sizes, tied, with what each is multiplied by */
    {.name = "deepspeed/stage2_gemma4", .stage = 2, .ranks = 2, .model = GEMMA4, .tensors = 45},
};

_Static_assert(sizeof foreign_checkpoints / sizeof foreign_checkpoints[0] == FOREIGN_COUNT, "one of each");

spw_error foreign_err;

void
foreign_need(spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", foreign_err.message);
}

void
foreign_configure(spw_config *c, const foreign_checkpoint *k, uint32_t ranks, const char *more, const char *spillway)
{
    static const char *const llama =
        "{\"model_type\":\"llama\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":19,\"max_position_embeddings\":16,"
        "\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":false}";
    static const char *const gpt_oss =
        "{\"model_type\":\"gpt_oss\",\"hidden_size\":24,\"intermediate_size\":13,\"num_hidden_layers\":1,\"head_dim\":"
        "6,"
        "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":41,\"max_position_embeddings\":64,"
        "\"num_local_experts\":3,\"attention_bias\":false,\"num_experts_per_tok\":3,\"layer_types\":[\"full_"
        "attention\"],\"rope_parameters\":{\"rope_theta\":500.0,\"rope_type\":\"default\"}}";
    static const char *const gpt2 =
        "{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":2,\"n_head\":2,\"vocab_size\":19,\"n_positions\":16}";
    static const char *const warmup = "{\"type\":\"WarmupLR\",\"params\":{\"warmup_min_lr\":0,\"warmup_max_lr\":0.01,"
                                      "\"warmup_num_steps\":6,\"warmup_type\":\"linear\"}}";
    const char *freeze = k->fsdp && k->model == NULL ? ",\"freeze\":[\"model.layers.0.mlp.up_proj.weight\"]"
                         : k->frozen
                             ? ",\"freeze\":[\"model.embed_tokens.weight\",\"model.layers.0.mlp.up_proj.weight\"]"
                             : "";
    char text[3000];
    snprintf(text, sizeof text,
             "{%s%s\"train_batch_size\":%u,\"gradient_clipping\":%s,"
             "\"optimizer\":{\"type\":\"AdamW\",\"params\":{\"lr\":0.01,\"betas\":[0.9,0.95],\"eps\":1e-8,\"weight_"
             "decay\":0.1}},"
             "\"scheduler\":%s,"
             "\"model\":%s,\"data\":{\"path\":\"a\",\"seq_length\":8},"
             "\"spillway\":{%s\"steps\":8,\"ranks\":%u,\"state_format\":\"%s\",\"decay_norm_and_bias\":%s%s}}",
             k->precision != NULL ? k->precision : "", more, k->batch > 0 ? k->batch : k->ranks, k->fsdp ? "0" : "1.0",
             k->fsdp || k->llmc ? "{}" : warmup,
             k->model     ? k->model
             : k->experts ? gpt_oss
             : k->llmc    ? gpt2
                          : llama,
             spillway, ranks, k->format != NULL ? k->format : "fp32", k->groups ? "false" : "true", freeze);
    foreign_need(spw_config_parse(c, text, "c.json", NULL, 0, &foreign_err));
}

const char *
foreign_folder(const foreign_checkpoint *k)
{
    static char found[SPW_PATH_BYTES];
    char path[200];
    snprintf(path, sizeof path, VECTORS "%s", k->name);
    assert_true(spw_foreign_find(path, found, sizeof found));
    assert_string_equal(strrchr(found, '/'), k->fsdp   ? strrchr(path, '/')
                                             : k->llmc ? "/model_00000004.bin"
                                                       : "/global_step4");
    return found;
}

void
foreign_copy(const foreign_checkpoint *k, const char *to)
{
    char command[700];
    snprintf(command, sizeof command, "rm -rf %s/* %s/.metadata && cp -r %s/. %s/", to, to, foreign_folder(k), to);
    assert_int_equal(system(command), 0);
}

static char lines[4000];

static void
note(void *ctx, const char *text)
{
    size_t n = strlen(lines);
    (void)ctx;
    snprintf(lines + n, sizeof lines - n, "%s\n", text);
}

void
foreign_compares(const char *folder, const spw_config *c, uint32_t count, const char *says)
{
    uint32_t found;
    lines[0] = '\0';
    foreign_need(spw_foreign_compare(folder, c, note, NULL, &found, &foreign_err));
    if (found != count || strstr(lines, says) == NULL)
        fail_msg("%s: %u differences, not %u, and \"%s\" should be among\n%s", folder, found, count, says, lines);
}

spw_status
foreign_begin(foreign_subject *s, const char *folder, spw_comm *comm, spw_error *e)
{
    spw_status st = spw_model_from_config(&s->model, &s->c, e);
    if (st == SPW_OK)
        st = spw_engine_create(
            &s->e,
            &(spw_engine_options){
                .config = &s->c, .model = s->model, .comm = comm, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
            e);
    return st == SPW_OK ? spw_foreign_load(s->e, folder, e) : st;
}

void
foreign_end(foreign_subject *s)
{
    spw_engine_destroy(s->e);
    spw_model_destroy(s->model);
    *s = (foreign_subject){.e = NULL};
}
