/* What the parts of the tokenizer share; nobody else includes it but their test. */
#ifndef SPW_TOKENIZER_INTERNAL_H
#define SPW_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include "spw_tokenizer.h"
#include <jansson.h>
#include <pcre2.h>

enum {
    TOK_ID_MAX = (1 << 24) - 1,
    TOK_PATTERNS_MAX = 8,
    TOK_PATTERN_BYTES = 4096,
    TOK_PATH_BYTES = 4096,
    TOK_CACHE_ENTRIES = 16384,
    TOK_CACHED_BYTES = 22,
    TOK_CACHED_IDS = 10
};

enum { TOK_PRESENT = 1, TOK_SPECIAL = 2, TOK_ADDED = 4 };
typedef struct tok_token {
    uint64_t offset; /* in pool */
    uint32_t bytes;
    uint32_t flags;
} tok_token;

/* Two neighbours that become one; the lower rank goes first. */
typedef struct tok_pair {
    uint64_t key; /* left << 32 | right; UINT64_MAX: free */
    uint32_t rank;
    int32_t id;
} tok_pair;

/* A token that is looked for in the text before anything else is done to it. */
typedef struct tok_added {
    const char *text; /* what is looked for; for a normalized one, its normal form */
    uint64_t bytes;
    int32_t id;
    bool special, lstrip, rstrip, normalized;
} tok_added;
typedef struct tok_added_set {
    tok_added *list; /* sorted by bytes */
    uint32_t count;
    bool starts[256]; /* by first byte */
    bool signs;       /* a plain space stands for U+2581, which is no white space to lstrip and rstrip */
} tok_added_set;
typedef struct tok_match {
    uint64_t begin, end;
    int32_t id;
} tok_match;

/* What stands before a text of a vocabulary by characters: a space never, always, or at its very start unless one is there. */
typedef enum tok_prefix { TOK_PREFIX_NEVER, TOK_PREFIX_ALWAYS, TOK_PREFIX_MISSING, TOK_PREFIX_FIRST } tok_prefix;

typedef struct tok_pattern {
    pcre2_code *code;
    bool jit;
    bool alone; /* what lies between its matches is left out */
} tok_pattern;

typedef struct tok_cached {
    uint8_t bytes, ids; /* bytes 0: free */
    char text[TOK_CACHED_BYTES];
    int32_t id[TOK_CACHED_IDS];
} tok_cached;

/* What one encode needs; tokenizers keep those that are not in use. */
typedef struct tok_scratch {
    struct tok_scratch *next;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    tok_cached *cache; /* (TOK_CACHE_ENTRIES) */
    uint32_t *word;    /* arrays and heap for one long piece */
    uint64_t word_bytes;
    char *normal; /* normalized text */
    uint64_t normal_bytes;
    int32_t *points; /* code points of what is being normalized */
    uint64_t points_bytes;
} tok_scratch;

struct spw_tokenizer {
    /* Fixed after open; any thread may read. */
    char path[TOK_PATH_BYTES]; /* of the file with the vocabulary, for messages */
    tok_token *tokens;         /* (vocab) */
    uint64_t vocab;
    char *pool; /* all their bytes */
    uint64_t pool_bytes, pool_used;
    int32_t *by_text; /* hash table of ids by the bytes of model tokens; -1: free */
    uint64_t by_text_mask;
    tok_pair *pairs;
    uint64_t pair_mask;
    int32_t byte_id[256];
    bool ignore_merges, nfc, cuts;
    bool chars; /* as SentencePiece has it: merges begin with characters, words with a space (tokenizer_chars.c) */
    bool chars_early; /* spaces are made before added tokens are looked for the second time, not after */
    bool words;       /* no token has a space behind another character: nothing merges across a word's start */
    tok_prefix prefix;
    tok_added *added; /* (added_count) as in the file; owned here, the sets hold copies */
    uint32_t added_count;
    tok_added_set raw, normal;
    char *normal_pool; /* normal forms of added tokens */
    tok_pattern patterns[TOK_PATTERNS_MAX];
    uint32_t pattern_count;
    pcre2_general_context *memory;
    int32_t end;
    spw_begin begin;
    uint64_t key; /* of the files' bytes */
    /* Under lock. */
    pthread_mutex_t lock;
    tok_scratch *free_scratch;
};

/* Where the ids go, and what is needed to find them. */
typedef struct tok_run {
    const spw_tokenizer *t;
    tok_scratch *s;
    spw_tokens *out;
    spw_error *err;
    bool special;
    const char *begin; /* of the whole text */
    bool rest;         /* which is what follows a cut */
} tok_run;

/* tokenizer_json.c: everything that is read from files. t is zeroed but for its lock. */
spw_status spw__tok_load(spw_tokenizer *t, const char *path, spw_error *err);
/* "added_tokens_decoder" of tokenizer_config.json, {"50256": {...}}, as the list that tokenizer.json has. */
spw_status spw__tok_added_of_config(json_t **out, const json_t *config, const char *path, spw_error *err);

/* tokenizer_tiktoken.c: t->path is a tiktoken.model; config, NULL or the tokenizer_config.json beside it. */
spw_status spw__tok_tiktoken_load(spw_tokenizer *t, const json_t *config, const char *config_path, spw_error *err);

/* tokenizer_vocab.c: vocabulary, merges, what a token is. */
spw_status spw__tok_vocab_build(spw_tokenizer *t, json_t *vocab, json_t *added, const char *added_path, spw_error *err);
spw_status
spw__tok_merges_build(spw_tokenizer *t, json_t *vocab, json_t *merges, const char *path, bool lines, spw_error *err);
spw_status
spw__tok_merges_of_ranks(spw_tokenizer *t, spw_error *err); /* two tokens that are one together merge, by its id */
uint64_t
spw__tok_bytes_of(const char *spelled, char *bytes); /* byte alphabet to bytes; UINT64_MAX: not spelled in it */
void spw__tok_spell(const unsigned char *bytes, uint64_t count, char *spelled); /* and back; spelled (2 count + 1) */
int32_t spw__tok_by_text(const spw_tokenizer *t, const char *text, uint64_t bytes);

/*
 * tokenizer.c: the normal form of a text, in which added tokens are looked for the second time; prefix: with what the tokenizer
 * puts before a text. *out is text, or lies in s.
 */
spw_status spw__tok_normal(const spw_tokenizer *t, tok_scratch *s, bool prefix, const char *text, uint64_t bytes,
                           const char **out, uint64_t *bytes_out, spw_error *err);

/* tokenizer_bpe.c: one piece of text. */
spw_status spw__tok_word(const tok_run *r, const char *text, uint64_t bytes);
void spw__tok_pair_set(spw_tokenizer *t, uint32_t left, uint32_t right, uint32_t rank, int32_t id);

/* tokenizer_split.c: patterns. field names it in errors. */
enum { TOK_REGEX, TOK_LITERAL };
spw_status
spw__tok_pattern_add(spw_tokenizer *t, const char *text, int kind, const char *path, const char *field, spw_error *err);
spw_status spw__tok_split(const tok_run *r, const char *text, uint64_t bytes);
/*
 * Whether what stands before and behind a place in a text, 0 < at < bytes, is in two pieces by any pattern: before a line's end that follows a
 * letter or digit, and before a space between such and a letter. ends_word: whether one ends there.
 */
bool spw__tok_patterns_known(const char *const *patterns, uint64_t count); /* that never join those: of models here */
bool spw__tok_may_cut(const char *text, uint64_t bytes, uint64_t at);
bool spw__tok_ends_word(const char *text, uint64_t at);
extern const char *const spw__tok_gpt2_pattern, *const spw__tok_llama3_pattern, *const spw__tok_qwen2_pattern,
                                                                                    *const spw__tok_qwen3_5_pattern;
extern const char *const spw__tok_kimi_parts[]; /* up to NULL; the pattern has bars between them */

/* tokenizer_added.c: added tokens in text. */
spw_status spw__tok_added_build(spw_tokenizer *t, spw_error *err);
bool spw__tok_added_next(const tok_added_set *set, const char *text, uint64_t bytes, bool special, uint64_t *search,
                         uint64_t floor, tok_match *out);

const tok_added *spw__tok_added_find(const spw_tokenizer *t, const char *spelled); /* NULL: there is none */
/* Where white space that ends at `end` begins, at `floor` or later; where what begins at `at` ends. signs: as in tok_added_set. */
uint64_t spw__tok_space_before(const char *text, uint64_t floor, uint64_t end, bool signs);
uint64_t spw__tok_space_after(const char *text, uint64_t at, uint64_t bytes, bool signs);

/* tokenizer_chars.c: vocabularies by characters. */
/* The text as such a vocabulary sees it: *out lies in s until its next use. */
spw_status spw__tok_chars_form(tok_scratch *s, bool prefix, const char *text, uint64_t bytes, const char **out,
                               uint64_t *bytes_out, spw_error *err);
spw_status spw__tok_chars_split(const tok_run *r, const char *text, uint64_t bytes);
uint64_t spw__tok_chars_space(const char *text, uint64_t bytes); /* of the space that text begins with; 0: none */
/* A text's first tokens: each character's, or its bytes' where it has none. ids (bytes) out; returns how many. */
uint64_t spw__tok_chars_ids(const spw_tokenizer *t, const char *text, uint64_t bytes, uint32_t *ids);
/* What a spelled token stands for: bytes (as many as spelled has) and returns how many; *byte: it is the token of that byte. */
uint64_t spw__tok_chars_of(const char *spelled, char *bytes, int *byte);
/* Normalizer, pre-tokenizer and decoder of tokenizer.json; SPW_EUNSUPPORTED names what is not known. */
spw_status spw__tok_chars_load(spw_tokenizer *t, const json_t *root, const char *path, spw_error *err);

/* tokenizer_unicode.c: UTF-8 and NFC. */
uint32_t spw__utf8_next(const char *text, uint64_t bytes, uint32_t *point); /* length, 0: not UTF-8; bytes > 0 */
uint64_t spw__utf8_valid(const char *text, uint64_t bytes);                 /* how many bytes are UTF-8 from here on */
bool spw__is_space(uint32_t point);                                         /* Unicode's White_Space */
/* NFC of a text; what is not UTF-8 stays as it is. *out is text itself, or lies in s until its next use. */
spw_status
spw__tok_nfc(tok_scratch *s, const char *text, uint64_t bytes, const char **out, uint64_t *bytes_out, spw_error *err);

/* tokenizer.c: appends the ids of what stands between two added tokens; first: at a text's beginning. Special tokens are text. */
spw_status spw__tok_stretch(const spw_tokenizer *t, const char *text, uint64_t bytes, bool first, spw_tokens *tokens,
                            spw_error *err);
spw_status spw__tok_grow(void **array, uint64_t *have_bytes, uint64_t want_bytes, uint64_t keep_bytes, const char *what,
                         spw_error *err);

#endif
