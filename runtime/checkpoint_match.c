/*
 * Would going on from a checkpoint compute what its own run would have computed? Compares the configuration in its
 * manifest with the one to go on with, key by key, over the keys that decide the result, and what is known of the data.
 * Where state lives, how it is moved and how long training goes on are free.
 */
#include "checkpoint_internal.h"
#include <stdio.h>
#include <stdlib.h>

/* Whole sections (they end with a dot) and single keys. */
static const char *const deciding[] = {"model.",
                                       "train_batch_size",
                                       "train_micro_batch_size_per_gpu",
                                       "gradient_accumulation_steps",
                                       "gradient_clipping",
                                       "optimizer.",
                                       "scheduler.",
                                       "bf16.check_grad_overflow",
                                       "fp16.",
                                       "zero_optimization.zero_quantized_weights",
                                       "zero_optimization.zero_quantized_nontrainable_weights",
                                       "zero_optimization.zero_quantized_gradients",
                                       "communication_data_type",
                                       "data.",
                                       "spillway.seed",
                                       "spillway.state_format",
                                       "spillway.grad_dtype",
                                       "spillway.micro_batches_per_pass",
                                       "spillway.tile_tokens",
                                       "spillway.tile_vocab",
                                       "spillway.param_groups",
                                       "spillway.freeze",
                                       "spillway.frozen_codes",
                                       "spillway.delayed_update",
                                       "spillway.checkpoint_interval",
                                       "spillway.router_balance",
                                       "spillway.fp8",
                                       "spillway.lora.",
                                       "spillway.decay_norm_and_bias",
                                       "spillway.nearest_moments"};

bool
spw__config_decides(const char *key)
{
    if (strcmp(key, "data.cache_dir") == 0 || strcmp(key, "data.chat") == 0) /* what a layout says is in the encoder */
        return false;
    for (size_t i = 0; i < sizeof deciding / sizeof deciding[0]; i++) {
        size_t n = strlen(deciding[i]);
        if (deciding[i][n - 1] == '.' ? strncmp(key, deciding[i], n) == 0 : strcmp(key, deciding[i]) == 0)
            return true;
    }
    return false;
}

typedef struct match {
    void (*line)(void *ctx, const char *text);
    void *ctx;
    uint32_t count;
    const spw_config *saved, *now;
} match;

/* What is frozen has no record: only its weights, as the format stores them. */
static bool
same_frozen(const spw_config *saved, const spw_config *now)
{
    bool frozen = now->run.freeze.count > 0 || now->run.lora.rank > 0;
    return !frozen || spw_state_weight_dtype(saved->run.state_format) == spw_state_weight_dtype(now->run.state_format);
}

/*
 * Two state formats that hold the same numbers and turn into each other without loss. And with another number of ranks the
 * same batch is shared out in another way. When saves come decides only where they apply updates that would have been made a step late.
 */
static bool
excused(const match *m, const char *key)
{
    if (m->saved->run.ranks != m->now->run.ranks && m->saved->train_batch_size == m->now->train_batch_size &&
        (strcmp(key, "train_micro_batch_size_per_gpu") == 0 || strcmp(key, "gradient_accumulation_steps") == 0))
        return true;
    if (strcmp(key, "spillway.checkpoint_interval") == 0)
        return m->saved->run.delayed_update == 0 || m->now->run.delayed_update == 0;
    return strcmp(key, "spillway.state_format") == 0 && spw_state_exact(m->saved->run.state_format) &&
           spw_state_exact(m->now->run.state_format) && same_frozen(m->saved, m->now);
}

static void
tell(match *m, const char *key, const char *saved, const char *now)
{
    char text[1100];
    snprintf(text, sizeof text, "%.200s: %.400s in the checkpoint, %.400s now", key, saved, now);
    m->line(m->ctx, text);
    m->count++;
}

/* As people wrote it; 17 digits where two numbers would look the same otherwise. */
static char *
show(const json_t *v, const json_t *other)
{
    size_t brief = JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15);
    char *text = v != NULL ? json_dumps(v, brief) : strdup("not set"), *beside = json_dumps(other, brief);
    if (text != NULL && beside != NULL && strcmp(text, beside) == 0) {
        free(text);
        text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(17));
    }
    free(beside);
    return text;
}

static spw_status
compare_value(match *m, const char *key, const json_t *saved, const json_t *now, spw_error *err)
{
    char *a, *b;
    if (saved == now || json_equal(saved, now) || excused(m, key))
        return SPW_OK;
    a = show(saved, now);
    b = show(now, saved);
    if (a != NULL && b != NULL)
        tell(m, key, a, b);
    free(a);
    free(b);
    return a != NULL && b != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "comparing configurations");
}

/*
 * Objects by member, everything else as one value. only_new: the members that saved does not have, so that both calls
 * together see each key once.
 */
static spw_status
compare_object(match *m, const char *prefix, json_t *saved, json_t *now, spw_error *err)
{
    for (int only_new = 0; only_new < 2; only_new++) {
        const char *name;
        json_t *unused;
        json_object_foreach(only_new ? now : saved, name, unused)
        {
            char key[256];
            json_t *a = json_object_get(saved, name), *b = json_object_get(now, name);
            (void)unused;
            snprintf(key, sizeof key, "%.120s%s%.120s", prefix, prefix[0] != '\0' ? "." : "", name);
            if (only_new && a != NULL)
                continue;
            if (json_is_object(a) || json_is_object(b)) {
                SPW_TRY(compare_object(m, key, json_is_object(a) ? a : NULL, json_is_object(b) ? b : NULL, err));
            } else if (spw__config_decides(key)) {
                SPW_TRY(compare_value(m, key, a, b, err));
            }
        }
    }
    return SPW_OK;
}

/* Both as this version prints them: what one does not say has its default. */
static spw_status
compare_config(match *m, spw_error *err)
{
    char *text[2] = {spw_config_dump(m->saved), spw_config_dump(m->now)};
    json_t *root[2] = {NULL, NULL};
    spw_status st = SPW_OK;
    for (int i = 0; i < 2; i++)
        root[i] = text[i] != NULL ? json_loads(text[i], 0, NULL) : NULL;
    st = root[0] != NULL && root[1] != NULL ? compare_object(m, "", root[0], root[1], err)
                                            : SPW_RAISE(err, SPW_ENOMEM, "comparing configurations");
    for (int i = 0; i < 2; i++) {
        json_decref(root[i]);
        spw_mem_free(text[i]);
    }
    return st;
}

static void
compare_number(match *m, const char *what, uint64_t saved, uint64_t now)
{
    char a[32], b[32];
    snprintf(a, sizeof a, "%llu", (unsigned long long)saved);
    snprintf(b, sizeof b, "%llu", (unsigned long long)now);
    if (saved != now)
        tell(m, what, a, b);
}

static void
compare_text(match *m, const char *what, const char *saved, const char *now)
{
    if (strcmp(saved, now) != 0)
        tell(m, what, saved, now);
}

static void
compare_data(match *m, const char *path, const spw_data_summary *saved, const spw_data_summary *now)
{
    if (saved->files == 0) {
        spw_log(SPW_LOG_WARN,
                "%s is older than the description of training data: whether that is the same is not known", path);
        return;
    }
    compare_number(m, "files of training data", saved->files, now->files);
    compare_number(m, "bytes of training data", saved->bytes, now->bytes);
    compare_number(m, "tokens of training data", saved->tokens, now->tokens);
    compare_text(m, "formats of training data", saved->formats, now->formats);
    if (saved->encoder[0] != '\0') /* older ones do not say */
        compare_text(m, "encoder of training data", saved->encoder, now->encoder);
    if (saved->held_out_known && now->held_out_known) {
        compare_number(m, "held-out sequences", saved->held_out, now->held_out);
    } else if (!saved->held_out_known && now->held_out_moved) { /* as many or not, they are others */
        char a[64], b[64];
        snprintf(a, sizeof a, "%llu, each file's share rounded by itself,", (unsigned long long)now->held_out_before);
        snprintf(b, sizeof b, "%llu with remainders carried from file to file", (unsigned long long)now->held_out);
        tell(m, "held-out sequences", a, b);
    }
}

spw_status
spw__config_compare(const spw_config *saved, const spw_config *now, spw__difference_fn line, void *ctx, uint32_t *count,
                    spw_error *err)
{
    match m = {line, ctx, 0, saved, now};
    spw_status st = compare_config(&m, err);
    *count = m.count;
    return st;
}

spw_status
spw_checkpoint_compare(const char *path, const spw_config *config, const spw_data_summary *data,
                       void (*line)(void *ctx, const char *text), void *ctx, uint32_t *count_out, spw_error *err)
{
    spw_config *saved = spw_mem_zalloc(sizeof *saved);
    match m = {line, ctx, 0, saved, config};
    char file[SPW_PATH_BYTES + 64];
    spw_manifest then;
    spw_status st = saved == NULL ? SPW_RAISE(err, SPW_ENOMEM, "configuration of %s", path) : SPW_OK;
    *count_out = 0;
    if (st == SPW_OK)
        st = spw__manifest_read(&then, path, err);
    if (st != SPW_OK) {
        spw_mem_free(saved);
        return st;
    }
    snprintf(file, sizeof file, "%.1000s/" SPW_MANIFEST_FILE, path);
    st = spw__manifest_config(&then, file, saved, err);
    if (st == SPW_OK)
        st = compare_config(&m, err);
    if (st == SPW_OK && data != NULL)
        compare_data(&m, path, &then.state.data, data);
    spw__manifest_free(&then);
    spw_mem_free(saved);
    *count_out = m.count;
    return st;
}
