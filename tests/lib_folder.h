/*
 * A folder of tensors of any types, with its config.json, that a test may change before it writes it: what no writer here makes, such as weights that
 * are published as codes. tests/vectors/scaled has those that others made.
 */
#ifndef LIB_FOLDER_H
#define LIB_FOLDER_H

#include "lib_tiny.h"
#include "spw_files.h"

enum { TENSORS_MAX = 80, TEXT_BYTES = 8192 };

typedef struct folder {
    char config[TEXT_BYTES];
    struct tensor {
        char name[SPW_TENSOR_NAME_BYTES], type[16];
        uint64_t shape[2], bytes;
        uint32_t ndim;
        void *data;
    } tensors[TENSORS_MAX];
    uint32_t count;
    char dir[256]; /* that it is written to */
} folder;

/* Of a vector of that name. */
void folder_path(char path[400], const char *name, const char *file);
folder *folder_make(void);
folder *folder_read(const char *name);
void folder_write(const folder *f);
void folder_free(folder *f);
/* Takes memory for its data, which the caller fills. */
struct tensor *
folder_add(folder *f, const char *name, const char *type, uint32_t ndim, const uint64_t *shape, uint64_t bytes);
struct tensor *folder_find(folder *f, const char *name);
/* Replaces the first place in config.json where what is. */
void folder_replace(folder *f, const char *what, const char *with);

#endif
