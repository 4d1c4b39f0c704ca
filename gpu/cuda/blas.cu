/*
 * cuBLASLt, opened at run time: as a library of 540 MB it is neither linked statically nor asked of machines that have no GPU.
 * An algorithm is chosen once per shape and kept, from schemes that add up partial results in a fixed order, so that results are
 * equal from run to run. Pointers count as aligned to 16 bytes at most: then where an array lies does not change the choice,
 * nor a bit. fp32 products are fp32: tf32 is never asked for.
 *
 * What is added to a product of 16 bits shall find it in fp32. Seen on a Hopper: sums of parts (split K) are rounded before a bias is added,
 * older kernels, for rows of any alignment, round before onto is, and in place, with factors known on the host, the newer ones let
 * memory add what they rounded (TMA's reduction). So such a product has no parts, aligned rows, and factors in device memory.
 *
 * The library stays in the process once it is there: it has threads and exit handlers of its own, and it is large.
 *
 * SPW_CUDA_BLAS, for measurements: 0 leaves it out, "plain" its GELUs, and with "only" a product that it has no way for is an error instead of
 * slow; "plain,only" is both.
 */
#include "cuda_internal.h"
#include <stdio.h>
#include <stdlib.h>

#include <cublasLt.h>
#include <dlfcn.h>

#define STRINGS_OF(x) #x
#define STRING_OF(x)  STRINGS_OF(x)
#define LIBRARY       "libcublasLt.so." STRING_OF(CUBLAS_VER_MAJOR)

enum { PLANS = 1024, LIBRARY_MODE = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE };

/* What a plan is found by. */
typedef struct plan_key {
    uint64_t M, N, K, a_stride, c_stride;
    uint32_t trans_a, trans_b, add, f32_out, bias, after, alignment, fp8; /* fp8: 1 + a's format + 2 b's */
    uint32_t once, in_place; /* something is added to it before it is rounded to 16 bits; what lies there */
} plan_key;

typedef struct plan {
    plan_key key;
    bool used, possible;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    cublasLtEpilogue_t epilogue;
    size_t workspace_bytes;
} plan;

#define FUNCTIONS(X)                                                                                                   \
    X(cublasLtCreate)                                                                                                  \
    X(cublasLtDestroy)                                                                                                 \
    X(cublasLtMatmul)                                                                                                  \
    X(cublasLtMatmulDescCreate)                                                                                        \
    X(cublasLtMatmulDescDestroy)                                                                                       \
    X(cublasLtMatmulDescSetAttribute)                                                                                  \
    X(cublasLtMatrixLayoutCreate)                                                                                      \
    X(cublasLtMatrixLayoutDestroy)                                                                                     \
    X(cublasLtMatmulPreferenceCreate)                                                                                  \
    X(cublasLtMatmulPreferenceDestroy)                                                                                 \
    X(cublasLtMatmulPreferenceSetAttribute)                                                                            \
    X(cublasLtMatmulAlgoGetHeuristic)

struct cuda_blas {
    /* Fixed after open. */
    void *library;
    bool plain, only;
    cublasLtHandle_t handle;
    float *one; /* on the device */
#define X(name) __typeof__(&name) name##_;
    FUNCTIONS(X)
#undef X
    /* Under lock: a plan's description is changed by the call that uses it. */
    pthread_mutex_t lock;
    plan plans[PLANS];
    uint32_t plan_count;
};

static void *
open_library(void)
{
    static const char *const folders[] = {"", "/usr/local/cuda/lib64/", "/usr/local/cuda/targets/x86_64-linux/lib/"};
    const char *home = getenv("CUDA_HOME");
    char path[1024];
    void *library = NULL;
    Dl_info self;
    if (dladdr((void *)spw__cuda_blas_open, &self) != 0 && self.dli_fname != NULL) { /* beside the plugin */
        const char *slash = strrchr(self.dli_fname, '/');
        int folder = slash != NULL ? (int)(slash - self.dli_fname) + 1 : 0;
        if ((size_t)snprintf(path, sizeof path, "%.*s%s", folder, self.dli_fname, LIBRARY) < sizeof path && folder > 0)
            library = dlopen(path, LIBRARY_MODE);
    }
    if (library == NULL && home != NULL) {
        snprintf(path, sizeof path, "%s/lib64/%s", home, LIBRARY);
        library = dlopen(path, LIBRARY_MODE);
    }
    for (size_t i = 0; library == NULL && i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(path, sizeof path, "%s%s", folders[i], LIBRARY);
        library = dlopen(path, LIBRARY_MODE);
    }
    return library;
}

struct cuda_blas *
spw__cuda_blas_open(cuda_gpu *gpu, char *why, size_t why_bytes)
{
    const char *wanted = getenv("SPW_CUDA_BLAS");
    const float one = 1.0f;
    struct cuda_blas *b;
    const char *missing = NULL;
    (void)gpu;
    if (wanted != NULL && strcmp(wanted, "0") == 0) {
        snprintf(why, why_bytes, "own products (SPW_CUDA_BLAS=0)");
        return NULL;
    }
    b = (struct cuda_blas *)spw_mem_zalloc(sizeof *b);
    if (b == NULL) {
        snprintf(why, why_bytes, "own products, slow (no memory for cuBLASLt)");
        return NULL;
    }
    pthread_mutex_init(&b->lock, NULL);
    b->plain = wanted != NULL && strstr(wanted, "plain") != NULL;
    b->only = wanted != NULL && strstr(wanted, "only") != NULL;
    if (spw__cuda_refused(cudaMalloc((void **)&b->one, sizeof one)) != cudaSuccess ||
        spw__cuda_refused(cudaMemcpy(b->one, &one, sizeof one, cudaMemcpyDefault)) != cudaSuccess) {
        snprintf(why, why_bytes, "own products, slow (no device memory for cuBLASLt)");
        spw__cuda_blas_close(b);
        return NULL;
    }
    b->library = open_library();
    if (b->library == NULL) {
        snprintf(why, why_bytes, "own products, slow (no " LIBRARY ": CUDA_HOME or LD_LIBRARY_PATH says where)");
        spw__cuda_blas_close(b);
        return NULL;
    }
#define X(name)                                                                                                        \
    if ((*(void **)&b->name##_ = dlsym(b->library, #name)) == NULL)                                                    \
        missing = #name;
    FUNCTIONS(X)
#undef X
    if (missing != NULL || b->cublasLtCreate_(&b->handle) != CUBLAS_STATUS_SUCCESS) {
        snprintf(why, why_bytes, "own products, slow (" LIBRARY " does not start%s%s)", missing != NULL ? ": no " : "",
                 missing != NULL ? missing : "");
        b->handle = NULL;
        spw__cuda_blas_close(b);
        return NULL;
    }
    return b;
}

static void
forget(struct cuda_blas *b, plan *p)
{
    if (p->desc != NULL)
        b->cublasLtMatmulDescDestroy_(p->desc);
    if (p->a != NULL)
        b->cublasLtMatrixLayoutDestroy_(p->a);
    if (p->b != NULL)
        b->cublasLtMatrixLayoutDestroy_(p->b);
    if (p->c != NULL)
        b->cublasLtMatrixLayoutDestroy_(p->c);
    memset(p, 0, sizeof *p);
}

void
spw__cuda_blas_close(struct cuda_blas *b)
{
    if (b == NULL)
        return;
    for (int i = 0; i < PLANS; i++)
        forget(b, &b->plans[i]);
    if (b->handle != NULL)
        b->cublasLtDestroy_(b->handle);
    if (b->library != NULL)
        (void)dlclose(b->library);
    (void)cudaFree(b->one);
    pthread_mutex_destroy(&b->lock);
    spw_mem_free(b);
}

/* Of our A (0) or B (1). */
static cudaDataType_t
type_of(uint32_t fp8, cudaDataType_t plain, uint32_t which)
{
    return fp8 == 0 ? plain : (fp8 - 1) >> which & 1 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3;
}

/*
 * cuBLASLt counts columns first: our C(M,N) is its (N,M), with B as its first factor. Leaves p->possible false where the
 * library refuses.
 */
static void
make_plan(struct cuda_blas *b, plan *p, spw_dtype compute)
{
    const plan_key *k = &p->key;
    cudaDataType_t in = compute == SPW_F32 ? CUDA_R_32F : compute == SPW_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    cudaDataType_t out = k->f32_out ? CUDA_R_32F : in;
    cudaDataType_t of_a = type_of(k->fp8, in, 0), of_b = type_of(k->fp8, in, 1);
    cublasOperation_t op_a = k->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = k->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found;
    uint32_t schemes = k->once ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint32_t alignment = k->alignment;
    cublasLtPointerMode_t factors = CUBLASLT_POINTER_MODE_DEVICE;
    cublasLtEpilogue_t epilogue = k->after == AFTER_GELU_BACKWARD     ? CUBLASLT_EPILOGUE_DGELU
                                  : k->after == AFTER_GELU && k->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                  : k->after == AFTER_GELU            ? CUBLASLT_EPILOGUE_GELU_AUX
                                  : k->bias                           ? CUBLASLT_EPILOGUE_BIAS
                                                                      : CUBLASLT_EPILOGUE_DEFAULT;
    int64_t gelu_stride = (int64_t)k->N;
    const void *like = (const void *)(uintptr_t)k->alignment; /* looked at for its alignment only */
    size_t workspace = BLAS_BYTES;
    int count = 0;
    bool ok = b->cublasLtMatmulDescCreate_(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
#define SET(what, value)                                                                                               \
    ok = ok && b->cublasLtMatmulDescSetAttribute_(p->desc, what, &value, sizeof value) == CUBLAS_STATUS_SUCCESS
    SET(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    SET(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    SET(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    p->epilogue = epilogue;
    if (k->in_place)
        SET(CUBLASLT_MATMUL_DESC_POINTER_MODE, factors);
    if (k->bias) {
        SET(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, in);
        SET(CUBLASLT_MATMUL_DESC_BIAS_POINTER, like);
    }
    if (k->after != AFTER_NOTHING) {
        SET(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, gelu_stride);
        SET(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, like);
    }
    if (k->fp8 !=
        0) { /* sums stay in fp32: FAST_ACCUM, which keeps fewer bits of them, is off unless it is asked for */
        SET(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, like);
        SET(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, like);
    }
#undef SET
    ok = ok && b->cublasLtMatrixLayoutCreate_(&p->a, of_b, k->trans_b ? k->K : k->N, k->trans_b ? k->N : k->K,
                                              (int64_t)(k->trans_b ? k->K : k->N)) == CUBLAS_STATUS_SUCCESS;
    ok = ok && b->cublasLtMatrixLayoutCreate_(&p->b, of_a, k->trans_a ? k->M : k->K, k->trans_a ? k->K : k->M,
                                              (int64_t)k->a_stride) == CUBLAS_STATUS_SUCCESS;
    ok = ok && b->cublasLtMatrixLayoutCreate_(&p->c, out, k->N, k->M, (int64_t)k->c_stride) == CUBLAS_STATUS_SUCCESS;
    ok = ok && b->cublasLtMatmulPreferenceCreate_(&preference) == CUBLAS_STATUS_SUCCESS;
#define PREFER(what, value)                                                                                            \
    ok = ok && b->cublasLtMatmulPreferenceSetAttribute_(preference, what, &value, sizeof value) == CUBLAS_STATUS_SUCCESS
    PREFER(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    PREFER(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment);
#undef PREFER
    ok = ok && b->cublasLtMatmulAlgoGetHeuristic_(b->handle, p->desc, p->a, p->b, p->c, p->c, preference, 1, &found,
                                                  &count) == CUBLAS_STATUS_SUCCESS;
    ok = ok && count > 0 && found.state == CUBLAS_STATUS_SUCCESS;
    if (ok) {
        p->algo = found.algo;
        p->workspace_bytes = found.workspaceSize;
    }
    if (preference != NULL)
        b->cublasLtMatmulPreferenceDestroy_(preference);
    p->possible = ok;
}

/* Under lock. */
static plan *
find_plan(struct cuda_blas *b, const plan_key *key, spw_dtype compute)
{
    uint64_t h = (key->M * 0x9E3779B97F4A7C15ull) ^ (key->N * 0xC2B2AE3D27D4EB4Full) ^ (key->K * 0x165667B19E3779F9ull);
    uint32_t at =
        (uint32_t)((h ^ h >> 29) + key->trans_a * 5 + key->trans_b * 11 + key->add * 17 + key->bias * 23 +
                   key->after * 31 + key->fp8 * 37 + key->f32_out * 41 + key->once * 43 + key->in_place * 47) %
        PLANS;
    if (b->plan_count > PLANS * 3 / 4) { /* too many shapes: choose again, the same */
        for (int i = 0; i < PLANS; i++)
            forget(b, &b->plans[i]);
        b->plan_count = 0;
    }
    for (; b->plans[at].used; at = (at + 1) % PLANS)
        if (memcmp(&b->plans[at].key, key, sizeof *key) == 0)
            return &b->plans[at];
    b->plans[at].key = *key;
    b->plans[at].used = true;
    b->plan_count++;
    make_plan(b, &b->plans[at], compute);
    return &b->plans[at];
}

/* What the library said and of which product, for the device's first error: nobody sees it happen again. Success: it had no algorithm. */
static void
refused(cuda_queue *q, const cuda_product *p, const plan *way, cublasStatus_t st)
{
    const char *type = spw_dtype_name(q->gpu->info.compute_dtype), *in = p->a_scale != NULL ? "fp8" : type;
    char what[200], status[64] = "cuBLASLt: no algorithm";
    if (st != CUBLAS_STATUS_SUCCESS)
        snprintf(status, sizeof status, "cublasLtMatmul: status %d", (int)st);
    snprintf(what, sizeof what, "%s for M %llu, N %llu, K %llu, %s to %s, epilogue %d", status,
             (unsigned long long)p->M, (unsigned long long)p->N, (unsigned long long)p->K, in,
             p->f32_out ? "fp32" : type, (int)way->epilogue);
    spw__cuda_fail(q->gpu, SPW_EPOISONED, what);
}

/* Each row of each matrix begins at a multiple of 16 bytes. */
static bool
in_whole_pieces(const plan_key *k)
{
    return k->alignment >= 16 && (k->N | k->a_stride | k->c_stride | (k->trans_b ? k->K : k->N)) % 8 == 0;
}

bool
spw__cuda_blas_gemm(cuda_queue *q, const cuda_product *p)
{
    struct cuda_blas *b = q->gpu->blas;
    uintptr_t low = ((uintptr_t)p->A | (uintptr_t)p->B | (uintptr_t)p->C | (uintptr_t)p->onto | (uintptr_t)p->bias |
                     (uintptr_t)p->gelu_in | 16) &
                    31;
    const float beta = p->onto != NULL ? p->by : 0.0f;
    const void *onto = p->onto != NULL ? p->onto : p->C;
    cublasStatus_t st = CUBLAS_STATUS_SUCCESS;
    plan_key key;
    plan *way;
    bool done = false;
    if (p->M > INT32_MAX || p->N > INT32_MAX || p->K > INT32_MAX || p->K == 0 || q->blas_workspace == NULL)
        return false;
    memset(&key, 0, sizeof key);
    key.once = !p->f32_out && !spw__cuda_is_f32(q) && (p->onto != NULL || p->bias != NULL) && !p->rounds_twice;
    key.in_place = key.once && p->onto == p->C;
    SPW_ASSERT(!key.in_place || (p->scale == 1.0f && p->by == 1.0f));
    key.M = p->M;
    key.N = p->N;
    key.K = p->K;
    key.a_stride = p->a_stride > 0 ? p->a_stride : p->trans_a ? p->M : p->K;
    key.c_stride = p->c_stride > 0 ? p->c_stride : p->N;
    key.trans_a = p->trans_a;
    key.trans_b = p->trans_b;
    key.add = p->onto != NULL;
    key.f32_out = p->f32_out;
    key.bias = p->bias != NULL;
    key.after = p->after;
    key.fp8 = p->a_scale == NULL ? 0 : 1 + (uint32_t)p->a_format + 2 * (uint32_t)p->b_format;
    key.alignment = (uint32_t)(low & (~low + 1));
    /*
     * Rows of gelu_in must be multiples of 8, and nobody says that the library looks: it takes other strides without a word. And where a row of
     * any matrix does not begin at a multiple of 16 bytes it rounds the product to 16 bits before a bias (seen with a GELU behind it) or another
     * array is added (cuBLASLt 13.0, sm_90).
     */
    if (p->after != AFTER_NOTHING && b->plain)
        return false;
    if ((p->after != AFTER_NOTHING || key.once) && !in_whole_pieces(&key))
        return false;
    pthread_mutex_lock(&b->lock);
    way = find_plan(b, &key, q->gpu->info.compute_dtype);
    if (way->possible) {
        if (p->bias != NULL)
            st = b->cublasLtMatmulDescSetAttribute_(way->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias,
                                                    sizeof p->bias);
        if (p->after != AFTER_NOTHING && st == CUBLAS_STATUS_SUCCESS)
            st = b->cublasLtMatmulDescSetAttribute_(way->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->gelu_in,
                                                    sizeof p->gelu_in);
        if (p->a_scale != NULL && st == CUBLAS_STATUS_SUCCESS)
            st = b->cublasLtMatmulDescSetAttribute_(way->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &p->b_scale,
                                                    sizeof p->b_scale);
        if (p->a_scale != NULL && st == CUBLAS_STATUS_SUCCESS)
            st = b->cublasLtMatmulDescSetAttribute_(way->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &p->a_scale,
                                                    sizeof p->a_scale);
        if (st == CUBLAS_STATUS_SUCCESS)
            st = b->cublasLtMatmul_(b->handle, way->desc, key.in_place ? b->one : &p->scale, p->B, way->a, p->A, way->b,
                                    key.in_place ? b->one : &beta, onto, way->c, p->C, way->c, &way->algo,
                                    q->blas_workspace, way->workspace_bytes, q->stream);
        if (st == CUBLAS_STATUS_NOT_SUPPORTED || st == CUBLAS_STATUS_INVALID_VALUE)
            way->possible = false; /* refused before anything started: ours from now on */
        else
            done = true;
        if (done && st != CUBLAS_STATUS_SUCCESS)
            refused(q, p, way, st);
    }
    if (!done && b->only && p->after == AFTER_NOTHING) {
        refused(q, p, way, st);
        done = true;
    }
    pthread_mutex_unlock(&b->lock);
    return done;
}
