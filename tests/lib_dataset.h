/* Files of training data in a folder of the test that runs, and reading them. Errors fail the test. */
#ifndef LIB_DATASET_H
#define LIB_DATASET_H

#include "spw_data.h"
#include <stdio.h>

enum { T = 10 }; /* tokens of a window */

/* A test in a folder of its own, for cmocka's table. */
#define IN_DIR(f) cmocka_unit_test_setup_teardown(f, dataset_dir_make, dataset_dir_remove)
extern char dataset_dir[256];
int dataset_dir_make(void **state);
int dataset_dir_remove(void **state);
/* The path of a name in the folder; valid until the eighth call from here. */
const char *dataset_path(const char *name);

void dataset_write_bytes(const char *name, const void *data, size_t bytes);
void dataset_write_text(const char *name, const char *text);
/* Bytes whose window w starts with byte first + w. */
void dataset_write_windows(const char *name, int bytes, int first);
/* llmq's stream of `count` tokens, i is base + i; every third has no loss where loss is so asked for. */
void dataset_write_llmq(const char *name, uint64_t version, uint64_t count, uint64_t base, bool loss);
/* llm.c's stream of `count` tokens; token i is base + i. */
void dataset_write_llmc(const char *name, uint64_t magic, uint64_t version, uint64_t count, uint64_t base);
/* Megatron's dataset: sequences of the lengths given; token i is base + i. documents: first sequence of each, and the end. */
void dataset_write_megatron(const char *prefix, int code, int width, uint64_t base, const uint32_t *lengths,
                            uint64_t sequences, const uint64_t *documents, uint64_t ends);
/* x in that many bytes, little-endian, as the formats are: at the end of f, and over bytes of a file. */
void dataset_put(FILE *f, uint64_t x, int bytes);
void dataset_patch(const char *name, long offset, uint64_t x, int bytes);

/* Options for one file or glob of the folder; valid until the eighth call from here. */
spw_data_options dataset_options(const char *pattern);
/* Opening may fail; the others may not. */
spw_status dataset_try(spw_data **d, const char *pattern, double split, uint64_t seed, spw_error *err);
spw_data *dataset_open(const spw_data_options *o);
void
dataset_fill(const spw_data *d, spw_split split, uint64_t first, uint64_t count, int32_t *tokens, int32_t *targets);
/* Opening fails with this status, leaves nothing, and the message holds all of the texts up to NULL. */
void dataset_refuse(const spw_data_options *o, spw_status st, ...);

#endif
