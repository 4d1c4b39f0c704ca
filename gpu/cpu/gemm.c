/*
 * Matrix products: OpenBLAS on one thread, called from the parts of our own cut. The cut depends on the shape alone, so
 * the number of threads never changes a bit, and BLAS never starts threads that compete with ours.
 */
#include "cpu_internal.h"
#include <cblas.h>
#include <pthread.h>
#include <stdlib.h>

/* Of builds that have kernels for several CPUs; not in its header. */
void gotoblas_dynamic_init(void) __attribute__((weak));
void gotoblas_dynamic_quit(void) __attribute__((weak));

static pthread_once_t chosen = PTHREAD_ONCE_INIT;

/*
 * OpenBLAS goes by the CPU's model when it is loaded, and for a model younger than itself takes kernels without AVX, with a fifth of the
 * speed (its issue 4267; 0.3.21 on Emerald Rapids). Then it is told what instructions there are, and chooses again. SPW_ISA has no
 * say: it changes no bit, and these kernels do.
 */
static void
choose_kernels(void)
{
    static const char *const fallbacks[] = {"Prescott", "Barcelona", "Sandybridge"}, name[] = "OPENBLAS_CORETYPE";
    const char *core = openblas_get_corename();
    bool fell_back = false;
    openblas_set_num_threads(1); /* the cut is ours */
    for (size_t i = 0; i < sizeof fallbacks / sizeof *fallbacks; i++)
        fell_back = fell_back || strcmp(core, fallbacks[i]) == 0;
    if (!fell_back || !spw_cpu_has(SPW_ISA_AVX2) || getenv(name) != NULL || gotoblas_dynamic_init == NULL ||
        gotoblas_dynamic_quit == NULL)
        return;
    setenv(name, spw_cpu_has(SPW_ISA_AVX512) ? "SkylakeX" : "Haswell", 1);
    gotoblas_dynamic_quit();
    gotoblas_dynamic_init();
    unsetenv(name);
}

const char *
spw__cpu_gemm_open(void)
{
    pthread_once(&chosen, choose_kernels);
    return openblas_get_corename();
}

void
spw__cpu_gemm_here(bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, float alpha, const float *A,
                   uint64_t lda, const float *B, uint64_t ldb, float beta, float *C, uint64_t ldc)
{
    cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, (int)M, (int)N,
                (int)K, alpha, A, (int)lda, B, (int)ldb, beta, C, (int)ldc);
}

struct gemm {
    bool trans_a, trans_b, cut_rows;
    uint64_t M, N, K, lda, ldb, ldc, slice;
    const float *A, *B;
    float *C, alpha, beta;
};

static void
gemm_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const struct gemm *g = ctx;
    uint64_t dim = g->cut_rows ? g->M : g->N, first = part_idx * g->slice;
    uint64_t n = dim - first < g->slice ? dim - first : g->slice;
    (void)worker_idx;
    if (g->cut_rows)
        spw__cpu_gemm_here(g->trans_a, g->trans_b, n, g->N, g->K, g->alpha,
                           g->A + (g->trans_a ? first : first * g->lda), g->lda, g->B, g->ldb, g->beta,
                           g->C + first * g->ldc, g->ldc);
    else
        spw__cpu_gemm_here(g->trans_a, g->trans_b, g->M, n, g->K, g->alpha, g->A, g->lda,
                           g->B + (g->trans_b ? first * g->ldb : first), g->ldb, g->beta, g->C + first, g->ldc);
}

static uint64_t
slice_of(uint64_t M, uint64_t N, uint64_t K)
{
    uint64_t dim = M >= N ? M : N;
    uint32_t parts = M * N * K < 65536 ? 1 : spw__cpu_parts(dim, 192);
    return spw_round_up((dim + parts - 1) / parts, 16);
}

/* OpenBLAS packs a block of one factor and a panel of the other; tiles of attention are products too. */
uint64_t
spw__cpu_product_bytes(const spw_gpu *gpu, uint32_t thread_idx, uint64_t M, uint64_t N, uint64_t K)
{
    const uint64_t P = 768, Q = 448, TILES = 128 << 10; /* its largest for x86-64: Haswell, Skylake X */
    uint64_t slice = slice_of(M, N, K), block = M >= N ? N : slice, panel = M >= N ? slice : M;
    uint64_t bytes = (K < Q ? K : Q) * ((block < P ? block : P) + panel) * sizeof(float);
    (void)gpu;
    if (thread_idx * slice >= (M >= N ? M : N) || bytes < TILES)
        bytes = TILES;
    return bytes;
}

void
spw__cpu_gemm_scaled(spw_gpu_queue *q, bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, float alpha,
                     const float *A, uint64_t lda, const float *B, uint64_t ldb, float beta, float *C, uint64_t ldc)
{
    struct gemm g = {trans_a, trans_b, M >= N, M, N, K, lda, ldb, ldc, 0, A, B, C, alpha, beta};
    uint64_t dim = g.cut_rows ? M : N;
    g.slice = slice_of(M, N, K);
    spw__cpu_run(q, (uint32_t)((dim + g.slice - 1) / g.slice), gemm_part, &g);
}

void
spw__cpu_gemm(spw_gpu_queue *q, bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, const float *A,
              uint64_t lda, const float *B, uint64_t ldb, float beta, float *C, uint64_t ldc)
{
    spw__cpu_gemm_scaled(q, trans_a, trans_b, M, N, K, 1.0f, A, lda, B, ldb, beta, C, ldc);
}
