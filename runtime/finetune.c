/*
 * The model that a configuration describes: a family's, with the adapters of spillway.lora and with what spillway.freeze
 * names frozen. Pure: nothing is read, and no memory but the model's is taken.
 */
#include "runtime_internal.h"

static spw_status
add_adapters(spw_model *m, const spw_config *c, spw_error *err)
{
    const spw_glob_list *list = &c->run.lora_targets, *of_experts = &c->run.lora_target_parameters;
    const char *targets[SPW_GLOBS_MAX], *parameters[SPW_GLOBS_MAX];
    spw_status st;
    if (c->run.lora.rank == 0 && list->count + of_experts->count == 0)
        return SPW_OK;
    if (c->run.lora.rank == 0)
        return SPW_RAISE(err, SPW_ECONFIG, "spillway.lora has %s and no rank",
                         list->count > 0 ? "targets" : "target_parameters");
    for (uint32_t i = 0; i < list->count; i++)
        targets[i] = list->item[i];
    for (uint32_t i = 0; i < of_experts->count; i++)
        parameters[i] = of_experts->item[i];
    st = spw_model_add_lora(m, &c->run.lora, targets, list->count, parameters, of_experts->count, err);
    if (st != SPW_OK)
        spw_error_wrap(err, "spillway.lora");
    return st;
}

static spw_status
freeze(spw_model *m, const spw_config *c, spw_error *err)
{
    for (uint32_t g = 0; g < c->run.freeze.count; g++) {
        if (spw_model_freeze(m, c->run.freeze.item[g]) == 0)
            return SPW_RAISE(err, SPW_ECONFIG, "spillway.freeze: no parameter matches \"%s\" (names look like %s)",
                             c->run.freeze.item[g], m->params[m->param_count / 2].name);
    }
    for (uint32_t id = 0; id < m->param_count; id++) {
        if (!m->params[id].frozen)
            return SPW_OK;
    }
    return SPW_RAISE(err, SPW_ECONFIG, "spillway.freeze: all %u parameters are frozen, there is nothing to train",
                     m->param_count);
}

spw_status
spw_model_from_config(spw_model **out, const spw_config *c, spw_error *err)
{
    spw_status st = spw_model_build(out, &c->model, err);
    if (st == SPW_OK)
        st = add_adapters(*out, c, err);
    if (st == SPW_OK)
        st = freeze(*out, c, err);
    if (st != SPW_OK) {
        spw_model_destroy(*out);
        *out = NULL;
    }
    return st;
}
