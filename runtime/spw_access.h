/*
 * spw_access.h - the state of a model between steps, by the names of its parameters: reading it, changing it, gathering it,
 * saving its weights. Wherever a value is (device, host, nvme, another rank), only the chunks that hold it are moved.
 *
 * Local calls are one rank's own: they see the stretch of a parameter that this rank holds. Collective calls are made by
 * all ranks, with the same arguments but for the data, and see the whole; with one rank, or where every rank has
 * everything (stage 0), both are the same.
 *
 * Threads  the engine's, between steps; gradients also inside spw_engine_on_gradients().
 * Errors   SPW_EINVAL, before anything has changed and on all ranks of a collective call: a name that there is not, a range
 *          outside the parameter, a part that the optimizer does not have, a frozen parameter's moments or gradient, a step
 *          or a save under way, ranks that ask for different things. SPW_ESTALE: a gradient that is gone. Else the store's.
 * docs/access.md has DeepSpeed's names beside these.
 */
#ifndef SPW_ACCESS_H
#define SPW_ACCESS_H

#include "spw_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- parts of the state */

/*
 * Always fp32 in memory, and exactly what is stored. What is set is rounded as the state format rounds: not at all in fp32,
 * mixed, split and mixed-fp16, but for what spw_split_f32() says of the largest numbers; 8-bit moments share a scale among 64 elements, so that those
 * beside a range that does not begin and end at a multiple of 64 may be rounded anew.
 */
typedef enum spw_access_part {
    SPW_ACCESS_MASTER, /* the parameter; setting it sets the weight. Of a frozen one, which has nothing else, the weight */
    SPW_ACCESS_EXP_AVG,    /* the optimizer's first moment, whatever it calls it */
    SPW_ACCESS_EXP_AVG_SQ, /* and its second */
    SPW_ACCESS_WEIGHT,     /* what the forward pass reads: bf16, fp16 or fp32. Not to be set: set the master */
    SPW_ACCESS_GRAD,       /* of the step's loss, before clipping, as grad_dtype stores it. Not to be set */
    SPW_ACCESS_PART_COUNT
} spw_access_part;

/* Elements [first, first + count) of one part of a parameter; count 0: all from first on. */
typedef struct spw_access {
    const char *param;
    spw_access_part part;
    uint64_t first, count;
} spw_access;

/*
 * spw_access_find - fills in an access to all of a parameter, count too. part: "master", "weight", "grad", or a moment's name
 * ("exp_avg", "exp_avg_sq"; Lion, SGD and others have their own). out->param is the model's own copy of the name.
 */
spw_status
spw_access_find(spw_access *out, const spw_engine *engine, const char *param, const char *part, spw_error *err);

/* ---------------------------------------------------------------- get and set */

/* Elements of a parameter; count 0: this rank holds none of those that were asked for. */
typedef struct spw_stretch {
    uint64_t first, count;
} spw_stretch;

/*
 * spw_access_get_local - what of the range this rank holds.
 *   out   (held->count) its values; NULL: only held is wanted, and nothing is moved
 * Errors  SPW_EUNSUPPORTED, of set_local too, where ranks share the state and the range is in several pieces (spillway.tile_vocab): each rank
 *         holds a part of each
 */
spw_status spw_access_get_local(spw_engine *engine, const spw_access *a, float *out, spw_stretch *held, spw_error *err);
/*
 * spw_access_set_local - sets what of the range this rank holds.
 *   values  (held->count), as get_local says
 * The others see it in the next step or evaluation. Where every rank has everything, all of them must set the same.
 */
spw_status
spw_access_set_local(spw_engine *engine, const spw_access *a, const float *values, spw_stretch *held, spw_error *err);
/* Collective: all of the range on every rank. out (count). */
spw_status spw_access_get_full(spw_engine *engine, const spw_access *a, float *out, spw_error *err);
/*
 * spw_access_set_full - collective: sets all of the range to rank `from`'s values; the others may give NULL.
 *   values  (count)
 * Memory  with more than one rank, besides the budgets: this rank's stretch in fp32, and 1 MiB.
 */
spw_status
spw_access_set_full(spw_engine *engine, const spw_access *a, const float *values, uint32_t from, spw_error *err);

/* ---------------------------------------------------------------- whole parameters for a while */

/*
 * spw_gathered_begin - collective: whole fp32 copies of the masters of some parameters, on every rank, to read and to change.
 * spw_gathered_end   - writes all of them back as rank `from` has them, and frees them; SPW_GATHERED_DROP: frees them, and is
 *                      not collective then. They are freed in any case; NULL is fine.
 * Memory  the copies, besides the budgets.
 * Errors  of end: SPW_ESTALE when a step, or a load, has changed the parameters since begin; nothing is written.
 */
typedef struct spw_gathered spw_gathered;
enum { SPW_GATHERED_DROP = -1 };
spw_status
spw_gathered_begin(spw_gathered **out, spw_engine *engine, const char *const *params, uint32_t count, spw_error *err);
/* (elems) of parameter number i, as named to begin; elems_out may be NULL. Lent until end. */
float *spw_gathered_values(const spw_gathered *gathered, uint32_t i, uint64_t *elems_out);
spw_status spw_gathered_end(spw_gathered *gathered, int32_t from, spw_error *err);

/* ---------------------------------------------------------------- gradients, gathered weights, weights in a file */

/*
 * spw_engine_on_gradients - fn is called in every step from now on, when all gradients are there and before any update. NULL: none.
 * Inside it gradients may be read (SPW_ACCESS_GRAD), and nothing else may be done with the engine. All ranks set it or none.
 * Updates then wait for the whole backward pass; they compute the same. After a step that was skipped gradients are there until
 * the next step begins; after any other step they are gone.
 */
typedef void (*spw_gradients_fn)(void *ctx, spw_engine *engine);
void spw_engine_on_gradients(spw_engine *engine, spw_gradients_fn fn, void *ctx);

/*
 * spw_engine_release_gathered - collective: drops every weight that was gathered on the device for computing, and what was
 * to be fetched next. The device's memory stays the engine's; the next step fetches again.
 */
spw_status spw_engine_release_gathered(spw_engine *engine, spw_error *err);

/*
 * spw_engine_save_16bit - collective: a Hugging Face folder with the weights in bf16 or fp16; every rank writes what it holds.
 * The state format's own type is written as it is, which is what checkpoints have; another one is rounded from the masters,
 * once. config.json and tokenizer as in checkpoints; adapters lie beside the weights in files of their own, in fp32.
 * The folder appears when all is on disk. Folders above it are made.
 * Errors  SPW_ESYS (EEXIST) when there is such a folder, or one with ".partial" behind its name that is somebody else's; SPW_ENOSPC, SPW_EINVAL for another dtype
 *         and for a master that fp16 does not hold; nothing is left behind.
 */
spw_status spw_engine_save_16bit(spw_engine *engine, const char *folder, spw_dtype dtype, spw_error *err);

#ifdef __cplusplus
}
#endif
#endif
