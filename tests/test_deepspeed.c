/*
 * Configurations as they come from DeepSpeed: written for its parser, for transformers' Trainer or years ago. What it takes
 * is taken with the same meaning, and what is refused or differs is said in words that help.
 */
#include "config_internal.h"
#include "lib_tiny.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#define NEEDED                                                                                                         \
    "\"model\":{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,\"n_head\":1},\"data\":{\"path\":\"a\"},"           \
    "\"spillway\":{\"steps\":40},"
#define MICRO "\"train_micro_batch_size_per_gpu\":2,"

static spw_config c;
static spw_error err;
static char heard[4000];

static void
hear(void *ctx, spw_log_level level, const char *line)
{
    size_t n = strlen(heard);
    (void)ctx;
    if (level == SPW_LOG_WARN)
        snprintf(heard + n, sizeof heard - n, "%s\n", line);
}

/* Parses, with the warnings in heard. */
static spw_status
parse(const char *text)
{
    spw_status st;
    err = (spw_error){0};
    heard[0] = '\0';
    spw_log_set(hear, NULL);
    st = spw_config_parse(&c, text, "ds.json", NULL, 0, &err);
    spw_log_set(NULL, NULL);
    return st;
}

static void
takes(const char *text)
{
    if (parse(text) != SPW_OK)
        fail_msg("%s: %s", text, err.message);
}

static void
refuses(const char *text, const char *says)
{
    if (parse(text) != SPW_ECONFIG || strstr(err.message, says) == NULL)
        fail_msg("%s: \"%s\" should hold \"%s\"", text, err.message, says);
}

/* Comments of three kinds and commas before a bracket, as Hjson has them; strings keep theirs, and messages their columns. */
static void
test_comments(void **state)
{
    (void)state;
    takes("// above \"all\n{ " NEEDED "# hash {\n \"bf16\": {\"enabled\": true, }, /* \"bf16\"\n and more, */\n"
          "\"optimizer\": {\"params\": {\"betas\": [0.8, 0.9 /* , */ , ] , // last\n } }, " MICRO
          "\n# end\n}\n// over");
    assert_true(c.bf16 && c.optimizer.beta2 == 0.9);
    takes("{" NEEDED MICRO "\"zero_optimization\":{\"stage\":3,\"offload_param\":{\"device\":\"nvme\","
          "\"nvme_path\":\"/a//b#\\\"/*c,]\"}}}");
    assert_string_equal(c.zero.param_path.item[0], "/a//b#\"/*c,]");
    refuses("{ // one\n  /* two */ \"bf16\": nothing }", "ds.json:2:");
    refuses("{\n \"bf16\": {}, /* never closed\n }", "ds.json:2:");
    refuses("{\"bf16\": {,}}", "ds.json:1:");
    refuses("{\"betas\": [1,,]}", "ds.json:1:");
    refuses("{\"bf16\": \"cut", "ds.json:1:");
    refuses("// nothing", "ds.json:1:");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_comments)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
