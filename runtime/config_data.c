/* From the section data to an open spw_data: one place for every command that reads training data. */
#include "spw_config.h"
#include "spw_data.h"

spw_status
spw_config_open_data(spw_data **out, const spw_config *c, spw_error *err)
{
    const char *patterns[SPW_PATHS_MAX];
    spw_data_source sources[SPW_PATHS_MAX];
    spw_data_options o = {.patterns = patterns,
                          .pattern_count = c->data.path.count,
                          .sources = sources,
                          .source_count = c->data.sources.count,
                          .seq_length = c->data.seq_length,
                          .validation_split = c->data.validation_split,
                          .seed = c->data.seed,
                          .vocab = c->model.vocab_size,
                          .text_field = c->data.text_field,
                          .prompt_field = c->data.prompt_field,
                          .cache_dir = c->data.cache_dir};
    *out = NULL;
    for (uint32_t i = 0; i < c->data.path.count; i++)
        patterns[i] = c->data.path.item[i];
    for (uint32_t i = 0; i < c->data.sources.count; i++)
        sources[i] =
            (spw_data_source){c->data.sources.item[i], c->data.sources.weight[i] > 0 ? c->data.sources.weight[i] : 1};
    if (c->data.format[0] != '\0' && !spw_data_format_parse(c->data.format, &o.format))
        return SPW_RAISE(err, SPW_EINVAL, "data.format \"%s\" is not known", c->data.format);
    if (strcmp(c->data.documents, "mask") == 0)
        o.documents = SPW_DOCUMENTS_MASK;
    return spw_data_open(out, &o, err);
}
