/*
 * Files of torch.save, as PyTorch writes them since 1.6: a zip archive, nothing in it compressed, so each storage lies in the file as it is
 * in memory and is read by ranges. The tree beside them is a pickle, which is read and never run. Inside files.
 *
 *   NAME/data.pkl   the pickle        NAME/data/KEY   the bytes of a storage        NAME/byteorder   "little"
 *
 * Source  PyTorch's documentation of torch.save and torch.serialization; PKWARE's APPNOTE for zip and zip64.
 */
#ifndef SPW_TORCH_H
#define SPW_TORCH_H

#include "pickle.h"

/* Does a file of torch.save begin so? Those of before 1.6 too, which opening refuses: a pickle of a number that nobody else has. */
static inline bool
spw__torch_begins(const void *eight_bytes)
{
    return memcmp(eight_bytes, "PK\3\4", 4) == 0 || memcmp(eight_bytes, "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", 8) == 0;
}

typedef struct spw__torch spw__torch;
/*
 * Errors  SPW_ECORRUPT naming what is damaged, SPW_EUNSUPPORTED (no file of torch.save, an older form, compressed, big-endian),
 *         SPW_ENOMEM, and those of opening and reading.
 */
spw_status spw__torch_open(spw__torch **out, const char *path, spw_error *err);
/* The same of [base, base + bytes) of a file, which is such a file of its own. Where tensors begin is said of the whole file. */
spw_status spw__torch_open_at(spw__torch **out, const char *path, uint64_t base, uint64_t bytes, spw_error *err);
void spw__torch_close(spw__torch *t); /* NULL is fine */
const char *spw__torch_path(const spw__torch *t);
const spw__py *spw__torch_root(const spw__torch *t);
bool spw__torch_is_tensor(const spw__py *v);
/* An attribute that somebody gave a tensor; NULL: it has none of that name. */
const spw__py *spw__torch_attribute(const spw__py *v, const char *name);
/*
 * Type, shape and bytes of a tensor, and where in the file it begins; its name is the one given, which messages say too.
 * Errors  SPW_EINVAL: no tensor; SPW_EUNSUPPORTED: transposed or spread in its storage, or a type that no file here has; SPW_ECORRUPT: it
 *         does not lie in its storage, or the storage not in the file.
 */
spw_status
spw__torch_tensor(const spw__torch *t, const spw__py *v, const char *name, spw_tensor_info *out, spw_error *err);
/* The list of a torch.Size, or of what is one already. */
const spw__py *spw__torch_size(const spw__py *v);
/* The bytes of such a tensor. */
spw_status spw__torch_read(const spw__torch *t, const spw_tensor_info *tensor, void *data, spw_error *err);

#endif
