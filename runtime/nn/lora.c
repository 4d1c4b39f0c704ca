/*
 * Adapters of low rank: two small matrices beside a frozen one, and a linear operation that adds what they give. Every
 * linear weight of a layer goes through spw__nn_adapted(); one without an adapter computes what it always did.
 */
#include "nn_internal.h"
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>

float
spw_lora_scale(const spw_lora *lora)
{
    return (float)((lora->alpha > 0 ? lora->alpha : (double)lora->rank) / (double)lora->rank);
}

/* Sites of dropout inside a family are small numbers. */
enum { FIRST_SITE = 1 << 20 };

/*
 * onto + scale (x A) B, the scale taken on the narrow side, where it costs least. It comes first, and the wide matrix' product onto it: that is
 * the one which a backward pass that reads no output need not do again.
 */
static spw_value *
adapter(const spw_call *call, spw_value *onto, spw_value *x, uint32_t a)
{
    spw_tape *t = call->tape;
    const spw_lora *lora = &call->model->lora;
    const float scale = spw_lora_scale(lora);
    const uint32_t into = spw_nn_hold_into(t);
    spw_value *low = x;
    if (call->training)
        low = spw_nn_dropout(t, low, (float)lora->dropout, call->batch, FIRST_SITE + call->block->param_ids[a]);
    low = spw_nn_linear(t, low, call->params[a], NULL, 0);
    if (scale != 1)
        low = spw_nn_scale(t, low, scale);
    if (into < SPW_ROWS_VALUES)
        spw_nn_into(t, into);
    return onto != NULL ? spw_nn_linear_add(t, onto, low, call->params[a + 1], NULL, 0)
                        : spw_nn_linear(t, low, call->params[a + 1], NULL, 0);
}

spw_value *
spw__nn_adapted(const spw_call *call, spw_value *onto, spw_value *x, uint32_t w, spw_value *bias, unsigned flags)
{
    const uint32_t a = call->block->adapter_at[w];
    spw_value *y = a > 0 ? adapter(call, onto, x, a) : onto;
    if (y == NULL)
        return spw_nn_linear(call->tape, x, call->params[w], bias, flags);
    return a > 0 ? spw_nn_linear_onto(call->tape, y, x, call->params[w], bias, flags)
                 : spw_nn_linear_add(call->tape, y, x, call->params[w], bias, flags);
}

static bool
ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), n_end = strlen(end);
    return n > n_end && strcmp(name + n - n_end, end) == 0;
}

static bool
is_router(const char *name)
{
    return ends_with(name, ".gate") || ends_with(name, ".router") || ends_with(name, ".gate.wg") ||
           ends_with(name, ".router.proj") || ends_with(name, ".router.layer");
}

/* A layer's router, or the gate of its shared expert. */
static bool
is_gate(const char *name)
{
    return is_router(name) || ends_with(name, ".shared_expert_gate");
}

/* Families whose router is a bare parameter in transformers 4, or in 5, which alone has them: peft has adapters beside linear layers. */
static const bool bare_router[SPW_FAMILY_COUNT] = {
    [SPW_FAMILY_GPT_OSS] = true,      [SPW_FAMILY_GLM4_MOE] = true,       [SPW_FAMILY_DEEPSEEK_V2] = true,
    [SPW_FAMILY_DEEPSEEK_V3] = true,  [SPW_FAMILY_DOTS1] = true,          [SPW_FAMILY_SOLAR_OPEN] = true,
    [SPW_FAMILY_HY_V3] = true,        [SPW_FAMILY_LLAMA4] = true,         [SPW_FAMILY_QWEN3_5_MOE] = true,
    [SPW_FAMILY_DEEPSEEK_V32] = true, [SPW_FAMILY_GLM_DSA] = true,        [SPW_FAMILY_GLM4_LITE] = true,
    [SPW_FAMILY_EXAONE_MOE] = true,   [SPW_FAMILY_GRANITE_HYBRID] = true, [SPW_FAMILY_NEMOTRON_H] = true,
    [SPW_FAMILY_DEEPSEEK_V4] = true,  [SPW_FAMILY_MISTRAL4] = true,       [SPW_FAMILY_MIMO_V2] = true,
    [SPW_FAMILY_LFM2_MOE] = true,     [SPW_FAMILY_KIMI_LINEAR] = true,
};

/* The name without ".weight"; false when this is no linear weight of a layer. */
static bool
linear_name(const spw_model *m, const spw_block *b, uint32_t id, char name[96])
{
    const spw_param *p = &m->params[id];
    size_t n = strlen(p->name), end = strlen(".weight");
    if ((b->forward != spw_gpt2_layer_forward && b->forward != spw_llama_layer_forward) || p->ndim != 2 ||
        p->of_indexer || p->expert > 0 || p->owner_block != (uint32_t)(b - m->blocks) || n <= end ||
        strcmp(p->name + n - end, ".weight") != 0)
        return false;
    snprintf(name, 96, "%.*s", (int)(n - end), p->name);
    if (ends_with(name, ".o_a_proj")) /* heads in groups: what peft puts beside it has other shapes */
        return false;
    return !is_router(name) || !bare_router[m->config.family];
}

bool
spw_model_is_dense(const spw_model *m, const spw_block *b, uint32_t id)
{
    char name[96];
    return !m->params[id].adapter && linear_name(m, b, id, name) && !is_gate(name);
}

/* A gate's only where the glob spells out what follows its last dot: "*" means the layers' own weights. */
static bool
matches(const char *glob, const char *name)
{
    const char *dot = strrchr(glob, '.');
    if (is_gate(name) && strpbrk(dot != NULL ? dot : glob, "*?[") != NULL)
        return false;
    for (const char *at = name; at != NULL; at = strchr(at, '.') != NULL ? strchr(at, '.') + 1 : NULL) {
        if (fnmatch(glob, at, 0) == 0)
            return true;
    }
    return false;
}

static bool
is_target(const spw_model *m, const spw_block *b, uint32_t id, const char *const *targets, uint32_t count)
{
    char name[96];
    bool any = false;
    for (uint32_t i = 0; i < count && !any; i++)
        any = linear_name(m, b, id, name) && matches(targets[i], name);
    return any;
}

/* How many linear weights the targets match. */
static uint32_t
count_targets(const spw_model *m, const char *const *targets, uint32_t count)
{
    uint32_t n = 0;
    for (uint32_t b = 0; b < m->block_count; b++) {
        for (uint32_t k = 0; k < m->blocks[b].param_count; k++)
            n += is_target(m, &m->blocks[b], m->blocks[b].param_ids[k], targets, count);
    }
    return n;
}

uint32_t
spw__nn_add_matrix(spw_model *m, spw_block *b, const char *module, char letter, uint64_t rows, uint64_t cols)
{
    char name[sizeof m->params->name + 64];
    uint32_t id;
    snprintf(name, sizeof name, "base_model.model.%s.lora_%c.weight", module, letter);
    SPW_ASSERT(strlen(name) < sizeof m->params->name);
    id = spw_model_add_param(m, name, rows, cols, 2, letter == 'A' ? SPW_INIT_NORMAL : SPW_INIT_ZEROS,
                             letter == 'A' ? (float)(1 / sqrt(3 * (double)cols)) : 0);
    m->params[id].adapter = true;
    spw_block_use(m, b, id);
    return id;
}

/* What transformers has in memory under another name than files. */
static const struct {
    spw_family family;
    const char *in_files, *in_memory;
} renamed[] = {{SPW_FAMILY_HY_V3, ".shared_mlp.", ".shared_experts."},
               {SPW_FAMILY_KIMI_LINEAR, ".block_sparse_moe.", ".mlp."},
               {SPW_FAMILY_KIMI_LINEAR, ".self_attn.f_a_proj", ".self_attn.forget_gate.f_a_proj"},
               {SPW_FAMILY_KIMI_LINEAR, ".self_attn.f_b_proj", ".self_attn.forget_gate.f_b_proj"},
               {SPW_FAMILY_NEMOTRON_H, "backbone.", "model."}};

void
spw__nn_name_module(const spw_model *m, const char *linear, char *name, size_t bytes)
{
    snprintf(name, bytes, "%s%s", m->config.family == SPW_FAMILY_GPT2 ? "transformer." : "", linear);
    for (size_t i = 0; i < sizeof renamed / sizeof renamed[0]; i++) {
        const char *found = m->config.family == renamed[i].family ? strstr(linear, renamed[i].in_files) : NULL;
        if (found != NULL)
            snprintf(name, bytes, "%.*s%s%s", (int)(found - linear), linear, renamed[i].in_memory,
                     found + strlen(renamed[i].in_files));
    }
}

static void
adapt_block(spw_model *m, spw_block *b, const char *const *targets, uint32_t count)
{
    bool in_out = m->config.family == SPW_FAMILY_GPT2;
    for (uint32_t k = 0, own = b->param_count; k < own; k++) {
        const spw_param *p = &m->params[b->param_ids[k]];
        uint64_t in = in_out ? p->rows : p->cols, out = in_out ? p->cols : p->rows;
        char name[96], module[160];
        if (!is_target(m, b, b->param_ids[k], targets, count))
            continue;
        (void)linear_name(m, b, b->param_ids[k], name);
        spw__nn_name_module(m, name, module, sizeof module);
        b->adapter_at[k] = (uint16_t)b->param_count;
        (void)spw__nn_add_matrix(m, b, module, 'A', m->lora.rank, in);
        (void)spw__nn_add_matrix(m, b, module, 'B', out, m->lora.rank);
    }
}

/* What the linear weights are called after their last dot, each once: " q_proj, k_proj, ...". */
static void
list_names(const spw_model *m, char *list, size_t bytes)
{
    char name[96], member[100];
    list[0] = '\0';
    for (uint32_t b = 0; b < m->block_count; b++) {
        for (uint32_t k = 0; k < m->blocks[b].param_count; k++) {
            size_t used = strlen(list);
            if (!linear_name(m, &m->blocks[b], m->blocks[b].param_ids[k], name))
                continue;
            snprintf(member, sizeof member, " %s,", strrchr(name, '.') + 1);
            if (strstr(list, member) == NULL)
                snprintf(list + used, bytes - used, "%s", member);
        }
    }
    if (list[0] != '\0')
        list[strlen(list) - 1] = '\0';
}

static spw_status
check_fused(const spw_model *m, const spw_lora *lora, const char *const *fused, uint32_t count, spw_error *err)
{
    static const char *const all = "*";
    if (count > 0 && spw__nn_count_fused(m, &all, 1) == 0)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "target_parameters \"%s\": they are for experts' tensors, and no layer of the model has experts; linear "
            "weights have targets",
            fused[0]);
    for (uint32_t i = 0; i < count; i++) {
        if (spw__nn_count_fused(m, &fused[i], 1) == 0)
            return SPW_RAISE(
                err, SPW_ECONFIG,
                "no tensor of experts matches \"%s\" of target_parameters; a layer has experts.gate_up_proj, "
                "or up_proj without a gate, and experts.down_proj, by the names of transformers 5",
                fused[i]);
    }
    if (count > 0 && lora->dropout > 0)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "dropout %g with target_parameters: peft has no adapters beside experts with dropout; set it to 0",
            lora->dropout);
    return SPW_OK;
}

static spw_status
check(const spw_model *m, const spw_lora *lora, const char *const *targets, uint32_t count, const char *const *fused,
      uint32_t fused_count, spw_error *err)
{
    char names[256];
    const char *but = m->config.experts == 0 ? ""
                      : bare_router[m->config.family]
                          ? m->config.shared_gated
                                ? " but shared_expert_gate; the router is none, because peft has no adapters beside it"
                                : "; the router is none, because peft has no adapters beside it"
                          : " but routers";
    if (lora->rank == 0 || lora->rank > 65536 || !(lora->alpha >= 0) || !(lora->dropout >= 0 && lora->dropout < 1))
        return SPW_RAISE(err, SPW_ECONFIG,
                         "rank %llu, alpha %g, dropout %g; they must be 1 to 65536, 0 or more, and in [0, 1)",
                         (unsigned long long)lora->rank, lora->alpha, lora->dropout);
    if (m->lora.rank > 0)
        return SPW_RAISE(err, SPW_ECONFIG, "the model has adapters already");
    list_names(m, names, sizeof names);
    for (uint32_t i = 0; i < count; i++) {
        if (count_targets(m, &targets[i], 1) == 0)
            return SPW_RAISE(err, SPW_ECONFIG,
                             "no linear weight of a layer matches the target \"%s\"; there are%s, and * is all%s%s",
                             targets[i], names, but,
                             m->config.experts > 0 && spw__nn_count_fused(m, &targets[i], 1) > 0
                                 ? " (the experts' are for target_parameters)"
                                 : "");
    }
    SPW_TRY(check_fused(m, lora, fused, fused_count, err));
    return count + fused_count > 0 ? SPW_OK
                                   : SPW_RAISE(err, SPW_ECONFIG, "no targets; there are%s, and * is all%s", names, but);
}

spw_status
spw_model_add_lora(spw_model *m, const spw_lora *lora, const char *const *targets, uint32_t count,
                   const char *const *fused, uint32_t fused_count, spw_error *err)
{
    spw_param *params;
    uint32_t params_max;
    SPW_TRY(check(m, lora, targets, count, fused, fused_count, err));
    params_max = m->param_count + 2 * count_targets(m, targets, count) + 2 * spw__nn_count_fused(m, fused, fused_count);
    params = spw_mem_calloc(params_max + (uint64_t)1, sizeof *params);
    if (params == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "adapters");
    memcpy(params, m->params, m->param_count * sizeof *params);
    spw_mem_free(m->params);
    m->params = params;
    m->params_max = params_max;
    m->lora = *lora;
    for (uint32_t id = 0; id < m->param_count; id++)
        params[id].frozen = true;
    for (uint32_t b = 0; b < m->block_count; b++)
        adapt_block(m, &m->blocks[b], targets, count);
    for (uint32_t b = 0; b < m->block_count; b++)
        spw__nn_adapt_fused(m, &m->blocks[b], fused, fused_count);
    return SPW_OK;
}
