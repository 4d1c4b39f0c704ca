/*
 * Adapters in a checkpoint: adapter_model.safetensors holds A and B of each in fp32, and adapter_config.json says what they
 * belong to, both as peft writes and reads them. The linear weights are listed one by one, so that no name is matched
 * differently there than here.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <fnmatch.h>
#include <stdio.h>

uint32_t
spw__base_count(const spw_model *m)
{
    uint32_t n = m->param_count;
    while (n > 0 && m->params[n - 1].adapter)
        n--;
    return n;
}

/* "base_model.model.<linear>.lora_A.weight" gives "<linear>"; B gives nothing. */
static json_t *
module_of(const char *name)
{
    const char *begin = name + strlen("base_model.model."), *end = strstr(begin, ".lora_A.weight");
    return end != NULL ? json_stringn(begin, (size_t)(end - begin)) : NULL;
}

/* The tensors of experts that have one, by their whole names, as the linear weights are. */
static json_t *
list_fused(const spw_model *m)
{
    json_t *list = json_array();
    for (uint32_t b = 0; b < m->block_count; b++)
        for (int kind = 0; kind < SPW_FUSED_COUNT; kind++) {
            spw_fused fused;
            if (m->blocks[b].fused_at[kind] > 0 && spw_model_fused(m, &m->blocks[b], (spw_fused_kind)kind, &fused))
                json_array_append_new(list, json_string(fused.name));
        }
    return list;
}

/* Of a folder in the hub's cache the model's name on the hub and the commit, which peft finds on any machine. */
void
spw__adapter_names_base(json_t *adapters, const char *folder)
{
    char name[SPW_HUB_NAME_BYTES], commit[SPW_HUB_NAME_BYTES];
    const bool of_hub = spw_hub_name(folder, name, commit);
    json_object_set_new(adapters, "base_model_name_or_path",
                        folder[0] == '\0' ? json_null() : json_string(of_hub ? name : folder));
    if (of_hub)
        json_object_set_new(adapters, "revision", json_string(commit));
}

json_t *
spw__adapter_config(const spw_model *m, const spw_config *c)
{
    json_t *modules = json_array(), *fused = list_fused(m), *all;
    for (uint32_t id = spw__base_count(m); id < m->param_count; id++) {
        json_t *module = m->params[id].of_experts ? NULL : module_of(m->params[id].name);
        if (module != NULL)
            json_array_append_new(modules, module);
    }
    all = json_pack("{s:s, s:s, s:I, s:f, s:f, s:o, s:b, s:s, s:b, s:b, s:b}", "peft_type", "LORA", "task_type",
                    "CAUSAL_LM", "r", (json_int_t)m->lora.rank, "lora_alpha",
                    m->lora.alpha > 0 ? m->lora.alpha : (double)m->lora.rank, "lora_dropout", m->lora.dropout,
                    "target_modules", modules, "fan_in_fan_out", m->config.family == SPW_FAMILY_GPT2, "bias", "none",
                    "inference_mode", 1, "use_rslora", 0, "use_dora", 0);
    spw__adapter_names_base(all, c->model_path);
    if (json_array_size(fused) > 0) /* older ones do not know the key */
        json_object_set(all, "target_parameters", fused);
    json_decref(fused);
    return all;
}

/* peft 0.21 takes these for the experts', whose gate and up transformers 5 has as one; of Qwen2-MoE and Qwen3.5-MoE it reads them as they are. */
void
spw__adapter_warn(const spw_model *m)
{
    uint32_t id = spw__base_count(m);
    if (m->config.experts == 0 || m->config.family == SPW_FAMILY_QWEN2_MOE ||
        m->config.family == SPW_FAMILY_QWEN3_5_MOE)
        return;
    while (id < m->param_count && fnmatch("*.mlp.*_proj.lora_A.weight", m->params[id].name, 0) != 0)
        id++;
    if (id < m->param_count)
        spw_log(
            SPW_LOG_WARN,
            "spillway.lora: peft 0.21 with transformers 5 does not load adapters of MLPs beside experts, such as %s; "
            "spillway export merges them",
            m->params[id].name);
}
