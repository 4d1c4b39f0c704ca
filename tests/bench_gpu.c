/*
 * bench_gpu - products, attention and copies of a device at the shapes of real models. usage: bench_gpu [DEVICE] [--smoke]
 *
 * Each row is the median of rounds of several calls after a warm-up; operations are counted as 2 M N K for a product, 4 T^2 / 2
 * Hq D for causal attention and 2.5 times that for its backward (what the formulas need, not what the kernels repeat).
 * Copies are verified; rates are GB = 10^9 bytes.
 */
#include "spw_gpu.h"
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 9 };

typedef struct bench {
    spw_gpu *gpu;
    spw_gpu_queue *compute, *in, *out;
    uint32_t elem_bytes;
    bool smoke;
    int calls;
    uint64_t wrong;
} bench;

static void
stop(const char *what, const spw_error *err)
{
    fprintf(stderr, "bench_gpu: %s: %s\n", what, err->message);
    exit(1);
}

static void *
take(bench *b, uint64_t bytes)
{
    spw_error err = {0};
    void *p = NULL;
    if (spw_gpu_alloc(b->gpu, &p, bytes, &err) != SPW_OK)
        stop("device memory", &err);
    spw_gpu_zero(b->compute, p, bytes);
    return p;
}

/* Random numbers of small size: zeros would draw less power than work does. */
static void *
take_filled(bench *b, uint64_t elems)
{
    enum { N = 1 << 16 };
    static float host[N];
    spw_dtype type = spw_gpu_get_info(b->gpu)->compute_dtype;
    char *p = take(b, elems * 4);
    for (uint64_t i = 0; i < N; i++) {
        uint32_t r[4];
        spw_philox(3, 0, i, r);
        host[i] = (2.0f * spw_uniform_f32(r[0]) - 1.0f) / 16;
    }
    for (uint64_t first = 0; first < elems; first += N)
        spw_gpu_copy_h2d(b->compute, p + first * b->elem_bytes, type, host, SPW_F32,
                         elems - first < N ? elems - first : N);
    spw_gpu_queue_sync(b->compute);
    return p;
}

static int
by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef void (*work_fn)(bench *b, void *ctx);

/* Median seconds of one call. */
static double
measure(bench *b, work_fn fn, void *ctx)
{
    double s[ROUNDS];
    int rounds = b->smoke ? 1 : ROUNDS, calls = b->smoke ? 1 : b->calls;
    fn(b, ctx);
    spw_gpu_queue_sync(b->compute);
    for (int r = 0; r < rounds; r++) {
        uint64_t t0 = spw_now_ns();
        for (int c = 0; c < calls; c++)
            fn(b, ctx);
        spw_gpu_queue_sync(b->compute);
        spw_gpu_queue_sync(b->in);
        spw_gpu_queue_sync(b->out);
        s[r] = (double)(spw_now_ns() - t0) / 1e9 / calls;
    }
    qsort(s, (size_t)rounds, sizeof *s, by_size);
    return s[rounds / 2];
}

/* ---------------------------------------------------------------- products */

typedef struct product {
    const char *name;
    uint64_t M, N, K;
    void *x, *w, *y, *dx;
    float *dw;
} product;

static void
forward_product(bench *b, void *ctx)
{
    product *p = ctx;
    spw_gpu_linear(b->compute, p->y, p->x, p->w, NULL, p->M, p->N, p->K, 0);
}

static void
backward_product(bench *b, void *ctx)
{
    product *p = ctx;
    spw_gpu_linear_backward(b->compute, p->dx, p->dw, NULL, p->y, p->x, p->w, p->M, p->N, p->K, 0);
}

static void
bench_products(bench *b)
{
    static product shapes[] = {
        {.name = "gpt2-124M qkv", .M = 16384, .N = 2304, .K = 768},
        {.name = "gpt2-124M mlp up", .M = 16384, .N = 3072, .K = 768},
        {.name = "gpt2-124M mlp down", .M = 16384, .N = 768, .K = 3072},
        {.name = "gpt2-124M head", .M = 4096, .N = 50257, .K = 768},
        {.name = "gpt2-774M mlp up", .M = 8192, .N = 5120, .K = 1280},
        {.name = "gpt2-1.5B qkv", .M = 8192, .N = 4800, .K = 1600},
        {.name = "gpt2-1.5B mlp up", .M = 8192, .N = 6400, .K = 1600},
        {.name = "gpt2-1.5B mlp down", .M = 8192, .N = 1600, .K = 6400},
        {.name = "llama-1B qkv", .M = 8192, .N = 3072, .K = 2048},
        {.name = "llama-1B gate", .M = 8192, .N = 8192, .K = 2048},
        {.name = "llama-3B gate", .M = 8192, .N = 8192, .K = 3072},
        {.name = "llama-8B gate", .M = 8192, .N = 14336, .K = 4096},
    };
    printf("# products                  M      N      K  forward(us) TFLOP/s  backward(us) TFLOP/s\n");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        product *p = &shapes[i];
        double flops, f, d;
        if (b->smoke)
            p->M = 33, p->N = p->N / 64 + 1, p->K /= 64;
        p->x = take_filled(b, p->M * p->K);
        p->w = take_filled(b, p->N * p->K);
        p->y = take_filled(b, p->M * p->N);
        p->dx = take(b, p->M * p->K * 4);
        p->dw = take(b, p->N * p->K * 4);
        flops = 2.0 * (double)p->M * (double)p->N * (double)p->K;
        f = measure(b, forward_product, p);
        d = measure(b, backward_product, p);
        printf("  %-20s %7llu %6llu %6llu %12.1f %7.1f %13.1f %7.1f\n", p->name, (unsigned long long)p->M,
               (unsigned long long)p->N, (unsigned long long)p->K, f * 1e6, flops / f / 1e12, d * 1e6,
               2 * flops / d / 1e12);
        spw_gpu_free(b->gpu, p->x);
        spw_gpu_free(b->gpu, p->w);
        spw_gpu_free(b->gpu, p->y);
        spw_gpu_free(b->gpu, p->dx);
        spw_gpu_free(b->gpu, p->dw);
    }
}

/* ---------------------------------------------------------------- attention */

typedef struct heads {
    const char *name;
    spw_attention_shape s;
    char *qkv, *out, *dout, *dqkv;
    float *lse;
} heads;

static void
forward_attention(bench *b, void *ctx)
{
    heads *h = ctx;
    uint64_t k = h->s.Hq * h->s.D * b->elem_bytes, v = k + h->s.Hk * h->s.D * b->elem_bytes;
    spw_gpu_attention(b->compute, h->out, h->lse, h->qkv, h->qkv + k, h->qkv + v, &h->s);
}

static void
backward_attention(bench *b, void *ctx)
{
    heads *h = ctx;
    uint64_t k = h->s.Hq * h->s.D * b->elem_bytes, v = k + h->s.Hk * h->s.D * b->elem_bytes;
    spw_gpu_attention_backward(b->compute, h->dqkv, h->dqkv + k, h->dqkv + v, h->dout, h->out, h->lse, h->qkv,
                               h->qkv + k, h->qkv + v, &h->s);
}

static void
bench_attention(bench *b)
{
    static heads shapes[] = {
        {.name = "gpt2-124M", .s = {.B = 16, .T = 1024, .Hq = 12, .Hk = 12, .D = 64}},
        {.name = "gpt2-1.5B", .s = {.B = 8, .T = 1024, .Hq = 25, .Hk = 25, .D = 64}},
        {.name = "llama-1B", .s = {.B = 4, .T = 2048, .Hq = 32, .Hk = 8, .D = 64}},
        {.name = "llama-3B", .s = {.B = 4, .T = 2048, .Hq = 24, .Hk = 8, .D = 128}},
        {.name = "llama-8B 8k", .s = {.B = 1, .T = 8192, .Hq = 32, .Hk = 8, .D = 128}},
        {.name = "gemma 256", .s = {.B = 2, .T = 2048, .Hq = 8, .Hk = 4, .D = 256}},
    };
    printf("# attention, causal         B     T  Hq  Hk    D  forward(us) TFLOP/s  backward(us) TFLOP/s\n");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        heads *h = &shapes[i];
        spw_attention_shape *s = &h->s;
        uint64_t rows, width;
        double flops, f, d;
        if (b->smoke)
            s->B = 1, s->T = 40;
        rows = s->B * s->T;
        width = (s->Hq + 2 * s->Hk) * s->D;
        s->q_stride = s->kv_stride = width;
        s->scale = 0.125f;
        h->qkv = take_filled(b, rows * width);
        h->dqkv = take(b, rows * width * 4);
        h->out = take(b, rows * s->Hq * s->D * 4);
        h->dout = take_filled(b, rows * s->Hq * s->D);
        h->lse = take(b, rows * s->Hq * 4);
        flops = 2.0 * (double)rows * (double)s->T * (double)(s->Hq * s->D);
        f = measure(b, forward_attention, h);
        d = measure(b, backward_attention, h);
        printf("  %-20s %7llu %5llu %3llu %3llu %4llu %12.1f %7.1f %13.1f %7.1f\n", h->name, (unsigned long long)s->B,
               (unsigned long long)s->T, (unsigned long long)s->Hq, (unsigned long long)s->Hk, (unsigned long long)s->D,
               f * 1e6, flops / f / 1e12, d * 1e6, 2.5 * flops / d / 1e12);
        spw_gpu_free(b->gpu, h->qkv);
        spw_gpu_free(b->gpu, h->dqkv);
        spw_gpu_free(b->gpu, h->out);
        spw_gpu_free(b->gpu, h->dout);
        spw_gpu_free(b->gpu, h->lse);
    }
}

/* ---------------------------------------------------------------- copies */

typedef struct copies {
    char *host[2], *device[2];
    uint64_t n;
    bool in, out, converting;
} copies;

static void
copy_both(bench *b, void *ctx)
{
    copies *c = ctx;
    if (c->in)
        spw_gpu_copy_h2d(b->in, c->device[0], SPW_BF16, c->host[0], SPW_BF16, c->n);
    if (c->out)
        spw_gpu_copy_d2h(b->out, c->host[1], SPW_BF16, c->device[1], c->converting ? SPW_F32 : SPW_BF16, c->n, NULL);
}

static void
bench_copies(bench *b)
{
    static const char *const kinds[] = {"h2d", "d2h", "both", "d2h fp32 to bf16"};
    spw_region host[2] = {{0}, {0}};
    uint64_t bytes = b->smoke ? 1 << 20 : 256 << 20;
    spw_error err = {0};
    copies c = {.n = bytes / 2};
    for (int i = 0; i < 2; i++) {
        if (spw_region_map(&host[i], bytes, 0, &err) != SPW_OK)
            stop("host memory", &err);
        c.host[i] = host[i].base;
        c.device[i] = take(b, bytes * 2);
    }
    for (uint64_t i = 0; i < bytes / 8; i++) /* finite in bf16 */
        ((uint64_t *)host[0].base)[i] = (i * 0x9E3779B97F4A7C15ull & 0x3fff3fff3fff3fffull) | 0x0080008000800080ull;
    printf("# copies of %llu MiB        pageable (GB/s)  pinned (GB/s)\n", (unsigned long long)bytes >> 20);
    for (int k = 0; k < 4; k++) {
        double s[2];
        c.in = k == 0 || k == 2;
        c.out = k != 0;
        c.converting = k == 3;
        for (int pinned = 0; pinned < 2; pinned++) {
            for (int i = 0; pinned && i < 2; i++)
                if (spw_gpu_pin_host(b->gpu, host[i].base, host[i].bytes, &err) != SPW_OK)
                    stop("pinning", &err);
            s[pinned] = measure(b, copy_both, &c);
            for (int i = 0; pinned && i < 2; i++)
                spw_gpu_unpin_host(b->gpu, host[i].base);
        }
        printf("  %-20s %20.2f %14.2f\n", kinds[k], (double)bytes * (k == 2 ? 2 : 1) / s[0] / 1e9,
               (double)bytes * (k == 2 ? 2 : 1) / s[1] / 1e9);
    }
    spw_gpu_copy_h2d(b->in, c.device[0], SPW_BF16, c.host[0], SPW_BF16, c.n);
    spw_gpu_queue_sync(b->in);
    spw_gpu_copy_d2h(b->out, c.host[1], SPW_BF16, c.device[0], SPW_BF16, c.n, NULL);
    spw_gpu_queue_sync(b->out);
    b->wrong += memcmp(c.host[0], c.host[1], bytes) != 0;
    for (int i = 0; i < 2; i++) {
        spw_gpu_free(b->gpu, c.device[i]);
        spw_region_unmap(&host[i]);
    }
}

int
main(int argc, char **argv)
{
    bench b = {.calls = 10};
    const char *device = "cuda";
    spw_error err = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--smoke") == 0)
            b.smoke = true;
        else
            device = argv[i];
    }
    if (spw_gpu_open(&b.gpu, &(spw_gpu_options){.name = device}, &err) != SPW_OK) {
        printf("bench_gpu: skipped: %s\n", err.message);
        return 77;
    }
    if (spw_gpu_queue_create(&b.compute, b.gpu, SPW_QUEUE_COMPUTE, &err) != SPW_OK ||
        spw_gpu_queue_create(&b.in, b.gpu, SPW_QUEUE_H2D, &err) != SPW_OK ||
        spw_gpu_queue_create(&b.out, b.gpu, SPW_QUEUE_D2H, &err) != SPW_OK)
        stop("queues", &err);
    b.elem_bytes = spw_dtype_bytes(spw_gpu_get_info(b.gpu)->compute_dtype);
    printf("# bench gpu  schema 1  spillway %s  device %s%s\n", SPW_VERSION, spw_gpu_get_info(b.gpu)->description,
           b.smoke ? "  SMOKE: no numbers" : "");
    bench_copies(&b);
    bench_products(&b);
    bench_attention(&b);
    printf("# wrong: %llu\n", (unsigned long long)b.wrong);
    if (spw_gpu_check(b.gpu, &err) != SPW_OK)
        stop("device", &err);
    spw_gpu_queue_destroy(b.compute);
    spw_gpu_queue_destroy(b.in);
    spw_gpu_queue_destroy(b.out);
    spw_gpu_close(b.gpu);
    return b.wrong > 0;
}
