/*
 * Inside gpu: how several devices stand behind one header. Each fills a table with its own version of every function of
 * spw_gpu.h, and every object begins with the table of the device that made it; gpu.c looks there. One list of the names
 * makes the table, the devices' prototypes and their fillings, so that none can be forgotten.
 */
#ifndef SPW_GPU_INTERNAL_H
#define SPW_GPU_INTERNAL_H

#include "spw_gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* clang-format off */
#define SPW_GPU_CALLS(X) \
    X(close) X(get_info) X(check) X(alloc) X(free) X(work_bytes) X(product_bytes) X(bytes_live) \
    X(bytes_peak) X(pin_host) X(unpin_host) X(queue_create) X(queue_destroy) X(queue_sync) X(queue_notify) \
    X(span_begin) X(span_end) X(event_create) X(event_destroy) X(event_record) X(event_wait) X(event_sync) X(copy_h2d) X(copy_d2h) \
    X(copy_d2d) X(encode) X(decode) X(decode_h2d) X(write_bytes) X(read_bytes) X(zero) X(add) X(add_scaled) X(add_scaled_by) X(linear) X(linear_add) X(product) X(linear_gelu) X(linear_backward) X(linear_gelu_backward) X(fp8_scale) X(fp8_encode) X(fp8_product) \
    X(embedding) X(embedding_backward) X(layernorm) X(layernorm_backward) X(rmsnorm) X(rmsnorm_backward) \
    X(rope) X(copy_heads) X(sum_heads) X(attention) X(attention_backward) X(attention_cached) X(choose_keys) X(windows) X(compress) X(compress_backward) X(compress_cached) X(keep_windows) X(stream_maps) X(stream_maps_backward) X(mix) X(mix_backward) X(chunks) \
    X(conv) X(conv_backward) X(conv_cached) X(delta) X(delta_backward) X(delta_cached) X(curve) X(curve_backward) \
    X(gate_mul) X(gate_mul_backward) \
    X(route) X(route_backward) X(factors_backward) X(dispatch) X(combine) X(combine_backward) X(dispatch_piece) X(combine_piece) X(combine_backward_piece) X(close_sums) X(linear_each) X(linear_each_backward) X(transpose) X(transpose_sum) X(add_gated) X(add_gated_backward) X(soft_cap) X(dropout) X(linear_cross_entropy) X(head_see) X(head_losses) X(head_backward) X(preference) X(take_rows) X(put_rows) X(sumsq) \
    X(link_probe) X(link_id) X(link_create)
/* clang-format on */

typedef struct spw_gpu_calls {
    uint64_t abi; /* SPW_GPU_ABI of the headers it was built with */
    spw_status (*open)(spw_gpu **out, const spw_gpu_options *options, uint32_t device_idx, spw_error *err);
#define X(name) __typeof__(spw_gpu_##name) *name;
    SPW_GPU_CALLS(X)
#undef X
    /* NULL: the host addresses its memory, and updates there */
    __typeof__(spw_gpu_update_state) *update_state;
    __typeof__(spw_gpu_momentum) *momentum;
} spw_gpu_calls;

/* What a plugin and the program must agree on: raised when spw_gpu.h or the list changes in place; sizes catch the rest. */
#define SPW_GPU_ABI (25ull << 32 | sizeof(spw_gpu_calls) << 16 | (sizeof(spw_gpu_options) + sizeof(spw_gpu_info)))

/* Elements of gate's array for each of y. */
static inline uint64_t
spw__gate_step(spw_gate kind)
{
    return kind == SPW_GATE_CLAMPED ? 2 : 1;
}

/* Rows of expert i begin at *first; how many. */
static inline uint64_t
spw__each_rows(const spw_each *e, uint64_t i, uint64_t *first)
{
    *first = i > 0 ? e->ends[i - 1] : 0;
    return e->ends[i] - *first;
}

/* ---------------------------------------------------------------- cuda, whether it is here or planned for */

/*
 * Of a loss at a time. Each time the products read and write all of the head's gradient, 8 bytes for 6 operations a row; from a
 * few thousand rows on that takes less time than the operations do.
 */
enum { SPW_APART_LOSS_ROWS = 4096 };
/* The pinned ring of a queue, and what else it keeps in host memory at most. */
enum { SPW_APART_SLOTS = 32, SPW_APART_SLOT_BYTES = 64 << 10, SPW_APART_QUEUE_BYTES = 48 << 10 };

/* A compute queue and two for copies: a thread, a ring and its own memory each. */
static inline uint64_t
spw__apart_work_bytes(void)
{
    return 3 * (spw_touched_bytes(SPW_STACK_BYTES) + (uint64_t)SPW_APART_SLOTS * SPW_APART_SLOT_BYTES +
                SPW_APART_QUEUE_BYTES);
}

/*
 * The limit where none is given, of what is free. What is left is for what is not counted: kernels, which are loaded when they are first used,
 * and local memory; cuBLASLt's workspace, 32 MiB on every compute queue, and staging memory, up to 64 MiB on queues that convert; and NCCL's
 * communicators, hundreds of MiB each, which come after the plan.
 */
static inline uint64_t
spw__apart_limit_bytes(uint64_t free_bytes)
{
    const uint64_t reserve = 1ull << 30;
    return free_bytes > reserve * 2 ? free_bytes - reserve : free_bytes / 2;
}

/* What options->planned says; it computes nothing. */
spw_status spw__planned_open(spw_gpu **out, const spw_gpu_options *options, spw_error *err);

enum { SPW_GPU_ANY = 0xffffffff }; /* for open: the device that options->turn says */

/* What a link can do; only a device that makes links has such a table. */
typedef struct spw_gpu_link_calls {
    __typeof__(spw_gpu_link_destroy) *destroy;
    __typeof__(spw_gpu_link_all_gather) *all_gather;
    __typeof__(spw_gpu_link_swap) *swap;
    __typeof__(spw_gpu_link_sum) *sum;
    __typeof__(spw_gpu_link_wait) *wait;
} spw_gpu_link_calls;
struct spw_gpu_link {
    const spw_gpu_link_calls *calls;
};

/* How the objects of every device begin. */
struct spw_gpu {
    const spw_gpu_calls *calls;
};
struct spw_gpu_queue {
    const spw_gpu_calls *calls;
};
struct spw_gpu_event {
    const spw_gpu_calls *calls;
};

/* Of a device that has nothing better: each expert's product by itself. act_bytes: of an element of x and y. */
static inline void
spw__each_alone(spw_gpu_queue *q, act *y, const act *x, const spw_each *e, uint64_t act_bytes, unsigned flags)
{
    for (uint64_t i = 0; i < e->count; i++) {
        uint64_t first, n = spw__each_rows(e, i, &first), at = first * e->N * act_bytes;
        const act *of_x = (const char *)x + first * e->K * act_bytes, *b = e->b != NULL ? e->b[i] : NULL;
        if (n > 0 && e->onto != NULL)
            q->calls->linear_add(q, (char *)y + at, (const char *)e->onto + at, of_x, e->w[i], b, n, e->N, e->K, flags);
        else if (n > 0)
            q->calls->linear(q, (char *)y + at, of_x, e->w[i], b, n, e->N, e->K, flags);
    }
}

static inline void
spw__each_backward_alone(spw_gpu_queue *q, act *dx, const act *dy, const act *x, const spw_each *e, uint64_t act_bytes,
                         unsigned flags)
{
    for (uint64_t i = 0; i < e->count; i++) {
        uint64_t first, n = spw__each_rows(e, i, &first), at = first * e->K * act_bytes;
        if (n > 0)
            q->calls->linear_backward(q, dx != NULL ? (char *)dx + at : NULL, e->dw[i], e->db != NULL ? e->db[i] : NULL,
                                      (const char *)dy + first * e->N * act_bytes, (const char *)x + at, e->w[i], n,
                                      e->N, e->K, e->set[i] ? flags | SPW_OP_SET_DW : flags);
    }
}

extern const spw_gpu_calls spw__cpu_calls;
#define X(name) __typeof__(spw_gpu_##name) spw__cpu_##name;
SPW_GPU_CALLS(X)
#undef X

/* The table of the cuda plugin, opened at the first call and kept. Errors  SPW_EUNSUPPORTED, with where it was sought. */
spw_status spw__gpu_cuda_calls(const spw_gpu_calls **out, spw_error *err);
/* The one function that the plugin exports. */
typedef const spw_gpu_calls *(*spw_gpu_plugin_fn)(void);
#define SPW_GPU_PLUGIN_SYMBOL "spw_gpu_plugin"

#ifdef __cplusplus
}
#endif
#endif
