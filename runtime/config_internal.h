/* Inside the configuration: one row per key. */
#ifndef SPW_CONFIG_INTERNAL_H
#define SPW_CONFIG_INTERNAL_H

#include "spw_config.h"
#include <jansson.h>

typedef enum key_type {
    K_SECTION, /* an object whose keys are rows of their own */
    K_BOOL,
    K_U64,
    K_U32,
    K_I32,
    K_REAL,
    K_TEXT, /* char array, bytes in `size` */
    K_PATH, /* the same, and ~/ is the home folder */
    K_BYTES,
    K_PATHS,
    K_TIER,
    K_PLACE, /* a tier by its name, or auto */
    K_FORMAT,
    K_DTYPE,
    K_BACKEND,
    K_BETAS,
    K_GROUPS, /* parameter groups */
    K_GLOBS,  /* spw_glob_list */
    K_ANY     /* looked at by class only */
} key_type;

typedef enum key_class {
    C_BUILT,
    C_INERT,     /* cannot matter here: said once */
    C_UNBUILT,   /* refused unless it has the value that switches nothing on */
    C_DEPRECATED /* works; help says what replaces it */
} key_class;

#define SPW_CONFIG_NOWHERE SIZE_MAX /* offset of a row whose value is checked and not kept */

typedef struct key_row {
    const char *key, *alias; /* dotted; alias: another spelling of the last part, or NULL */
    key_type type;
    key_class class;
    size_t offset, size;
    double min, max;
    const char *fallback; /* default as JSON text; NULL: none */
    const char *help;
    const char *choices; /* K_TEXT: "a|b|c"; NULL: any */
} key_row;

extern const key_row spw__config_rows[];
extern const uint32_t spw__config_row_count;

/* The default as JSON text: this type of optimizer's own, or else the row's; NULL: none. */
const char *spw__config_fallback(const key_row *row, const char *optimizer);
/* What transformers' Trainer puts where "auto" is, if its argument is not given either, as JSON text; NULL: nothing. */
const char *spw__config_trainer_default(const char *key);

enum { SPW_CONFIG_KEY_BYTES = 256, SPW_CONFIG_TEXT_BYTES = 4 << 20, SPW_REMARK_BYTES = 600 };
const key_row *spw__config_find_row(const char *key); /* by key or alias; NULL: none (config_names.c) */
const char *spw__config_last_part(const char *key);
/* The spelling of the last part of key that is not name: an alias or what it is for; NULL: there is one spelling. */
const char *spw__config_other_spelling(const char *key, const char *name);

/* An object; comments and trailing commas are none of it (config_text.c). */
spw_status spw__config_json(json_t **out, const char *text, const char *name, spw_error *err);

/* The files that a configuration was merged from, the including one last. Zeroed: one file only. */
typedef struct config_layers {
    struct {
        char *name;
        json_t *root;
    } layer[SPW_PATHS_MAX + 1];
    uint32_t count;
} config_layers;
/*
 * spw__config_include - takes "include" out of *root and merges the files it names below the rest (how: config_include.c).
 * Errors  SPW_ECONFIG, SPW_ENOENT and the like, with the file. layers may be partly filled; deinit always.
 * Owns    *root may be another object afterwards; the caller's reference moves along.
 */
spw_status spw__config_include(json_t **root, const char *name, config_layers *layers, spw_error *err);
/* Which file says v under this key; name where none does (an override, a default). */
const char *spw__config_source(const config_layers *layers, const char *name, const char *key, const json_t *v);
void spw__config_layers_deinit(config_layers *layers);

/* What a person is told about more than one key, once, when all of them are known. */
typedef struct config_remarks {
    char unbuilt[SPW_REMARK_BYTES]; /* the refusal of every key whose feature is missing */
    char autos[SPW_REMARK_BYTES];   /* defaults that stand where "auto" was said */
    char inert[SPW_REMARK_BYTES];   /* keys that change nothing here */
    char wrong[SPW_REMARK_BYTES];   /* mistakes, a line each, as many as have room */
    uint32_t wrong_count, wrong_shown;
    spw_error first_wrong;
} config_remarks;

typedef struct config_reader {
    spw_config *out;
    const char *name; /* of the file */
    spw_error *err;
    const config_layers *layers; /* NULL: one file only */
    config_remarks *remarks;     /* shared by all readers of a configuration */
} config_reader;

extern const char *const spw__config_tiers[SPW_TIER_COUNT]; /* as DeepSpeed calls them: none, cpu, nvme */
/*
 * A path as it was written; a leading ~/ becomes $HOME/, which no shell has seen to in a file. What is longer than out is cut off
 * there, and longer than any path may be. SPW_ECONFIG: HOME is not set.
 */
spw_status
spw__config_path(char out[2 * SPW_PATH_BYTES], const char *name, const char *key, const char *text, spw_error *err);
/* SPW_ECONFIG, with what may have been meant (config_names.c). */
spw_status spw__config_unknown_key(const config_reader *r, const char *key);
/* SPW_ECONFIG: expected this, got v. */
spw_status spw__config_bad_value(const config_reader *r, const char *key, const char *expected, const json_t *v);
/* Into r->out, by the row; null leaves what is there, and "auto" where a Trainer has no argument (config_values.c). */
spw_status spw__config_read_value(const config_reader *r, const key_row *row, json_t *v);
bool spw__config_says_default(const key_row *row, const json_t *v); /* "auto" does, too */
spw_status spw__config_set_default(const config_reader *r, const key_row *row, const char *fallback); /* JSON text */
/* One more of the same kind; what no longer fits is dots. */
__attribute__((format(printf, 2, 3))) void spw__config_remark(char list[SPW_REMARK_BYTES], const char *format, ...);
/*
 * A person is told all mistakes at once, not the next one after each correction: note keeps the one that st and r->err are
 * and returns SPW_OK (but lack of memory ends it); noted fails with all of them.
 */
spw_status spw__config_note(const config_reader *r, spw_status st);
spw_status spw__config_noted(const config_reader *r);
spw_status spw__config_check_optimizer(const config_reader *r, const char *type); /* SPW_ECONFIG: there is none of it */
bool spw__config_optimizer_takes(const char *type, const char *param);            /* of optimizer.params */
bool spw__config_scheduler_takes(const char *type, const char *param);            /* of scheduler.params */
/* Values that follow from others, and the checks that need more than one key; root: what was read. */
spw_status spw__config_settle(const config_reader *r, const json_t *root);

#endif
