/*
 * Which matrices of a folder are published as codes that can be kept as they are (spw_codes.h): by the types of its tensors, or, of a folder that has its
 * config.json alone, by what that says, so that what does not fit anywhere here can be planned. published_read.c reads them.
 * Source: the documentation of compressed-tensors (config_groups, ignore: names, or regular expressions behind "re:"), and of transformers
 * (modules_to_not_convert: names or what they begin with).
 */
#include "hf_reader.h"
#include <jansson.h>
#include <regex.h>
#include <stdio.h>

/* SPW_QUANT_NONE: rows of so many columns are not kept. A group is of one row, and of one column of the publisher's blocks. */
static spw_quant
form_of(const spw_scaled *b, uint64_t cols, bool bf16_scales, spw_dtype dtype)
{
    uint32_t group = SPW_QUANT_BLOCK;
    while (group > 8 && (b->cols % group != 0 || cols % group != 0))
        group /= 2;
    if (group == 8)
        return SPW_QUANT_NONE;
    return spw_codes_published(b->bits, b->floats || !b->packed,
                               b->scales == SPW_SCALES_E8M0             ? SPW_SCALE_E8M0
                               : b->scales == SPW_SCALES_E4M3           ? SPW_SCALE_F32 /* two in one */
                               : bf16_scales && group < SPW_QUANT_BLOCK ? SPW_SCALE_BF16
                                                                        : SPW_SCALE_F32,
                               group, dtype == SPW_BF16);
}

/* MXFP4 as gpt-oss has it: a group is of one column. */
static spw_quant
form_of_strips(const spw_param *p, spw_dtype dtype)
{
    if (p->rows % SPW_STRIP_ROWS != 0 || p->cols % 4 != 0 || p->cols > SPW_STRIP_COLS_MAX)
        return SPW_QUANT_NONE;
    return spw_codes_strips((uint32_t)p->cols, dtype == SPW_BF16);
}

/* The forms that were met, of which there is room for some; what has another one stays numbers. */
typedef struct met {
    spw_quant forms[SPW_FORMS_MAX];
    uint32_t count;
} met;

static spw_quant
add_form(met *m, spw_quant form)
{
    uint32_t k = 0;
    while (k < m->count && m->forms[k] != form)
        k++;
    if (form == SPW_QUANT_NONE || k == SPW_FORMS_MAX)
        return SPW_QUANT_NONE;
    m->forms[k] = form;
    m->count = k < m->count ? m->count : k + 1;
    return form;
}

static void
of_tensors(spw_quant *forms, met *found, const spw_hf_reader *r, const spw_model *m, spw_dtype dtype)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        const bool coded = r->scale_of[id] != UINT32_MAX;
        const bool bf16 = coded && r->tensors[r->scale_of[id]].info->dtype == SPW_BF16;
        forms[id] = coded ? add_form(found, form_of(spw__hf_blocks_of(r, id), m->params[id].cols, bf16, dtype))
                    : r->mapped[id].blocks != NULL ? add_form(found, form_of_strips(&m->params[id], dtype))
                                                   : SPW_QUANT_NONE;
    }
}

/* ---------------------------------------------------------------- by config.json alone */

enum { ITEMS_MAX = 256 };

/* What a configuration's lists leave out: modules by name, and all in them, or expressions. */
typedef struct left_out {
    const char *names[ITEMS_MAX];
    regex_t expressions[ITEMS_MAX];
    uint32_t name_count, expression_count;
    bool images; /* they call what is read here language_model.X */
} left_out;

/* What is no expression here leaves nothing out. */
static void
add_item(left_out *l, const char *item)
{
    char pattern[512];
    if (item != NULL && strncmp(item, "re:", 3) != 0 && l->name_count < ITEMS_MAX)
        l->names[l->name_count++] = item;
    else if (item != NULL && l->expression_count < ITEMS_MAX &&
             snprintf(pattern, sizeof pattern, "^(%s)", item + 3) < (int)sizeof pattern &&
             regcomp(&l->expressions[l->expression_count], pattern, REG_EXTENDED | REG_NOSUB) == 0)
        l->expression_count++;
}

static void
take_lists(left_out *l, const json_t *quantization)
{
    static const char *const lists[] = {"ignore", "modules_to_not_convert", "ignored_layers"};
    for (size_t k = 0; k < sizeof lists / sizeof lists[0]; k++) {
        const json_t *list = json_object_get(quantization, lists[k]);
        for (size_t i = 0; i < json_array_size(list); i++)
            add_item(l, json_string_value(json_array_get(list, i)));
    }
}

static bool
has(const left_out *l, const char *module)
{
    bool found = false;
    for (uint32_t i = 0; i < l->name_count && !found; i++) {
        const size_t n = strlen(l->names[i]);
        found = strncmp(module, l->names[i], n) == 0 && (module[n] == '\0' || module[n] == '.');
    }
    for (uint32_t i = 0; i < l->expression_count && !found; i++)
        found = regexec(&l->expressions[i], module, 0, NULL, 0) == 0;
    return found;
}

static bool
is_left_out(const left_out *l, const char *module)
{
    char longer[SPW_TENSOR_NAME_BYTES + 32];
    snprintf(longer, sizeof longer, "language_model.%s", module);
    return has(l, module) || (l->images && has(l, longer));
}

/* Matrices of layers, without routers, and what DeepSeek-V4 has in 16 bits or more without a list that says so. */
static bool
may_be_codes(const spw_param *p)
{
    static const char *const numbers[] = {".gate.weight", ".compressor.", "_hc."};
    bool may = p->ndim == 2 && p->stack == 0 && !p->adapter && strncmp(p->name, "model.layers.", 13) == 0;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        may = may && strstr(p->name, numbers[i]) == NULL;
    return may;
}

/* experts: what theirs are codes of, where they differ from the others; rows 0: they do not. */
static void
of_config(spw_quant *forms, met *found, const left_out *l, const spw_scaled *b, const spw_scaled *experts,
          const spw_model *m, spw_dtype dtype)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        const spw_param *p = &m->params[id];
        const char *end = strstr(p->name, ".weight");
        const bool other = experts->rows > 0 && strstr(p->name, ".experts.") != NULL;
        char module[SPW_TENSOR_NAME_BYTES];
        snprintf(module, sizeof module, "%.*s", end != NULL ? (int)(end - p->name) : (int)strlen(p->name), p->name);
        forms[id] = may_be_codes(p) && !is_left_out(l, module)
                        ? add_form(found, form_of(other ? experts : b, p->cols, b->packed, dtype))
                        : SPW_QUANT_NONE;
    }
}

/* gpt-oss' experts, which no list leaves out. */
static void
of_mxfp4(spw_quant *forms, met *found, const spw_model *m, spw_dtype dtype)
{
    for (uint32_t id = 0; id < m->param_count; id++)
        forms[id] = m->params[id].stack > 0 && m->params[id].ndim == 2
                        ? add_form(found, form_of_strips(&m->params[id], dtype))
                        : SPW_QUANT_NONE;
}

static bool
is_mxfp4(const json_t *quantization)
{
    const char *method = json_string_value(json_object_get(quantization, "quant_method"));
    return method != NULL && strcmp(method, "mxfp4") == 0;
}

/* DeepSeek-V4's says it beside quantization_config, and transformers in it. */
static bool
says_fp4(const json_t *object)
{
    const char *type = json_string_value(json_object_get(object, "expert_dtype"));
    return type != NULL && strcmp(type, "fp4") == 0;
}

static spw_status
read_config(spw_quant *forms, met *found, const char *folder, const spw_model *m, spw_dtype dtype, spw_error *err)
{
    char file[SPW_HF_CONFIG_PATH_BYTES];
    const json_t *whole, *text;
    spw_scaled b, experts = {0};
    left_out *l;
    json_t *root;
    SPW_TRY(spw__hf_folder_config(&root, file, folder, err));
    l = spw_mem_zalloc(sizeof *l);
    text = json_object_get(root, "text_config");
    whole = json_object_get(root, "quantization_config");
    whole = whole != NULL ? whole : json_object_get(text, "quantization_config");
    if (is_mxfp4(whole))
        of_mxfp4(forms, found, m, dtype);
    else if (l != NULL && whole != NULL && spw__scaled_refused(whole, &b) == NULL) {
        l->images = text != NULL;
        take_lists(l, whole);
        if (says_fp4(whole) || says_fp4(root))
            spw__scaled_of_experts(&experts);
        of_config(forms, found, l, &b, &experts, m, dtype);
    }
    for (uint32_t i = 0; l != NULL && i < l->expression_count; i++)
        regfree(&l->expressions[i]);
    json_decref(root);
    if (l == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s", file);
    spw_mem_free(l);
    return SPW_OK;
}

/* ---------------------------------------------------------------- either */

bool
spw_hf_reader_codes(spw_quant *forms, const spw_hf_reader *r, const spw_model *m, spw_dtype dtype)
{
    met found = {0};
    of_tensors(forms, &found, r, m, dtype);
    return found.count > 0;
}

spw_status
spw_hf_codes(spw_quant *forms, const char *folder, const spw_model *m, spw_dtype dtype, spw_error *err)
{
    spw_hf_reader *r = NULL;
    met found = {0};
    bool any = false;
    spw_status st;
    if (!spw_hf_has_weights(folder)) {
        SPW_TRY(read_config(forms, &found, folder, m, dtype, err));
        any = found.count > 0;
    } else {
        st = spw_hf_reader_open(&r, folder, err);
        if (st == SPW_OK)
            st = spw_hf_reader_bind(r, m, err);
        if (st == SPW_OK)
            any = spw_hf_reader_codes(forms, r, m, dtype);
        spw_hf_reader_close(r);
        SPW_TRY(st);
    }
    return any ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG,
                           "spillway.frozen_codes \"published\": %s has no matrices as codes that are kept as they "
                           "are: int8 and int4 make codes of numbers",
                           folder);
}
