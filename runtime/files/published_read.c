/*
 * Codes of a folder as the store keeps them (spw_codes.h): no number is made of them. The bytes of a range are read as those of numbers are, and put into
 * blocks of 128, two integers or floats of 4 bits to a byte where the store has them; scales are repeated where a block of the publisher's has more
 * columns than a group here; gpt-oss' groups, which are columns, become strips. Parameters, chunks and ranks' parts begin at whole blocks or strips, so
 * every cut of a matrix is one of these ranges.
 */
#include "hf_reader.h"
#include "quant.h"
#include <math.h>

enum { HALF = SPW_QUANT_BLOCK / 2 };

/* Of a run of bytes of the tensor: where they go. */
typedef struct taking {
    uint8_t *blocks; /* zeros at first */
    spw_quant form;
    uint64_t first; /* byte of the tensor that block 0 begins with */
    uint8_t flip;   /* integers have half their range added in files */
    bool bad;       /* out: there is a NaN, of floats */
} taking;

/* Bytes [from, from + n) of a block, two codes each. */
static void
put_halves(uint8_t *restrict out, uint64_t from, const uint8_t *restrict in, uint64_t n, uint8_t flip)
{
    for (uint64_t k = from; k < from + n; k++) {
        const uint8_t two = in[k - from] ^ flip;
        const unsigned shift = k < HALF / 2 ? 0 : 4;
        out[2 * k % HALF] |= (uint8_t)((two & 15u) << shift);
        out[2 * k % HALF + 1] |= (uint8_t)(two >> 4 << shift);
    }
}

/* All of a block. */
static void
put_block_of_halves(uint8_t *restrict out, const uint8_t *restrict in, uint8_t flip)
{
    for (int k = 0; k < HALF / 2; k++) {
        const uint8_t low = in[k] ^ flip, high = in[k + HALF / 2] ^ flip;
        out[2 * k] = (uint8_t)((low & 15u) | high << 4);
        out[2 * k + 1] = (uint8_t)(low >> 4 | (high & 0xf0u));
    }
}

/* Whether any is a NaN of 8 bits. */
static bool
put_bytes(uint8_t *restrict out, const uint8_t *restrict in, uint64_t n, uint8_t flip)
{
    uint8_t bad = 0;
    for (uint64_t i = 0; i < n; i++) {
        out[i] = in[i] ^ flip;
        bad |= (in[i] & 0x7fu) == 0x7fu;
    }
    return bad != 0;
}

static spw_status
take_codes(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    taking *t = ctx;
    const uint32_t bits = spw_codes_bits(t->form), each = SPW_QUANT_BLOCK / 8 * bits;
    const uint8_t *in = data;
    (void)err;
    for (uint64_t at = offset - t->first, n; bytes > 0; at += n, in += n, bytes -= n) {
        uint8_t *out = t->blocks + at / each * spw_codes_block_bytes(t->form) + spw_codes_begin(t->form);
        n = each - at % each < bytes ? each - at % each : bytes;
        if (bits == 8)
            t->bad = put_bytes(out + at % each, in, n, t->flip) || t->bad;
        else if (n == each)
            put_block_of_halves(out, in, t->flip);
        else
            put_halves(out, at % each, in, n, t->flip);
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- scales */

/* Those that were read last. */
typedef struct window {
    uint64_t first, count, all; /* all: of the matrix */
    float scales[SPW__HF_BLOCK];
} window;

static spw_status
scale_at(spw_hf_reader *r, uint32_t id, window *w, uint64_t i, float *out, spw_error *err)
{
    if (i - w->first >= w->count) {
        w->first = i;
        w->count = w->all - i < SPW__HF_BLOCK ? w->all - i : SPW__HF_BLOCK;
        SPW_TRY(spw__hf_read_scales(r, id, w->first, w->count, w->scales, err));
    }
    *out = w->scales[i - w->first];
    return SPW_OK;
}

/* No number that the greatest code makes may be near the end of fp32, where formats of 16 bits do not agree. */
static bool
is_usable(spw_quant form, float scale)
{
    const float top = spw_codes_are_floats(form) ? (spw_codes_bits(form) == 8 ? 448.0f : 6.0f) : 128.0f;
    return fabsf(scale * top) < 0x1p127f;
}

static void
put_scale(uint8_t *block, spw_quant form, uint32_t g, float scale)
{
    const uint32_t u = spw_f32_bits(scale);
    const uint16_t half = (uint16_t)(u >> 16);
    if (spw_codes_scale_of(form) == SPW_SCALE_E8M0)
        block[g] = (uint8_t)(u >> 23);
    else if (spw_codes_scale_of(form) == SPW_SCALE_BF16)
        memcpy(block + g * sizeof half, &half, sizeof half);
    else
        memcpy(block + g * sizeof scale, &scale, sizeof scale);
}

/* Row by row, and in it scale by scale: groups are whole parts of what has one. */
static spw_status
put_scales(spw_hf_reader *r, uint32_t id, const taking *t, uint64_t first, uint64_t count, bool *bad, spw_error *err)
{
    const spw_scaled *b = spw__hf_blocks_of(r, id);
    const spw_tensor_info *info = r->tensors[r->of_param[id]].info;
    const uint64_t cols = spw__hf_code_cols(r, id), across = (cols - 1) / b->cols + 1;
    const uint32_t group = spw_codes_group(t->form), per_block = SPW_QUANT_BLOCK / group;
    window w = {.all = ((info->shape[0] - 1) / b->rows + 1) * across};
    uint8_t *block = t->blocks;
    uint32_t g = 0;
    for (uint64_t row = first / cols, col = first % cols; count > 0; row++, col = 0) {
        const uint64_t end = cols - col < count ? cols : col + count;
        count -= end - col;
        for (uint64_t i = col / b->cols; col < end; i++) {
            const uint64_t next = (i + 1) * b->cols < end ? (i + 1) * b->cols : end;
            float scale;
            SPW_TRY(scale_at(r, id, &w, row / b->rows * across + i, &scale, err));
            *bad = *bad || !is_usable(t->form, scale);
            for (; col < next; col += group) {
                put_scale(block, t->form, g, scale);
                g = g + 1 < per_block ? g + 1 : 0;
                block += g == 0 ? spw_codes_block_bytes(t->form) : 0;
            }
        }
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- strips */

enum { COLUMNS = 64, GROUP_BYTES = SPW_MXFP4_GROUP / 2 };

/* A group of the file, which is one column of a strip. */
static void
put_column(uint8_t *restrict out, size_t cols, const uint8_t *restrict in)
{
    for (size_t k = 0; k < GROUP_BYTES / 2; k++) {
        const uint8_t low = in[k], high = in[k + GROUP_BYTES / 2];
        out[2 * k * cols] = (uint8_t)((low & 15u) | high << 4);
        out[(2 * k + 1) * cols] = (uint8_t)(low >> 4 | (high & 0xf0u));
    }
}

/* Files have the groups of a column beside each other, so columns go a few at a time through all strips. Whether a scale is no number. */
static bool
put_strips(uint8_t *strips, spw_quant form, const spw__hf_mapped *c, uint64_t first, uint64_t count)
{
    const uint64_t groups = c->rows / SPW_MXFP4_GROUP, bytes = spw__quant_bytes(form, spw_codes_unit(form));
    const uint32_t cols = spw_codes_cols(form);
    bool bad = false;
    for (uint32_t begin = 0; begin < cols; begin += COLUMNS) {
        const uint32_t end = cols - begin < COLUMNS ? cols : begin + COLUMNS;
        for (uint64_t s = 0; s < count; s++) {
            for (uint32_t col = begin; col < end; col++) {
                const uint64_t group = col * groups + first + s;
                uint8_t *strip = strips + s * bytes;
                strip[col] = c->scales[group];
                bad = bad || !is_usable(form, spw_bits_f32((uint32_t)c->scales[group] << 23));
                put_column(strip + cols + col, cols, c->blocks + group * GROUP_BYTES);
            }
        }
    }
    return bad;
}

static spw_status
read_strips(spw_hf_reader *r, uint32_t id, spw_quant form, uint64_t first, uint64_t count, void *strips, spw_error *err)
{
    const uint64_t unit = spw_codes_unit(form);
    const spw__hf_entry *e = &r->tensors[r->of_param[id]];
    spw__hf_mapped *c = &r->mapped[id];
    SPW_ASSERT(first % unit == 0 && count % unit == 0);
    SPW_TRY(spw__st_check_map(r->shards[e->shard_idx].reader, err));
    if (put_strips(strips, form, c, first / unit, count / unit))
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s: the scales of tensor %s are no finite numbers, in elements %llu to %llu of a slice",
                         r->shards[e->shard_idx].name, e->info->name, (unsigned long long)first,
                         (unsigned long long)(first + count - 1));
    spw__hf_was_read(c, count);
    return SPW_OK;
}

spw_status
spw_hf_read_codes(spw_hf_reader *r, uint32_t param_id, spw_quant form, uint64_t first, uint64_t count, void *blocks,
                  spw_error *err)
{
    const spw_scaled *b;
    const spw__hf_entry *e;
    taking t = {.blocks = blocks, .form = form};
    uint64_t bytes;
    bool bad = false;
    if (spw_codes_cols(form) > 0 && param_id < r->param_count && r->mapped[param_id].blocks != NULL &&
        r->mapped[param_id].cols == spw_codes_cols(form))
        return read_strips(r, param_id, form, first, count, blocks, err);
    if (spw_codes_cols(form) > 0 || param_id >= r->param_count || r->of_param[param_id] == UINT32_MAX ||
        r->scale_of[param_id] == UINT32_MAX || spw__hf_blocks_of(r, param_id)->bits != spw_codes_bits(form))
        return SPW_RAISE(err, SPW_EINVAL, "%s: parameter %u is not there as codes of %u bits", r->path, param_id,
                         spw_codes_bits(form));
    SPW_ASSERT(first % SPW_QUANT_BLOCK == 0 && count % spw_codes_group(form) == 0);
    e = &r->tensors[r->of_param[param_id]];
    b = spw__hf_blocks_of(r, param_id);
    bytes = count * b->bits / 8;
    t.first = first * b->bits / 8;
    t.flip = b->packed && !b->floats ? (b->bits == 8 ? 0x80 : 0x88) : 0;
    memset(blocks, 0, spw__quant_bytes(form, spw_round_up(count, SPW_QUANT_BLOCK)));
    SPW_TRY(spw_st_read_run(r->shards[e->shard_idx].reader, e->info, t.first, bytes, take_codes, &t, err));
    SPW_TRY(put_scales(r, param_id, &t, first, count, &bad, err));
    if (bad || (t.bad && spw_codes_are_floats(form)))
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s: tensor %s has codes or scales that are no finite numbers, in elements %llu to %llu",
                         r->shards[e->shard_idx].name, e->info->name, (unsigned long long)first,
                         (unsigned long long)(first + count - 1));
    return SPW_OK;
}
