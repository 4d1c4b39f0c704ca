/*
 * Linear layers in 8-bit floats: inputs and weights in E4M3, gradients of outputs in E5M2, each tensor with a scale of its own of this call;
 * sums are fp32, results what the same layer gives otherwise. An input's codes belong to its value, for all layers that it goes
 * into: for forward, and transposed for their weights' gradients. Those of weights and of gradients are gone when their layer is done.
 *
 * Source  Micikevicius et al. 2022 (2209.05433), section 3
 */
#include "tape_internal.h"

enum { STEP = 16 }; /* sizes that tensor cores and their 16-byte loads take */

bool
spw__fp8_takes(const spw_value *x, const spw_value *w)
{
    return w->fp8 && x->rows % STEP == 0 && w->rows % STEP == 0 && w->cols % STEP == 0;
}

/* One scale follows n codes. */
static void *
take_codes(spw_tape *t, uint64_t n)
{
    return spw__tape_take(t, n + sizeof(float));
}

static float *
scale_behind(uint8_t *codes, uint64_t n)
{
    return (float *)(void *)(codes + n);
}

bool
spw__fp8_prepare(spw_tape *t, spw_value *x)
{
    if (x->codes == NULL) {
        x->codes = take_codes(t, x->rows * x->cols);
        x->scaled = x->coded = t->kept; /* by the call that was kept */
    }
    return x->codes != NULL;
}

static float *
scale_input(spw_tape *t, spw_value *x)
{
    uint64_t n = x->rows * x->cols;
    float *scale = scale_behind(x->codes, n);
    if (!x->scaled)
        spw_gpu_fp8_scale(t->queue, scale, SPW_E4M3, x->data, n);
    x->scaled = true;
    return scale;
}

/* Weights are codes (out, in) or (in, out), whichever way they lie. */
static spw_fp8_matrix
code_weights(spw_tape *t, uint8_t *codes, const spw_value *w, bool turned)
{
    float *scale = scale_behind(codes, w->rows * w->cols);
    spw_gpu_fp8_scale(t->queue, scale, SPW_E4M3, w->data, w->rows * w->cols);
    spw_gpu_fp8_encode(t->queue, turned ? NULL : codes, turned ? codes : NULL, SPW_E4M3, scale, w->data, w->rows,
                       w->cols);
    return (spw_fp8_matrix){codes, scale, SPW_E4M3};
}

uint8_t *
spw__fp8_lend(spw_tape *t, const spw_value *w)
{
    uint64_t used = t->used;
    uint8_t *codes;
    if (t->kept) /* computes nothing, and memory ends where what stays does */
        return NULL;
    codes = take_codes(t, w->rows * w->cols);
    t->used = used;
    return codes;
}

void
spw__fp8_forward(spw_tape *t, const spw__op *o)
{
    spw_value *y = o->out, *x = o->in[0], *w = o->param[0];
    uint8_t *w_codes = spw__fp8_lend(t, w);
    float *scale;
    if (!spw__tape_computes(t) || w_codes == NULL)
        return;
    scale = scale_input(t, x);
    if (!x->coded)
        spw_gpu_fp8_encode(t->queue, x->codes, NULL, SPW_E4M3, scale, x->data, x->rows, x->cols);
    x->coded = true;
    spw_gpu_fp8_product(t->queue,
                        &(spw_fp8_product){.y = y->gelu_in != NULL ? y->gelu_in : y->data,
                                           .onto = o->in[1] != NULL ? o->in[1]->data : NULL,
                                           .bias = o->param[1] != NULL ? o->param[1]->data : NULL,
                                           .a = {x->codes, scale, SPW_E4M3},
                                           .b = code_weights(t, w_codes, w, (o->flags & SPW_OP_W_IN_OUT) != 0),
                                           .M = y->rows,
                                           .N = y->cols,
                                           .K = x->cols});
    if (y->gelu_in != NULL)
        spw_gpu_curve(t->queue, SPW_CURVE_GELU, y->data, y->gelu_in, y->rows * y->cols);
}

/* dw += dy^T x, or the transpose of that. */
static void
backward_weights(spw_tape *t, const spw__op *o, const spw_fp8_matrix *dy_turned, unsigned flags)
{
    spw_value *x = o->in[0], *w = o->param[0];
    bool in_out = (flags & SPW_OP_W_IN_OUT) != 0;
    spw_fp8_matrix of_x = {x->turned, scale_input(t, x), SPW_E4M3};
    if (!x->turned_coded)
        spw_gpu_fp8_encode(t->queue, NULL, x->turned, SPW_E4M3, of_x.scale, x->data, x->rows, x->cols);
    x->turned_coded = true;
    spw_gpu_fp8_product(t->queue, &(spw_fp8_product){.y = w->w_grad,
                                                     .onto = flags & SPW_OP_SET_DW ? NULL : w->w_grad,
                                                     .f32_out = true,
                                                     .a = in_out ? of_x : *dy_turned,
                                                     .b = in_out ? *dy_turned : of_x,
                                                     .M = w->rows,
                                                     .N = w->cols,
                                                     .K = x->rows});
}

void
spw__fp8_backward(spw_tape *t, const spw__op *o, act *dx, unsigned flags)
{
    spw_value *y = o->out, *x = o->in[0], *w = o->param[0];
    uint64_t n = y->rows * y->cols, used;
    bool dw = t->dry || w->w_grad != NULL;
    uint8_t *dy, *w_codes;
    spw_fp8_matrix of_dy;
    if (dw && x->turned == NULL)
        x->turned = spw__tape_take(t, x->rows * x->cols);
    used = t->used;
    dy = take_codes(t, 2 * n);
    w_codes = take_codes(t, w->rows * w->cols);
    t->used = used;
    if (t->dry || t->status != SPW_OK || (!dw && dx == NULL))
        return;
    of_dy = (spw_fp8_matrix){dy, scale_behind(dy, 2 * n), SPW_E5M2};
    spw_gpu_fp8_scale(t->queue, scale_behind(dy, 2 * n), SPW_E5M2, y->grad, n);
    spw_gpu_fp8_encode(t->queue, dx != NULL ? dy : NULL, dw ? dy + n : NULL, SPW_E5M2, of_dy.scale, y->grad, y->rows,
                       y->cols);
    if (dw)
        backward_weights(t, o, &(spw_fp8_matrix){dy + n, of_dy.scale, SPW_E5M2}, flags);
    if (dx != NULL)
        spw_gpu_fp8_product(t->queue,
                            &(spw_fp8_product){.y = dx,
                                               .onto = flags & SPW_OP_ACC_DX ? dx : NULL,
                                               .a = of_dy,
                                               .b = code_weights(t, w_codes, w, (flags & SPW_OP_W_IN_OUT) == 0),
                                               .M = x->rows,
                                               .N = x->cols,
                                               .K = y->cols});
}
