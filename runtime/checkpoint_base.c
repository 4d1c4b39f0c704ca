/*
 * Checkpoints of adapters that name the folder of the frozen model instead of holding it (spillway.checkpoint_base false): which folder
 * that is, and whether what is in it is what training began with: by its fingerprint (files/fingerprint.c).
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <stdio.h>
#include <stdlib.h>

static spw_status
fingerprint(const char *folder, char out[17], spw_error *err)
{
    uint64_t sum;
    SPW_TRY(spw_hf_fingerprint(folder, &sum, err));
    snprintf(out, 17, "%016llx", (unsigned long long)sum);
    return SPW_OK;
}

/* A folder that cannot be read is not the one. */
static bool
is_base(const spw_manifest *m, const char *folder)
{
    char found[17];
    spw_error ignored = {0};
    return folder[0] != '\0' && spw_hf_has_weights(folder) && fingerprint(folder, found, &ignored) == SPW_OK &&
           strcmp(found, m->base_digest) == 0;
}

spw_status
spw__checkpoint_weights(const spw_manifest *m, const char *path, const char *model_path, char out[SPW_WEIGHTS_BYTES],
                        spw_error *err)
{
    const char *found;
    if (m->base[0] == '\0') {
        snprintf(out, SPW_WEIGHTS_BYTES, "%.1000s/" SPW_MODEL_FILE, path);
        return SPW_OK;
    }
    found = is_base(m, model_path) ? model_path : is_base(m, m->base) ? m->base : NULL;
    if (found == NULL)
        return SPW_RAISE(err, SPW_ENOENT,
                         "%s has adapters alone, and the weights that they are beside were in %s, which %s "
                         "(spillway.checkpoint_base was false); where that folder is called otherwise now, model.path "
                         "names it, and spillway export --model",
                         path, m->base, spw_hf_has_weights(m->base) ? "has others now" : "is not there");
    snprintf(out, SPW_WEIGHTS_BYTES, "%s", found);
    return SPW_OK;
}

spw_status
spw_checkpoint_weights(const char *path, const spw_config *config, char out[SPW_WEIGHTS_BYTES], spw_error *err)
{
    spw_manifest m;
    spw_status st;
    SPW_TRY(spw__manifest_read(&m, path, err));
    st = spw__checkpoint_weights(&m, path, config->model_path, out, err);
    spw__manifest_free(&m);
    return st;
}

/* What is frozen is rounded on its way in to the format's weights, and to codes: then it is not what the folder has, but what that makes of it. */
spw_status
spw__checkpoint_check_base(const spw_manifest *m, const char *path, const spw_config *now, spw_error *err)
{
    static const char *const why =
        "its frozen weights are made of a folder's, and are the same only with what they were "
        "made with";
    const json_t *then = json_object_get(m->config, "spillway");
    const char *codes = json_string_value(json_object_get(then, "frozen_codes")),
               *format = json_string_value(json_object_get(then, "state_format"));
    const spw_dtype own = spw_state_weight_dtype(now->run.state_format);
    spw_state_format was;
    const spw_dtype dtype =
        format != NULL && spw_state_parse(format, &was) ? spw_state_weight_dtype(was) : SPW_DTYPE_COUNT;
    if (codes == NULL || (strcmp(codes, now->run.frozen_codes) != 0 &&
                          (spw__codes_round(codes) || spw__codes_round(now->run.frozen_codes))))
        return SPW_RAISE(err, SPW_ECONFIG, "%s: spillway.frozen_codes was %s and is %s: %s", path,
                         codes != NULL ? codes : "not said", now->run.frozen_codes, why);
    if (dtype != own)
        return SPW_RAISE(err, SPW_ECONFIG, "%s: spillway.state_format gave %s weights and gives %s: %s", path,
                         dtype != SPW_DTYPE_COUNT ? spw_dtype_name(dtype) : "unknown", spw_dtype_name(own), why);
    return SPW_OK;
}

void
spw__checkpoint_began(spw_engine *e, const char *folder)
{
    saved_model *s = spw__engine_saved(e);
    char *whole = realpath(folder, NULL);
    spw_error ignored = {0};
    memset(s, 0, sizeof *s);
    if (whole != NULL && strlen(whole) < SPW_PATH_BYTES) /* a manifest's */
        snprintf(s->path, sizeof s->path, "%s", whole);
    free(whole);
    s->base = true;
    s->contents = spw__checkpoint_contents(e);
    s->there =
        s->path[0] != '\0' && spw__checkpoint_all_frozen(e) && fingerprint(s->path, s->digest, &ignored) == SPW_OK;
}
