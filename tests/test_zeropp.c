/*
 * ZeRO++ between ranks: the bytes that each saving saves, what it leaves alone, and that with it, too, where state lives changes
 * no bit.
 */
#include "lib_tiny.h"
#include "lib_worlds.h"
#include "quant.h"
#include "runtime_internal.h"
#include "spw_access.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { CURVE = 32 }; /* steps of a loss curve */

/* ---------------------------------------------------------------- worlds */

typedef struct keys {
    bool weights, frozen, grads;
    uint32_t kept;
} keys;

static void
use_keys(spw_config *c, keys k)
{
    c->zero.quantized_weights = k.weights;
    c->zero.quantized_frozen = k.frozen;
    c->zero.quantized_gradients = k.grads;
    c->zero.hpz_partition_size = k.kept;
}

/* Stage 3 in host memory, fp32. */
static void
keys_config(spw_config *c, keys k)
{
    ranks_config(c, SPW_STATE_FP32);
    use_keys(c, k);
}

typedef struct variant {
    const char *name;
    spw_tier param, optimizer;
    bool no_prefetch, tight;
    uint64_t chaos;
} variant;

static const variant variants[] = {
    {"host", SPW_TIER_HOST, SPW_TIER_HOST, false, false, 0},
    {"device", SPW_TIER_DEVICE, SPW_TIER_DEVICE, false, false, 0},
    {"nvme, tight", SPW_TIER_NVME, SPW_TIER_NVME, false, true, 0},
    {"host, tight, no prefetch", SPW_TIER_HOST, SPW_TIER_HOST, true, true, 0},
    {"nvme, tight, chaos", SPW_TIER_NVME, SPW_TIER_NVME, false, true, 6},
};

/* Gathered elements on the device that the last block of the tiny model needs: of two units, as large as a layer's at most. */
static uint64_t
tight_elems(uint32_t ranks)
{
    return 3 * ranks * spw_layout_part(12 * 32 * 32 + 13 * 32, ranks);
}

/* Every placement gives the bits of `first`, or of the first of them when there is none. */
static void
compare_placements(const char *what, world w, keys k, uint64_t pass, const outcome *first)
{
    outcome *own = outcome_new(), *other = outcome_new();
    char dir[256], text[160];
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        const variant *v = &variants[i];
        spw_config c;
        keys_config(&c, k);
        ranks_use_dir(&c, dir);
        c.run.micro_batches_per_pass = pass;
        c.zero.offload_param = v->param;
        c.zero.offload_optimizer = v->optimizer;
        c.run.prefetch = !v->no_prefetch;
        c.run.chaos_seed = v->chaos;
        c.zero.max_live_parameters = v->tight ? tight_elems(w.ranks) : UINT64_MAX;
        w.config = &c;
        w.out = first == NULL ? own : other;
        memset(w.out, 0, sizeof *w.out);
        world_run(&w);
        snprintf(text, sizeof text, "%s, %u ranks, %s", what, w.ranks, v->name);
        if (first != NULL)
            outcome_same(first, other, text);
        else
            first = own;
    }
    tiny_dir_remove(dir);
    outcome_free(own);
    outcome_free(other);
}

static outcome *
run_keys(world w, keys k)
{
    spw_config c;
    keys_config(&c, k);
    w.config = &c;
    w.out = outcome_new();
    world_run(&w);
    return w.out;
}

/* The losses are others than `exact`'s, and near them. */
static void
assert_curve(const outcome *exact, const outcome *coded, double within, const char *what)
{
    double worst = 0;
    for (int s = 0; s < CURVE; s++) {
        double d = fabs(coded->losses[s] - exact->losses[s]) / exact->losses[s];
        worst = d > worst ? d : worst;
    }
    print_message("%s: losses of %d steps, %.4f to %.4f, are within %.3f %% of the exact ones\n", what, CURVE,
                  coded->losses[0], coded->losses[CURVE - 1], 100 * worst);
    assert_true(worst > 0 && worst < within);
    assert_true(coded->losses[CURVE - 1] < 0.5 * coded->losses[0]);
}

/* ---------------------------------------------------------------- weights as codes */

/* 132 bytes for 128 elements, on every gather that there was without codes. */
static void
test_code_bytes(void **state)
{
    const world w = {.ranks = 4, .steps = STEPS, .family = SPW_FAMILY_GPT2};
    outcome *exact = run_keys(w, (keys){0}), *coded = run_keys(w, (keys){.weights = true});
    (void)state;
    for (uint32_t r = 0; r < w.ranks; r++) {
        assert_true(coded->gather[r] > 0);
        assert_int_equal(coded->gather[r] * 512, exact->gather[r] * 132);
        assert_int_equal(coded->reduce[r], exact->reduce[r]);
        assert_int_equal(coded->plan[r].host_bytes - exact->plan[r].host_bytes, coded->plan[r].wire_host);
        assert_true(coded->plan[r].wire_host > 0 && exact->plan[r].wire_host == 0);
        assert_int_equal(coded->taken[r] - exact->taken[r], coded->plan[r].wire_host); /* whole pages */
    }
    outcome_free(exact);
    outcome_free(coded);
}

static void
test_code_placements(void **state)
{
    world w = {.ranks = 2, .steps = STEPS, .family = SPW_FAMILY_GPT2};
    outcome *few;
    (void)state;
    few = run_keys(w, (keys){.weights = true});
    compare_placements("codes", w, (keys){.weights = true}, 0, few);
    outcome_free(few);
    w = (world){.ranks = 3, .steps = STEPS, .family = SPW_FAMILY_GPT2, .frozen = true, .per_host = 1};
    if (!SANITIZED)
        compare_placements("codes, three hosts, two passes, frozen units", w, (keys){.weights = true}, 5, NULL);
}

/* Every parameter becomes what its codes decode to. */
static spw_status
code_masters(spw_engine *e, spw_error *err)
{
    static float values[ELEMS_MAX];
    static char codes[2 * ELEMS_MAX];
    const spw_model *m = spw_engine_model(e);
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_access all = {m->params[id].name, SPW_ACCESS_MASTER, 0, 0};
        uint64_t n = spw_round_up(m->params[id].rows * m->params[id].cols, SPW_QUANT_BLOCK);
        memset(values, 0, n * sizeof *values);
        SPW_TRY(spw_access_get_full(e, &all, values, err));
        spw__quant_encode(codes, SPW_QUANT_INT8, values, SPW_F32, n);
        spw__quant_decode(values, SPW_F32, codes, SPW_QUANT_INT8, n);
        SPW_TRY(spw_access_set_full(e, &all, values, 0, err));
    }
    return SPW_OK;
}

/* Of the first gradient, of which the first moment is a share: what is between two of them, as a share of one. */
static double
gradient_distance(const outcome *a, const outcome *b)
{
    double between = 0, all = 0;
    assert_int_equal(a->elems, b->elems);
    for (uint64_t i = 0; i < a->elems; i++) {
        double d = (double)a->state[1][i] - (double)b->state[1][i];
        between += d * d;
        all += (double)a->state[1][i] * (double)a->state[1][i];
    }
    return sqrt(between / all);
}

/* The first gradient of ranks that gather codes is that of one rank which has the decoded weights, all of them, for masters. */
static void
test_code_values(void **state)
{
    world w = {.ranks = 1, .steps = 1, .family = SPW_FAMILY_GPT2, .prepare = code_masters};
    outcome *exact, *one = run_keys(w, (keys){0}), *coded;
    (void)state;
    w.prepare = NULL;
    exact = run_keys(w, (keys){0});
    for (uint32_t ranks = 2; ranks <= 4; ranks++) {
        w.ranks = ranks;
        coded = run_keys(w, (keys){.weights = true});
        print_message("%u ranks: gradient with codes, from one rank's with decoded weights: %.2g, with its own: %.2g\n",
                      ranks, gradient_distance(one, coded), gradient_distance(one, exact));
        assert_true(gradient_distance(one, coded) < 1e-5);
        assert_true(gradient_distance(one, exact) > 1e-3);
        outcome_free(coded);
    }
    outcome_free(exact);
    outcome_free(one);
}

static void
test_code_curve(void **state)
{
    const world w = {.ranks = 2, .steps = CURVE, .family = SPW_FAMILY_GPT2};
    outcome *exact = run_keys(w, (keys){0}), *coded = run_keys(w, (keys){.weights = true});
    (void)state;
    assert_curve(exact, coded, 0.05, "weights in 8 bits");
    outcome_free(exact);
    outcome_free(coded);
}

/* Frozen units alone: none, no change; some, less to gather and other bits than when all are codes. */
static void
test_frozen_codes(void **state)
{
    world w = {.ranks = 2, .steps = STEPS, .family = SPW_FAMILY_GPT2};
    outcome *exact = run_keys(w, (keys){0}), *coded = run_keys(w, (keys){.frozen = true}), *all;
    (void)state;
    outcome_same(exact, coded, "codes for frozen units, of which there are none");
    assert_int_equal(exact->plan[0].wire_host, coded->plan[0].wire_host);
    outcome_free(exact);
    outcome_free(coded);
    w.frozen = true;
    exact = run_keys(w, (keys){0});
    coded = run_keys(w, (keys){.frozen = true});
    all = run_keys(w, (keys){.weights = true, .frozen = true});
    assert_true(all->gather[0] < coded->gather[0] && coded->gather[0] < exact->gather[0]);
    assert_true(memcmp(exact->losses, coded->losses, sizeof exact->losses) != 0);
    assert_true(memcmp(all->losses, coded->losses, sizeof exact->losses) != 0);
    outcome_free(exact);
    outcome_free(coded);
    outcome_free(all);
}

/* One rank gathers nothing: the keys change no bit. */
static void
test_alone(void **state)
{
    const world w = {.ranks = 1, .steps = STEPS, .family = SPW_FAMILY_GPT2};
    outcome *exact = run_keys(w, (keys){0}), *coded = run_keys(w, (keys){.weights = true, .frozen = true});
    (void)state;
    outcome_same(exact, coded, "one rank");
    outcome_free(exact);
    outcome_free(coded);
}

/* ---------------------------------------------------------------- kept slices */

/* The bits of a run that keeps nothing, in every placement: two hosts; passes over tied and frozen units; of codes. */
static void
test_kept_same(void **state)
{
    world w = {.ranks = 4, .steps = STEPS, .family = SPW_FAMILY_GPT2, .per_host = 2};
    spw_config c;
    outcome *exact = run_keys(w, (keys){0});
    (void)state;
    compare_placements("kept by two of two hosts", w, (keys){.kept = 2}, 0, exact);
    outcome_free(exact);
    exact = run_keys(w, (keys){.weights = true});
    compare_placements("codes, kept by two of two hosts", w, (keys){.weights = true, .kept = 2}, 0, exact);
    memset(exact, 0, sizeof *exact);
    w = (world){.ranks = 4, .steps = STEPS, .family = SPW_FAMILY_GPT2, .frozen = true, .config = &c, .out = exact};
    keys_config(&c, (keys){0});
    c.run.micro_batches_per_pass = 2;
    if (SANITIZED == 0) {
        world_run(&w);
        compare_placements("kept by all, three passes, frozen units", w, (keys){.kept = 4}, 2, exact);
    }
    outcome_free(exact);
}

/*
 * With little room on the device every block is gathered in the forward and in the backward pass. Other hosts are asked once for
 * each generation, so never in a backward pass, and for what is frozen once altogether.
 */
static void
test_kept_bytes(void **state)
{
    world w = {.ranks = 4, .steps = STEPS, .family = SPW_FAMILY_GPT2, .per_host = 2};
    spw_config c;
    outcome *exact = outcome_new(), *kept = outcome_new();
    (void)state;
    for (int coded = 0; coded < 2; coded++) {
        double once, unit = coded ? 132.0 / 128 : 4;
        keys_config(&c, (keys){.weights = coded});
        c.zero.max_live_parameters = tight_elems(w.ranks);
        w.config = &c;
        memset(exact, 0, sizeof *exact);
        memset(kept, 0, sizeof *kept);
        w.out = exact;
        world_run(&w);
        c.zero.hpz_partition_size = 2;
        w.out = kept;
        world_run(&w);
        print_message("gathers from another host: %.2f of each unit, with slices %.2f\n",
                      (double)exact->far_gather[0] / (unit * (double)exact->padded / 2),
                      (double)kept->far_gather[0] / (unit * (double)exact->padded / 2));
        once = unit * (double)exact->padded / 2; /* half of the parts are on the other host */
        for (uint32_t r = 0; r < w.ranks; r++) {
            uint64_t taken = kept->taken[r] - exact->taken[r], want = (uint64_t)(unit * (double)exact->padded / 2);
            assert_true((double)exact->far_gather[r] > 1.4 * (STEPS + 1) * once);
            assert_true(fabs((double)kept->far_gather[r] - (STEPS + 1) * once) < 0.01 * once);
            assert_true(kept->gather[r] < exact->gather[r]);
            assert_int_equal(kept->plan[r].traffic[SPW_PACE_DEFAULT].h2d, kept->held[r] * 4);
            /* The store is asked once, too; now and then a part that came early had to make room before it was used. */
            assert_true(kept->h2d[r] >= (STEPS + 1) * kept->held[r] * 4);
            assert_true((double)kept->h2d[r] < 1.2 * (STEPS + 1) * (double)kept->held[r] * 4);
            assert_true(kept->parts[r] % (STEPS + 1) == 0 && exact->parts[r] * 5 > kept->parts[r] * 7);
            assert_int_equal(kept->plan[r].kept_host, spw_round_up(want, 4096));
            assert_int_equal(kept->plan[r].host_bytes - exact->plan[r].host_bytes - kept->plan[r].kept_host,
                             kept->plan[r].tables_host - exact->plan[r].tables_host);
            assert_int_equal(taken, kept->plan[r].kept_host);
        }
    }
    outcome_free(exact);
    outcome_free(kept);
}

/* ---------------------------------------------------------------- gradients as codes */

/*
 * Inside a host as many bytes as there are parts to sum up, in fp32; from each other host 68 bytes for 128 elements of this rank's
 * part. On one host nothing is different.
 */
static void
test_gradient_bytes(void **state)
{
    const uint32_t per_host[] = {2, 1};
    outcome *one, *coded;
    (void)state;
    for (int k = 0; k < 2; k++) {
        world w = {.ranks = k == 0 ? 4 : 3, .steps = STEPS, .family = SPW_FAMILY_GPT2, .per_host = per_host[k]};
        uint32_t hosts = w.ranks / per_host[k];
        coded = run_keys(w, (keys){.grads = true});
        one = run_keys(w, (keys){0});
        for (uint32_t r = 0; r < w.ranks; r++) {
            uint64_t part = coded->padded / w.ranks, far = (hosts - 1) * (part / 128) * 68;
            assert_int_equal(coded->far_reduce[r], STEPS * far);
            assert_int_equal(coded->reduce[r], STEPS * (far + hosts * (per_host[k] - 1) * part * 4));
            assert_int_equal(one->far_reduce[r], STEPS * (w.ranks - per_host[k]) * part * 4);
            assert_int_equal(coded->gather[r], one->gather[r]);
            assert_int_equal(coded->taken[r] - one->taken[r], coded->plan[r].wire_host);
            assert_true(coded->plan[r].wire_host > 0);
        }
        outcome_free(one);
        outcome_free(coded);
    }
    one = run_keys((world){.ranks = 2, .steps = STEPS, .family = SPW_FAMILY_GPT2}, (keys){0});
    coded = run_keys((world){.ranks = 2, .steps = STEPS, .family = SPW_FAMILY_GPT2}, (keys){.grads = true});
    outcome_same(one, coded, "gradients in 4 bits, one host");
    outcome_free(one);
    outcome_free(coded);
}

static void
test_gradient_placements(void **state)
{
    world w = {.ranks = 4, .steps = STEPS, .family = SPW_FAMILY_GPT2, .per_host = 2};
    outcome *again = run_keys(w, (keys){.grads = true});
    (void)state;
    compare_placements("gradients in 4 bits", w, (keys){.grads = true}, 0, again);
    compare_placements("gradients in 4 bits, kept by two", w, (keys){.grads = true, .kept = 2}, 0, again);
    outcome_free(again);
    w = (world){.ranks = 3, .steps = STEPS, .family = SPW_FAMILY_GPT2, .frozen = true, .per_host = 1};
    if (!SANITIZED)
        compare_placements("all codes, three hosts, two passes", w, (keys){.weights = true, .grads = true}, 5, NULL);
}

/* The first gradient is the exact one but for the codes' rounding: no host is left out or counted twice. */
static void
test_gradient_norm(void **state)
{
    const uint32_t per_host[] = {2, 1, 1};
    (void)state;
    for (uint32_t k = 0; k < 3; k++) {
        world w = {.ranks = 4 - k, .steps = 1, .family = SPW_FAMILY_GPT2, .per_host = per_host[k]};
        outcome *exact = run_keys(w, (keys){0}), *coded = run_keys(w, (keys){.grads = true});
        double off = gradient_distance(exact, coded);
        print_message("%u ranks on %u hosts: the gradient's norm is %.4f, exactly %.4f; it is off by %.3f of it\n",
                      w.ranks, w.ranks / w.per_host, coded->norm, exact->norm, off);
        assert_true(fabs(coded->norm - exact->norm) < 0.02 * exact->norm);
        assert_true(off > 0 && off < 0.1);
        outcome_free(exact);
        outcome_free(coded);
    }
}

static void
test_gradient_curve(void **state)
{
    const world w = {.ranks = 2, .steps = CURVE, .family = SPW_FAMILY_GPT2, .per_host = 1};
    outcome *exact = run_keys(w, (keys){0}), *coded = run_keys(w, (keys){.grads = true});
    (void)state;
    assert_curve(exact, coded, 0.05, "gradients in 4 bits");
    outcome_free(coded);
    coded = run_keys(w, (keys){.weights = true, .grads = true});
    assert_curve(exact, coded, 0.05, "weights in 8 and gradients in 4 bits");
    outcome_free(exact);
    outcome_free(coded);
}

/* ---------------------------------------------------------------- a device that the host cannot address */

/* What staging, codes and kept slices take, in host memory and on the device, is what the plan says: through the host, and linked. */
static void
test_emulated_memory(void **state)
{
    const keys all[] = {{.weights = true}, {.kept = 2}, {.grads = true}, {true, true, true, 2}};
    world w = {.ranks = 4, .family = SPW_FAMILY_GPT2, .per_host = 2};
    char nccl[1300], *slash;
    (void)state;
    if (!tiny_emulated_device())
        skip();
    w.plugin = getenv("SPW_CUDA_PLUGIN");
    snprintf(nccl, sizeof nccl, "%s", w.plugin);
    slash = strrchr(nccl, '/');
    snprintf(slash, sizeof nccl - (size_t)(slash - nccl), "/libnccl.so.2");
    for (int linked = 0; linked < 2; linked++) {
        outcome *exact = run_keys(w, (keys){0}), *coded;
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) {
            coded = run_keys(w, all[k]);
            for (uint32_t r = 0; r < w.ranks; r++) {
                const spw_plan *a = &exact->plan[r], *b = &coded->plan[r];
                uint64_t host = b->wire_host + b->kept_host - a->wire_host - a->kept_host;
                uint64_t device = b->device_bytes - a->device_bytes;
                assert_int_equal(device > 0, linked && (all[k].weights || all[k].grads));
                assert_int_equal(host > 0, !linked || all[k].kept > 0);
                assert_int_equal(coded->taken[r] - exact->taken[r], host + device);
                assert_int_equal(b->host_bytes - a->host_bytes, host + b->tables_host - a->tables_host);
            }
            outcome_free(coded);
        }
        outcome_free(exact);
        setenv("SPW_NCCL", nccl, 1); /* a device for each rank, and something to link them */
        setenv("SPW_EMULATE_DEVICES", "4", 1);
    }
    unsetenv("SPW_NCCL");
    unsetenv("SPW_EMULATE_DEVICES");
}

/* ---------------------------------------------------------------- refusals */

static void
test_refused(void **state)
{
    static const struct {
        uint32_t per_host, ranks;
        keys keys;
        spw_dtype comm_dtype;
        const char *says;
    } all[] = {{2, 4, {.kept = 3}, SPW_F32, "zero_hpz_partition_size 3 does not divide the 4 ranks"},
               {2,
                4,
                {.kept = 4},
                SPW_F32,
                "zero_hpz_partition_size 4: ranks 0 and 2 would keep weights together and are on different hosts"},
               {2,
                3,
                {.grads = true},
                SPW_F32,
                "zero_quantized_gradients needs as many ranks on every host, in a row; these 3 ranks are on 2 hosts"},
               {1,
                2,
                {.grads = true},
                SPW_BF16,
                "zero_optimization.zero_quantized_gradients and communication_data_type bf16"}};
    (void)state;
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
        spw_config c;
        keys_config(&c, all[k].keys);
        c.comm_dtype = all[k].comm_dtype;
        world_refused(&c, SPW_FAMILY_GPT2, all[k].per_host, all[k].ranks, all[k].says);
    }
}

/* ---------------------------------------------------------------- checkpoints */

typedef struct said {
    char text[2048];
} said;

static void
say(void *ctx, const char *text)
{
    said *s = ctx;
    size_t n = strlen(s->text);
    snprintf(s->text + n, sizeof s->text - n, "%s\n", text);
}

/* One that can be read again from a checkpoint; its model is put in its place by world_run. */
static void
savable_config(spw_config *c, keys k)
{
    const char *text = "{\"model\": {\"model_type\": \"gpt2\", \"n_embd\": 8, \"n_layer\": 1, \"n_head\": 1}, "
                       "\"data\": {\"path\": \"text\", \"seq_length\": 24}, "
                       "\"train_micro_batch_size_per_gpu\": 2, \"zero_optimization\": {\"stage\": 3, "
                       "\"offload_param\": {\"device\": \"cpu\"}, \"offload_optimizer\": {\"device\": \"cpu\"}}, "
                       "\"spillway\": {\"device\": \"cpu\", \"chunk_elems\": 4096, \"compute_threads\": 1}}";
    spw_error err = {0};
    if (spw_config_parse(c, text, "run.json", NULL, 0, &err) != SPW_OK)
        fail_msg("%s", err.message);
    use_keys(c, k);
}

/* What is saved is exact: it loads without the keys, on another number of ranks; that they decide the result is said. */
static void
test_resume(void **state)
{
    outcome *saved = outcome_new(), *loaded = outcome_new();
    spw_config c;
    char dir[256], save[300], found[SPW_PATH_BYTES];
    said s = {""};
    uint32_t count = 0;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    snprintf(save, sizeof save, "%s/out", dir);
    savable_config(&c, (keys){.weights = true, .grads = true, .kept = 3});
    world_run(
        &(world){.ranks = 3, .steps = STEPS, .config = &c, .family = SPW_FAMILY_GPT2, .save = save, .out = saved});
    assert_int_equal(spw_checkpoint_find(save, found, &err), SPW_OK);
    savable_config(&c, (keys){0});
    world_run(&(world){
        .ranks = 2, .first_step = STEPS, .config = &c, .family = SPW_FAMILY_GPT2, .load = save, .out = loaded});
    for (int p = 0; p < PARTS; p++)
        assert_memory_equal(saved->state[p], loaded->state[p], saved->elems * sizeof(float));
    tiny_model_config(&c.model, SPW_FAMILY_GPT2);
    c.run.ranks = 3;
    c.accumulation = MICRO / 3;
    c.train_batch_size = MICRO * c.micro_batch;
    use_keys(&c, (keys){.weights = true, .grads = true}); /* what is kept does not decide */
    (void)spw_checkpoint_compare(found, &c, NULL, say, &s, &count, &err);
    assert_null(strstr(s.text, "zero_optimization."));
    c.run.expert_turns = 4; /* it decides what is coded, if anything is */
    (void)spw_checkpoint_compare(found, &c, NULL, say, &s, &count, &err);
    assert_non_null(strstr(s.text, "spillway.expert_turns: 0 in the checkpoint, 4 now"));
    s.text[0] = '\0';
    use_keys(&c, (keys){0});
    (void)spw_checkpoint_compare(found, &c, NULL, say, &s, &count, &err);
    assert_null(strstr(s.text, "expert_turns"));
    if (strstr(s.text, "zero_optimization.zero_quantized_weights: true in the checkpoint, false now") == NULL)
        fail_msg("%u differences: %s%s", count, s.text, err.message);
    tiny_dir_remove(dir);
    outcome_free(saved);
    outcome_free(loaded);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_code_bytes),
        cmocka_unit_test(test_code_placements),
        cmocka_unit_test(test_code_values),
        cmocka_unit_test(test_gradient_norm),
        cmocka_unit_test(test_code_curve),
        cmocka_unit_test(test_frozen_codes),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_kept_same),
        cmocka_unit_test(test_kept_bytes),
        cmocka_unit_test(test_gradient_bytes),
        cmocka_unit_test(test_gradient_placements),
        cmocka_unit_test(test_gradient_curve),
        cmocka_unit_test(test_emulated_memory),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_resume),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
