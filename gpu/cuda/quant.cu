/* Block codes: the kernels of quant.cuh by width and type. */
#include "quant.cuh"
#include "cuda_internal.h"

enum { BLOCKS_EACH = 8 }; /* that the threads of a launch's block take */

template <int BITS, class T>
static void
encode(cuda_queue *q, void *codes, const void *src, uint64_t blocks)
{
    LAUNCH(q, spw__cuda_blocks(blocks, BLOCKS_EACH), BLOCKS_EACH * WARP, 0, (encode_kernel<BITS, T>),
           (unsigned char *)codes, (const T *)src, blocks);
}

template <int BITS, class T>
static void
decode(cuda_queue *q, void *dst, const void *codes, uint64_t blocks)
{
    LAUNCH(q, spw__cuda_blocks(blocks, BLOCKS_EACH), BLOCKS_EACH * WARP, 0, (decode_kernel<BITS, T>), (T *)dst,
           (const unsigned char *)codes, blocks);
}

static published
published_of(spw_quant form)
{
    published p;
    p.begin = spw_codes_begin(form);
    p.step = spw_codes_block_bytes(form);
    p.group = spw_codes_group(form);
    p.scale_bytes = spw_codes_scale_bytes(form);
    p.floats = spw_codes_are_floats(form) != 0;
    p.rounds = spw_codes_round(form) != 0;
    return p;
}

template <int BITS, class T>
static void
decode_published(cuda_queue *q, void *dst, const void *codes, spw_quant form, uint64_t blocks)
{
    LAUNCH(q, spw__cuda_blocks(blocks, BLOCKS_EACH), BLOCKS_EACH * WARP, 0, (decode_published_kernel<BITS, T>),
           (T *)dst, (const unsigned char *)codes, published_of(form), blocks);
}

template <class T>
static void
decode_strips(cuda_queue *q, void *dst, const void *codes, spw_quant form, uint64_t n)
{
    LAUNCH(q, spw__cuda_blocks(n / 4, BLOCKS_EACH * WARP), BLOCKS_EACH * WARP, 0, (decode_strips_kernel<T>), (T *)dst,
           (const unsigned char *)codes, spw_codes_cols(form), spw_codes_round(form) != 0, n);
}

template <class T>
static void
convert(cuda_queue *q, bool to_codes, void *codes, spw_quant form, void *x, uint64_t n)
{
    uint64_t blocks = n / QUANT_BLOCK;
    const bool wide = spw_codes_bits(form) == 8;
    if (blocks == 0)
        return;
    if (to_codes)
        wide ? encode<8, T>(q, codes, x, blocks) : encode<4, T>(q, codes, x, blocks);
    else if (spw_codes_cols(form) > 0)
        decode_strips<T>(q, x, codes, form, n);
    else if (spw_codes_group(form) > 0)
        wide ? decode_published<8, T>(q, x, codes, form, blocks) : decode_published<4, T>(q, x, codes, form, blocks);
    else
        wide ? decode<8, T>(q, x, codes, blocks) : decode<4, T>(q, x, codes, blocks);
}

static void
by_type(cuda_queue *q, bool to_codes, void *codes, spw_quant form, void *x, spw_dtype type, uint64_t n)
{
    if (type == SPW_F32)
        convert<float>(q, to_codes, codes, form, x, n);
    else if (type == SPW_BF16)
        convert<bf16>(q, to_codes, codes, form, x, n);
    else
        convert<f16>(q, to_codes, codes, form, x, n);
}

void
spw__cuda_encode(spw_gpu_queue *queue, void *codes, spw_quant form, const void *src, spw_dtype type, uint64_t n)
{
    by_type(spw__cuda_queue_of(queue), true, codes, form, (void *)(uintptr_t)src, type, n);
}

void
spw__cuda_decode(spw_gpu_queue *queue, void *dst, spw_dtype type, const void *codes, spw_quant form, uint64_t n)
{
    by_type(spw__cuda_queue_of(queue), false, (void *)(uintptr_t)codes, form, dst, type, n);
}

void
spw__cuda_decode_h2d(spw_gpu_queue *queue, void *dst, spw_dtype type, const void *codes, spw_quant form, uint64_t n)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    const uint64_t each = spw_codes_unit(form), bytes = each / QUANT_BLOCK * spw_codes_block_bytes(form);
    const uint64_t most = PIECE_BYTES / bytes, units = n / each, piece = units < most ? units : most;
    uint64_t pieces = units > 0 ? (units + piece - 1) / piece : 0;
    for (uint64_t k = 0; k < pieces; k++) {
        uint64_t first = k * piece, m = units - first < piece ? units - first : piece;
        const void *staged = spw__cuda_fetch(q, k, pieces, spw_round_up(piece * bytes, 256),
                                             (const char *)codes + first * bytes, m * bytes);
        if (staged == NULL)
            return;
        spw__cuda_decode(queue, (char *)dst + first * each * spw_dtype_bytes(type), type, staged, form, m * each);
        spw__cuda_release(q, k);
    }
}
