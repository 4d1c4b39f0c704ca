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
    uint64_t rows, cols, least; /* least: the smaller of the two */
    uint64_t act_bytes;
} shape;

static shape
shape_of(spw_dtype type, uint64_t rows, uint64_t cols)
{
    return (shape){rows, cols, rows < cols ? rows : cols, spw_dtype_bytes(type)};
}

static uint64_t
square_bytes(const shape *s, uint64_t each)
{
    return spw_round_up(s->least * s->least * each, 256);
}

uint64_t
spw_gpu_orthogonal_bytes(spw_dtype type, uint64_t rows, uint64_t cols)
{
    shape s = shape_of(type, rows, cols);
    return spw_round_up(rows * cols * s.act_bytes, 256) + 2 * square_bytes(&s, s.act_bytes) +
           (rows > cols ? square_bytes(&s, sizeof(float)) : 0);
}

double
spw_gpu_orthogonal_flops(uint64_t rows, uint64_t cols, uint32_t steps)
{
    double n = (double)(rows < cols ? rows : cols), all = (double)rows * (double)cols;
    return steps * (4 * n * all + 2 * n * n * n);
}

void
spw_gpu_orthogonalize(spw_gpu_queue *q, spw_dtype type, act *x, void *work, uint64_t rows, uint64_t cols, float scale,
                      uint32_t steps, float scale_out)
{
    const shape s = shape_of(type, rows, cols);
    const uint64_t n = s.least, elems = rows * cols;
    char *at = (char *)work + spw_round_up(elems * s.act_bytes, 256);
    act *from = x, *to = work, *gram = at, *square = at + square_bytes(&s, s.act_bytes);
    float *wide = (float *)(void *)(at + 2 * square_bytes(&s, s.act_bytes));
    spw_gpu_add_scaled(q, x, NULL, x, scale, elems);
    for (uint32_t k = 0; k < steps; k++) {
        act *swap = from;
        if (rows > cols) {
            spw_gpu_linear_backward(q, NULL, wide, NULL, from, from, NULL, rows, n, n, SPW_OP_SET_DW);
            spw_gpu_copy_d2d(q, gram, type, wide, SPW_F32, n * n, NULL);
        } else {
            spw_gpu_linear(q, gram, from, from, NULL, n, n, cols, 0);
        }
        spw_gpu_linear(q, square, gram, gram, NULL, n, n, n, 0); /* it is symmetric */
        spw_gpu_add_scaled(q, gram, NULL, gram, B, n * n);
        spw_gpu_add_scaled(q, gram, gram, square, C, n * n);
        spw_gpu_add_scaled(q, to, NULL, from, A, elems);
        if (rows > cols)
            spw_gpu_linear_add(q, to, to, from, gram, NULL, rows, n, n, 0);
        else
            spw_gpu_linear_add(q, to, to, gram, from, NULL, n, cols, n, SPW_OP_W_IN_OUT);
        from = to;
        to = swap;
    }
    spw_gpu_add_scaled(q, x, NULL, from, scale_out, elems);
}
