/* spillway generate: draws tokens from a checkpoint. Weights come from host memory; bytes are tokens. */
#include "cli.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* One token from logits (V): temperature, top-k, and a uniform number in [0, 1). */
static int32_t
pick(float *logits, uint64_t V, double temperature, uint64_t top_k, float uniform)
{
    double sum = 0, at;
    float max = -INFINITY, cut = -INFINITY;
    int32_t best = 0;
    for (uint64_t i = 0; i < V; i++) {
        if (logits[i] > max) {
            max = logits[i];
            best = (int32_t)i;
        }
    }
    if (temperature <= 0)
        return best;
    if (top_k > 0 && top_k < V) { /* the k-th largest, by k passes: k is small */
        cut = INFINITY;
        for (uint64_t k = 0; k < top_k; k++) {
            float next = -INFINITY;
            for (uint64_t i = 0; i < V; i++) {
                if (logits[i] < cut && logits[i] > next)
                    next = logits[i];
            }
            cut = next;
        }
    }
    for (uint64_t i = 0; i < V; i++)
        sum += logits[i] >= cut ? exp(((double)logits[i] - (double)max) / temperature) : 0;
    at = (double)uniform * sum;
    for (uint64_t i = 0; i < V; i++) {
        if (logits[i] < cut)
            continue;
        at -= exp(((double)logits[i] - (double)max) / temperature);
        if (at < 0)
            return (int32_t)i;
    }
    return best;
}

static int
sample(spw_engine *e, const spw_config *config, const char *prompt, uint64_t tokens, double temperature, uint64_t top_k,
       uint64_t seed, spw_error *err)
{
    uint64_t prompt_bytes = strlen(prompt), V = config->model.vocab, T = config->data.seq_length;
    int32_t *text = spw_mem_calloc(prompt_bytes + tokens, sizeof *text);
    float *logits = spw_mem_calloc(V, sizeof *logits);
    int rc = EXIT_DONE;
    if (text == NULL || logits == NULL)
        rc = cli_fail(&(spw_error){.status = SPW_ENOMEM, .message = "no memory for the text"});
    for (uint64_t i = 0; rc == EXIT_DONE && i < prompt_bytes; i++) {
        text[i] = (unsigned char)prompt[i];
        if ((uint64_t)text[i] >= V)
            rc = cli_usage("generate", "byte %d of the prompt is outside the vocabulary of %llu", text[i],
                           (unsigned long long)V);
    }
    if (rc == EXIT_DONE)
        fputs(prompt, stdout);
    for (uint64_t i = prompt_bytes; rc == EXIT_DONE && i < prompt_bytes + tokens; i++) {
        uint64_t first = i > T ? i - T : 0;
        uint32_t r[4];
        if (spw_engine_logits(e, text + first, i - first, logits, err) != SPW_OK) {
            rc = cli_fail(err);
            break;
        }
        spw_philox(seed, 0x67656e, i, r);
        text[i] = pick(logits, V, temperature, top_k, spw_uniform_f32(r[0]));
        putchar(text[i] < 256 ? text[i] : '?');
        fflush(stdout);
    }
    if (rc == EXIT_DONE)
        putchar('\n');
    spw_mem_free(text);
    spw_mem_free(logits);
    return rc;
}

int
cli_sample(const char *checkpoint, const char *prompt, uint64_t tokens, double temperature, uint64_t top_k,
           uint64_t seed)
{
    static spw_config config; /* large */
    char path[SPW_PATH_BYTES];
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_error err = {0};
    int rc;
    spw_status st = spw_checkpoint_find(checkpoint, path, &err);
    if (st == SPW_OK)
        st = spw_checkpoint_read_config(path, &config, NULL, &err);
    if (st == SPW_OK)
        st = spw_model_from_config(&model, &config, &err);
    if (st == SPW_OK) { /* only weights are needed: host memory, no budget, no swap files */
        config.zero.offload_param = SPW_TIER_HOST;
        config.zero.offload_optimizer = SPW_TIER_HOST;
        config.run.host_memory = config.run.device_memory = SPW_AUTO;
        config.run.eval_batches = 1;
        st = spw_engine_create(
            &e, &(spw_engine_options){.config = &config, .model = model, .inference = true, .sequences = 1}, &err);
    }
    if (st == SPW_OK)
        st = spw_checkpoint_load(e, path, &err);
    rc = st != SPW_OK ? cli_fail(&err) : sample(e, &config, prompt, tokens, temperature, top_k, seed, &err);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return rc;
}

int
cli_generate(int argc, char **argv)
{
    const char *checkpoint = NULL, *prompt = NULL;
    uint64_t tokens = 200, top_k = 0, seed = 1;
    double temperature = 0.8;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        if (name[0] != '-') {
            if (checkpoint != NULL)
                return cli_usage("generate", "one checkpoint at a time, got %s too", name);
            checkpoint = name;
            continue;
        }
        if (strcmp(name, "--prompt") != 0 && strcmp(name, "--tokens") != 0 && strcmp(name, "--temperature") != 0 &&
            strcmp(name, "--top-k") != 0 && strcmp(name, "--seed") != 0)
            return cli_usage("generate", "unknown option %s", name);
        if ((value = cli_value("generate", argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if (strcmp(name, "--prompt") == 0) {
            prompt = value;
        } else if (strcmp(name, "--temperature") == 0) {
            char *end;
            temperature = strtod(value, &end);
            if (end == value || *end != '\0' || !(temperature >= 0) || temperature > 100)
                return cli_usage("generate", "--temperature %s is not a number from 0 to 100", value);
        } else {
            uint64_t *to = strcmp(name, "--tokens") == 0 ? &tokens : strcmp(name, "--top-k") == 0 ? &top_k : &seed;
            if (!cli_number(value, to))
                return cli_usage("generate", "%s %s is not a whole number", name, value);
        }
    }
    if (checkpoint == NULL || prompt == NULL || prompt[0] == '\0')
        return cli_usage("generate", "a checkpoint and a --prompt of at least one byte are needed");
    if (tokens > 1000000)
        return cli_usage("generate", "--tokens %llu is more than 1000000", (unsigned long long)tokens);
    return cli_sample(checkpoint, prompt, tokens, temperature, top_k, seed);
}
