/*
 * cpu_adam_internal.h - what the files of cpu_adam share: the kernels' common signature and the split format's bits.
 */
#ifndef SPW_CPU_ADAM_INTERNAL_H
#define SPW_CPU_ADAM_INTERNAL_H

#include "spw_cpu_adam.h"

/* One update of a slice; returns the number of elements whose scaled gradient was not finite. */
typedef uint64_t (*spw__adam_fn)(const spw_adam_coef *coef, const spw_adam_slice *slice);

/* An element that does not run backwards, as it was (undo.c). */
typedef struct spw__misfit {
    uint32_t at; /* in the chunk; they rise */
    float w, m, v;
} spw__misfit;
/* Where a slice's update leaves what takes it back; its elements are numbered from `first` on in the list. */
typedef struct spw__adam_log {
    uint8_t *m_bits, *vw_bits;
    spw__misfit *misfits;
    uint32_t *count, most; /* of the list */
    uint64_t first;
    uint64_t nonfinite_count; /* out */
} spw__adam_log;
/*
 * The update with a log, of as many elements as fill vectors and as the list has room for: returns how many, from the first on. What
 * comes behind them is as it was. NULL when not built.
 */
typedef uint64_t (*spw__adam_logged_fn)(const spw_adam_coef *coef, const spw_adam_slice *slice, spw__adam_log *log);
extern const spw__adam_logged_fn spw__adam_logged_avx2, spw__adam_logged_avx512, spw__adam_logged_neon;
/* Of the slice's elements [i, i + 32) those whose bit is set, as they are in memory and were in w. False: the list has no room. */
bool spw__log_misfits(spw__adam_log *log, const spw_adam_slice *slice, uint64_t i, const float *w, uint32_t bits);

/* The log's two bytes of an element: how far what runs backwards is off, plus this; the second moment's low, the master's above. */
enum { SPW__M_BIAS = 128, SPW__V_BIAS = 8, SPW__W_BIAS = 8, SPW__V_MASK = 15, SPW__W_SHIFT = 4 };
/* The coefficients of Adam's kernels. */
spw_adam_coef spw__adam_coef_of(const spw_opt_coef *coef);

/* The truth; it also does the last elements of the vector kernels. */
uint64_t spw__adam_ref(const spw_adam_coef *coef, const spw_adam_slice *slice);
/* NULL when the build lacks the instruction set. */
extern const spw__adam_fn spw__adam_avx2, spw__adam_avx512, spw__adam_neon;

/* opt_block.h, once per instruction set: rules and codecs on blocks of up to SPW_OPT_BLOCK elements in L1. */
enum { SPW__GROUP = SPW_STATE_GROUP };
/* How the scales of 8-bit groups are rounded. NULL instead: to nearest. */
typedef struct spw__scale_rounding {
    uint32_t key, group; /* of the first group, among all elements' */
} spw__scale_rounding;
typedef struct spw__opt_table {
    spw_opt_rule rules[SPW_OPT_BUILTIN_COUNT];
    void (*momentum)(const float *c, uint32_t n, float *m, float *g, float up, double *lane);
    /* Adam's rule, not in place, and the log's bits (undo.c); returns of how many elements these do not bring back what was, misfit 1. */
    uint32_t (*adam_logged)(const float *coef, uint32_t n, const float *w, const float *m, const float *v,
                            const float *g, float *w_after, float *m_after, float *v_after, uint8_t *m_bits,
                            uint8_t *vw_bits, uint32_t *misfit);
    /* And back, in place; what did not fit comes out wrong. */
    void (*adam_back)(const float *coef, uint32_t n, float *w, float *m, float *v, const float *g,
                      const uint8_t *m_bits, const uint8_t *vw_bits);
    void (*copy_past)(void *to, const void *from, uint64_t bytes); /* memcpy() past the caches: nobody looks soon */
    uint64_t (*load_grad)(float *g, const void *grad, spw_dtype dtype, uint32_t n, float scale); /* returns nonfinite */
    void (*store_bf16)(uint16_t *out, const float *w, uint32_t n);
    void (*store_f16)(uint16_t *out, const float *w, uint32_t n);
    void (*load_split)(float *w, const uint16_t *hi, const int16_t *lo, uint32_t n);
    void (*store_split)(uint16_t *hi, int16_t *lo, const float *w, uint32_t n);
    void (*load_split24)(float *w, const uint16_t *hi, const int8_t *lo, uint32_t n);
    void (*store_split24)(uint16_t *hi, int8_t *lo, const float *w, uint32_t n);
    void (*load_bf16)(float *x, const uint16_t *in, uint32_t n);
    void (*store_bf16_stochastic)(uint16_t *out, const float *x, uint32_t n, uint32_t key, uint32_t first);
    void (*load_int8)(float *x, const int8_t *code, const uint16_t *scale, uint32_t n);
    void (*store_int8)(int8_t *code, uint16_t *scale, const float *x, uint32_t n, const spw__scale_rounding *by);
    void (*load_uint8)(float *x, const uint8_t *code, const uint16_t *scale, uint32_t n);
    void (*store_uint8)(uint8_t *code, uint16_t *scale, const float *x, uint32_t n, const spw__scale_rounding *by);
} spw__opt_table;
extern const spw__opt_table spw__opt_table_ref;
extern const spw__opt_table *const spw__opt_table_avx2, *const spw__opt_table_avx512; /* NULL when not built */
/* NULL: not built, or the CPU lacks it. For NEON it is the reference's, which the compiler makes of it there. */
const spw__opt_table *spw__opt_table_of(spw_isa isa);
spw_isa spw__opt_isa(void); /* the best that has one */

/* undo.c: updates of a chunk that has a log. These leave what their arithmetic misses when it runs backwards, others copies. */
bool spw__runs_backwards(spw_state_format f, const spw_optimizer *o, bool weights);
/* Elements [first, end) of every array that the log is for, to it or back. */
void spw__log_copy(const spw__opt_table *table, const spw_opt_chunk *c, const spw_optimizer *o, uint64_t first,
                   uint64_t end, bool back);
uint64_t
spw__opt_step_logged(spw_isa isa, const spw_opt_chunk *c, const spw_opt_range *ranges, uint64_t from, uint64_t to);

/* Stochastic rounding and 8-bit codes; opt_block.h says how. Here, because the fused kernels do the same. */
#define SPW__HASH_STEP       0x9e3779b9u
#define SPW__HASH_MULTIPLIER 0x85ebca6bu
#define SPW__SIGNED_UP       (1.0f / 247.0f)
#define SPW__UNSIGNED_UP     (1.0f / 63487.0f)
#define SPW__SIGNED_MOST     0x7b80u /* scales: 2^120 and 2^112 in bf16 */
#define SPW__UNSIGNED_MOST   0x7780u
#define SPW__SCALE_LEAST     0x12800000u /* of the largest magnitude: 2^-90 */
#define SPW__SCALE_NEAREST   0x8000u
#define SPW__CODE_SHIFT      19 /* what is left of a float is 4 bits of mantissa */
#define SPW__CODE_ZERO       0x3f800000u

/* The counter is the element's number times SPW__HASH_STEP plus a key: a Weyl sequence, mixed once. */
static inline uint32_t
spw__rounding_hash(uint32_t counter)
{
    uint32_t h = (counter ^ counter >> 16) * SPW__HASH_MULTIPLIER;
    return h ^ h >> 15;
}

/* state.c: where the arrays of a chunk lie. */
typedef enum spw__moment_code { SPW__MOMENT_F32, SPW__MOMENT_BF16, SPW__MOMENT_INT8 } spw__moment_code;
typedef struct spw__state_layout {
    const char *name;
    spw_dtype weight_dtype;
    uint32_t low_bytes; /* of master or lo, per element */
    spw__moment_code code;
} spw__state_layout;
extern const spw__state_layout spw__state_layouts[SPW_STATE_COUNT];
/* Moment k of the record, and its scales (NULL unless 8 bit). */
void *spw__state_moment(spw_state_format f, const spw_optimizer *o, void *record, uint64_t chunk_elems, uint32_t k);
uint16_t *spw__state_scales(spw_state_format f, const spw_optimizer *o, void *record, uint64_t chunk_elems, uint32_t k);

/* A chunk for the fused kernels of packed moments and of other rules than Adam's. */
typedef struct spw__packed {
    spw_state_format format;
    spw_dtype grad_dtype;
    const spw_opt_coef *coef;
    float grad_scale;
    uint64_t first;              /* as in spw_opt_chunk; a multiple of the group, like every position below */
    uint16_t *hi;                /* the weights */
    void *lo, *m, *v;            /* lo: the master in mixed */
    uint16_t *m_scale, *v_scale; /* of groups; 8 bits only */
    const void *grad;
    /* Does elements [first, end), whole groups or vectors of bf16 moments, any other way; returns their nonfinite gradients. */
    uint64_t (*general)(void *ctx, uint64_t first, uint64_t end);
    void *ctx;
} spw__packed;
/* Elements [first, end), whole groups; returns the number of elements whose scaled gradient was not finite. */
typedef uint64_t (*spw__packed_fn)(const spw__packed *packed, uint64_t first, uint64_t end);
/* Adam's, and those of our other rules with packed moments and with fp32 moments; NULL when not built. */
extern const spw__packed_fn spw__packed_bf16_avx2, spw__packed_int8_avx2, spw__rules_packed_avx2;
extern const spw__packed_fn spw__packed_bf16_avx512, spw__packed_int8_avx512, spw__rules_packed_avx512;
extern const spw__packed_fn spw__rules_avx2, spw__rules_avx512, spw__rules_neon;

/*
 * Where a kernel is chosen: both in one number, and the cases of a format, in each of which a body is inlined. Its last arguments are the
 * format and the type.
 */
#define SPW__KIND(format, grad_dtype) (SPW_DTYPE_COUNT * (int)(format) + (int)(grad_dtype))
#define SPW__CASES(format, body, ...)                                                                                  \
    case SPW__KIND(format, SPW_F32): return body(__VA_ARGS__, format, SPW_F32);                                        \
    case SPW__KIND(format, SPW_BF16): return body(__VA_ARGS__, format, SPW_BF16);                                      \
    case SPW__KIND(format, SPW_F16): return body(__VA_ARGS__, format, SPW_F16)

/* So many bytes of an array, from at on. Behind its end that does nothing; hence the arithmetic on the address and not on the pointer. */
static inline __attribute__((always_inline)) void
spw__prefetch(const void *array, uint64_t at, uint64_t bytes)
{
    for (uint64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch((const void *)((uintptr_t)array + at + line));
}

/* Elements [first, elems) of a slice as a slice of their own. */
spw_adam_slice spw__adam_slice_rest(const spw_adam_slice *slice, uint64_t first);

/*
 * The bits of a master in the split format's sense. Two kinds of value have no exact code, because hi alone is what
 * the model reads:
 *   finite, at least 0x7f7f8000   hi would be an infinity, and every code of hi 0x7f7f belongs to another master (the
 *                                 codes with finite hi are as many as the masters below, so no scheme is exact here):
 *                                 it becomes the largest master below, 0x7f7f7fff with its sign
 *   NaN                           adding 0x8000 could carry out of the NaN's mantissa, and payloads depend on the
 *                                 order of operands: every NaN becomes 0x7fc00000, the same on every instruction set
 */
#define SPW__SPLIT_MAX 0x7f7f7fffu
#define SPW__SPLIT_NAN 0x7fc00000u
#define SPW__F32_INF   0x7f800000u

static inline uint32_t
spw__split_bits(float master)
{
    uint32_t u = spw_f32_bits(master), magnitude = u & 0x7fffffffu;
    uint32_t finite = magnitude > SPW__SPLIT_MAX && magnitude < SPW__F32_INF ? (u & 0x80000000u) | SPW__SPLIT_MAX : u;
    return magnitude > SPW__F32_INF ? SPW__SPLIT_NAN : finite;
}

static inline void
spw__split(float master, uint16_t *hi, int16_t *lo)
{
    uint32_t u = spw__split_bits(master);
    *hi = (uint16_t)((u + 0x8000u) >> 16);
    *lo = (int16_t)(uint16_t)(u & 0xffffu);
}

/* The bf16 weight of a master in mixed: hi's rounding, so that mixed and split train alike to the last bit. */
static inline uint16_t
spw__weight_bf16(float master)
{
    uint32_t u = spw_f32_bits(master);
    return (uint16_t)((u & 0x7fffffffu) > SPW__F32_INF ? (u >> 16 | 0x40u) : (u + 0x8000u) >> 16);
}

static inline float
spw__join(uint16_t hi, int16_t lo)
{
    return spw_bits_f32(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

#endif
