/*
 * Mixtures of experts whose weights do not fit. Generation: few rows fetch the experts that they choose, many rows all of
 * them, and both give the same bits, wherever the weights are; what is read is counted. Training: a loss spreads the rows.
 */
#include "lib_rig.h"
#include "runtime_internal.h"
#include "spw_access.h"
#include "spw_generate.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

enum { EXPERTS = 16, CHOICES = 2, WIDTH = 64, LAYERS = 3, VOCAB = 61, MANY = EXPERTS, TOKENS = 10, PROMPT = 3 };
enum { EXPERT_ELEMS = 3 * WIDTH * WIDTH, COMMON_ELEMS = 16384 }; /* of a layer: attention, norms and router, padded */

typedef struct subject {
    char dir[256];
    spw_config c;
    spw_model *model;
    spw_generator *g;
} subject;

typedef struct kind {
    spw_tier tier;
    uint64_t chunk, live, chaos;
    uint32_t slots;
    const char *codes;
    uint32_t turns; /* in which a layer's experts come; 0: as few as there is room for */
    bool paired;    /* gpt-oss */
} kind;

static void
open_subject(subject *s, const kind *k, uint32_t slots)
{
    spw_error err = {0};
    memset(s, 0, sizeof *s);
    tiny_dir_make(s->dir);
    tiny_config(&s->c, SPW_STATE_SPLIT);
    tiny_model_config(&s->c.model, k->paired ? SPW_FAMILY_GPT_OSS : SPW_FAMILY_QWEN3_MOE);
    s->c.model.width = s->c.model.mlp_width = WIDTH;
    s->c.model.experts = EXPERTS;
    s->c.model.choices = CHOICES;
    s->c.model.init_std = 0.2; /* rows choose differently */
    s->c.zero.offload_param = k->tier;
    s->c.zero.param_path.count = 1;
    snprintf(s->c.zero.param_path.item[0], SPW_PATH_BYTES, "%s", s->dir);
    s->c.run.chunk_elems = k->chunk;
    s->c.run.weight_slots = k->slots;
    s->c.run.chaos_seed = k->chaos;
    s->c.run.expert_turns = k->turns;
    if (k->live > 0)
        s->c.zero.max_live_parameters = k->live;
    snprintf(s->c.run.frozen_codes, sizeof s->c.run.frozen_codes, "%s", k->codes != NULL ? k->codes : "none");
    DONE(spw_model_from_config(&s->model, &s->c, &err));
    spw_model_freeze(s->model, "*");
    DONE(spw_generator_create(
        &s->g,
        &(spw_generator_options){.config = &s->c, .model = s->model, .slots = slots, .positions = PROMPT + TOKENS + 1},
        &err));
    DONE(spw_engine_init_params(spw_generator_engine(s->g), 7, &err));
}

static void
close_subject(subject *s)
{
    spw_generator_destroy(s->g);
    spw_model_destroy(s->model);
    tiny_dir_remove(s->dir);
}

static uint64_t
read_bytes(const subject *s)
{
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(spw_generator_engine(s->g)), &stats);
    return stats.nvme_read_bytes;
}

/* The same text in `count` slots, token by token after the prompt; slot 0's logits. *read: bytes of the last token. */
static void
generate(subject *s, uint32_t count, float out[TOKENS][VOCAB], uint64_t *most_read)
{
    spw_error err = {0};
    *most_read = 0;
    for (uint32_t i = 0; i < count; i++) {
        spw_generator_clear(s->g, i);
        DONE(spw_generator_feed(s->g, i, (int32_t[PROMPT]){5, 17, 40}, PROMPT, &err));
    }
    for (int t = 0; t < TOKENS; t++) {
        uint64_t before = read_bytes(s), now;
        DONE(spw_generator_forward(s->g, &err));
        now = read_bytes(s) - before;
        *most_read = t > 1 && now > *most_read ? now : *most_read;
        memcpy(out[t], spw_generator_logits(s->g, 0), sizeof out[t]);
        for (uint32_t i = 0; i < count; i++) {
            int32_t token = spw_sample(spw_generator_logits(s->g, i), VOCAB, &(spw_sampling){.top_p = 1}, 0,
                                       (spw_candidate[VOCAB]){{0, 0}});
            DONE(spw_generator_feed(s->g, i, &token, 1, &err));
        }
    }
}

/* A layer's units alone fit on the device: common ones and all experts, each in multiples of an expert. */
enum { LAYER_ELEMS = (EXPERTS + (COMMON_ELEMS + EXPERT_ELEMS - 1) / EXPERT_ELEMS) * EXPERT_ELEMS };

static const kind kinds[] = {{SPW_TIER_DEVICE, 8192, 0, 0, 0, NULL, 0, false},
                             {SPW_TIER_HOST, 8192, 0, 0, 0, NULL, 0, false},
                             {SPW_TIER_HOST, 8192, LAYER_ELEMS, 0, 0, NULL, 0, false},
                             {SPW_TIER_NVME, 8192, 0, 0, 0, NULL, 0, false},
                             {SPW_TIER_NVME, 4096, LAYER_ELEMS, 0, 1, NULL, 0, false},
                             {SPW_TIER_NVME, 4096, LAYER_ELEMS, 51, 2, NULL, 0, false},
                             {SPW_TIER_NVME, 8192, LAYER_ELEMS + 5 * EXPERT_ELEMS, 52, 3, NULL, 0, false},
                             {SPW_TIER_HOST, 8192, 1, 0, 0, NULL, 3, false},
                             {SPW_TIER_NVME, 4096, 1, 0, 1, NULL, 8, false},
                             {SPW_TIER_NVME, 4096, 1, 53, 2, NULL, EXPERTS, false},
                             {SPW_TIER_DEVICE, 8192, 1, 0, 0, NULL, 2, false}};

/* One sequence, and sixteen of the same, of every kind: the logits of the first. */
static void
compare(const kind *all, size_t count)
{
    static float want[TOKENS][VOCAB], got[TOKENS][VOCAB];
    uint64_t most;
    for (size_t k = 0; k < count; k++) {
        for (uint32_t slots = 1; slots <= MANY; slots += MANY - 1) {
            bool first = k == 0 && slots == 1;
            subject s;
            open_subject(&s, &all[k], slots);
            if (all[k].turns > 2)
                assert_true(spw_engine_plan(spw_generator_engine(s.g))->cache_device < LAYER_ELEMS * 4);
            generate(&s, slots, first ? want : got, &most);
            if (!first)
                assert_memory_equal(want, got, sizeof want);
            close_subject(&s);
        }
    }
}

/* One sequence fetches what it chooses; sixteen of the same fetch all. Every placement, with and without: the same bits. */
static void
test_same_bits(void **state)
{
    (void)state;
    compare(kinds, sizeof kinds / sizeof kinds[0]);
}

/* The same of experts with one matrix for gate and up, in their files' order, and biases. */
static void
test_paired(void **state)
{
    static const kind tiers[] = {
        {.tier = SPW_TIER_DEVICE, .chunk = 8192, .paired = true},
        {.tier = SPW_TIER_HOST, .chunk = 8192, .paired = true},
        {.tier = SPW_TIER_NVME, .chunk = 4096, .chaos = 54, .slots = 2, .paired = true},
        {.tier = SPW_TIER_NVME, .chunk = 4096, .live = 1, .slots = 2, .paired = true, .turns = 5}};
    (void)state;
    compare(tiers, sizeof tiers / sizeof tiers[0]);
}

/* Frozen weights stored as codes: the same bits on host and from disk. */
static void
test_codes(void **state)
{
    static const kind coded[] = {{SPW_TIER_HOST, 8192, 0, 0, 0, "int4", 0, false},
                                 {SPW_TIER_NVME, 4096, LAYER_ELEMS, 53, 1, "int4", 0, false},
                                 {SPW_TIER_NVME, 4096, 1, 54, 1, "int4", 6, false}};
    static float want[TOKENS][VOCAB], got[TOKENS][VOCAB];
    uint64_t most;
    (void)state;
    for (int k = 0; k < 3; k++) {
        subject s;
        open_subject(&s, &coded[k], 1);
        generate(&s, 1, k == 0 ? want : got, &most);
        close_subject(&s);
        if (k > 0)
            assert_memory_equal(want, got, sizeof want);
    }
}

/*
 * With room for one layer a token reads its layers' common weights, the experts that it chooses and the head, which is the
 * embeddings; sixteen sequences read nearly everything.
 */
static void
test_bytes(void **state)
{
    static float logits[TOKENS][VOCAB];
    const kind tight = {SPW_TIER_NVME, 4096, LAYER_ELEMS, 0, 1, NULL, 0, false};
    const kind tightest = {SPW_TIER_NVME, 4096, 1, 0, 1, NULL, EXPERTS, false};
    uint64_t few, many, chosen = LAYERS * (COMMON_ELEMS + CHOICES * EXPERT_ELEMS) * 2 + 2 * 4096 * 2;
    subject s;
    (void)state;
    open_subject(&s, &tight, 1);
    generate(&s, 1, logits, &few);
    close_subject(&s);
    open_subject(&s, &tight, MANY);
    generate(&s, MANY, logits, &many);
    close_subject(&s);
    print_message("a token reads %llu bytes, of sixteen sequences %llu; chosen are %llu\n", (unsigned long long)few,
                  (unsigned long long)many, (unsigned long long)chosen);
    assert_true(few > 0 && few <= chosen);
    open_subject(&s, &tightest, 1);
    generate(&s, 1, logits, &few);
    close_subject(&s);
    print_message("with room for one expert at a time a token reads %llu\n", (unsigned long long)few);
    assert_true(few > 0 && few <= 2 * chosen); /* what is begun ahead is dropped now and then */
    assert_true(many >= 2 * EXPERTS / 3 * EXPERT_ELEMS * 2 && many > 2 * few);
}

/* ---------------------------------------------------------------- many of them */

static double
processor_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Every parameter of a chunk is found, once, with what it has there: against a search through all of them. */
static void
check_stretches(const spw_layout *l)
{
    for (uint32_t i = 0; i < l->chunk_count; i++) {
        uint32_t found = 0, want = 0;
        uint64_t before = 0;
        for (layout_stretch s = {0}; spw__layout_next(l, &l->chunks[i], &s); found++) {
            uint64_t first, end;
            assert_true(spw__layout_overlap(&l->places[s.id], &l->chunks[i], &first, &end));
            assert_true(s.first == first && s.end == end && first >= before);
            before = end;
        }
        for (uint32_t id = 0; id < l->param_count; id++) {
            uint64_t first, end;
            want += spw__layout_overlap(&l->places[id], &l->chunks[i], &first, &end);
        }
        assert_int_equal(found, want);
    }
}

static void
test_stretches(void **state)
{
    (void)state;
    for (uint32_t k = 0; k < 16; k++) {
        spw_error err = {0};
        spw_quant *forms;
        spw_layout l;
        rig r;
        rig_config(&r, k & 1 ? SPW_FAMILY_QWEN3_MOE : SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
        r.c.model.mlp_width = 8192;
        if (k & 2)
            rig_freeze_mlps(&r);
        DONE(spw_model_from_config(&r.model, &r.c, &err));
        forms = calloc(r.model->param_count, sizeof *forms);
        for (uint32_t id = 0; id < r.model->param_count; id++)
            forms[id] = id % 3 > 0 ? SPW_QUANT_INT8 : SPW_QUANT_INT4;
        for (uint32_t part = 0; part < 3; part++) {
            DONE(spw_layout_make(&l, r.model, k & 4 ? 4096 : 65536, (k & 1) == 0 || part > 0, part == 0 ? 1 : 0,
                                 k & 8 ? forms : NULL, (k & 2) == 0, 0, part > 0 ? part - 1 : 0, part > 0 ? 2 : 1,
                                 &err));
            check_stretches(&l);
            spw_layout_free(&l);
        }
        free(forms);
        spw_model_destroy(r.model);
        tiny_dir_remove(r.dir);
    }
}

/*
 * The layout of a mixture as large as they come, 36 000 parameters in 120 000 chunks: what every chunk has of them is found in
 * processor time that does not grow with one times the other.
 */
static void
test_large_layout(void **state)
{
    spw_error err = {0};
    spw_layout l;
    rig r;
    uint64_t elems = 0;
    double began;
    (void)state;
    rig_config(&r, SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, SPW_TIER_HOST);
    r.c.model.layers = 94;
    r.c.model.experts = 128;
    r.c.model.width = 4096;
    r.c.model.mlp_width = 1536;
    DONE(spw_model_from_config(&r.model, &r.c, &err));
    began = processor_seconds();
    DONE(spw_layout_make(&l, r.model, 2 << 20, true, 0, NULL, false, 0, 0, 1, &err));
    for (uint32_t i = 0; i < l.chunk_count; i++) {
        for (layout_stretch s = {0}; spw__layout_next(&l, &l.chunks[i], &s);)
            elems += s.end - s.first;
    }
    print_message("%u parameters in %u chunks: %.3f s\n", l.param_count, l.chunk_count, processor_seconds() - began);
    assert_true(l.param_count > 36000 && l.chunk_count > 100000);
    assert_int_equal(elems, l.params);
    assert_true(processor_seconds() - began < 1.5);
    spw_layout_free(&l);
    spw_model_destroy(r.model);
    tiny_dir_remove(r.dir);
}

/* Of processor time: many small parameters drawn, written and read. */
static double
seconds_of(uint64_t layers)
{
    spw_error err = {0};
    spw_engine *e;
    rig r;
    char folder[400];
    double began;
    rig_config(&r, SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, SPW_TIER_HOST);
    r.c.model.layers = layers;
    r.c.model.experts = 128;
    r.c.model.choices = 1;
    r.c.model.mlp_width = 8;
    r.c.run.chunk_elems = 4096;
    snprintf(folder, sizeof folder, "%s/weights", r.dir);
    DONE(spw_model_from_config(&r.model, &r.c, &err));
    DONE(spw_engine_create(&e, &(spw_engine_options){.config = &r.c, .model = r.model, .inference = true}, &err));
    began = processor_seconds();
    DONE(spw_engine_init_params(e, 7, &err));
    DONE(spw_engine_save_16bit(e, folder, SPW_BF16, &err));
    DONE(spw_engine_load_weights(e, folder, &err));
    began = processor_seconds() - began;
    spw_engine_destroy(e);
    spw_model_destroy(r.model);
    tiny_dir_remove(r.dir);
    return began;
}

/*
 * Twice as many take twice as long: each chunk takes what is in it, each tensor's name one search among the parameters. Where a chunk looked at
 * all of them it was four times as long. The least of five counts.
 */
static void
test_many(void **state)
{
    double half = INFINITY, all = INFINITY;
    (void)state;
    for (int round = 0; round < (SANITIZED ? 1 : 5); round++) {
        half = fmin(half, seconds_of(47));
        all = fmin(all, seconds_of(94));
    }
    print_message("18 thousand parameters %.2f s, 36 thousand %.2f s\n", half, all);
    assert_true(SANITIZED || all < 3 * half); /* with them once, for memory */
}

/* ---------------------------------------------------------------- training */

/* A loss of balance spreads rows over experts; without it a few take most of them. Losses stay those of the text. */
static void
test_balance(void **state)
{
    double peak[2] = {0, 0}, first[2];
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_MIXTRAL, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.model.experts = EXPERTS;
        r.c.run.router_balance = k == 0 ? 0 : 0.5;
        r.c.optimizer.lr = 1e-2;
        rig_open(&r);
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        for (int s = 0; s < 40; s++) {
            spw_step_result result;
            uint64_t n = r.c.micro_batch * r.c.accumulation * r.c.data.seq_length;
            tiny_batch((uint64_t)s, r.c.model.vocab, n, rig_tokens, rig_targets);
            rig_need(&r, spw_engine_step(r.e, rig_tokens, rig_targets, (uint32_t)r.c.accumulation, r.c.optimizer.lr,
                                         &result, &r.err));
            if (s == 0)
                first[k] = result.loss;
            peak[k] += s < 20 ? 0 : result.expert_peak / 20;
        }
        rig_remove(&r);
    }
    print_message("busiest expert: %.2f times the mean, with balance %.2f\n", peak[0], peak[1]);
    assert_true(first[0] == first[1]);
    assert_true(peak[1] >= 1 && peak[0] > 1.2 * peak[1]);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_paired),    cmocka_unit_test(test_codes),
        cmocka_unit_test(test_bytes),     cmocka_unit_test(test_stretches), cmocka_unit_test(test_large_layout),
        cmocka_unit_test(test_many),      cmocka_unit_test(test_balance),
    };
    return cmocka_run_group_tests_name("experts", tests, NULL, NULL);
}
