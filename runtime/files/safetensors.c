/*
 * safetensors: a JSON header and tensor bytes (huggingface/safetensors, README, "Format"). The format's types, and how a parameter is described; st_write.c and
 * st_read.c write and read.
 */
#include "files_internal.h"
#include <math.h>
#include <stdio.h>

/* All types of the format (huggingface/safetensors, README, "Format"); the first are those that are computed with. */
const spw__st_type spw__st_types[SPW__ST_TYPE_COUNT] = {[SPW_F32] = {"F32", 32},
                                                        [SPW_BF16] = {"BF16", 16},
                                                        [SPW_F16] = {"F16", 16},
                                                        {"BOOL", 8},
                                                        {"U8", 8},
                                                        {"I8", 8},
                                                        {"I16", 16},
                                                        {"U16", 16},
                                                        {"I32", 32},
                                                        {"U32", 32},
                                                        {"F64", 64},
                                                        {"I64", 64},
                                                        {"U64", 64},
                                                        {"C64", 64},
                                                        {"F8_E5M2", 8},
                                                        {"F8_E4M3", 8},
                                                        {"F8_E8M0", 8},
                                                        {"F8_E4M3FNUZ", 8},
                                                        {"F8_E5M2FNUZ", 8},
                                                        {"F4", 4},
                                                        {"F6_E2M3", 6},
                                                        {"F6_E3M2", 6}};

bool
spw__st_tensor_bytes(const spw_tensor_info *t, uint32_t bits, uint64_t *out)
{
    uint64_t n = bits;
    for (uint32_t d = 0; d < t->ndim; d++) {
        if (!spw_mul_u64(n, t->shape[d], &n))
            return false;
    }
    *out = n / 8;
    return n % 8 == 0;
}

void
spw_st_describe(spw_tensor_info *t, const spw_param *p, spw_dtype dtype)
{
    size_t bytes = p->stack > 0 ? (size_t)(strrchr(p->name, '.') - p->name) : strlen(p->name);
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%.*s", (int)bytes, p->name);
    t->dtype = dtype;
    t->ndim = p->ndim;
    t->shape[0] = p->ndim == 1 ? p->cols : p->rows;
    t->shape[1] = p->ndim == 1 ? 0 : p->cols;
    if (p->ndim == 3) {
        t->shape[1] = 1;
        t->shape[2] = p->cols;
    }
    t->stack = p->stack;
    t->slice = p->stack > 0 ? p->expert - 1 : 0;
    if (p->in_terms) {
        t->dtype = SPW_F32;
        t->shape[0] /= SPW_TERMS;
    }
    t->whole = p->whole;
    if (p->row_cols > 0) {
        t->ndim = 2;
        t->shape[0] /= p->row_cols;
        t->shape[1] = p->row_cols;
    }
    if (p->of_heads) {
        t->ndim = 4;
        t->shape[2] = t->shape[0];
        t->shape[0] = t->shape[1] = t->shape[3] = 1;
    }
    if (p->in_row) {
        t->ndim = 2;
        t->shape[1] = t->shape[0];
        t->shape[0] = 1;
    }
}

enum { F16_END = 65520 }; /* from here on what is rounded to fp16 is infinity */

spw_status
spw_st_round(void *out, spw_dtype dtype, const float *data, uint64_t count, const char *name, uint64_t first,
             spw_error *err)
{
    for (uint64_t i = 0; dtype == SPW_F16 && i < count; i++) {
        if (fabsf(data[i]) >= F16_END && isfinite(data[i]))
            return SPW_RAISE(err, SPW_EINVAL,
                             "%s, element %llu, is %g, and fp16 ends at 65504: it would be infinity there; bf16 and "
                             "fp32 have it",
                             name, (unsigned long long)(first + i), (double)data[i]);
    }
    spw_convert(out, dtype, data, SPW_F32, count);
    return SPW_OK;
}
