/*
 * A block of one's own: a gated residual layer in plain C, in a chain with GPT-2's embedding and head. Backward, recompute
 * and streaming from disk come with the tape and the engine. usage: custom_block [SWAP-FOLDER]
 */
#include "spillway.h"
#include <stdio.h>

enum { VOCAB = 64, WIDTH = 64, BATCH = 4, LENGTH = 32, STEPS = 30 };

/* x + down(silu(gate(norm x)) * up(norm x)); parameters in the order of spw_block_use below. */
static spw_value *
gated_forward(const spw_call *call, spw_value *x)
{
    spw_tape *t = call->tape;
    spw_value *h = spw_nn_rmsnorm(t, x, call->params[0], 1e-5f);
    spw_value *gate = spw_nn_linear(t, h, call->params[1], NULL, 0);
    spw_value *up = spw_nn_linear(t, h, call->params[2], NULL, 0);
    return spw_nn_add(t, x, spw_nn_linear(t, spw_nn_gate_mul(t, SPW_GATE_SILU, gate, up), call->params[3], NULL, 0));
}

static spw_status
build(spw_model **out, spw_error *err)
{
    spw_model_config c = {
        .family = SPW_FAMILY_CUSTOM, .vocab = VOCAB, .width = WIDTH, .positions = LENGTH, .norm_eps = 1e-5f};
    spw_model *m;
    spw_block *b;
    uint32_t wte, wpe;
    SPW_TRY(spw_model_create(&m, &c, 32, 8, err));
    b = spw_model_add_block(m, "embed", spw_gpt2_embed_forward);
    spw_block_use(m, b, wte = spw_model_add_param(m, "wte", VOCAB, WIDTH, 2, SPW_INIT_NORMAL, 0.05f));
    spw_block_use(m, b, wpe = spw_model_add_param(m, "wpe", LENGTH, WIDTH, 2, SPW_INIT_NORMAL, 0.05f));
    for (int l = 0; l < 2; l++) {
        const char *names[2][4] = {{"0.norm", "0.gate", "0.up", "0.down"}, {"1.norm", "1.gate", "1.up", "1.down"}};
        b = spw_model_add_block(m, "gated", gated_forward);
        spw_block_use(m, b, spw_model_add_param(m, names[l][0], 1, WIDTH, 1, SPW_INIT_ONES, 0));
        spw_block_use(m, b, spw_model_add_param(m, names[l][1], 2 * WIDTH, WIDTH, 2, SPW_INIT_NORMAL, 0.05f));
        spw_block_use(m, b, spw_model_add_param(m, names[l][2], 2 * WIDTH, WIDTH, 2, SPW_INIT_NORMAL, 0.05f));
        spw_block_use(m, b, spw_model_add_param(m, names[l][3], WIDTH, 2 * WIDTH, 2, SPW_INIT_NORMAL, 0.05f));
    }
    b = spw_model_add_block(m, "head", spw_gpt2_head_forward);
    spw_block_use(m, b, spw_model_add_param(m, "norm.weight", 1, WIDTH, 1, SPW_INIT_ONES, 0));
    spw_block_use(m, b, spw_model_add_param(m, "norm.bias", 1, WIDTH, 1, SPW_INIT_ZEROS, 0));
    spw_block_use(m, b, wte); /* tied: owned by the embedding, an external parameter here */
    (void)wpe;
    *out = m;
    return SPW_OK;
}

int
main(int argc, char **argv)
{
    static spw_config config;
    static int32_t tokens[BATCH * LENGTH], targets[BATCH * LENGTH];
    char overrides[2][1200];
    const char *set[2] = {overrides[0], overrides[1]};
    spw_model *model = NULL;
    spw_engine *engine = NULL;
    spw_step_result r = {0};
    spw_error err = {0};
    double first = 0;
    spw_status st;
    snprintf(overrides[0], sizeof overrides[0],
             "zero_optimization.offload_param={\"device\":\"%s\",\"nvme_path\":\"%s\"}", argc > 1 ? "nvme" : "cpu",
             argc > 1 ? argv[1] : "/tmp");
    snprintf(overrides[1], sizeof overrides[1],
             "zero_optimization.offload_optimizer={\"device\":\"%s\",\"nvme_path\":\"%s\"}", argc > 1 ? "nvme" : "cpu",
             argc > 1 ? argv[1] : "/tmp");
    st = spw_config_parse(
        &config,
        "{\"model\": {\"model_type\": \"gpt2\", \"vocab_size\": 64, \"n_embd\": 64, \"n_layer\": 1, \"n_head\": 1,"
        " \"n_positions\": 32}, \"data\": {\"path\": \"-\", \"seq_length\": 32},"
        " \"train_micro_batch_size_per_gpu\": 4, \"gradient_clipping\": 1.0,"
        " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.01}},"
        " \"zero_optimization\": {\"stage\": 3}, \"spillway\": {\"chunk_elems\": 4096}}",
        "custom_block", set, 2, &err);
    if (st == SPW_OK)
        st = build(&model, &err);
    if (st == SPW_OK)
        st = spw_engine_create(&engine, &(spw_engine_options){.config = &config, .model = model}, &err);
    if (st == SPW_OK)
        st = spw_engine_init_params(engine, 1, &err);
    for (int i = 0; i < BATCH * LENGTH; i++) { /* the next token is the last one times three, plus one */
        tokens[i] = i % LENGTH == 0 ? i % VOCAB : (tokens[i - 1] * 3 + 1) % VOCAB;
        targets[i] = (tokens[i] * 3 + 1) % VOCAB;
    }
    for (int step = 0; st == SPW_OK && step < STEPS; step++) {
        st = spw_engine_step(engine, tokens, targets, 1, 0.01, &r, &err);
        first = step == 0 ? r.loss : first;
    }
    if (st == SPW_OK)
        printf("loss %.3f -> %.3f over %d steps\n", first, r.loss, STEPS);
    else
        fprintf(stderr, "custom_block: %s\n", err.message);
    spw_engine_destroy(engine);
    spw_model_destroy(model);
    return st == SPW_OK && r.loss < 0.5 * first ? 0 : 1;
}
