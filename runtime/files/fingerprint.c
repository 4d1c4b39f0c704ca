/*
 * What the weights of a folder are known by, whatever its name is and however it is cut into files: names, types and shapes of tensors, and some
 * bytes of each. Of two fine-tunings of one model every tensor differs.
 */
#include "files_internal.h"
#include <string.h>

enum { SAMPLES = 4, SAMPLE_BYTES = 256 };

/* Of one tensor: bytes at its begin, at its end, and between. */
static spw_status
sum_tensor(spw_hf_reader *r, uint32_t i, uint64_t *sum, spw_error *err)
{
    const spw_tensor_info *t = spw_hf_reader_tensor(r, i, NULL);
    const uint64_t n = t->bytes < SAMPLE_BYTES ? t->bytes : SAMPLE_BYTES;
    uint64_t own = spw_checksum(t->name, strlen(t->name));
    unsigned char bytes[SAMPLE_BYTES];
    own = spw_checksum_more(own, t->type, strlen(t->type));
    own = spw_checksum_more(own, t->shape, t->ndim * sizeof *t->shape);
    for (uint64_t k = 0; k < SAMPLES; k++) {
        SPW_TRY(spw_hf_read(r, i, (t->bytes - n) * k / (SAMPLES - 1), bytes, n, err));
        own = spw_checksum_more(own, bytes, n);
    }
    *sum += own;
    return SPW_OK;
}

spw_status
spw_hf_fingerprint(const char *folder, uint64_t *out, spw_error *err)
{
    spw_hf_reader *r = NULL;
    spw_status st = spw_hf_reader_open(&r, folder, err);
    *out = 0;
    for (uint32_t i = 0; st == SPW_OK && i < spw_hf_reader_count(r); i++)
        st = sum_tensor(r, i, out, err);
    spw_hf_reader_close(r);
    return st;
}
