/*
 * Would going on from a checkpoint compute what its own run would have computed? Compares the configuration in its
 * manifest with the one to go on with, key by key, over the keys that decide the result, and what is known of the data.
 * Where state lives, how it is moved and how long training goes on are free. Do two ranks train the same? Compares in
 * the same way, over those keys and the ones by which ranks do the same thing at the same time.
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
                                       "spillway.expert_turns",
                                       "spillway.param_groups",
                                       "spillway.freeze",
                                       "spillway.frozen_codes",
                                       "spillway.delayed_update",
                                       "spillway.checkpoint_interval",
                                       "spillway.router_balance",
                                       "spillway.fp8",
                                       "spillway.lora.",
                                       "spillway.preference.",
                                       "spillway.decay_norm_and_bias",
                                       "spillway.nearest_moments"};

/* Free for a checkpoint, but alike on all ranks: by these they call each other. */
static const char *const together[] = {"zero_optimization.stage",
                                       "zero_optimization.prefetch_bucket_size",
                                       "sequence_parallel_size",
                                       "zero_optimization.zero_hpz_partition_size",
                                       "zero_optimization.mics_shard_size",
                                       "zero_optimization.mics_hierarchical_params_gather",
                                       "spillway.collectives",
                                       "spillway.chunk_elems",
                                       "spillway.start",
                                       "spillway.prefetch",
                                       "spillway.steps",
                                       "spillway.reference_steps",
                                       "spillway.eval_interval",
                                       "spillway.eval_batches",
                                       "spillway.checkpoint_dir",
                                       "spillway.save_at_end",
                                       "spillway.save_in_background",
                                       "spillway.write_budget",
                                       "spillway.write_budget_action"};

static bool
is_among(const char *key, const char *const *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t n = strlen(list[i]);
        if (list[i][n - 1] == '.' ? strncmp(key, list[i], n) == 0 : strcmp(key, list[i]) == 0)
            return true;
    }
    return false;
}

bool
spw__config_decides(const char *key)
{
    if (strcmp(key, "data.cache_dir") == 0 || strcmp(key, "data.chat") == 0) /* what a layout says is in the encoder */
        return false;
    return is_among(key, deciding, sizeof deciding / sizeof deciding[0]);
}

/* A path may be another on each host. What lies there is in the model's section, or in the description of the data. */
static bool
is_alike_on_ranks(const char *key)
{
    if (strcmp(key, "model.path") == 0 || strcmp(key, "data.path") == 0 || strcmp(key, "data.tokenizer") == 0)
        return false;
    return spw__config_decides(key) || is_among(key, together, sizeof together / sizeof together[0]);
}

typedef struct match {
    void (*line)(void *ctx, const char *text);
    void *ctx;
    uint32_t count;
    const spw_config *saved, *now; /* of ranks: NULL */
    const char *there, *here;      /* what is compared, in messages */
    bool ranks, same_encoder;      /* same_encoder: what makes tokens is known to be the same */
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
 * same batch is shared out in another way. A tokenizer may lie elsewhere. Turns of experts decide only of what is in codes between hosts. When saves come decides only where they apply updates that would have been made a step late.
 */
static bool
excused(const match *m, const char *key)
{
    if ((m->saved->run.ranks != m->now->run.ranks || spw_config_sharers(m->saved) != spw_config_sharers(m->now)) &&
        m->saved->train_batch_size == m->now->train_batch_size &&
        (strcmp(key, "train_micro_batch_size_per_gpu") == 0 || strcmp(key, "gradient_accumulation_steps") == 0))
        return true;
    if (strcmp(key, "data.tokenizer") == 0)
        return m->same_encoder;
    if (strcmp(key, "spillway.expert_turns") == 0)
        return !m->saved->zero.quantized_gradients || !m->now->zero.quantized_gradients;
    if (strcmp(key, "spillway.checkpoint_interval") == 0)
        return m->saved->run.delayed_update == 0 || m->now->run.delayed_update == 0;
    return strcmp(key, "spillway.state_format") == 0 && spw_state_exact(m->saved->run.state_format) &&
           spw_state_exact(m->now->run.state_format) && same_frozen(m->saved, m->now);
}

static void
tell(match *m, const char *key, const char *saved, const char *now)
{
    char text[1100];
    snprintf(text, sizeof text, "%.200s: %.400s %s, %.400s %s", key, saved, m->there, now, m->here);
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

/* Sources without their paths; everything else as it is. */
static json_t *
shares(const json_t *sources)
{
    json_t *list = json_array(), *one;
    size_t i;
    json_array_foreach(sources, i, one)
    {
        json_t *share = json_is_object(one) ? json_copy(one) : json_object();
        json_object_del(share, "path");
        json_array_append_new(list, share);
    }
    return list;
}

/* Where only a path differs. */
static bool
same_on_ranks(const char *key, const json_t *first, const json_t *own)
{
    json_t *a, *b;
    bool same;
    if (strcmp(key, "spillway.checkpoint_dir") == 0)
        return (json_string_length(first) == 0) == (json_string_length(own) == 0);
    if (strcmp(key, "data.sources") != 0)
        return false;
    a = shares(first);
    b = shares(own);
    same = json_equal(a, b);
    json_decref(a);
    json_decref(b);
    return same;
}

static spw_status
compare_value(match *m, const char *key, const json_t *saved, const json_t *now, spw_error *err)
{
    char *a, *b;
    if (saved == now || json_equal(saved, now) || (m->ranks ? same_on_ranks(key, saved, now) : excused(m, key)))
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
            } else if (m->ranks ? is_alike_on_ranks(key) : spw__config_decides(key)) {
                SPW_TRY(compare_value(m, key, a, b, err));
            }
        }
    }
    return SPW_OK;
}

/* Both as spw_config_dump() prints them, NULL where it had no memory: what one does not say has its default. */
static spw_status
compare_texts(match *m, const char *saved, const char *now, spw_error *err)
{
    json_t *a = saved != NULL ? json_loads(saved, 0, NULL) : NULL, *b = now != NULL ? json_loads(now, 0, NULL) : NULL;
    spw_status st = a != NULL && b != NULL ? compare_object(m, "", a, b, err)
                                           : SPW_RAISE(err, SPW_ENOMEM, "comparing configurations");
    json_decref(a);
    json_decref(b);
    return st;
}

static spw_status
compare_config(match *m, spw_error *err)
{
    char *saved = spw_config_dump(m->saved), *now = spw_config_dump(m->now);
    spw_status st = compare_texts(m, saved, now, err);
    spw_mem_free(saved);
    spw_mem_free(now);
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
    match m = {line, ctx, 0, saved, now, "in the checkpoint", "now", false, false};
    spw_status st = compare_config(&m, err);
    *count = m.count;
    return st;
}

spw_status
spw_checkpoint_compare(const char *path, const spw_config *config, const spw_data_summary *data,
                       void (*line)(void *ctx, const char *text), void *ctx, uint32_t *count_out, spw_error *err)
{
    spw_config *saved = spw_mem_zalloc(sizeof *saved);
    match m = {line, ctx, 0, saved, config, "in the checkpoint", "now", false, false};
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
    m.same_encoder = data != NULL && data->encoder[0] != '\0' && strcmp(then.state.data.encoder, data->encoder) == 0;
    if (st == SPW_OK)
        st = compare_config(&m, err);
    if (st == SPW_OK && data != NULL)
        compare_data(&m, path, &then.state.data, data);
    spw__manifest_free(&then);
    spw_mem_free(saved);
    *count_out = m.count;
    return st;
}

spw_status
spw_checkpoint_compare_ranks(const char *first_config, const spw_checkpoint_state *first, const spw_config *config,
                             const spw_checkpoint_state *state, void (*line)(void *ctx, const char *text), void *ctx,
                             uint32_t *count_out, spw_error *err)
{
    match m = {line, ctx, 0, NULL, NULL, "on rank 0", "here", true, false};
    char *own = spw_config_dump(config);
    spw_status st = compare_texts(&m, first_config, own, err);
    spw_mem_free(own);
    if (st == SPW_OK) {
        compare_number(&m, "step of the checkpoint to go on from", first->step, state->step);
        compare_number(&m, "sequences that it has seen", first->data_position, state->data_position);
        compare_number(&m, "updates that it has made", first->updates, state->updates);
        compare_data(&m, "rank 0", &first->data, &state->data);
    }
    *count_out = m.count;
    return st;
}
