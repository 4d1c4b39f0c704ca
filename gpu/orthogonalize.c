/*
 * The nearest orthogonal matrix, about: Muon's Newton-Schulz iteration, of the operations that every device has. With A = X X^T (or X^T X,
 * whichever is smaller) a step is X = a X + (b A + c A A) X, an odd polynomial of X's singular values, which five steps bring from
 * anywhere in (0, 1] near 1.
 */
#include "spw_gpu.h"
#include <math.h>

/* Jordan et al. 2024: steepest at 0; it does not converge to 1 but to what lies around it. */
static const float A = 3.4445f, B = -4.7750f, C = 2.0315f;

typedef struct shape {
    uint64_t least; /* of rows and cols */
    uint64_t act_bytes;
} shape;

static shape
shape_of(spw_dtype type, uint64_t rows, uint64_t cols)
{
    return (shape){rows < cols ? rows : cols, spw_dtype_bytes(type)};
}

static uint64_t
square_bytes(const shape *s)
{
    return spw_round_up(s->least * s->least * s->act_bytes, 256);
}

uint64_t
spw_gpu_orthogonal_bytes(spw_dtype type, uint64_t rows, uint64_t cols)
{
    shape s = shape_of(type, rows, cols);
    return spw_round_up(rows * cols * s.act_bytes, 256) + 2 * square_bytes(&s);
}

double
spw_gpu_orthogonal_flops(uint64_t rows, uint64_t cols, uint32_t steps)
{
    double n = (double)(rows < cols ? rows : cols), all = (double)rows * (double)cols;
    return steps * (4 * n * all + 2 * n * n * n);
}

/* Factors before and behind are those of the first and the last step's products: nothing is read for them alone. */
void
spw_gpu_orthogonalize(spw_gpu_queue *q, spw_dtype type, act *x, void *work, uint64_t rows, uint64_t cols, float scale,
                      uint32_t steps, float scale_out)
{
    const shape s = shape_of(type, rows, cols);
    const uint64_t n = s.least, elems = rows * cols;
    const bool tall = rows > cols;
    char *at = (char *)work + spw_round_up(elems * s.act_bytes, 256);
    act *from = x, *to = work, *gram = at, *poly = at + square_bytes(&s);
    SPW_ASSERT(steps > 0);
    for (uint32_t k = 0; k < steps; k++) {
        const float in = k == 0 ? scale : 1.0f, out = k + 1 == steps ? in * scale_out : in;
        act *swap = from;
        if (tall)
            spw_gpu_product(q, gram, NULL, 0, from, from, in * in, n, n, rows, SPW_OP_X_IN_OUT | SPW_OP_W_IN_OUT);
        else
            spw_gpu_product(q, gram, NULL, 0, from, from, in * in, n, n, cols, 0);
        spw_gpu_product(q, poly, gram, B, gram, gram, C, n, n, n, 0); /* they are symmetric */
        if (tall)
            spw_gpu_product(q, to, from, A * out, from, poly, out, rows, n, n, 0);
        else
            spw_gpu_product(q, to, from, A * out, poly, from, out, n, cols, n, SPW_OP_W_IN_OUT);
        from = to;
        to = swap;
    }
    if (from != x)
        spw_gpu_copy_d2d(q, x, type, from, type, elems, NULL);
}
