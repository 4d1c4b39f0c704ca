/*
 * What a plan says that ranks receive from each other in a step is what they receive, to the byte: in all stages, with ZeRO++ and MiCS,
 * over hosts, however little is gathered at a time. And a plan that is made alone, for ranks on hosts that are not there, is theirs.
 */
#include "lib_tiny.h"
#include "lib_worlds.h"
#include "engine_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { STEADY = 4, MORE = 2 }; /* steps before every one is like the others; steps that are counted */

typedef struct setting {
    const char *name;
    uint32_t ranks, per_host, stage;
    int32_t shard;
    uint32_t kept;
    bool weights, frozen_codes, grads, by_host; /* keys of ZeRO++ and MiCS */
    bool frozen, tight, no_prefetch, late;
    uint32_t sharers; /* of a sequence */
    uint64_t pass, tile, vocab;
    spw_dtype comm;
    spw_family family;
} setting;

static const setting settings[] = {
    {"stage 0", 3, 0, 0, .family = SPW_FAMILY_GPT2},
    {"stage 0, two hosts, two passes", 4, 2, 0, .pass = 3, .family = SPW_FAMILY_GPT2},
    {"stage 1", 2, 0, 1, .family = SPW_FAMILY_LLAMA},
    {"stage 2, hosts", 4, 2, 2, .family = SPW_FAMILY_GPT2},
    {"stage 3", 4, 0, 3, .family = SPW_FAMILY_GPT2},
    {"stage 3, tight", 4, 2, 3, .tight = true, .family = SPW_FAMILY_GPT2},
    {"stage 3, tight, no prefetch, passes", 3, 1, 3, .tight = true, .no_prefetch = true, .pass = 4,
     .family = SPW_FAMILY_GPT2},
    {"stage 3, untied, bf16 between ranks", 4, 2, 3, .comm = SPW_BF16, .family = SPW_FAMILY_LLAMA},
    {"stage 3, experts", 2, 1, 3, .tight = true, .family = SPW_FAMILY_MIXTRAL},
    {"stage 3, frozen", 4, 2, 3, .frozen = true, .family = SPW_FAMILY_GPT2},
    {"stage 3, late updates", 4, 2, 3, .late = true, .tight = true, .family = SPW_FAMILY_GPT2},
    {"stage 3, head in pieces", 2, 1, 3, .tile = 128, .vocab = 1000, .tight = true, .pass = 1,
     .family = SPW_FAMILY_LLAMA},
    {"stage 3, tied, in pieces", 2, 1, 3, .tile = 128, .vocab = 1000, .tight = true, .family = SPW_FAMILY_GPT2},
    {"stage 3, hosts of three and one", 4, 3, 3, .family = SPW_FAMILY_GPT2},
    {"qwZ", 4, 2, 3, .weights = true, .family = SPW_FAMILY_GPT2},
    {"codes of what is frozen", 4, 2, 3, .frozen_codes = true, .frozen = true, .tight = true,
     .family = SPW_FAMILY_GPT2},
    {"hpZ, tight", 4, 2, 3, .kept = 2, .tight = true, .family = SPW_FAMILY_GPT2},
    {"hpZ, passes", 4, 0, 3, .kept = 4, .tight = true, .pass = 2, .family = SPW_FAMILY_LLAMA},
    {"qgZ", 4, 2, 3, .grads = true, .family = SPW_FAMILY_GPT2},
    {"all of ZeRO++", 8, 4, 3, .weights = true, .grads = true, .kept = 2, .tight = true, .family = SPW_FAMILY_GPT2},
    {"MiCS, a host each", 4, 2, 3, .shard = 2, .family = SPW_FAMILY_GPT2},
    {"MiCS of one", 4, 2, 3, .shard = 1, .family = SPW_FAMILY_GPT2},
    {"MiCS by host", 8, 2, 3, .shard = 4, .by_host = true, .tight = true, .family = SPW_FAMILY_GPT2},
    {"MiCS across hosts", 8, 2, 3, .shard = 4, .weights = true, .family = SPW_FAMILY_GPT2},
    {"shared sequences", 2, 0, 3, .sharers = 2, .family = SPW_FAMILY_GPT2},
    {"shared sequences, few heads of keys, hosts", 4, 2, 3, .sharers = 4, .tight = true, .family = SPW_FAMILY_LLAMA},
    {"shared sequences, groups, passes", 4, 1, 2, .sharers = 2, .pass = 5, .family = SPW_FAMILY_LLAMA},
    {"shared sequences, frozen", 4, 2, 3, .sharers = 2, .frozen = true, .family = SPW_FAMILY_GPT2},
    {"shared sequences, experts in turns", 2, 0, 3, .sharers = 2, .tight = true, .pass = 2,
     .family = SPW_FAMILY_MIXTRAL},
};
enum { COUNT = sizeof settings / sizeof settings[0] };

static void
config_of(spw_config *c, const setting *s)
{
    ranks_config(c, SPW_STATE_FP32);
    c->zero.stage = s->stage;
    if (s->stage < 3)
        c->zero.offload_param = SPW_TIER_DEVICE;
    c->zero.mics_shard_size = s->shard;
    c->zero.mics_by_host = s->by_host;
    c->zero.hpz_partition_size = s->kept;
    c->zero.quantized_weights = s->weights;
    c->zero.quantized_frozen = s->frozen_codes;
    c->zero.quantized_gradients = s->grads;
    c->comm_dtype = s->comm;
    c->run.prefetch = !s->no_prefetch;
    c->run.micro_batches_per_pass = s->pass;
    c->run.delayed_update = s->late;
    c->run.tile_vocab = s->tile;
    c->sequence_ranks = s->sharers;
}

/* After so many steps; tight: with as little on the device as there can be. */
static outcome *
run(const setting *s, const spw_config *c, uint32_t steps)
{
    world w = {.ranks = s->ranks,
               .per_host = s->per_host,
               .steps = steps,
               .vocab = s->vocab,
               .family = s->family,
               .frozen = s->frozen,
               .least_device = s->tight,
               .alone = true,
               .config = c,
               .out = outcome_new()};
    world_run(&w);
    return w.out;
}

static void
compare(const char *what, uint32_t rank, const char *which, uint64_t planned, uint64_t measured)
{
    if (planned != measured)
        fail_msg("%s: rank %u: %s: %llu bytes planned, %llu received", what, rank, which, (unsigned long long)planned,
                 (unsigned long long)measured);
}

static void
compare_alone(const char *what, const spw_plan *alone, const spw_plan *theirs)
{
    compare(what, 0, "weights, planned alone", alone->gathered.all, theirs->gathered.all);
    compare(what, 0, "gradients, planned alone", alone->reduced.all, theirs->reduced.all);
    compare(what, 0, "weights of other hosts, planned alone", alone->gathered.far, theirs->gathered.far);
    compare(what, 0, "gradients of other hosts, planned alone", alone->reduced.far, theirs->reduced.far);
    compare(what, 0, "traded, planned alone", alone->traded.all, theirs->traded.all);
    compare(what, 0, "traded with other hosts, planned alone", alone->traded.far, theirs->traded.far);
    compare(what, 0, "memory, planned alone", alone->host_bytes, theirs->host_bytes);
    assert_int_equal(alone->ranks, theirs->ranks);
}

/* In the first forward pass all parts of the others come once, for updates have changed them; what there is room for, not again. */
static void
check_first(const setting *s, const outcome *out, uint32_t rank)
{
    const spw_received *all = &out->plan[rank].gathered, *first = &out->plan[rank].gathered_first;
    const uint64_t circle = s->shard > 0 ? (uint64_t)s->shard : s->ranks;
    if (s->stage > 0 && !s->frozen && !s->weights)
        compare(s->name, rank, "weights of the first pass", first->all,
                (circle - 1) * (out->padded / circle) * sizeof(float));
    assert_true(first->all <= all->all && first->far <= all->far && (s->per_host > 0 || first->far == 0));
    assert_true(s->tight || first->all == all->all);
}

static void
test_bytes(void **state)
{
    (void)state;
    for (int i = 0; i < COUNT; i += SANITIZED ? 3 : 1) { /* with them for memory alone */
        const setting *s = &settings[i];
        outcome *few, *more;
        spw_config c;
        config_of(&c, s);
        few = run(s, &c, STEADY);
        more = run(s, &c, STEADY + MORE);
        for (uint32_t r = 0; r < s->ranks; r++) {
            const spw_plan *p = &few->plan[r];
            compare(s->name, r, "weights", MORE * p->gathered.all, more->gather[r] - few->gather[r]);
            compare(s->name, r, "gradients", MORE * p->reduced.all, more->reduce[r] - few->reduce[r]);
            compare(s->name, r, "weights of other hosts", MORE * p->gathered.far,
                    more->far_gather[r] - few->far_gather[r]);
            compare(s->name, r, "gradients of other hosts", MORE * p->reduced.far,
                    more->far_reduce[r] - few->far_reduce[r]);
            compare(s->name, r, "traded", MORE * p->traded.all, more->trade[r] - few->trade[r]);
            compare(s->name, r, "traded with other hosts", MORE * p->traded.far,
                    more->far_trade[r] - few->far_trade[r]);
            assert_true((p->traded.all > 0) == (s->sharers > 1));
            assert_true(p->reduced.all > 0 && (p->gathered.all > 0) == (s->stage > 0 && s->shard != 1));
            assert_true((p->reduced.far > 0) == (s->per_host > 0));
            check_first(s, few, r);
        }
        print_message("%-40s %8llu and %8llu bytes a step, %8llu and %8llu from other hosts\n", s->name,
                      (unsigned long long)few->plan[0].gathered.all, (unsigned long long)few->plan[0].reduced.all,
                      (unsigned long long)few->plan[0].gathered.far, (unsigned long long)few->plan[0].reduced.far);
        compare_alone(s->name, &few->alone, &few->plan[0]);
        outcome_free(few);
        outcome_free(more);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes)};
    return cmocka_run_group_tests_name("received", tests, NULL, NULL);
}
