/* The tokenizers of tests/vectors (make_tokenizer_vectors.py), opened, changed and used; what fails ends the test. */
#ifndef LIB_TOKENIZER_H
#define LIB_TOKENIZER_H

#include "spw_tokenizer.h"
#include <jansson.h>

enum { TOK_NAMES = 14 };
extern const char *const tok_names[TOK_NAMES];

char *tok_read_file(const char *path, uint64_t *bytes);
/* The one token before a text; -1: none. */
int32_t tok_begin_of(const spw_tokenizer *t);
void tok_path_of(char path[300], const char *name);
spw_tokenizer *tok_open_named(const char *name);
void tok_encode(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special, spw_tokens *out);
uint64_t tok_decode(const spw_tokenizer *t, const spw_tokens *ids, char **text);
void tok_assert_same_ids(const char *what, uint64_t number, const spw_tokens *got, const spw_tokens *want);
/* Sets what stands at "a.b.0.c" to a JSON value; "-" takes it out. */
void tok_set_at(json_t *root, const char *where, const char *value);
json_t *tok_load_named(const char *name);
void tok_write_text(const char *dir, const char *name, const char *text);
void tok_write_json(const char *dir, const char *name, const json_t *v);

#endif
