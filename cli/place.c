/* Where the weights of generate and eval live: the options that say so, and what they mean in a configuration. */
#include "cli.h"
#include <stdio.h>

int
cli_place_option(const char *command, cli_place *p, int argc, char **argv, int *i)
{
    const char *name = argv[*i], *value;
    uint64_t *bytes = strcmp(name, "--host-memory") == 0     ? &p->host_memory
                      : strcmp(name, "--device-memory") == 0 ? &p->device_memory
                                                             : NULL;
    if (bytes == NULL && strcmp(name, "--nvme") != 0 && strcmp(name, "--codes") != 0)
        return -1;
    if ((value = cli_value(command, argc, argv, i)) == NULL)
        return EXIT_USAGE;
    if (bytes != NULL) {
        if (!spw_parse_bytes(value, bytes) || *bytes == 0)
            return cli_usage(command, "%s %s is not a size such as 4GiB", name, value);
        return EXIT_DONE;
    }
    if (strcmp(name, "--codes") == 0) {
        p->codes = value;
        return strcmp(value, "none") == 0 || strcmp(value, "int8") == 0 || strcmp(value, "int4") == 0 ||
                       strcmp(value, "published") == 0
                   ? EXIT_DONE
                   : cli_usage(command, "--codes %s is not int8, int4, published or none", value);
    }
    if (p->nvme_count == SPW_PATHS_MAX)
        return cli_usage(command, "more than %d --nvme folders", SPW_PATHS_MAX);
    if (value[0] == '\0' || strlen(value) >= SPW_PATH_BYTES)
        return cli_usage(command, "--nvme needs a folder of at most %d bytes", SPW_PATH_BYTES - 1);
    p->nvme[p->nvme_count++] = value;
    return EXIT_DONE;
}

void
cli_place_apply(const cli_place *p, spw_config *c)
{
    spw_path_list *list = &c->zero.param_path;
    if (p->host_memory > 0)
        c->run.host_memory = p->host_memory;
    if (p->device_memory > 0)
        c->run.device_memory = p->device_memory;
    if (p->codes != NULL)
        snprintf(c->run.frozen_codes, sizeof c->run.frozen_codes, "%s", p->codes);
    if (p->nvme_count == 0)
        return;
    memset(list, 0, sizeof *list);
    for (uint32_t k = 0; k < p->nvme_count; k++)
        snprintf(list->item[list->count++], SPW_PATH_BYTES, "%s", p->nvme[k]);
    c->zero.offload_param = SPW_TIER_NVME;
}

void
cli_place_model(const cli_place *p, const spw_weights *w, spw_model *model)
{
    if (p->codes != NULL || !w->is_checkpoint)
        (void)spw_model_freeze(model, "*");
}
