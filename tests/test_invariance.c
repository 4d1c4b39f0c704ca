/*
 * The test that matters most: where state lives changes the speed, never a bit. One small model is trained in every
 * placement; losses and final state must be the same bytes.
 */
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

enum { STEPS = 6 };

typedef struct variant {
    const char *name;
    spw_tier param, optimizer;
    uint64_t chunk;
    uint32_t slots, threads;
    spw_aio_backend backend;
    bool no_prefetch, half;
    uint64_t chaos;
} variant;

static const variant variants[] = {
    {"device", SPW_TIER_DEVICE, SPW_TIER_DEVICE, 8192, 0, 2, SPW_AIO_AUTO, false, false, 0},
    {"host", SPW_TIER_HOST, SPW_TIER_HOST, 8192, 0, 2, SPW_AIO_AUTO, false, false, 0},
    {"nvme", SPW_TIER_NVME, SPW_TIER_NVME, 8192, 0, 2, SPW_AIO_AUTO, false, false, 0},
    {"records on nvme, weights on host", SPW_TIER_HOST, SPW_TIER_NVME, 8192, 0, 2, SPW_AIO_AUTO, false, false, 0},
    {"half host, half nvme", SPW_TIER_NVME, SPW_TIER_NVME, 8192, 0, 2, SPW_AIO_AUTO, false, true, 0},
    {"chunks of 4096", SPW_TIER_NVME, SPW_TIER_NVME, 4096, 0, 2, SPW_AIO_AUTO, false, false, 0},
    {"chunks of 1M", SPW_TIER_NVME, SPW_TIER_NVME, 1048576, 0, 2, SPW_AIO_AUTO, false, false, 0},
    {"no prefetch", SPW_TIER_NVME, SPW_TIER_NVME, 8192, 0, 2, SPW_AIO_AUTO, true, false, 0},
    {"many slots", SPW_TIER_NVME, SPW_TIER_NVME, 4096, 64, 2, SPW_AIO_AUTO, false, false, 0},
    {"threads backend", SPW_TIER_NVME, SPW_TIER_NVME, 8192, 0, 2, SPW_AIO_THREADS, false, false, 0},
    {"1 optimizer thread", SPW_TIER_NVME, SPW_TIER_NVME, 8192, 0, 1, SPW_AIO_AUTO, false, false, 0},
    {"5 optimizer threads", SPW_TIER_NVME, SPW_TIER_NVME, 4096, 0, 5, SPW_AIO_AUTO, false, false, 0},
    {"one slot", SPW_TIER_NVME, SPW_TIER_NVME, 4096, 1, 2, SPW_AIO_AUTO, false, false, 0},
    {"one slot, threads", SPW_TIER_NVME, SPW_TIER_NVME, 4096, 1, 5, SPW_AIO_THREADS, true, false, 0},
    {"chaos", SPW_TIER_NVME, SPW_TIER_NVME, 4096, 2, 3, SPW_AIO_AUTO, false, false, 11},
    {"chaos, half", SPW_TIER_NVME, SPW_TIER_NVME, 4096, 0, 3, SPW_AIO_THREADS, false, true, 12},
};

static void
run_optimizer(const char *type, double lr, spw_family family, spw_state_format format, double clipping)
{
    double want[STEPS], got[STEPS];
    uint64_t want_digest = 0;
    char dir[256];
    static size_t turn;
    tiny_dir_make(dir);
    turn++;
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        const variant *v = &variants[i];
        spw_config c;
        uint64_t digest;
        if (SANITIZED && i > 0 && v->chaos == 0 && (i + turn) % 4 > 0)
            continue; /* bits are compared without them: each variant with some formats */
        tiny_config(&c, format);
        snprintf(c.optimizer.type, sizeof c.optimizer.type, "%s", type);
        c.optimizer.lr = lr;
        c.optimizer.momentum = 0.9;
        c.gradient_clipping = clipping;
        c.zero.offload_param = v->param;
        c.zero.offload_optimizer = v->optimizer;
        c.zero.param_path.count = c.zero.optimizer_path.count = 1;
        snprintf(c.zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
        snprintf(c.zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
        c.run.chunk_elems = v->chunk;
        c.run.weight_slots = c.run.record_slots = v->slots;
        c.run.optimizer_threads = v->threads;
        c.aio.backend = v->backend;
        c.run.prefetch = !v->no_prefetch;
        c.run.chaos_seed = v->chaos;
        c.zero.optimizer_ratio = i % 4 == 3 ? 0.4 : 1; /* the first units' state is on the device all the same */
        if (v->optimizer == SPW_TIER_NVME && i % 2 == 1)
            snprintf(c.run.gradients, sizeof c.run.gradients, "nvme");
        if (v->half) {
            c.run.weight_slots = c.run.record_slots = 1; /* in the room of more everything would fit */
            c.run.host_memory = tiny_half_budget(&c, family);
        }
        digest = tiny_train(&c, family, STEPS, i == 0 ? want : got);
        if (i == 0) {
            want_digest = digest;
            assert_true(want[STEPS - 1] < want[0]);
            continue;
        }
        for (int s = 0; s < STEPS; s++) {
            if (memcmp(&want[s], &got[s], sizeof want[s]) != 0)
                fail_msg("%s %s, %s: loss of step %d is %.17g, on device it was %.17g", type, spw_state_name(format),
                         v->name, s + 1, got[s], want[s]);
        }
        if (digest != want_digest)
            fail_msg("%s %s, %s: the final state differs from the run on device", type, spw_state_name(format),
                     v->name);
    }
    tiny_dir_remove(dir);
}

static void
run_all(spw_family family, spw_state_format format, double clipping)
{
    run_optimizer("AdamW", 1e-2, family, format, clipping);
}

/* GPT-2 with fp32 state: the same bytes in all placements, chunk sizes, slots, backends and thread counts. */
static void
test_gpt2_fp32(void **state)
{
    (void)state;
    run_all(SPW_FAMILY_GPT2, SPW_STATE_FP32, 1.0);
}

/* The same with a bf16 copy of the weights. */
static void
test_gpt2_mixed(void **state)
{
    (void)state;
    run_all(SPW_FAMILY_GPT2, SPW_STATE_MIXED, 1.0);
}

/* The same with split weights. */
static void
test_gpt2_split(void **state)
{
    (void)state;
    run_all(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1.0);
}

/* split is a way to store mixed: training in one or the other gives the same losses and the same masters and moments. */
static void
test_split_is_mixed(void **state)
{
    double loss[2][4 * STEPS];
    uint64_t digest[2];
    (void)state;
    for (int k = 0; k < 2; k++) {
        spw_config c;
        tiny_config(&c, k == 0 ? SPW_STATE_MIXED : SPW_STATE_SPLIT);
        c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
        digest[k] = tiny_train(&c, SPW_FAMILY_GPT2, 4 * STEPS, loss[k]);
    }
    assert_memory_equal(loss[0], loss[1], sizeof loss[0]);
    assert_int_equal(digest[0], digest[1]);
}

/* Llama in all three formats; without clipping updates run during backward. */
static void
test_llama(void **state)
{
    (void)state;
    run_all(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0.0);
    run_all(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, 1.0);
    run_all(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 0.0);
    run_all(SPW_FAMILY_MIXTRAL, SPW_STATE_FP32, 0.0);
    run_all(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, 1.0);
    run_all(SPW_FAMILY_PHI3, SPW_STATE_SPLIT, 0.0);
    run_all(SPW_FAMILY_QWEN2_MOE, SPW_STATE_FP32, 1.0);
    run_all(SPW_FAMILY_GEMMA3, SPW_STATE_MIXED, 1.0);
    run_all(SPW_FAMILY_GEMMA2, SPW_STATE_SPLIT, 1.0);
    run_all(SPW_FAMILY_GPT_OSS, SPW_STATE_SPLIT, 1.0);
}

/*
 * Checkpoints of activations on the device, in host memory, on nvme and in all three, what lies between them kept, computed
 * again or half of each, with random delays and poisoned buffers: the same bytes. In each number of passes for itself: it changes the order of sums.
 */
static void
test_activations(void **state)
{
    static const struct {
        const char *name;
        spw_tier tier;
        bool mixed, state_on_nvme;
        const char *recompute;
        spw_aio_backend backend;
        uint64_t chaos;
    } kinds[] = {{"device, all computed again", SPW_TIER_DEVICE, false, false, "always", SPW_AIO_AUTO, 0},
                 {"device, nothing computed again", SPW_TIER_DEVICE, false, false, "auto", SPW_AIO_AUTO, 0},
                 {"device, half of it computed again", SPW_TIER_DEVICE, false, false, "half", SPW_AIO_AUTO, 0},
                 {"host", SPW_TIER_HOST, false, false, "auto", SPW_AIO_AUTO, 0},
                 {"nvme", SPW_TIER_NVME, false, false, "auto", SPW_AIO_AUTO, 0},
                 {"mixed by budget", SPW_TIER_COUNT, true, false, "auto", SPW_AIO_AUTO, 0},
                 {"nvme with everything else", SPW_TIER_NVME, false, true, "auto", SPW_AIO_AUTO, 0},
                 {"device, chaos", SPW_TIER_DEVICE, false, false, "always", SPW_AIO_AUTO, 21},
                 {"device, state on nvme, half of it computed again, chaos", SPW_TIER_DEVICE, false, true, "half",
                  SPW_AIO_AUTO, 26},
                 {"host, chaos", SPW_TIER_HOST, false, false, "auto", SPW_AIO_AUTO, 22},
                 {"nvme, chaos", SPW_TIER_NVME, false, true, "auto", SPW_AIO_AUTO, 23},
                 {"nvme, threads, chaos", SPW_TIER_NVME, false, false, "auto", SPW_AIO_THREADS, 24},
                 {"mixed, chaos", SPW_TIER_COUNT, true, false, "auto", SPW_AIO_AUTO, 25}};
    double want[3][STEPS], got[STEPS];
    uint64_t want_digest[3];
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (int family = 0; family < 2; family++) {
        for (size_t k = 0; k < 3 * sizeof kinds / sizeof kinds[0]; k++) {
            spw_config c;
            uint64_t digest;
            if (k >= 3 && (k / 3 + k % 3 + (size_t)family) % 2 != 0)
                continue; /* each family takes half of them */
            if (SANITIZED && k % 3 < 2)
                continue; /* with them, for two a pass */
            tiny_config(&c, SPW_STATE_SPLIT);
            c.accumulation = 4;
            c.micro_batch = 8;
            c.aio.queue_depth = 4; /* transfers take memory too, and little is left to share */
            c.aio.thread_count = 1;
            c.data.seq_length = 40;
            c.run.micro_batches_per_pass = k % 3;
            c.run.activations = kinds[k / 3].tier;
            c.run.chaos_seed = kinds[k / 3].chaos;
            c.aio.backend = kinds[k / 3].backend;
            c.zero.optimizer_path.count = 1;
            snprintf(c.zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
            c.zero.param_path = c.zero.optimizer_path;
            if (kinds[k / 3].state_on_nvme)
                c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_NVME;
            if (kinds[k / 3].mixed) {
                if (k % 3 == 1)
                    continue; /* too few checkpoints to share */
                tiny_mix_activations(&c, family ? SPW_FAMILY_LLAMA : SPW_FAMILY_GPT2);
            }
            snprintf(c.run.recompute, sizeof c.run.recompute, "%s",
                     strcmp(kinds[k / 3].recompute, "always") == 0 ? "always" : "auto");
            if (strcmp(kinds[k / 3].recompute, "half") == 0)
                tiny_keep_half(&c, family ? SPW_FAMILY_LLAMA : SPW_FAMILY_GPT2);
            digest = tiny_train(&c, family ? SPW_FAMILY_LLAMA : SPW_FAMILY_GPT2, STEPS, k < 3 ? want[k] : got);
            if (k < 3)
                want_digest[k] = digest;
            else if (memcmp(want[k % 3], got, sizeof got) != 0 || digest != want_digest[k % 3])
                fail_msg("activations %s, %llu a pass: other losses or another state than all computed again",
                         kinds[k / 3].name, (unsigned long long)c.run.micro_batches_per_pass);
        }
    }
    tiny_dir_remove(dir);
}

/* Formats that round the moments round them the same everywhere: stochastic rounding is keyed by element, not by chunk. */
static void
test_lossy_formats(void **state)
{
    (void)state;
    run_all(SPW_FAMILY_GPT2, SPW_STATE_SPLIT_BF16, 1.0);
    run_all(SPW_FAMILY_GPT2, SPW_STATE_SPLIT_INT8, 0.0);
    run_all(SPW_FAMILY_GPT2, SPW_STATE_SPLIT24_INT8, 1.0);
}

/* The other optimizers, whose records have other sizes. */
static void
test_other_optimizers(void **state)
{
    (void)state;
    run_optimizer("Adagrad", 1e-2, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1.0);
    run_optimizer("Lion", 1e-3, SPW_FAMILY_GPT2, SPW_STATE_SPLIT_INT8, 1.0);
    run_optimizer("Lion", 1e-3, SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0.0);
    run_optimizer("SGD", 1e-1, SPW_FAMILY_GPT2, SPW_STATE_MIXED, 0.0);
    run_optimizer("SGD", 1e-1, SPW_FAMILY_GPT2, SPW_STATE_SPLIT_BF16, 1.0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_fp32),     cmocka_unit_test(test_gpt2_mixed),
        cmocka_unit_test(test_gpt2_split),    cmocka_unit_test(test_split_is_mixed),
        cmocka_unit_test(test_llama),         cmocka_unit_test(test_activations),
        cmocka_unit_test(test_lossy_formats), cmocka_unit_test(test_other_optimizers),
    };
    return cmocka_run_group_tests_name("invariance", tests, NULL, NULL);
}
