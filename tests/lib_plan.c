/* See lib_plan.h. */
#include "lib_plan.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

char plan_dir[256];

int
plan_dir_make(void **state)
{
    (void)state;
    tiny_dir_make(plan_dir);
    return 0;
}

int
plan_dir_remove(void **state)
{
    (void)state;
    tiny_dir_remove(plan_dir);
    return spw_test_live_allocs() == 0 ? 0 : -1;
}

spw_rates
plan_some_rates(void)
{
    return (spw_rates){.nvme_read = {2e9, 4e9},
                       .nvme_write = {1e9, 2e9},
                       .nvme_mixed = {2e9, 3e9},
                       .device_id = {1, 2},
                       .h2d = 10e9,
                       .d2h = 8e9,
                       .optimizer = 1e9,
                       .flops = 1e12};
}

void
plan_nvme_config(spw_config *c, spw_state_format format)
{
    tiny_config(c, format);
    c->data.seq_length = 40;
    c->zero.param_path.count = 1;
    snprintf(c->zero.param_path.item[0], sizeof c->zero.param_path.item[0], "%s", plan_dir);
    c->zero.optimizer_path = c->zero.param_path;
    c->zero.offload_param = c->zero.offload_optimizer = SPW_TIER_NVME;
    c->aio.block_size = 1 << 20;
    c->aio.queue_depth = 16;
    c->aio.thread_count = 4;
}

spw_model *
plan_make_model(void)
{
    spw_model_config m;
    spw_model *model = NULL;
    spw_error err = {0};
    tiny_model_config(&m, SPW_FAMILY_GPT2);
    m.layers = 8;
    m.width = 64;
    m.head_dim = 16;
    m.mlp_width = 256;
    assert_int_equal(spw_model_build(&model, &m, &err), SPW_OK);
    return model;
}

spw_status
plan_on_hosts(const spw_config *c, const spw_model *model, uint32_t local_ranks, uint64_t room_bytes, spw_plan *plan,
              spw_error *err)
{
    spw_engine *e = NULL;
    spw_status st = spw_engine_create(&e,
                                      &(spw_engine_options){.config = c,
                                                            .model = model,
                                                            .plan_only = true,
                                                            .process_bytes = PLAN_PROCESS_BYTES,
                                                            .room_bytes = room_bytes,
                                                            .local_ranks = local_ranks,
                                                            .plan_out = plan},
                                      err);
    spw_engine_destroy(e);
    return st;
}

spw_status
plan_in_room(const spw_config *c, const spw_model *model, uint64_t room_bytes, spw_plan *plan, spw_error *err)
{
    return plan_on_hosts(c, model, 0, room_bytes, plan, err);
}

spw_status
plan_of(const spw_config *c, const spw_model *model, spw_plan *plan, spw_error *err)
{
    return plan_in_room(c, model, UINT64_MAX, plan, err);
}
