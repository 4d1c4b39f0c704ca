/*
 * State by the name of a parameter on three ranks: what every rank reads is what all of them find in their chunks, what one sets all go on from,
 * and what one gets wrong is refused by all.
 */
#include "lib_access.h"
#include "lib_ranks.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* In a forked rank no assertion may fail. */
#define NEED(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return SPW_RAISE(err, SPW_EINVAL, "line %d: %s", __LINE__, #condition);                                    \
    } while (0)

typedef struct world {
    spw_config c;
    bool local;        /* every rank sets its own stretch, instead of all what rank 1 has */
    char save[300];    /* "": nowhere */
    access_image *out; /* shared */
    double *losses;    /* shared */
} world;

static float
new_value(uint32_t id, uint64_t i)
{
    return 0.001f * (float)((i * 7 + id) % 101) - 0.03f;
}

static spw_status
rank_step(spw_engine *e, uint32_t rank, uint64_t s, double *loss, spw_error *err)
{
    int32_t tokens[BATCH_MAX], targets[BATCH_MAX];
    uint64_t each = e->config.accumulation, n = e->config.micro_batch * e->config.data.seq_length;
    spw_step_result r;
    tiny_batch(s, 61, MICRO * n, tokens, targets);
    for (uint64_t i = 0; i < each; i++) {
        memmove(tokens + i * n, tokens + (i * WORLD + rank) * n, n * sizeof *tokens);
        memmove(targets + i * n, targets + (i * WORLD + rank) * n, n * sizeof *targets);
    }
    SPW_TRY(spw_engine_step(e, tokens, targets, (uint32_t)each, e->config.optimizer.lr, &r, err));
    *loss = r.loss;
    return SPW_OK;
}

/* What every rank reads is what all of them find in their chunks. */
static spw_status
check_reads(spw_engine *e, access_image *shared, uint32_t rank, spw_error *err)
{
    static float got[ELEMS_MAX];
    for (uint32_t r = 0; r < WORLD; r++) { /* in turns: the image knows one engine, at an address of that rank's own */
        double turn = 0;
        if (r == rank) {
            shared->e = e;
            SPW_TRY(spw_store_sweep(e->store, SPW_SWEEP_VISIT, access_take_chunk, shared, err));
        }
        SPW_TRY(spw_engine_sum(e, &turn, 1, err));
    }
    for (uint32_t id = 0; id < e->model->param_count; id++) {
        const spw_place *at = &e->layout.places[id];
        uint64_t base = e->layout.bases[at->unit_idx] + at->first;
        for (int p = 0; p < PARTS; p++) {
            spw_access a = {e->model->params[id].name, (spw_access_part)p, 0, 0};
            spw_stretch held;
            SPW_TRY(spw_access_get_full(e, &a, got, err));
            NEED(memcmp(got, shared->part[p] + base, at->elems * sizeof *got) == 0);
            SPW_TRY(spw_access_get_local(e, &a, got, &held, err));
            NEED(held.first + held.count <= at->elems);
            NEED(memcmp(got, shared->part[p] + base + held.first, held.count * sizeof *got) == 0);
        }
    }
    return SPW_OK;
}

/* Masters of every fourth parameter, and a moment. */
static spw_status
change(const world *w, spw_engine *e, uint32_t rank, spw_error *err)
{
    static float values[ELEMS_MAX];
    for (uint32_t id = 0; id < e->model->param_count; id++) {
        uint64_t n = e->layout.places[id].elems;
        for (int p = SPW_ACCESS_MASTER; p <= (id == 3 ? SPW_ACCESS_EXP_AVG : SPW_ACCESS_MASTER); p++) {
            spw_access a = {e->model->params[id].name, (spw_access_part)p, n > 64 ? 17 : 0, n > 64 ? n - 40 : 0};
            spw_stretch held;
            uint64_t count = a.count > 0 ? a.count : n;
            if (id % 4 != 3)
                continue;
            for (uint64_t i = 0; i < count; i++)
                values[i] = new_value(id, a.first + i);
            if (w->local) {
                SPW_TRY(spw_access_get_local(e, &a, NULL, &held, err));
                for (uint64_t i = 0; i < held.count; i++)
                    values[i] = new_value(id, held.first + i);
                SPW_TRY(spw_access_set_local(e, &a, values, &held, err));
            } else {
                SPW_TRY(spw_access_set_full(e, &a, rank == 1 ? values : NULL, 1, err));
            }
        }
    }
    return SPW_OK;
}

static spw_status
check_scope(spw_engine *e, uint32_t rank, spw_error *err)
{
    const char *names[] = {"h.0.mlp.c_proj.weight", "ln_f.bias"};
    static float got[ELEMS_MAX];
    spw_gathered *g;
    uint64_t n;
    SPW_TRY(spw_gathered_begin(&g, e, names, 2, err));
    for (uint32_t i = 0; i < 2; i++) {
        float *v = spw_gathered_values(g, i, &n);
        for (uint64_t k = 0; k < n; k++)
            v[k] = rank == 1 ? v[k] * 0.5f + 0.01f : 1000.0f; /* only rank 1's are written back */
        if (rank == 1)
            memcpy(got + i * 8192, v, n * sizeof *v);
    }
    SPW_TRY(spw_gathered_end(g, 1, err));
    for (uint32_t i = 0; i < 2; i++) {
        static float back[ELEMS_MAX];
        SPW_TRY(spw_access_get_full(e, &(spw_access){names[i], SPW_ACCESS_MASTER, 0, 0}, back, err));
        NEED(rank != 1 || memcmp(back, got + i * 8192, (i == 0 ? 4096 : 32) * sizeof *back) == 0);
        NEED(back[0] < 100);
    }
    return SPW_OK;
}

/* What one rank gets wrong is refused by all, and nothing has come out of step. */
static spw_status
check_refusals(spw_engine *e, uint32_t rank, spw_error *err)
{
    float values[64];
    spw_error own = {0};
    spw_access a = {rank == 2 ? "wte.wait" : "wte.weight", SPW_ACCESS_MASTER, 0, 8};
    NEED(spw_access_get_full(e, &a, values, &own) == SPW_EINVAL);
    NEED(strstr(own.message, "rank 2: the model has no parameter") != NULL);
    a = (spw_access){"wte.weight", SPW_ACCESS_MASTER, rank == 1, 8};
    NEED(spw_access_set_full(e, &a, values, 0, &own) == SPW_EINVAL);
    NEED(strstr(own.message, "rank 1 asks for something else than rank 0") != NULL);
    a.first = 0;
    NEED(spw_access_set_full(e, &a, rank == 2 ? NULL : values, 2, &own) == SPW_EINVAL);
    NEED(strstr(own.message, "rank 2: no values") != NULL);
    a.part = SPW_ACCESS_GRAD;
    NEED(spw_access_get_full(e, &a, values, &own) == SPW_ESTALE);
    return SPW_OK;
}

typedef struct rank_gradients {
    double squares;
    spw_status st;
    spw_error err;
} rank_gradients;

static void
take_rank_gradients(void *ctx, spw_engine *e)
{
    rank_gradients *g = ctx;
    static float values[ELEMS_MAX];
    g->squares = 0;
    for (uint32_t id = 0; id < e->model->param_count && g->st == SPW_OK; id++) {
        g->st =
            spw_access_get_full(e, &(spw_access){e->model->params[id].name, SPW_ACCESS_GRAD, 0, 0}, values, &g->err);
        for (uint64_t i = 0; i < e->layout.places[id].elems; i++)
            g->squares += (double)values[i] * values[i];
    }
}

static spw_status
run_rank(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    world *w = ctx;
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    rank_gradients g = {0};
    double loss;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    SPW_TRY(spw_model_build(&model, &mc, err));
    SPW_TRY(spw_engine_create(
        &e,
        &(spw_engine_options){
            .config = &w->c, .model = model, .comm = comm, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
        err));
    SPW_TRY(spw_engine_init_params(e, 7, err));
    for (uint64_t s = 0; s < 6; s++) {
        if (s == 2)
            SPW_TRY(change(w, e, rank, err));
        if (s == 3)
            SPW_TRY(check_scope(e, rank, err));
        if (s == 3)
            SPW_TRY(check_refusals(e, rank, err));
        if (s == 4)
            SPW_TRY(spw_engine_release_gathered(e, err));
        spw_engine_on_gradients(e, s == 4 ? take_rank_gradients : NULL, &g);
        SPW_TRY(rank_step(e, rank, s, &loss, err));
        if (rank == 0)
            w->losses[s] = loss;
        if (s == 4)
            NEED(g.st == SPW_OK && g.squares > 0);
        if (s == 4 && rank == 0)
            w->losses[7] = g.squares;
    }
    SPW_TRY(check_reads(e, w->out, rank, err));
    if (w->save[0] != '\0')
        SPW_TRY(spw_engine_save_16bit(e, w->save, SPW_BF16, err));
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return SPW_OK;
}

/* Stages, placements, set together or each its own: the same losses, gradients, state and files. */
static void
test_ranks(void **state)
{
    const struct {
        uint32_t stage;
        spw_tier param, optimizer;
        bool local;
        uint64_t chaos;
        uint32_t kept; /* by how many ranks, of what they gathered */
    } runs[] = {{0, SPW_TIER_DEVICE, SPW_TIER_DEVICE, false, 0, 0}, {0, SPW_TIER_DEVICE, SPW_TIER_DEVICE, true, 3, 0},
                {2, SPW_TIER_DEVICE, SPW_TIER_HOST, false, 0, 0},   {2, SPW_TIER_DEVICE, SPW_TIER_NVME, true, 4, 0},
                {3, SPW_TIER_HOST, SPW_TIER_HOST, false, 0, 0},     {3, SPW_TIER_NVME, SPW_TIER_NVME, true, 0, WORLD},
                {3, SPW_TIER_NVME, SPW_TIER_NVME, false, 5, 0},     {3, SPW_TIER_HOST, SPW_TIER_HOST, true, 6, 0},
                {3, SPW_TIER_HOST, SPW_TIER_HOST, false, 7, WORLD}};
    access_image *first = ranks_share(sizeof *first), *other = ranks_share(sizeof *other);
    double *losses[2] = {ranks_share(4096), ranks_share(4096)};
    char dir[256], saved[300];
    (void)state;
    tiny_dir_make(dir);
    snprintf(saved, sizeof saved, "%s/0", dir);
    for (size_t k = 0; k < sizeof runs / sizeof runs[0]; k++) {
        world w = {.local = runs[k].local, .out = k == 0 ? first : other, .losses = losses[k > 0]};
        ranks_config(&w.c, SPW_STATE_SPLIT);
        ranks_use_dir(&w.c, dir);
        w.c.micro_batch = 1;
        w.c.run.ranks = WORLD;
        w.c.accumulation = MICRO / WORLD;
        w.c.train_batch_size = MICRO;
        w.c.zero.stage = runs[k].stage;
        w.c.zero.offload_param = runs[k].param;
        w.c.zero.offload_optimizer = runs[k].optimizer;
        w.c.run.chaos_seed = runs[k].chaos;
        w.c.zero.hpz_partition_size = runs[k].kept;
        snprintf(w.save, sizeof w.save, "%s/%zu", dir, k);
        ranks_run(WORLD, &(spw_comm_options){.chaos_seed = runs[k].chaos}, run_rank, &w);
        assert_memory_equal(losses[0], losses[k > 0], 8 * sizeof(double));
        assert_true(access_same_file(saved, w.save, "model.safetensors"));
        for (int p = 0; k > 0 && p < PARTS; p++)
            assert_memory_equal(first->part[p], other->part[p], sizeof first->part[p]);
        memset(other->part, 0, sizeof other->part);
    }
    tiny_dir_remove(dir);
    ranks_unshare(first, sizeof *first);
    ranks_unshare(other, sizeof *other);
    ranks_unshare(losses[0], 4096);
    ranks_unshare(losses[1], 4096);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranks)};
    return cmocka_run_group_tests_name("access_ranks", tests, NULL, NULL);
}
