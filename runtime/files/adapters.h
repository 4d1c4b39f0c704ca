/* Adapters in a folder as peft writes them, merged into weights on their way (adapters.c). */
#ifndef SPW_ADAPTERS_H
#define SPW_ADAPTERS_H

#include "files_internal.h"

/* Whether a folder has adapters and no weights that they could be beside. */
bool spw__adapters_alone(const char *folder);
/*
 * Of such a folder the one with the weights: named, or where that is NULL the one that adapter_config.json names, if it is a folder here.
 * Errors  SPW_ENOENT with what to do; SPW_EUNSUPPORTED for one that has adapters itself
 */
enum { SPW__BASE_BYTES = 1024 };
spw_status spw__adapters_base(const char *folder, const char *named, char base[SPW__BASE_BYTES], spw_error *err);

/*
 *   open   the adapters of a folder, for a model's parameters; folder and model stay the caller's, and stay. *out NULL: it has none.
 *          Errors  SPW_ECORRUPT, SPW_EUNSUPPORTED naming what it is that cannot be merged, SPW_ENOMEM
 *   take   the parameter to which elements are added from now on, whether it has an adapter or not; one thread, and none in add meanwhile.
 *          Errors  SPW_ECORRUPT for matrices of other shapes, SPW_ENOMEM
 *   adds   whether the one that was taken has an adapter
 *   add    scale B A to elements [first, first + n) of it: sums over the rank in rising order, in fp32. Any thread
 */
typedef struct spw__adapters spw__adapters;
spw_status spw__adapters_open(spw__adapters **out, const char *folder, const spw_model *model, spw_error *err);
void spw__adapters_close(spw__adapters *a); /* NULL is fine */
spw_status spw__adapters_take(spw__adapters *a, uint32_t param_id, spw_error *err);
bool spw__adapters_adds(const spw__adapters *a);
void spw__adapters_add(const spw__adapters *a, uint64_t first, uint64_t n, float *w);

#endif
