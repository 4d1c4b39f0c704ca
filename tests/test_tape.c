/*
 * A call of which forward was kept, beside one that computes it again: every family's layer, the same bits in all gradients; and
 * what backward reads is really what was kept.
 */
#include "lib_tiny.h"
#include "spw_nn.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { SEQUENCES = 2, POSITIONS = 20, ROWS = SEQUENCES * POSITIONS, RANK = 4, ARENA = 4 << 20 };

typedef struct layer {
    spw_model *model;
    const spw_block *block;
    spw_gpu *gpu;
    spw_gpu_queue *queue;
    spw_tape *tape;
    float *cos_sin, *x, *dy, *dx;
    float *weights[SPW_BLOCK_PARAMS_MAX], *grads[SPW_BLOCK_PARAMS_MAX];
    uint64_t grad_elems;
    int32_t ids[ROWS], chunks[2 * ROWS];
    float losses[ROWS];
    char *kept, *arena;
    bool lazy, uncut, begun[SPW_BLOCK_PARAMS_MAX];
    const uint32_t *only; /* this parameter's gradient is wanted, and no other; NULL: all, and the input's */
    spw_batch batch;      /* of the call */
    spw_value *params[SPW_BLOCK_PARAMS_MAX];
} layer;

static void *
draw(uint64_t n, uint64_t key)
{
    float *v = malloc(n * sizeof *v);
    assert_non_null(v);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t r[4];
        spw_philox(5, key, i, r);
        v[i] = spw_uniform_f32(r[0]) - 0.5f;
    }
    return v;
}

static void
open_adapted_layer(layer *l, spw_family family, uint32_t block_idx, double dropout, bool adapted)
{
    static const char *const all[] = {"*"};
    spw_model_config c;
    spw_error err = {0};
    memset(l, 0, sizeof *l);
    tiny_model_config(&c, family);
    c.dropout = family == SPW_FAMILY_GPT2 || family == SPW_FAMILY_PHI3 ? dropout : 0;
    c.qk_norm |= family == SPW_FAMILY_QWEN3;
    assert_int_equal(spw_model_build(&l->model, &c, &err), SPW_OK);
    if (adapted)
        assert_int_equal(spw_model_add_lora(l->model, &(spw_lora){.rank = RANK, .alpha = 0.5, .dropout = dropout}, all,
                                            1, NULL, 0, &err),
                         SPW_OK);
    l->block = &l->model->blocks[block_idx];
    assert_int_equal(spw_gpu_open(&l->gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&l->queue, l->gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_tape_create(&l->tape, l->queue, spw_gpu_get_info(l->gpu), &err), SPW_OK);
    if (c.chunk > 0)
        spw_gpu_chunks(l->queue, l->chunks, l->chunks + ROWS, NULL, NULL, NULL, SEQUENCES, POSITIONS, c.chunk);
    l->cos_sin = draw(POSITIONS * c.head_dim, 1);
    l->x = draw(ROWS * c.width, 2);
    l->dy = draw(ROWS * c.width, 3);
    l->dx = draw(ROWS * c.width, 4);
    l->kept = calloc(1, ARENA);
    l->arena = calloc(1, ARENA);
    assert_true(l->kept != NULL && l->arena != NULL);
    for (uint32_t k = 0; k < l->block->param_count; k++) {
        const spw_param *p = &l->model->params[l->block->param_ids[k]];
        l->weights[k] = draw(p->rows * p->cols, 10 + k);
        l->grads[k] = calloc(p->rows * p->cols, sizeof(float));
        assert_non_null(l->grads[k]);
        l->grad_elems += p->rows * p->cols;
    }
}

static void
open_layer(layer *l, spw_family family, uint32_t block_idx, double dropout)
{
    open_adapted_layer(l, family, block_idx, dropout, false);
}

static void
close_layer(layer *l)
{
    for (uint32_t k = 0; k < l->block->param_count; k++) {
        free(l->weights[k]);
        free(l->grads[k]);
    }
    free(l->cos_sin);
    free(l->x);
    free(l->dy);
    free(l->dx);
    free(l->kept);
    free(l->arena);
    spw_tape_destroy(l->tape);
    spw_gpu_queue_destroy(l->queue);
    spw_gpu_close(l->gpu);
    spw_model_destroy(l->model);
}

/* On a tape that was reset. */
static spw_value *
forward(layer *l, bool recorded)
{
    spw_value *x, *y;
    spw_call call = {.tape = l->tape,
                     .batch = &l->batch,
                     .block = l->block,
                     .params = l->params,
                     .model = l->model,
                     .cos_sin = l->cos_sin,
                     .query_cos_sin = l->cos_sin,
                     .training = true};
    l->batch = (spw_batch){.sequences = SEQUENCES,
                           .positions = POSITIONS,
                           .tokens = l->ids,
                           .targets = l->ids,
                           .places = l->ids,
                           .chunk_begins = l->uncut ? NULL : l->chunks,
                           .chunk_ends = l->uncut ? NULL : l->chunks + ROWS,
                           .grad_scale = 1,
                           .losses = l->losses,
                           .dropout_key = 8,
                           .dropout_counter = 77};
    x = spw_tape_input(l->tape, l->x, ROWS, l->model->config.width, recorded && l->only == NULL);
    x->grad = l->dx;
    for (uint32_t k = 0; k < l->block->param_count; k++) {
        const spw_param *p = &l->model->params[l->block->param_ids[k]];
        if (!l->lazy)
            memset(l->grads[k], 0, p->rows * p->cols * sizeof(float));
        l->params[k] =
            spw_tape_param(l->tape, l->weights[k], recorded && (l->only == NULL || *l->only == k) ? l->grads[k] : NULL,
                           l->lazy ? &l->begun[k] : NULL, p->rows, p->cols);
    }
    y = l->block->forward(&call, x);
    if (y != NULL && recorded) {
        y->grad = malloc(ROWS * l->model->config.width *
                         sizeof(float)); /* some operations' gradients are made in its place */
        assert_non_null(y->grad);
        memcpy(y->grad, l->dy, ROWS * l->model->config.width * sizeof(float));
    }
    return y;
}

/* Gradients of the input and of all parameters, one after another; the caller frees them. */
static float *
backward(layer *l, spw_value *y)
{
    uint64_t n = ROWS * l->model->config.width, at = n;
    float *all = malloc((n + l->grad_elems) * sizeof *all);
    act *dy;
    spw_error err = {0};
    assert_non_null(all);
    assert_non_null(y);
    dy = y->grad;
    spw_tape_backward(l->tape, y);
    assert_int_equal(spw_tape_check(l->tape, &err), SPW_OK);
    free(dy);
    memcpy(all, l->dx, n * sizeof *all);
    for (uint32_t k = 0; k < l->block->param_count; k++) {
        const spw_param *p = &l->model->params[l->block->param_ids[k]];
        memcpy(all + at, l->grads[k], p->rows * p->cols * sizeof *all);
        at += p->rows * p->cols;
    }
    return all;
}

/* The block of a family's first layer that has all that it has. */
static uint32_t
layer_of(spw_family family)
{
    bool second = family == SPW_FAMILY_GLM4_MOE || family == SPW_FAMILY_DEEPSEEK_V2 ||
                  family == SPW_FAMILY_DEEPSEEK_V3 || family == SPW_FAMILY_LLAMA4 ||
                  family == SPW_FAMILY_QWEN3_5; /* whose first layer has linear attention, as Qwen3-Next's has */
    return second ? 2 : 1;
}

/* GPT-2 twice, the first with dropout. */
static const spw_family families[] = {
    SPW_FAMILY_GPT2,        SPW_FAMILY_GPT2,       SPW_FAMILY_LLAMA,   SPW_FAMILY_QWEN2,      SPW_FAMILY_QWEN3,
    SPW_FAMILY_MIXTRAL,     SPW_FAMILY_QWEN3_MOE,  SPW_FAMILY_PHI3,    SPW_FAMILY_QWEN2_MOE,  SPW_FAMILY_OLMO2,
    SPW_FAMILY_GEMMA3,      SPW_FAMILY_GEMMA2,     SPW_FAMILY_GPT_OSS, SPW_FAMILY_GLM4_MOE,   SPW_FAMILY_DEEPSEEK_V2,
    SPW_FAMILY_DEEPSEEK_V3, SPW_FAMILY_MINIMAX_M2, SPW_FAMILY_OLMO3,   SPW_FAMILY_NEOX,       SPW_FAMILY_OPT,
    SPW_FAMILY_STARCODER2,  SPW_FAMILY_STABLELM,   SPW_FAMILY_QWEN3_5, SPW_FAMILY_QWEN3_NEXT, SPW_FAMILY_GEMMA4,
    SPW_FAMILY_LLAMA4};
enum { FAMILIES = sizeof families / sizeof families[0] };

/* Of 2 FAMILIES: each without adapters, then each with. */
static void
open_each(layer *l, size_t k)
{
    const spw_family family = families[k % FAMILIES];
    const bool drops = k % FAMILIES == 0 || family == SPW_FAMILY_PHI3;
    open_adapted_layer(l, family, layer_of(family), drops ? 0.1 : 0, k >= FAMILIES);
}

static void
test_kept(void **state)
{
    (void)state;
    for (size_t k = 0; k < 2 * FAMILIES; k++) {
        layer l;
        float *want, *got, *other;
        uint64_t used, bytes;
        open_each(&l, k);
        bytes = (ROWS * l.model->config.width + l.grad_elems) * sizeof(float);
        spw_tape_reset(l.tape, l.arena, ARENA, true);
        want = backward(&l, forward(&l, true));
        spw_tape_reset_keeping(l.tape, l.kept, ARENA);
        assert_non_null(forward(&l, false));
        used = spw_tape_arena_used(l.tape);
        memset(l.arena, 0xff, ARENA); /* NaN */
        spw_tape_reset_kept(l.tape, l.kept, used, l.arena, ARENA);
        got = backward(&l, forward(&l, true));
        assert_memory_equal(want, got, bytes);
        for (uint64_t i = 0; i < used / sizeof(float) && l.model->config.experts == 0; i++) /* places are no numbers */
            ((float *)l.kept)[i] *= 1.5f;
        spw_tape_reset_kept(l.tape, l.kept, used, l.arena, ARENA);
        other = backward(&l, forward(&l, true)); /* nothing was computed again */
        if (l.model->config.experts == 0)
            assert_memory_not_equal(want, other, bytes);
        free(want);
        free(got);
        free(other);
        close_layer(&l);
    }
}

/* A block's last product is not computed again for backward, unless somebody asks for the block's output: the same gradients. */
static void
put_off(bool adapted)
{
    static const spw_family some[] = {SPW_FAMILY_GPT2, SPW_FAMILY_LLAMA, SPW_FAMILY_GEMMA3, SPW_FAMILY_MIXTRAL};
    for (size_t f = 0; f < sizeof some / sizeof some[0]; f++) {
        layer l;
        spw_value *y;
        spw_error err = {0};
        float *want, *got;
        uint64_t product, flops, used;
        bool last_is_product = some[f] == SPW_FAMILY_GPT2 || some[f] == SPW_FAMILY_LLAMA;
        open_adapted_layer(&l, some[f], layer_of(some[f]), 0, adapted);
        product = last_is_product ? 2 * ROWS * l.model->config.width * l.model->config.mlp_width : 0;
        spw_tape_reset(l.tape, l.arena, ARENA, true);
        y = forward(&l, true);
        assert_int_equal(spw_tape_check(l.tape, &err), SPW_OK);
        flops = spw_tape_linear_flops(l.tape);
        want = backward(&l, y);
        used = spw_tape_arena_used(l.tape);
        memset(l.arena, 0xff, ARENA); /* NaN */
        spw_tape_reset(l.tape, l.arena, ARENA, true);
        got = backward(&l, forward(&l, true));
        assert_memory_equal(want, got, (ROWS * l.model->config.width + l.grad_elems) * sizeof(float));
        assert_int_equal(spw_tape_linear_flops(l.tape), flops - product);
        if (last_is_product && !adapted) /* and needs no memory; an adapter's part, onto which it is, has it already */
            assert_int_equal(used - spw_tape_arena_used(l.tape), spw_round_up(ROWS * l.model->config.width * 4, 256));
        free(want);
        free(got);
        close_layer(&l);
    }
}

static void
test_put_off(void **state)
{
    (void)state;
    put_off(false);
    put_off(true); /* the wide matrix' product beside the last adapter */
}

/* Numbers of two calls of a layer, which differ by rounding alone; linear attention divides by lengths of queries and keys. */
static void
assert_near(const layer *l, const float *want, const float *got, uint64_t n, uint64_t each)
{
    const spw_model_config *c = &l->model->config;
    double scale = 0, within = spw_model_is_linear(c, l->block->layer_idx) ? 1e-5 : 2e-6;
    for (uint64_t i = 0; i < n; i++)
        scale = fabs((double)want[i]) > scale ? fabs((double)want[i]) : scale;
    for (uint64_t i = 0; i < n; i++) {
        if (!(fabs((double)want[i] - (double)got[i]) <= within * scale))
            fail_msg("%s, tiles of %llu rows: number %llu is %g, of all rows at once %g", spw_family_name(c->family),
                     (unsigned long long)each, (unsigned long long)i, (double)got[i], (double)want[i]);
    }
}

/* How much of the arena a recorded call takes, from a dry one. */
static uint64_t
measure(layer *l)
{
    spw_value *y;
    spw_tape_reset(l->tape, NULL, 0, true);
    y = forward(l, true);
    assert_non_null(y);
    free(y->grad);
    y->grad = l->dy;
    spw_tape_backward(l->tape, y);
    return spw_tape_arena_used(l->tape);
}

/* A layer in tiles: what it gives, and its gradients, are those of the whole, recomputed or kept, in the memory that a dry call tells. */
static void
examine_tiles(layer *l, uint64_t each, const float *want, const float *want_y)
{
    uint64_t n = ROWS * l->model->config.width, bytes = (n + l->grad_elems) * sizeof(float), used, kept;
    float *got, *again;
    spw_error err = {0};
    spw_value *y;
    act *dy;
    spw_tape_in_tiles(l->tape, each);
    used = measure(l);
    assert_true(used <= ARENA);
    memset(l->arena, 0xff, ARENA); /* NaN */
    spw_tape_reset(l->tape, l->arena, used, true);
    got = backward(l, forward(l, true));
    assert_int_equal(spw_tape_arena_used(l->tape), used);
    assert_near(l, want, got, n + l->grad_elems, each);
    memset(l->arena, 0xff, ARENA);
    spw_tape_reset(l->tape, l->arena, ARENA, false);
    y = forward(l, false);
    assert_int_equal(spw_tape_check(l->tape, &err), SPW_OK);
    assert_near(l, want_y, y->data, n, each);
    memset(l->kept, 0xff, ARENA);
    spw_tape_reset_keeping(l->tape, NULL, 0);
    assert_non_null(forward(l, false));
    kept = spw_tape_arena_used(l->tape);
    spw_tape_reset_keeping(l->tape, l->kept, kept);
    y = forward(l, false);
    assert_int_equal(spw_tape_check(l->tape, &err), SPW_OK);
    assert_near(l, want_y, y->data, n, each);
    memset(l->arena, 0xff, ARENA);
    spw_tape_reset_kept(l->tape, l->kept, kept, l->arena, ARENA);
    again = backward(l, forward(l, true));
    assert_memory_equal(got, again, bytes);
    free(again);
    spw_tape_reset(l->tape, l->arena, used - 256, true);
    y = forward(l, true);
    dy = y != NULL ? y->grad : NULL;
    spw_tape_backward(l->tape, y);
    assert_int_equal(spw_tape_check(l->tape, &err), SPW_ENOMEM);
    free(dy);
    free(got);
}

static void
test_tiles(void **state)
{
    static const uint64_t each[] = {1, 6, 7, 16, POSITIONS, POSITIONS + 1};
    (void)state;
    for (size_t k = 0; k < 2 * FAMILIES; k++) {
        layer l;
        float *want, *want_y;
        spw_error err = {0};
        spw_value *y;
        uint64_t whole;
        open_each(&l, k);
        want_y = malloc(ROWS * l.model->config.width * sizeof *want_y);
        assert_non_null(want_y);
        spw_tape_reset(l.tape, l.arena, ARENA, false);
        y = forward(&l, false);
        assert_int_equal(spw_tape_check(l.tape, &err), SPW_OK);
        memcpy(want_y, y->data, ROWS * l.model->config.width * sizeof *want_y);
        spw_tape_reset(l.tape, l.arena, ARENA, true);
        want = backward(&l, forward(&l, true));
        whole = spw_tape_arena_used(l.tape);
        for (size_t i = 0; i < sizeof each / sizeof each[0]; i++)
            examine_tiles(&l, each[i], want, want_y);
        spw_tape_in_tiles(l.tape, 4);
        assert_true(measure(&l) < whole * 2 / 3);
        spw_tape_in_tiles(l.tape, ROWS);
        assert_int_equal(measure(&l), whole);
        free(want);
        free(want_y);
        close_layer(&l);
    }
}

static bool
is_zero(const float *v, uint64_t n)
{
    uint64_t i = 0;
    while (i < n && v[i] == 0)
        i++;
    return i == n;
}

/* Each parameter trained alone, with no gradient of the input: its gradient is the one that it has where all are wanted. */
static void
train_each(layer *l, const float *want)
{
    uint64_t at = ROWS * l->model->config.width;
    for (uint32_t k = 0; k < l->block->param_count; k++) {
        const spw_param *p = &l->model->params[l->block->param_ids[k]];
        const uint64_t n = p->rows * p->cols, before = ROWS * l->model->config.width;
        float *got;
        l->only = &k;
        memset(l->arena, 0xff, ARENA); /* NaN */
        memset(l->dx, 0, before * sizeof *l->dx);
        spw_tape_reset(l->tape, l->arena, ARENA, true);
        got = backward(l, forward(l, true));
        if (memcmp(want + at, got + at, n * sizeof *got) != 0)
            fail_msg("%s: %s alone has another gradient", spw_family_name(l->model->config.family), p->name);
        assert_true(is_zero(got, at) && is_zero(got + at + n, before + l->grad_elems - at - n));
        at += n;
        free(got);
    }
    l->only = NULL;
}

/* What nobody asks for is not made, and what somebody does keeps its bits, whole and in tiles. */
static void
test_unasked(void **state)
{
    (void)state;
    for (size_t k = 0; k < 2 * FAMILIES; k++) {
        for (uint64_t each = 0; each <= 7; each += 7) {
            layer l;
            float *want;
            open_each(&l, k);
            spw_tape_in_tiles(l.tape, each);
            spw_tape_reset(l.tape, l.arena, ARENA, true);
            want = backward(&l, forward(&l, true));
            train_each(&l, want);
            free(want);
            close_layer(&l);
        }
    }
}

/* A part by rows may not look at other rows, and makes its outputs where it said. */
static void
makes_elsewhere(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    (void)at;
    out[0] = spw_nn_curve(call->tape, SPW_CURVE_GELU, in[0]);
}

static void
attends(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_attention_shape shape = {.B = 1, .T = in[0]->rows, .Hq = 1, .Hk = 1, .D = in[0]->cols, .scale = 1};
    (void)at;
    spw_nn_into(call->tape, 0);
    out[0] = spw_nn_attention(call->tape, in[0], 0, in[0], 0, in[0], 0, NULL, &shape);
}

static void
is_fine(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    (void)at;
    spw_nn_into(call->tape, 0);
    out[0] = spw_nn_curve(call->tape, SPW_CURVE_GELU, in[0]);
}

static void
test_tiles_refused(void **state)
{
    static const spw_rows_fn fns[] = {is_fine, makes_elsewhere, attends};
    layer l;
    (void)state;
    open_layer(&l, SPW_FAMILY_GPT2, 1, 0);
    l.batch = (spw_batch){.sequences = SEQUENCES, .positions = POSITIONS};
    for (size_t k = 0; k < sizeof fns / sizeof fns[0]; k++) {
        spw_call call = {.tape = l.tape, .batch = &l.batch, .block = l.block, .params = l.params, .model = l.model};
        spw_error err = {0};
        spw_value *x, *y = NULL;
        uint32_t at = 0;
        spw_tape_in_tiles(l.tape, 7);
        spw_tape_reset(l.tape, l.arena, ARENA, false);
        x = spw_tape_input(l.tape, l.x, ROWS, l.model->config.width, false);
        assert_true(spw_nn_rows(&call, &at, fns[k], &x, 1, &y, 1) == (k == 0));
        assert_int_equal(spw_tape_check(l.tape, &err), k == 0 ? SPW_OK : SPW_EINVAL);
        assert_true((y != NULL) == (k == 0));
    }
    close_layer(&l);
}

/* Gradients that nobody has begun are written whatever was there, once; what comes later is added. */
static void
test_begun(void **state)
{
    (void)state;
    for (size_t f = 0; f < FAMILIES; f++) {
        for (uint32_t block = 1; block <= 4;
             block += 3) { /* a layer; the head, which makes its gradients in the forward pass */
            layer l;
            float *want, *got, *twice;
            uint64_t n;
            open_layer(&l, families[f], block, f == 0 || families[f] == SPW_FAMILY_PHI3 ? 0.1 : 0);
            n = ROWS * l.model->config.width;
            spw_tape_reset(l.tape, l.arena, ARENA, true);
            want = backward(&l, forward(&l, true));
            l.lazy = true;
            for (uint32_t k = 0; k < l.block->param_count; k++) {
                const spw_param *p = &l.model->params[l.block->param_ids[k]];
                if (!p->frozen)
                    memset(l.grads[k], 0xff, p->rows * p->cols * sizeof(float)); /* NaN */
            }
            spw_tape_reset(l.tape, l.arena, ARENA, true);
            got = backward(&l, forward(&l, true));
            for (uint32_t k = 0; k < l.block->param_count; k++)
                assert_true(l.begun[k] != l.model->params[l.block->param_ids[k]].frozen);
            spw_tape_reset(l.tape, l.arena, ARENA, true);
            twice = backward(&l, forward(&l, true));
            for (uint64_t i = 0; i < n + l.grad_elems; i++) {
                assert_true(want[i] == got[i]); /* zeros of either sign are equal */
                if (i >= n)
                    assert_true(fabsf(twice[i] - 2 * got[i]) <= 1e-5f * (1 + fabsf(got[i])));
            }
            free(want);
            free(got);
            free(twice);
            close_layer(&l);
        }
    }
}

/*
 * Too small an arena is found, whichever of the two it is; a block that makes the loss has computed nothing that could be kept; and
 * attention in chunks that nobody has cut is none over all positions.
 */
static void
test_refused(void **state)
{
    layer l;
    spw_error err = {0};
    spw_value *y;
    uint64_t used;
    (void)state;
    open_layer(&l, SPW_FAMILY_GPT2, 1, 0.1);
    spw_tape_reset_keeping(l.tape, l.kept, ARENA);
    (void)forward(&l, false);
    used = spw_tape_arena_used(l.tape);
    spw_tape_reset_kept(l.tape, l.kept, used - 256, l.arena, ARENA);
    assert_null(forward(&l, true));
    assert_int_equal(spw_tape_check(l.tape, &err), SPW_ENOMEM);
    spw_tape_reset_kept(l.tape, l.kept, used, l.arena, 256);
    y = forward(&l, true);
    assert_non_null(y);
    free(y->grad);
    y->grad = l.dy;
    spw_tape_backward(l.tape, y);
    err = (spw_error){0};
    assert_int_equal(spw_tape_check(l.tape, &err), SPW_ENOMEM);
    close_layer(&l);
    open_layer(&l, SPW_FAMILY_GPT2, 4, 0.1);
    spw_tape_reset_kept(l.tape, l.kept, ARENA, l.arena, ARENA);
    assert_null(forward(&l, true));
    err = (spw_error){0};
    assert_int_equal(spw_tape_check(l.tape, &err), SPW_EINVAL);
    close_layer(&l);
    open_layer(&l, SPW_FAMILY_LLAMA4, 1, 0);
    l.uncut = true;
    spw_tape_reset(l.tape, l.arena, ARENA, false);
    assert_null(forward(&l, false));
    err = (spw_error){0};
    assert_int_equal(spw_tape_check(l.tape, &err), SPW_EINVAL);
    close_layer(&l);
}

/* ---------------------------------------------------------------- gradients that change hands */

enum { SIDE = 6, CELLS = SIDE * SIDE, GRAPHS = 15, LINEAR_GRAPHS = 11 };

/* w[0] to w[2] are weights, w[3] is a value that wants no gradient, w[4] a number in terms. plain: gelu as an operation of its own. */
static spw_value *
gelu_layer(spw_tape *t, spw_value *x, spw_value *w, bool plain)
{
    return plain ? spw_nn_curve(t, SPW_CURVE_GELU, spw_nn_linear(t, x, w, NULL, 0))
                 : spw_nn_linear_gelu(t, x, w, NULL, 0);
}

static spw_value *
graph(spw_tape *t, int number, spw_value *x, spw_value **w, bool plain)
{
    spw_value *a, *b;
    switch (number) {
    case 0: return spw_nn_add(t, x, x);
    case 1: return spw_nn_linear_add(t, x, x, w[0], NULL, 0);
    case 2: return spw_nn_linear_add(t, x, w[3], w[0], NULL, 0); /* nothing else comes to x */
    case 3: a = spw_nn_linear(t, x, w[0], NULL, 0); return spw_nn_add(t, spw_nn_linear_add(t, a, x, w[1], NULL, 0), a);
    case 4: a = spw_nn_add(t, x, x); return spw_nn_linear_add(t, a, a, w[0], NULL, 0);
    case 5:
        a = spw_nn_linear(t, x, w[0], NULL, 0);
        b = spw_nn_add(t, a, x);
        return spw_nn_add(t, spw_nn_linear_add(t, b, a, w[1], NULL, 0), b);
    case 6:
        a = spw_nn_linear_add(t, x, spw_nn_linear(t, x, w[0], NULL, 0), w[1], NULL, 0);
        return spw_nn_linear_onto(t, a, spw_nn_scale(t, x, 0.5f), w[2], NULL, 0);
    case 7: a = spw_nn_linear_add(t, x, x, w[0], NULL, 0); return spw_nn_linear_add(t, a, a, w[1], NULL, 0);
    case 8: return spw_nn_add_scaled_by(t, x, x, w[4]);
    case 9:
        a = spw_nn_linear(t, x, w[0], NULL, 0);
        b = spw_nn_add_scaled_by(t, a, x, w[4]);
        return spw_nn_add_scaled_by(t, spw_nn_linear_add(t, b, a, w[1], NULL, 0), b, w[4]);
    case 10:
        a = spw_nn_add_scaled_by(t, w[3], spw_nn_linear(t, x, w[0], NULL, 0), w[4]);
        return spw_nn_linear_add(t, a, a, w[1], NULL, 0);
    /* from here on with a gelu: taken once, twice, as what is added to as well, and by nothing but a sum */
    case 11: return spw_nn_linear(t, gelu_layer(t, x, w[0], plain), w[1], NULL, 0);
    case 12:
        a = gelu_layer(t, x, w[0], plain);
        return spw_nn_linear_add(t, spw_nn_linear(t, a, w[1], NULL, 0), a, w[2], NULL, 0);
    case 13: a = gelu_layer(t, x, w[0], plain); return spw_nn_linear_add(t, a, a, w[1], NULL, 0);
    default: return spw_nn_add(t, x, gelu_layer(t, x, w[0], plain));
    }
}

/* The output's sum weighted by dy; with grads also gradients of x and the weights (4, CELLS). */
static double
run_graph(layer *l, int number, float *const *in, const float *dy, float *grads, bool plain)
{
    float out_grad[CELLS];
    static float terms[SPW_TERMS] = {0.75f, -0.0625f, 0.001f, 0};
    spw_value *w[5], *x, *y;
    spw_error err = {0};
    double sum = 0;
    spw_tape_reset(l->tape, l->arena, ARENA, true);
    x = spw_tape_input(l->tape, in[0], SIDE, SIDE, true);
    x->grad = grads;
    memset(grads, 0, (size_t)4 * CELLS * sizeof *grads);
    for (int k = 0; k < 3; k++)
        w[k] = spw_tape_param(l->tape, in[k + 1], grads + (k + 1) * CELLS, NULL, SIDE, SIDE);
    w[3] = spw_tape_input(l->tape, in[4], SIDE, SIDE, false);
    w[4] = spw_tape_param(l->tape, terms, NULL, NULL, 1, SPW_TERMS);
    y = graph(l->tape, number, x, w, plain);
    assert_non_null(y);
    assert_int_equal(spw_tape_check(l->tape, &err), SPW_OK); /* y is there */
    for (int i = 0; i < CELLS; i++)
        sum += (double)((const float *)y->data)[i] * (double)dy[i];
    memcpy(out_grad, dy, sizeof out_grad);
    y->grad = out_grad;
    spw_tape_backward(l->tape, y);
    assert_int_equal(spw_tape_check(l->tape, &err), SPW_OK);
    return sum;
}

/*
 * Every way in which a gradient is handed on, added to or made elsewhere: gradients of x are those of differences, which are exact
 * because these graphs are linear in x; behind a gelu they are those of the graph with operations of their own.
 */
static void
test_handed_over(void **state)
{
    layer l;
    float *in[5], *dy = draw(CELLS, 77), grads[4 * CELLS], other[4 * CELLS];
    (void)state;
    open_layer(&l, SPW_FAMILY_GPT2, 1, 0);
    for (uint64_t k = 0; k < 5; k++)
        in[k] = draw(CELLS, 70 + k);
    for (int number = 0; number < GRAPHS; number++) {
        (void)run_graph(&l, number, in, dy, grads, false);
        (void)run_graph(&l, number, in, dy, other, true);
        for (int i = 0; i < 4 * CELLS; i++)
            if (!(fabsf(grads[i] - other[i]) <= 1e-5f))
                fail_msg("graph %d: gradient %d is %g, of operations of their own %g", number, i, (double)grads[i],
                         (double)other[i]);
        for (int i = 0; i < CELLS && number < LINEAR_GRAPHS; i++) {
            float before = in[0][i];
            double up, down;
            in[0][i] = before + 1;
            up = run_graph(&l, number, in, dy, other, false);
            in[0][i] = before - 1;
            down = run_graph(&l, number, in, dy, other, false);
            in[0][i] = before;
            if (!(fabs((up - down) / 2 - (double)grads[i]) <= 1e-5))
                fail_msg("graph %d: gradient %d of x is %g, differences give %g", number, i, (double)grads[i],
                         (up - down) / 2);
        }
    }
    for (int k = 0; k < 5; k++)
        free(in[k]);
    free(dy);
    close_layer(&l);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kept),          cmocka_unit_test(test_put_off),
                                       cmocka_unit_test(test_tiles),         cmocka_unit_test(test_unasked),
                                       cmocka_unit_test(test_tiles_refused), cmocka_unit_test(test_begun),
                                       cmocka_unit_test(test_handed_over),   cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests_name("tape", tests, NULL, NULL);
}
