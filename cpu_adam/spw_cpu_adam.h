/*
 * spw_cpu_adam.h - the optimizers on the CPU: one pass over one chunk, in place, in any state format, and back.
 *
 * Every instruction set gives the same bits. It knows neither tiers nor threads: the caller brings a chunk whose bytes
 * are in memory, and may run different chunks on different threads.
 */
#ifndef SPW_CPU_ADAM_H
#define SPW_CPU_ADAM_H

#include "spw_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- optimizers */

enum { SPW_MOMENTS_MAX = 2, SPW_OPT_COEFS = 8, SPW_OPT_BLOCK = 256 };

/* Hyper-parameters of one step, as the user gives them; an optimizer looks at its own. */
typedef struct spw_opt_hp {
    double lr, weight_decay;
    double beta1, beta2, eps;   /* Adam; Lion: the betas; Adagrad: eps */
    bool decoupled;             /* Adam: AdamW (decay times lr), else L2 added to the gradient */
    bool bias_correction;       /* Adam: divide the moments by 1 - beta^t */
    double momentum, dampening; /* SGD; Muon: the momentum */
    bool nesterov;              /* SGD, Muon */
    double lr_decay;            /* Adagrad: lr / (1 + (t - 1) lr_decay) */
    uint64_t step;              /* t, counts from 1 */
    double grad_scale;          /* multiplied into every gradient on load: clip factor / loss scale */
    uint64_t seed;              /* of stochastic rounding */
    bool nearest;               /* bf16 moments: round to nearest instead */
} spw_opt_hp;

/*
 * The update of n elements (1 to SPW_OPT_BLOCK), in place; g is the scaled gradient. coef is what prepare() made. The
 * arrays are fp32, do not overlap and lie in L1. What it writes may depend on nothing but its arguments, element by
 * element; with explicit fmaf() where a multiply-add is meant, it gives the same bits everywhere.
 */
typedef void (*spw_opt_rule)(const float *coef, uint32_t n, float *w, float *m0, float *m1, const float *g);

typedef struct spw_optimizer {
    const char *name;                          /* as in the configuration, in any case */
    uint32_t moment_count;                     /* fp32 arrays beside the master: 0 to SPW_MOMENTS_MAX */
    const char *moment_names[SPW_MOMENTS_MAX]; /* in checkpoints; each once, not master, weight or grad */
    bool moment_unsigned[SPW_MOMENTS_MAX];     /* never negative: 8-bit codes spend no bit on the sign */
    /* Errors  SPW_EINVAL naming the value; coef is then not used. */
    spw_status (*prepare)(float coef[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err);
    spw_opt_rule rule; /* NULL: one of ours, which has one for each instruction set */
    int builtin;       /* of ours: SPW_OPT_...; ignored with a rule */
} spw_optimizer;

enum { SPW_OPT_ADAM, SPW_OPT_ADAGRAD, SPW_OPT_LION, SPW_OPT_SGD, SPW_OPT_MUON, SPW_OPT_BUILTIN_COUNT };
/* Muon is for matrices, which it takes whole: spw_opt_momentum() goes before its step. Others beside it take Adam. */
extern const spw_optimizer spw_opt_adam, spw_opt_adagrad, spw_opt_lion, spw_opt_sgd, spw_opt_muon;
/* NULL when there is none of that name. "AdamW" is spw_opt_adam. */
const spw_optimizer *spw_optimizer_find(const char *name);
/* Adds a third party's; it must live on. Before any thread looks for one. Errors SPW_EINVAL: incomplete, or taken. */
spw_status spw_optimizer_register(const spw_optimizer *optimizer, spw_error *err);

/* ---------------------------------------------------------------- state formats */

/*
 * State formats (docs/DESIGN.md, section 4). n elements of one chunk, n a multiple of 4096; arrays lie back to back, one
 * moment array per moment of the optimizer (m, v: Adam has two). Bytes per element for weights and record, with Adam:
 *   fp32           weights: p fp32 (the master)   record: m fp32 | v fp32                            4 + 8
 *   mixed          weights: p bf16                record: master fp32 | m fp32 | v fp32              2 + 12
 *   mixed-fp16     weights: p fp16                record: the same                                   2 + 12
 *   split          weights: hi bf16               record: lo i16 | m fp32 | v fp32                   2 + 10
 *   split-bf16     weights: hi bf16               record: lo i16 | m bf16 | v bf16                   2 + 6
 *   split-int8     weights: hi bf16               record: lo i16 | m 8 bit | v 8 bit | scales        2 + 4.0625
 *   split24-int8   weights: hi bf16               record: lo i8 | m 8 bit | v 8 bit | scales         2 + 3.0625
 * Split: u = bits of the fp32 master; hi = (u + 0x8000) >> 16, lo = (int16)(u & 0xffff); u = (hi << 16) + lo (signed).
 * hi is round-to-nearest with ties away from zero, and a finite master never gives an infinite hi; see spw_split_f32.
 * bf16 moments are rounded stochastically, keyed by seed, step and element, or to nearest (which loses second moments
 * whose change per step is below half a place: with beta2 0.999 they stand still). 8-bit moments are in groups of 64 elements
 * with a bf16 scale each, companded (opt_block.h says how). split24 keeps the upper 8 bits of lo, rounded.
 */
typedef enum spw_state_format {
    SPW_STATE_FP32,
    SPW_STATE_MIXED,
    SPW_STATE_SPLIT,
    SPW_STATE_MIXED_F16,
    SPW_STATE_SPLIT_BF16,
    SPW_STATE_SPLIT_INT8,
    SPW_STATE_SPLIT24_INT8,
    SPW_STATE_COUNT
} spw_state_format;
enum { SPW_STATE_GROUP = 64 };                                 /* elements that share a scale */
const char *spw_state_name(spw_state_format f);                /* as above */
bool spw_state_parse(const char *name, spw_state_format *out); /* false: not one of ours */
spw_dtype spw_state_weight_dtype(spw_state_format f);          /* SPW_F32, SPW_BF16 or SPW_F16 */
uint32_t spw_state_weight_bytes(spw_state_format f);           /* per element */
/* Of elems elements, a multiple of SPW_STATE_GROUP. */
uint64_t spw_state_record_bytes(spw_state_format f, const spw_optimizer *optimizer, uint64_t elems);
uint32_t
spw_state_record_bytes_32(spw_state_format f, const spw_optimizer *optimizer); /* per 32 elements: a whole number */
/* The record's arrays in order, each in bytes per 32 elements; returns how many. */
enum { SPW_STATE_PARTS_MAX = 1 + 2 * SPW_MOMENTS_MAX };
uint32_t
spw_state_record_parts(spw_state_format f, const spw_optimizer *optimizer, uint32_t parts[SPW_STATE_PARTS_MAX]);
uint32_t spw_state_low_bytes(spw_state_format f);    /* of master or lo, per element; 0: the weights are the master */
uint32_t spw_state_moment_bytes(spw_state_format f); /* per element: 4 fp32, 2 bf16, 1 8-bit code */
bool spw_state_update_reads_weights(spw_state_format f); /* all but mixed, which only writes them */
bool spw_state_exact(spw_state_format f);                /* master and moments are exactly fp32's */

/*
 * hi and lo of one master, and back. Exact for the infinities and for every finite master up to 0x7f7f7fff, which is
 * 3.396e38; larger finite ones, whose nearest bf16 is an infinity, become 0x7f7f7fff with their sign (all codes with a
 * finite hi are taken, so none is left for them). Every NaN becomes hi 0x7fc0, lo 0.
 */
void spw_split_f32(float master, uint16_t *hi, int16_t *lo);
float spw_join_f32(uint16_t hi, int16_t lo);

/* Chunk-wide access to the state, for initialisation and checkpoints. n elements from element `first` of the chunk. */
typedef enum spw_state_part { SPW_PART_MASTER, SPW_PART_EXP_AVG, SPW_PART_EXP_AVG_SQ, SPW_PART_COUNT } spw_state_part;
/*
 * spw_state_get - copies one part (the master, the first or the second moment) as fp32 into out (n).
 * spw_state_set - the reverse, rounded to the format; setting the master also sets the weights.
 * weights and record are the chunk's arrays (chunk_elems elements). record may be NULL with the master: frozen weights have
 * none. They are rounded as those with a record are, and what comes back is the rounded weight.
 */
void spw_state_get(spw_state_format f, const spw_optimizer *optimizer, const void *weights, const void *record,
                   uint64_t chunk_elems, spw_state_part part, uint64_t first, uint64_t n, float *out);
void spw_state_set(spw_state_format f, const spw_optimizer *optimizer, void *weights, void *record,
                   uint64_t chunk_elems, spw_state_part part, uint64_t first, uint64_t n, const float *in);

/* ---------------------------------------------------------------- a step */

/* What a step of one parameter group computes with: made once per step. */
typedef struct spw_opt_coef {
    const spw_optimizer *optimizer;
    float grad_scale;
    bool nearest;
    uint32_t key; /* of stochastic rounding */
    float c[SPW_OPT_COEFS];
} spw_opt_coef;
/* Errors  SPW_EINVAL, naming the value; *out is untouched. */
spw_status spw_opt_prepare(spw_opt_coef *out, const spw_optimizer *optimizer, const spw_opt_hp *hp, spw_error *err);

/* A chunk in memory, and which coefficients its elements take: those before ranges[0].end the first, and so on. */
typedef struct spw_opt_range {
    uint64_t end;             /* element of the chunk */
    const spw_opt_coef *coef; /* one optimizer for the whole chunk */
} spw_opt_range;
typedef struct spw_opt_chunk {
    spw_state_format format;
    uint64_t elems; /* a multiple of SPW_STATE_GROUP */
    void *weights, *record;
    /* What takes the update back is left there, spw_opt_log_bytes_32() for every 32 elements; lines are fastest. NULL: nowhere. */
    void *log;
    bool log_weights; /* of the weights too; else of the record alone */
    const void *grad;
    spw_dtype grad_dtype; /* SPW_F32, SPW_BF16 or SPW_F16 */
    uint64_t first;       /* the chunk's place among all elements, so that stochastic rounding ignores the cut */
    uint64_t begin, end;  /* update only these elements; multiples of SPW_STATE_GROUP; both 0: all */
} spw_opt_chunk;
/*
 * spw_opt_step - one update of a chunk, one pass over memory. The last range ends at elems. Parts of a chunk that has a log come in
 * order, from its first element on.
 * Returns  the number of elements whose gradient times grad_scale was not finite (they are computed all the same). Or
 *          SPW_OPT_NO_ROOM: what would take it back does not fit the log, and of what was to be updated nothing is changed.
 * Threads  any; different chunks on different threads at once. Does not block.
 */
#define SPW_OPT_NO_ROOM UINT64_MAX
uint64_t spw_opt_step(const spw_opt_chunk *chunk, const spw_opt_range *ranges, uint32_t range_count);
/* The same on a given instruction set; SPW_EUNSUPPORTED when CPU or build lack it. For tests and benchmarks. */
spw_status spw_opt_step_isa(spw_isa isa, const spw_opt_chunk *chunk, const spw_opt_range *ranges, uint32_t range_count,
                            uint64_t *nonfinite_out);
/*
 * spw_opt_momentum - the first half of Muon's step: the momentum takes the chunk's gradient, and what is to be made orthogonal comes in
 * the gradient's place. Of m and the scaled gradient g, both fp32:
 *     m = m + (1 - momentum) (g - m);   u = g + momentum (m - g), or m without nesterov
 * Then the caller makes each matrix of u orthogonal, as a whole (spw_gpu_orthogonalize), and spw_opt_step() of that, o in the
 * gradient's place, is the second half, which leaves the momentum alone: w = w (1 - lr wd) - lr o.
 *   grad     (elems) in/out; rounded to nearest, with fp16 in the scale that it came in
 *   squares  out: spw_sumsq() of u, before it is rounded, for each 4096 elements of [begin, end), which are multiples of that
 * u is of m before it is rounded to a format's moments. Returns and threads as spw_opt_step().
 * Source  Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks (kellerjordan.github.io/posts/muon).
 */
uint64_t spw_opt_momentum(const spw_opt_chunk *chunk, void *grad, const spw_opt_range *ranges, uint32_t range_count,
                          double *squares);
spw_status spw_opt_momentum_isa(spw_isa isa, const spw_opt_chunk *chunk, void *grad, const spw_opt_range *ranges,
                                uint32_t range_count, double *squares, uint64_t *nonfinite_out);
/*
 * Bytes of a log for 32 elements. Adam's with fp32 moments is 2.25 an element, which is undo.c's; of others, and of a record alone, a
 * copy of what changes.
 */
uint32_t spw_opt_log_bytes_32(spw_state_format f, const spw_optimizer *optimizer, bool weights);
/*
 * spw_opt_undo - takes the update of elements [begin, end) back, to the bit: the chunk, its gradient, its log and the ranges are those of
 * the update. Weights and masters that were no format's rounding of each other come back as if they had been.
 * Threads  as spw_opt_step. Takes a third to a half longer than the update; a copy less than it.
 */
void spw_opt_undo(const spw_opt_chunk *chunk, const spw_opt_range *ranges, uint32_t range_count);
spw_status spw_opt_undo_isa(spw_isa isa, const spw_opt_chunk *chunk, const spw_opt_range *ranges, uint32_t range_count);

/* ---------------------------------------------------------------- Adam's fused kernels */

/* Hyper-parameters of one step of Adam. */
typedef struct spw_adam_hp {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled;       /* true: AdamW (decay times lr); false: L2 added to the gradient */
    bool bias_correction; /* divide the moments by 1 - beta^t */
    uint64_t step;        /* t, counts from 1 */
    double grad_scale;    /* multiplied into every gradient on load: clip factor / loss scale */
} spw_adam_hp;

/* The same, as the kernels use it: computed once per step in double, rounded once to fp32. */
typedef struct spw_adam_coef {
    float grad_scale;
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float eps;
    float l2;           /* weight decay when not decoupled, else 0 */
    float decay;        /* 1 - lr * wd when decoupled, else 1 */
    float step_size;    /* lr / (1 - beta1^t) */
    float inv_bc2_sqrt; /* 1 / sqrt(1 - beta2^t) */
} spw_adam_coef;

/*
 * spw_adam_prepare - checks hp and computes the coefficients.
 * Errors  SPW_EINVAL, naming the value: lr, weight_decay or grad_scale not finite (in fp32) or negative, beta outside
 *         [0, 1), eps not above 0 (in fp32), step 0; lr / (1 - beta1^t) or lr * weight_decay overflowing fp32.
 *         *out is untouched.
 */
spw_status spw_adam_prepare(spw_adam_coef *out, const spw_adam_hp *hp, spw_error *err);

/*
 * n consecutive elements of one chunk in memory, as pointers, so that a part of a chunk (a parameter with its own
 * hyper-parameters) is updated the same way. No alignment beyond the element's is needed; 64 bytes is fastest. Arrays
 * do not overlap.
 */
typedef struct spw_adam_slice {
    spw_state_format format;
    uint64_t elems;       /* n */
    void *weights;        /* (n) fp32 or bf16, in/out (mixed: out) */
    void *master;         /* (n) mixed: fp32 master; split: int16 lo; fp32: NULL */
    float *m, *v;         /* (n) */
    const void *grad;     /* (n) in */
    spw_dtype grad_dtype; /* SPW_F32, SPW_BF16 or SPW_F16 */
} spw_adam_slice;
/* Elements [first, first + n) of a chunk of chunk_elems whose arrays start at weights, record and grad. fp32, mixed, split. */
void spw_adam_slice_init(spw_adam_slice *slice, spw_state_format f, void *weights, void *record, uint64_t chunk_elems,
                         const void *grad, spw_dtype grad_dtype, uint64_t first, uint64_t n);

/*
 * spw_adam_step - one AdamW/Adam update of a slice, in place, one pass.
 *
 * Computes (fp32, every fma explicit, sqrt and divide IEEE; t, bias corrections in double):
 *     g  = grad * grad_scale;  w = master
 *     g  = fma(l2, w, g)                        if l2 != 0
 *     m  = fma(one_minus_beta1, g - m, m)
 *     v  = fma(beta2, v, (one_minus_beta2 * g) * g)
 *     d  = fma(sqrt(v), inv_bc2_sqrt, eps)
 *     w  = fma(-step_size, m / d, w * decay)
 *   then rounds w to the weight format.
 * Returns  the number of elements whose gradient times grad_scale was not finite (they are computed all the same).
 * Threads  any; slices given to different threads must not overlap. Does not block.
 * Cost     fp32 16 bytes read and 12 written per element, mixed 16 and 14, split 16 and 12 (fp32 gradients).
 * Source   Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization, Algorithm 2; Kingma and Ba 2015.
 */
uint64_t spw_adam_step(const spw_adam_coef *coef, const spw_adam_slice *slice);
/* The same on a given instruction set; SPW_EUNSUPPORTED when CPU or build lack it. For tests and benchmarks. */
spw_status
spw_adam_step_isa(spw_isa isa, const spw_adam_coef *coef, const spw_adam_slice *slice, uint64_t *nonfinite_out);

/* One slice and what it is updated with. */
typedef struct spw_adam_work {
    spw_adam_coef coef;
    spw_adam_slice slice;
    uint32_t first_part; /* written by spw_adam_run() */
} spw_adam_work;
/*
 * spw_adam_run - spw_adam_step() of count slices that do not overlap, on a pool's threads, which take pieces as they
 * become free. The same bits for any number of threads.
 * Returns  the sum of what spw_adam_step() returns. Blocks until all is done. At most 2^48 elements.
 */
uint64_t spw_adam_run(spw_pool *pool, spw_adam_work *works, uint32_t count);

#ifdef __cplusplus
}
#endif
#endif
