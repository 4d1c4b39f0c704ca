/*
 * custom_optimizer.c - an optimizer of your own: what it remembers per element, how its hyper-parameters become
 * coefficients, and its update as a loop over fp32 arrays. That is all; state formats, tiers, streaming, clipping and
 * checkpoints come with it, and the bits are the same wherever the state lives.
 *
 * Signum (Bernstein et al. 2018): m = momentum m + (1 - momentum) g; w = w (1 - lr wd) - lr sign(m).
 *
 * usage: custom_optimizer CONFIG.json [STEPS]    the configuration's optimizer.type is replaced by "Signum"
 */
#include "spillway.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static spw_status
prepare(float c[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err)
{
    if (!(hp->momentum >= 0 && hp->momentum < 1))
        return SPW_RAISE(err, SPW_EINVAL, "Signum: momentum %g is outside [0, 1)", hp->momentum);
    c[0] = (float)hp->momentum;
    c[1] = (float)(1 - hp->momentum);
    c[2] = (float)(1 - hp->lr * hp->weight_decay);
    c[3] = (float)hp->lr;
    return SPW_OK;
}

/* Element by element, and with fmaf() where a multiply-add is meant: then every machine computes the same bits. */
static void
rule(const float *c, uint32_t n, float *w, float *m, float *unused, const float *g)
{
    (void)unused;
    for (uint32_t i = 0; i < n; i++) {
        m[i] = fmaf(c[0], m[i], c[1] * g[i]);
        w[i] = w[i] * c[2] - (m[i] > 0 ? c[3] : m[i] < 0 ? -c[3] : 0);
    }
}

static const spw_optimizer signum = {
    .name = "Signum", .moment_count = 1, .moment_names = {"momentum"}, .prepare = prepare, .rule = rule};

#ifndef SPW_EXAMPLE_AS_LIBRARY
static int
failed(const spw_error *err)
{
    fprintf(stderr, "%s\n", err->message);
    return 1;
}

int
main(int argc, char **argv)
{
    static spw_config config;
    static const char *const type[] = {"optimizer.type=\"Signum\"", "optimizer.params.momentum=0.9",
                                       "optimizer.params.lr=0.001"};
    spw_error err = {0};
    spw_model *model = NULL;
    spw_engine *engine = NULL;
    uint64_t steps = argc > 2 ? strtoull(argv[2], NULL, 10) : 10, n;
    int32_t *tokens, *targets;
    if (argc < 2)
        return fprintf(stderr, "usage: custom_optimizer CONFIG.json [STEPS]\n"), 2;
    if (spw_optimizer_register(&signum, &err) != SPW_OK || spw_config_load(&config, argv[1], type, 3, &err) != SPW_OK ||
        spw_model_from_config(&model, &config, &err) != SPW_OK ||
        spw_engine_create(&engine, &(spw_engine_options){.config = &config, .model = model}, &err) != SPW_OK ||
        spw_engine_init_params(engine, config.run.seed, &err) != SPW_OK)
        return failed(&err);
    n = config.micro_batch * config.accumulation * config.data.seq_length;
    tokens = calloc(2 * n, sizeof *tokens);
    targets = tokens + n;
    for (uint64_t s = 1; tokens != NULL && s <= steps; s++) {
        spw_step_result r;
        for (uint64_t i = 0; i < n; i++) { /* a text that can be learned: counting */
            tokens[i] = (int32_t)((s * 7 + i) % 64);
            targets[i] = (int32_t)((s * 7 + i + 1) % 64);
        }
        if (spw_engine_step(engine, tokens, targets, (uint32_t)config.accumulation, config.optimizer.lr, &r, &err) !=
            SPW_OK)
            return failed(&err);
        printf("step %llu  loss %.4f\n", (unsigned long long)s, r.loss);
    }
    free(tokens);
    spw_engine_destroy(engine);
    spw_model_destroy(model);
    return 0;
}
#endif
