/*
 * Random small models that generate in random placements: whatever the tiers, device memory, slots, chunks, codes, threads and
 * delays, and whatever other texts go through the same passes, logits are the bytes of each text alone with everything on the
 * device. SPW_SEED and SPW_RUNS choose others and more of them.
 */
#include "lib_random.h"
#include "lib_tiny.h"
#include "spw_generate.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum {
    MODELS = SANITIZED ? 12 : 40,
    PLACEMENTS = 4,
    TEXTS = 4,
    TOKENS = 8,     /* that are drawn */
    POSITIONS = 36, /* as many as one of the families has */
    VOCAB_MAX = 256,
    SECONDS_MAX = SANITIZED ? 120 : 60
};

/* What follows a prompt, and the logits that it was drawn by. */
typedef struct story {
    int32_t ids[TOKENS];
    float logits[TOKENS][VOCAB_MAX];
} story;

static uint32_t told, refused;

/* What decides about bits. */
static void
draw_model(uint64_t run, spw_config *c, spw_model_config *m)
{
    static const spw_state_format formats[] = {SPW_STATE_FP32, SPW_STATE_MIXED, SPW_STATE_SPLIT};
    static const char *const codes[] = {"", "int8", "int4"}, *const tensors[] = {"*", "*up_proj", "down_proj"};
    tiny_config(c, formats[random_pick(run, 0, 3)]);
    tiny_model_config(m, random_family(run, 1));
    m->layers = 1 + (uint32_t)random_pick(run, 2, 5);
    m->vocab = 61 + random_pick(run, 3, VOCAB_MAX - 61);
    m->mlp_width = m->experts > 0 ? 24 + 8 * random_pick(run, 4, 8) : 64 + 8 * random_pick(run, 4, 40);
    if (m->shared_width > 0 && !m->shared_gated)
        m->shared_width = m->mlp_width;
    tiny_model_fit(m);
    m->tied = random_pick(run, 5, 2) == 0;
    if (m->index_keys > 0)
        m->index_keys = 1 + random_pick(run, 80, 24);
    if (m->linear_heads > 0) {
        m->full_every = 1 + random_pick(run, 12, 5);
        m->linear_taps = 1 + random_pick(run, 13, SPW_TAPS_MAX);
    }
    if (m->linear_heads > 0 && !m->linear_conv) { /* a convolution's row is one head */
        m->linear_value_dim = 8ull << random_pick(run, 14, 3);
        m->linear_key_dim = 8 + 8 * random_pick(run, 15, 4);
    }
    m->init_std = 0.3;
    if (c->run.state_format != SPW_STATE_FP32)
        snprintf(c->run.frozen_codes, sizeof c->run.frozen_codes, "%s", codes[random_pick(run, 6, 3)]);
    if (random_pick(run, 16, 4) == 0) { /* beside all that may have one, or beside experts alone */
        c->run.lora = (spw_lora){.rank = 1 + random_pick(run, 17, 5), .alpha = 6};
        c->run.lora_target_parameters.count = m->experts > 0 && m->layers > 1; /* a first layer may have none */
        c->run.lora_targets.count = c->run.lora_target_parameters.count == 0 || random_pick(run, 18, 2) == 0;
        snprintf(c->run.lora_targets.item[0], sizeof c->run.lora_targets.item[0], "*");
        snprintf(c->run.lora_target_parameters.item[0], sizeof c->run.lora_target_parameters.item[0], "%s",
                 tensors[random_pick(run, 19, 3)]);
    }
    c->model = *m;
}

/* What must not; the pieces of prompts do. */
static void
draw_placement(uint64_t at, spw_config *c, const char *dir)
{
    c->zero.offload_param = (spw_tier)random_pick(at, 0, SPW_TIER_COUNT);
    c->zero.param_path.count = 1;
    snprintf(c->zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
    c->run.chunk_elems = 4096ull << random_pick(at, 1, 4);
    c->run.weight_slots = (uint32_t)random_pick(at, 2, 5);
    c->run.compute_threads = 1 + (uint32_t)random_pick(at, 3, 3);
    c->run.prefetch = random_pick(at, 4, 6) > 0;
    c->run.integrity = random_pick(at, 5, 3) > 0;
    c->run.chaos_seed = random_pick(at, 6, 2) == 0 ? 1 + random_pick(at, 7, 1000000) : 0;
    c->aio.backend = random_pick(at, 8, 2) == 0 ? SPW_AIO_THREADS : SPW_AIO_AUTO;
    c->aio.block_size = 4096ull << random_pick(at, 9, 8);
    c->aio.queue_depth = 1 + (uint32_t)random_pick(at, 10, 16);
}

static spw_status
create(spw_generator **g, const spw_config *c, const spw_model *m, uint32_t slots, uint64_t piece, spw_plan *plan,
       spw_error *err)
{
    return spw_generator_create(
        g,
        &(spw_generator_options){
            .config = c, .model = m, .slots = slots, .positions = POSITIONS, .piece = piece, .plan_out = plan},
        err);
}

/* Device memory between the least that a plan names and what it takes unasked. */
static void
draw_device_memory(uint64_t at, spw_config *c, const spw_model *m, uint64_t piece)
{
    spw_generator *g = NULL;
    static spw_plan least, all;
    uint64_t span;
    if (random_pick(at, 20, 4) == 0 || create(&g, c, m, TEXTS, piece, &all, NULL) != SPW_OK)
        return;
    spw_generator_destroy(g);
    g = NULL;
    c->run.device_memory = 4096;
    assert_int_equal(create(&g, c, m, TEXTS, piece, &least, NULL), SPW_ENOFIT);
    span = all.device_bytes > least.least_bytes ? all.device_bytes - least.least_bytes : 1;
    c->run.device_memory = least.least_bytes + random_pick(at, 21, random_pick(at, 22, 2) == 0 ? span : span / 8 + 1);
}

static void
need(spw_status st, const spw_error *err)
{
    if (st != SPW_OK)
        fail_msg("%s: %s", random_said, err->message);
}

/* Adapters as after training: B is not 0. */
static spw_model *
build(const spw_config *c)
{
    spw_model *model = NULL;
    spw_error err = {0};
    need(spw_model_from_config(&model, c, &err), &err);
    for (uint32_t id = 0; id < model->param_count; id++) {
        if (model->params[id].adapter)
            model->params[id].init = SPW_INIT_NORMAL, model->params[id].init_std = 0.3f;
    }
    return model;
}

static void
begin(spw_generator *g, uint64_t run, uint32_t text, uint64_t vocab)
{
    int32_t prompt[POSITIONS];
    uint64_t count = 1 + random_pick(run, 30 + text, POSITIONS - TOKENS);
    spw_error err = {0};
    for (uint64_t i = 0; i < count; i++)
        prompt[i] = (int32_t)random_pick(run, 100 + 50 * text + (uint32_t)i, vocab);
    spw_generator_clear(g, text);
    need(spw_generator_feed(g, text, prompt, count, &err), &err);
}

/* Texts `first` to `end` together, each beginning so many passes after the one before. */
static void
tell(spw_generator *g, uint64_t run, uint32_t first, uint32_t end, uint32_t apart, uint64_t vocab, story *out)
{
    const spw_sampling how = {.temperature = 1.2, .top_k = 20, .top_p = 0.95, .seed = 77};
    uint32_t at[TEXTS] = {0}, begun = first, left = end - first;
    spw_error err = {0};
    for (uint32_t pass = 0; left > 0; pass++) {
        while (begun < end && pass >= (begun - first) * apart)
            begin(g, run, begun++, vocab);
        need(spw_generator_forward(g, &err), &err);
        for (uint32_t i = first; i < begun; i++) {
            const float *logits = at[i] < TOKENS ? spw_generator_logits(g, i) : NULL;
            if (logits == NULL)
                continue;
            memcpy(out[i].logits[at[i]], logits, vocab * sizeof *logits);
            need(spw_generator_draw(g, i, &how, &out[i].ids[at[i]], &err), &err);
            if (++at[i] == TOKENS)
                left--;
            else
                need(spw_generator_feed(g, i, &out[i].ids[at[i] - 1], 1, &err), &err);
        }
    }
}

static void
place_and_tell(uint64_t run, uint64_t placement, uint64_t piece, const char *dir, const story *want)
{
    static story got[TEXTS];
    static spw_config c;
    uint64_t at = (run + 1) * 1000 + placement;
    spw_model_config m;
    spw_model *model;
    spw_generator *g = NULL;
    spw_error err = {0};
    spw_status st;
    draw_model(run, &c, &m);
    draw_placement(at, &c, dir);
    random_says(SECONDS_MAX,
                "model %llu, placement %llu (family %d, %s, codes %s; weights %d, chunk %llu, slots %u, chaos %llu)",
                (unsigned long long)run, (unsigned long long)placement, (int)m.family,
                spw_state_name(c.run.state_format), c.run.frozen_codes, (int)c.zero.offload_param,
                (unsigned long long)c.run.chunk_elems, c.run.weight_slots, (unsigned long long)c.run.chaos_seed);
    model = build(&c);
    draw_device_memory(at, &c, model, piece);
    st = create(&g, &c, model, TEXTS, piece, NULL, &err);
    if (st != SPW_ENOFIT) {
        need(st, &err);
        need(spw_engine_init_params(spw_generator_engine(g), 3, &err), &err);
        memset(got, 0, sizeof got);
        tell(g, run, 0, TEXTS, (uint32_t)random_pick(at, 23, 4), m.vocab, got);
        for (int i = 0; i < TEXTS; i++) {
            if (memcmp(&want[i], &got[i], sizeof got[i]) != 0)
                fail_msg("%s: text %d has other logits than alone on the device", random_said, i);
        }
    }
    told += st == SPW_OK;
    refused += st != SPW_OK;
    spw_generator_destroy(g);
    spw_model_destroy(model);
}

static void
test_random_texts(void **state)
{
    static story want[TEXTS];
    static spw_config c;
    uint64_t runs = random_runs(MODELS);
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (uint64_t run = 0; run < runs; run++) {
        uint64_t piece = random_pick(run, 10, 2) == 0 ? 0 : 1 + random_pick(run, 11, 12);
        spw_model_config m;
        spw_model *model;
        spw_generator *g = NULL;
        spw_error err = {0};
        draw_model(run, &c, &m);
        c.zero.offload_param = SPW_TIER_DEVICE;
        random_says(SECONDS_MAX, "model %llu (family %d), all on the device", (unsigned long long)run, (int)m.family);
        model = build(&c);
        need(create(&g, &c, model, TEXTS, piece, NULL, &err), &err);
        need(spw_engine_init_params(spw_generator_engine(g), 3, &err), &err);
        memset(want, 0, sizeof want);
        for (uint32_t i = 0; i < TEXTS; i++)
            tell(g, run, i, i + 1, 0, m.vocab, want);
        spw_generator_destroy(g);
        spw_model_destroy(model);
        for (uint64_t placement = 1; placement <= PLACEMENTS; placement++)
            place_and_tell(run, placement, piece, dir, want);
    }
    random_done();
    tiny_dir_remove(dir);
    print_message("seed %llu: %u placements, %u refusals\n", (unsigned long long)random_seed(), told, refused);
    assert_true(told > 4 * refused);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_texts)};
    return cmocka_run_group_tests_name("random texts", tests, NULL, NULL);
}
