/* spillway export and import: a Hugging Face folder from a checkpoint, also DeepSpeed's, another folder, or llm.c's weights. */
#include "cli.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void
show(void *ctx, uint64_t done, uint64_t all)
{
    char a[32], b[32];
    if (*(bool *)ctx)
        fprintf(stderr, "\r%s of %s%s", spw_format_bytes(a, sizeof a, done), spw_format_bytes(b, sizeof b, all),
                done == all ? "\n" : "   ");
}

static bool
parse_dtype(const char *text, spw_dtype *out)
{
    for (int t = 0; t < SPW_DTYPE_COUNT; t++) {
        if (strcmp(text, spw_dtype_name((spw_dtype)t)) == 0) {
            *out = (spw_dtype)t;
            return true;
        }
    }
    return false;
}

/* A checkpoint of adapters may do without the weights that they are beside: those that training had are to be merged, whatever is there now. */
static spw_status
find_base(spw_export_options *o, spw_error *err)
{
    static spw_config config; /* large */
    static char base[SPW_WEIGHTS_BYTES];
    if (o->model != NULL || spw_hf_has_weights(o->source))
        return SPW_OK;
    SPW_TRY(spw_checkpoint_read_config(o->source, &config, NULL, err));
    SPW_TRY(spw_checkpoint_weights(o->source, &config, base, err));
    o->model = base;
    return SPW_OK;
}

int
cli_export(int argc, char **argv)
{
    static char found[SPW_PATH_BYTES], source[SPW_HUB_PATH_BYTES], model[SPW_HUB_PATH_BYTES];
    bool tty = isatty(STDERR_FILENO) != 0;
    spw_export_options o = {.dtype = SPW_DTYPE_COUNT, .progress = show, .progress_ctx = &tty};
    spw_export_report report;
    spw_error err = {0};
    char bytes[32];
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (name[0] != '-') {
            if (o.source != NULL)
                return cli_usage(argv[0], "one source, not %s as well", name);
            o.source = name;
            continue;
        }
        if (strcmp(name, "--to") != 0 && strcmp(name, "--dtype") != 0 && strcmp(name, "--shard-size") != 0 &&
            strcmp(name, "--model") != 0)
            return cli_unknown_option(argv[0], name);
        if (value == NULL)
            return cli_usage(argv[0], "%s needs a value", name);
        i++;
        if (strcmp(name, "--to") == 0)
            o.to = value;
        else if (strcmp(name, "--model") == 0)
            o.model = value;
        else if (strcmp(name, "--dtype") == 0 && !parse_dtype(value, &o.dtype))
            return cli_usage(argv[0], "--dtype %s is not fp32, bf16 or fp16", value);
        else if (strcmp(name, "--shard-size") == 0 && !spw_parse_bytes(value, &o.shard_bytes))
            return cli_usage(argv[0], "--shard-size %s is not a size like 5GB", value);
    }
    if (o.source == NULL || o.to == NULL)
        return cli_usage(argv[0], "a source and --to FOLDER are needed");
    o.source = spw_hub_find(source, o.source) ? source : o.source;
    o.model = o.model != NULL && spw_hub_find(model, o.model) ? model : o.model;
    if (spw_checkpoint_find(o.source, found, NULL) == SPW_OK) {
        o.source = found;
        if (spw_checkpoint_verify(found, o.dtype == SPW_F32, &err) != SPW_OK || /* fp32: its masters */
            find_base(&o, &err) != SPW_OK)
            return cli_fail(&err);
    }
    if (spw_export(&o, &report, &err) != SPW_OK)
        return cli_fail(&err);
    printf("%s: %u tensors, %.2f M parameters, %s in %s, %u file%s\n", o.to, report.tensors,
           (double)report.params * 1e-6, spw_format_bytes(bytes, sizeof bytes, report.bytes),
           spw_dtype_name(report.dtype), report.files, report.files > 1 ? "s" : "");
    return EXIT_DONE;
}
