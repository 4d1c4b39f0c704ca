/*
 * Weights for inference from a checkpoint or a Hugging Face folder: which of the two a path is, the configuration that an
 * engine needs for it, what ends its texts, and its loader. The caller decides where the weights are placed.
 */
#include "runtime_internal.h"
#include "spw_files.h"
#include "spw_generate.h"
#include <jansson.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { JSON_BYTES_MAX = 16 << 20 };

/* ---------------------------------------------------------------- finding */

static spw_status
read_json(const char *folder, const char *name, json_t **out, spw_error *err)
{
    char path[SPW_PATH_BYTES + 64], *text = NULL, *plain;
    json_error_t where;
    *out = NULL;
    snprintf(path, sizeof path, "%.1000s/%s", folder, name);
    SPW_TRY(spw_file_read_text(path, JSON_BYTES_MAX, &text, err));
    plain = spw_hf_plain_json(text);
    spw_mem_free(text);
    if (plain == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s", path);
    *out = json_loads(plain, 0, &where);
    spw_mem_free(plain);
    if (!json_is_object(*out)) {
        json_decref(*out);
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: not a JSON object (line %d: %s)", path, where.line, where.text);
    }
    return SPW_OK;
}

/* eos_token_id, a number or a list of them, from generation_config.json, or else config.json, of adapters alone their model's. */
static spw_status
read_end_tokens(spw_weights *w, spw_error *err)
{
    static const char *const names[] = {"generation_config.json", "config.json"};
    const char *folder = spw_dir_has(w->path, "config.json") ? w->path : w->from;
    for (int k = 0; k < 2 && w->end_token_count == 0; k++) {
        json_t *root, *ids;
        if (!spw_dir_has(folder, names[k]))
            continue;
        SPW_TRY(read_json(folder, names[k], &root, err));
        ids = json_object_get(root, "eos_token_id");
        for (size_t i = 0; i < (json_is_array(ids) ? json_array_size(ids) : 1); i++) {
            const json_t *id = json_is_array(ids) ? json_array_get(ids, i) : ids;
            json_int_t value = json_integer_value(id);
            if (!json_is_integer(id) || value < 0 || (uint64_t)value >= w->config.model.vocab)
                continue;
            if (w->end_token_count == SPW_END_TOKENS_MAX) {
                json_decref(root);
                return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s/%s: eos_token_id has more than %d tokens", folder, names[k],
                                 SPW_END_TOKENS_MAX);
            }
            w->end_tokens[w->end_token_count++] = (int32_t)value;
        }
        json_decref(root);
    }
    return SPW_OK;
}

/* A configuration with every default and the folder's model; nothing is trained by it. */
static spw_status
default_config(spw_config *c, const char *folder, spw_error *err)
{
    SPW_TRY(spw_config_parse(c,
                             "{\"model\": {\"model_type\": \"gpt2\", \"n_embd\": 1, \"n_layer\": 1, \"n_head\": 1}, "
                             "\"data\": {\"path\": [\"-\"]}, \"train_batch_size\": 1, "
                             "\"optimizer\": {\"params\": {\"lr\": 0}}}",
                             folder, NULL, 0, err));
    SPW_TRY(spw_hf_config_load(&c->model, folder, err));
    snprintf(c->model_path, sizeof c->model_path, "%s", folder);
    c->data.seq_length = c->model.positions;
    return SPW_OK;
}

/*
 * Linear attention's A_log and norm, Mamba-2's vectors, and Nemotron-H's routers, which Qwen3.5 and others have in fp32 beside weights in bf16: for
 * them alone all would take twice its bytes.
 */
static bool
may_be_rounded(const spw_param *p)
{
    if (strstr(p->name, ".mixer.gate.weight") != NULL)
        return true;
    return p->ndim == 1 && (strstr(p->name, ".linear_attn.") != NULL || strstr(p->name, ".mamba.") != NULL ||
                            strstr(p->name, ".mixer.") != NULL);
}

/*
 * bf16: whether the parameters that are there as numbers are; what old files hold besides has types of its own. Codes count as bf16, which MXFP4's
 * numbers are; products of 8-bit floats and their scales are rounded to it, for fp32 would take four times their bytes. codes: whether any
 * are kept as those that the folder has them in.
 */
static spw_status
look_at_weights(const char *folder, const spw_model_config *config, bool *bf16, bool *codes, spw_error *err)
{
    spw_hf_reader *r = NULL;
    spw_model *model = NULL;
    spw_quant *forms = NULL;
    spw_st_extent unused;
    spw_dtype dtype;
    spw_status st = spw_hf_reader_open(&r, folder, err);
    *bf16 = true;
    *codes = false;
    if (st == SPW_OK)
        st = spw_model_build(&model, config, err);
    if (st == SPW_OK)
        st = spw_hf_reader_bind(r, model, err);
    for (uint32_t id = 0; st == SPW_OK && id < model->param_count; id++) {
        const bool number = spw_hf_reader_extent(r, id, &unused, &dtype);
        *bf16 = *bf16 && (may_be_rounded(&model->params[id]) || !number || dtype == SPW_BF16);
        *codes = *codes || !number;
    }
    if (st == SPW_OK && *codes && (forms = spw_mem_calloc(model->param_count, sizeof *forms)) == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "codes of %u parameters", model->param_count);
    if (forms != NULL)
        *codes = spw_hf_reader_codes(forms, r, model, *bf16 ? SPW_BF16 : SPW_F32);
    spw_hf_reader_close(r);
    spw_mem_free(forms);
    spw_model_destroy(model);
    return st;
}

static spw_status
find_folder(spw_weights *w, spw_error *err)
{
    spw_config *c = &w->config;
    bool codes;
    SPW_TRY(default_config(c, w->path, err));
    SPW_TRY(look_at_weights(w->path, &c->model, &c->bf16, &codes, err));
    c->run.state_format = c->bf16 ? SPW_STATE_MIXED : SPW_STATE_FP32;
    snprintf(c->run.frozen_codes, sizeof c->run.frozen_codes, "%s", codes ? "published" : "none");
    return SPW_OK;
}

/*
 * Where a checkpoint's frozen weights are. Of adapters alone that is a folder, which has the codes that it was published in, too; a whole
 * checkpoint has the same numbers, and needs no folder.
 */
static spw_status
find_frozen(spw_weights *w, spw_error *err)
{
    spw_config *c = &w->config;
    struct stat info;
    SPW_TRY(spw_checkpoint_weights(w->path, c, w->from, err));
    if (stat(w->from, &info) == 0 && S_ISDIR(info.st_mode))
        snprintf(c->model_path, sizeof c->model_path, "%.1000s", w->from);
    else if (strcmp(c->run.frozen_codes, "published") == 0)
        snprintf(c->run.frozen_codes, sizeof c->run.frozen_codes, "none");
    return SPW_OK;
}

#define IS_FOREIGN "%s is another program's checkpoint: "

spw_status
spw_weights_find(spw_weights *w, const char *path, spw_error *err)
{
    spw_checkpoint_state state;
    spw_status st;
    struct stat info;
    char of_hub[SPW_HUB_PATH_BYTES];
    memset(w, 0, sizeof *w);
    path = spw_hub_find(of_hub, path) ? of_hub : path;
    if (strlen(path) >= SPW_PATH_BYTES - 100)
        return SPW_RAISE(err, SPW_EINVAL, "the path %.60s... is too long", path);
    w->is_checkpoint = spw_dir_has(path, "spillway.json") || !spw_dir_has(path, "config.json");
    if (!spw_dir_has(path, "spillway.json"))
        SPW_TRY(spw_hf_check_folder(path, err));
    if (w->is_checkpoint) {
        st = spw_checkpoint_find(path, w->path, err);
        if (st == SPW_ENOENT && spw_foreign_find(path, w->path, sizeof w->path))
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             IS_FOREIGN "spillway export %s --model FOLDER --to DIR makes a folder of it, with the "
                                        "config.json and tokenizer of FOLDER",
                             path, path);
        if (st != SPW_OK && stat(path, &info) == 0 && S_ISREG(info.st_mode))
            return SPW_RAISE(err, SPW_EINVAL,
                             "%s is a file: the folder is named here that has a model's config.json, or checkpoints",
                             path);
        if (st == SPW_ENOENT && access(path, F_OK) == 0)
            return SPW_RAISE(
                err, SPW_ENOENT,
                "%s holds no complete checkpoint (step-<n>/spillway.json), and no config.json as a Hugging Face "
                "folder has",
                path);
        SPW_TRY(st);
        SPW_TRY(spw_checkpoint_read_config(w->path, &w->config, &state, err));
        memcpy(w->encoder, state.data.encoder, sizeof w->encoder);
    } else if (!spw_hf_has_weights(path) && spw_foreign_find(path, w->path, sizeof w->path)) {
        return SPW_RAISE(err, SPW_EUNSUPPORTED, IS_FOREIGN "spillway export %s --to DIR makes a folder of it", path,
                         path);
    } else {
        snprintf(w->path, sizeof w->path, "%s", path);
        SPW_TRY(find_folder(w, err));
    }
    if (w->is_checkpoint)
        SPW_TRY(find_frozen(w, err));
    else
        snprintf(w->from, sizeof w->from, "%.1000s", w->path);
    w->config.zero.offload_param = w->config.zero.offload_optimizer = SPW_TIER_HOST;
    w->config.zero.param_path.count = w->config.zero.optimizer_path.count = 0;
    w->config.run.host_memory = w->config.run.device_memory = SPW_AUTO;
    w->config.run.checkpoint_dir[0] = w->config.run.run_log[0] = '\0';
    w->config.run.eval_batches = 1;
    return read_end_tokens(w, err);
}

/* ---------------------------------------------------------------- loading */

spw_status
spw_weights_load(const spw_weights *w, spw_engine *e, spw_error *err)
{
    spw_status st;
    if (spw__layout_trained(spw_engine_layout(e)) > 0)
        return SPW_RAISE(err, SPW_EINVAL, "weights alone are for an engine made for inference");
    if (w->is_checkpoint)
        return spw_checkpoint_load(e, w->path, err);
    st = spw_engine_load_weights(e, w->path, err);
    if (st != SPW_OK)
        spw_error_wrap(err, "loading %s", w->path);
    return st;
}
