/*
 * State by name, between steps, wherever it lies: the largest gradient of each step, a moment cleared, rows of a weight
 * brought to length 1, and the weights saved in 16 bits. Alone here; between ranks (spw_engine_options.comm) all make the
 * same calls. usage: edit_state OUT-FOLDER [SWAP-FOLDER]
 */
#include "spillway.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 10, TOKENS = 4 * 32 };

/* In a step, when all gradients are there and no update has consumed them. */
static void
watch(void *ctx, spw_engine *e)
{
    const spw_model *m = spw_engine_model(e);
    spw_error err = {0};
    double top = 0;
    (void)ctx;
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_access a;
        float *g = NULL;
        if (spw_access_find(&a, e, m->params[id].name, "grad", &err) == SPW_OK)
            g = calloc(a.count, sizeof *g);
        if (g == NULL || spw_access_get_full(e, &a, g, &err) != SPW_OK)
            fprintf(stderr, "edit_state: %s\n", err.message);
        for (uint64_t i = 0; g != NULL && i < a.count; i++)
            top = fabs((double)g[i]) > top ? fabs((double)g[i]) : top;
        free(g);
    }
    printf("largest gradient %.4f  ", top);
}

/* Forgets what Adam remembers of one parameter. */
static spw_status
clear_moments(spw_engine *e, const char *param, spw_error *err)
{
    const char *parts[] = {"exp_avg", "exp_avg_sq"};
    for (int k = 0; k < 2; k++) {
        spw_access a;
        float *zeros;
        spw_status st;
        SPW_TRY(spw_access_find(&a, e, param, parts[k], err));
        zeros = calloc(a.count, sizeof *zeros);
        if (zeros == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "zeros");
        st = spw_access_set_full(e, &a, zeros, 0, err);
        free(zeros);
        SPW_TRY(st);
    }
    return SPW_OK;
}

/* A whole copy to change; rank 0's is written back. */
static spw_status
normalise_rows(spw_engine *e, const char *param, uint64_t cols, spw_error *err)
{
    spw_gathered *g;
    uint64_t elems;
    float *w;
    SPW_TRY(spw_gathered_begin(&g, e, &param, 1, err));
    w = spw_gathered_values(g, 0, &elems);
    for (uint64_t row = 0; row < elems; row += cols) {
        double sum = 0;
        for (uint64_t i = 0; i < cols; i++)
            sum += (double)w[row + i] * w[row + i];
        for (uint64_t i = 0; i < cols; i++)
            w[row + i] = (float)(w[row + i] / sqrt(sum));
    }
    return spw_gathered_end(g, 0, err);
}

static spw_status
train(spw_engine *e, const char *folder, double *loss, spw_error *err)
{
    int32_t tokens[TOKENS], targets[TOKENS];
    for (int i = 0; i < TOKENS; i++) { /* the next token is the last one times three, plus one */
        tokens[i] = i % 32 == 0 ? i % 64 : (tokens[i - 1] * 3 + 1) % 64;
        targets[i] = (tokens[i] * 3 + 1) % 64;
    }
    spw_engine_on_gradients(e, watch, NULL);
    for (int step = 0; step < STEPS; step++) {
        spw_step_result r;
        SPW_TRY(spw_engine_step(e, tokens, targets, 1, 0.01, &r, err));
        printf("loss %.3f\n", r.loss);
        *loss = r.loss;
        if (step == STEPS / 2) {
            SPW_TRY(normalise_rows(e, "wte.weight", 64, err));
            SPW_TRY(clear_moments(e, "wte.weight", err));
        }
    }
    return spw_engine_save_16bit(e, folder, SPW_BF16, err);
}

int
main(int argc, char **argv)
{
    static spw_config config;
    char overrides[2][1200];
    const char *set[2] = {overrides[0], overrides[1]};
    spw_model *model = NULL;
    spw_engine *engine = NULL;
    spw_error err = {0};
    double loss = 0;
    spw_status st;
    if (argc < 2)
        return fprintf(stderr, "usage: edit_state OUT-FOLDER [SWAP-FOLDER]\n"), 2;
    for (int k = 0; k < 2; k++)
        snprintf(overrides[k], sizeof overrides[k],
                 "zero_optimization.offload_%s={\"device\":\"%s\",\"nvme_path\":\"%.1000s\"}",
                 k == 0 ? "param" : "optimizer", argc > 2 ? "nvme" : "cpu", argc > 2 ? argv[2] : "/tmp");
    st = spw_config_parse(
        &config,
        "{\"model\": {\"model_type\": \"gpt2\", \"vocab_size\": 64, \"n_embd\": 64, \"n_layer\": 2, \"n_head\": 2,"
        " \"n_positions\": 32}, \"data\": {\"path\": \"-\", \"seq_length\": 32}, \"bf16\": {\"enabled\": true},"
        " \"train_micro_batch_size_per_gpu\": 4, \"gradient_clipping\": 1.0,"
        " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.01}},"
        " \"zero_optimization\": {\"stage\": 3}, \"spillway\": {\"chunk_elems\": 4096}}",
        "edit_state", set, 2, &err);
    if (st == SPW_OK)
        st = spw_model_from_config(&model, &config, &err);
    if (st == SPW_OK)
        st = spw_engine_create(&engine, &(spw_engine_options){.config = &config, .model = model}, &err);
    if (st == SPW_OK)
        st = spw_engine_init_params(engine, 1, &err);
    if (st == SPW_OK)
        st = train(engine, argv[1], &loss, &err);
    if (st != SPW_OK)
        fprintf(stderr, "edit_state: %s\n", err.message);
    spw_engine_destroy(engine);
    spw_model_destroy(model);
    return st == SPW_OK && isfinite(loss) ? 0 : 1;
}
