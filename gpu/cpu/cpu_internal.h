/*
 * Inside the cpu device: the pool that runs parts of operations, and the table of vector kernels (kernels_body.h,
 * built once per instruction set). Every cut is made by shape, so that no result depends on the number of threads.
 */
#ifndef SPW_GPU_CPU_INTERNAL_H
#define SPW_GPU_CPU_INTERNAL_H

#include "gpu_internal.h"

enum { CPU_STATE_LANES = 32 }; /* columns, or rows, of a linear attention's state that are computed at a time */

typedef struct cpu_kernels {
    void (*add)(float *y, const float *a, const float *b, uint64_t n);
    void (*curve[SPW_CURVE_COUNT])(float *y, const float *x, uint64_t n);
    void (*curve_backward[SPW_CURVE_COUNT])(float *dx, const float *dy, const float *x, uint64_t n, bool acc);
    void (*gate_mul[SPW_GATE_COUNT])(float *y, const float *gate, const float *up, uint64_t n);
    void (*gate_mul_backward[SPW_GATE_COUNT])(float *dg, float *du, const float *dy, const float *gate, const float *up,
                                              uint64_t n, bool acc_g, bool acc_u);
    void (*layernorm_row)(float *y, float *mean, float *rstd, const float *x, const float *g, const float *b,
                          uint64_t C, float eps);
    /* dx = onto + ...; onto NULL: nothing, and it may be dx */
    void (*layernorm_dx_row)(float *dx, const float *onto, const float *dy, const float *x, const float *g, float mean,
                             float rstd, uint64_t C);
    /* g NULL: zeros */
    void (*rmsnorm_row)(float *y, float *rstd, const float *x, const float *g, float offset, uint64_t C, float eps);
    void (*rmsnorm_dx_row)(float *dx, const float *onto, const float *dy, const float *x, const float *g, float offset,
                           float rstd, uint64_t C);
    /* dg[j] += dy[j] * (x[j] - mean) * rstd */
    void (*norm_dg_row)(float *dg, const float *dy, const float *x, float mean, float rstd, uint64_t C);
    void (*axpy)(float *y, float a, const float *x, uint64_t n); /* y += a x */
    void (*axpy4)(float *y, const float *a, const float *x, uint64_t stride,
                  uint64_t n); /* axpy by a[0..3], in order */
    void (*scale)(float *y, float a, uint64_t n);
    float (*max)(const float *x, uint64_t n);
    float (*dot)(const float *x, const float *y, uint64_t n);
    void (*dot4)(float *out, const float *x, uint64_t stride, const float *y,
                 uint64_t n);                                            /* of four rows of x; dot's bits */
    float (*exp_sum)(float *y, const float *x, float shift, uint64_t n); /* y = exp(x - shift); returns the sum */
    /* p <- p * (dp - d) * scale with p = exp(s - lse), in place in s; the softmax is also stored in p_out */
    void (*softmax_grad_row)(float *p_out, float *ds_out, const float *s, const float *dp, float lse, float d,
                             float scale, uint64_t n);
    void (*soft_cap)(float *x, float cap, uint64_t n); /* x <- cap tanh(x / cap) */
    /* dx <- (dx - d) times the derivative of that, where it gave y */
    void (*soft_cap_backward)(float *dx, const float *y, float d, float cap, uint64_t n);
    /* spw_gpu_dropout() of elements first and on; y may be x */
    void (*dropout)(float *y, const float *x, uint64_t n, float p, uint64_t key, uint64_t counter, uint64_t first);
    void (*rope_row)(float *x, const float *cos_sin, uint64_t half, float sign);
    /* u = sum over j < taps of w[j][i] x[j][i], w (taps, n); an x that is NULL is left out */
    void (*conv)(float *u, const float *const *x, const float *w, uint64_t taps, uint64_t n);
    void (*silu)(float *y, const float *u, uint64_t n);
    void (*silu_backward)(float *du, const float *dy, const float *u, uint64_t n);
    void (*mul_add)(float *y, const float *a, const float *b, uint64_t n); /* y += a b */
    /*
     * One row's step of a state (rows, CPU_STATE_LANES): what is new is an outer product of a number for each row and one for each lane.
     *   forward   s = decay s + x lanes;                     out = y^T s, next = z^T s
     *   backward  s = decay (s + x lanes) + x2 lanes2;       out = y^T s
     * rows is even. by: the same with a decay for each row, or for each lane, the other being NULL.
     */
    void (*state_forward)(float *state, uint64_t rows, float decay, const float *x, const float *lanes, const float *y,
                          float *out, const float *z, float *next);
    void (*state_backward)(float *state, uint64_t rows, float decay, const float *x, const float *lanes,
                           const float *x2, const float *lanes2, const float *y, float *out);
    void (*state_forward_by)(float *state, uint64_t rows, const float *by_row, const float *by_lane, const float *x,
                             const float *lanes, const float *y, float *out, const float *z, float *next);
    void (*state_backward_by)(float *state, uint64_t rows, const float *by_row, const float *by_lane, const float *x,
                              const float *lanes, const float *x2, const float *lanes2, const float *y, float *out);
    /* y = exp(-rate log(1 + exp(a + bias))); what is less than e^-87 is 0 */
    void (*decays)(float *y, const float *a, const float *bias, float rate, uint64_t n);
    double (*sumsq)(const float *x, uint64_t n);
    void (*to_fp8)(uint8_t *codes, spw_fp8 format, const float *x, float inverse, uint64_t n); /* of x times inverse */
} cpu_kernels;

extern const cpu_kernels spw__cpu_kernels_scalar, spw__cpu_kernels_avx2, spw__cpu_kernels_avx512;

/* What spw_gpu_alloc() gave. */
typedef struct cpu_memory {
    spw_region region;
    uint64_t bytes; /* that count */
    struct cpu_memory *next;
} cpu_memory;

typedef struct cpu_gpu {
    spw_gpu base;
    spw_gpu_info info;
    char description[192];
    spw_pool *pool;
    const cpu_kernels *kernels;
    spw_id_set nodes; /* that memory is taken from in turn */
    pthread_mutex_t memory_lock;
    cpu_memory *memory;              /* under memory_lock, as what follows */
    uint64_t bytes_live, bytes_peak; /* read without it */
} cpu_gpu;

static inline uint64_t
min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* How n elements, rows or columns are cut into slices, a part each: how many there are, and a part's first and how many it has. */
enum { CPU_ELEMENT_GRAIN = 16384, CPU_COL_GRAIN = 64 };

static inline uint32_t
cpu_slices(uint64_t n, uint64_t grain)
{
    return (uint32_t)((n + grain - 1) / grain);
}

static inline uint64_t
cpu_slice(uint64_t n, uint64_t grain, uint32_t part_idx, uint64_t *first)
{
    *first = part_idx * grain;
    return min_u64(n - *first, grain);
}

/* Rows of so many columns. */
static inline uint64_t
cpu_row_grain(uint64_t cols)
{
    return cols >= CPU_ELEMENT_GRAIN ? 1 : CPU_ELEMENT_GRAIN / cols;
}

/* What SPW_TERMS numbers in a row stand for. */
static inline float
sum_of_terms(const float *terms)
{
    return terms[0] + terms[1] + terms[2] + terms[3];
}

const cpu_kernels *spw__cpu_kernels(const spw_gpu_queue *q);
/* Runs fn over [0, part_count) on the device's pool. */
void spw__cpu_run(spw_gpu_queue *q, uint32_t part_count, spw_pool_fn fn, void *ctx);
/* How many parts of about `grain` make n; at least 1. */
uint32_t spw__cpu_parts(uint64_t n, uint64_t grain);
/* Makes OpenBLAS ready, with kernels for this CPU's instructions; what it calls those. Any thread, but at the first call none may
 * be inside OpenBLAS. */
const char *spw__cpu_gemm_open(void);
/* C(M,N) = alpha op(A) op(B) + beta C, row-major, cut by shape over the pool; spw__cpu_gemm(): with alpha 1. */
void
spw__cpu_gemm_scaled(spw_gpu_queue *q, bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, float alpha,
                     const float *A, uint64_t lda, const float *B, uint64_t ldb, float beta, float *C, uint64_t ldc);
void spw__cpu_gemm(spw_gpu_queue *q, bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, const float *A,
                   uint64_t lda, const float *B, uint64_t ldb, float beta, float *C, uint64_t ldc);
/* The same on the calling thread alone. */
void spw__cpu_gemm_here(bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, float alpha, const float *A,
                        uint64_t lda, const float *B, uint64_t ldb, float beta, float *C, uint64_t ldc);

#endif
