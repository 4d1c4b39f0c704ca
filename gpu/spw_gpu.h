/*
 * spw_gpu.h - devices: memory under a limit, queues (streams), events, copies, and the tensor operations.
 *
 * Two devices implement it: cpu (always there, the reference; computes in fp32) and cuda (a plugin opened at run time;
 * computes in bf16 or fp16 with fp32 sums, or in fp32). Work on a queue happens in order; work on different queues is ordered by events only. Operations cannot fail by themselves:
 * shapes are the caller's promise (SPW_ASSERT), a device error is sticky and shows at spw_gpu_check().
 *
 * Letters: M tokens (rows), K inputs, N outputs, C channels, V vocabulary, B sequences, T positions, Hq query heads,
 * Hk key/value heads, D head size. All arrays are dense and row-major unless a stride is named.
 * `act` is the device's compute type (cpu: fp32): activations and gathered weights. Parameter gradients are fp32 always.
 */
#ifndef SPW_GPU_H
#define SPW_GPU_H

#include "spw_base.h"
#include "spw_codes.h"
#include "spw_preference.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spw_gpu spw_gpu;
typedef struct spw_gpu_queue spw_gpu_queue;
typedef struct spw_gpu_event spw_gpu_event;
typedef void act; /* an array of compute_dtype; void so that one signature serves every device */

/* ---------------------------------------------------------------- the device */

/* A device that is not here, to plan for. */
typedef struct spw_gpu_spec {
    const char *name, *title;        /* "h100", "NVIDIA H100 SXM 80GB" */
    uint64_t memory_bytes;           /* all of it, as the driver shows it */
    uint32_t capability;             /* 90: 9.0 */
    double half_flops, single_flops; /* per second, of products in bf16 with fp32 sums, and in fp32 */
    double link;                     /* bytes/s of large copies to or from host memory */
    double peers;                    /* bytes/s that one receives from others like it on its host, all at once */
} spw_gpu_spec;
const spw_gpu_spec *spw_gpu_get_specs(uint32_t *count); /* those that are known */

typedef struct spw_gpu_options {
    const char *name;             /* "cpu", "cuda", "cuda:1"; NULL or "auto": cuda when it works, else cpu */
    uint64_t memory_bytes;        /* limit for spw_gpu_alloc; 0: no limit on cpu, the free memory on cuda */
    uint32_t thread_count;        /* cpu: compute threads; 0: all allowed CPUs */
    const spw_topology *topology; /* cpu, lent to open: its nodes hold device memory in turn; NULL: as it comes */
    bool pin_threads;             /* cpu: seat the compute threads in the topology (spw_seat_workers) */
    spw_dtype compute_dtype;      /* cuda; SPW_CUDA_COMPUTE=fp32, bf16 or fp16 overrides it. cpu computes in fp32 */
    uint32_t turn;                /* a cuda device without a number: this one, modulo how many there are */
    /* cuda: of this one instead, which need not be here: what plans ask a device is answered, and there is no memory. NULL: what is here */
    const spw_gpu_spec *planned;
} spw_gpu_options;

typedef struct spw_gpu_info {
    const char *name;        /* "cpu" */
    const char *description; /* "AMD EPYC, 2 threads, avx512, OpenBLAS for SkylakeX" */
    spw_dtype compute_dtype;
    bool host_addressable; /* the CPU may read and write device memory through plain pointers */
    uint64_t memory_bytes; /* the limit; UINT64_MAX: none */
    uint64_t free_bytes;   /* cuda: what nobody else had when it was opened; 0: not known */
    uint32_t thread_count;
    uint32_t device_count; /* cuda: how many there are, at least 1 */
    unsigned char id[16];  /* cuda: of this one, the same in every process */
    uint32_t
        loss_rows; /* that a loss should take at a time: each time all of its weights' gradient is read and written */
    double peak_flops; /* of products in compute_dtype, at the highest clock; 0: not known */
    const char *link;  /* to host memory, "PCIe 4.0 x16, ..."; "": none, or not known */
    bool fp8;          /* it computes spw_gpu_fp8_product() */
} spw_gpu_info;

/*
 * Errors  SPW_ECONFIG for a name that is none. SPW_EUNSUPPORTED for a device that is not built or not there; the message says
 *         what is missing: the plugin, the driver, a device, or a driver that is new enough. SPW_ENOMEM.
 * Threads any; while the process opens its first cpu device none may be inside OpenBLAS, whose kernels that chooses.
 */
spw_status spw_gpu_open(spw_gpu **out, const spw_gpu_options *options, spw_error *err);
void spw_gpu_close(spw_gpu *gpu); /* NULL is fine; all memory must have been freed */
const spw_gpu_info *spw_gpu_get_info(const spw_gpu *gpu);
/* The first sticky error since open, if any. */
spw_status spw_gpu_check(spw_gpu *gpu, spw_error *err);

/* Memory, at least 256-byte aligned and resident. Errors  SPW_ENOMEM with bytes asked, live and limit. */
spw_status spw_gpu_alloc(spw_gpu *gpu, void **out, uint64_t bytes, spw_error *err);
void spw_gpu_free(spw_gpu *gpu, void *p); /* NULL is fine */
/* Host memory that threads and two copy queues take, besides what spw_gpu_alloc gives out. Pure. */
uint64_t spw_gpu_work_bytes(const spw_gpu *gpu);
/* And an (M, K) x (K, N) product on one of the threads, 0 to thread_count - 1; kept for the next one. Pure. */
uint64_t spw_gpu_product_bytes(const spw_gpu *gpu, uint32_t thread_idx, uint64_t M, uint64_t N, uint64_t K);
uint64_t spw_gpu_bytes_live(const spw_gpu *gpu);
uint64_t spw_gpu_bytes_peak(const spw_gpu *gpu);

/*
 * Host memory that copies go to and from, made known to the device once and in one piece: a queue then reads and writes it
 * by itself. Without it copies work too, but the thread that submits them waits. Nothing on cpu.
 * Errors  SPW_ENOMEM when the system refuses to lock so much.
 */
spw_status spw_gpu_pin_host(spw_gpu *gpu, void *base, uint64_t bytes, spw_error *err);
void spw_gpu_unpin_host(spw_gpu *gpu, void *base); /* after the last copy; NULL is fine */

/* ---------------------------------------------------------------- queues, events, copies */

/*
 * COMPUTE runs the operations below. On cpu it works in the calling thread: an operation has finished when its call
 * returns, and waiting for an event blocks. The copy queues have a thread each on cpu, a stream each on cuda.
 */
typedef enum spw_gpu_queue_kind { SPW_QUEUE_COMPUTE, SPW_QUEUE_H2D, SPW_QUEUE_D2H } spw_gpu_queue_kind;
spw_status spw_gpu_queue_create(spw_gpu_queue **out, spw_gpu *gpu, spw_gpu_queue_kind kind, spw_error *err);
void spw_gpu_queue_destroy(spw_gpu_queue *queue); /* waits for its work; NULL is fine */
/* Blocks until everything submitted so far has finished. */
void spw_gpu_queue_sync(spw_gpu_queue *queue);
/* fn(arg) runs once the work submitted before has finished, on a thread of the device's; it must not block or call
 * into this header. */
void spw_gpu_queue_notify(spw_gpu_queue *queue, void (*fn)(void *arg), void *arg);

/*
 * A span: what is submitted between the two calls, one at a time on a queue. fn gets when the device began and ended it, in the
 * clock of spw_now_ns(), and runs as a notify's. name is a literal; tools that watch a GPU show the calls in between by it (NVTX).
 */
typedef void (*spw_gpu_span_fn)(void *arg, const char *name, uint64_t tag, uint64_t begin_ns, uint64_t end_ns);
void spw_gpu_span_begin(spw_gpu_queue *queue, const char *name);
void spw_gpu_span_end(spw_gpu_queue *queue, uint64_t tag, spw_gpu_span_fn fn, void *arg);

spw_status spw_gpu_event_create(spw_gpu_event **out, spw_gpu *gpu, spw_error *err);
void spw_gpu_event_destroy(spw_gpu_event *event);
void spw_gpu_event_record(spw_gpu_event *event, spw_gpu_queue *queue); /* marks the work submitted so far */
void spw_gpu_event_wait(spw_gpu_event *event, spw_gpu_queue *queue);   /* later work of queue starts after the mark */
void spw_gpu_event_sync(spw_gpu_event *event);                         /* the calling thread waits for the mark */

/*
 * Copies of n elements with conversion; asynchronous on H2D and D2H queues; both buffers are lent until the queue
 * passes the copy. Host memory should come from one spw_region (pinned once).
 */
void spw_gpu_copy_h2d(spw_gpu_queue *queue, void *dst_device, spw_dtype dst_type, const void *src_host,
                      spw_dtype src_type, uint64_t n);
/*
 * sumsq, when not NULL, gets ceil(n / 4096) fp64 sums of squares of the elements as rounded to dst_type, one per 4096,
 * each summed in an order that depends on n alone.
 */
void spw_gpu_copy_d2h(spw_gpu_queue *queue, void *dst_host, spw_dtype dst_type, const void *src_device,
                      spw_dtype src_type, uint64_t n, double *sumsq);
/* Device to device, on any queue, with conversion; sumsq (host memory) as above. */
void spw_gpu_copy_d2d(spw_gpu_queue *queue, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type,
                      uint64_t n, double *sumsq);

/*
 * n elements, a multiple of 128 or of a strip, as codes in blocks of 128 with their scales: the bytes, and decoded the elements, of runtime/base/quant.h;
 * encode makes SPW_QUANT_INT8 and INT4 alone, decode takes published forms too (spw_codes.h). codes is aligned to 4 bytes. On any queue, lent as above.
 * decode_h2d: codes lie in host memory, and what crosses the link are the codes; else all is on the device.
 */
void spw_gpu_encode(spw_gpu_queue *queue, void *codes, spw_quant form, const void *src, spw_dtype type, uint64_t n);
void spw_gpu_decode(spw_gpu_queue *queue, void *dst, spw_dtype type, const void *codes, spw_quant form, uint64_t n);
void spw_gpu_decode_h2d(spw_gpu_queue *queue, void *dst_device, spw_dtype type, const void *codes_host, spw_quant form,
                        uint64_t n);

/*
 * A few bytes between any host memory and the device, on any queue, in order with its other work: token ids, losses, a
 * row of logits. write: src is the caller's again on return. read: dst is filled on return, so the thread waits for the queue.
 */
void spw_gpu_write_bytes(spw_gpu_queue *queue, void *dst_device, const void *src_host, uint64_t bytes);
void spw_gpu_read_bytes(spw_gpu_queue *queue, void *dst_host, const void *src_device, uint64_t bytes);

/* ---------------------------------------------------------------- links: from device to device, between ranks */

/*
 * A link joins one device of each rank (cuda: NCCL, opened at run time; the cpu device has none: ranks share its memory). It moves
 * bytes on a queue, in order with that queue's other work, and adds up in the order of the ranks.
 *
 * All links of a device work one after the other, in the order of the calls, which must be the same on all ranks, over all links: a device
 * promises no progress with two at a time. What a queue has before such a call is waited for there, so the others wait for it too.
 *
 * Threads   a link belongs to one thread; calls of two links' threads take turns (spw_gpu_link_wait is free)
 * Failure   going(ctx, err) is asked while others are waited for: unless it is SPW_OK the call ends with what it returned. After
 *           an error the link is given up: its work under way ends, and every later call fails.
 */
typedef struct spw_gpu_link spw_gpu_link;
typedef spw_status (*spw_gpu_going)(void *ctx, spw_error *err);
enum { SPW_GPU_LINK_ID_BYTES = 128 };
/* Whether this process could make one. Errors  SPW_EUNSUPPORTED with what is missing. */
spw_status spw_gpu_link_probe(spw_gpu *gpu, spw_error *err);
/* One rank makes an id, all ranks create a link with it. id (SPW_GPU_LINK_ID_BYTES). */
spw_status spw_gpu_link_id(spw_gpu *gpu, unsigned char *id, spw_error *err);
/* Collective. Each rank has a device of its own. */
spw_status spw_gpu_link_create(spw_gpu_link **out, spw_gpu *gpu, const unsigned char *id, uint32_t rank, uint32_t world,
                               spw_gpu_going going, void *ctx, spw_error *err);
/* together: all ranks do it, nothing has failed. NULL is fine. */
void spw_gpu_link_destroy(spw_gpu_link *link, bool together);
/* buf (world, part_bytes), device memory: in: this rank's part; out: all. */
spw_status
spw_gpu_link_all_gather(spw_gpu_link *link, spw_gpu_queue *queue, void *buf, uint64_t part_bytes, spw_error *err);
/* Part r of send goes to rank r, recv gets a part of each other rank, at r times its stride. Own parts are not touched. */
spw_status spw_gpu_link_swap(spw_gpu_link *link, spw_gpu_queue *queue, const void *send, uint64_t send_stride,
                             void *recv, uint64_t recv_stride, uint64_t bytes, spw_error *err);
/*
 * out = before + ((p0 + p1) + p2) ..., n fp32; p of this rank is own, that of rank r is parts + r stride (elements), both of
 * type; before NULL: nothing. n and stride are multiples of 128. out may be own or before.
 */
void spw_gpu_link_sum(spw_gpu_link *link, spw_gpu_queue *queue, float *out, spw_dtype type, const void *own,
                      const void *parts, uint64_t stride, const float *before, uint64_t n);
/* The thread waits until the queue has passed all of it. */
spw_status spw_gpu_link_wait(spw_gpu_link *link, spw_gpu_queue *queue, spw_error *err);

/* ---------------------------------------------------------------- operations (compute queue) */

/*
 * Every result is the same from run to run, whatever the thread count: work is cut by shape, not by threads.
 * ACCUMULATE flags say whether an input gradient is added to what is there or written. Parameter gradients (dw, db, dg)
 * are added to, but for dw with SPW_OP_SET_DW. An input gradient that is NULL is not computed.
 */
enum {
    SPW_OP_W_IN_OUT = 1, /* linear: w is (K, N), y = x w; default (N, K), y = x w^T */
    SPW_OP_ACC_DX = 2,   /* dx (or da, dgate...) is added to */
    SPW_OP_ACC_DX2 = 4,  /* the second input's gradient (db, dup) is added to */
    SPW_OP_BY_ROW = 8,   /* linear: a row of y has the same bits whatever M is; for a few rows at a time */
    SPW_OP_SET_DW = 16,  /* linear, head: dw is written, whatever was there: neither zeros nor another reading of it */
    SPW_OP_X_IN_OUT = 32 /* product: x is (K, M) */
};

void spw_gpu_zero(spw_gpu_queue *q, void *p, uint64_t bytes);
/* y = a + b; y may be a. */
void spw_gpu_add(spw_gpu_queue *q, act *y, const act *a, const act *b, uint64_t n);

/* y = a + scale b; a NULL: y = scale b, and y may be b. y may be a. */
void spw_gpu_add_scaled(spw_gpu_queue *q, act *y, const act *a, const act *b, float scale, uint64_t n);

/*
 * y = (a + b) s, with s the sum of SPW_TERMS numbers on the device, first ones first; b NULL: nothing. y may be a or b. All in fp32, and
 * rounded once.
 */
void spw_gpu_add_scaled_by(spw_gpu_queue *q, act *y, const act *a, const act *b, const act *terms, uint64_t n);

/* y(M,N) = x(M,K) w^T + b(N); b may be NULL. */
void spw_gpu_linear(spw_gpu_queue *q, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N,
                    uint64_t K, unsigned flags);
/* The same onto what is there: y = onto + x w^T + b. y may be onto, but not with SPW_OP_BY_ROW. */
void spw_gpu_linear_add(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *w, const act *b, uint64_t M,
                        uint64_t N, uint64_t K, unsigned flags);
/*
 * y(M,N) = scale x w^T + by onto, in fp32 and rounded once. onto NULL: nothing, whatever `by` is. y is none of the others. Flags
 * SPW_OP_W_IN_OUT and SPW_OP_X_IN_OUT.
 */
void spw_gpu_product(spw_gpu_queue *q, act *y, const act *onto, float by, const act *x, const act *w, float scale,
                     uint64_t M, uint64_t N, uint64_t K, unsigned flags);
/* gelu_in = x w^T + b, y = gelu(gelu_in). */
void spw_gpu_linear_gelu(spw_gpu_queue *q, act *y, act *gelu_in, const act *x, const act *w, const act *b, uint64_t M,
                         uint64_t N, uint64_t K, unsigned flags);
/* dw (fp32, shape of w) and db (N) may be NULL (frozen). */
void spw_gpu_linear_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *w,
                             uint64_t M, uint64_t N, uint64_t K, unsigned flags);
/* The same where x = gelu(gelu_in): dx gets the gradient of gelu_in instead; it is written, never added to. */
void spw_gpu_linear_gelu_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x,
                                  const act *gelu_in, const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags);

/*
 * 8-bit floats: a matrix is codes times one scale (fp32, in device memory), a power of two, as runtime/base/fp8.h makes them.
 * scale: of x (n), so that its greatest magnitude is at most the format's greatest number; NaN where an element is not finite.
 */
void spw_gpu_fp8_scale(spw_gpu_queue *q, float *scale, spw_fp8 format, const act *x, uint64_t n);
/* codes (M,N) and turned (N,M), which is their transpose, of x (M,N); either may be NULL. With a scale of NaN all are zeros.
 * M and N are multiples of 16, arrays of codes begin at multiples of 16. */
void spw_gpu_fp8_encode(spw_gpu_queue *q, uint8_t *codes, uint8_t *turned, spw_fp8 format, const float *scale,
                        const act *x, uint64_t M, uint64_t N);
typedef struct spw_fp8_matrix {
    const uint8_t *codes;
    const float *scale;
    spw_fp8 format;
} spw_fp8_matrix;
/*
 * y(M,N) = onto + a(M,K) b(N,K)^T + bias(N), summed in fp32; a and b are not both E5M2, M, N and K are multiples of 16.
 *   y, onto  act, or fp32 with f32_out; onto NULL: nothing; it may be y
 *   bias     act; NULL: none
 */
typedef struct spw_fp8_product {
    void *y;
    const void *onto;
    const act *bias;
    bool f32_out;
    spw_fp8_matrix a, b;
    uint64_t M, N, K;
} spw_fp8_product;
void spw_gpu_fp8_product(spw_gpu_queue *q, const spw_fp8_product *p);

/*
 * y(M,C) = table[ids[i] - first]; ids in device memory. With add: y += that. The table has rows [first, first + V) of a greater one, or with
 * first 0 all of them: rows of y whose id is elsewhere stay as they are.
 */
void spw_gpu_embedding(spw_gpu_queue *q, act *y, const int32_t *ids, const act *table, uint64_t first, uint64_t M,
                       uint64_t V, uint64_t C, bool add);
/* dtable(V,C) += rows of dy, in the order of M for each id (no atomics); but those whose id is elsewhere. */
void spw_gpu_embedding_backward(spw_gpu_queue *q, float *dtable, const act *dy, const int32_t *ids, uint64_t first,
                                uint64_t M, uint64_t V, uint64_t C);

/* y = (x - mean) * rstd * g + b over rows of C. b NULL: zeros. mean, rstd (M) fp32 out. */
void spw_gpu_layernorm(spw_gpu_queue *q, act *y, float *mean, float *rstd, const act *x, const act *g, const act *b,
                       uint64_t M, uint64_t C, float eps);
/* dx = onto + the gradient of x; onto NULL: nothing. It may be dx. dg, db NULL: frozen. */
void
spw_gpu_layernorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, float *db, const act *dy,
                           const act *x, const act *g, const float *mean, const float *rstd, uint64_t M, uint64_t C);
/*
 * y = x * rstd * (offset + g), rstd = 1 / sqrt(mean(x^2) + eps) (M) fp32 out. g NULL: zeros, and dg is NULL too. Rows of C elements begin stride
 * apart, in all arrays.
 */
void spw_gpu_rmsnorm(spw_gpu_queue *q, act *y, float *rstd, const act *x, const act *g, float offset, uint64_t M,
                     uint64_t C, uint64_t stride, float eps);
void spw_gpu_rmsnorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, const act *dy, const act *x,
                              const act *g, float offset, const float *rstd, uint64_t M, uint64_t C, uint64_t stride);

/*
 * Rotary embedding in place, on the first R elements of each of H heads of D at x + row * stride: pairs (j, j + R/2), or, with neighbors,
 * (2j, 2j + 1). Row i has position i % T, with places (device memory) places[i]. cos_sin (positions, R): cos of R/2 frequencies, then sin. sign +1 forward, -1 backward.
 */
void spw_gpu_rope(spw_gpu_queue *q, act *x, uint64_t stride, const float *cos_sin, const int32_t *places, uint64_t M,
                  uint64_t T, uint64_t H, uint64_t D, uint64_t R, bool neighbors, int sign);
/*
 * y = x for M rows of H heads of D elements: row i of x at + i x_stride, its head h at + h x_head; 0: one head for all. y likewise. In
 * elements; what lies between heads of y stays.
 */
void spw_gpu_copy_heads(spw_gpu_queue *q, act *y, uint64_t y_stride, uint64_t y_head, const act *x, uint64_t x_stride,
                        uint64_t x_head, uint64_t M, uint64_t H, uint64_t D);
/* Row i of y, D elements at + i y_stride, is the sum of x's heads in fp32, the first ones first. */
void spw_gpu_sum_heads(spw_gpu_queue *q, act *y, uint64_t y_stride, const act *x, uint64_t x_stride, uint64_t x_head,
                       uint64_t M, uint64_t H, uint64_t D);

/*
 * Causal attention with grouped heads, tiled online softmax, never a T x T matrix (Dao et al. 2022, FlashAttention).
 * Row r = b T + t. q at q + r q_stride, head h at + h qk_head; k and v likewise with kv_stride; query head h reads head
 * h / (Hq / Hk). out rows of Hq D. lse (B, Hq, T) fp32 out: log-sum-exp of the scaled scores.
 * Strides are in elements, so that packed qkv needs no copy. Values may have heads of another size and lie elsewhere: head h then at v + r
 * v_stride + h v_head, with Dv elements, and rows of out and dout have Hq Dv. With a window, row t reads keys t - window + 1 to t only, and
 * tiles that no row reads are not computed; windows of T and more, and 0, give the same bits.
 * With documents, row t reads no key before its own document's first, and tiles that this leaves unread are not computed either:
 *   begins, ends  (B, T) in  where, in its sequence, each position's document begins, and where the next one does (T: none does)
 * With sinks a row's softmax has one score more, which no key has and no value: the weights of the keys that it reads are
 * exp(score) / (exp(sinks[h]) + their sum), and lse is the logarithm of that divisor.
 */
typedef struct spw_attention_shape {
    uint64_t B, T, Hq, Hk, D;
    uint64_t q_stride, kv_stride;
    uint64_t qk_head;              /* from a head of q or k to the next one; 0: D */
    uint64_t Dv, v_stride, v_head; /* of values; Dv is at most D; 0: D, kv_stride, Dv */
    float scale;
    uint64_t window; /* keys that a row reads, its own included; 0: all before it */
    const int32_t *begins,
        *ends; /* device memory; both NULL: a sequence is one document. With a cache begins alone count, by its positions */
    float cap;        /* scaled scores become cap tanh(score / cap) before the softmax; 0: they stay */
    const act *sinks; /* (Hq) NULL: none */
    /*
     * (B T, chosen_words) which keys rows read, of those that they may: bit u % 32 of word u / 32 is that of key u of the row's sequence, with a cache
     * of its position. A row reads one at least; bits of those that it may not read are not looked at. NULL: all of them. There is no cap then
     */
    const uint32_t *chosen;
    uint64_t chosen_words;
    /*
     * Each sequence has so many keys in front of its rows', (B, front + T) rows of key and value then, which stand for front_each rows each
     * (spw_gpu_compress): row t reads the first (t + 1) / front_each of them, whatever the window, and chosen is of these alone, its word 0 that of the
     * first. With documents it reads those of its own, from begin / front_each on the first (t + 1 - begin) / front_each. There is no cap then, and one head
     * of keys. 0: none
     */
    uint64_t front, front_each;
    const int32_t *front_rows; /* (B, front) with documents: by spw_gpu_windows() */
} spw_attention_shape;
void spw_gpu_attention(spw_gpu_queue *q, act *out, float *lse, const act *query, const act *key, const act *value,
                       const spw_attention_shape *shape);
/*
 * Writes dquery, dkey, dvalue, which have the strides of query, key and value; what lies between heads stays. dsinks (Hq) fp32 is added to; NULL: not wanted. With D the
 * row's product of dout and out it is - exp(sink - lse) D, summed over the rows.
 */
void spw_gpu_attention_backward(spw_gpu_queue *q, act *dquery, act *dkey, act *dvalue, float *dsinks, const act *dout,
                                const act *out, const float *lse, const act *query, const act *key, const act *value,
                                const spw_attention_shape *shape);

/*
 * Attention of new tokens that reads the keys and values of those before from a cache. Sequence b of the shape has T new
 * tokens, at positions starts[b] to starts[b] + T - 1; those before are in the cache already, the new ones' keys and values are
 * put there first. So one call takes one sequence's prompt, or a piece of it, or one token each of many sequences.
 *   key, value  (slots, capacity, Hk D), and Hk Dv, in/out  position p of sequence b is row slots[b] capacity + p
 *   slots       (B) in   one of its own for each sequence
 *   starts      (B) in   starts[b] + T is at most capacity
 * With keys in front they are there already, as far as they are complete, (slots, front + capacity, D): position p is row slots[b] (front + capacity) + front +
 * p; front is a multiple of SPW_FRONT_TILE, so that no tile has both kinds, and what is not complete is never loaded. Keys that are values too may be one array. new_key, new_value as key and value of spw_gpu_attention(); the window counts positions as there. A sequence's rows have the
 * same bits whatever else is in the call; with starts 0 they are those of spw_gpu_attention().
 */
enum { SPW_FRONT_TILE = 32 };
typedef struct spw_attention_cache {
    act *key, *value;
    uint64_t capacity;
    const int32_t *slots, *starts; /* device memory */
} spw_attention_cache;
void spw_gpu_attention_cached(spw_gpu_queue *q, act *out, const act *query, const act *new_key, const act *new_value,
                              const spw_attention_cache *cache, const spw_attention_shape *shape);
/*
 * Which keys attention reads, where another, smaller attention says it (DeepSeek-AI 2025, 2512.02556, the lightning indexer): a row's score of a
 * key is the sum over h < H of weights[h] max(0, q[h] k), in fp32 and in the order of heads. Of the keys that it may read, `keys` with the greatest
 * scores are chosen, of equal ones the first; all where they are no more. A NaN is above all. Scores are multiplied by nothing else: a
 * factor above 0 changes no choice.
 *   bits     (B T, words) out   as spw_attention_shape.chosen
 *   query    (B T, H D)
 *   weights  (B T, H)
 *   key      (B, T, D), or (first + T, D) of one sequence; with a cache (slots, capacity, D), in/out
 *   new_key  (B T, D) with a cache: put there first; NULL: those that are there are all
 *   scratch  spw_gpu_choose_scratch() fp32
 * Row t of sequence b is at position p = first + t, with a cache at starts[b] + first + t, and may read keys up to that, from begins[b T + t] on. Where keys stand for
 * `each` rows (spw_gpu_compress) it may read the first (p + 1) / each, perhaps none, or with begins those of its own document, as attention does; then key is
 * (B, key_rows, D), or with a cache (slots, capacity, D) of such keys. With a cache there are no begins.
 * Sequences, and rows, have the same bits whatever else is in the call.
 */
typedef struct spw_choice_shape {
    uint64_t B, T, first;  /* first is 0 where B is not 1 */
    uint64_t H, D;         /* D at most SPW_CHOICE_DIM_MAX */
    uint64_t keys, words;  /* words: 32 times as many reach behind the last position */
    const int32_t *begins; /* (B T) NULL: 0 */
    uint64_t capacity;
    const int32_t *slots, *starts; /* (B) NULL: no cache */
    uint64_t each, key_rows;       /* 0: a key is a row's, of T or, behind first, of first + T */
} spw_choice_shape;
enum { SPW_CHOICE_DIM_MAX = 512 };
void spw_gpu_choose_keys(spw_gpu_queue *q, uint32_t *bits, const act *query, act *key, const act *new_key,
                         const act *weights, float *scratch, const spw_choice_shape *shape);
uint64_t spw_gpu_choose_scratch(const spw_choice_shape *shape); /* elements: a score for each bit */
/*
 * Keys that stand for several rows each (DeepSeek-AI 2026, DeepSeek-V4, compressed attention): y (B, T / rate, D) of kv (B T, parts D), by what gate
 * (B T, parts D) and bias (rate, parts D) say of the same elements. Window w of a sequence has its rows [w rate, (w + 1) rate); rows behind the last
 * whole one are in none. In each column by itself
 *   y = sum of p kv,  p = softmax(gate + bias)  over the window's rows, of the last D columns, and where `overlaps`, which makes parts 2, over those
 * of the window before besides, of the first D: the first window has none before. In fp32, rows in their order, and rounded once.
 *
 * With documents each has its own windows, from its first row on: those of one that begins at row b of its sequence are b / rate, b / rate + 1 and so on, so
 * that no two documents' are the same, and there are as many as ever. Some may be nobody's: y is 0 there.
 */
typedef struct spw_compress_shape {
    uint64_t B, T, D, rate;
    bool overlaps;
    const int32_t *begins; /* (B T) as in spw_attention_shape; NULL: a sequence is one document */
    const int32_t *firsts; /* by spw_gpu_windows(), with those, or with the starts of running sequences; else NULL */
} spw_compress_shape;
/*
 * firsts (B, T / rate): which row of its sequence is a window's first; of one that is nobody's T - 1, with which no window begins. begins NULL: a
 * sequence is one document. With starts (B), of running sequences, (B, (T + rate - 1) / rate): at which position the windows begin that end with new tokens, in
 * order, and behind these the last position.
 */
void spw_gpu_windows(spw_gpu_queue *q, int32_t *firsts, const int32_t *begins, const int32_t *starts, uint64_t B,
                     uint64_t T, uint64_t rate);
void spw_gpu_compress(spw_gpu_queue *q, act *y, const act *kv, const act *gate, const act *bias,
                      const spw_compress_shape *shape);
/* dkv and dgate are written, zeros where nothing reads; dbias (rate, parts D) fp32 is added to, or NULL: dgate, as rounded, summed over the windows. */
void spw_gpu_compress_backward(spw_gpu_queue *q, act *dkv, act *dgate, float *dbias, const act *dy, const act *kv,
                               const act *gate, const act *bias, const spw_compress_shape *shape);
/*
 * Of new tokens of running sequences, as spw_attention_cache has them: y (B, (T + rate - 1) / rate, D) of the windows that shape's firsts say. Of tokens before
 * the call's there is what windows still read, and of the call's it is put there:
 *   kv, gate  (slots, parts rate, parts D) in/out  of position p in row p modulo parts rate
 * A window has the same bits in whichever calls its tokens were. keep_windows puts y where attention, or what chooses, reads it: window w to row
 * slots[b] capacity + w of keys.
 */
typedef struct spw_window_cache {
    act *kv, *gate;
    const int32_t *slots, *starts;
} spw_window_cache;
void spw_gpu_compress_cached(spw_gpu_queue *q, act *y, const act *kv, const act *gate, const act *bias,
                             const spw_window_cache *cache, const spw_compress_shape *shape);
void spw_gpu_keep_windows(spw_gpu_queue *q, act *keys, uint64_t capacity, const act *y, const spw_window_cache *cache,
                          const spw_compress_shape *shape);
/*
 * Hyper-connections (Zhu et al. 2024, 2409.19606; with doubly stochastic maps DeepSeek-AI 2025, 2512.24880): in place of one residual stream a row has n, x (M, n, C), and
 * its own maps between them and what a half of a layer reads and gives. A row of maps has pre (n), post (n) and comb (n, n), of a head pre alone.
 *
 * maps are made of mixes, as wide, with z = scale mixes + base, where pre, post and comb have a scale each (of three, a head's of one):
 *   pre = sigmoid(z) + eps     post = 2 sigmoid(z)     comb = softmax(z) over each row + eps, then columns over their sums + eps, and then, rounds - 1
 * times, rows over their sums + eps and columns again (Sinkhorn and Knopp 1967). In fp32.
 */
typedef struct spw_streams {
    uint64_t M, C, n; /* n at most SPW_STREAMS_MAX */
    bool head;
    uint64_t rounds; /* 1 to SPW_ROUNDS_MAX */
    float eps;
} spw_streams;
enum { SPW_STREAMS_MAX = 4, SPW_ROUNDS_MAX = 32 };
static inline uint64_t
spw_stream_maps(const spw_streams *s) /* elements of a row of maps */
{
    return s->head ? s->n : s->n * (2 + s->n);
}
void spw_gpu_stream_maps(spw_gpu_queue *q, act *maps, const act *mixes, const act *scale, const act *base,
                         const spw_streams *s);
/* dmixes is written; dscale and dbase, fp32, are added to, in an order that M alone decides. Each may be NULL. */
void spw_gpu_stream_maps_backward(spw_gpu_queue *q, act *dmixes, float *dscale, float *dbase, const act *dmaps,
                                  const act *mixes, const act *scale, const act *base, const spw_streams *s);
/*
 * h NULL: what is read, y (M,C) = sum over j of pre[j] x[j]. Else the streams behind what was given, h (M,C): y (M, n, C), y[k] = post[k] h + sum over j of comb[j][k]
 * x[j]. In fp32, rounded once.
 */
void spw_gpu_mix(spw_gpu_queue *q, act *y, const act *h, const act *x, const act *maps, const spw_streams *s);
/*
 * dh (M,C) is written, dx (M, n, C) too, or ACC_DX; of dmaps only the columns that mix reads are written: both kinds together write all. Each may
 * be NULL; dy, h as y, h.
 */
void spw_gpu_mix_backward(spw_gpu_queue *q, act *dh, act *dx, act *dmaps, const act *dy, const act *h, const act *x,
                          const act *maps, const spw_streams *s, unsigned flags);
/*
 * What cuts documents, or sequences, into chunks of so many positions, for attention within those: begins and ends for an
 * spw_attention_shape, in terms of its own (of NULL: one document). With a cache's starts a chunk's begins are its positions, and
 * there are no ends: to_ends, ends and begins are NULL.
 */
void spw_gpu_chunks(spw_gpu_queue *q, int32_t *to_begins, int32_t *to_ends, const int32_t *begins, const int32_t *ends,
                    const int32_t *starts, uint64_t B, uint64_t T, uint64_t chunk);
/*
 * Linear attention by the gated delta rule (Yang et al. 2024, 2412.06464) or as Mamba-2 has it, and the short convolution in front of it.
 *
 * The convolution is depthwise and causal, with K taps for each channel, then SiLU: y[t,c] = silu(bias[c] + sum over j < K of w[c,j] x[t - (K-1) + j, c]),
 * where rows before a sequence's, or a document's, first are 0. plain: the sum alone, without SiLU. Arrays (B T, C), w (C,K); begins and ends as in spw_attention_shape.
 * stride: rows of x, y and their gradients, and of what a cache keeps, begin so many elements apart, so that some of a row's channels are taken.
 */
typedef struct spw_conv_shape {
    uint64_t B, T, C, K;          /* K <= SPW_TAPS_MAX */
    const int32_t *begins, *ends; /* both NULL: a sequence is one document. Not with a cache. */
    const act *bias;              /* (C) NULL: none */
    bool plain;
    uint64_t stride; /* 0: C */
} spw_conv_shape;
enum { SPW_TAPS_MAX = 8, SPW_DELTA_DIM_MAX = 256 };
void spw_gpu_conv(spw_gpu_queue *q, act *y, const act *x, const act *w, const spw_conv_shape *shape);
/* dx is written, or ACC_DX; dw (C,K) and dbias (C) fp32 are added to; each may be NULL. */
void spw_gpu_conv_backward(spw_gpu_queue *q, act *dx, float *dw, float *dbias, const act *dy, const act *x,
                           const act *w, const spw_conv_shape *shape, unsigned flags);
/*
 * Each of Hv heads has a state S (Dk,Dv), 0 at first, that its rows read and write in turn. With q and k of length one (times 1 / sqrt(sum of
 * squares + 1e-6)), q / sqrt(Dk) besides, beta = beta_most sigmoid(b) and a decay of gamma = exp(-exp(log_a) softplus(a + dt_bias)):
 *   S' = gamma S[t-1]      delta = beta (v - S'^T k)      S[t] = S' + k delta^T      out = S[t]^T q
 * all in fp32. A head h reads q and k of head h / (Hv / Hk).
 *   qkv     (M, 2 Hk Dk + Hv Dv)  a row: q of all heads, k of all, v of all
 *   a, b    (M,Hv)
 *   log_a, dt_bias  (Hv)
 *   out     (M, Hv Dv)
 *   delta   (M, Hv Dv) fp32 out, for backward; NULL: not wanted
 * The state begins anew with each document.
 *
 * mamba: Mamba-2's recurrence (Dao and Gu 2024, 2405.21060), which corrects nothing. q and k are as they come, its C and B, and v is its x:
 *   beta = softplus(a + dt_bias)    gamma = exp(-exp(log_a) beta)    delta = beta v    S[t] = gamma S[t-1] + k delta^T    out = S[t]^T q + skip v
 * There a row of qkv has v of all heads, k of all, q of all; skip is (Hv); b, db and delta are NULL.
 *
 * channels: the rule with a decay for each channel of the keys (Kimi Team 2025, 2510.26692): a is (M, Hv Dk), dt_bias (Hv Dk), and da and ddt_bias
 * are; gamma = exp(-exp(log_a) softplus(a + dt_bias)) is that of a row of the state, and S' = diag(gamma) S[t-1].
 */
typedef struct spw_delta_shape {
    uint64_t B, T, Hk, Hv, Dk, Dv; /* Hv a multiple of Hk; Dk and Dv multiples of 8, at most SPW_DELTA_DIM_MAX */
    const int32_t *begins, *ends;  /* both NULL: a sequence is one document. Not with a cache. */
    uint64_t heads_each; /* backward: heads of keys, with those that read them, that are taken at a time; 0: all */
    bool mamba, channels;
    float step_least; /* of mamba: what softplus(a + dt_bias) is at least, where it has no gradient; 0: as it is */
    float beta_most;  /* of the rule, at most 2; 0: 1 */
} spw_delta_shape;
typedef struct spw_delta_inputs {
    const act *qkv, *a, *b, *log_a, *dt_bias, *skip;
} spw_delta_inputs;
void spw_gpu_delta(spw_gpu_queue *q, act *out, float *delta, const spw_delta_inputs *in, const spw_delta_shape *shape);
/*
 * Writes dqkv, da and db, with the strides of qkv, a and b; dlog_a, ddt_bias and dskip (Hv) fp32 are added to, or NULL: not wanted.
 * scratch (spw_gpu_delta_scratch(), for heads_each heads) fp32; bits are the same whatever heads_each is.
 * With dS the gradient of S[t] when row t comes, backwards in time, and dS += q dout^T:
 *   ddelta = dS^T k     dm = - beta ddelta     dq = S[t] dout     dk = dS delta + S' dm     dv = beta ddelta
 * and then dS = gamma (dS + k dm^T). As delta is known, rows of S are apart and rows of dS too, once ddelta is. The gradient of ln gamma, which is
 * <dS + k dm^T, S'>, needs neither: it is that of row t + 1, if this is no other document's, + q dq - k (dS delta) + k (S' dm). What roundings
 * leave of such sums is cut off at what it cannot exceed: the product of the lengths of S' and dS + k dm^T, which are at most
 *   |S'| = gamma |S[t-1]|,   |S[t]| = |S'| + |delta|,   |dS + k dm^T| = gamma[t+1] that of row t + 1 + |q| |dout|
 * (dS + k dm^T = (I - beta k k^T) dS is no longer than dS, because k is no longer than one and beta at most 2).
 * With channels all this is that of each row of S by itself: its gradient of ln gamma has no sum over others, and its lengths are at most
 *   |S[t]| = |S'| + |k| |delta|,   |dS + k dm^T| = gamma[t+1] that of row t + 1 + |q| |dout| + |k| |dm|
 * where k and q are its elements of these.
 * Mamba-2's are the same with dm = 0 and |k| |delta| for |delta|; its dv has skip dout besides, and da beta's gradient, <ddelta, v>.
 */
void spw_gpu_delta_backward(spw_gpu_queue *q, act *dqkv, act *da, act *db, float *dlog_a, float *ddt_bias, float *dskip,
                            const act *dout, const float *delta, float *scratch, const spw_delta_inputs *in,
                            const spw_delta_shape *shape);
uint64_t spw_gpu_delta_scratch(const spw_delta_shape *shape); /* elements */
/*
 * New tokens of running sequences, as spw_attention_cache has them: sequence b has T, at positions starts[b] on; what is kept of those before
 * is in slots[b], is not looked at where starts[b] is 0, and is that of all of them afterwards.
 *   state  (slots, Hv, Dk, Dv) fp32
 *   before (slots, K - 1, C)   the convolution's last inputs, 0 where there was none
 * A sequence's rows have the same bits whatever else is in the call and however many come at a time, those of spw_gpu_conv() and spw_gpu_delta().
 */
typedef struct spw_delta_cache {
    float *state;
    act *before;
    const int32_t *slots, *starts; /* (B) device memory */
} spw_delta_cache;
void spw_gpu_conv_cached(spw_gpu_queue *q, act *y, const act *x, const act *w, const spw_delta_cache *cache,
                         const spw_conv_shape *shape);
void spw_gpu_delta_cached(spw_gpu_queue *q, act *out, const spw_delta_inputs *in, const spw_delta_cache *cache,
                          const spw_delta_shape *shape);
/*
 * A function of each element by itself. GELU: its tanh form, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). GELU_ERF: 0.5 x (1 +
 * erf(x / sqrt(2))). RELU: x above 0, else 0, with a slope of 0 at 0. RELU_SQUARED: that times itself. A NaN gives a NaN.
 */
typedef enum spw_curve {
    SPW_CURVE_GELU,
    SPW_CURVE_GELU_ERF,
    SPW_CURVE_RELU,
    SPW_CURVE_RELU_SQUARED,
    SPW_CURVE_COUNT
} spw_curve;
void spw_gpu_curve(spw_gpu_queue *q, spw_curve kind, act *y, const act *x, uint64_t n);
void spw_gpu_curve_backward(spw_gpu_queue *q, spw_curve kind, act *dx, const act *dy, const act *x, uint64_t n,
                            unsigned flags);
/*
 * y (M,C) = silu(gate) * up, gelu(gate) * up, sigmoid(gate) * up, or, plain, gate * up; rows of gate and up, and of their gradients, begin stride apart: both may be halves of
 * one array. Silu, clamped (of DeepSeek-V4): the same of gate, at most 10, and up between -10 and 10; what is cut off has no gradient. Clamped (of gpt-oss): y = (u + 1) g sigmoid(1.702 g), where g is gate, at most 7, and u is up between -7 and 7; what is
 * cut off has no gradient. There gate and up take turns in a row: gate's array is (M, 2 C), up and dup are not looked at, nor ACC_DX2.
 */
typedef enum spw_gate {
    SPW_GATE_SILU,
    SPW_GATE_GELU,
    SPW_GATE_SIGMOID,
    SPW_GATE_SILU_CLAMPED,
    SPW_GATE_PLAIN,
    SPW_GATE_CLAMPED,
    SPW_GATE_COUNT
} spw_gate;
#define SPW_GATE_SILU_LIMIT 10.0f
#define SPW_GATE_LIMIT      7.0f
#define SPW_GATE_ALPHA      1.702f
void spw_gpu_gate_mul(spw_gpu_queue *q, spw_gate kind, act *y, const act *gate, const act *up, uint64_t M, uint64_t C,
                      uint64_t stride);
void spw_gpu_gate_mul_backward(spw_gpu_queue *q, spw_gate kind, act *dgate, act *dup, const act *dy, const act *gate,
                               const act *up, uint64_t M, uint64_t C, uint64_t stride, unsigned flags);
/*
 * A mixture of experts: each of M rows goes through k of E experts. Its M k pairs of a row and a choice are sorted by expert, and
 * those of one expert by row, so that an expert's rows lie together and products with its weights are products of a slice.
 * Arrays in device memory:
 *   weights  (M, k) fp32   of each choice, in the order in which they were chosen
 *   shares   (M, k) fp32   what they were before their experts' factors; not looked at where the rule has none
 *   choices  (M, k) int32  its expert; a row's are ordered by expert, and so by place
 *   places   (M, k) int32  where the pair is among the sorted ones
 *   pairs    (M k) int32   the other way: row k + choice of each sorted pair
 *   ends     (E) int32     where an expert's pairs end; they begin where those of the expert before end
 * Source  Shazeer et al. 2017 (1701.06538); without a capacity: no pair is dropped.
 */
typedef struct spw_routing {
    float *weights, *shares;
    int32_t *choices, *places, *pairs, *ends;
    uint64_t M, k, E; /* k <= E <= SPW_EXPERTS_MAX, M k < 2^31 */
} spw_routing;
enum { SPW_EXPERTS_MAX = 512, SPW_CHOICES_MAX = 16, SPW_TERMS = 4 };
/*
 * How rows choose, and what their choices weigh. sigmoid false: p = softmax(logits); true: p = sigmoid(logit), each by itself. A row's
 * choices are the k experts of the largest logits, or, with sigmoid or a bias, of the largest p + bias; of equal ones the lower expert, a NaN
 * above all. With groups, E / groups experts in a row each, only those of the group_choices best groups can be chosen: a group is as good as
 * its best expert, or, with sigmoid, as the sum of its best two. Weights are p, or with sum_to_one p over the sum of the chosen ones, times
 * scale, and with factors times their expert's. All in fp32; to a sum of sigmoids, or of what a bias chose, `least` is added, so that none is 0.
 *   bias  (E, SPW_TERMS) act  each is the sum of its row, first ones first, so that 16-bit types hold one of fp32; it has no gradient
 *   factors  (E) act  balance knows nothing of them
 *   root     with sigmoid: p = sqrt(log(1 + exp(logit))) in its place, and all else as with it
 *   table    (V, k, SPW_TERMS) act  a row's choices are not by its logits, but those of its token, lower experts first; one may be there twice. Sums of terms
 *            as bias has them
 * Source  groups and sigmoid: DeepSeek-AI 2024 (2405.04434, 2.2.2; 2412.19437, 2.1.2)
 */
typedef struct spw_routing_rule {
    bool sum_to_one, sigmoid;
    float scale;
    float least;        /* 0: SPW_WEIGHTS_LEAST */
    const act *bias;    /* NULL: none */
    const act *factors; /* likewise */
    bool root;
    const act *table;               /* likewise */
    const int32_t *tokens;          /* (M) with a table */
    uint64_t groups, group_choices; /* 0: all experts are one */
} spw_routing_rule;
#define SPW_WEIGHTS_LEAST 1e-20f
/* Fills it from logits (M,E). */
void spw_gpu_route(spw_gpu_queue *q, const spw_routing *r, const act *logits, const spw_routing_rule *rule);
/*
 * dlogits (M,E) from dweights (M,k) fp32; written, or ACC_DX. balance: with the gradient of balance times the sum over experts of their
 * pairs times their probabilities, p over the sum of a row's p, which is least when all have as many (Fedus et al. 2021, 2101.03961,
 * equations 4 to 6); 0: without.
 */
void spw_gpu_route_backward(spw_gpu_queue *q, act *dlogits, const float *dweights, const act *logits,
                            const spw_routing *r, const spw_routing_rule *rule, float balance, unsigned flags);
/* dfactors (E) fp32 += the sum over an expert's pairs of dweights times shares, in an order that M alone decides. */
void spw_gpu_factors_backward(spw_gpu_queue *q, float *dfactors, const float *dweights, const spw_routing *r);
/* y (M k, C) gets rows of x (M,C): y[i] = x[pairs[i] / k]. */
void spw_gpu_dispatch(spw_gpu_queue *q, act *y, const act *x, const spw_routing *r, uint64_t C);
/*
 * y (M,C) = onto + sum over j < k, in this order, of weights[m,j] x[places[m,j]], x (M k, C), in fp32 and rounded once; weighted false: all
 * weights are 1, which is dispatch's backward. down: j goes downwards, and onto comes last. onto NULL: nothing. y may be onto.
 */
void spw_gpu_combine(spw_gpu_queue *q, act *y, const act *onto, const act *x, const spw_routing *r, bool weighted,
                     bool down, uint64_t C);
/* dx[places[m,j]] = weights[m,j] dy[m], dx (M k, C); dweights[m,j] (fp32) = the dot product of dy[m] and x[places[m,j]].
 * Either may be NULL; without dweights x is not read. */
void spw_gpu_combine_backward(spw_gpu_queue *q, act *dx, float *dweights, const act *dy, const act *x,
                              const spw_routing *r, uint64_t C);
/*
 * The same of places [first, first + rows) alone, whose rows lie in memory of their own: row i of (rows, C) is place first + i's.
 *   dispatch_piece          y[i] = x[pairs[first + i] / k]
 *   combine_piece           sum[m] (M,C) fp32 += weight x[i] for row m's places among these, upwards or downwards: however places are cut,
 *                           pieces in that order give the same bits, those of combine
 *   combine_backward_piece  dx[i] = weight dy[pairs[first + i] / k], and dweights of these pairs; others stay
 */
void spw_gpu_dispatch_piece(spw_gpu_queue *q, act *y, const act *x, const spw_routing *r, uint64_t first, uint64_t rows,
                            uint64_t C);
void spw_gpu_combine_piece(spw_gpu_queue *q, float *sum, const act *x, const spw_routing *r, bool weighted, bool down,
                           uint64_t first, uint64_t rows, uint64_t C);
void spw_gpu_combine_backward_piece(spw_gpu_queue *q, act *dx, float *dweights, const act *dy, const act *x,
                                    const spw_routing *r, uint64_t first, uint64_t rows, uint64_t C);
/* y (M,C) = sums (fp32) + onto, rounded once; onto NULL: nothing. y may be onto. */
void spw_gpu_close_sums(spw_gpu_queue *q, act *y, const float *sums, const act *onto, uint64_t M, uint64_t C);
/*
 * Linear layers of count experts, whose weights have one shape: rows [ends[i - 1], ends[i]) of x and y, the first from 0 on, go through expert
 * i's. What an expert's rows give, and its dw, hang on these rows alone, whatever others there are: a device may compute all at once.
 *   ends  (count) on the host
 *   w, b  (count) as spw_gpu_linear() takes them, not looked at where an expert has no rows; b NULL: none
 *   onto  what forward adds to, by y's rows: y, but other memory with SPW_OP_BY_ROW; NULL: nothing
 *   dw    (count) fp32, backward: added to, or written where set says so; NULL: frozen. An expert without rows: as it was
 *   db    (count) the same, always added to; b's and db's arrays may be NULL
 *   flags SPW_OP_W_IN_OUT, SPW_OP_BY_ROW; backward: SPW_OP_ACC_DX
 */
typedef struct spw_each {
    uint64_t count, N, K; /* count <= SPW_EXPERTS_MAX */
    const uint64_t *ends;
    const act *const *w, *const *b;
    const act *onto;
    float *const *dw, *const *db;
    const bool *set;
} spw_each;
void spw_gpu_linear_each(spw_gpu_queue *q, act *y, const act *x, const spw_each *e, unsigned flags);
void
spw_gpu_linear_each_backward(spw_gpu_queue *q, act *dx, const act *dy, const act *x, const spw_each *e, unsigned flags);
/*
 * Of x (M,N): y (N,M) is scale times its transpose, rounded once; or, in fp32, that is added to y. y is not x.
 */
void spw_gpu_transpose(spw_gpu_queue *q, act *y, const act *x, float scale, uint64_t M, uint64_t N);
void spw_gpu_transpose_sum(spw_gpu_queue *q, float *y, const float *x, float scale, uint64_t M, uint64_t N);
/* y (M,C) = onto + sigmoid(gate[m]) x[m], gate (M). y may be onto. */
void
spw_gpu_add_gated(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *gate, uint64_t M, uint64_t C);
/* dx (M,C) = s dy, dgate (M) = s (1 - s) times the dot product of dy[m] and x[m], with s = sigmoid(gate[m]); both written. */
void spw_gpu_add_gated_backward(spw_gpu_queue *q, act *dx, act *dgate, const act *dy, const act *x, const act *gate,
                                uint64_t M, uint64_t C);
/* y = cap tanh(x / cap), cap above 0: of logits whose loss is not taken here. y may be x. */
void spw_gpu_soft_cap(spw_gpu_queue *q, act *y, const act *x, float cap, uint64_t n);
/*
 * y = x * keep / (1 - p); keep is Philox(key, counter_hi, element / 4), elements counted from `first`: the backward pass calls it
 * again on dy, and a part of a matrix gets the part's mask.
 */
void spw_gpu_dropout(spw_gpu_queue *q, act *y, const act *x, uint64_t n, float p, uint64_t key, uint64_t counter_hi,
                     uint64_t first);

/*
 * Linear head and cross-entropy, chunked over rows so that at most rows_per_chunk x V logits exist.
 *   x (M,C), w (V,C), targets (M) int32 in [0,V) or -1 for no loss; logits: scratch (rows_per_chunk, spw_gpu_logits_stride(V)) act
 *   weights (M) fp32: by how much what is minimised changes with each row's loss, not read where there is no target; NULL: 1 for all
 *   losses (M) fp32 out: -log p(target), whatever its weight, 0 where there is no target
 *   dx (M,C) act written (or ACC_DX), dw (V,C) fp32 added to (or SET_DW): gradients of the sum of (grad_scale * weight) * loss, that product
 *        rounded to fp32; dx and dw NULL: loss only
 *   cap  above 0: logits are those of spw_gpu_soft_cap(); 0: as they come
 */
/* A row of logits begins where every load of a tensor core may begin, whatever V is: products that read them are slow elsewhere. */
static inline uint64_t
spw_gpu_logits_stride(uint64_t V)
{
    return spw_round_up(V, 64);
}
void spw_gpu_linear_cross_entropy(spw_gpu_queue *q, float *losses, act *dx, float *dw, const act *x, const act *w,
                                  const int32_t *targets, const float *weights, act *logits, uint64_t rows_per_chunk,
                                  uint64_t M, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags);

/*
 * The same of a head that comes in pieces of its rows: each is seen, in their order from row 0; then losses are there; then each gives its
 * gradients, in any order. What is not said here is as above.
 *   w     (V,C) the piece, rows [first, first + V) of the head, V > 0; targets count from the head's first row
 *   sums  (M,3) fp32 in/out: the greatest logit so far, the sum of exp(logit - that) so far, the target's logit once it was seen; begun where
 *         first is 0, whatever was there. Rows without a target stay as they are
 */
void spw_gpu_head_see(spw_gpu_queue *q, float *sums, const act *x, const act *w, const int32_t *targets, act *logits,
                      uint64_t rows_per_chunk, uint64_t M, uint64_t first, uint64_t V, uint64_t C, float cap);
/* losses (M) fp32 out, when all pieces have been seen. */
void spw_gpu_head_losses(spw_gpu_queue *q, float *losses, const float *sums, const int32_t *targets, uint64_t M);
/*
 * Makes the piece's logits again.
 *   sums  when all pieces have been seen
 *   dx    (M,C) fp32 written, or ACC_DX: what the piece adds to it; NULL: not wanted
 *   dw    (V,C) fp32 added to, or SET_DW; NULL: not wanted
 */
void spw_gpu_head_backward(spw_gpu_queue *q, float *dx, float *dw, const act *x, const act *w, const int32_t *targets,
                           const float *weights, const float *sums, act *logits, uint64_t rows_per_chunk, uint64_t M,
                           uint64_t first, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags);

/*
 * spw_gpu_preference - weights of rows from the losses of both answers of each pair, by spw_preference_weigh().
 *   weights  (M) fp32 out  coef[k] for each row of answer k that has a target, 0 for its other rows; rows of no pair stay as they are
 *   losses   (M) fp32      of the rows, without weights
 *   pairs    (pair_count)  on the device; those whose end is 0 are passed over; rows of two pairs are not the same
 *   rule     host memory, read before the call returns
 * Sums are fp64, in an order that depends on the pair's rows alone.
 */
void spw_gpu_preference(spw_gpu_queue *q, float *weights, const float *losses, const int32_t *targets,
                        const spw_pair *pairs, uint64_t pair_count, const spw_preference *rule);

/*
 * Rows by their numbers, as bytes: take_rows  out[i] = in[rows[i]];  put_rows  out[rows[i]] = in[i], i < count, no row twice.
 *   rows  (count) int32 on the device; row_bytes: a multiple of 2
 */
void
spw_gpu_take_rows(spw_gpu_queue *q, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes);
void
spw_gpu_put_rows(spw_gpu_queue *q, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes);

/*
 * out[i] = sum of squares of elements 4096 i .. of x (fp32), fp64; order depends on n alone. out is host memory, and like
 * the sums of copies it is there once the queue has passed the call: after spw_gpu_queue_sync() or an event.
 */
void spw_gpu_sumsq(spw_gpu_queue *q, double *out, const float *x, uint64_t n);

/*
 * spw_gpu_orthogonalize - x (rows, cols) becomes scale_out times a matrix with its singular vectors whose singular values are near 1
 * (0.7 to 1.2 after 5 steps; smaller where they were below a thousandth of the sum of all squares' root).
 *   type   the device's compute type
 *   scale  1 / (the root of the sum of x's squares + something): singular values times it must not be above 1,
 *          and squares of it and of x must not leave fp32's range
 *   work   spw_gpu_orthogonal_bytes() of device memory
 *   steps  1 or more, each three of spw_gpu_product(): rounded to type after each
 * Source  Jordan et al. 2024, Muon (kellerjordan.github.io/posts/muon); Bernstein and Newhouse 2024 (2409.20325).
 */
void spw_gpu_orthogonalize(spw_gpu_queue *q, spw_dtype type, act *x, void *work, uint64_t rows, uint64_t cols,
                           float scale, uint32_t steps, float scale_out);
uint64_t spw_gpu_orthogonal_bytes(spw_dtype type, uint64_t rows, uint64_t cols);
double spw_gpu_orthogonal_flops(uint64_t rows, uint64_t cols, uint32_t steps);

/* ---------------------------------------------------------------- optimizers (any queue) */

/*
 * One step of an optimizer on a chunk of state in device memory, in place: the bits of spw_opt_step() in cpu_adam, whose words
 * and layouts these are. Only for devices that the host cannot address (info.host_addressable false); in memory that it can
 * address it updates by itself.
 */
typedef enum spw_gpu_rule {
    SPW_RULE_ADAM,
    SPW_RULE_ADAGRAD,
    SPW_RULE_LION,
    SPW_RULE_SGD,
    SPW_RULE_MUON, /* its second half, which does not scale gradients: grad_scale 1 */
    SPW_RULE_COUNT
} spw_gpu_rule;
typedef struct spw_gpu_update {
    spw_gpu_rule rule;
    spw_dtype weight_dtype, grad_dtype;
    uint32_t low_bytes;    /* of the record's master (4) or lo (2, 1), per element; 0: the weights are the master */
    uint32_t moment_bytes; /* 4: fp32, 2: bf16, 1: 8 bits in groups of 64 with a scale each */
    uint64_t elems;        /* (n) a multiple of 64 */
    void *weights;         /* (n) */
    void *record;          /* low, the rule's moments (Adam two, others one), then the scales of 8-bit groups */
    const void *grad;
    bool nearest;   /* moments in bf16 and scales are rounded to nearest, else stochastically by key */
    uint32_t key;   /* and the place of the first element among all, */
    uint64_t first; /* a multiple of 64 */
} spw_gpu_update;
/* Elements before end, and after those of the range before, take c: as the optimizer's prepare() makes it. */
typedef struct spw_gpu_update_range {
    uint64_t end;
    float grad_scale, c[8];
} spw_gpu_update_range;
/*
 * nonfinite (host memory, 0 by then) gets the number of scaled gradients that are not finite, once the queue has passed: by itself where
 * it lies in memory that was pinned (spw_gpu_pin_host), for a small copy's time where not. The last range ends at elems; ranges are
 * the caller's again on return.
 */
void spw_gpu_update_state(spw_gpu_queue *q, const spw_gpu_update *update, const spw_gpu_update_range *ranges,
                          uint32_t range_count, uint64_t *nonfinite);
/*
 * The first half of Muon's step, likewise with the bits of spw_opt_momentum(). Reads neither weights nor update->grad.
 *   grad     (elems) in/out, device memory; elems a multiple of 4096, in which at most 7 ranges end
 *   squares  (elems / 4096) host memory, as nonfinite is
 */
void spw_gpu_momentum(spw_gpu_queue *q, const spw_gpu_update *update, void *grad, const spw_gpu_update_range *ranges,
                      uint32_t range_count, double *squares, uint64_t *nonfinite);

#ifdef __cplusplus
}
#endif
#endif
