/*
 * Generation: a cache of keys and values against computing everything from scratch and against transformers (vectors made by
 * make_generate_vectors.py); batches against each prompt alone, tiers, threads and slots bit for bit; weights read once a
 * forward pass; what sampling does at its edges; and what is refused.
 */
#include "lib_tiny.h"
#include "spw_files.h"
#include "spw_generate.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static const char
    *cases[200]; /* vectors of families, but those that differ from others in nothing that is looked at here */
static uint32_t case_count;

static void
list_cases(void)
{
    static const char *const passed_over[] = {"gpt_oss_mxfp4", "qwen3_5_yarn", "gemma4_small_image"};
    uint32_t count;
    const char *const *all = tiny_family_vectors(&count);
    for (uint32_t i = 0; i < count; i++) {
        bool taken = true;
        for (size_t k = 0; k < sizeof passed_over / sizeof passed_over[0]; k++)
            taken = taken && strcmp(all[i], passed_over[k]) != 0;
        assert_true(case_count < sizeof cases / sizeof cases[0]);
        if (taken)
            cases[case_count++] = all[i];
    }
}

enum { LENGTH_MAX = 256, VOCAB_MAX = 256 };

/* A generator over one of the cases, or over a drawn model (weights NULL). */
typedef struct subject {
    spw_weights *weights;
    spw_model *model;
    spw_generator *g;
} subject;

static spw_weights *
find_case(const char *name)
{
    char path[256];
    spw_error err = {0};
    spw_weights *w = malloc(sizeof *w);
    assert_non_null(w);
    snprintf(path, sizeof path, "tests/vectors/families/%s", name);
    DONE(spw_weights_find(w, path, &err));
    assert_false(w->is_checkpoint);
    w->config.run.compute_threads = 1;
    w->config.run.optimizer_threads = 1;
    w->config.run.state_format = SPW_STATE_FP32;
    return w;
}

static void
open_case(subject *s, const char *name, uint32_t slots, uint64_t piece, uint32_t threads)
{
    spw_error err = {0};
    s->weights = find_case(name);
    s->weights->config.run.compute_threads = threads;
    DONE(spw_model_from_config(&s->model, &s->weights->config, &err));
    DONE(spw_generator_create(&s->g,
                              &(spw_generator_options){.config = &s->weights->config,
                                                       .model = s->model,
                                                       .slots = slots,
                                                       .positions = s->model->config.positions,
                                                       .piece = piece},
                              &err));
    DONE(spw_weights_load(s->weights, spw_generator_engine(s->g), &err));
}

static void
close_subject(subject *s)
{
    spw_generator_destroy(s->g);
    spw_model_destroy(s->model);
    free(s->weights);
    memset(s, 0, sizeof *s);
}

static int32_t
likeliest(const float *logits, uint64_t V)
{
    return spw_sample(logits, V, &(spw_sampling){.top_p = 1}, 0, (spw_candidate[VOCAB_MAX]){{0, 0}});
}

/* A prompt of a slot's own. */
static void
make_prompt(int32_t *out, uint64_t count, uint64_t salt, uint64_t V)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = (int32_t)((i * i * 7 + i * (salt + 3) + salt * 11) % V);
}

/* ---------------------------------------------------------------- against computing everything */

/*
 * Greedy from the prompt to the end of the positions: tokens equal, logits within 1e-5 of the largest, or 3e-5 with linear attention: what it
 * gives is divided by its length, which is next to nothing at some tokens, where transformers in fp32 is off float64 by 8e-6. Returns the worst.
 */
static double
follow(spw_engine *whole, spw_generator *g, const spw_model *m, uint64_t prompt, uint64_t end, const char *name)
{
    uint64_t V = m->config.vocab;
    int32_t text[LENGTH_MAX];
    float *want = malloc(V * sizeof *want);
    double largest = 0, worst = 0;
    spw_error err = {0};
    assert_non_null(want);
    assert_true(end <= LENGTH_MAX && V <= VOCAB_MAX);
    make_prompt(text, prompt, prompt, V);
    spw_generator_clear(g, 0);
    DONE(spw_generator_feed(g, 0, text, prompt, &err));
    for (uint64_t n = prompt; n < end; n++) {
        const float *got;
        while ((got = spw_generator_logits(g, 0)) == NULL)
            DONE(spw_generator_forward(g, &err));
        DONE(spw_engine_logits(whole, text, n, want, &err));
        for (uint64_t i = 0; i < V; i++) {
            largest = fmax(largest, fabs((double)want[i]));
            worst = fmax(worst, fabs((double)want[i] - (double)got[i]));
        }
        text[n] = likeliest(want, V);
        if (text[n] != likeliest(got, V))
            fail_msg("%s: token %llu is %d from scratch, %d with the cache", name, (unsigned long long)n, text[n],
                     likeliest(got, V));
        DONE(spw_generator_feed(g, 0, &text[n], 1, &err));
    }
    free(want);
    if (!(worst <= (m->config.linear_heads > 0 || m->config.layer_scaled ? 3e-5 : 1e-5) * largest))
        fail_msg("%s: a logit is off by %.3g of the largest", name, worst / largest);
    return worst / largest;
}

/*
 * Every case, with the prompt in two of three ways: in one piece, in pieces that leave a rest, and token by token. Under the sanitizers, where all cases
 * go through the cache once below, every third.
 */
static void
test_from_scratch(void **state)
{
    static const uint64_t pieces[] = {0, 4, 1};
    double worst = 0;
    (void)state;
    for (size_t i = 0; i < case_count; i += SANITIZED ? 3 : 1) {
        spw_error err = {0};
        for (int k = SANITIZED; k < 2; k++) {
            spw_engine *whole = NULL;
            subject s;
            uint64_t positions;
            double off;
            open_case(&s, cases[i], 1, pieces[(i + i / 3 + (size_t)k) % 3], 1);
            positions = s.model->config.positions;
            DONE(spw_engine_create(&whole,
                                   &(spw_engine_options){.config = &s.weights->config,
                                                         .model = s.model,
                                                         .inference = true,
                                                         .sequences = 1,
                                                         .positions = positions},
                                   &err));
            DONE(spw_weights_load(s.weights, whole, &err));
            off = follow(whole, s.g, s.model, 7, positions, cases[i]);
            worst = fmax(worst, off);
            off = follow(whole, s.g, s.model, 1, positions, cases[i]); /* the slot again, from one token */
            worst = fmax(worst, off);
            spw_engine_destroy(whole);
            close_subject(&s);
        }
    }
    print_message("largest difference %.3g of the largest logit\n", worst);
}

/* Longer than a tile of queries and two tiles of keys, GPT-2 too, drawn weights; windows that leave tiles behind. */
static void
test_long(void **state)
{
    static const struct {
        spw_family family;
        uint64_t window, piece;
    } kinds[] = {{SPW_FAMILY_GPT2, 0, 0},
                 {SPW_FAMILY_LLAMA, 0, 70},
                 {SPW_FAMILY_MISTRAL, 9, 100},
                 {SPW_FAMILY_PHI3, 9, 50},
                 {SPW_FAMILY_QWEN3_5, 0, 0},
                 {SPW_FAMILY_QWEN3_5, 0, 2},
                 {SPW_FAMILY_GRANITE_HYBRID, 0, 0},
                 {SPW_FAMILY_GRANITE_HYBRID, 0, 3},
                 {SPW_FAMILY_QWEN3_NEXT, 0, 70},
                 {SPW_FAMILY_GEMMA4, 9, 50},
                 {TINY_GEMMA4_SMALL, 9, 0},
                 {TINY_GEMMA4_SMALL, 9, 70},
                 {SPW_FAMILY_LLAMA4, 0, 50},
                 {SPW_FAMILY_NEMOTRON_H, 0, 0},
                 {SPW_FAMILY_NEMOTRON_H, 0, 5},
                 {SPW_FAMILY_LFM2_MOE, 0, 2},
                 {SPW_FAMILY_OLMO_HYBRID, 0, 3},
                 {SPW_FAMILY_KIMI_LINEAR, 0, 4},
                 {SPW_FAMILY_FALCON_H1, 0, 0},
                 {SPW_FAMILY_FALCON_H1, 0, 50},
                 {TINY_FEW_KEYS, 0, 0},
                 {TINY_FEW_KEYS, 0, 50},
                 {SPW_FAMILY_DEEPSEEK_V4, 9, 0},
                 {SPW_FAMILY_DEEPSEEK_V4, 9, 50},
                 {SPW_FAMILY_DEEPSEEK_V4, 9, 3}};
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        spw_model_config m;
        spw_config c;
        spw_model *model = NULL;
        spw_engine *whole = NULL;
        spw_generator *g = NULL;
        spw_error err = {0};
        tiny_config(&c, SPW_STATE_FP32);
        tiny_model_config(&m, kinds[k].family);
        m.positions = 240;
        m.window = kinds[k].window;
        m.init_std = 0.3;
        DONE(spw_model_build(&model, &m, &err));
        DONE(spw_generator_create(
            &g,
            &(spw_generator_options){
                .config = &c, .model = model, .slots = 1, .positions = m.positions, .piece = kinds[k].piece},
            &err));
        DONE(spw_engine_create(
            &whole,
            &(spw_engine_options){
                .config = &c, .model = model, .inference = true, .sequences = 1, .positions = m.positions},
            &err));
        DONE(spw_engine_init_params(whole, 3, &err));
        DONE(spw_engine_init_params(spw_generator_engine(g), 3, &err));
        (void)follow(whole, g, model, 150, 200, tiny_family_name(kinds[k].family));
        spw_generator_destroy(g);
        spw_engine_destroy(whole);
        spw_model_destroy(model);
    }
}

/* ---------------------------------------------------------------- against transformers */

/* What it draws greedily with its own cache, every model, three prompts each. */
static void
test_transformers(void **state)
{
    FILE *f = fopen("tests/vectors/generate.txt", "re");
    char line[1024];
    int lines = 0;
    (void)state;
    assert_non_null(f);
    for (; fgets(line, sizeof line, f) != NULL; lines++) {
        subject s;
        spw_error err = {0};
        char *at = strchr(line, ' '), *bar = strchr(line, '|');
        int32_t ids[LENGTH_MAX];
        uint64_t prompt = 0, count = 0;
        assert_true(at != NULL && bar != NULL);
        *at++ = '\0';
        for (char *end; *at != '\0' && *at != '\n'; at = end) {
            if (at == bar || at + 1 == bar) {
                prompt = count;
                end = bar + 1;
                continue;
            }
            ids[count++] = (int32_t)strtol(at, &end, 10);
        }
        open_case(&s, line, 1, 5, 1);
        DONE(spw_generator_feed(s.g, 0, ids, prompt, &err));
        for (uint64_t n = prompt; n < count; n++) {
            int32_t id = -1;
            while (spw_generator_logits(s.g, 0) == NULL)
                DONE(spw_generator_forward(s.g, &err));
            DONE(spw_generator_draw(s.g, 0, &(spw_sampling){.top_p = 1}, &id, &err));
            if (id != ids[n])
                fail_msg("%s, %llu of prompt: token %llu is %d, transformers draws %d", line,
                         (unsigned long long)prompt, (unsigned long long)n, id, ids[n]);
            DONE(spw_generator_feed(s.g, 0, &id, 1, &err));
        }
        close_subject(&s);
    }
    fclose(f);
    assert_int_equal(lines, 3 * (int)case_count);
}

/* ---------------------------------------------------------------- the same bits */

enum { TEXTS = 4, STEPS = 12 };
static const uint64_t lengths[TEXTS] = {1, 6, 9, 3};

/* Logits of every step of text i, drawn with a temperature, in a slot. */
typedef struct story {
    int32_t ids[STEPS];
    float logits[STEPS][VOCAB_MAX];
} story;

static void
begin(spw_generator *g, uint32_t slot, int text, uint64_t V)
{
    int32_t prompt[LENGTH_MAX];
    spw_error err = {0};
    make_prompt(prompt, lengths[text], (uint64_t)text, V);
    spw_generator_clear(g, slot);
    DONE(spw_generator_feed(g, slot, prompt, lengths[text], &err));
}

/* Takes a step if the logits are there; true when the story is complete. */
static bool
step(spw_generator *g, uint32_t slot, story *out, int *at, uint64_t V)
{
    static const spw_sampling how = {.temperature = 1.2, .top_k = 20, .top_p = 0.95, .seed = 77};
    const float *logits = spw_generator_logits(g, slot);
    spw_error err = {0};
    if (logits == NULL || *at == STEPS)
        return *at == STEPS;
    memcpy(out->logits[*at], logits, V * sizeof *logits);
    DONE(spw_generator_draw(g, slot, &how, &out->ids[*at], &err));
    DONE(spw_generator_feed(g, slot, &out->ids[*at], 1, &err));
    return ++*at == STEPS;
}

/* Each text alone, in slot 0. */
static void
tell_alone(spw_generator *g, story out[TEXTS], uint64_t V)
{
    spw_error err = {0};
    memset(out, 0, TEXTS * sizeof *out);
    for (int i = 0; i < TEXTS; i++) {
        int at = 0;
        begin(g, 0, i, V);
        while (!step(g, 0, &out[i], &at, V))
            DONE(spw_generator_forward(g, &err));
    }
}

/* All together in slots of another order, the third one joining late and taking the slot of the first that ends. */
static void
tell_together(spw_generator *g, story out[TEXTS], uint64_t V)
{
    static const uint32_t slot_of[TEXTS] = {2, 0, 2, 1};
    int at[TEXTS] = {0}, open = 3;
    bool begun[TEXTS] = {true, true, false, true}, done[TEXTS] = {false};
    spw_error err = {0};
    memset(out, 0, TEXTS * sizeof *out);
    for (int i = 0; i < TEXTS; i++) {
        if (begun[i])
            begin(g, slot_of[i], i, V);
    }
    while (open > 0) {
        DONE(spw_generator_forward(g, &err));
        for (int i = 0; i < TEXTS; i++) {
            if (!begun[i] || done[i] || !step(g, slot_of[i], &out[i], &at[i], V))
                continue;
            done[i] = true;
            open--;
            if (i == 0) {
                begun[2] = true;
                open++;
                begin(g, slot_of[2], 2, V);
            }
        }
    }
}

static void
same_stories(const story *a, const story *b, const char *name, const char *what)
{
    for (int i = 0; i < TEXTS; i++) {
        if (memcmp(&a[i], &b[i], sizeof a[i]) != 0)
            fail_msg("%s: text %d is not the same %s", name, i, what);
    }
}

/* Alone and together, with 1, 2 and 5 threads, prompts whole and in pieces: for a cut of the prompt the same bits. */
static void
test_batch(void **state)
{
    story *alone = malloc(TEXTS * sizeof *alone), *other = malloc(TEXTS * sizeof *other);
    (void)state;
    assert_true(alone != NULL && other != NULL);
    for (size_t i = 0; i < case_count; i++) {
        for (uint64_t piece = SANITIZED ? 4 : 0; piece <= 4; piece += 4) {
            for (uint32_t threads = 1; threads <= (SANITIZED ? 2 : 5); threads += threads == 1 ? 1 : 3) {
                subject s;
                open_case(&s, cases[i], 3, piece, threads);
                if (threads == 1) {
                    tell_alone(s.g, alone, s.model->config.vocab);
                } else {
                    tell_alone(s.g, other, s.model->config.vocab);
                    same_stories(alone, other, cases[i], "with more threads");
                }
                tell_together(s.g, other, s.model->config.vocab);
                same_stories(alone, other, cases[i], "beside others");
                close_subject(&s);
            }
        }
    }
    free(alone);
    free(other);
}

/* ---------------------------------------------------------------- tiers, and what is read */

static void
configure(spw_config *c, spw_model_config *m, spw_state_format format, bool tied)
{
    tiny_config(c, format);
    tiny_model_config(m, SPW_FAMILY_LLAMA);
    m->tied = tied;
    m->init_std = 0.3;
    c->run.chunk_elems = 4096;
}

/* Everything on nvme with one slot, and a device that holds one block. */
static void
squeeze(spw_config *c, const spw_model *model, const char *swap)
{
    spw_plan plan;
    spw_generator *g = NULL;
    spw_error err = {0};
    c->zero.offload_param = SPW_TIER_NVME;
    c->zero.param_path.count = 1;
    snprintf(c->zero.param_path.item[0], SPW_PATH_BYTES, "%s", swap);
    c->run.weight_slots = 1;
    c->run.device_memory = 4096;
    assert_int_equal(
        spw_generator_create(
            &g, &(spw_generator_options){.config = c, .model = model, .slots = 3, .positions = 30, .plan_out = &plan},
            &err),
        SPW_ENOFIT);
    assert_int_equal(plan.lack, SPW_LACK_DEVICE);
    c->run.device_memory = plan.least_bytes;
}

static spw_generator *
make_tiny(const spw_config *c, const spw_model *model, spw_plan *plan)
{
    spw_generator *g = NULL;
    spw_error err = {0};
    DONE(spw_generator_create(
        &g, &(spw_generator_options){.config = c, .model = model, .slots = 3, .positions = 30, .plan_out = plan},
        &err));
    DONE(spw_engine_init_params(spw_generator_engine(g), 9, &err));
    return g;
}

/* Device, host, nvme with one slot, a mix, without prefetch, and with delays everywhere: the same bits. */
static void
test_tiers(void **state)
{
    story *first = malloc(TEXTS * sizeof *first), *other = malloc(TEXTS * sizeof *other);
    char swap[256];
    (void)state;
    assert_true(first != NULL && other != NULL);
    tiny_dir_make(swap);
    for (int format = 0; format < 2; format++) {
        for (int kind = 0; kind < 6; kind++) {
            static const char *const names[] = {"on the device", "in host memory", "on nvme",
                                                "in a mix",      "unfetched",      "late"};
            spw_model_config m;
            spw_config c;
            spw_model *model = NULL;
            spw_generator *g;
            spw_plan plan;
            spw_error err = {0};
            configure(&c, &m, format == 0 ? SPW_STATE_FP32 : SPW_STATE_SPLIT, format == 0);
            DONE(spw_model_build(&model, &m, &err));
            if (kind == 0)
                c.zero.offload_param = SPW_TIER_DEVICE;
            if (kind >= 2)
                squeeze(&c, model, swap);
            if (kind == 3) {
                g = make_tiny(&c, model, &plan);
                c.run.host_memory = plan.host_bytes + plan.weight_nvme / 2 + (1 << 20);
                spw_generator_destroy(g);
            }
            c.run.prefetch = kind != 4;
            c.run.chaos_seed = kind == 5 ? 5 : 0;
            g = make_tiny(&c, model, &plan);
            if (kind >= 2 && kind != 3)
                assert_int_equal(plan.weight_host, 0);
            if (kind == 0) {
                tell_alone(g, first, m.vocab);
            } else {
                tell_alone(g, other, m.vocab);
                same_stories(first, other, names[kind], "as on the device");
            }
            tell_together(g, other, m.vocab);
            same_stories(first, other, names[kind], "beside others");
            spw_generator_destroy(g);
            spw_model_destroy(model);
        }
    }
    tiny_dir_remove(swap);
    free(first);
    free(other);
}

/*
 * On nvme with one slot, each forward pass reads every byte once, whatever the number of sequences; read ahead, 20 passes read
 * 20 times the bytes and what is fetched for the next. A tied head adds its table in the first pass at most.
 */
static void
test_reads(void **state)
{
    char swap[256];
    (void)state;
    tiny_dir_make(swap);
    for (int kind = 0; kind < 4; kind++) {
        bool tied = kind & 1, prefetch = kind & 2;
        spw_model_config m;
        spw_config c;
        spw_model *model = NULL;
        spw_generator *g;
        spw_plan plan;
        spw_store_stats before, after;
        spw_error err = {0};
        uint64_t table;
        configure(&c, &m, SPW_STATE_SPLIT, tied);
        DONE(spw_model_build(&model, &m, &err));
        squeeze(&c, model, swap);
        c.run.prefetch = prefetch;
        g = make_tiny(&c, model, &plan);
        table = spw_engine_layout(spw_generator_engine(g))->units[0].elems * 2;
        spw_store_get_stats(spw_engine_store(spw_generator_engine(g)), &before);
        for (uint32_t i = 0; i < 3; i++)
            begin(g, i, (int)i, m.vocab);
        for (uint64_t pass = 1; pass <= 20; pass++) {
            int32_t id = 5;
            uint64_t read;
            DONE(spw_generator_forward(g, &err));
            spw_store_get_stats(spw_engine_store(spw_generator_engine(g)), &after);
            read = after.nvme_read_bytes - before.nvme_read_bytes;
            if (!prefetch && !tied)
                assert_int_equal(read, pass * plan.weight_nvme);
            if (!(read <= (pass + prefetch) * plan.weight_nvme + (tied ? table : 0)))
                fail_msg("%s%s: %llu bytes read in %llu passes over %llu", tied ? "tied" : "untied",
                         prefetch ? ", read ahead" : "", (unsigned long long)read, (unsigned long long)pass,
                         (unsigned long long)plan.weight_nvme);
            for (uint32_t i = 0; i < 3; i++)
                DONE(spw_generator_feed(g, i, &id, 1, &err));
        }
        spw_generator_destroy(g);
        spw_model_destroy(model);
    }
    tiny_dir_remove(swap);
}

/* Where device memory is left all weights stay there: the first pass brings them, and no other any. */
static void
test_stays(void **state)
{
    (void)state;
    for (int bound = 0; bound < 2; bound++) {
        spw_model_config m;
        spw_config c;
        spw_model *model = NULL;
        spw_generator *g;
        spw_plan plan;
        spw_store_stats first = {0}, after;
        spw_error err = {0};
        configure(&c, &m, SPW_STATE_SPLIT, false);
        m.layers = 8;
        c.zero.max_live_parameters = bound ? 4096 : UINT64_MAX;
        DONE(spw_model_build(&model, &m, &err));
        g = make_tiny(&c, model, &plan);
        for (uint64_t pass = 1; pass <= 5; pass++) {
            int32_t id = 5;
            DONE(spw_generator_feed(g, 0, &id, 1, &err));
            DONE(spw_generator_forward(g, &err));
            spw_store_get_stats(spw_engine_store(spw_generator_engine(g)), &after);
            first = pass == 1 ? after : first;
        }
        assert_true(first.h2d_bytes > 0);
        assert_int_equal(after.h2d_bytes == first.h2d_bytes, !bound);
        spw_generator_destroy(g);
        spw_model_destroy(model);
    }
}

/* ---------------------------------------------------------------- sampling */

static int32_t
draw(const float *logits, uint64_t n, double temperature, uint64_t top_k, double top_p, double uniform)
{
    spw_candidate room[16];
    return spw_sample(logits, n, &(spw_sampling){temperature, top_k, top_p, 0}, uniform, room);
}

/* How many of 1000 even numbers of [0, 1) give each token. */
static void
count(const float *logits, uint64_t n, double temperature, uint64_t top_k, double top_p, int *out)
{
    memset(out, 0, n * sizeof *out);
    for (int i = 0; i < 1000; i++)
        out[draw(logits, n, temperature, top_k, top_p, (i + 0.5) / 1000)]++;
}

/* Probabilities 0.1, 0.4, 0.2, 0.3: shares, cuts on and beside their borders, ties, and what is not a number. */
static void
test_sampling(void **state)
{
    const float p[4] = {logf(0.1f), logf(0.4f), logf(0.2f), logf(0.3f)}, ties[4] = {1, 2, 2, 2};
    const float bad[3] = {0, NAN, 1}, none[2] = {-INFINITY, -INFINITY}, big[3] = {0, INFINITY, INFINITY};
    const float hole[3] = {0, -INFINITY, 0};
    int n[4];
    (void)state;
    count(p, 4, 1, 0, 1, n);
    assert_true(n[0] == 100 && n[1] == 400 && n[2] == 200 && n[3] == 300);
    count(p, 4, 0.5, 0, 1, n); /* squares: 1, 16, 4, 9 of 30 */
    assert_true(abs(n[0] - 33) <= 1 && abs(n[1] - 533) <= 1 && abs(n[2] - 133) <= 1 && abs(n[3] - 300) <= 1);
    count(p, 4, 1, 2, 1, n);
    assert_true(n[0] == 0 && abs(n[1] - 571) <= 1 && n[2] == 0 && abs(n[3] - 429) <= 1);
    count(p, 4, 1, 1, 1, n);
    assert_int_equal(n[1], 1000);
    count(p, 4, 1, 4, 1, n); /* k as large as the vocabulary, and larger, is none */
    assert_int_equal(n[0], 100);
    count(p, 4, 1, 99, 1, n);
    assert_int_equal(n[0], 100);
    count(p, 4, 1, 0, 0.41, n); /* one is not enough, two are */
    assert_true(n[0] == 0 && n[2] == 0 && n[1] > 0 && n[3] > 0);
    count(p, 4, 1, 0, 0.39, n);
    assert_int_equal(n[1], 1000);
    count(p, 4, 1, 0, 1e-9, n); /* never none */
    assert_int_equal(n[1], 1000);
    count(p, 4, 1, 0, 0.95, n);
    assert_true(n[0] > 0);
    count(p, 4, 1, 3, 0.5, n); /* of 4, 2 and 3 ninths the first two */
    assert_true(n[0] == 0 && n[2] == 0 && n[3] > 0);
    count(p, 4, 1e-6, 0, 1, n);
    assert_int_equal(n[1], 1000);
    count(ties, 4, 1, 2, 1, n); /* of equals the first ids */
    assert_true(n[0] == 0 && n[1] == 500 && n[2] == 500);
    assert_int_equal(draw(ties, 4, 0, 0, 1, 0.9), 1);
    assert_int_equal(draw(p, 4, 0, 0, 1, 0.99), 1);
    assert_int_equal(draw(p, 4, 1, 0, 1, 0), 0);
    assert_int_equal(draw(p, 4, 1, 0, 1, 1 - 0x1p-53), 3);
    assert_int_equal(draw(bad, 3, 1, 0, 1, 0.5), -1);
    assert_int_equal(draw(bad, 3, 0, 0, 1, 0.5), -1);
    assert_int_equal(draw(none, 2, 1, 0, 1, 0.5), -1);
    assert_int_equal(draw(big, 3, 1, 0, 1, 0.99), 1);
    count(hole, 3, 1, 0, 1, n);
    assert_true(n[0] == 500 && n[1] == 0 && n[2] == 500);
}

static int
by_likeliness(const void *a, const void *b)
{
    const spw_candidate *x = a, *y = b;
    return x->logit != y->logit ? (x->logit > y->logit ? -1 : 1) : x->id < y->id ? -1 : 1;
}

/* The same from all candidates in order: of their likeliness where there is a cut, else of their ids. */
static int32_t
draw_sorted(const float *logits, uint64_t n, const spw_sampling *how, double uniform)
{
    static spw_candidate all[1500];
    uint64_t k = how->top_k > 0 && how->top_k < n ? how->top_k : n, kept;
    double sum = 0, reached = 0, left = uniform, w[1500], max = -INFINITY;
    for (uint64_t i = 0; i < n; i++) {
        all[i] = (spw_candidate){logits[i], (int32_t)i};
        max = (double)logits[i] > max ? (double)logits[i] : max;
    }
    if (k < n || how->top_p < 1)
        qsort(all, n, sizeof *all, by_likeliness);
    for (uint64_t i = 0; i < k; i++)
        sum += w[i] = exp(((double)all[i].logit - max) / how->temperature);
    for (kept = 0; kept < k && (how->top_p == 1 || reached < how->top_p * sum); kept++)
        reached += w[kept];
    for (uint64_t i = 0; i < kept; i++) {
        left -= w[i] / reached;
        if (left < 0)
            return all[i].id;
    }
    return all[kept - 1].id;
}

/* Random logits, many of them equal, or far below the others, or not to be drawn; cuts of all sizes, and none. */
static void
test_cuts(void **state)
{
    static float logits[1500];
    static spw_candidate room[1500];
    (void)state;
    for (uint64_t round = 0; round < 400; round++) {
        uint32_t r[4];
        spw_sampling how;
        uint64_t n;
        double uniform;
        spw_philox(7, round, 0, r);
        n = 1 + r[0] % 1500;
        how = (spw_sampling){0.3 + r[1] % 100 * 0.02, r[2] % 3 > 0 ? 1 + r[2] / 3 % n : 0,
                             r[3] % 4 > 0 ? (1 + r[3] / 4 % 1000) * 1e-3 : 1, 0};
        for (uint64_t i = 0; i < n; i++) {
            spw_philox(8, round, i, r);
            logits[i] = (float)(int32_t)r[0] * 0x1p-29f;
            if (round % 3 == 0)
                logits[i] = roundf(4 * logits[i]) / 4;
            if (round % 4 == 1 && i > 0 && r[2] % 8 < 2)
                logits[i] = r[2] % 8 == 0 ? -INFINITY : logits[i] * 1e5f - 4e5f;
        }
        uniform = r[1] * 0x1p-32;
        assert_int_equal(spw_sample(logits, n, &how, uniform, room), draw_sorted(logits, n, &how, uniform));
    }
}

/* A seed gives the same text again, another seed another one. */
static void
test_seeds(void **state)
{
    subject s;
    int32_t texts[3][20];
    (void)state;
    open_case(&s, "qwen3", 1, 0, 1);
    for (int k = 0; k < 3; k++) {
        spw_error err = {0};
        begin(s.g, 0, 1, s.model->config.vocab);
        for (int i = 0; i < 20; i++) {
            DONE(spw_generator_forward(s.g, &err));
            DONE(spw_generator_draw(s.g, 0, &(spw_sampling){.temperature = 2, .top_p = 1, .seed = k < 2 ? 4 : 5},
                                    &texts[k][i], &err));
            DONE(spw_generator_feed(s.g, 0, &texts[k][i], 1, &err));
        }
    }
    assert_memory_equal(texts[0], texts[1], sizeof texts[0]);
    assert_memory_not_equal(texts[0], texts[2], sizeof texts[0]);
    close_subject(&s);
}

/* ---------------------------------------------------------------- losses of an engine for inference, and refusals */

/* The loss of transformers, in an engine made for inference. */
static void
test_losses(void **state)
{
    (void)state;
    for (size_t i = 0; i < case_count; i++) {
        spw_weights *w = find_case(cases[i]);
        char path[256];
        spw_model *model = NULL;
        spw_engine *e = NULL;
        spw_st_reader *r = NULL;
        spw_error err = {0};
        float values[2][128], want;
        int32_t ids[2][128];
        double loss = 0;
        const spw_tensor_info *t;
        uint64_t rows;
        snprintf(path, sizeof path, "tests/vectors/families/%s/expect.safetensors", cases[i]);
        DONE(spw_st_reader_open(&r, path, &err));
        t = spw_st_reader_find(r, "tokens");
        rows = t->shape[0] * t->shape[1];
        assert_true(t->shape[0] == 2 && rows <= 128);
        DONE(spw_st_read(r, t, 0, values[0], rows * 4, &err));
        DONE(spw_st_read(r, spw_st_reader_find(r, "targets"), 0, values[1], rows * 4, &err));
        DONE(spw_st_read(r, spw_st_reader_find(r, "loss"), 0, &want, sizeof want, &err));
        spw_st_reader_close(r);
        for (uint64_t k = 0; k < 2 * rows; k++)
            ids[k / rows][k % rows] = (int32_t)values[k / rows][k % rows];
        DONE(spw_model_from_config(&model, &w->config, &err));
        DONE(spw_engine_create(&e,
                               &(spw_engine_options){.config = &w->config,
                                                     .model = model,
                                                     .inference = true,
                                                     .losses = true,
                                                     .sequences = 2,
                                                     .positions = rows / 2},
                               &err));
        DONE(spw_weights_load(w, e, &err));
        DONE(spw_engine_eval(e, ids[0], ids[1], 1, &loss, &err));
        if (!(fabs(loss - (double)want) <= 1e-6 * (double)want))
            fail_msg("%s: loss %.9g, transformers has %.9g", cases[i], loss, (double)want);
        spw_engine_destroy(e);
        spw_model_destroy(model);
        free(w);
    }
}

/* What cannot be asked for says so and changes nothing. */
static void
test_refusals(void **state)
{
    subject s;
    spw_error err = {0};
    spw_generator *g = NULL;
    int32_t ids[70] = {1, 2, 3}, bad[2] = {3, 41}, id;
    (void)state;
    open_case(&s, "llama", 2, 0, 1);
    assert_int_equal(spw_generator_feed(s.g, 2, ids, 3, &err), SPW_EINVAL);
    assert_int_equal(spw_generator_feed(s.g, 0, bad, 2, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "41"));
    assert_int_equal(spw_generator_feed(s.g, 0, ids, 65, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "64"));
    assert_int_equal(spw_generator_length(s.g, 0), 0);
    assert_int_equal(spw_generator_forward(s.g, &err), SPW_OK); /* nothing to do */
    assert_null(spw_generator_logits(s.g, 0));
    assert_int_equal(spw_generator_draw(s.g, 0, &(spw_sampling){.top_p = 1}, &id, &err), SPW_EINVAL);
    assert_int_equal(spw_generator_feed(s.g, 0, ids, 64, &err), SPW_OK);
    assert_int_equal(spw_generator_feed(s.g, 0, ids, 1, &err), SPW_EINVAL);
    assert_int_equal(spw_generator_forward(s.g, &err), SPW_OK);
    assert_non_null(spw_generator_logits(s.g, 0));
    assert_null(spw_generator_logits(s.g, 1));
    spw_generator_clear(s.g, 0);
    assert_null(spw_generator_logits(s.g, 0));
    assert_int_equal(
        spw_generator_create(
            &g, &(spw_generator_options){.config = &s.weights->config, .model = s.model, .slots = 1, .positions = 65},
            &err),
        SPW_EINVAL);
    assert_null(g);
    assert_int_equal(
        spw_generator_create(
            &g, &(spw_generator_options){.config = &s.weights->config, .model = s.model, .positions = 5}, &err),
        SPW_EINVAL);
    assert_null(g);
    s.weights->config.run.device_memory = 1 << 16;
    assert_int_equal(
        spw_generator_create(
            &g, &(spw_generator_options){.config = &s.weights->config, .model = s.model, .slots = 1, .positions = 5},
            &err),
        SPW_ENOFIT);
    assert_null(g);
    assert_int_equal(spw_weights_find(s.weights, "tests/vectors/none", &err), SPW_ENOENT);
    close_subject(&s);
}

/* Device bytes of a plan for generation, which are not exceeded. */
static uint64_t
planned(const spw_config *c, const spw_model *model, uint32_t slots, uint64_t positions)
{
    spw_generator *g = NULL;
    spw_plan plan;
    spw_error err = {0};
    DONE(spw_generator_create(
        &g,
        &(spw_generator_options){
            .config = c, .model = model, .slots = slots, .positions = positions, .piece = 8, .plan_out = &plan},
        &err));
    assert_true(spw_gpu_bytes_peak(spw_engine_gpu(spw_generator_engine(g))) <= plan.device_bytes);
    spw_generator_destroy(g);
    return plan.device_bytes;
}

/*
 * The cache is in the plan: more positions take as many more device bytes, of the layers that keep keys alone; more slots
 * take the others' states besides.
 */
static void
test_plan(void **state)
{
    static const spw_family families[] = {SPW_FAMILY_LLAMA, SPW_FAMILY_QWEN3_5, SPW_FAMILY_DEEPSEEK_V4};
    (void)state;
    for (int k = 0; k < 3; k++) {
        spw_model_config m;
        spw_config c;
        spw_model *model = NULL;
        spw_error err = {0};
        uint64_t full, keys, states, few, many;
        configure(&c, &m, SPW_STATE_FP32, true);
        tiny_model_config(&m, families[k]);
        m.linear_value_dim *= 8;
        m.positions = 1040;
        DONE(spw_model_build(&model, &m, &err));
        full = m.full_every > 0 ? m.layers / m.full_every : m.layers;
        keys = full * 2 * m.kv_heads * m.head_dim * 4;
        if (m.keys_are_values) /* one of each layer, and of two layers one for several tokens; of the first its indexer's too */
            keys = (m.layers * m.head_dim + (m.head_dim + m.index_dim) / m.few_rate + m.head_dim / m.many_rate) * 4;
        states = (m.layers - full) * m.linear_heads * m.linear_key_dim * m.linear_value_dim * 4;
        few = planned(&c, model, 4, 16);
        many = planned(&c, model, 4, 1040);
        assert_in_range(many - few, 4 * 1024 * keys, 4 * 1024 * keys + 1024 * m.head_dim * 4 + 8192);
        assert_true(planned(&c, model, 64, 16) - few >= 60 * (16 * keys + states));
        spw_model_destroy(model);
    }
}

/* Adapters of all linear weights; more sequences than tokens of a prompt that come at once: the same bits beside others as alone. */
static void
beside_adapters(spw_family family)
{
    enum { SLOTS = 24, V = 64 };
    spw_config c;
    spw_model_config m;
    spw_model *model = NULL;
    spw_generator *g = NULL;
    spw_error err = {0};
    float alone[V];
    configure(&c, &m, SPW_STATE_FP32, false);
    tiny_model_config(&m, family);
    m.init_std = 0.3;
    assert_true(m.vocab <= V);
    c.model = m;
    c.run.lora = (spw_lora){.rank = 4, .alpha = 6};
    c.run.lora_targets.count = 1;
    strcpy(c.run.lora_targets.item[0], "*");
    c.run.lora_target_parameters.count = m.experts > 0; /* of which one sequence alone asks for those that it chose */
    strcpy(c.run.lora_target_parameters.item[0], "*");
    DONE(spw_model_from_config(&model, &c, &err));
    for (uint32_t id = 0; id < model->param_count; id++) {
        if (model->params[id].adapter) /* B is not 0, as after training */
            model->params[id].init = SPW_INIT_NORMAL, model->params[id].init_std = 0.3f;
    }
    DONE(spw_generator_create(
        &g, &(spw_generator_options){.config = &c, .model = model, .slots = SLOTS, .positions = 9, .piece = 2}, &err));
    DONE(spw_engine_init_params(spw_generator_engine(g), 9, &err));
    for (uint32_t beside = 0; beside < SLOTS; beside += SLOTS - 1) {
        for (uint32_t k = 0; k <= beside; k++) {
            int32_t prompt[5];
            spw_generator_clear(g, k);
            make_prompt(prompt, 5, k, m.vocab);
            DONE(spw_generator_feed(g, k, prompt, 5, &err));
        }
        while (spw_generator_logits(g, 0) == NULL)
            DONE(spw_generator_forward(g, &err));
        if (beside == 0)
            memcpy(alone, spw_generator_logits(g, 0), m.vocab * sizeof *alone);
        assert_memory_equal(alone, spw_generator_logits(g, 0), m.vocab * sizeof *alone);
    }
    spw_generator_destroy(g);
    spw_model_destroy(model);
}

static void
test_adapters(void **state)
{
    (void)state;
    beside_adapters(SPW_FAMILY_LLAMA);
    beside_adapters(SPW_FAMILY_QWEN3_MOE);
    beside_adapters(SPW_FAMILY_LLAMA4);
}

/* The k-th allocation fails, for every k: an error, nothing left behind, and then it works. */
static void
test_memory(void **state)
{
    spw_weights *w = find_case("qwen2");
    spw_model *model = NULL;
    spw_error err = {0};
    bool through = false;
    (void)state;
    DONE(spw_model_from_config(&model, &w->config, &err));
    for (unsigned k = 1; !through; k++) {
        spw_generator *g = NULL;
        long live = spw_test_live_allocs();
        spw_status st;
        err = (spw_error){0};
        spw_test_fail_alloc(k);
        st = spw_generator_create(
            &g, &(spw_generator_options){.config = &w->config, .model = model, .slots = 2, .positions = 9}, &err);
        if (st == SPW_OK)
            st = spw_weights_load(w, spw_generator_engine(g), &err);
        through = !spw_test_fault_fired();
        assert_true(through ? st == SPW_OK
                            : st == SPW_ENOMEM || st == SPW_OK); /* some memory only makes things faster */
        spw_test_fail_alloc(0);
        spw_generator_destroy(g);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    spw_model_destroy(model);
    free(w);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sampling),     cmocka_unit_test(test_from_scratch), cmocka_unit_test(test_long),
        cmocka_unit_test(test_transformers), cmocka_unit_test(test_batch),        cmocka_unit_test(test_tiers),
        cmocka_unit_test(test_reads),        cmocka_unit_test(test_cuts),         cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_losses),       cmocka_unit_test(test_refusals),     cmocka_unit_test(test_plan),
        cmocka_unit_test(test_memory),       cmocka_unit_test(test_adapters),     cmocka_unit_test(test_stays),
    };
    list_cases();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
