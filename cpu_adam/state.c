/*
 * State formats: how the master weights and the moments of one chunk lie in its weights and its record, and how to
 * read or write one part of them as fp32. Used at initialisation and for checkpoints; the step loop has its own kernels
 * that know the same layouts.
 */
#include "cpu_adam_internal.h"

/* What one element takes, in bytes; the record is low (master or lo), then m, then v. */
static const struct layout {
    const char *name;
    spw_dtype weight_dtype;
    uint32_t low_bytes;
} layouts[SPW_STATE_COUNT] = {
    [SPW_STATE_FP32] = {"fp32", SPW_F32, 0},
    [SPW_STATE_MIXED] = {"mixed", SPW_BF16, 4},
    [SPW_STATE_SPLIT] = {"split", SPW_BF16, 2},
};

const char *
spw_state_name(spw_state_format f)
{
    return (unsigned)f < SPW_STATE_COUNT ? layouts[f].name : "unknown";
}

bool
spw_state_parse(const char *name, spw_state_format *out)
{
    for (int i = 0; name != NULL && i < SPW_STATE_COUNT; i++) {
        if (strcmp(name, layouts[i].name) == 0) {
            *out = (spw_state_format)i;
            return true;
        }
    }
    return false;
}

spw_dtype
spw_state_weight_dtype(spw_state_format f)
{
    return layouts[f].weight_dtype;
}

uint32_t
spw_state_weight_bytes(spw_state_format f)
{
    return spw_dtype_bytes(layouts[f].weight_dtype);
}

uint32_t
spw_state_record_bytes(spw_state_format f)
{
    return layouts[f].low_bytes + 8u;
}

bool
spw_state_update_reads_weights(spw_state_format f)
{
    return f != SPW_STATE_MIXED;
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

/* Bytes from the start of the record to m or v. */
static uint64_t
moment_offset(spw_state_format f, uint64_t chunk_elems, spw_state_part part)
{
    return chunk_elems * (layouts[f].low_bytes + (part == SPW_PART_EXP_AVG_SQ ? 4u : 0u));
}

void
spw_state_get(spw_state_format f, const void *weights, const void *record, uint64_t chunk_elems, spw_state_part part,
              uint64_t first, uint64_t n, float *out)
{
    SPW_ASSERT(first <= chunk_elems && n <= chunk_elems - first);
    if (n == 0)
        return;
    if (part != SPW_PART_MASTER) {
        memcpy(out, (const char *)record + moment_offset(f, chunk_elems, part) + first * 4, n * 4);
    } else if (f == SPW_STATE_FP32) {
        memcpy(out, (const float *)weights + first, n * 4);
    } else if (f == SPW_STATE_MIXED) {
        memcpy(out, (const float *)record + first, n * 4);
    } else {
        const uint16_t *hi = (const uint16_t *)weights + first;
        const int16_t *lo = (const int16_t *)record + first;
        for (uint64_t i = 0; i < n; i++)
            out[i] = spw__join(hi[i], lo[i]);
    }
}

void
spw_state_set(spw_state_format f, void *weights, void *record, uint64_t chunk_elems, spw_state_part part,
              uint64_t first, uint64_t n, const float *in)
{
    SPW_ASSERT(first <= chunk_elems && n <= chunk_elems - first);
    if (n == 0)
        return;
    if (part != SPW_PART_MASTER) {
        memcpy((char *)record + moment_offset(f, chunk_elems, part) + first * 4, in, n * 4);
    } else if (f == SPW_STATE_FP32) {
        memcpy((float *)weights + first, in, n * 4);
    } else if (f == SPW_STATE_MIXED) {
        memcpy((float *)record + first, in, n * 4);
        spw_convert((uint16_t *)weights + first, SPW_BF16, in, SPW_F32, n);
    } else {
        uint16_t *hi = (uint16_t *)weights + first;
        int16_t *lo = (int16_t *)record + first;
        for (uint64_t i = 0; i < n; i++)
            spw__split(in[i], &hi[i], &lo[i]);
    }
}

void
spw_adam_slice_init(spw_adam_slice *slice, spw_state_format f, void *weights, void *record, uint64_t chunk_elems,
                    const void *grad, spw_dtype grad_dtype, uint64_t first, uint64_t n)
{
    char *r = record;
    SPW_ASSERT(first <= chunk_elems && n <= chunk_elems - first);
    *slice = (spw_adam_slice){
        .format = f,
        .elems = n,
        .weights = (char *)weights + first * spw_state_weight_bytes(f),
        .master = layouts[f].low_bytes > 0 ? r + first * layouts[f].low_bytes : NULL,
        .m = (float *)(void *)(r + moment_offset(f, chunk_elems, SPW_PART_EXP_AVG)) + first,
        .v = (float *)(void *)(r + moment_offset(f, chunk_elems, SPW_PART_EXP_AVG_SQ)) + first,
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
        rest.master = (char *)slice->master + first * layouts[slice->format].low_bytes;
    rest.m += first;
    rest.v += first;
    rest.grad = (const char *)slice->grad + first * spw_dtype_bytes(slice->grad_dtype);
    return rest;
}
