/*
 * The functions of spw_gpu.h: opening a device by its name, and for the rest one step to the device that made the object.
 */
#include "gpu_internal.h"
#include <stdlib.h>

/* "cuda" or "cuda:7". */
static bool
parse_cuda(const char *name, uint32_t *device_idx)
{
    unsigned long idx = SPW_GPU_ANY;
    char *end = NULL;
    if (strncmp(name, "cuda", 4) != 0)
        return false;
    if (name[4] == ':') {
        if (name[5] < '0' || name[5] > '9')
            return false;
        idx = strtoul(name + 5, &end, 10);
        if (*end != '\0' || idx > 1023)
            return false;
    } else if (name[4] != '\0') {
        return false;
    }
    *device_idx = (uint32_t)idx;
    return true;
}

static spw_status
open_cuda(spw_gpu **out, const spw_gpu_options *options, uint32_t device_idx, spw_error *err)
{
    const spw_gpu_calls *calls;
    SPW_TRY(spw__gpu_cuda_calls(&calls, err));
    return calls->open(out, options, device_idx, err);
}

spw_status
spw_gpu_open(spw_gpu **out, const spw_gpu_options *options, spw_error *err)
{
    const char *name = options->name != NULL ? options->name : "auto";
    uint32_t device_idx = SPW_GPU_ANY;
    *out = NULL;
    if (options->planned != NULL)
        return parse_cuda(name, &device_idx) || strcmp(name, "auto") == 0
                   ? spw__planned_open(out, options, err)
                   : SPW_RAISE(err, SPW_ECONFIG,
                               "device %s, and a plan for %s, a cuda device: spillway.device is cuda or auto then",
                               name, options->planned->title);
    if (parse_cuda(name, &device_idx)) {
        spw_status st = open_cuda(out, options, device_idx, err);
        if (st != SPW_OK)
            spw_error_wrap(err, "device %s", name);
        return st;
    }
    if (strcmp(name, "auto") == 0) {
        spw_error why = {SPW_OK, 0, ""};
        if (open_cuda(out, options, SPW_GPU_ANY, &why) == SPW_OK)
            return SPW_OK;
        spw_log(SPW_LOG_DEBUG, "device auto: cpu, because %s", why.message);
    } else if (strcmp(name, "cpu") != 0) {
        return SPW_RAISE(err, SPW_ECONFIG, "device %s is unknown: auto, cpu or cuda[:i]", name);
    }
    return spw__cpu_calls.open(out, options, 0, err);
}

void
spw_gpu_close(spw_gpu *gpu)
{
    if (gpu != NULL)
        gpu->calls->close(gpu);
}

const spw_gpu_info *
spw_gpu_get_info(const spw_gpu *gpu)
{
    return gpu->calls->get_info(gpu);
}

spw_status
spw_gpu_check(spw_gpu *gpu, spw_error *err)
{
    return gpu->calls->check(gpu, err);
}

spw_status
spw_gpu_alloc(spw_gpu *gpu, void **out, uint64_t bytes, spw_error *err)
{
    return gpu->calls->alloc(gpu, out, bytes, err);
}

void
spw_gpu_free(spw_gpu *gpu, void *p)
{
    gpu->calls->free(gpu, p);
}

uint64_t
spw_gpu_work_bytes(const spw_gpu *gpu)
{
    return gpu->calls->work_bytes(gpu);
}

uint64_t
spw_gpu_product_bytes(const spw_gpu *gpu, uint32_t thread_idx, uint64_t M, uint64_t N, uint64_t K)
{
    return gpu->calls->product_bytes(gpu, thread_idx, M, N, K);
}

uint64_t
spw_gpu_bytes_live(const spw_gpu *gpu)
{
    return gpu->calls->bytes_live(gpu);
}

uint64_t
spw_gpu_bytes_peak(const spw_gpu *gpu)
{
    return gpu->calls->bytes_peak(gpu);
}

spw_status
spw_gpu_pin_host(spw_gpu *gpu, void *base, uint64_t bytes, spw_error *err)
{
    return gpu->calls->pin_host(gpu, base, bytes, err);
}

void
spw_gpu_unpin_host(spw_gpu *gpu, void *base)
{
    gpu->calls->unpin_host(gpu, base);
}

spw_status
spw_gpu_queue_create(spw_gpu_queue **out, spw_gpu *gpu, spw_gpu_queue_kind kind, spw_error *err)
{
    return gpu->calls->queue_create(out, gpu, kind, err);
}

void
spw_gpu_queue_destroy(spw_gpu_queue *queue)
{
    if (queue != NULL)
        queue->calls->queue_destroy(queue);
}

void
spw_gpu_queue_sync(spw_gpu_queue *queue)
{
    queue->calls->queue_sync(queue);
}

void
spw_gpu_queue_notify(spw_gpu_queue *queue, void (*fn)(void *arg), void *arg)
{
    queue->calls->queue_notify(queue, fn, arg);
}

void
spw_gpu_span_begin(spw_gpu_queue *queue, const char *name)
{
    queue->calls->span_begin(queue, name);
}

void
spw_gpu_span_end(spw_gpu_queue *queue, uint64_t tag, spw_gpu_span_fn fn, void *arg)
{
    queue->calls->span_end(queue, tag, fn, arg);
}

spw_status
spw_gpu_event_create(spw_gpu_event **out, spw_gpu *gpu, spw_error *err)
{
    return gpu->calls->event_create(out, gpu, err);
}

void
spw_gpu_event_destroy(spw_gpu_event *event)
{
    if (event != NULL)
        event->calls->event_destroy(event);
}

void
spw_gpu_event_record(spw_gpu_event *event, spw_gpu_queue *queue)
{
    event->calls->event_record(event, queue);
}

void
spw_gpu_event_wait(spw_gpu_event *event, spw_gpu_queue *queue)
{
    event->calls->event_wait(event, queue);
}

void
spw_gpu_event_sync(spw_gpu_event *event)
{
    event->calls->event_sync(event);
}

void
spw_gpu_copy_h2d(spw_gpu_queue *queue, void *dst_device, spw_dtype dst_type, const void *src_host, spw_dtype src_type,
                 uint64_t n)
{
    queue->calls->copy_h2d(queue, dst_device, dst_type, src_host, src_type, n);
}

void
spw_gpu_copy_d2h(spw_gpu_queue *queue, void *dst_host, spw_dtype dst_type, const void *src_device, spw_dtype src_type,
                 uint64_t n, double *sumsq)
{
    queue->calls->copy_d2h(queue, dst_host, dst_type, src_device, src_type, n, sumsq);
}

void
spw_gpu_encode(spw_gpu_queue *queue, void *codes, spw_quant form, const void *src, spw_dtype type, uint64_t n)
{
    queue->calls->encode(queue, codes, form, src, type, n);
}

void
spw_gpu_decode(spw_gpu_queue *queue, void *dst, spw_dtype type, const void *codes, spw_quant form, uint64_t n)
{
    queue->calls->decode(queue, dst, type, codes, form, n);
}

void
spw_gpu_decode_h2d(spw_gpu_queue *queue, void *dst_device, spw_dtype type, const void *codes_host, spw_quant form,
                   uint64_t n)
{
    queue->calls->decode_h2d(queue, dst_device, type, codes_host, form, n);
}

void
spw_gpu_copy_d2d(spw_gpu_queue *queue, void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n,
                 double *sumsq)
{
    queue->calls->copy_d2d(queue, dst, dst_type, src, src_type, n, sumsq);
}

void
spw_gpu_write_bytes(spw_gpu_queue *queue, void *dst_device, const void *src_host, uint64_t bytes)
{
    queue->calls->write_bytes(queue, dst_device, src_host, bytes);
}

void
spw_gpu_read_bytes(spw_gpu_queue *queue, void *dst_host, const void *src_device, uint64_t bytes)
{
    queue->calls->read_bytes(queue, dst_host, src_device, bytes);
}

void
spw_gpu_zero(spw_gpu_queue *q, void *p, uint64_t bytes)
{
    q->calls->zero(q, p, bytes);
}

void
spw_gpu_add(spw_gpu_queue *q, act *y, const act *a, const act *b, uint64_t n)
{
    q->calls->add(q, y, a, b, n);
}

void
spw_gpu_add_scaled(spw_gpu_queue *q, act *y, const act *a, const act *b, float scale, uint64_t n)
{
    q->calls->add_scaled(q, y, a, b, scale, n);
}

void
spw_gpu_add_scaled_by(spw_gpu_queue *q, act *y, const act *a, const act *b, const act *terms, uint64_t n)
{
    q->calls->add_scaled_by(q, y, a, b, terms, n);
}

void
spw_gpu_linear(spw_gpu_queue *q, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N, uint64_t K,
               unsigned flags)
{
    q->calls->linear(q, y, x, w, b, M, N, K, flags);
}

void
spw_gpu_linear_add(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *w, const act *b, uint64_t M,
                   uint64_t N, uint64_t K, unsigned flags)
{
    q->calls->linear_add(q, y, onto, x, w, b, M, N, K, flags);
}

void
spw_gpu_product(spw_gpu_queue *q, act *y, const act *onto, float by, const act *x, const act *w, float scale,
                uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    q->calls->product(q, y, onto, by, x, w, scale, M, N, K, flags);
}

void
spw_gpu_linear_gelu(spw_gpu_queue *q, act *y, act *gelu_in, const act *x, const act *w, const act *b, uint64_t M,
                    uint64_t N, uint64_t K, unsigned flags)
{
    q->calls->linear_gelu(q, y, gelu_in, x, w, b, M, N, K, flags);
}

void
spw_gpu_linear_gelu_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x,
                             const act *gelu_in, const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    q->calls->linear_gelu_backward(q, dx, dw, db, dy, x, gelu_in, w, M, N, K, flags);
}

void
spw_gpu_fp8_scale(spw_gpu_queue *q, float *scale, spw_fp8 format, const act *x, uint64_t n)
{
    q->calls->fp8_scale(q, scale, format, x, n);
}

void
spw_gpu_fp8_encode(spw_gpu_queue *q, uint8_t *codes, uint8_t *turned, spw_fp8 format, const float *scale, const act *x,
                   uint64_t M, uint64_t N)
{
    q->calls->fp8_encode(q, codes, turned, format, scale, x, M, N);
}

void
spw_gpu_fp8_product(spw_gpu_queue *q, const spw_fp8_product *p)
{
    q->calls->fp8_product(q, p);
}

void
spw_gpu_linear_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *w,
                        uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    q->calls->linear_backward(q, dx, dw, db, dy, x, w, M, N, K, flags);
}

void
spw_gpu_embedding(spw_gpu_queue *q, act *y, const int32_t *ids, const act *table, uint64_t first, uint64_t M,
                  uint64_t V, uint64_t C, bool add)
{
    q->calls->embedding(q, y, ids, table, first, M, V, C, add);
}

void
spw_gpu_embedding_backward(spw_gpu_queue *q, float *dtable, const act *dy, const int32_t *ids, uint64_t first,
                           uint64_t M, uint64_t V, uint64_t C)
{
    q->calls->embedding_backward(q, dtable, dy, ids, first, M, V, C);
}

void
spw_gpu_layernorm(spw_gpu_queue *q, act *y, float *mean, float *rstd, const act *x, const act *g, const act *b,
                  uint64_t M, uint64_t C, float eps)
{
    q->calls->layernorm(q, y, mean, rstd, x, g, b, M, C, eps);
}

void
spw_gpu_layernorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, float *db, const act *dy,
                           const act *x, const act *g, const float *mean, const float *rstd, uint64_t M, uint64_t C)
{
    q->calls->layernorm_backward(q, dx, onto, dg, db, dy, x, g, mean, rstd, M, C);
}

void
spw_gpu_rmsnorm(spw_gpu_queue *q, act *y, float *rstd, const act *x, const act *g, float offset, uint64_t M, uint64_t C,
                uint64_t stride, float eps)
{
    q->calls->rmsnorm(q, y, rstd, x, g, offset, M, C, stride, eps);
}

void
spw_gpu_rmsnorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, const act *dy, const act *x,
                         const act *g, float offset, const float *rstd, uint64_t M, uint64_t C, uint64_t stride)
{
    q->calls->rmsnorm_backward(q, dx, onto, dg, dy, x, g, offset, rstd, M, C, stride);
}

void
spw_gpu_rope(spw_gpu_queue *q, act *x, uint64_t stride, const float *cos_sin, const int32_t *places, uint64_t M,
             uint64_t T, uint64_t H, uint64_t D, uint64_t R, bool neighbors, int sign)
{
    q->calls->rope(q, x, stride, cos_sin, places, M, T, H, D, R, neighbors, sign);
}

void
spw_gpu_copy_heads(spw_gpu_queue *q, act *y, uint64_t y_stride, uint64_t y_head, const act *x, uint64_t x_stride,
                   uint64_t x_head, uint64_t M, uint64_t H, uint64_t D)
{
    q->calls->copy_heads(q, y, y_stride, y_head, x, x_stride, x_head, M, H, D);
}

void
spw_gpu_sum_heads(spw_gpu_queue *q, act *y, uint64_t y_stride, const act *x, uint64_t x_stride, uint64_t x_head,
                  uint64_t M, uint64_t H, uint64_t D)
{
    q->calls->sum_heads(q, y, y_stride, x, x_stride, x_head, M, H, D);
}

/* With what 0 stands for. A window that holds everything is none; with a cache that is not known here. */
static spw_attention_shape
settled(const spw_attention_shape *shape, bool cached)
{
    spw_attention_shape s = *shape;
    s.Dv = s.Dv > 0 ? s.Dv : s.D;
    s.v_stride = s.v_stride > 0 ? s.v_stride : s.kv_stride;
    s.qk_head = s.qk_head > 0 ? s.qk_head : s.D;
    s.v_head = s.v_head > 0 ? s.v_head : s.Dv;
    SPW_ASSERT(s.Dv <= s.D && (s.chosen == NULL || s.cap <= 0));
    SPW_ASSERT(s.front == 0 || (s.front_each > 0 && s.cap <= 0 && s.Hk == 1 && (!cached || s.begins == NULL)));
    SPW_ASSERT(!cached || s.front % SPW_FRONT_TILE == 0);
    SPW_ASSERT(s.front == 0 || (s.begins != NULL) == (s.front_rows != NULL));
    if (!cached && s.window >= s.T)
        s.window = 0;
    return s;
}

void
spw_gpu_attention(spw_gpu_queue *q, act *out, float *lse, const act *query, const act *key, const act *value,
                  const spw_attention_shape *shape)
{
    spw_attention_shape s = settled(shape, false);
    q->calls->attention(q, out, lse, query, key, value, &s);
}

void
spw_gpu_attention_backward(spw_gpu_queue *q, act *dquery, act *dkey, act *dvalue, float *dsinks, const act *dout,
                           const act *out, const float *lse, const act *query, const act *key, const act *value,
                           const spw_attention_shape *shape)
{
    spw_attention_shape s = settled(shape, false);
    q->calls->attention_backward(q, dquery, dkey, dvalue, dsinks, dout, out, lse, query, key, value, &s);
}

uint64_t
spw_gpu_choose_scratch(const spw_choice_shape *shape)
{
    return shape->B * shape->T * shape->words * 32;
}

void
spw_gpu_choose_keys(spw_gpu_queue *q, uint32_t *bits, const act *query, act *key, const act *new_key,
                    const act *weights, float *scratch, const spw_choice_shape *shape)
{
    spw_choice_shape whole = *shape, *s = &whole;
    s->each = s->each > 0 ? s->each : 1;
    s->key_rows = s->each > 1 ? s->key_rows : s->T;
    SPW_ASSERT(s->D <= SPW_CHOICE_DIM_MAX && s->keys > 0 && (s->first == 0 || s->B == 1));
    SPW_ASSERT(s->words * 32 >= (s->starts != NULL ? s->capacity : (s->first + s->T) / s->each));
    SPW_ASSERT((s->starts != NULL || new_key == NULL) && (s->starts == NULL) == (s->slots == NULL));
    SPW_ASSERT(s->starts == NULL || s->begins == NULL);
    q->calls->choose_keys(q, bits, query, key, new_key, weights, scratch, s);
}

void
spw_gpu_windows(spw_gpu_queue *q, int32_t *firsts, const int32_t *begins, const int32_t *starts, uint64_t B, uint64_t T,
                uint64_t rate)
{
    SPW_ASSERT(rate > 0 && (begins == NULL || starts == NULL));
    q->calls->windows(q, firsts, begins, starts, B, T, rate);
}

void
spw_gpu_compress(spw_gpu_queue *q, act *y, const act *kv, const act *gate, const act *bias,
                 const spw_compress_shape *shape)
{
    SPW_ASSERT(shape->rate > 0 && (shape->begins != NULL) == (shape->firsts != NULL));
    q->calls->compress(q, y, kv, gate, bias, shape);
}

void
spw_gpu_compress_backward(spw_gpu_queue *q, act *dkv, act *dgate, float *dbias, const act *dy, const act *kv,
                          const act *gate, const act *bias, const spw_compress_shape *shape)
{
    SPW_ASSERT(shape->rate > 0 && (shape->begins != NULL) == (shape->firsts != NULL));
    q->calls->compress_backward(q, dkv, dgate, dbias, dy, kv, gate, bias, shape);
}

void
spw_gpu_compress_cached(spw_gpu_queue *q, act *y, const act *kv, const act *gate, const act *bias,
                        const spw_window_cache *cache, const spw_compress_shape *shape)
{
    SPW_ASSERT(shape->rate > 0 && shape->begins == NULL && shape->firsts != NULL);
    q->calls->compress_cached(q, y, kv, gate, bias, cache, shape);
}

void
spw_gpu_keep_windows(spw_gpu_queue *q, act *keys, uint64_t capacity, const act *y, const spw_window_cache *cache,
                     const spw_compress_shape *shape)
{
    SPW_ASSERT(shape->rate > 0 && shape->firsts != NULL);
    q->calls->keep_windows(q, keys, capacity, y, cache, shape);
}

static void
check_streams(const spw_streams *s)
{
    SPW_ASSERT(s->n > 0 && s->n <= SPW_STREAMS_MAX && (s->head || (s->rounds > 0 && s->rounds <= SPW_ROUNDS_MAX)));
}

void
spw_gpu_stream_maps(spw_gpu_queue *q, act *maps, const act *mixes, const act *scale, const act *base,
                    const spw_streams *s)
{
    check_streams(s);
    q->calls->stream_maps(q, maps, mixes, scale, base, s);
}

void
spw_gpu_stream_maps_backward(spw_gpu_queue *q, act *dmixes, float *dscale, float *dbase, const act *dmaps,
                             const act *mixes, const act *scale, const act *base, const spw_streams *s)
{
    check_streams(s);
    q->calls->stream_maps_backward(q, dmixes, dscale, dbase, dmaps, mixes, scale, base, s);
}

void
spw_gpu_mix(spw_gpu_queue *q, act *y, const act *h, const act *x, const act *maps, const spw_streams *s)
{
    SPW_ASSERT(s->n > 0 && s->n <= SPW_STREAMS_MAX && (h == NULL || !s->head));
    q->calls->mix(q, y, h, x, maps, s);
}

void
spw_gpu_mix_backward(spw_gpu_queue *q, act *dh, act *dx, act *dmaps, const act *dy, const act *h, const act *x,
                     const act *maps, const spw_streams *s, unsigned flags)
{
    SPW_ASSERT(s->n > 0 && s->n <= SPW_STREAMS_MAX && (h != NULL || dh == NULL) && (h == NULL || !s->head));
    q->calls->mix_backward(q, dh, dx, dmaps, dy, h, x, maps, s, flags);
}

void
spw_gpu_chunks(spw_gpu_queue *q, int32_t *to_begins, int32_t *to_ends, const int32_t *begins, const int32_t *ends,
               const int32_t *starts, uint64_t B, uint64_t T, uint64_t chunk)
{
    SPW_ASSERT(chunk > 0 && (begins != NULL) == (ends != NULL) &&
               (starts == NULL || (to_ends == NULL && begins == NULL)));
    q->calls->chunks(q, to_begins, to_ends, begins, ends, starts, B, T, chunk);
}

void
spw_gpu_attention_cached(spw_gpu_queue *q, act *out, const act *query, const act *new_key, const act *new_value,
                         const spw_attention_cache *cache, const spw_attention_shape *shape)
{
    spw_attention_shape s = settled(shape, true);
    q->calls->attention_cached(q, out, query, new_key, new_value, cache, &s);
}

static void
check_conv(const spw_conv_shape *s)
{
    SPW_ASSERT(s->K > 0 && s->K <= SPW_TAPS_MAX && (s->stride == 0 || s->stride >= s->C));
    SPW_ASSERT((s->begins != NULL) == (s->ends != NULL));
}

static spw_conv_shape
strided(const spw_conv_shape *shape)
{
    spw_conv_shape s = *shape;
    s.stride = s.stride > 0 ? s.stride : s.C;
    return s;
}

void
spw_gpu_conv(spw_gpu_queue *q, act *y, const act *x, const act *w, const spw_conv_shape *shape)
{
    spw_conv_shape s = strided(shape);
    check_conv(shape);
    q->calls->conv(q, y, x, w, &s);
}

void
spw_gpu_conv_backward(spw_gpu_queue *q, act *dx, float *dw, float *dbias, const act *dy, const act *x, const act *w,
                      const spw_conv_shape *shape, unsigned flags)
{
    spw_conv_shape s = strided(shape);
    check_conv(shape);
    q->calls->conv_backward(q, dx, dw, dbias, dy, x, w, &s, flags);
}

void
spw_gpu_conv_cached(spw_gpu_queue *q, act *y, const act *x, const act *w, const spw_delta_cache *cache,
                    const spw_conv_shape *shape)
{
    spw_conv_shape s = strided(shape);
    check_conv(shape);
    SPW_ASSERT(shape->begins == NULL);
    q->calls->conv_cached(q, y, x, w, cache, &s);
}

static void
check_delta(const spw_delta_shape *s)
{
    SPW_ASSERT(s->Hk > 0 && s->Hv % s->Hk == 0 && s->Dk % 8 == 0 && s->Dv % 8 == 0);
    SPW_ASSERT(s->Dk <= SPW_DELTA_DIM_MAX && s->Dv <= SPW_DELTA_DIM_MAX);
    SPW_ASSERT((s->begins != NULL) == (s->ends != NULL));
    SPW_ASSERT(s->mamba ? s->beta_most == 0 && !s->channels : s->step_least == 0);
}

void
spw_gpu_delta(spw_gpu_queue *q, act *out, float *delta, const spw_delta_inputs *in, const spw_delta_shape *shape)
{
    check_delta(shape);
    SPW_ASSERT(!shape->mamba || delta == NULL);
    q->calls->delta(q, out, delta, in, shape);
}

static uint64_t
delta_heads_each(const spw_delta_shape *s)
{
    return s->heads_each > 0 && s->heads_each < s->Hk ? s->heads_each : s->Hk;
}

/*
 * The gradients of delta, of a head's queries, and of its keys by what wrote the state and by what read it; then three numbers of each row and
 * head. Of Mamba-2 nothing reads, and there are two more numbers. With channels the three numbers are of each of them, in the place of those gradients, and there are their decays.
 */
uint64_t
spw_gpu_delta_scratch(const spw_delta_shape *shape)
{
    uint64_t heads = delta_heads_each(shape) * (shape->Hv / shape->Hk);
    const uint64_t each = shape->mamba ? 2 * shape->Dk + 5 : shape->channels ? 4 * shape->Dk : 3 * shape->Dk + 3;
    return shape->B * shape->T * heads * (shape->Dv + each);
}

void
spw_gpu_delta_backward(spw_gpu_queue *q, act *dqkv, act *da, act *db, float *dlog_a, float *ddt_bias, float *dskip,
                       const act *dout, const float *delta, float *scratch, const spw_delta_inputs *in,
                       const spw_delta_shape *shape)
{
    spw_delta_shape s = *shape;
    check_delta(shape);
    s.heads_each = delta_heads_each(shape);
    q->calls->delta_backward(q, dqkv, da, db, dlog_a, ddt_bias, dskip, dout, delta, scratch, in, &s);
}

void
spw_gpu_delta_cached(spw_gpu_queue *q, act *out, const spw_delta_inputs *in, const spw_delta_cache *cache,
                     const spw_delta_shape *shape)
{
    check_delta(shape);
    SPW_ASSERT(shape->begins == NULL);
    q->calls->delta_cached(q, out, in, cache, shape);
}

void
spw_gpu_curve(spw_gpu_queue *q, spw_curve kind, act *y, const act *x, uint64_t n)
{
    q->calls->curve(q, kind, y, x, n);
}

void
spw_gpu_curve_backward(spw_gpu_queue *q, spw_curve kind, act *dx, const act *dy, const act *x, uint64_t n,
                       unsigned flags)
{
    q->calls->curve_backward(q, kind, dx, dy, x, n, flags);
}

void
spw_gpu_gate_mul(spw_gpu_queue *q, spw_gate kind, act *y, const act *gate, const act *up, uint64_t M, uint64_t C,
                 uint64_t stride)
{
    bool dense = stride == C * spw__gate_step(kind); /* one row, then, that can be cut anywhere */
    q->calls->gate_mul(q, kind, y, gate, up, dense ? 1 : M, dense ? M * C : C, stride);
}

void
spw_gpu_gate_mul_backward(spw_gpu_queue *q, spw_gate kind, act *dgate, act *dup, const act *dy, const act *gate,
                          const act *up, uint64_t M, uint64_t C, uint64_t stride, unsigned flags)
{
    bool dense = stride == C * spw__gate_step(kind);
    q->calls->gate_mul_backward(q, kind, dgate, dup, dy, gate, up, dense ? 1 : M, dense ? M * C : C, stride, flags);
}

void
spw_gpu_route(spw_gpu_queue *q, const spw_routing *r, const act *logits, const spw_routing_rule *rule)
{
    q->calls->route(q, r, logits, rule);
}

void
spw_gpu_route_backward(spw_gpu_queue *q, act *dlogits, const float *dweights, const act *logits, const spw_routing *r,
                       const spw_routing_rule *rule, float balance, unsigned flags)
{
    q->calls->route_backward(q, dlogits, dweights, logits, r, rule, balance, flags);
}

void
spw_gpu_factors_backward(spw_gpu_queue *q, float *dfactors, const float *dweights, const spw_routing *r)
{
    q->calls->factors_backward(q, dfactors, dweights, r);
}

void
spw_gpu_dispatch(spw_gpu_queue *q, act *y, const act *x, const spw_routing *r, uint64_t C)
{
    q->calls->dispatch(q, y, x, r, C);
}

void
spw_gpu_linear_each(spw_gpu_queue *q, act *y, const act *x, const spw_each *e, unsigned flags)
{
    SPW_ASSERT(e->onto == NULL || (e->onto == y) == ((flags & SPW_OP_BY_ROW) == 0));
    q->calls->linear_each(q, y, x, e, flags);
}

void
spw_gpu_linear_each_backward(spw_gpu_queue *q, act *dx, const act *dy, const act *x, const spw_each *e, unsigned flags)
{
    q->calls->linear_each_backward(q, dx, dy, x, e, flags);
}

void
spw_gpu_transpose(spw_gpu_queue *q, act *y, const act *x, float scale, uint64_t M, uint64_t N)
{
    q->calls->transpose(q, y, x, scale, M, N);
}

void
spw_gpu_transpose_sum(spw_gpu_queue *q, float *y, const float *x, float scale, uint64_t M, uint64_t N)
{
    q->calls->transpose_sum(q, y, x, scale, M, N);
}

void
spw_gpu_combine(spw_gpu_queue *q, act *y, const act *onto, const act *x, const spw_routing *r, bool weighted, bool down,
                uint64_t C)
{
    q->calls->combine(q, y, onto, x, r, weighted, down, C);
}

void
spw_gpu_close_sums(spw_gpu_queue *q, act *y, const float *sums, const act *onto, uint64_t M, uint64_t C)
{
    q->calls->close_sums(q, y, sums, onto, M, C);
}

void
spw_gpu_combine_backward(spw_gpu_queue *q, act *dx, float *dweights, const act *dy, const act *x, const spw_routing *r,
                         uint64_t C)
{
    q->calls->combine_backward(q, dx, dweights, dy, x, r, C);
}

void
spw_gpu_dispatch_piece(spw_gpu_queue *q, act *y, const act *x, const spw_routing *r, uint64_t first, uint64_t rows,
                       uint64_t C)
{
    SPW_ASSERT(first + rows <= r->M * r->k);
    q->calls->dispatch_piece(q, y, x, r, first, rows, C);
}

void
spw_gpu_combine_piece(spw_gpu_queue *q, float *sum, const act *x, const spw_routing *r, bool weighted, bool down,
                      uint64_t first, uint64_t rows, uint64_t C)
{
    SPW_ASSERT(first + rows <= r->M * r->k);
    q->calls->combine_piece(q, sum, x, r, weighted, down, first, rows, C);
}

void
spw_gpu_combine_backward_piece(spw_gpu_queue *q, act *dx, float *dweights, const act *dy, const act *x,
                               const spw_routing *r, uint64_t first, uint64_t rows, uint64_t C)
{
    SPW_ASSERT(first + rows <= r->M * r->k);
    q->calls->combine_backward_piece(q, dx, dweights, dy, x, r, first, rows, C);
}

void
spw_gpu_add_gated(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *gate, uint64_t M, uint64_t C)
{
    q->calls->add_gated(q, y, onto, x, gate, M, C);
}

void
spw_gpu_add_gated_backward(spw_gpu_queue *q, act *dx, act *dgate, const act *dy, const act *x, const act *gate,
                           uint64_t M, uint64_t C)
{
    q->calls->add_gated_backward(q, dx, dgate, dy, x, gate, M, C);
}

void
spw_gpu_soft_cap(spw_gpu_queue *q, act *y, const act *x, float cap, uint64_t n)
{
    q->calls->soft_cap(q, y, x, cap, n);
}

void
spw_gpu_dropout(spw_gpu_queue *q, act *y, const act *x, uint64_t n, float p, uint64_t key, uint64_t counter_hi,
                uint64_t first)
{
    q->calls->dropout(q, y, x, n, p, key, counter_hi, first);
}

void
spw_gpu_linear_cross_entropy(spw_gpu_queue *q, float *losses, act *dx, float *dw, const act *x, const act *w,
                             const int32_t *targets, const float *weights, act *logits, uint64_t rows_per_chunk,
                             uint64_t M, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    q->calls->linear_cross_entropy(q, losses, dx, dw, x, w, targets, weights, logits, rows_per_chunk, M, V, C,
                                   grad_scale, cap, flags);
}

void
spw_gpu_head_see(spw_gpu_queue *q, float *sums, const act *x, const act *w, const int32_t *targets, act *logits,
                 uint64_t rows_per_chunk, uint64_t M, uint64_t first, uint64_t V, uint64_t C, float cap)
{
    SPW_ASSERT(V > 0 && (M == 0 || rows_per_chunk > 0));
    q->calls->head_see(q, sums, x, w, targets, logits, rows_per_chunk, M, first, V, C, cap);
}

void
spw_gpu_head_losses(spw_gpu_queue *q, float *losses, const float *sums, const int32_t *targets, uint64_t M)
{
    q->calls->head_losses(q, losses, sums, targets, M);
}

void
spw_gpu_head_backward(spw_gpu_queue *q, float *dx, float *dw, const act *x, const act *w, const int32_t *targets,
                      const float *weights, const float *sums, act *logits, uint64_t rows_per_chunk, uint64_t M,
                      uint64_t first, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    SPW_ASSERT(V > 0 && (M == 0 || rows_per_chunk > 0));
    q->calls->head_backward(q, dx, dw, x, w, targets, weights, sums, logits, rows_per_chunk, M, first, V, C, grad_scale,
                            cap, flags);
}

void
spw_gpu_preference(spw_gpu_queue *q, float *weights, const float *losses, const int32_t *targets, const spw_pair *pairs,
                   uint64_t pair_count, const spw_preference *rule)
{
    SPW_ASSERT(rule->kind < SPW_PREFERENCE_COUNT && rule->beta > 0);
    q->calls->preference(q, weights, losses, targets, pairs, pair_count, rule);
}

void
spw_gpu_take_rows(spw_gpu_queue *q, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes)
{
    SPW_ASSERT(row_bytes > 0 && row_bytes % 2 == 0);
    q->calls->take_rows(q, out, in, rows, count, row_bytes);
}

void
spw_gpu_put_rows(spw_gpu_queue *q, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes)
{
    SPW_ASSERT(row_bytes > 0 && row_bytes % 2 == 0);
    q->calls->put_rows(q, out, in, rows, count, row_bytes);
}

void
spw_gpu_sumsq(spw_gpu_queue *q, double *out, const float *x, uint64_t n)
{
    q->calls->sumsq(q, out, x, n);
}

void
spw_gpu_update_state(spw_gpu_queue *q, const spw_gpu_update *update, const spw_gpu_update_range *ranges,
                     uint32_t range_count, uint64_t *nonfinite)
{
    SPW_ASSERT(q->calls->update_state != NULL);
    q->calls->update_state(q, update, ranges, range_count, nonfinite);
}

void
spw_gpu_momentum(spw_gpu_queue *q, const spw_gpu_update *update, void *grad, const spw_gpu_update_range *ranges,
                 uint32_t range_count, double *squares, uint64_t *nonfinite)
{
    SPW_ASSERT(q->calls->momentum != NULL);
    q->calls->momentum(q, update, grad, ranges, range_count, squares, nonfinite);
}

/* ---------------------------------------------------------------- links */

spw_status
spw_gpu_link_probe(spw_gpu *gpu, spw_error *err)
{
    return gpu->calls->link_probe(gpu, err);
}

spw_status
spw_gpu_link_id(spw_gpu *gpu, unsigned char *id, spw_error *err)
{
    return gpu->calls->link_id(gpu, id, err);
}

spw_status
spw_gpu_link_create(spw_gpu_link **out, spw_gpu *gpu, const unsigned char *id, uint32_t rank, uint32_t world,
                    spw_gpu_going going, void *ctx, spw_error *err)
{
    return gpu->calls->link_create(out, gpu, id, rank, world, going, ctx, err);
}

void
spw_gpu_link_destroy(spw_gpu_link *link, bool together)
{
    if (link != NULL)
        link->calls->destroy(link, together);
}

spw_status
spw_gpu_link_all_gather(spw_gpu_link *link, spw_gpu_queue *queue, void *buf, uint64_t part_bytes, spw_error *err)
{
    return link->calls->all_gather(link, queue, buf, part_bytes, err);
}

spw_status
spw_gpu_link_swap(spw_gpu_link *link, spw_gpu_queue *queue, const void *send, uint64_t send_stride, void *recv,
                  uint64_t recv_stride, uint64_t bytes, spw_error *err)
{
    return link->calls->swap(link, queue, send, send_stride, recv, recv_stride, bytes, err);
}

void
spw_gpu_link_sum(spw_gpu_link *link, spw_gpu_queue *queue, float *out, spw_dtype type, const void *own,
                 const void *parts, uint64_t stride, const float *before, uint64_t n)
{
    link->calls->sum(link, queue, out, type, own, parts, stride, before, n);
}

spw_status
spw_gpu_link_wait(spw_gpu_link *link, spw_gpu_queue *queue, spw_error *err)
{
    return link->calls->wait(link, queue, err);
}
