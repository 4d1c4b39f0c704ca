/* libFuzzer target: any text as a configuration is accepted or refused; what is accepted prints and parses again. */
#include "spw_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static spw_config config;
    char *text = spw_mem_zalloc(bytes + 1), *dump;
    spw_error err = {0};
    if (text == NULL)
        return 0;
    memcpy(text, data, bytes);
    if (spw_config_parse(&config, text, "fuzz", NULL, 0, &err) == SPW_OK) {
        dump = spw_config_dump(&config);
        if (dump == NULL || spw_config_parse(&config, dump, "dump", NULL, 0, &err) != SPW_OK)
            __builtin_trap();
        spw_mem_free(dump);
    }
    spw_mem_free(text);
    return 0;
}
