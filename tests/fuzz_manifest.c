/*
 * libFuzzer target: any text as a checkpoint's manifest is read or refused, with file and field; what was read is written and
 * read back the same, and its configuration is read or refused. Never a crash or a leak.
 */
#include "checkpoint_internal.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void
must(bool good)
{
    if (!good)
        __builtin_trap();
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static spw_config config;
    spw_manifest m, again;
    spw_error err = {0};
    char *text = spw_mem_zalloc(bytes + 1), *written;
    if (text == NULL)
        return 0;
    memcpy(text, data, bytes);
    if (spw__manifest_parse(&m, text, "fuzz", &err) == SPW_OK) {
        if (json_object_size(m.config) > 0) {
            written = spw__manifest_text(&m);
            must(written != NULL && spw__manifest_parse(&again, written, "again", &err) == SPW_OK);
            free(written);
            must(json_equal(m.config, again.config) && memcmp(&m.state, &again.state, sizeof m.state) == 0 &&
                 memcmp(m.digests, again.digests, sizeof m.digests) == 0);
            must(m.scaled == again.scaled && memcmp(&m.scaler, &again.scaler, sizeof m.scaler) == 0);
            spw__manifest_free(&again);
        }
        (void)spw__manifest_config(&m, "fuzz", &config, &err);
        spw__manifest_free(&m);
    } else {
        must(strncmp(err.message, "fuzz:", 5) == 0);
    }
    spw_mem_free(text);
    return 0;
}
