/*
 * State formats: how the master weights and the moments of one chunk lie in its weights and its record, and how to
 * read or write one part of them as fp32. Used at initialisation and for checkpoints; the step has its own loops over
 * the same layouts.
 */
#include "cpu_adam_internal.h"

/* The record is low (master or lo), then the moments, then their scales. */
const spw__state_layout spw__state_layouts[SPW_STATE_COUNT] = {
    [SPW_STATE_FP32] = {"fp32", SPW_F32, 0, SPW__MOMENT_F32},
    [SPW_STATE_MIXED] = {"mixed", SPW_BF16, 4, SPW__MOMENT_F32},
    [SPW_STATE_SPLIT] = {"split", SPW_BF16, 2, SPW__MOMENT_F32},
    [SPW_STATE_MIXED_F16] = {"mixed-fp16", SPW_F16, 4, SPW__MOMENT_F32},
    [SPW_STATE_SPLIT_BF16] = {"split-bf16", SPW_BF16, 2, SPW__MOMENT_BF16},
    [SPW_STATE_SPLIT_INT8] = {"split-int8", SPW_BF16, 2, SPW__MOMENT_INT8},
    [SPW_STATE_SPLIT24_INT8] = {"split24-int8", SPW_BF16, 1, SPW__MOMENT_INT8},
};
static const uint32_t code_bytes[] = {[SPW__MOMENT_F32] = 4, [SPW__MOMENT_BF16] = 2, [SPW__MOMENT_INT8] = 1};

const char *
spw_state_name(spw_state_format f)
{
    return (unsigned)f < SPW_STATE_COUNT ? spw__state_layouts[f].name : "unknown";
}

bool
spw_state_parse(const char *name, spw_state_format *out)
{
    for (int i = 0; name != NULL && i < SPW_STATE_COUNT; i++) {
        if (strcmp(name, spw__state_layouts[i].name) == 0) {
            *out = (spw_state_format)i;
            return true;
        }
    }
    return false;
}

spw_dtype
spw_state_weight_dtype(spw_state_format f)
{
    return spw__state_layouts[f].weight_dtype;
}

uint32_t
spw_state_weight_bytes(spw_state_format f)
{
    return spw_dtype_bytes(spw__state_layouts[f].weight_dtype);
}

uint64_t
spw_state_record_bytes(spw_state_format f, const spw_optimizer *o, uint64_t elems)
{
    const spw__state_layout *l = &spw__state_layouts[f];
    uint64_t scales = l->code == SPW__MOMENT_INT8 ? elems / SPW_STATE_GROUP * 2 : 0;
    SPW_ASSERT(elems % SPW_STATE_GROUP == 0);
    return elems * l->low_bytes + o->moment_count * (elems * code_bytes[l->code] + scales);
}

uint32_t
spw_state_record_bytes_32(spw_state_format f, const spw_optimizer *o)
{
    return (uint32_t)(spw_state_record_bytes(f, o, SPW_STATE_GROUP) * 32 / SPW_STATE_GROUP);
}

uint32_t
spw_state_record_parts(spw_state_format f, const spw_optimizer *o, uint32_t parts[SPW_STATE_PARTS_MAX])
{
    const spw__state_layout *l = &spw__state_layouts[f];
    uint32_t count = 0;
    if (l->low_bytes > 0)
        parts[count++] = 32 * l->low_bytes;
    for (uint32_t k = 0; k < o->moment_count; k++)
        parts[count++] = 32 * code_bytes[l->code];
    for (uint32_t k = 0; k < o->moment_count && l->code == SPW__MOMENT_INT8; k++)
        parts[count++] = 32 * 2 / SPW_STATE_GROUP;
    return count;
}

uint32_t
spw_state_low_bytes(spw_state_format f)
{
    return spw__state_layouts[f].low_bytes;
}

uint32_t
spw_state_moment_bytes(spw_state_format f)
{
    return code_bytes[spw__state_layouts[f].code];
}

bool
spw_state_update_reads_weights(spw_state_format f)
{
    return f != SPW_STATE_MIXED && f != SPW_STATE_MIXED_F16;
}

bool
spw_state_exact(spw_state_format f)
{
    return spw__state_layouts[f].code == SPW__MOMENT_F32;
}

void *
spw__state_moment(spw_state_format f, const spw_optimizer *o, void *record, uint64_t chunk_elems, uint32_t k)
{
    const spw__state_layout *l = &spw__state_layouts[f];
    SPW_ASSERT(k < o->moment_count);
    (void)o;
    return (char *)record + chunk_elems * (l->low_bytes + k * code_bytes[l->code]);
}

uint16_t *
spw__state_scales(spw_state_format f, const spw_optimizer *o, void *record, uint64_t chunk_elems, uint32_t k)
{
    const spw__state_layout *l = &spw__state_layouts[f];
    char *r = record;
    if (l->code != SPW__MOMENT_INT8)
        return NULL;
    r += chunk_elems * (l->low_bytes + o->moment_count);
    return (uint16_t *)(void *)(r + k * (chunk_elems / SPW_STATE_GROUP * 2));
}

void
spw_split_f32(float master, uint16_t *hi, int16_t *lo)
{
    spw__split(master, hi, lo);
}

float
spw_join_f32(uint16_t hi, int16_t lo)
{
    return spw__join(hi, lo);
}

/* ---------------------------------------------------------------- one part as fp32 */

static void
moment_get(spw_state_format f, const spw_optimizer *o, const void *record, uint64_t chunk_elems, uint32_t k,
           uint64_t first, uint64_t n, float *out)
{
    const spw__opt_table *t = &spw__opt_table_ref;
    /* The layout's functions serve both directions; nothing is written here. */
    const char *m = spw__state_moment(f, o, (void *)(uintptr_t)record, chunk_elems, k);
    const uint16_t *scales = spw__state_scales(f, o, (void *)(uintptr_t)record, chunk_elems, k);
    switch (spw__state_layouts[f].code) {
    case SPW__MOMENT_F32: memcpy(out, m + first * 4, n * 4); break;
    case SPW__MOMENT_BF16: t->load_bf16(out, (const uint16_t *)(const void *)m + first, (uint32_t)n); break;
    default:
        for (uint64_t i = first; i < first + n;) {
            float group[SPW_STATE_GROUP];
            uint64_t g = i / SPW_STATE_GROUP, at = g * SPW_STATE_GROUP, end = at + SPW_STATE_GROUP;
            if (o->moment_unsigned[k])
                t->load_uint8(group, (const uint8_t *)m + at, scales + g, SPW_STATE_GROUP);
            else
                t->load_int8(group, (const int8_t *)m + at, scales + g, SPW_STATE_GROUP);
            for (; i < end && i < first + n; i++)
                out[i - first] = group[i - at];
        }
        break;
    }
}

static void
moment_set(spw_state_format f, const spw_optimizer *o, void *record, uint64_t chunk_elems, uint32_t k, uint64_t first,
           uint64_t n, const float *in)
{
    const spw__opt_table *t = &spw__opt_table_ref;
    char *m = spw__state_moment(f, o, record, chunk_elems, k);
    uint16_t *scales = spw__state_scales(f, o, record, chunk_elems, k);
    switch (spw__state_layouts[f].code) {
    case SPW__MOMENT_F32: memcpy(m + first * 4, in, n * 4); break;
    case SPW__MOMENT_BF16: t->store_bf16((uint16_t *)(void *)m + first, in, (uint32_t)n); break;
    default:
        for (uint64_t i = first; i < first + n;) {
            float group[SPW_STATE_GROUP];
            uint64_t g = i / SPW_STATE_GROUP, at = g * SPW_STATE_GROUP, end = at + SPW_STATE_GROUP;
            if (i > at || end > first + n) /* the rest of the group stays */
                moment_get(f, o, record, chunk_elems, k, at, SPW_STATE_GROUP, group);
            for (; i < end && i < first + n; i++)
                group[i - at] = in[i - first];
            if (o->moment_unsigned[k])
                t->store_uint8((uint8_t *)m + at, scales + g, group, SPW_STATE_GROUP, NULL);
            else
                t->store_int8((int8_t *)m + at, scales + g, group, SPW_STATE_GROUP, NULL);
        }
        break;
    }
}

void
spw_state_get(spw_state_format f, const spw_optimizer *o, const void *weights, const void *record, uint64_t chunk_elems,
              spw_state_part part, uint64_t first, uint64_t n, float *out)
{
    const spw__opt_table *t = &spw__opt_table_ref;
    SPW_ASSERT(first <= chunk_elems && n <= chunk_elems - first);
    if (n == 0)
        return;
    if (part != SPW_PART_MASTER)
        moment_get(f, o, record, chunk_elems, part == SPW_PART_EXP_AVG ? 0 : 1, first, n, out);
    else if (record == NULL)
        spw_convert(out, SPW_F32, (const char *)weights + first * spw_state_weight_bytes(f), spw_state_weight_dtype(f),
                    n);
    else if (f == SPW_STATE_FP32)
        memcpy(out, (const float *)weights + first, n * 4);
    else if (!spw_state_update_reads_weights(f))
        memcpy(out, (const float *)record + first, n * 4);
    else if (spw__state_layouts[f].low_bytes == 1)
        t->load_split24(out, (const uint16_t *)weights + first, (const int8_t *)record + first, (uint32_t)n);
    else
        t->load_split(out, (const uint16_t *)weights + first, (const int16_t *)record + first, (uint32_t)n);
}

/* Weights without a record, rounded as those with one: what would go to the record is thrown away. */
static void
set_weights(spw_state_format f, void *weights, uint64_t first, uint64_t n, const float *in)
{
    const spw__opt_table *t = &spw__opt_table_ref;
    int16_t low[256];
    for (uint64_t i = 0; i < n; i += 256) {
        uint32_t part = n - i < 256 ? (uint32_t)(n - i) : 256;
        uint16_t *to = (uint16_t *)weights + first + i;
        if (f == SPW_STATE_MIXED)
            t->store_bf16(to, in + i, part);
        else if (!spw_state_update_reads_weights(f))
            spw_convert(to, SPW_F16, in + i, SPW_F32, part);
        else if (spw__state_layouts[f].low_bytes == 1)
            t->store_split24(to, (int8_t *)(void *)low, in + i, part);
        else
            t->store_split(to, low, in + i, part);
    }
}

void
spw_state_set(spw_state_format f, const spw_optimizer *o, void *weights, void *record, uint64_t chunk_elems,
              spw_state_part part, uint64_t first, uint64_t n, const float *in)
{
    const spw__opt_table *t = &spw__opt_table_ref;
    SPW_ASSERT(first <= chunk_elems && n <= chunk_elems - first);
    if (n == 0)
        return;
    if (part != SPW_PART_MASTER) {
        moment_set(f, o, record, chunk_elems, part == SPW_PART_EXP_AVG ? 0 : 1, first, n, in);
    } else if (f == SPW_STATE_FP32) {
        memcpy((float *)weights + first, in, n * 4);
    } else if (record == NULL) {
        set_weights(f, weights, first, n, in);
    } else if (!spw_state_update_reads_weights(f)) {
        memcpy((float *)record + first, in, n * 4);
        if (f == SPW_STATE_MIXED)
            t->store_bf16((uint16_t *)weights + first, in, (uint32_t)n);
        else
            spw_convert((uint16_t *)weights + first, SPW_F16, in, SPW_F32, n);
    } else if (spw__state_layouts[f].low_bytes == 1) {
        t->store_split24((uint16_t *)weights + first, (int8_t *)record + first, in, (uint32_t)n);
    } else {
        t->store_split((uint16_t *)weights + first, (int16_t *)record + first, in, (uint32_t)n);
    }
}

/* ---------------------------------------------------------------- slices of the fused kernels */

void
spw_adam_slice_init(spw_adam_slice *slice, spw_state_format f, void *weights, void *record, uint64_t chunk_elems,
                    const void *grad, spw_dtype grad_dtype, uint64_t first, uint64_t n)
{
    uint32_t low_bytes = spw__state_layouts[f].low_bytes;
    SPW_ASSERT(first <= chunk_elems && n <= chunk_elems - first && f <= SPW_STATE_SPLIT);
    *slice = (spw_adam_slice){
        .format = f,
        .elems = n,
        .weights = (char *)weights + first * spw_state_weight_bytes(f),
        .master = low_bytes > 0 ? (char *)record + first * low_bytes : NULL,
        .m = (float *)spw__state_moment(f, &spw_opt_adam, record, chunk_elems, 0) + first,
        .v = (float *)spw__state_moment(f, &spw_opt_adam, record, chunk_elems, 1) + first,
        .grad = (const char *)grad + first * spw_dtype_bytes(grad_dtype),
        .grad_dtype = grad_dtype,
    };
}

spw_adam_slice
spw__adam_slice_rest(const spw_adam_slice *slice, uint64_t first)
{
    spw_adam_slice rest = *slice;
    rest.elems -= first;
    rest.weights = (char *)slice->weights + first * spw_state_weight_bytes(slice->format);
    if (slice->master != NULL)
        rest.master = (char *)slice->master + first * spw__state_layouts[slice->format].low_bytes;
    rest.m += first;
    rest.v += first;
    rest.grad = (const char *)slice->grad + first * spw_dtype_bytes(slice->grad_dtype);
    return rest;
}
