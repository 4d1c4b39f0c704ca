/*
 * Keys by their names: which row a key of a configuration has, by its name or its alias, and what one that has none may have meant. A
 * key a few letters away, one of another section, and what other programs call it are thought of.
 */
#include "config_internal.h"
#include "runtime_internal.h"
#include "spw_files.h"
#include <stdio.h>
#include <string.h>

enum { KEY_BYTES = SPW_CONFIG_KEY_BYTES };

const char *
spw__config_last_part(const char *key)
{
    const char *dot = strrchr(key, '.');
    return dot == NULL ? key : dot + 1;
}

/* The same section, and the last part is the row's own or its alias. */
static bool
row_matches(const key_row *row, const char *key)
{
    size_t prefix = (size_t)(spw__config_last_part(row->key) - row->key);
    if (strcmp(row->key, key) == 0)
        return true;
    return row->alias != NULL && strncmp(row->key, key, prefix) == 0 && strcmp(row->alias, key + prefix) == 0;
}

const key_row *
spw__config_find_row(const char *key)
{
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        if (row_matches(&spw__config_rows[i], key))
            return &spw__config_rows[i];
    }
    return NULL;
}

unsigned
spw__name_distance(const char *a, const char *b)
{
    unsigned row[65], n = (unsigned)strlen(b);
    if (n > 64 || strlen(a) > 64)
        return 1000;
    for (unsigned j = 0; j <= n; j++)
        row[j] = j;
    for (unsigned i = 1; a[i - 1] != '\0'; i++) {
        unsigned diagonal = row[0];
        row[0] = i;
        for (unsigned j = 1; j <= n; j++) {
            unsigned best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[n];
}

/* The row's key, or with its alias as the last part. */
static const char *
row_spelling(const key_row *row, bool alias, char *buf)
{
    size_t prefix = (size_t)(spw__config_last_part(row->key) - row->key);
    snprintf(buf, KEY_BYTES, "%.*s%s", (int)(alias ? prefix : KEY_BYTES - 1), row->key, alias ? row->alias : "");
    return buf;
}

/* What an unknown key may have meant: the same name in another section, or else a key a few letters away. */
typedef struct guess {
    char near[KEY_BYTES], elsewhere[KEY_BYTES];
    unsigned near_distance, elsewhere_distance;
} guess;

static void
consider(guess *g, const char *key, const char *candidate)
{
    unsigned d = spw__name_distance(key, candidate);
    if (strcmp(spw__config_last_part(candidate), spw__config_last_part(key)) == 0 && d < g->elsewhere_distance) {
        g->elsewhere_distance = d;
        snprintf(g->elsewhere, sizeof g->elsewhere, "%s", candidate);
    }
    if (d < g->near_distance && 3 * d <= strlen(key)) {
        g->near_distance = d;
        snprintf(g->near, sizeof g->near, "%s", candidate);
    }
}

static void
consider_model_keys(guess *g, const char *key)
{
    char candidate[KEY_BYTES];
    for (uint32_t i = 0; spw_hf_config_key(i) != NULL; i++) {
        snprintf(candidate, sizeof candidate, "model.%s", spw_hf_config_key(i));
        consider(g, key, candidate);
    }
    consider(g, key, "model.path");
}

spw_status
spw__config_unknown_key(const config_reader *r, const char *key)
{
    /* What other programs call it. */
    static const struct {
        const char *name, *key;
    } meant[] = {{"max_grad_norm", "gradient_clipping"},
                 {"learning_rate", "optimizer.params.lr"},
                 {"opt_level", "fp16.enabled"},
                 {"cos_min_lr", "scheduler.params.cos_min_ratio"},
                 {"warmup_steps", "scheduler.params.warmup_num_steps"},
                 {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
                 {"train_micro_batch_size", "train_micro_batch_size_per_gpu"},
                 {"max_steps", "spillway.steps"},
                 {"num_train_epochs", "spillway.steps"},
                 {"epochs", "spillway.steps"},
                 {"output_dir", "spillway.checkpoint_dir"},
                 {"save_steps", "spillway.checkpoint_interval"},
                 {"save_total_limit", "spillway.keep_last"},
                 {"eval_steps", "spillway.eval_interval"},
                 {"gradient_checkpointing", "spillway.recompute"},
                 {"r", "spillway.lora.rank"},
                 {"lora_alpha", "spillway.lora.alpha"},
                 {"lora_dropout", "spillway.lora.dropout"},
                 {"target_modules", "spillway.lora.targets"},
                 {"model_name_or_path", "model.path"},
                 {"train_file", "data.path"},
                 {"files", "data.path"},
                 {"chat_template", "data.chat"},
                 {"seqlen", "data.seq_length"},
                 {"max_seq_length", "data.seq_length"},
                 {"max_length", "data.seq_length"}};
    guess g = {.near_distance = 4, .elsewhere_distance = UINT32_MAX};
    char candidate[KEY_BYTES];
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        consider(&g, key, row_spelling(&spw__config_rows[i], false, candidate));
        if (spw__config_rows[i].alias != NULL)
            consider(&g, key, row_spelling(&spw__config_rows[i], true, candidate));
    }
    consider_model_keys(&g, key);
    for (size_t i = 0; i < sizeof meant / sizeof meant[0]; i++) {
        if (strcmp(spw__config_last_part(key), meant[i].name) == 0) {
            snprintf(g.near, sizeof g.near, "%s", meant[i].key);
            g.elsewhere[0] = '\0';
        }
    }
    if (strncmp(key, "model.", 6) == 0 &&
        (strcmp(g.near, key) == 0 || strcmp(g.elsewhere, key) == 0)) /* a key of the section, but not of this family */
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: \"%s\" is a key of other values of model.model_type", r->name, key);
    if (g.elsewhere[0] != '\0') {
        int section = (int)(spw__config_last_part(g.elsewhere) - g.elsewhere);
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: unknown key \"%s\"; \"%s\" belongs in %.*s; did you mean \"%s\"?",
                         r->name, key, spw__config_last_part(key), section > 0 ? section - 1 : 13,
                         section > 0 ? g.elsewhere : "the top level", g.elsewhere);
    }
    if (g.near[0] != '\0')
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: unknown key \"%s\"; did you mean \"%s\"?", r->name, key, g.near);
    return SPW_RAISE(r->err, SPW_ECONFIG, "%s: unknown key \"%s\"; spillway help config lists all keys", r->name, key);
}
