/*
 * Adapters of low rank beside the experts that rows choose: one for a tensor of all experts, with a part for each, as peft has them. They
 * lie with their layer's own parameters, since they are small beside its experts, whichever of these are on the device; an expert's part is a
 * slice of A, and of B once that was turned.
 */
#include "nn_internal.h"
#include <fnmatch.h>
#include <stdio.h>

/* Gate and up are a matrix each, w + down_proj; else they are one, or there is no gate. */
static bool
apart(const spw_model_config *c)
{
    return !c->experts_paired && !c->experts_beside && !c->experts_weighed && !c->experts_packed && !c->gate_packed &&
           !c->ungated;
}

bool
spw_model_fused(const spw_model *m, const spw_block *b, spw_fused_kind kind, spw_fused *out)
{
    const spw_model_config *c = &m->config;
    const uint64_t cols = spw_model_expert_cols(c), inner = kind == SPW_FUSED_DOWN ? c->mlp_width : cols;
    const uint64_t outer = kind == SPW_FUSED_DOWN ? cols : c->ungated ? c->mlp_width : 2 * c->mlp_width;
    char file[96];
    const char *name = NULL, *end;
    for (uint32_t k = 0; name == NULL && b->forward == spw_llama_layer_forward && k < b->param_count; k++) {
        if (m->params[b->param_ids[k]].expert > 0)
            name = m->params[b->param_ids[k]].name;
    }
    if (name == NULL)
        return false;
    end = strchr(strstr(name, "layers.") + strlen("layers."), '.');
    snprintf(file, sizeof file, "%.*s%s.%s", (int)(end - name), name,
             c->experts_weighed || c->family == SPW_FAMILY_LFM2_MOE ? ".feed_forward.experts"
             : c->experts_beside                                    ? ".experts"
             : c->gate_packed                                       ? ".block_sparse_moe.experts"
             : c->halves_apart                                      ? ".mixer.experts"
                                                                    : ".mlp.experts",
             kind == SPW_FUSED_DOWN ? "down_proj"
             : c->ungated           ? "up_proj"
                                    : "gate_up_proj");
    spw__nn_name_module(m, file, out->name, sizeof out->name);
    /* Llama 4's tensors are (experts, in, out), and its class does not say so: to peft their outputs are inputs. */
    out->a_cols = c->experts_weighed ? outer : inner;
    out->b_rows = c->experts_weighed ? inner : outer;
    out->turned = c->experts_paired;
    return true;
}

void
spw_fused_module(const spw_fused *fused, spw_fused_kind kind, bool both, char name[96])
{
    snprintf(name, 96, "%.*s%s", (int)(strrchr(fused->name, '.') - fused->name), fused->name,
             both && kind == SPW_FUSED_GATE_UP ? ".base_layer" : "");
}

/* Experts' matrices are listed by kind: all gates (or gates with ups), all ups, all downs. */
bool
spw_model_fused_part(const spw_model *m, const spw_block *b, uint32_t k, spw_fused_kind *kind, uint64_t *first)
{
    const spw_param *p = &m->params[b->param_ids[k]];
    const uint32_t down = apart(&m->config) ? 2 : 1;
    uint32_t before = 0;
    if (p->expert == 0 || p->ndim != 2)
        return false;
    for (uint32_t i = 0; i < k; i++) {
        const spw_param *other = &m->params[b->param_ids[i]];
        before += other->expert == p->expert && other->ndim == 2;
    }
    *kind = before < down ? SPW_FUSED_GATE_UP : SPW_FUSED_DOWN;
    *first = before < down ? before * m->config.mlp_width : 0;
    return true;
}

bool
spw_fused_matches(const spw_fused *fused, const char *glob)
{
    for (const char *at = fused->name; at != NULL; at = strchr(at, '.') != NULL ? strchr(at, '.') + 1 : NULL) {
        if (fnmatch(glob, at, 0) == 0)
            return true;
    }
    return false;
}

/* Which of a layer's tensors the globs match; how many. */
static uint32_t
find_wanted(const spw_model *m, const spw_block *b, const char *const *globs, uint32_t count,
            spw_fused fused[SPW_FUSED_COUNT], bool wanted[SPW_FUSED_COUNT])
{
    uint32_t n = 0;
    for (int kind = 0; kind < SPW_FUSED_COUNT; kind++) {
        wanted[kind] = false;
        if (!spw_model_fused(m, b, (spw_fused_kind)kind, &fused[kind]))
            continue;
        for (uint32_t g = 0; g < count; g++)
            wanted[kind] = wanted[kind] || spw_fused_matches(&fused[kind], globs[g]);
        n += wanted[kind];
    }
    return n;
}

uint32_t
spw__nn_count_fused(const spw_model *m, const char *const *globs, uint32_t count)
{
    spw_fused fused[SPW_FUSED_COUNT];
    bool wanted[SPW_FUSED_COUNT];
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->block_count; i++)
        n += find_wanted(m, &m->blocks[i], globs, count, fused, wanted);
    return n;
}

void
spw__nn_adapt_fused(spw_model *m, spw_block *b, const char *const *globs, uint32_t count)
{
    const uint64_t all = m->lora.rank * m->config.experts;
    spw_fused fused[SPW_FUSED_COUNT];
    bool wanted[SPW_FUSED_COUNT], both = find_wanted(m, b, globs, count, fused, wanted) == SPW_FUSED_COUNT;
    for (int kind = 0; kind < SPW_FUSED_COUNT; kind++) {
        char module[96];
        if (!wanted[kind])
            continue;
        spw_fused_module(&fused[kind], (spw_fused_kind)kind, both, module);
        b->fused_at[kind] = (uint16_t)b->param_count;
        m->params[spw__nn_add_matrix(m, b, module, 'A', all, fused[kind].a_cols)].of_experts = true;
        m->params[spw__nn_add_matrix(m, b, module, 'B', fused[kind].b_rows, all)].of_experts = true;
    }
}

/* In Llama 4 rows meet B first, whose columns are A's rows all the same. */
spw__fused_adapter
spw__nn_fused_adapter(const spw_call *call, spw_fused_kind kind)
{
    const spw_model_config *c = &call->model->config;
    const uint32_t at = call->block->fused_at[kind];
    spw__fused_adapter a = {0};
    if (at == 0)
        return a;
    a.inner = call->params[at];
    a.outer = spw_nn_by_expert(call->tape, call->params[at + 1], c->experts, spw_lora_scale(&call->model->lora));
    if (c->experts_weighed) {
        spw_value *first = a.outer;
        a.outer = a.inner;
        a.inner = first;
        a.flags = SPW_OP_W_IN_OUT;
    }
    return a;
}

spw_value *
spw__nn_each(spw_tape *t, spw__fused_adapter *a, uint64_t parts, spw_value *x, spw_value *routing, spw_value *const *w,
             spw_value *const *b, unsigned flags)
{
    uint64_t E, rows;
    spw_value *y;
    if (a->inner == NULL || a->outer == NULL || routing == NULL)
        return spw_nn_linear_each(t, x, routing, w, b, flags);
    E = routing->routed->on_device.E;
    rows = a->outer->rows / E / parts;
    if (a->narrow == NULL)
        a->narrow = spw_nn_linear_stack(t, x, routing, a->inner, 0, a->inner->rows / E, a->flags);
    y = spw_nn_linear_stack(t, a->narrow, routing, a->outer, a->taken, rows, a->flags);
    a->taken += rows;
    return y == NULL ? NULL : spw_nn_linear_each_onto(t, y, x, routing, w, b, flags);
}
