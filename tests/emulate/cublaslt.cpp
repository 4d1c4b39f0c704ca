/*
 * cuBLASLt as far as the plugin uses it, for tests without a GPU: products as its documentation defines them, columns first, in the
 * order of emulated streams. It is stricter than the library: what is promised when an algorithm is chosen (shapes, alignments,
 * workspace) and not kept when it is used stops the test. Where less alignment than 16 bytes is promised sums go the other way round: what should
 * have the same bits must not lie otherwise in one placement than in another. With SPW_EMULATE_BLAS=plain it has no way for an epilogue with a
 * GELU, with "none" for nothing at all: then the plugin's own kernels serve. With "fails" no product starts. Test code.
 */
#include "cublasLt.h"
#include "common.cuh"
#include "fp8.h"
#include <algorithm>
#include <stdio.h>
#include <vector>

#define EXPORT __attribute__((visibility("default")))

struct emulated_blas {
    int open;
};
struct emulated_desc {
    cublasOperation_t op_a, op_b;
    cublasLtEpilogue_t epilogue;
    const void *bias;
    void *aux;
    const float *a_scale, *b_scale;
    cudaDataType_t bias_type;
    int64_t aux_ld;
    cublasLtPointerMode_t factors;
};
struct emulated_layout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
};
struct emulated_preference {
    size_t workspace;
    uint32_t schemes, align_a, align_b, align_c, align_d;
};

namespace
{
enum { WORKSPACE = 4096 };

struct product {
    emulated_desc desc;
    emulated_layout a, b, d;
    const char *A, *B, *C;
    char *D, *workspace;
    float alpha, beta;
    const float *alpha_at, *beta_at;
    bool backwards; /* sums from the last k on, as another algorithm would */
    bool twice;     /* what is added to a sum in 16 bits finds it rounded, as a Hopper does it */
};

[[noreturn]] void
stop(const char *why)
{
    fprintf(stderr, "emulated cuBLASLt: %s\n", why);
    abort();
}

bool
is_fp8(cudaDataType_t type)
{
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

uint64_t
size_of(cudaDataType_t type)
{
    return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2;
}

float
get(const void *base, cudaDataType_t type, uint64_t i)
{
    if (is_fp8(type))
        return spw_fp8_to_f32(type == CUDA_R_8F_E4M3 ? SPW_E4M3 : SPW_E5M2, ((const uint8_t *)base)[i]);
    return type == CUDA_R_32F    ? ((const float *)base)[i]
           : type == CUDA_R_16BF ? widen(((const bf16 *)base)[i])
                                 : widen(((const f16 *)base)[i]);
}

void
put(void *base, cudaDataType_t type, uint64_t i, float v)
{
    if (type == CUDA_R_32F)
        ((float *)base)[i] = v;
    else if (type == CUDA_R_16BF)
        narrow((bf16 *)base + i, v);
    else
        narrow((f16 *)base + i, v);
}

float
rounded(cudaDataType_t type, float v)
{
    uint16_t there[1];
    put(there, type, 0, v);
    return get(there, type, 0);
}

float
tanh_of(float x)
{
    return tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x));
}

float
gelu(float x)
{
    return 0.5f * x * (1.0f + tanh_of(x));
}

float
gelu_slope(float x)
{
    float t = tanh_of(x), du = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * du;
}

enum { ROWS = 16, COLS = 4 };
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));

template <class E>
void
fill_panels(float *out, const E *X, uint64_t count, uint64_t K, uint64_t across, uint64_t along, uint64_t width)
{
    for (uint64_t i = 0; i < count; i++) {
        float *to = out + i / width * K * width + i % width;
        for (uint64_t k = 0; k < K; k++)
            to[k * width] = widen(X[i * across + k * along]);
    }
}

/* `count` vectors of K elements in fp32, in panels of `width`: the same element of each lies together. What lacks of the last panel is 0. */
std::vector<float>
panels(const char *X, cudaDataType_t type, uint64_t count, uint64_t K, uint64_t across, uint64_t along, uint64_t width)
{
    std::vector<float> out((count + width - 1) / width * width * K);
    if (type == CUDA_R_16BF)
        fill_panels(out.data(), (const bf16 *)X, count, K, across, along, width);
    else if (type == CUDA_R_16F)
        fill_panels(out.data(), (const f16 *)X, count, K, across, along, width);
    else
        for (uint64_t i = 0; i < count; i++)
            for (uint64_t k = 0; k < K; k++)
                out[(i / width * K + k) * width + i % width] = get(X, type, i * across + k * along);
    return out;
}

/* Each sum in the order of k, or against it. Apart: what it leaves in wide registers would slow down what comes after it. */
__attribute__((noinline)) void
sum_up(float *sums, const float *a, const float *b, uint64_t K, bool backwards)
{
    eight s[COLS][2] = {};
    for (uint64_t n = 0; n < K; n++) {
        uint64_t k = backwards ? K - 1 - n : n;
        eight low = *(const eight *)(a + k * ROWS), high = *(const eight *)(a + k * ROWS + 8);
        for (int j = 0; j < COLS; j++) {
            s[j][0] += low * b[k * COLS + j];
            s[j][1] += high * b[k * COLS + j];
        }
    }
    memcpy(sums, s, sizeof s);
}

/* alpha times a sum, to where it goes. */
void
finish(const product *p, uint64_t i, uint64_t j, float sum)
{
    const emulated_desc &e = p->desc;
    uint64_t at = i + j * (uint64_t)p->d.ld, aux_at = i + j * (uint64_t)e.aux_ld;
    if (p->twice)
        sum = rounded(p->d.type, sum);
    if (p->beta != 0.0f)
        sum += p->beta * get(p->C, p->d.type, at);
    if (e.epilogue == CUBLASLT_EPILOGUE_BIAS || e.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
        sum += get(e.bias, e.bias_type, i);
    if (e.epilogue == CUBLASLT_EPILOGUE_DGELU)
        sum *= gelu_slope(get(e.aux, p->d.type, aux_at));
    if (e.epilogue == CUBLASLT_EPILOGUE_GELU_AUX || e.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        put(e.aux, p->d.type, aux_at, sum);
        sum = gelu(sum);
    }
    put(p->D, p->d.type, at, sum);
}

bool
run(void *arg)
{
    product *p = (product *)arg;
    const emulated_desc &e = p->desc;
    uint64_t K = e.op_a == CUBLAS_OP_N ? p->a.cols : p->a.rows, rows = p->d.rows, cols = p->d.cols;
    if (p->workspace != NULL)
        memset(p->workspace, 0xff, WORKSPACE);
    if (e.factors == CUBLASLT_POINTER_MODE_DEVICE)
        p->alpha = *p->alpha_at, p->beta = *p->beta_at;
    float alpha = p->alpha * (is_fp8(p->a.type) ? *e.a_scale * *e.b_scale : 1.0f), sums[COLS][ROWS];
    bool a_rows = e.op_a == CUBLAS_OP_N, b_columns = e.op_b == CUBLAS_OP_N;
    uint64_t a_ld = (uint64_t)p->a.ld, b_ld = (uint64_t)p->b.ld;
    std::vector<float> a = panels(p->A, p->a.type, rows, K, a_rows ? 1 : a_ld, a_rows ? a_ld : 1, ROWS);
    std::vector<float> b = panels(p->B, p->b.type, cols, K, b_columns ? b_ld : 1, b_columns ? 1 : b_ld, COLS);
    for (uint64_t j = 0; j < cols; j += COLS) {
        for (uint64_t i = 0; i < rows; i += ROWS) {
            sum_up(sums[0], &a[i * K], &b[j * K], K, p->backwards);
            for (uint64_t c = 0; c < COLS && j + c < cols; c++)
                for (uint64_t r = 0; r < ROWS && i + r < rows; r++)
                    finish(p, i + r, j + c, sums[c][r] * alpha);
        }
    }
    delete p;
    return true;
}

bool
with_gelu(const emulated_desc *desc)
{
    return desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           desc->epilogue == CUBLASLT_EPILOGUE_DGELU;
}

uint64_t
alignment_of(const void *p)
{
    uint64_t bits = (uint64_t)(uintptr_t)p | 256;
    return bits & (~bits + 1);
}

/* What an algorithm was chosen for. */
struct choice {
    uint64_t mark, shape[4], align, pointers;
    uint32_t epilogue, parts;
};

choice
choose(const emulated_desc *desc, const emulated_layout *a, const emulated_layout *b, const emulated_layout *d)
{
    choice c = {};
    c.mark = 0x6c74;
    c.shape[0] = d->rows;
    c.shape[1] = d->cols;
    c.shape[2] = a->rows * 31 + a->cols + (uint64_t)a->ld * 7 + (uint64_t)desc->op_a;
    c.shape[3] = b->rows * 31 + b->cols + (uint64_t)b->ld * 7 + (uint64_t)desc->op_b + (uint64_t)d->ld * 13;
    c.epilogue = (uint32_t)desc->epilogue;
    return c;
}

bool
types_fit(const emulated_layout *a, const emulated_layout *b, const emulated_layout *d)
{
    if (is_fp8(a->type))
        return is_fp8(b->type) && (a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3) &&
               (d->type == CUDA_R_16BF || d->type == CUDA_R_32F);
    return a->type == b->type && (d->type == a->type || d->type == CUDA_R_32F);
}

/* The sum's dimension is contiguous in both factors; sizes and addresses are multiples of 16; a bias is bf16. */
bool
fp8_fits(const emulated_desc *desc, const emulated_layout *a, const emulated_layout *b, const emulated_layout *d,
         const emulated_preference *preference)
{
    bool bias = desc->epilogue == CUBLASLT_EPILOGUE_BIAS;
    return desc->op_a == CUBLAS_OP_T && desc->op_b == CUBLAS_OP_N && a->rows % 16 == 0 && a->cols % 16 == 0 &&
           b->cols % 16 == 0 && a->ld % 16 == 0 && b->ld % 16 == 0 && d->ld % 8 == 0 && preference->align_a % 16 == 0 &&
           desc->a_scale != NULL && desc->b_scale != NULL &&
           (desc->epilogue == CUBLASLT_EPILOGUE_DEFAULT || (bias && desc->bias_type == CUDA_R_16BF));
}

template <class T>
cublasStatus_t
create(T **out)
{
    *out = (T *)calloc(1, sizeof **out);
    return *out != NULL ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

template <class T>
cublasStatus_t
copy_in(T *to, const void *value, size_t bytes)
{
    if (bytes != sizeof *to)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
} // namespace

EXPORT cublasStatus_t
cublasLtCreate(cublasLtHandle_t *handle)
{
    return create(handle);
}

EXPORT cublasStatus_t
cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t
cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute_type, cudaDataType_t scale_type)
{
    if (compute_type != CUBLAS_COMPUTE_32F || scale_type != CUDA_R_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (create(desc) != CUBLAS_STATUS_SUCCESS)
        return CUBLAS_STATUS_ALLOC_FAILED;
    (*desc)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t
cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t
cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t what, const void *value,
                               size_t bytes)
{
    switch (what) {
    case CUBLASLT_MATMUL_DESC_POINTER_MODE: return copy_in(&desc->factors, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSA: return copy_in(&desc->op_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return copy_in(&desc->op_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return copy_in(&desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return copy_in(&desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return copy_in(&desc->bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return copy_in(&desc->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return copy_in(&desc->a_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return copy_in(&desc->b_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return copy_in(&desc->aux_ld, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

EXPORT cublasStatus_t
cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows, uint64_t cols,
                           int64_t ld)
{
    if (ld < (int64_t)rows)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (create(layout) != CUBLAS_STATUS_SUCCESS)
        return CUBLAS_STATUS_ALLOC_FAILED;
    **layout = emulated_layout{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t
cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t
cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    return create(preference);
}

EXPORT cublasStatus_t
cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t
cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t what,
                                     const void *value, size_t bytes)
{
    switch (what) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return copy_in(&preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return copy_in(&preference->schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return copy_in(&preference->align_a, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return copy_in(&preference->align_b, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return copy_in(&preference->align_c, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return copy_in(&preference->align_d, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

EXPORT cublasStatus_t
cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                               cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                               cublasLtMatmulPreference_t preference, int wanted,
                               cublasLtMatmulHeuristicResult_t *results, int *count)
{
    const char *mode = getenv("SPW_EMULATE_BLAS");
    uint64_t k_a = desc->op_a == CUBLAS_OP_N ? a->cols : a->rows, m = desc->op_a == CUBLAS_OP_N ? a->rows : a->cols;
    uint64_t k_b = desc->op_b == CUBLAS_OP_N ? b->rows : b->cols, n = desc->op_b == CUBLAS_OP_N ? b->cols : b->rows;
    choice found = choose(desc, a, b, d);
    *count = 0;
    if (wanted < 1 || k_a != k_b || m != d->rows || n != d->cols || c->rows != d->rows || c->cols != d->cols ||
        c->ld != d->ld || c->type != d->type || !types_fit(a, b, d))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (is_fp8(a->type) && !fp8_fits(desc, a, b, d, preference))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if ((preference->schemes & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0)
        stop("sums whose order may change");
    if ((mode != NULL && (strcmp(mode, "none") == 0 || (strcmp(mode, "plain") == 0 && with_gelu(desc)))) ||
        preference->workspace < WORKSPACE)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (with_gelu(desc) && d->type == CUDA_R_32F)
        stop("a GELU in fp32, which the library need not compute as exactly");
    if (with_gelu(desc) && (desc->aux_ld % 8 != 0 || desc->aux_ld < (int64_t)d->rows))
        stop("a stride of a GELU's input that is no multiple of 8");
    if (preference->align_a != preference->align_b || preference->align_a != preference->align_c ||
        preference->align_a != preference->align_d)
        stop("alignments that differ");
    found.parts = preference->schemes != CUBLASLT_REDUCTION_SCHEME_NONE;
    found.align = preference->align_a;
    found.pointers = with_gelu(desc) ? alignment_of(desc->aux) : 256;
    if (desc->bias != NULL && alignment_of(desc->bias) < found.pointers)
        found.pointers = alignment_of(desc->bias);
    memset(results, 0, sizeof *results);
    static_assert(sizeof found <= sizeof results->algo, "it fits");
    memcpy(&results->algo, &found, sizeof found);
    results->workspaceSize = WORKSPACE;
    results->state = CUBLAS_STATUS_SUCCESS;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t
cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha, const void *A, cublasLtMatrixLayout_t a,
               const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C, cublasLtMatrixLayout_t c,
               void *D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo, void *workspace,
               size_t workspace_bytes, cudaStream_t stream)
{
    const char *mode = getenv("SPW_EMULATE_BLAS");
    choice was, is = choose(desc, a, b, d);
    uint64_t align = alignment_of((void *)((uintptr_t)A | (uintptr_t)B | (uintptr_t)C | (uintptr_t)D));
    memcpy(&was, algo, sizeof was);
    is.parts = was.parts;
    is.align = was.align;
    is.pointers = was.pointers;
    if (memcmp(&is, &was, sizeof is) != 0 || c != d)
        stop("an algorithm for another product");
    if (align < was.align || (desc->bias != NULL && alignment_of(desc->bias) < was.pointers) ||
        (with_gelu(desc) && alignment_of(desc->aux) < was.pointers))
        stop("less alignment than was promised");
    if (workspace == NULL || workspace_bytes < WORKSPACE)
        stop("no workspace");
    if (mode != NULL && strcmp(mode, "fails") == 0)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    const float *factors[2] = {(const float *)alpha, (const float *)beta};
    bool on_host = desc->factors == CUBLASLT_POINTER_MODE_HOST, adds = !on_host || *factors[1] != 0.0f;
    bool biased = desc->epilogue == CUBLASLT_EPILOGUE_BIAS || desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    bool wide = align >= 16 && (a->ld | b->ld | d->ld) % 8 == 0;
    bool twice = d->type != CUDA_R_32F && (((adds || biased) && (was.parts || !wide)) || (adds && C == D && on_host));
    spw_emulate_submit(stream, run,
                       new product{*desc, *a, *b, *d, (const char *)A, (const char *)B, (const char *)C, (char *)D,
                                   (char *)workspace, on_host ? *factors[0] : 0.0f, on_host ? *factors[1] : 0.0f,
                                   factors[0], factors[1], was.align < 16, twice});
    return CUBLAS_STATUS_SUCCESS;
}
