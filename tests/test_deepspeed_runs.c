/*
 * The same JSON here and in DeepSpeed: runs of a small Llama that DeepSpeed 0.19.8 made with its optimizers, schedulers, clipping, accumulation and
 * loss scales (tests/vectors/deepspeed/runs.json, by make_foreign_vectors.py), step for step.
 */
#include "lib_tiny.h"
#include "runtime_internal.h"
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { LENGTH = 8, ROWS_MAX = 6, VOCAB = 19, STEPS_MAX = 16 };
#define RUNS  "tests/vectors/deepspeed/runs.json"
#define START "tests/vectors/deepspeed/start.safetensors"

static spw_error err;

static void
need(const char *name, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s: %s", name, err.message);
}

/* DeepSpeed's configuration with what it does not have: the model, the data, and weight decay for all of the client's one group. */
static void
configure(spw_config *c, const char *name, const json_t *theirs)
{
    json_t *own =
        json_pack("{s:{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:b}, s:{s:s, s:i}, s:{s:i, s:b}}", "model",
                  "model_type", "llama", "hidden_size", 8, "intermediate_size", 12, "num_hidden_layers", 2,
                  "num_attention_heads", 2, "num_key_value_heads", 1, "vocab_size", VOCAB, "max_position_embeddings",
                  16, "rms_norm_eps", 1e-5, "tie_word_embeddings", 0, "data", "path", "a", "seq_length", LENGTH,
                  "spillway", "steps", STEPS_MAX, "decay_norm_and_bias", 1);
    json_t *whole = json_deep_copy(theirs);
    json_t *frozen = json_object_get(theirs, "_frozen");
    char *text;
    assert_non_null(own);
    if (frozen != NULL)
        json_object_set(json_object_get(own, "spillway"), "freeze", frozen);
    assert_int_equal(json_object_update(whole, own), 0);
    text = json_dumps(whole, 0);
    assert_non_null(text);
    need(name, spw_config_parse(c, text, name, NULL, 0, &err));
    free(text);
    json_decref(own);
    json_decref(whole);
}

/* Micro-batches of two rows each; the formula is make_foreign_vectors.py's. */
static void
batch(uint64_t rows, uint64_t step, int32_t *tokens, int32_t *targets)
{
    for (uint64_t row = 0; row < rows; row++) {
        for (uint64_t i = 0; i <= LENGTH; i++) {
            int32_t x = (int32_t)((step * 7 + row * 5 + (step + 1) * i * i * 3 + i) % VOCAB);
            if (i < LENGTH)
                tokens[row * LENGTH + i] = x;
            if (i > 0)
                targets[row * LENGTH + i - 1] = x;
        }
    }
}

static double
number(const json_t *run, const char *list, uint64_t i)
{
    return json_number_value(json_array_get(json_object_get(run, list), i));
}

static void
compare(const char *name, uint64_t step, const char *what, double got, double want, double bound)
{
    if (!(fabs(got - want) <= bound * fabs(want)))
        fail_msg("%s, step %llu: %s is %.9g, DeepSpeed's %.9g", name, (unsigned long long)step + 1, what, got, want);
}

static void
run_one(const char *name, const json_t *run)
{
    uint64_t steps = json_array_size(json_object_get(run, "losses"));
    spw_config c;
    spw_model *m;
    spw_engine *e;
    double bound;
    configure(&c, name, json_object_get(run, "config"));
    bound = c.bf16 || c.fp16 ? 1e-2 : 2e-6; /* they compute in those; the cpu device here in fp32 */
    need(name, spw_model_from_config(&m, &c, &err));
    need(name, spw_engine_create(
                   &e, &(spw_engine_options){.config = &c, .model = m, .process_bytes = TINY_PROCESS_BYTES}, &err));
    need(name, spw_engine_load_weights(e, START, &err));
    assert_true(steps > 0 && c.train_batch_size <= ROWS_MAX);
    for (uint64_t step = 0; step < steps; step++) {
        int32_t tokens[ROWS_MAX * LENGTH], targets[ROWS_MAX * LENGTH];
        double lr = spw_schedule_lr(&c, spw_engine_updates(e) + 1), scale = spw_engine_loss_scaler(e)->scale;
        spw_step_result result;
        batch(c.train_batch_size, step, tokens, targets);
        compare(name, step, "the learning rate", lr, number(run, "lrs", step), 1e-9);
        if (c.fp16)
            compare(name, step, "the loss scale", scale, number(run, "scales", step), 0);
        need(name, spw_engine_step(e, tokens, targets, (uint32_t)c.accumulation, lr, &result, &err));
        compare(name, step, "the loss", result.loss, number(run, "losses", step), bound);
        if (result.skipped != (number(run, "skipped", step) > 0))
            fail_msg("%s, step %llu: skipped %d", name, (unsigned long long)step + 1, result.skipped);
    }
    spw_engine_destroy(e);
    spw_model_destroy(m);
}

static void
test_runs(void **state)
{
    json_t *all = json_load_file(RUNS, 0, NULL), *run;
    const char *name;
    (void)state;
    assert_true(json_object_size(all) >= 20);
    json_object_foreach(all, name, run) run_one(name, run);
    json_decref(all);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_runs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
