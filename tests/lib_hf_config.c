/* lib_hf_config.c - see lib_hf_config.h. */
#include "lib_hf_config.h"
#include <stdio.h>
#include <string.h>

spw_status
hf_parse(const char *type, const char *rest, spw_model_config *m, spw_error *err)
{
    char text[2000];
    bool gpt2 = strcmp(type, "gpt2") == 0;
    snprintf(text, sizeof text, "{\"model_type\":\"%s\",%s%s%s}", type,
             gpt2 ? "\"n_embd\":12,\"n_layer\":3,\"n_head\":2"
                  : "\"hidden_size\":12,\"num_hidden_layers\":3,\"num_attention_heads\":2,\"intermediate_size\":7",
             rest[0] != '\0' ? "," : "", rest);
    return spw_hf_config_parse(m, text, "config.json", false, err);
}
