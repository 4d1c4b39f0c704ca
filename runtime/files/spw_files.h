/*
 * spw_files.h - safetensors files, read and written by ranges (docs/DESIGN.md, section 13; format: FORMATS S1).
 *
 *   u64 N | N bytes of JSON header, padded with spaces | tensor bytes, no holes
 */
#ifndef SPW_FILES_H
#define SPW_FILES_H

#include "spw_base.h"

enum { SPW_TENSOR_NAME_BYTES = 160, SPW_TENSOR_DIMS_MAX = 4 };

typedef struct spw_tensor_info {
    char name[SPW_TENSOR_NAME_BYTES];
    spw_dtype dtype;
    uint32_t ndim;
    uint64_t shape[SPW_TENSOR_DIMS_MAX];
    uint64_t begin, bytes; /* in the data buffer; set by the writer and the reader */
} spw_tensor_info;

/*
 * A writer knows all tensors beforehand, writes any range in any order from any thread, and commits with fsync, rename
 * and fsync of the folder. Until then the target does not exist (or is the old one); destroy removes an uncommitted file.
 */
typedef struct spw_st_writer spw_st_writer;
spw_status spw_st_writer_create(spw_st_writer **out, const char *path, const spw_tensor_info *tensors,
                                uint32_t tensor_count, spw_error *err);
/* bytes at offset of tensor i, i as given to create. Errors: SPW_ENOSPC, SPW_EIO naming the file. */
spw_status
spw_st_write(spw_st_writer *w, uint32_t i, uint64_t offset, const void *data, uint64_t bytes, spw_error *err);
spw_status spw_st_writer_commit(spw_st_writer *w, spw_error *err);
void spw_st_writer_destroy(spw_st_writer *w); /* NULL is fine */

/* A reader checks every rule of the format; errors are SPW_ECORRUPT and name file and field. */
typedef struct spw_st_reader spw_st_reader;
spw_status spw_st_reader_open(spw_st_reader **out, const char *path, spw_error *err);
void spw_st_reader_close(spw_st_reader *r); /* NULL is fine */
uint32_t spw_st_reader_count(const spw_st_reader *r);
const spw_tensor_info *spw_st_reader_tensor(const spw_st_reader *r, uint32_t i);
const spw_tensor_info *spw_st_reader_find(const spw_st_reader *r, const char *name); /* NULL: not there */
spw_status
spw_st_read(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, void *data, uint64_t bytes, spw_error *err);

/* Whole small files. write: temporary file in the same folder, fsync, rename, fsync of the folder. */
spw_status spw_file_read_text(const char *path, uint64_t bytes_max, char **text_out, spw_error *err); /* spw_mem_free */
spw_status spw_file_write_text(const char *path, const char *text, spw_error *err);
spw_status spw_dir_make(const char *path, spw_error *err); /* with parents */
spw_status spw_dir_sync(const char *path, spw_error *err);
spw_status spw_dir_remove(const char *path, spw_error *err); /* files and folders below, without following links */

#endif
