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

enum { SEQUENCES = 2, POSITIONS = 20, ROWS = SEQUENCES * POSITIONS, ARENA = 4 << 20 };

typedef struct layer {
    spw_model *model;
    const spw_block *block;
    spw_gpu *gpu;
    spw_gpu_queue *queue;
    spw_tape *tape;
    float *cos_sin, *x, *dy, *dx;
    float *weights[SPW_BLOCK_PARAMS_MAX], *grads[SPW_BLOCK_PARAMS_MAX];
    uint64_t grad_elems;
    int32_t ids[ROWS];
    float losses[ROWS];
    char *kept, *arena;
    bool lazy, begun[SPW_BLOCK_PARAMS_MAX];
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
open_layer(layer *l, spw_family family, uint32_t block_idx)
{
    spw_model_config c;
    spw_error err = {0};
    memset(l, 0, sizeof *l);
    tiny_model_config(&c, family);
    c.dropout = family == SPW_FAMILY_GPT2 ? 0.1 : 0;
    c.qk_norm = family == SPW_FAMILY_QWEN3;
    assert_int_equal(spw_model_build(&l->model, &c, &err), SPW_OK);
    l->block = &l->model->blocks[block_idx];
    assert_int_equal(spw_gpu_open(&l->gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&l->queue, l->gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_tape_create(&l->tape, l->queue, SPW_F32, &err), SPW_OK);
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
    spw_batch batch = {.sequences = SEQUENCES,
                       .positions = POSITIONS,
                       .tokens = l->ids,
                       .targets = l->ids,
                       .places = l->ids,
                       .grad_scale = 1,
                       .losses = l->losses,
                       .dropout_key = 8,
                       .dropout_counter = 77};
    spw_value *params[SPW_BLOCK_PARAMS_MAX], *x, *y;
    spw_call call = {.tape = l->tape,
                     .batch = &batch,
                     .block = l->block,
                     .params = params,
                     .model = l->model,
                     .cos_sin = l->cos_sin,
                     .training = true};
    x = spw_tape_input(l->tape, l->x, ROWS, l->model->config.width, recorded);
    x->grad = l->dx;
    for (uint32_t k = 0; k < l->block->param_count; k++) {
        const spw_param *p = &l->model->params[l->block->param_ids[k]];
        if (!l->lazy)
            memset(l->grads[k], 0, p->rows * p->cols * sizeof(float));
        params[k] = spw_tape_param(l->tape, l->weights[k], recorded ? l->grads[k] : NULL, l->lazy ? &l->begun[k] : NULL,
                                   p->rows, p->cols);
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

static void
test_kept(void **state)
{
    static const spw_family families[] = {SPW_FAMILY_GPT2, SPW_FAMILY_LLAMA, SPW_FAMILY_QWEN2, SPW_FAMILY_QWEN3};
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        layer l;
        float *want, *got, *other;
        uint64_t used, bytes;
        open_layer(&l, families[f], 1);
        bytes = (ROWS * l.model->config.width + l.grad_elems) * sizeof(float);
        spw_tape_reset(l.tape, l.arena, ARENA, true);
        want = backward(&l, forward(&l, true));
        spw_tape_reset(l.tape, l.kept, ARENA, false);
        assert_non_null(forward(&l, false));
        used = spw_tape_arena_used(l.tape);
        memset(l.arena, 0xff, ARENA); /* NaN */
        spw_tape_reset_kept(l.tape, l.kept, used, l.arena, ARENA);
        got = backward(&l, forward(&l, true));
        assert_memory_equal(want, got, bytes);
        for (uint64_t i = 0; i < used / sizeof(float); i++)
            ((float *)l.kept)[i] *= 1.5f;
        spw_tape_reset_kept(l.tape, l.kept, used, l.arena, ARENA);
        other = backward(&l, forward(&l, true)); /* nothing was computed again */
        assert_memory_not_equal(want, other, bytes);
        free(want);
        free(got);
        free(other);
        close_layer(&l);
    }
}

/* Gradients that nobody has begun are written whatever was there, once; what comes later is added. */
static void
test_begun(void **state)
{
    static const spw_family families[] = {SPW_FAMILY_GPT2, SPW_FAMILY_LLAMA, SPW_FAMILY_QWEN2, SPW_FAMILY_QWEN3};
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        for (uint32_t block = 1; block <= 4;
             block += 3) { /* a layer; the head, which makes its gradients in the forward pass */
            layer l;
            float *want, *got, *twice;
            uint64_t n;
            open_layer(&l, families[f], block);
            n = ROWS * l.model->config.width;
            spw_tape_reset(l.tape, l.arena, ARENA, true);
            want = backward(&l, forward(&l, true));
            l.lazy = true;
            for (uint32_t k = 0; k < l.block->param_count; k++) {
                const spw_param *p = &l.model->params[l.block->param_ids[k]];
                memset(l.grads[k], 0xff, p->rows * p->cols * sizeof(float)); /* NaN */
            }
            spw_tape_reset(l.tape, l.arena, ARENA, true);
            got = backward(&l, forward(&l, true));
            for (uint32_t k = 0; k < l.block->param_count; k++)
                assert_true(l.begun[k]);
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

/* Too small an arena is found, whichever of the two it is; a block that makes the loss has computed nothing that could be kept. */
static void
test_refused(void **state)
{
    layer l;
    spw_error err = {0};
    spw_value *y;
    uint64_t used;
    (void)state;
    open_layer(&l, SPW_FAMILY_GPT2, 1);
    spw_tape_reset(l.tape, l.kept, ARENA, false);
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
    open_layer(&l, SPW_FAMILY_GPT2, 4);
    spw_tape_reset_kept(l.tape, l.kept, ARENA, l.arena, ARENA);
    assert_null(forward(&l, true));
    err = (spw_error){0};
    assert_int_equal(spw_tape_check(l.tape, &err), SPW_EINVAL);
    close_layer(&l);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kept), cmocka_unit_test(test_begun),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests_name("tape", tests, NULL, NULL);
}
