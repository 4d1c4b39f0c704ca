/* See lib_tiny.h. */
#include "lib_tiny.h"
#include "runtime_internal.h"
#include "spw_data.h"
#include "spw_files.h"
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

void
tiny_config(spw_config *c, spw_state_format format)
{
    memset(c, 0, sizeof *c);
    c->micro_batch = 2;
    c->accumulation = 2;
    c->train_batch_size = 4;
    c->data.seq_length = 24;
    c->gradient_clipping = 1.0;
    c->bf16 = format != SPW_STATE_FP32;
    c->optimizer.lr = 1e-2;
    c->optimizer.beta1 = 0.9;
    c->optimizer.beta2 = 0.95;
    c->optimizer.eps = 1e-8;
    c->optimizer.weight_decay = 0.1;
    c->optimizer.adam_w_mode = c->optimizer.bias_correction = true;
    c->zero.stage = 3;
    c->zero.offload_param = c->zero.offload_optimizer = SPW_TIER_HOST;
    c->zero.optimizer_ratio = 1;
    snprintf(c->run.fill_device, sizeof c->run.fill_device, "never");
    c->zero.prefetch_bucket_size = c->zero.max_live_parameters = UINT64_MAX;
    c->aio.overlap_events = true;
    c->run.router_balance = 0.1; /* of models with experts */
    c->run.seed = 7;
    snprintf(c->run.device, sizeof c->run.device, "cpu");
    c->run.device_memory = c->run.host_memory = SPW_AUTO;
    c->run.state_format = format;
    c->run.activations = SPW_TIER_COUNT;
    c->run.chunk_elems = 8192;
    c->run.optimizer_threads = 2;
    c->run.pin_threads = true;
    c->run.integrity = c->run.prefetch = c->run.frozen_in_place = true;
    c->run.grad_dtype = SPW_F32;
    c->run.eval_batches = 2;
}

const char *
tiny_family_name(spw_family family)
{
    return family == TINY_GEMMA4_SMALL ? "gemma4_text with embeddings of each layer"
           : family == TINY_FEW_KEYS   ? "glm_moe_dsa that chooses keys"
                                       : spw_family_name(family);
}

static int
by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

const char *const *
tiny_family_vectors(uint32_t *count)
{
    enum { MOST = 200 };
    static char names[MOST][48];
    static const char *sorted[MOST];
    const struct dirent *entry;
    DIR *dir = opendir("tests/vectors/families");
    assert_non_null(dir);
    for (*count = 0; (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        assert_true(*count < MOST && strlen(entry->d_name) < sizeof names[0]);
        snprintf(names[*count], sizeof names[0], "%.47s", entry->d_name);
        sorted[*count] = names[*count];
        ++*count;
    }
    closedir(dir);
    qsort(sorted, *count, sizeof *sorted, by_name);
    return sorted;
}

static bool
all_read(const spw_model_config *m)
{
    for (uint64_t l = m->layers - m->readers; l < m->layers; l++) {
        if (spw_model_keys_of(m, l) == l)
            return false;
    }
    return true;
}

void
tiny_model_fit(spw_model_config *m)
{
    m->inputs_vocab = m->inputs_dim > 0 ? m->vocab + (m->vocab % 2 > 0 ? 0 : 3) : 0; /* more rows: it stays whole */
    while (m->readers > 0 && (m->readers >= m->layers || !all_read(m)))
        m->readers--;
}

static void
make_small(spw_model_config *m)
{
    m->experts = m->choices = m->dense_width = 0;
    m->experts_beside = m->sum_to_one = m->values_of_keys = false;
    m->full_kv_heads = m->kv_heads; /* as its files say it where values are not made of keys */
    m->layers = 6;
    m->inputs_dim = 24;
    m->readers = 3;
    m->readers_double = true;
    tiny_model_fit(m);
}

void
tiny_muon(spw_config *c)
{
    snprintf(c->optimizer.type, sizeof c->optimizer.type, "Muon");
    c->optimizer.muon_lr = 2e-3;
    c->optimizer.adam_lr = c->optimizer.lr;
    c->optimizer.momentum = 0.95;
    c->optimizer.nesterov = true;
    c->optimizer.ns_steps = 5;
}

/* By the reader of config.json, behind what all of them have. */
static bool
read_small(spw_model_config *m, spw_family family)
{
    static const struct {
        spw_family family;
        const char *keys;
    } small[] = {
        {SPW_FAMILY_ERNIE_MOE,
         "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"moe_num_experts\":6,\"moe_k\":2,"
         "\"moe_layer_start_index\":1,\"moe_num_shared_experts\":1"},
        {SPW_FAMILY_HY_V3, "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"num_experts\":6,\"head_dim\":8,"
                           "\"num_experts_per_tok\":2,\"num_shared_experts\":1,\"first_k_dense_replace\":1"},
        {SPW_FAMILY_HUNYUAN, "\"intermediate_size\":128"},
        {SPW_FAMILY_MINISTRAL3,
         "\"intermediate_size\":128,\"head_dim\":8,\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":16,"
         "\"original_max_position_embeddings\":3,\"rope_theta\":1e4,\"llama_4_scaling_beta\":0.4}"},
        {SPW_FAMILY_HUNYUAN_MOE, "\"intermediate_size\":24,\"num_experts\":6,\"moe_topk\":2,\"num_shared_expert\":1"},
        {SPW_FAMILY_COHERE2, "\"intermediate_size\":128,\"sliding_window\":5,\"sliding_window_pattern\":2"},
        {SPW_FAMILY_LLAMA4,
         "\"intermediate_size\":24,\"intermediate_size_mlp\":72,\"num_local_experts\":6,\"head_dim\":8,"
         "\"num_experts_per_tok\":2,\"interleave_moe_layer_step\":2,\"no_rope_layer_interval\":3,"
         "\"attention_chunk_size\":5,\"floor_scale\":4,\"attn_scale\":0.3"},
        {SPW_FAMILY_GLM_DSA, "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"n_routed_experts\":6,"
                             "\"num_experts_per_tok\":2,\"kv_lora_rank\":12,\"q_lora_rank\":14,\"qk_nope_head_dim\":6,"
                             "\"qk_rope_head_dim\":4,\"v_head_dim\":7,\"first_k_dense_replace\":1,\"index_n_heads\":3,"
                             "\"index_head_dim\":8,\"indexer_types\":[\"full\",\"shared\",\"full\"],\"index_topk\":36"},
        {SPW_FAMILY_DEEPSEEK_V4,
         "\"moe_intermediate_size\":24,\"n_routed_experts\":6,\"num_experts_per_tok\":2,\"head_dim\":8,"
         "\"qk_rope_head_dim\":4,\"q_lora_rank\":14,\"o_groups\":2,\"o_lora_rank\":12,\"index_n_heads\":2,"
         "\"index_head_dim\":8,\"index_topk\":3,\"sliding_window\":5,\"hc_sinkhorn_iters\":3,\"num_hash_layers\":1,"
         "\"compress_rate_csa\":4,\"compress_rate_hca\":8,\"layer_types\":[\"compressed_sparse_attention\","
         "\"heavily_compressed_attention\",\"sliding_attention\"]"},
        {SPW_FAMILY_MISTRAL4,
         "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"n_routed_experts\":6,\"num_experts_per_tok\":2,"
         "\"kv_lora_rank\":12,\"q_lora_rank\":14,\"qk_nope_head_dim\":6,\"qk_rope_head_dim\":4,\"v_head_dim\":7,"
         "\"first_k_dense_replace\":1,\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":16,\"rope_theta\":1e4,"
         "\"original_max_position_embeddings\":3,\"llama_4_scaling_beta\":0.4}"},
        {SPW_FAMILY_MIMO_V2,
         "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"n_routed_experts\":6,\"num_experts_per_tok\":2,"
         "\"head_dim\":12,\"v_head_dim\":7,\"sliding_window\":5,"
         "\"layer_types\":[\"full_attention\",\"sliding_attention\",\"full_attention\"]"},
        {SPW_FAMILY_LFM2_MOE,
         "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"num_experts\":6,\"num_experts_per_tok\":2,"
         "\"num_dense_layers\":1,\"layer_types\":[\"conv\",\"full_attention\",\"conv\"]"},
        {SPW_FAMILY_AFMOE,
         "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"num_experts\":6,\"num_experts_per_tok\":2,\"head_"
         "dim\":8,"
         "\"num_shared_experts\":2,\"num_dense_layers\":1,\"sliding_window\":5,\"global_attn_every_n_layers\":2,"
         "\"route_scale\":1.5,\"mup_enabled\":true"},
        {SPW_FAMILY_FALCON_H1,
         "\"intermediate_size\":72,\"mamba_n_heads\":4,\"mamba_d_head\":8,\"mamba_d_ssm\":32,\"mamba_d_state\":8,"
         "\"mamba_n_groups\":2,"
         "\"mamba_rms_norm\":true,\"key_multiplier\":0.6,\"attention_in_multiplier\":1.3,\"attention_out_multiplier\":"
         "0.9,"
         "\"ssm_in_multiplier\":1.25,\"ssm_out_multiplier\":0.7,\"embedding_multiplier\":2,\"lm_head_multiplier\":0.5,"
         "\"mlp_multipliers\":[0.9,0.7],\"ssm_multipliers\":[0.7,0.8,0.9,0.6,0.5]"},
        {SPW_FAMILY_OLMO_HYBRID,
         "\"intermediate_size\":72,\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,\"linear_key_head_dim\":8,"
         "\"linear_value_head_dim\":16,\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_attention\"],"
         "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":null}"},
        {SPW_FAMILY_KIMI_LINEAR,
         "\"intermediate_size\":72,\"moe_intermediate_size\":24,\"num_experts\":6,\"num_experts_per_token\":2,"
         "\"num_expert_group\":3,\"topk_group\":2,\"kv_lora_rank\":12,\"qk_nope_head_dim\":6,\"qk_rope_head_dim\":4,"
         "\"v_head_dim\":8,\"linear_attn_config\":{\"full_attn_layers\":[2],\"kda_layers\":[1,3],\"head_dim\":8,"
         "\"num_heads\":3,\"short_conv_kernel_size\":4}"},
        {SPW_FAMILY_GRANITE_HYBRID,
         "\"intermediate_size\":24,\"shared_intermediate_size\":40,\"num_local_experts\":6,\"num_experts_per_tok\":2,"
         "\"residual_multiplier\":0.5,\"mamba_n_heads\":4,\"mamba_d_head\":16,\"mamba_d_state\":8,"
         "\"layers_block_type\":[\"mamba\",\"attention\",\"mamba\"]"},
        {SPW_FAMILY_NEMOTRON_H,
         "\"intermediate_size\":72,\"head_dim\":8,\"n_routed_experts\":6,\"num_experts_per_tok\":2,\"n_group\":3,"
         "\"topk_group\":2,\"routed_scaling_factor\":1.5,\"moe_intermediate_size\":24,"
         "\"moe_shared_expert_intermediate_size\":40,\"mamba_num_heads\":4,\"mamba_head_dim\":16,\"n_groups\":2,"
         "\"ssm_state_size\":8,\"hybrid_override_pattern\":\"ME*-E\""}};
    const bool apart = family == SPW_FAMILY_NEMOTRON_H; /* whose files tie nothing */
    const bool untied = apart || family == SPW_FAMILY_KIMI_LINEAR;
    const bool latent =
        family == SPW_FAMILY_GLM_DSA || family == SPW_FAMILY_MISTRAL4 || family == SPW_FAMILY_KIMI_LINEAR;
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++) {
        char text[1000];
        spw_error err = {0};
        if (small[i].family != family)
            continue;
        snprintf(text, sizeof text,
                 "{\"model_type\":\"%s\",\"vocab_size\":61,\"hidden_size\":32,\"num_hidden_layers\":%d,"
                 "\"num_attention_heads\":4,\"num_key_value_heads\":%d,\"max_position_embeddings\":40,"
                 "\"initializer_range\":0.05,\"tie_word_embeddings\":%s,%s}",
                 spw_family_name(family), apart ? 5 : 3,
                 latent                             ? 4
                 : family == SPW_FAMILY_DEEPSEEK_V4 ? 1
                                                    : 2,
                 untied ? "false" : "true", small[i].keys);
        DONE(spw_hf_config_parse(m, text, "tiny", false, &err));
        return true;
    }
    return false;
}

void
tiny_model_config(spw_model_config *m, spw_family family)
{
    if (read_small(m, family))
        return;
    if (family == TINY_GEMMA4_SMALL) {
        tiny_model_config(m, SPW_FAMILY_GEMMA4);
        make_small(m);
        return;
    }
    if (family == TINY_EVEN_CHANNELS) {
        tiny_model_config(m, SPW_FAMILY_KIMI_LINEAR);
        m->linear_heads = m->linear_key_heads = 4;
        return;
    }
    if (family == TINY_FEW_KEYS) {
        tiny_model_config(m, SPW_FAMILY_GLM_DSA);
        m->index_keys = 7;
        return;
    }
    bool moe = family == SPW_FAMILY_MIXTRAL || family == SPW_FAMILY_QWEN3_MOE || family == SPW_FAMILY_QWEN2_MOE ||
               family == SPW_FAMILY_GPT_OSS || family == SPW_FAMILY_GLM4_MOE || family == SPW_FAMILY_DEEPSEEK_V2 ||
               family == SPW_FAMILY_DEEPSEEK_V3 || family == SPW_FAMILY_MINIMAX_M2 || family == SPW_FAMILY_QWEN3_NEXT ||
               family == SPW_FAMILY_GEMMA4;
    bool next = family == SPW_FAMILY_QWEN3_NEXT, linear = next || family == SPW_FAMILY_QWEN3_5;
    bool minimax = family == SPW_FAMILY_MINIMAX_M2, olmo = family == SPW_FAMILY_OLMO2 || family == SPW_FAMILY_OLMO3;
    bool v2 = family == SPW_FAMILY_DEEPSEEK_V2, latent = v2 || family == SPW_FAMILY_DEEPSEEK_V3;
    bool gpt_oss = family == SPW_FAMILY_GPT_OSS, glm = family == SPW_FAMILY_GLM4_MOE || latent;
    bool four = family == SPW_FAMILY_GEMMA4, gemma = family == SPW_FAMILY_GEMMA3 || family == SPW_FAMILY_GEMMA2 || four;
    bool neox = family == SPW_FAMILY_NEOX, opt = family == SPW_FAMILY_OPT, stablelm = family == SPW_FAMILY_STABLELM;
    bool ungated = neox || opt || family == SPW_FAMILY_STARCODER2;
    *m = (spw_model_config){
        .family = family,
        .vocab = 61,
        .width = 32,
        .layers = 3,
        .heads = 4,
        .kv_heads =
            family == SPW_FAMILY_LLAMA || family == SPW_FAMILY_PHI3 || linear || (moe && !latent && !four) ? 2 : 4,
        .head_dim = latent ? 10 : 8,
        .kv_rank = latent ? 12 : 0,
        .q_rank = latent && !v2 ? 14 : 0,
        .rope_dim = latent ? 4 : 0,
        .value_dim = latent ? 7 : 0,
        .full_head_dim = four ? 12 : 0,
        .full_kv_heads = four ? 2 : 0,
        .values_normed = four,
        .values_of_keys = four,
        .layer_scaled = four,
        .rope_paired = latent,
        .mlp_width = family == SPW_FAMILY_LLAMA ? 88
                     : moe                      ? 24
                                                : 128,
        .experts = moe ? 6 : 0,
        .choices = moe ? 2 : 0,
        .sum_to_one = family == SPW_FAMILY_MIXTRAL || gpt_oss || minimax || next || four || (glm && !v2),
        .experts_paired = gpt_oss,
        .sinks = gpt_oss,
        .qkv_bias = gpt_oss || ungated || stablelm,
        .out_bias = gpt_oss || ungated,
        .mlp_bias = ungated,
        .shared_width = family == SPW_FAMILY_QWEN2_MOE || next ? 40
                        : glm                                  ? 48
                                                               : 0,
        .shared_gated = family == SPW_FAMILY_QWEN2_MOE || next,
        .sigmoid = minimax || (glm && !v2),
        .groups = glm ? 3 : 0,
        .group_choices = glm ? 2 : 0,
        .choice_scale = glm ? 1.5 : 0,
        .dense_first = glm ? 1 : 0,
        .dense_width = glm || four ? 72 : 0,
        .experts_beside = four,
        .packed = family == SPW_FAMILY_PHI3 || neox,
        .woven = neox,
        .gate_packed = family == SPW_FAMILY_PHI3,
        .qk_norm = family == SPW_FAMILY_QWEN3_MOE || olmo || minimax || linear || four || family == SPW_FAMILY_GEMMA3,
        .qk_norm_whole = olmo || minimax,
        .norms = olmo    ? SPW_NORMS_AFTER
                 : gemma ? SPW_NORMS_BOTH
                         : SPW_NORMS_BEFORE,
        .norms_from_one = (gemma && !four) || linear,
        .linear_heads = linear ? 4 : 0,
        .linear_key_heads = linear ? 2 : 0,
        .linear_key_dim = linear ? 8 : 0,
        .linear_value_dim = linear ? 16 : 0,
        .linear_taps = linear ? 4 : 0,
        .linear_woven = next,
        .attention_gated = linear,
        .layer_norm = ungated || stablelm,
        .parallel = neox || stablelm,
        .parallel_norm = neox,
        .ungated = ungated,
        .curve = neox  ? SPW_CURVE_GELU_ERF
                 : opt ? SPW_CURVE_RELU
                       : SPW_CURVE_GELU,
        .learned_places = opt,
        .places_before = opt ? 2 : 0,
        .gate = gpt_oss ? SPW_GATE_CLAMPED
                : gemma ? SPW_GATE_GELU
                        : SPW_GATE_SILU,
        .embedding_scaled = gemma,
        .query_scalar = gemma && !four ? 6 : 0,
        .score_scale = four ? 1 : 0,
        .score_cap = family == SPW_FAMILY_GEMMA2 ? 0.1 : 0,
        .logit_cap = family == SPW_FAMILY_GEMMA2 || four ? 0.2 : 0,
        .window = gemma || gpt_oss || family == SPW_FAMILY_OLMO3 ? 5 : 0,
        .full_every = next                                                       ? 3
                      : linear || gemma || gpt_oss || family == SPW_FAMILY_OLMO3 ? 2
                                                                                 : 0,
        .rope = four ? SPW_ROPE_PROPORTIONAL : SPW_ROPE_PLAIN,
        .rope_factor = four,
        .rope_local_theta = four || family == SPW_FAMILY_GEMMA3 || family == SPW_FAMILY_OLMO3 ? 100 : 0,
        .rope_part =
            family == SPW_FAMILY_PHI3 || minimax || (glm && !latent) || neox || stablelm || linear || four ? 0.5 : 0,
        .positions = 40,
        .norm_eps = 1e-5f,
        .rope_theta = opt ? 0 : 10000.0f,
        .init_std = four ? 0.1f : 0.05f, /* its norms of what is added make much of little */
        .tied = true};
}

void
tiny_batch(uint64_t step, uint64_t vocab, uint64_t n, int32_t *tokens, int32_t *targets)
{
    for (uint64_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)((i * i + 3 * i + step % 2 * 17) % vocab);
        targets[i] = (int32_t)(((i + 1) * (i + 1) + 3 * (i + 1) + step % 2 * 17) % vocab);
    }
}

void
tiny_pairs(uint64_t n, uint64_t T, int32_t *tokens, int32_t *targets, double *reference)
{
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t t = i % T, k = t % 8;
        const bool pair = t - k + 8 <= T, first = k % 4 == 0;
        if (k % 4 == 3 || !pair || (first && i % 3 == 0))
            targets[i] = -1;
        tokens[i] |= first ? SPW_TOKEN_BEGINS : 0;
        reference[i] = first && pair ? 8 + (double)(i * 5 % 17) : 0;
    }
}

void
tiny_prefer(spw_config *c, uint32_t rule)
{
    const spw_preference_kind kind = (spw_preference_kind)(rule % SPW_PREFERENCE_COUNT);
    snprintf(c->run.preference.loss, sizeof c->run.preference.loss, "%s", spw_preference_name(kind));
    c->run.preference.beta = 0.3;
    c->run.preference.label_smoothing = kind == SPW_PREFERENCE_DPO ? 0.1 : 0;
    c->run.preference.likelihood = rule % 2 == 0 ? 0.5 : 0;
    snprintf(c->data.documents, sizeof c->data.documents, "whole");
}

void
tiny_dir_make(char path[256])
{
    const char *base = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp";
    snprintf(path, 256, "%s/spw-test-XXXXXX", base);
    assert_non_null(mkdtemp(path));
}

void
tiny_dir_remove(const char *path)
{
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

uint32_t
tiny_dir_entries(const char *path)
{
    uint32_t n = 0;
    DIR *dir = opendir(path);
    struct dirent *entry;
    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL)
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

void
tiny_settle(spw_store *store)
{
    spw_store_stats stats;
    uint64_t give_up_ns = spw_now_ns() + 300000000000ull;
    while (spw_store_get_stats(store, &stats), stats.nvme_moving > 0) {
        assert_true(spw_now_ns() < give_up_ns);
        spw_sleep_ns(1000000);
    }
}

typedef struct digest_ctx {
    spw_engine *e;
    spw_state_format format;
    uint64_t *sums; /* per chunk */
} digest_ctx;

/*
 * Zeros where n elements of a unit from `first` on hold no parameter. An 8-bit second moment is never 0 in a group with
 * others that are not, padding's neither; who sets the state parameter by parameter leaves it as it was.
 */
static void
clear_padding(const spw_layout *l, uint32_t unit_idx, uint64_t first, uint64_t n, float *part)
{
    uint64_t at = first;
    while (at < first + n) {
        uint64_t next = first + n; /* where the next parameter begins */
        uint64_t end = at;         /* of the parameter that holds this element */
        for (uint32_t k = l->param_first[unit_idx]; k < l->param_first[unit_idx + 1]; k++) {
            const spw_place p = spw__layout_in_unit(l, l->param_ids[k], unit_idx);
            if (p.first <= at && at < p.first + p.elems)
                end = p.first + p.elems;
            else if (p.first > at && p.first < next)
                next = p.first;
        }
        if (end == at) {
            memset(part + (at - first), 0, (next - at) * sizeof *part);
            end = next;
        }
        at = end;
    }
}

/* The state as fp32 parts, so that the digest does not depend on the chunk size: a sum per 4096 elements. */
static spw_status
digest_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    digest_ctx *d = ctx;
    const spw_layout *l = spw_engine_layout(d->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    uint64_t unit_first = 0;
    (void)grad;
    (void)err;
    for (uint32_t u = 0; u < c->unit_idx; u++)
        unit_first += l->units[u].elems;
    for (uint64_t at = 0; at < c->elems; at += 4096) {
        float part[4096];
        uint64_t sum = 0;
        for (int p = 0; p <= (record == NULL ? 0 : (int)spw__engine_optimizer(d->e, c->unit_idx)->moment_count); p++) {
            spw_state_get(d->format, spw__engine_optimizer(d->e, c->unit_idx), weights, record, c->elems,
                          (spw_state_part)p, at, 4096, part);
            clear_padding(l, c->unit_idx, c->first + at, 4096, part);
            sum = sum * 31 + spw_checksum(part, sizeof part);
        }
        sum = sum * 31 + spw_checksum((char *)weights + at * spw_state_weight_bytes(d->format),
                                      4096 * spw_state_weight_bytes(d->format));
        d->sums[(unit_first + c->first + at) / 4096] = sum;
    }
    return SPW_OK;
}

static void
show(const spw_error *err)
{
    if (err->status != SPW_OK)
        print_error("%s: %s\n", spw_status_name(err->status), err->message);
}

uint64_t
tiny_digest(spw_engine *e)
{
    const spw_layout *l = spw_engine_layout(e);
    digest_ctx d = {e, SPW_STATE_FP32, spw_mem_calloc(l->elems / 4096, sizeof(uint64_t))};
    spw_error err = {0};
    uint64_t sum;
    d.format = spw__engine_format(e);
    assert_non_null(d.sums);
    spw_store_sweep(spw_engine_store(e), SPW_SWEEP_VISIT, digest_chunk, &d, &err);
    show(&err);
    assert_int_equal(err.status, SPW_OK);
    sum = spw_checksum(d.sums, l->elems / 4096 * sizeof(uint64_t));
    spw_mem_free(d.sums);
    return sum;
}

static spw_plan
plan_only(const spw_config *c, spw_family family)
{
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_error err = {0};
    spw_plan plan;
    tiny_model_config(&mc, family);
    assert_int_equal(spw_model_build(&model, &mc, &err), SPW_OK);
    (void)spw_engine_create(
        &e,
        &(spw_engine_options){
            .config = c, .model = model, .plan_only = true, .process_bytes = TINY_PROCESS_BYTES, .plan_out = &plan},
        &err);
    show(&err);
    assert_non_null(e);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return plan;
}

/* From the one with which everything is in host memory, and no slots, downwards, as long as there is something beside slots. */
uint64_t
tiny_half_budget(const spw_config *c, spw_family family)
{
    spw_plan all = plan_only(c, family), p;
    uint64_t nvme = all.weight_nvme + all.record_nvme, half = 0;
    uint64_t whole = all.host_bytes - all.slots_host + nvme + all.grad_nvme;
    spw_config budgeted = *c;
    for (uint64_t left = nvme / 32; left < nvme; left += nvme / 32) {
        budgeted.run.host_memory = whole - left;
        p = plan_only(&budgeted, family);
        if (p.weight_host + p.record_host == 0)
            break;
        if (p.weight_nvme + p.record_nvme > 0)
            half = whole - left;
        if (p.weight_nvme + p.record_nvme >= nvme / 2)
            break;
    }
    assert_true(half > 0);
    return half;
}

void
tiny_mix_activations(spw_config *c, spw_family family)
{
    spw_plan p = plan_only(c, family);
    const uint32_t *n = p.activation_count;
    c->run.activations = SPW_TIER_COUNT;
    c->run.device_memory = p.device_bytes;
    while (p = plan_only(c, family), n[SPW_TIER_DEVICE] == 0 || n[SPW_TIER_HOST] < 3)
        c->run.device_memory -= 16384;
    c->run.host_memory = p.host_bytes - 4096; /* not all of them, and one or more become staging */
    p = plan_only(c, family);
    for (int t = 0; t < SPW_TIER_COUNT; t++)
        assert_true(n[t] > 0);
}

void
tiny_keep_half(spw_config *c, spw_family family)
{
    spw_plan p = plan_only(c, family);
    uint32_t all = p.tape_count;
    c->run.device_memory = p.device_bytes - p.tapes_device / 2;
    p = plan_only(c, family);
    assert_true(p.tape_count > 0 && p.tape_count < all);
}

uint64_t
tiny_train(const spw_config *c, spw_family family, uint32_t steps, double *losses)
{
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_error err = {0};
    uint64_t n = c->accumulation * c->micro_batch * c->data.seq_length, sum;
    int32_t *tokens = malloc(n * 4), *targets = malloc(n * 4);
    assert_non_null(tokens);
    assert_non_null(targets);
    tiny_model_config(&mc, family);
    assert_int_equal(spw_model_build(&model, &mc, &err), SPW_OK);
    (void)spw_engine_create(&e, &(spw_engine_options){.config = c, .model = model, .process_bytes = TINY_PROCESS_BYTES},
                            &err);
    show(&err);
    assert_non_null(e);
    (void)spw_engine_init_params(e, c->run.seed, &err);
    for (uint32_t s = 0; s < steps && err.status == SPW_OK; s++) {
        spw_step_result r;
        tiny_batch(s, mc.vocab, n, tokens, targets);
        (void)spw_engine_step(e, tokens, targets, (uint32_t)c->accumulation, c->optimizer.lr, &r, &err);
        losses[s] = r.loss;
    }
    show(&err);
    assert_int_equal(err.status, SPW_OK);
    sum = tiny_digest(e);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    free(tokens);
    free(targets);
    return sum;
}

bool
tiny_emulated_file(char path[TINY_PATH_BYTES], const char *name)
{
    char exe[1024];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    char *slash;
    exe[n > 0 ? n : 0] = '\0';
    slash = strrchr(exe, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    snprintf(path, TINY_PATH_BYTES, "%s/../%s/%s", exe, getenv("SPW_EMULATE_RACES") != NULL ? "races" : "emulated",
             name);
    return access(path, R_OK) == 0;
}

bool
tiny_emulated_device(void)
{
    char path[TINY_PATH_BYTES];
    return tiny_emulated_file(path, "spillway-cuda.so") && setenv("SPW_CUDA_PLUGIN", path, 1) == 0;
}

bool
tiny_emulated_links(const char *devices)
{
    char path[TINY_PATH_BYTES];
    return tiny_emulated_device() && tiny_emulated_file(path, "libnccl.so.2") && setenv("SPW_NCCL", path, 1) == 0 &&
           setenv("SPW_EMULATE_DEVICES", devices, 1) == 0;
}

static void *
emulated_symbol(const char *name)
{
    void *plugin = dlopen(getenv("SPW_CUDA_PLUGIN"), RTLD_NOW | RTLD_NOLOAD);
    void *symbol = plugin != NULL ? dlsym(plugin, name) : NULL;
    assert_non_null(symbol);
    (void)dlclose(plugin); /* the device holds it open */
    return symbol;
}

spw_emulate_counts
tiny_emulated_counts(void)
{
    spw_emulate_counts counts;
    ((spw_emulate_count_fn)(uintptr_t)emulated_symbol(SPW_EMULATE_COUNT_SYMBOL))(&counts);
    return counts;
}

bool
tiny_emulated_refuse(unsigned k)
{
    return ((spw_emulate_refuse_fn)(uintptr_t)emulated_symbol(SPW_EMULATE_REFUSE_SYMBOL))(k);
}

void
tiny_swap_file(const char *dir, char path[1024])
{
    DIR *d = opendir(dir);
    struct dirent *entry;
    path[0] = '\0';
    assert_non_null(d);
    while ((entry = readdir(d)) != NULL) {
        if (strncmp(entry->d_name, "spillway-", 9) == 0)
            snprintf(path, 1024, "%s/%s/rank-0/swap.bin", dir, entry->d_name);
    }
    closedir(d);
    assert_true(path[0] != '\0');
}

/*
 * Past the page cache, as the engine itself reads and writes: where pages of it lie in the way of a direct write that
 * is under way, the kernel reports a collision as an error of the file. Where the file system refuses that, nobody does.
 */
void
tiny_spoil_file(const char *path, uint64_t first)
{
    enum { PAGE = 4096 };
    struct stat info;
    unsigned char *page = NULL;
    int fd = open(path, O_RDWR | O_DIRECT);
    if (fd < 0)
        fd = open(path, O_RDWR);
    assert_true(fd >= 0 && fstat(fd, &info) == 0);
    assert_int_equal(posix_memalign((void **)&page, PAGE, PAGE), 0);
    for (off_t at = (off_t)(first / PAGE * PAGE); at + (off_t)(first % PAGE) < info.st_size; at += PAGE) {
        ssize_t n = pread(fd, page, PAGE, at);
        assert_true(n > (ssize_t)(first % PAGE));
        page[first % PAGE] ^= 0x10;
        assert_int_equal(pwrite(fd, page, (size_t)n, at), n);
    }
    free(page);
    close(fd);
}

spw_status
tiny_one_nan(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    const spw_store_chunk *c = &spw_engine_layout(ctx)->chunks[chunk_idx];
    (void)grad;
    (void)err;
    memset(record, 0, c->elems * 8);
    for (uint64_t i = 0; i < c->elems; i++)
        ((float *)weights)[i] = i == 17 && chunk_idx == 0 ? NAN : 0.01f * (float)(i % 7);
    return SPW_OK;
}

char *
tiny_load(const char *path, uint64_t *bytes)
{
    FILE *f = fopen(path, "rb");
    char *text = malloc(1 << 20);
    assert_non_null(f);
    assert_non_null(text);
    *bytes = fread(text, 1, 1 << 20, f);
    fclose(f);
    return text;
}

void
tiny_store(const char *path, const char *text, uint64_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}
