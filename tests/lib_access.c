#include "lib_access.h"
#include "lib_ranks.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

void
access_expect_ok(access_run *r, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", r->err.message);
}

void
access_run_open(access_run *r, const spw_config *c, uint64_t seed)
{
    spw_model_config mc;
    memset(r, 0, sizeof *r);
    r->c = *c;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    access_expect_ok(r, spw_model_build(&r->model, &mc, &r->err));
    if (c->run.lora.rank > 0)
        access_expect_ok(r, spw_model_add_lora(r->model, &(spw_lora){.rank = c->run.lora.rank},
                                               (const char *[]){"c_attn"}, 1, NULL, 0, &r->err));
    access_expect_ok(
        r, spw_engine_create(&r->e,
                             &(spw_engine_options){
                                 .config = c, .model = r->model, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
                             &r->err));
    access_expect_ok(r, spw_engine_init_params(r->e, seed, &r->err));
}

void
access_run_close(access_run *r)
{
    spw_engine_destroy(r->e);
    spw_model_destroy(r->model);
}

spw_status
access_run_step(access_run *r, uint64_t s)
{
    uint64_t n = r->c.accumulation * r->c.micro_batch * r->c.data.seq_length;
    int32_t tokens[BATCH_MAX], targets[BATCH_MAX];
    assert_true(n <= BATCH_MAX);
    tiny_batch(s, r->model->config.vocab, n, tokens, targets);
    return spw_engine_step(r->e, tokens, targets, (uint32_t)r->c.accumulation, r->c.optimizer.lr, &r->last, &r->err);
}

void
access_place(spw_config *c, spw_tier tier, const char *dir)
{
    c->zero.offload_param = c->zero.offload_optimizer = tier;
    ranks_use_dir(c, dir);
}

spw_status
access_take_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    access_image *im = ctx;
    const spw_layout *l = &im->e->layout;
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    spw_state_format f = im->e->config.run.state_format;
    uint64_t base = l->bases[c->unit_idx] + c->first, bytes = c->elems * spw_state_weight_bytes(f);
    uint64_t end = c->unit_idx + 1 < l->unit_count ? l->bases[c->unit_idx + 1] : ELEMS_MAX;
    uint64_t n = base >= end ? 0 : end - base < c->elems ? end - base : c->elems; /* the rest pads the parts of ranks */
    (void)grad;
    (void)err;
    for (uint32_t p = 0; p < 1 + im->e->optimizer->moment_count && (p == 0 || record != NULL); p++)
        spw_state_get(f, im->e->optimizer, weights, record, c->elems, (spw_state_part)p, 0, n, im->part[p] + base);
    spw_convert(im->part[SPW_ACCESS_WEIGHT] + base, SPW_F32, weights, spw_state_weight_dtype(f), n);
    im->sums[chunk_idx % 512] = spw_checksum(weights, bytes);
    if (record != NULL)
        im->sums[chunk_idx % 512] ^= 31 * spw_checksum(record, spw_state_record_bytes(f, im->e->optimizer, c->elems));
    return SPW_OK;
}

bool
access_same_file(const char *a, const char *b, const char *name)
{
    char command[1400];
    snprintf(command, sizeof command, "cmp '%s/%s' '%s/%s'", a, name, b, name);
    return system(command) == 0;
}
